"""The row kernel of the pick: from logits to a token and its log-odds, in two launches over the vocabulary.

`pick_rows` has a Triton kernel and a plain PyTorch twin, `pick_rows_ref`. The logits are those of a matrix product: on a GPU in
float32, so that no two of them tie by rounding.
"""

import torch
from torch import Tensor

from .dispatch import MULTIPLY_ADD, Dispatch, ceil_div, power_of_two, processors, tl, triton
from .noise import gumbel_noise
from .unembedding import Unembedding, log_odds

if triton is not None:
    from .noise import gumbel_of_bits, token_noise_bits

_NO_GPU = 1  # multiprocessors that are assumed where kernels are interpreted
_TILE_VOCAB = 512
_TILE_ROWS = 4


def pick_rows(
    unembedding: Unembedding,
    logits: Tensor,
    shown: Tensor,
    least: Tensor | None,
    keys: Tensor | None,
    dispatch: Dispatch,
) -> tuple[Tensor, Tensor]:
    """Pick the token of the largest logit, or of the largest logit plus noise: a sample. Of equals the first.

    NaN counts as larger than any number, as in `torch.argmax`. Where the token's own score is not finite (all are -inf, or one
    is NaN or infinite) there is nothing to pick: the log-odds are NaN. Probabilities are those among all tokens.

    Floor: n * vocab * element size bytes read once (39 MB for 64 rows of 151,936 in float32: 9 us at 4.3 TB/s).

    Args:
        unembedding: The distributions.
        logits: [n, vocab], its logits, barred and processed or not.
        shown: The same, or with -inf for tokens that must not be picked.
        least: [n], the least logit that may be picked; or None.
        keys: [n] long, from `noise_keys`, to sample; None: greedy.
        dispatch: Kernel or PyTorch.

    Returns:
        Places [n] long in the unembedding's vocabulary, and log-odds [n] in at least float32.

    Raises:
        ValueError: if kernels are forced and cannot be used.
    """
    if shown is not logits:
        return pick_rows_ref(unembedding, logits, shown, least, keys)
    return dispatch.run(
        "pick",
        lambda: _pick_kernel(unembedding, logits, least, keys),
        lambda: pick_rows_ref(unembedding, logits, shown, least, keys),
        logits,
    )


def pick_rows_ref(
    unembedding: Unembedding, logits: Tensor, shown: Tensor, least: Tensor | None, keys: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`pick_rows` in PyTorch."""
    scores = unembedding.tempered(logits)
    seen = scores if shown is logits else unembedding.tempered(shown)
    if least is not None:
        seen = seen.masked_fill(logits < least[:, None], -torch.inf)
    if keys is not None:
        ids = scores.shape[1] if unembedding.token_ids is None else unembedding.token_ids
        seen = seen + gumbel_noise(keys, ids, scores.dtype)
    token = seen.argmax(-1)
    return token, log_odds(scores, token, True)


def _pick_kernel(unembedding: Unembedding, logits: Tensor, least: Tensor | None, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """Two launches: of slices of the vocabulary, and of what they found."""
    logits = logits.contiguous()
    (rows, vocab), device = logits.shape, logits.device
    token = torch.empty(rows, dtype=torch.long, device=device)
    odds = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return token, odds
    tile = min(_TILE_ROWS, power_of_two(rows))
    wanted = max(1, 8 * processors(device, _NO_GPU) // ceil_div(rows, tile))  # more programs, since none loads ahead
    length = ceil_div(ceil_div(vocab, wanted), 16) * 16
    slices = ceil_div(vocab, length)
    place = torch.empty(rows, slices, dtype=torch.int32, device=device)
    best, own, others = torch.empty(3, rows, slices, dtype=torch.float32, device=device)
    _score_slices[(ceil_div(rows, tile), slices)](
        *(logits, least, keys, unembedding.token_ids, best, place, own, others),
        *(rows, vocab, slices, length, 1.0 / unembedding.temperature),
        TILE_ROWS=tile,
        TILE_VOCAB=_TILE_VOCAB,
        num_warps=4,
        **MULTIPLY_ADD,
        num_stages=1,
    )
    merged = max(1, min(16, 2048 // power_of_two(slices)))  # rows of a program
    _merge_slices[(ceil_div(rows, merged),)](
        *(best, place, own, others, token, odds, rows, slices),
        TILE_ROWS=merged,
        TILE_SLICES=power_of_two(slices),
        num_warps=4,
        **MULTIPLY_ADD,
    )
    return token, odds


if triton is not None:

    @triton.jit
    def _log_add(a, b):  # type: ignore[no-untyped-def]
        """log(exp(a) + exp(b)), also of infinities; NaN if either is."""
        most = tl.maximum(a, b)
        most = tl.where(tl.abs(most) == float("inf"), 0.0, most)
        return most + tl.log(tl.exp(a - most) + tl.exp(b - most))

    @triton.jit
    def _log_sum(x, axis: tl.constexpr):  # type: ignore[no-untyped-def]
        """log of the sum of exp(x) along an axis; likewise."""
        most = tl.max(x, axis)
        most = tl.where(tl.abs(most) == float("inf"), 0.0, most)
        return most + tl.log(tl.sum(tl.exp(x - tl.expand_dims(most, axis)), axis))

    # Sizes that change from call to call are not compiled for; `vocab` and `slice_length` tell of aligned rows.
    @triton.jit(do_not_specialize=["rows", "slices"])
    def _score_slices(  # type: ignore[no-untyped-def]
        logits_in,
        least,
        keys,
        token_ids,
        best_out,
        place_out,
        own_out,
        others_out,
        rows,
        vocab,
        slices,
        slice_length,
        inverse_temperature,
        TILE_ROWS: tl.constexpr,
        TILE_VOCAB: tl.constexpr,
    ):
        """Of one slice of the vocabulary, for each row of a tile: the best score and its place, that token's logit (`own`), and
        the log-sum-exp of all other logits. None under `least` is the best."""
        row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        in_rows = row < rows
        begin = tl.program_id(1) * slice_length
        end = tl.minimum(begin + slice_length, vocab)
        lowest = tl.full((TILE_ROWS,), float("-inf"), dtype=tl.float32)
        best, others, own = lowest, lowest, lowest
        place = tl.full((TILE_ROWS,), 0, dtype=tl.int32) + begin
        for first in range(begin, end, TILE_VOCAB):
            token = first + tl.arange(0, TILE_VOCAB)
            in_slice = token < end
            cell = row.to(tl.int64)[None, :] * vocab + token[:, None]
            logits = tl.load(logits_in + cell, mask=in_rows[None, :] & in_slice[:, None], other=0.0).to(tl.float32)
            raw = tl.where(in_slice[:, None], logits * inverse_temperature, float("-inf"))
            shown = raw
            if keys is not None:
                ids = token
                if token_ids is not None:
                    ids = tl.load(token_ids + token, mask=in_slice, other=0).to(tl.int32)
                shown = raw + gumbel_of_bits(token_noise_bits(tl.load(keys + row, mask=in_rows, other=0), ids))
            if least is not None:
                lowest_shown = tl.load(least + row, mask=in_rows, other=0.0).to(tl.float32)
                shown = tl.where(logits < lowest_shown[None, :], float("-inf"), shown)
            shown = tl.where(shown != shown, float("inf"), shown)  # NaN is more than any number
            top = tl.max(shown, 0)
            at = tl.min(tl.where(shown == top[None, :], token[:, None], 0x7FFFFFFF), 0)
            chosen = token[:, None] == at[None, :]
            logit = tl.sum(tl.where(chosen, raw, 0.0), 0)
            rest = _log_sum(tl.where(chosen, float("-inf"), raw), 0)
            wins = top > best
            others = _log_add(_log_add(others, rest), tl.where(wins, own, logit))
            best, place, own = tl.where(wins, top, best), tl.where(wins, at, place), tl.where(wins, logit, own)
        out = row.to(tl.int64) * slices + tl.program_id(1)
        tl.store(best_out + out, best, mask=in_rows)
        tl.store(place_out + out, place, mask=in_rows)
        tl.store(own_out + out, own, mask=in_rows)
        tl.store(others_out + out, others, mask=in_rows)

    @triton.jit(do_not_specialize=["rows", "slices"])
    def _merge_slices(  # type: ignore[no-untyped-def]
        best_in,
        place_in,
        own_in,
        others_in,
        token_out,
        odds_out,
        rows,
        slices,
        TILE_ROWS: tl.constexpr,
        TILE_SLICES: tl.constexpr,
    ):
        """The results of a tile of rows from those of their slices: the losers' own logits join the others."""
        row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        in_rows = row < rows
        piece = tl.arange(0, TILE_SLICES)[None, :]
        valid = in_rows[:, None] & (piece < slices)
        at = row.to(tl.int64)[:, None] * slices + piece
        own = tl.load(own_in + at, mask=valid, other=0.0)
        others = _log_sum(tl.load(others_in + at, mask=valid, other=float("-inf")), 1)
        best = tl.load(best_in + at, mask=valid, other=float("-inf"))
        top = tl.max(best, 1)
        winner = tl.min(tl.where(valid & (best == top[:, None]), piece, TILE_SLICES), 1)
        wins = piece == winner[:, None]
        token = tl.sum(tl.where(wins, tl.load(place_in + at, mask=valid, other=0), 0), 1).to(tl.int64)
        logit = tl.sum(tl.where(wins, own, 0.0), 1)
        others = _log_add(others, _log_sum(tl.where(valid & (piece != winner[:, None]), own, float("-inf")), 1))
        odds = tl.where(tl.abs(logit) == float("inf"), float("nan"), logit - others)
        tl.store(token_out + row, token, mask=in_rows)
        tl.store(odds_out + row, odds, mask=in_rows)


__all__ = ["pick_rows", "pick_rows_ref"]
