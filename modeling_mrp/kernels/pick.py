"""From hidden states to tokens: the distributions of an unembedding, and the row kernel of the pick.

`pick_rows` goes from logits to a token and its log-odds in two launches over the vocabulary, `some_logits` computes those of a
few tokens of each position; both have a Triton kernel and a plain PyTorch twin, `..._ref`. Logits of all tokens are those of a
matrix product: on a GPU in float32, so that no two tie by rounding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import LAUNCH, Dispatch, Kernel, processors, tl, triton
from .noise import gumbel_noise, noise_keys, scattered

if triton is not None:
    from .noise import gumbel_of_bits, token_noise_bits

_TILE = 1024  # logits that a program reads at once
_DOT_TILE = 512  # elements of two vectors that a program reads at once
_READERS = 8  # on a multiprocessor, since none loads ahead
# Elements of logits that are alive at once: 64 MB in float32.
_LOGITS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Unembedding:
    """The distributions over tokens that hidden states stand for.

    Attributes:
        weight: [vocab, hidden_size], those of `lm_head` or rows of it.
        mask_token_id: Outside the softmax.
        temperature: Divides the logits.
        eos_token_ids: Ids that some positions must not take.
    """

    weight: Tensor
    mask_token_id: int
    temperature: float = 1.0
    eos_token_ids: tuple[int, ...] = ()

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [n, vocab] of hidden states [n, hidden_size], the mask id at -inf; on a GPU in at least float32."""
        short = hidden.dtype in (torch.bfloat16, torch.float16) and type(self.weight) in (Tensor, torch.nn.Parameter)
        if short and hidden.is_cuda:
            logits = torch.mm(hidden, self.weight.t(), out_dtype=torch.float32)
        else:
            logits = F.linear(hidden, self.weight)
        logits[:, self.mask_token_id] = -torch.inf
        return logits

    def barred(self, logits: Tensor, no_eos: Tensor | None, ids: Tensor | None = None) -> Tensor:
        """Bar an eos from logits [n, vocab], or [n, m] of some ids, by -inf, where `no_eos` [n] bool says so."""
        if no_eos is not None:
            ids = torch.arange(logits.shape[1], device=logits.device) if ids is None else ids
            for eos in self.eos_token_ids:  # numbers, not a tensor of them, for whose copy to a device the host would wait
                logits = logits.masked_fill(no_eos[:, None] & (ids == eos), -torch.inf)
        return logits

    def tempered(self, logits: Tensor) -> Tensor:
        """Divide logits by the temperature, in at least float32."""
        logits = upcast(logits)
        return logits if self.temperature == 1.0 else logits / self.temperature

    def chunks(self, rows: int, each: int | None = None) -> list[slice]:
        """Cut `rows` into slices so small that their logits, or `each` numbers a row, are no burden; none gives one, empty."""
        step = max(1, _LOGITS_AT_ONCE // (each or self.weight.shape[0]))
        return [slice(start, start + step) for start in range(0, max(1, rows), step)]


def upcast(logits: Tensor) -> Tensor:
    """Widen logits to float32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def log_odds(scores: Tensor, token: Tensor, picked: bool = False) -> Tensor:
    """Compute log p - log (1 - p), [n], of tokens [n] under scores [n, vocab]; 1 - p sums the other tokens.

    Of tokens that were `picked` it is NaN where their own score is not finite: there was nothing to pick.
    """
    own = scores.gather(1, token[:, None])
    others = scores.scatter(1, token[:, None], -torch.inf).logsumexp(-1, keepdim=True)
    odds = own - others + 0 * own if picked else own - others
    return odds[:, 0]


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

    Args:
        unembedding: The distributions.
        logits: [n, vocab], its logits, barred and processed or not.
        shown: The same, or with -inf for tokens that must not be picked.
        least: [n], the least logit that may be picked; or None.
        keys: [n] long, from `noise_keys`, to sample; None: greedy.
        dispatch: Kernel or PyTorch.

    Returns:
        Token ids [n] long, and log-odds [n] in at least float32.
    """
    if shown is not logits:
        return pick_rows_ref(unembedding, logits, least, keys, shown)
    token, odds = dispatch.run(PICK, unembedding, logits, least, keys)
    return token, odds


def pick_rows_ref(
    unembedding: Unembedding, logits: Tensor, least: Tensor | None, keys: Tensor | None, shown: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`pick_rows` in PyTorch; nothing `shown`: the logits."""
    scores = unembedding.tempered(logits)
    seen = scores if shown is None else unembedding.tempered(shown)
    if least is not None:
        seen = seen.masked_fill(logits < least[:, None], -torch.inf)
    if keys is not None:
        seen = seen + gumbel_noise(keys, scores.shape[1], scores.dtype)
    token = seen.argmax(-1)
    return token, log_odds(scores, token, True)


def _pick_samples(like: Tensor, *_: Tensor) -> Iterator[tuple[Any, ...]]:
    """Rows of a whole vocabulary, a few tokens of each far likelier than the others, in one row equally so: greedy, with a
    bound that only the likeliest reach, and sampled."""
    rows, vocab = 12, like.shape[1]
    logits, places = scattered(rows, vocab, like=like), torch.arange(6, device=like.device) * vocab // 6
    logits[:, places] += 9 + 3 * scattered(rows, 6, like=like, seed=1)
    logits[0, places], logits[1, places[2]] = 10.0, -torch.inf
    keys = noise_keys(*torch.arange(3 * rows, device=like.device).view(3, rows))
    likeliest = logits.amax(1)
    for temperature, least, noise in ((1.0, None, None), (1.0, likeliest, None), (0.7, likeliest - 3, keys)):
        yield Unembedding(logits, 0, temperature), logits, least, noise


def _pick_kernel(unembedding: Unembedding, logits: Tensor, least: Tensor | None, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pick by two kernels: one finds the best token of each slice of the vocabulary, the next the best of the slices."""
    (rows, vocab), device = logits.shape, logits.device
    token = torch.empty(rows, dtype=torch.long, device=device)
    odds = torch.empty(rows, dtype=torch.float32, device=device)
    if not rows:
        return token, odds
    length = triton.cdiv(vocab, _TILE * triton.cdiv(_READERS * processors(device), rows)) * _TILE
    slices = triton.cdiv(vocab, length)
    found = torch.empty(3, rows, slices, dtype=torch.float32, device=device)
    places = torch.empty(rows, slices, dtype=torch.int32, device=device)
    cooling = 1.0 / unembedding.temperature
    _score_slices[(rows, slices)](
        logits.contiguous(), least, keys, found, places, vocab, length, cooling, TILE=_TILE, num_stages=1, **LAUNCH
    )
    _merge_slices[(rows,)](found, places, token, odds, slices, TILE=triton.next_power_of_2(slices), **LAUNCH)
    return token, odds


PICK = Kernel("pick", _pick_kernel, pick_rows_ref, _pick_samples)


def some_logits(weight: Tensor, hidden: Tensor, ids: Tensor, dispatch: Dispatch) -> Tensor:
    """Compute the logits of some tokens at each position, without those of all others.

    Args:
        weight: [vocab, hidden_size], of `lm_head`.
        hidden: [n, hidden_size].
        ids: [n, m] long, of each position its tokens.
        dispatch: Kernel or PyTorch.

    Returns:
        [n, m] in at least float32.
    """
    logits: Tensor = dispatch.run(SOME_LOGITS, weight, hidden.contiguous(), ids.contiguous())
    return logits


def some_logits_ref(weight: Tensor, hidden: Tensor, ids: Tensor) -> Tensor:
    """`some_logits` in PyTorch."""
    return (upcast(weight[ids]) @ upcast(hidden)[:, :, None])[:, :, 0]


def _some_kernel(weight: Tensor, hidden: Tensor, ids: Tensor) -> Tensor:
    """One launch: of each position and token a program that reads a row of the weights."""
    logits = torch.empty(ids.shape, dtype=torch.float32, device=hidden.device)
    if ids.numel():
        _dot_rows[ids.shape](weight, hidden, ids, logits, weight.stride(0), hidden.shape[1], TILE=_DOT_TILE, **LAUNCH)
    return logits


def _some_samples(weight: Tensor, hidden: Tensor, *_: Tensor) -> Iterator[tuple[Any, ...]]:
    """Two positions, each with three tokens of the weights."""
    ids = torch.tensor([[0, 1, len(weight) - 1], [1, 1, len(weight) // 2]], device=hidden.device)
    yield weight, scattered(2, hidden.shape[1], like=hidden), ids


SOME_LOGITS = Kernel("shortlist", _some_kernel, some_logits_ref, _some_samples)


if triton is not None:

    @triton.jit
    def _dot_rows(weight, hidden, ids, logits, stride, size, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        """Compute one logit in float32: program (i, j) takes the j-th listed token of position i."""
        row, out = tl.program_id(0).to(tl.int64), tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        token = tl.load(ids + out)
        total = tl.zeros([TILE], dtype=tl.float32)
        for first in range(0, size, TILE):
            at = first + tl.arange(0, TILE)
            inside = at < size
            own = tl.load(weight + token * stride + at, mask=inside, other=0.0).to(tl.float32)
            total += own * tl.load(hidden + row * size + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(logits + out, tl.sum(total, 0))

    @triton.jit
    def _log_add(a, b):  # type: ignore[no-untyped-def]
        """log(exp(a) + exp(b)), also of infinities; NaN if either is."""
        most = tl.maximum(a, b)
        most = tl.where(tl.abs(most) == float("inf"), 0.0, most)
        return most + tl.log(tl.exp(a - most) + tl.exp(b - most))

    @triton.jit
    def _log_sum(x):  # type: ignore[no-untyped-def]
        """log of the sum of exp(x) of a vector; likewise."""
        most = tl.max(x, 0)
        most = tl.where(tl.abs(most) == float("inf"), 0.0, most)
        return most + tl.log(tl.sum(tl.exp(x - most), 0))

    @triton.jit  # `vocab` and `length` tell of aligned rows
    def _score_slices(logits_in, least, keys, found, places, vocab, length, cooling, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        """Program (row, slice of the vocabulary): the best score and its place, that token's logit (`own`), and the log-sum-exp
        of all other logits. None under `least` is the best."""
        row, cells = tl.program_id(0).to(tl.int64), tl.num_programs(0) * tl.num_programs(1)
        begin = tl.program_id(1) * length
        end = tl.minimum(begin + length, vocab)
        best, others, own, place = float("-inf"), float("-inf"), float("-inf"), begin
        for first in range(begin, end, TILE):
            token = first + tl.arange(0, TILE)
            inside = token < end
            logits = tl.load(logits_in + row * vocab + token, mask=inside, other=float("-inf")).to(tl.float32)
            raw = logits * cooling
            shown = raw
            if keys is not None:
                shown = raw + gumbel_of_bits(token_noise_bits(tl.load(keys + row), token))
            if least is not None:
                shown = tl.where(logits < tl.load(least + row).to(tl.float32), float("-inf"), shown)
            shown = tl.where(shown != shown, float("inf"), shown)  # NaN is more than any number
            top = tl.max(shown, 0)
            at = tl.min(tl.where(shown == top, token, 0x7FFFFFFF), 0)
            logit = tl.sum(tl.where(token == at, raw, 0.0), 0)
            rest = _log_sum(tl.where(token == at, float("-inf"), raw))
            wins = top > best
            others = _log_add(_log_add(others, rest), tl.where(wins, own, logit))
            best, place, own = tl.where(wins, top, best), tl.where(wins, at, place), tl.where(wins, logit, own)
        out = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(places + out, place)
        tl.store(found + out, best)
        tl.store(found + cells + out, own)
        tl.store(found + 2 * cells + out, others)

    @triton.jit(do_not_specialize=["slices"])
    def _merge_slices(found, places, token_out, odds_out, slices, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        """Program (row): its result from those of its slices; the losers' own logits join the others."""
        row, cells, piece = tl.program_id(0).to(tl.int64), tl.num_programs(0) * slices, tl.arange(0, TILE)
        valid, at = piece < slices, row * slices + piece
        best = tl.load(found + at, mask=valid, other=float("-inf"))
        own = tl.load(found + cells + at, mask=valid, other=0.0)
        others = _log_sum(tl.load(found + 2 * cells + at, mask=valid, other=float("-inf")))
        winner = tl.min(tl.where(valid & (best == tl.max(best, 0)), piece, TILE), 0)
        token = tl.sum(tl.where(piece == winner, tl.load(places + at, mask=valid, other=0), 0), 0)
        logit = tl.sum(tl.where(piece == winner, own, 0.0), 0)
        others = _log_add(others, _log_sum(tl.where(valid & (piece != winner), own, float("-inf"))))
        tl.store(token_out + row, token.to(tl.int64))
        tl.store(odds_out + row, tl.where(tl.abs(logit) == float("inf"), float("nan"), logit - others))
