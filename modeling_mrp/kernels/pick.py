"""From hidden states to tokens: the unembedding, the noise for sampling, and the kernel that picks
a token for each row.

`pick_rows` picks tokens and computes their log-odds by two launches of Triton kernels over the
vocabulary; `pick_rows_ref` is its PyTorch twin. `list_rows` does the same, and lists the likeliest
tokens, among which drafts choose, in the same pass. In both, the first launch works on slices of
the vocabulary, and the second merges the slices. Logits come from a matrix product; on a GPU they
are float32, so that no two logits become equal by rounding. Noise comes from a counter-based
generator: it is a pure function of (seed, position, masks left, token id).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules.draft import mix_bits
from .dispatch import LAUNCH, Kernel, processors, tl, triton

_UINT32 = 0xFFFFFFFF
_TILE = 1024  # logits that a program reads at once
_READERS = 8  # on a multiprocessor, since none loads ahead
# Tokens of a list that the kernel makes, at most: it compares each with each.
MOST_LISTED = 128
# Logits that exist at once, anywhere and on a GPU with much memory, 64 MB and 2 GB in float32; and
# the share of a GPU's free memory that they may take.
_LOGITS_AT_ONCE, _MOST_AT_ONCE, _SHARE_OF_MEMORY = 1 << 24, 1 << 29, 32


@dataclass(frozen=True)
class Unembedding:
    """The map from hidden states to distributions over tokens.

    Attributes:
        weight: [vocab, hidden_size], the weight of `lm_head`.
        mask_token_id: The id of the mask, whose logit is set to -inf.
        temperature: Divides the logits.
        eos_token_ids: Ids that must not be picked at some positions (see `barred`).
    """

    weight: Tensor
    mask_token_id: int
    temperature: float = 1.0
    eos_token_ids: tuple[int, ...] = ()

    @cached_property
    def _at_once(self) -> int:
        return logits_at_once(self.weight.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits [n, vocab] of hidden states [n, hidden_size], with -inf at the mask
        id. On a GPU, hidden states of 16 bits give logits in float32, provided that the weight is a
        plain tensor."""
        half_precision = hidden.dtype in (torch.bfloat16, torch.float16) and type(self.weight) in (
            Tensor,
            torch.nn.Parameter,
        )
        if half_precision and hidden.is_cuda:
            logits = torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
        else:
            logits = F.linear(hidden, self.weight)
        logits[:, self.mask_token_id] = -torch.inf
        return logits

    def barred(self, logits: Tensor, no_eos: Tensor | None, ids: Tensor | None = None) -> Tensor:
        """Return logits with -inf at eos ids in the rows where no eos may be picked.

        Args:
            logits: [n, vocab]; or [n, m], the logits of the tokens `ids`.
            no_eos: bool [n], whether a row must not get an eos; None if all may.
            ids: [n, m], the tokens of `logits`; None for all tokens of the vocabulary.
        """
        if no_eos is not None:
            ids = torch.arange(logits.shape[1], device=logits.device) if ids is None else ids
            # numbers, not a tensor of them, for whose copy to a device the host would wait
            for eos in self.eos_token_ids:
                logits = logits.masked_fill(no_eos[:, None] & (ids == eos), -torch.inf)
        return logits

    def tempered(self, logits: Tensor) -> Tensor:
        """Divide logits by the temperature, in at least float32."""
        logits = upcast(logits)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def chunks(self, rows: int, row_size: int | None = None) -> list[slice]:
        """Divide `rows` rows into slices, such that the values of one slice fit in memory.

        Args:
            rows: The number of rows. If it is 0, the result is one slice, which selects nothing.
            row_size: The number of values that a row takes in memory; None for the row's logits,
                one for each token of the vocabulary.
        """
        size = row_size or self.weight.shape[0]
        step = max(1, _LOGITS_AT_ONCE // size)
        if rows > step:  # each further slice would read the whole weight again
            step = max(1, self._at_once // size)
        return [slice(start, start + step) for start in range(0, max(1, rows), step)]


def logits_at_once(device: torch.device) -> int:
    """Return the largest number of logits that should exist at a time on a device, given the memory
    that is free there."""
    if device.type != "cuda":
        return _LOGITS_AT_ONCE
    free, _ = torch.cuda.mem_get_info(device)
    # what torch holds for reuse is free, too
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(_LOGITS_AT_ONCE, min(_MOST_AT_ONCE, free // _SHARE_OF_MEMORY // 4))


def upcast(logits: Tensor) -> Tensor:
    """Convert logits to float32 unless their dtype is wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def likeliest_tokens(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest scores of each row of `scores` [n, vocab], the largest first, and their
    ids: [n, m] each, where m is the smaller of `count` and vocab."""
    values, ids = scores.topk(min(count, scores.shape[1]))
    return values, ids


def log_odds(scores: Tensor, token: Tensor, picked: bool = False) -> Tensor:
    """Compute the log-odds [n], log p - log (1 - p), of one token per row, `token` int64 [n]. p is
    the probability of the token in the softmax of its row of `scores` [n, vocab].

    If `picked`, the log-odds are NaN where the token's score is not finite, and have no gradients:
    no copy of `scores` is made, which are written to meanwhile and are as before in the end.
    """
    index = token[:, None]
    token_score = scores.gather(1, index)
    if not picked:
        others = scores.scatter(1, index, -torch.inf)
        return (token_score - others.logsumexp(-1, keepdim=True))[:, 0]
    odds = token_score - scores.scatter_(1, index, -torch.inf).logsumexp(-1, keepdim=True)
    scores.scatter_(1, index, token_score)
    odds.add_(token_score, alpha=0)  # 0 times what is not finite is NaN
    return odds[:, 0]


def odds_of(scores: Tensor, ids: Tensor) -> Tensor:
    """Compute the log-odds [n, m], log p - log (1 - p), of m tokens per row, `ids` int64 [n, m]. p
    is the probability of a token in the softmax of its row of `scores` [n, vocab]. Log-odds that
    would be NaN are -inf instead."""
    token_scores = scores.gather(1, ids)
    log_p = token_scores - scores.logsumexp(-1, keepdim=True)
    odds = log_p - torch.log1p(-log_p.exp())
    best = token_scores.argmax(-1, keepdim=True)
    # The likeliest token's log-odds are computed without cancellation, as its probability may be
    # nearly 1.
    odds = odds.scatter(1, best, log_odds(scores, ids.gather(1, best)[:, 0])[:, None])
    return odds.masked_fill(odds.isnan(), -torch.inf)


def gumbel_noise(keys: Tensor, vocab: int, dtype: torch.dtype) -> Tensor:
    """Compute Gumbel noise [n, vocab] for all token ids, from `keys`, int64 [n], which `noise_key`
    made. The same keys always give the same noise; float32 and float64 noise come from the same
    random bits."""
    bits: Tensor = mix_bits(
        mix_bits(torch.arange(vocab, device=keys.device) * 0x9E3779B1 & _UINT32) ^ keys[:, None]
    )
    # -log(u) for u = (bits + 1/2) / 2^32, from whichever end of the unit interval keeps the
    # precision.
    lower = bits < 1 << 31
    nearest = (torch.where(lower, bits, _UINT32 - bits).to(dtype) + 0.5) * 2.0**-32
    return -torch.where(lower, -nearest.log(), -torch.log1p(-nearest)).log()


def slices_of(rows: int, vocab: int, device: torch.device) -> tuple[int, int]:
    """Divide the vocabulary into slices for a kernel that has a program for each row and slice, so
    that all programs together fill the device.

    Args:
        rows: The number of rows of logits.
        vocab: The number of tokens of the vocabulary.
        device: The device.

    Returns:
        The number of tokens of a slice (the last slice may have fewer), and the number of slices.
    """
    length = triton.cdiv(vocab, _TILE * triton.cdiv(_READERS * processors(device), rows))
    length *= _TILE
    return length, triton.cdiv(vocab, length)


def pick_rows(
    unembedding: Unembedding, logits: Tensor, min_logit: Tensor | None, keys: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Pick a token in each row of logits, and compute the log-odds of this token.

    Without `keys`, the picked token has the largest logit. With `keys`, tokens are sampled: the
    picked token has the largest sum of logit / temperature and noise. Of equal values, the first is
    picked; NaN counts as larger than any number, as in `torch.argmax`.

    Args:
        unembedding: Gives the temperature.
        logits: [n, vocab], at least one row.
        min_logit: [n], for each row, a lower bound on `logits`: a token with a smaller logit is not
            picked. None if there is no bound.
        keys: int64 [n], noise keys made by `noise_key`; None to pick without noise.

    Returns:
        The tokens, int64 [n], and their log-odds, [n]. The log-odds are log p - log (1 - p), where
        p is the token's probability in the softmax of logits / temperature. This softmax is over
        all tokens, also those below `min_logit`, and is without noise. The log-odds are NaN where
        the logit of the picked token is not finite.
    """
    rows, vocab = logits.shape
    device = logits.device
    token = torch.empty(rows, dtype=torch.long, device=device)
    odds = torch.empty(rows, dtype=torch.float32, device=device)
    length, slices = slices_of(rows, vocab, device)
    slice_results = torch.empty(3, rows, slices, dtype=torch.float32, device=device)
    slice_tokens = torch.empty(rows, slices, dtype=torch.int32, device=device)
    inverse_temperature = 1.0 / unembedding.temperature
    _score_slices[(rows, slices)](
        logits.contiguous(),
        min_logit,
        keys,
        slice_results,
        slice_tokens,
        vocab,
        length,
        inverse_temperature,
        TILE=_TILE,
        num_stages=1,
        **LAUNCH,
    )
    _merge_slices[(rows,)](
        slice_results,
        slice_tokens,
        token,
        odds,
        slices,
        TILE=triton.next_power_of_2(slices),
        **LAUNCH,
    )
    return token, odds


def pick_rows_ref(
    unembedding: Unembedding,
    logits: Tensor,
    min_logit: Tensor | None,
    keys: Tensor | None,
    truncated_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the same as `pick_rows`, in PyTorch.

    Args:
        unembedding, logits, min_logit, keys: As in `pick_rows`.
        truncated_logits: [n, vocab], a copy of `logits` with -inf at further tokens that must not
            be picked, or None. It has no effect on the softmax of the log-odds, which is that of
            `logits`.
    """
    scores = unembedding.tempered(logits)
    candidates = scores if truncated_logits is None else unembedding.tempered(truncated_logits)
    if min_logit is not None:
        candidates = candidates.masked_fill(logits < min_logit[:, None], -torch.inf)
    if keys is not None:
        candidates = candidates + gumbel_noise(keys, scores.shape[1], scores.dtype)
    token = candidates.argmax(-1)
    return token, log_odds(scores, token, True)


PICK = Kernel("pick", pick_rows, pick_rows_ref)


def list_rows(
    unembedding: Unembedding,
    logits: Tensor,
    min_logit: Tensor | None,
    keys: Tensor | None,
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pick a token in each row as `pick_rows` does, and list the m likeliest tokens of the row.

    Args:
        unembedding, logits, keys: As in `pick_rows`.
        min_logit: As in `pick_rows`. It must not exceed the largest logit of its row, unless all
            logits of the row are -inf.
        count: m, at most `MOST_LISTED`. If the vocabulary is smaller, all its tokens are listed.

    Returns:
        The picked tokens [n], their log-odds [n], and the candidates [n, 2 m + 1] in at least
        float32. A row of candidates has three parts, in this order:

        - The ids of the listed tokens, the likeliest first. Of tokens with equal logits, the
          smaller id comes first. If several tokens tie for the last place, PyTorch
          (`list_rows_ref`) may list any of them, unless their logit is -inf.
        - The scores of these m tokens: logit / temperature, or -inf if the logit is below
          `min_logit`.
        - The log-sum-exp of logit / temperature over all other tokens. Listed tokens whose score is
          -inf because of `min_logit` are included here.
    """
    rows, vocab = logits.shape
    device = logits.device
    count = min(count, vocab)
    listed = triton.next_power_of_2(count)
    length, slices = slices_of(rows, vocab, device)
    inverse_temperature = 1.0 / unembedding.temperature
    slice_keys = torch.empty(rows, slices, count, dtype=torch.long, device=device)
    slice_results = torch.empty(3, rows, slices, dtype=torch.float32, device=device)
    slice_tokens = torch.empty(rows, slices, dtype=torch.int32, device=device)
    _list_slices[(rows, slices)](
        logits.contiguous(),
        min_logit,
        keys,
        slice_keys,
        slice_results,
        slice_tokens,
        vocab,
        length,
        count,
        inverse_temperature,
        LISTED=listed,
        TILE=_TILE,
        num_stages=1,
        **LAUNCH,
    )
    token = torch.empty(rows, dtype=torch.long, device=device)
    odds = torch.empty(rows, dtype=torch.float32, device=device)
    candidates = torch.empty(rows, 2 * count + 1, dtype=torch.float32, device=device)
    _merge_lists[(rows,)](
        slice_keys,
        slice_results,
        slice_tokens,
        min_logit,
        token,
        odds,
        candidates,
        slices,
        count,
        inverse_temperature,
        LISTED=listed,
        SLICES=triton.next_power_of_2(slices),
        TILE=min(_TILE, triton.next_power_of_2(slices * count)),
        SAMPLED=keys is not None,
        **LAUNCH,
    )
    return token, odds, candidates


def list_rows_ref(
    unembedding: Unembedding,
    logits: Tensor,
    min_logit: Tensor | None,
    keys: Tensor | None,
    count: int,
    truncated_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the same as `list_rows`, in PyTorch.

    Args:
        unembedding, logits, min_logit, keys, count: As in `list_rows`.
        truncated_logits: [n, vocab], a copy of `logits` with -inf at further tokens that must not
            be picked, or None. These tokens are treated like those below `min_logit`.
    """
    token, odds = pick_rows_ref(unembedding, logits, min_logit, keys, truncated_logits)
    scores = unembedding.tempered(logits)
    ids = _likeliest_ids(upcast(logits), count)
    listed_logits = logits.gather(1, ids)
    excluded = listed_logits == -torch.inf
    if truncated_logits is not None:
        excluded = truncated_logits.gather(1, ids) == -torch.inf
    if min_logit is not None:
        excluded = excluded | (listed_logits < min_logit[:, None])
    listed_scores = unembedding.tempered(listed_logits)
    uncounted = listed_scores.masked_fill(~excluded, -torch.inf)  # those left out keep their share
    other_logsumexp = scores.scatter(1, ids, uncounted).logsumexp(-1, keepdim=True)
    listed_scores = listed_scores.masked_fill(excluded, -torch.inf)
    return token, odds, torch.cat([ids.to(scores.dtype), listed_scores, other_logsumexp], 1)


def _likeliest_ids(logits: Tensor, count: int) -> Tensor:
    """Return the ids [n, m] of the largest logits of each row of `logits` [n, vocab], where m is
    the smaller of `count` and vocab. Ids of equal logits are in increasing order. If logits of -inf
    must be listed, those with the smallest ids are."""
    values, ids = likeliest_tokens(logits, count)
    ids, order = ids.sort(1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    # Where -inf is listed, fewer tokens than are listed have more, and so the first ids suffice.
    barred_first = (logits[:, : ids.shape[1]] > -torch.inf).byte().sort(dim=1, stable=True).indices
    barred = values == -torch.inf
    return torch.where(barred, barred_first.gather(1, (barred.cumsum(1) - 1).clamp(min=0)), ids)


LIST = Kernel("list", list_rows, list_rows_ref)


if triton is not None:

    @triton.jit
    def _mix32(x):  # type: ignore[no-untyped-def]
        """Hash uint32 numbers as `mix_bits` does."""
        x = x ^ (x >> 16)
        x = x * 0x7FEB352D
        x = x ^ (x >> 15)
        x = x * 0x846CA68B
        return x ^ (x >> 16)

    @triton.jit
    def gumbel_of_bits(bits):  # type: ignore[no-untyped-def]
        """Turn uint32 bits into Gumbel noise, as `gumbel_noise` does. log1p(-x) is computed as
        log(1 - x) * x / (1 - (1 - x))."""
        lower = (bits >> 31) == 0
        nearest = (tl.where(lower, bits, bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.0**-32
        complement = 1.0 - nearest
        log = tl.log(tl.where(lower, nearest, complement))
        gap = (
            1.0 - complement
        )  # `nearest` as it was rounded on the way; 0 where nothing was left of it
        upper = tl.where(gap == 0.0, nearest, -log * (nearest / tl.where(gap == 0.0, 1.0, gap)))
        return -tl.log(tl.where(lower, -log, upper))

    @triton.jit
    def _log_add(a, b):  # type: ignore[no-untyped-def]
        """Compute log(exp(a) + exp(b)). Both may be infinite; the result is NaN if either of them
        is NaN."""
        peak = tl.maximum(a, b)
        peak = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
        return peak + tl.log(tl.exp(a - peak) + tl.exp(b - peak))

    @triton.jit
    def _log_sum(x):  # type: ignore[no-untyped-def]
        """Compute the log of the sum of exp(x) over a vector x. Elements may be infinite; the
        result is NaN if any of them is NaN."""
        peak = tl.max(x, 0)
        peak = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
        return peak + tl.log(tl.sum(tl.exp(x - peak), 0))

    @triton.jit
    def _candidate_scores(raw, logits, token, row, min_logit, keys):  # type: ignore[no-untyped-def]
        """Compute the scores of a row's tokens; the token with the largest score is picked. A score
        is `raw`, the logit divided by the temperature, plus noise if there are keys. It is -inf for
        a logit below `min_logit`, and +inf in place of NaN."""
        scores = raw
        if keys is not None:
            key = tl.load(keys + row).to(tl.uint32)
            scores = raw + gumbel_of_bits(_mix32(_mix32(token.to(tl.uint32) * 0x9E3779B1) ^ key))
        if min_logit is not None:
            scores = tl.where(
                logits < tl.load(min_logit + row).to(tl.float32), float("-inf"), scores
            )
        return tl.where(scores != scores, float("inf"), scores)  # NaN is more than any number

    @triton.jit  # `vocab` and `length` tell of aligned rows
    def _score_slices(  # type: ignore[no-untyped-def]
        logits_in,
        min_logit,
        keys,
        slice_results,
        slice_tokens,
        vocab,
        length,
        inverse_temperature,
        TILE: tl.constexpr,
    ):
        """Process one slice of the vocabulary for one row. Store the best score, its token, that
        token's logit divided by the temperature (`best_logit`), and the log-sum-exp of the divided
        logits of all other tokens. A token with a logit below `min_logit` is never the best."""
        row = tl.program_id(0).to(tl.int64)
        slice_count = tl.num_programs(0) * tl.num_programs(1)
        begin = tl.program_id(1) * length
        end = tl.minimum(begin + length, vocab)
        best = float("-inf")
        other_logsumexp = float("-inf")
        best_logit = float("-inf")
        best_token = begin
        for first in range(begin, end, TILE):
            token = first + tl.arange(0, TILE)
            inside = token < end
            logits = tl.load(logits_in + row * vocab + token, mask=inside, other=float("-inf")).to(
                tl.float32
            )
            raw = logits * inverse_temperature
            scores = _candidate_scores(raw, logits, token, row, min_logit, keys)
            top = tl.max(scores, 0)
            top_token = tl.min(tl.where(scores == top, token, 0x7FFFFFFF), 0)
            top_logit = tl.sum(tl.where(token == top_token, raw, 0.0), 0)
            tile_logsumexp = _log_sum(tl.where(token == top_token, float("-inf"), raw))
            wins = top > best
            other_logsumexp = _log_add(
                _log_add(other_logsumexp, tile_logsumexp), tl.where(wins, best_logit, top_logit)
            )
            best = tl.where(wins, top, best)
            best_token = tl.where(wins, top_token, best_token)
            best_logit = tl.where(wins, top_logit, best_logit)
        out = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(slice_tokens + out, best_token)
        tl.store(slice_results + out, best)
        tl.store(slice_results + slice_count + out, best_logit)
        tl.store(slice_results + 2 * slice_count + out, other_logsumexp)

    @triton.jit(do_not_specialize=["slices"])
    def _merge_slices(  # type: ignore[no-untyped-def]
        slice_results, slice_tokens, token_out, odds_out, slices, TILE: tl.constexpr
    ):
        """Merge the results of all slices of one row. Store the picked token and its log-odds; the
        best tokens of the other slices count among the tokens that were not picked."""
        row = tl.program_id(0).to(tl.int64)
        slice_count = tl.num_programs(0) * slices
        slice_index = tl.arange(0, TILE)
        valid = slice_index < slices
        index = row * slices + slice_index
        best = tl.load(slice_results + index, mask=valid, other=float("-inf"))
        logits = tl.load(slice_results + slice_count + index, mask=valid, other=0.0)
        other_logsumexp = _log_sum(
            tl.load(slice_results + 2 * slice_count + index, mask=valid, other=float("-inf"))
        )
        winner = tl.min(tl.where(valid & (best == tl.max(best, 0)), slice_index, TILE), 0)
        token = tl.sum(
            tl.where(slice_index == winner, tl.load(slice_tokens + index, mask=valid, other=0), 0),
            0,
        )
        logit = tl.sum(tl.where(slice_index == winner, logits, 0.0), 0)
        other_logsumexp = _log_add(
            other_logsumexp,
            _log_sum(tl.where(valid & (slice_index != winner), logits, float("-inf"))),
        )
        tl.store(token_out + row, token.to(tl.int64))
        tl.store(
            odds_out + row,
            tl.where(tl.abs(logit) == float("inf"), float("nan"), logit - other_logsumexp),
        )

    # Keys [int64] are in the order of logits, and for equal logits from the last token to the
    # first. Those under `_LEAST_KEY` stand for no token; `_TAKEN` is less than all.
    _LEAST_KEY = tl.constexpr(-(1 << 62))
    _TAKEN = tl.constexpr(-(1 << 63) + 1)
    _MOST_KEY = tl.constexpr((1 << 63) - 1)

    @triton.jit
    def _keys_of(logits, token):  # type: ignore[no-untyped-def]
        """Make int64 keys of float32 logits and int32 tokens. The larger key belongs to the larger
        logit or, if logits are equal, to the smaller token. NaN is larger than any number, and -0
        equals 0."""
        bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        order = tl.where(logits != logits, 0x7FFFFFFF, order)
        return (order.to(tl.int64) << 31) + (0x7FFFFFFF - token)

    @triton.jit
    def _logits_of(keys):  # type: ignore[no-untyped-def]
        """Read the logits from keys made by `_keys_of`."""
        order = (keys >> 31).to(tl.int32)
        return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)

    @triton.jit
    def _empty_list(count, LISTED: tl.constexpr):  # type: ignore[no-untyped-def]
        """Make a list of LISTED keys. The first `count` of them stand for no token, and `_enlist`
        replaces them; the others are so large that they are never replaced."""
        slot = tl.arange(0, LISTED)
        return tl.where(slot < count, _LEAST_KEY - 1 - slot.to(tl.int64), _MOST_KEY)

    @triton.jit
    def _enlist(listed, keys, other_logsumexp, inverse_temperature):  # type: ignore[no-untyped-def]
        """As long as the largest of `keys` is larger than the smallest key in the list `listed`,
        put the former in the latter's place. Return the list; the keys, with `_TAKEN` for those now
        in the list; and `other_logsumexp`, to which the tokens that lost their places are added."""
        minimum = tl.min(listed, 0)
        top = tl.max(keys, 0)
        while top > minimum:
            listed = tl.where(listed == minimum, top, listed)
            keys = tl.where(keys == top, _TAKEN, keys)
            lost = tl.where(
                minimum < _LEAST_KEY, float("-inf"), _logits_of(minimum) * inverse_temperature
            )
            other_logsumexp = _log_add(other_logsumexp, lost)
            minimum = tl.min(listed, 0)
            top = tl.max(keys, 0)
        return listed, keys, other_logsumexp

    @triton.jit  # `vocab` and `length` tell of aligned rows
    def _list_slices(  # type: ignore[no-untyped-def]
        logits_in,
        min_logit,
        keys_in,
        slice_keys,
        slice_results,
        slice_tokens,
        vocab,
        length,
        count,
        inverse_temperature,
        LISTED: tl.constexpr,
        TILE: tl.constexpr,
    ):
        """Process one slice of the vocabulary for one row. Store the keys of the slice's likeliest
        tokens, and the log-sum-exp of all its other tokens. If there are noise keys, also store the
        best score, its token, and that token's logit divided by the temperature."""
        row = tl.program_id(0).to(tl.int64)
        slice_count = tl.num_programs(0) * tl.num_programs(1)
        begin = tl.program_id(1) * length
        end = tl.minimum(begin + length, vocab)
        listed = _empty_list(count, LISTED)
        other_logsumexp = tl.full([], float("-inf"), tl.float32)
        best = float("-inf")
        best_logit = float("-inf")
        best_token = begin
        for first in range(begin, end, TILE):
            token = first + tl.arange(0, TILE)
            inside = token < end
            logits = tl.load(logits_in + row * vocab + token, mask=inside, other=float("-inf")).to(
                tl.float32
            )
            raw = logits * inverse_temperature
            if keys_in is not None:
                scores = _candidate_scores(raw, logits, token, row, min_logit, keys_in)
                top = tl.max(scores, 0)
                top_token = tl.min(tl.where(scores == top, token, 0x7FFFFFFF), 0)
                top_logit = tl.sum(tl.where(token == top_token, raw, 0.0), 0)
                wins = top > best
                best = tl.where(wins, top, best)
                best_token = tl.where(wins, top_token, best_token)
                best_logit = tl.where(wins, top_logit, best_logit)
            keys = tl.where(inside, _keys_of(logits, token), _TAKEN)
            listed, keys, other_logsumexp = _enlist(
                listed, keys, other_logsumexp, inverse_temperature
            )
            other_logsumexp = _log_add(
                other_logsumexp, _log_sum(tl.where(keys == _TAKEN, float("-inf"), raw))
            )
        out = row * tl.num_programs(1) + tl.program_id(1)
        slot = tl.arange(0, LISTED)
        tl.store(slice_keys + out * count + slot, listed, mask=slot < count)
        tl.store(slice_results + out, other_logsumexp)
        if keys_in is not None:
            tl.store(slice_tokens + out, best_token)
            tl.store(slice_results + slice_count + out, best)
            tl.store(slice_results + 2 * slice_count + out, best_logit)

    @triton.jit(do_not_specialize=["slices"])
    def _merge_lists(  # type: ignore[no-untyped-def]
        slice_keys,
        slice_results,
        slice_tokens,
        min_logit,
        token_out,
        odds_out,
        candidates_out,
        slices,
        count,
        inverse_temperature,
        LISTED: tl.constexpr,
        SLICES: tl.constexpr,
        TILE: tl.constexpr,
        SAMPLED: tl.constexpr,
    ):
        """Merge the results of all slices of one row. Store the picked token, its log-odds, and the
        row of candidates (see `list_rows`)."""
        row = tl.program_id(0).to(tl.int64)
        slice_count = tl.num_programs(0) * slices
        slice_index = tl.arange(0, SLICES)
        valid = slice_index < slices
        index = row * slices + slice_index
        other_logsumexp = _log_sum(tl.load(slice_results + index, mask=valid, other=float("-inf")))
        listed = _empty_list(count, LISTED)
        for first in range(0, slices * count, TILE):
            entry = first + tl.arange(0, TILE)
            keys = tl.load(
                slice_keys + row * slices * count + entry, mask=entry < slices * count, other=_TAKEN
            )
            keys = tl.where(keys < _LEAST_KEY, _TAKEN, keys)
            listed, keys, other_logsumexp = _enlist(
                listed, keys, other_logsumexp, inverse_temperature
            )
            raw_left = _logits_of(keys) * inverse_temperature
            other_logsumexp = _log_add(
                other_logsumexp, _log_sum(tl.where(keys == _TAKEN, float("-inf"), raw_left))
            )

        slot = tl.arange(0, LISTED)
        filled = slot < count
        rank = tl.sum(((listed[None, :] > listed[:, None]) & filled[None, :]).to(tl.int32), 1)
        logits = _logits_of(listed)
        raw = tl.where(filled, logits * inverse_temperature, float("-inf"))
        token = 0x7FFFFFFF - (listed & 0x7FFFFFFF).to(tl.int32)
        excluded = logits == float("-inf")
        if min_logit is not None:
            excluded = excluded | (logits < tl.load(min_logit + row).to(tl.float32))
        shown = tl.where(excluded, float("-inf"), raw)
        out = candidates_out + row * (2 * count + 1)
        tl.store(out + rank, token.to(tl.float32), mask=filled)
        tl.store(out + count + rank, shown, mask=filled)
        left_out = tl.where(filled & excluded, raw, float("-inf"))
        tl.store(out + 2 * count, _log_add(other_logsumexp, _log_sum(left_out)))

        picked = filled & (rank == 0)
        picked_token = tl.sum(tl.where(picked, token, 0), 0)
        logit = tl.sum(tl.where(picked, raw, 0.0), 0)
        if SAMPLED:
            best = tl.load(slice_results + slice_count + index, mask=valid, other=float("-inf"))
            winner = tl.min(tl.where(valid & (best == tl.max(best, 0)), slice_index, SLICES), 0)
            wins = slice_index == winner
            tokens = tl.load(slice_tokens + index, mask=valid, other=0)
            best_logits = tl.load(slice_results + 2 * slice_count + index, mask=valid, other=0.0)
            picked_token = tl.sum(tl.where(wins, tokens, 0), 0)
            logit = tl.sum(tl.where(wins, best_logits, 0.0), 0)
            picked = filled & (token == picked_token)
        # The sum over all others is of them, not the whole less the token: nothing is taken back.
        beside = _log_sum(tl.where(picked, float("-inf"), raw))
        odds = logit - _log_add(other_logsumexp, beside)
        if SAMPLED:
            # A token that is not listed has a half at most, so that little of 1 - p is lost.
            log_p = logit - _log_add(other_logsumexp, _log_sum(raw))
            is_listed = tl.max(picked.to(tl.int32), 0) > 0
            odds = tl.where(is_listed, odds, log_p - tl.log(1.0 - tl.exp(log_p)))
        tl.store(token_out + row, picked_token.to(tl.int64))
        tl.store(odds_out + row, tl.where(tl.abs(logit) == float("inf"), float("nan"), odds))
