"""The vocabulary-wide step: from hidden states to a token and its log-odds, fused over the vocabulary on CUDA.

`pick`, `pick_above` and `token_log_odds` have a Triton kernel for 16-bit weights and a plain PyTorch twin (`*_ref`) here. The
twin takes float32 also where kernels are forced: there are no matrix units for it, and cuBLAS is faster. But for `pick_above`,
which is given logits, the kernels never write [rows, vocab]. Their logits are float32 sums of products, where PyTorch rounds
them to 16 bits: the two agree up to that rounding, so up to near-ties in the token.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .dispatch import AUTOMATIC, MULTIPLY_ADD, PYTORCH, Dispatch, ceil_div, power_of_two, processors, tensor_memory, tl, triton
from .unembedding import Picked, Unembedding, log_odds, widened

if triton is not None:
    from .noise import gumbel_of_bits, token_noise_bits

_NO_GPU = 1  # multiprocessors that are assumed where kernels are interpreted


def pick(
    unembedding: Unembedding,
    hidden: Tensor,
    keys: Tensor | None = None,
    no_eos: Tensor | None = None,
    active: Tensor | None = None,
    dispatch: Dispatch = AUTOMATIC,
) -> Picked:
    """The token of the largest logit, or of the largest logit plus noise: a sample. Of equals the first.

    NaN counts as larger than any number, as in `torch.argmax`. Where the token's own score is not finite (all are -inf, or one
    is NaN or infinite) there is nothing to pick: log-probability and log-odds are NaN.

    Args:
        unembedding: The distributions.
        hidden: [n, hidden_size] final hidden states.
        keys: [n] long, from `noise_keys`, to sample; None: greedy.
        no_eos: [n] bool, positions that take none of the unembedding's `eos_token_ids`.
        active: [n] bool, positions that need a pick; the others get token 0 with log-probability and log-odds -inf.
        dispatch: Kernel or PyTorch.

    Raises:
        ValueError: if the shapes, dtypes or devices do not fit together, or kernels are forced and cannot be used.
    """
    _check(unembedding.weight, hidden, keys=keys, no_eos=no_eos, active=active)
    return _of_dtype(unembedding.weight, dispatch).run(
        "pick",
        lambda: _pick_kernel(unembedding, hidden, keys, None, no_eos, active),
        lambda: pick_ref(unembedding, hidden, keys, no_eos, active),
        unembedding.weight,
        hidden,
        obstacle=_layout(unembedding.weight),
    )


def token_log_odds(
    unembedding: Unembedding,
    hidden: Tensor,
    token: Tensor,
    no_eos: Tensor | None = None,
    active: Tensor | None = None,
    dispatch: Dispatch = AUTOMATIC,
) -> Tensor:
    """[n] log-odds of given tokens: what `pick` gives for one that it picks.

    Args:
        unembedding: The distributions.
        hidden: [n, hidden_size].
        token: [n] long, places in the unembedding's vocabulary.
        no_eos: As in `pick`.
        active: [n] bool, positions of interest; -inf at the others.
        dispatch: Kernel or PyTorch.

    Raises:
        ValueError: as `pick` does.
    """
    _check(unembedding.weight, hidden, token=token, no_eos=no_eos, active=active)
    return _of_dtype(unembedding.weight, dispatch).run(
        "token_log_odds",
        lambda: _pick_kernel(unembedding, hidden, None, token, no_eos, active).log_odds,
        lambda: token_log_odds_ref(unembedding, hidden, token, no_eos, active),
        unembedding.weight,
        hidden,
        obstacle=_layout(unembedding.weight),
    )


def pick_ref(
    unembedding: Unembedding,
    hidden: Tensor,
    keys: Tensor | None = None,
    no_eos: Tensor | None = None,
    active: Tensor | None = None,
) -> Picked:
    """`pick` in PyTorch, walked in chunks of rows so that no [n, vocab] logits exist for large n."""
    parts = []
    for at in unembedding.chunks(len(hidden)):
        scores = unembedding.tempered(unembedding.logits(hidden[at]), None if no_eos is None else no_eos[at])
        token = unembedding.shown(scores, None if keys is None else keys[at]).argmax(-1)
        parts.append((token if unembedding.token_ids is None else unembedding.token_ids[token], *log_odds(scores, token, True)))
    return _where_active(Picked(*(torch.cat(part) for part in zip(*parts, strict=True))), active)


def pick_above_ref(
    unembedding: Unembedding, logits: Tensor, least: Tensor, keys: Tensor | None = None, active: Tensor | None = None
) -> Picked:
    """`pick_above` in PyTorch."""
    scores = unembedding.tempered(widened(logits), None)
    token = unembedding.shown(scores.masked_fill(logits < least[:, None], -torch.inf), keys).argmax(-1)
    ids = token if unembedding.token_ids is None else unembedding.token_ids[token]
    return _where_active(Picked(ids, *log_odds(scores, token, True)), active)


def _where_active(picked: Picked, active: Tensor | None) -> Picked:
    if active is None:
        return picked
    return Picked(picked.token * active, *(numbers.where(active, -torch.inf) for numbers in picked[1:]))


def token_log_odds_ref(
    unembedding: Unembedding, hidden: Tensor, token: Tensor, no_eos: Tensor | None = None, active: Tensor | None = None
) -> Tensor:
    """`token_log_odds` in PyTorch, in chunks of rows."""
    parts = [
        log_odds(unembedding.tempered(unembedding.logits(hidden[at]), None if no_eos is None else no_eos[at]), token[at])[1]
        for at in unembedding.chunks(len(hidden))
    ]
    odds = torch.cat(parts)
    return odds if active is None else odds.where(active, -torch.inf)


def pick_above(
    unembedding: Unembedding,
    logits: Tensor,
    least: Tensor,
    keys: Tensor | None = None,
    active: Tensor | None = None,
    dispatch: Dispatch = AUTOMATIC,
) -> Picked:
    """Pick among tokens whose logits are not under a threshold; probabilities are those among all tokens.

    Args:
        unembedding: The distributions.
        logits: [n, vocab], the unembedding's `product` of hidden states, `barred` or not.
        least: [n] of the same dtype, the least logit that may be picked.
        keys: [n] long, from `noise_keys`, to sample; None: greedy.
        active: As in `pick`.
        dispatch: Kernel or PyTorch.

    Raises:
        ValueError: if kernels are forced and cannot be used.
    """
    return _of_dtype(logits, dispatch).run(
        "pick_above",
        lambda: _pick_above_kernel(unembedding, logits, least, keys, active),
        lambda: pick_above_ref(unembedding, logits, least, keys, active),
        logits,
        least,
    )


def residual_magnitude(weight: Tensor, hidden: Tensor, token: Tensor) -> Tensor:
    """Take the magnitude of one token's logit per row: one dot product each.

    Args:
        weight: [vocab, hidden_size].
        hidden: [n, hidden_size].
        token: [n] long, rows of `weight`.

    Returns:
        [n], in at least float32.
    """
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return (hidden.to(wide) * weight[token].to(wide)).sum(-1).abs()


@dataclass(frozen=True)
class Plan:
    """Plan of how the kernel of `pick` cuts its work. Each program reads a slice of the vocabulary for a tile of rows.

    Attributes:
        rows: Of a tile.
        vocab: Tokens of a tile; a slice is a run of them.
        hidden: Of a tile: how much of a dot product is computed at once.
        slices: Of the vocabulary.
        slice_length: Tokens of a slice; the last may have fewer.
        num_warps: Of a program.
        num_stages: Tiles of weights in flight.
    """

    rows: int
    vocab: int
    hidden: int
    slices: int
    slice_length: int
    num_warps: int
    num_stages: int

    @staticmethod
    def of(rows: int, vocab_size: int, processors: int, tensor_memory: bool = False) -> "Plan":
        """Make the plan for `rows` hidden states on a GPU with so many multiprocessors, whose products lie in tensor memory.

        The one place to tune. With 8 warps no tile spills registers, also where noise is computed beside its logits: 4 warps
        would keep 500 bytes a thread in local memory with 64 rows, as 8 would on their way out of tensor memory with 128
        tokens. Tiles of more rows run side by side, so that all but the first find the weights in the L2 cache.
        """
        tile = min(64, max(16, power_of_two(rows)))
        vocab = 64 if tensor_memory and tile == 64 else 128
        return Plan._cut(Plan(tile, vocab, 64, 1, vocab_size, 8, 4), rows, 2 * processors)

    @staticmethod
    def of_logits(rows: int, vocab_size: int, processors: int) -> "Plan":
        """Make the plan for `rows` of logits, which are only read: more programs, since none loads ahead."""
        return Plan._cut(Plan(min(4, power_of_two(rows)), 512, 1, 1, vocab_size, 4, 1), rows, 8 * processors)

    def _cut(self, rows: int, programs: int) -> "Plan":
        """Slices of the vocabulary, of which each is for a program of one tile of rows."""
        wanted = max(1, programs // max(1, ceil_div(rows, self.rows)))
        length = ceil_div(ceil_div(self.slice_length, wanted), 16) * 16
        return replace(self, slices=ceil_div(self.slice_length, length), slice_length=length)


def _check(weight: Tensor, hidden: Tensor, **per_row: Tensor | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden has shape {list(hidden.shape)} and weight {list(weight.shape)}: pass [n, size] and [vocab, size]"
        )
    for name, values in per_row.items():
        if values is not None and values.shape != hidden.shape[:1]:
            raise ValueError(f"{name} has shape {list(values.shape)} for {len(hidden)} rows of hidden: pass [{len(hidden)}]")


def _layout(weight: Tensor) -> str | None:
    """Find what about the weights keeps kernels from them."""
    if type(weight) not in (Tensor, nn.Parameter):  # its numbers lie elsewhere: its own address is null
        return f"weight is a {type(weight).__name__}: keep lm_head out of quantization"
    if weight.stride(1) == 1 and len(weight):
        return None
    return f"weight has shape {list(weight.shape)} and strides {weight.stride()}: pass rows that are contiguous"


def _of_dtype(weight: Tensor, dispatch: Dispatch) -> Dispatch:
    """A dispatch to PyTorch for float32, also where kernels are forced."""
    return PYTORCH if weight.dtype == torch.float32 else dispatch


def _bytes(flags: Tensor) -> Tensor:
    return flags.contiguous().view(torch.uint8)


def _ids(tokens: tuple[int, ...], device: torch.device) -> Tensor:
    """[n] int32 on the device, filled there: a copy from the host would make it wait."""
    return torch.stack([torch.full((), token, dtype=torch.int32, device=device) for token in tokens])


def _pick_kernel(
    unembedding: Unembedding,
    hidden: Tensor,
    keys: Tensor | None,
    given: Tensor | None,
    no_eos: Tensor | None,
    active: Tensor | None,
    plan: Plan | None = None,
) -> Picked:
    """Floor: vocab * hidden_size * element size bytes (778 MB for 151,936 x 2,560 in bfloat16: 0.18 ms at 4.3 TB/s), and
    2 * rows * vocab * hidden_size operations (50 GFLOP for 64 rows: 0.06 ms at 790 TFLOP/s)."""
    rows, vocab, device = len(hidden), len(unembedding.weight), hidden.device
    plan = plan or Plan.of(rows, vocab, processors(device, _NO_GPU), tensor_memory(device))
    barred = None if no_eos is None or not unembedding.eos_token_ids else _ids(unembedding.eos_token_ids, device)
    return _pick_in_slices(
        unembedding, plan, hidden.contiguous(), None, None, keys, given, None if barred is None else no_eos, barred, active
    )


def _pick_above_kernel(
    unembedding: Unembedding,
    logits: Tensor,
    least: Tensor,
    keys: Tensor | None,
    active: Tensor | None,
    plan: Plan | None = None,
) -> Picked:
    """Floor: rows * vocab * element size bytes (19 MB for 64 rows of 151,936: 5 us at 4.3 TB/s)."""
    plan = plan or Plan.of_logits(len(logits), logits.shape[1], processors(logits.device, _NO_GPU))
    return _pick_in_slices(unembedding, plan, None, logits.contiguous(), least.contiguous(), keys, None, None, None, active)


def _pick_in_slices(
    unembedding: Unembedding,
    plan: Plan,
    hidden: Tensor | None,
    logits: Tensor | None,
    least: Tensor | None,
    keys: Tensor | None,
    given: Tensor | None,
    no_eos: Tensor | None,
    barred: Tensor | None,
    active: Tensor | None,
) -> Picked:
    """Two launches, of slices and of what they found; from hidden states, or from `logits`."""
    source = hidden if hidden is not None else logits
    assert source is not None
    rows, device, (vocab, size) = len(source), source.device, unembedding.weight.shape
    stride = unembedding.weight.stride(0) if logits is None else logits.stride(0)
    picked = Picked(
        torch.empty(rows, dtype=torch.long, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )
    if not rows:
        return picked
    keys, given = (t if t is None else t.contiguous() for t in (keys, given))
    no_eos, active = (t if t is None else _bytes(t) for t in (no_eos, active))
    place = torch.empty(rows, plan.slices, dtype=torch.int32, device=device)
    best, own, others = torch.empty(3, rows, plan.slices, dtype=torch.float32, device=device)
    _score_slices[(ceil_div(rows, plan.rows), plan.slices)](
        *(hidden, None if hidden is None else unembedding.weight, logits, least),
        *(keys, given, no_eos, barred, active, unembedding.token_ids, best, place, own, others),
        *(rows, vocab, size, stride, plan.slices, plan.slice_length),
        unembedding.mask_token_id if unembedding.token_ids is None else -1,
        0 if barred is None else len(barred),
        1.0 / unembedding.temperature,
        TILE_ROWS=plan.rows,
        TILE_VOCAB=plan.vocab,
        TILE_HIDDEN=plan.hidden,
        INTERPRETED=triton.knobs.runtime.interpret,
        num_warps=plan.num_warps,
        **MULTIPLY_ADD,
        num_stages=plan.num_stages,
    )
    merged = max(1, min(16, 2048 // power_of_two(plan.slices)))  # rows of a program
    _merge_slices[(ceil_div(rows, merged),)](
        *(best, place, own, others, given, active, unembedding.token_ids),
        *picked,
        rows,
        plan.slices,
        TILE_ROWS=merged,
        TILE_SLICES=power_of_two(plan.slices),
        num_warps=4,
        **MULTIPLY_ADD,
    )
    return picked


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

    @triton.jit
    def _tile_logits(  # type: ignore[no-untyped-def]
        hidden,
        weight,
        row,
        in_rows,
        token,
        in_slice,
        size,
        stride,
        TILE_ROWS: tl.constexpr,
        TILE_VOCAB: tl.constexpr,
        TILE_HIDDEN: tl.constexpr,
        INTERPRETED: tl.constexpr,
    ):
        """[TILE_VOCAB, TILE_ROWS] float32: the vocabulary is the long side, since it fills the matrix units with few rows."""
        column = tl.arange(0, TILE_HIDDEN)
        weights = weight + token.to(tl.int64)[:, None] * stride + column[None, :]
        states = hidden + row.to(tl.int64)[:, None] * size + column[None, :]
        logits = tl.full((TILE_VOCAB, TILE_ROWS), 0.0, dtype=tl.float32)
        for begin in range(0, size, TILE_HIDDEN):
            inside = (begin + column < size)[None, :]
            w = tl.load(weights + begin, mask=in_slice[:, None] & inside, other=0.0)
            h = tl.load(states + begin, mask=in_rows[:, None] & inside, other=0.0)
            if INTERPRETED:  # where a bfloat16 is an integer to tl.dot
                w, h = w.to(tl.float32), h.to(tl.float32)
            logits = tl.dot(w, tl.trans(h), logits, input_precision="ieee")
        return logits

    # Sizes that change from call to call are not compiled for; `vocab`, `size`, `stride`, `slice_length` tell of aligned rows.
    @triton.jit(do_not_specialize=["rows", "slices", "mask_token_id", "barred_count"])
    def _score_slices(  # type: ignore[no-untyped-def]
        hidden,
        weight,
        logits_in,
        least,
        keys,
        given,
        no_eos,
        barred,
        active,
        token_ids,
        best_out,
        place_out,
        own_out,
        others_out,
        rows,
        vocab,
        size,
        stride,
        slices,
        slice_length,
        mask_token_id,
        barred_count,
        inverse_temperature,
        TILE_ROWS: tl.constexpr,
        TILE_VOCAB: tl.constexpr,
        TILE_HIDDEN: tl.constexpr,
        INTERPRETED: tl.constexpr,
    ):
        """Of one slice of the vocabulary, for each row of a tile: the best score and its place, that token's logit (`own`), and
        the log-sum-exp of all other logits. With a `given` token, that one in place of the best. Logits are products of
        `hidden` and `weight`, or those of `logits_in`, of which none under `least` is the best."""
        row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        in_rows = row < rows
        live = in_rows
        if active is not None:
            live = in_rows & (tl.load(active + row, mask=in_rows, other=0) != 0)
        begin = tl.program_id(1) * slice_length
        end = tl.minimum(begin + slice_length, vocab)
        end = tl.where(tl.max(live.to(tl.int32), 0) > 0, end, begin)  # a tile of rows that need nothing reads nothing
        lowest = tl.full((TILE_ROWS,), float("-inf"), dtype=tl.float32)
        best, others = lowest, lowest
        place = tl.full((TILE_ROWS,), 0, dtype=tl.int32) + begin
        if given is None:
            own = lowest
        else:
            own = tl.full((TILE_ROWS,), 0.0, dtype=tl.float32)
            wanted = tl.load(given + row, mask=in_rows, other=-1).to(tl.int32)
        for first in range(begin, end, TILE_VOCAB):
            token = first + tl.arange(0, TILE_VOCAB)
            in_slice = token < end
            if logits_in is None:
                logits = _tile_logits(
                    hidden, weight, row, in_rows, token, in_slice, size, stride, TILE_ROWS, TILE_VOCAB, TILE_HIDDEN, INTERPRETED
                )
            else:
                cell = row.to(tl.int64)[None, :] * stride + token[:, None]
                logits = tl.load(logits_in + cell, mask=in_rows[None, :] & in_slice[:, None], other=0.0).to(tl.float32)
            ids = token
            if token_ids is not None:
                ids = tl.load(token_ids + token, mask=in_slice, other=0).to(tl.int32)
            raw = tl.where((in_slice & (token != mask_token_id))[:, None], logits * inverse_temperature, float("-inf"))
            if no_eos is not None:
                hit = tl.full((TILE_VOCAB,), 0, dtype=tl.int32)
                for i in range(barred_count):
                    hit = hit | (ids == tl.load(barred + i)).to(tl.int32)
                early = tl.load(no_eos + row, mask=in_rows, other=0) != 0
                raw = tl.where((hit != 0)[:, None] & early[None, :], float("-inf"), raw)
            if given is not None:
                chosen = in_slice[:, None] & (token[:, None] == wanted[None, :])
                own += tl.sum(tl.where(chosen, raw, 0.0), 0)
                others = _log_add(others, _log_sum(tl.where(chosen, float("-inf"), raw), 0))
            else:
                shown = raw
                if keys is not None:
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
        if given is None:
            tl.store(best_out + out, best, mask=live)
            tl.store(place_out + out, place, mask=live)
        tl.store(own_out + out, own, mask=live)
        tl.store(others_out + out, others, mask=live)

    @triton.jit(do_not_specialize=["rows", "slices"])
    def _merge_slices(  # type: ignore[no-untyped-def]
        best_in,
        place_in,
        own_in,
        others_in,
        given,
        active,
        token_ids,
        token_out,
        logprob_out,
        odds_out,
        rows,
        slices,
        TILE_ROWS: tl.constexpr,
        TILE_SLICES: tl.constexpr,
    ):
        """The results of a tile of rows from those of their slices: the losers' own logits join the others."""
        row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        in_rows = row < rows
        live = in_rows
        if active is not None:
            live = in_rows & (tl.load(active + row, mask=in_rows, other=0) != 0)
        piece = tl.arange(0, TILE_SLICES)[None, :]
        valid = live[:, None] & (piece < slices)
        at = row.to(tl.int64)[:, None] * slices + piece
        own = tl.load(own_in + at, mask=valid, other=0.0)
        others = _log_sum(tl.load(others_in + at, mask=valid, other=float("-inf")), 1)
        if given is not None:
            token = tl.load(given + row, mask=live, other=0)
            logit = tl.sum(own, 1)  # zero in slices without the token
        else:
            best = tl.load(best_in + at, mask=valid, other=float("-inf"))
            top = tl.max(best, 1)
            winner = tl.min(tl.where(valid & (best == top[:, None]), piece, TILE_SLICES), 1)
            wins = piece == winner[:, None]
            token = tl.sum(tl.where(wins, tl.load(place_in + at, mask=valid, other=0), 0), 1).to(tl.int64)
            if token_ids is not None:
                token = tl.load(token_ids + token, mask=live, other=0)
            logit = tl.sum(tl.where(wins, own, 0.0), 1)
            others = _log_add(others, _log_sum(tl.where(valid & (piece != winner[:, None]), own, float("-inf")), 1))
        odds = logit - others
        if given is None:
            odds = tl.where(tl.abs(logit) == float("inf"), float("nan"), odds)
        # log sigmoid(odds) = min(odds, 0) - log1p(exp(-|odds|)); inf - inf is no number, as in PyTorch
        small = tl.exp(-tl.abs(odds))
        rest = 1.0 + small
        log1p = tl.where(rest == 1.0, small, tl.log(rest) * (small / tl.where(rest == 1.0, 1.0, rest - 1.0)))
        logprob = tl.where(odds >= 0.0, 0.0, odds) - log1p
        tl.store(token_out + row, tl.where(live, token, 0), mask=in_rows)
        tl.store(logprob_out + row, tl.where(live, logprob, float("-inf")), mask=in_rows)
        tl.store(odds_out + row, tl.where(live, odds, float("-inf")), mask=in_rows)


__all__ = [
    "Plan",
    "pick",
    "pick_above",
    "pick_above_ref",
    "pick_ref",
    "residual_magnitude",
    "token_log_odds",
    "token_log_odds_ref",
]
