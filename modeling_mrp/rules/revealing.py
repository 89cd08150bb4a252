"""Reveal rules: which positions a step of the backbone reveals, and which it is likely to reveal where that is only guessed.

A reveal rule is a function of **one scored state** and of nothing else: not of what was scored before, of other states of the
round, or of the way that led to the state. That is what makes drafting lossless: a state that was guessed and scored reveals
what it would have revealed had the text come to it step by step. A rule with a memory would need a field of `Candidates` that
only modes without drafts fill, from `DecodeState.seed`.

Each rule also says, of estimates in place of scores, what it is `likely` to do: that decides what is drafted, never what the
text is.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .constants import constant, indices

# The power of a token's odds that orders drafts. Reveals follow the first power or a little more; the fourth drafts best, as a
# state passed over is remembered, so that going deeper is worth more than its chance (`benchmarks/NOTES.md`, Drafting).
ORDER_SHARPNESS = 4.0

# By how much a threshold is missed or passed, times this, are the log-odds that an estimate is on the right side of it.
THRESHOLD_SHARPNESS = 2.0

# By how much each reveal more or less than the likeliest number is taken to be less likely, where entropies bound it.
EACH_MORE = 0.35
# What all but the likeliest token of a position are taken to be undecided by, in nats.
TAIL_NATS = 2.0

# Log-odds above this are certain: their sums stay finite.
MOST_ODDS = 1e4


@dataclass
class Candidates:
    """Candidates of [...] scored states, from which a reveal rule decides.

    Attributes:
        where: [..., block] bool, the masked positions that may be revealed.
        token: [..., block] long, the token picked at each.
        confidence: [..., block] float, log-odds of that token; -inf outside `where`. They order positions as probabilities
            do, and keep their precision where these round to 1.
        entropy: [..., block] nats, -inf outside `where`; None unless the rule says that it `needs_entropy`.
        ids: [..., block] long, the state itself.
        step: [...] long, the denoising steps taken in the block. Of drafted states only a guess, unless it follows from how
            many positions are revealed, as under a schedule.
        quota: [...] long, how many positions the schedule reveals at this step.
    """

    where: Tensor
    token: Tensor
    confidence: Tensor
    entropy: Tensor | None
    ids: Tensor
    step: Tensor
    quota: Tensor


class RevealRule(Protocol):
    """Decides what a step of the backbone reveals: a frozen dataclass of its numbers, called with `Candidates`.

    It returns [..., block] bool, at least one where there is a candidate, and is a function of one scored state (see above).
    """

    needs_entropy: ClassVar[bool]

    def __call__(self, scored: Candidates) -> Tensor:
        """Choose the positions that are revealed: [..., block] bool."""
        ...

    def likely(self, guessed: Candidates, count: int) -> tuple[Tensor, Tensor]:
        """Guess what is revealed, of estimates without entropies.

        Returns:
            `count` likely sets of positions, the likeliest mostly first, no two the same, [..., count, block] bool, and the
            chance of each, [..., count] float; 0 where there are no more.
        """
        ...


def ranks(score: Tensor, candidates: Tensor) -> Tensor:
    """[..., block] long: the place of each candidate by score [..., block], best first, ties to the left; the others follow."""
    order = score.masked_fill(~candidates, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    places = indices(order.shape[-1], order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def top_by(score: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
    """The `count` [...] best of the candidates [..., block] by score [..., block], ties to the left; bool [..., block]."""
    return candidates & (ranks(score, candidates) < count[..., None])


def best_by(score: Tensor, candidates: Tensor) -> Tensor:
    """The best of the candidates [..., block] by score [..., block], ties to the left; bool [..., block]."""
    best = score.clamp(min=torch.finfo(score.dtype).min).masked_fill(~candidates, -torch.inf).argmax(-1, keepdim=True)
    return candidates & (indices(score.shape[-1], score.device) == best)


def likely_orders(guessed: Candidates, count: int) -> tuple[Tensor, Tensor]:
    """Guess the n most confident positions: all but the last are the surest, and the last one is uncertain.

    Arguments and results are those of `RevealRule.likely`.
    """
    where, confidence = guessed.where, guessed.confidence
    sure, place = (guessed.quota - 1).clamp(min=0)[..., None], ranks(confidence, where)
    surest = where & (place < sure)
    last = where[..., None, :] & (place[..., None, :] == (sure + indices(count, place.device))[..., None])
    chance = (alone_chances(confidence.clamp(max=MOST_ODDS), where & ~surest)[..., None, :] * last).sum(-1)
    # Where a step reveals more than is left, all of it goes.
    whole = where.any(-1) & ~(where & ~surest).any(-1)
    chance[..., 0] = torch.where(whole, 1.0, chance[..., 0])
    return surest[..., None, :] | last, chance


def alone_chances(confidence: Tensor, where: Tensor) -> Tensor:
    """Compute the chance of each position [..., block] to be the most confident one, estimates of confidences given; 0 outside
    of `where`."""
    return (ORDER_SHARPNESS * confidence).masked_fill(~where, -torch.inf).softmax(-1).nan_to_num(0.0)


def logit(probability: float) -> float:
    """log p - log (1 - p), infinite at 0 and 1."""
    if probability <= 0:
        return -math.inf
    return math.inf if probability >= 1 else math.log(probability) - math.log1p(-probability)


@dataclass(frozen=True)
class Static:
    """Reveal the n most confident positions; n = block_size / denoising_steps, the remainder to the first steps."""

    needs_entropy: ClassVar[bool] = False

    def __call__(self, scored: Candidates) -> Tensor:
        """See `RevealRule`."""
        return top_by(scored.confidence, scored.where, scored.quota)

    def likely(self, guessed: Candidates, count: int) -> tuple[Tensor, Tensor]:
        """See `RevealRule`."""
        return likely_orders(guessed, count)


@dataclass(frozen=True)
class Sequential:
    """Reveal the n leftmost masked positions."""

    needs_entropy: ClassVar[bool] = False

    def __call__(self, scored: Candidates) -> Tensor:
        """See `RevealRule`."""
        return scored.where & (scored.where.cumsum(-1) <= scored.quota[..., None])

    def likely(self, guessed: Candidates, count: int) -> tuple[Tensor, Tensor]:
        """See `RevealRule`: there is one such set."""
        where, rest = self(guessed)[..., None, :], (0,) * 2 + (0, count - 1)
        right = F.logsigmoid(guessed.confidence).masked_fill(~where[..., 0, :], 0.0).sum(-1, keepdim=True).exp()
        return F.pad(where, rest), F.pad(right * where.any(-1), (0, count - 1))


@dataclass(frozen=True)
class Dynamic:
    """Reveal every position whose confidence exceeds tau; at least the most confident one.

    Attributes:
        threshold: tau, in log-odds (`logit`).
    """

    threshold: float
    needs_entropy: ClassVar[bool] = False

    def __call__(self, scored: Candidates) -> Tensor:
        """See `RevealRule`."""
        return (scored.where & (scored.confidence > self.threshold)) | best_by(scored.confidence, scored.where)

    def likely(self, guessed: Candidates, count: int) -> tuple[Tensor, Tensor]:
        """See `RevealRule`: a position goes over tau or not the likelier, the further the estimate is from it.

        Where none but the surest one is likely to, it is as uncertain which one that is as under `Static`: every second set
        is another one alone.
        """
        where, confidence = guessed.where, guessed.confidence.clamp(-MOST_ODDS, MOST_ODDS)
        best = best_by(confidence, where)
        free = where & ~best
        gap = THRESHOLD_SHARPNESS * (confidence - min(max(self.threshold, -2 * MOST_ODDS), 2 * MOST_ODDS))
        doubt = gap.abs().masked_fill(~free, torch.inf)
        surest = best | (free & (gap > 0))
        one, turn = surest.sum(-1, keepdim=True) == 1, indices(count, where.device)
        alone = one & (turn % 2 == 0)
        nth = torch.where(one, (turn + 1) // 2, turn)
        other = free[..., None, :] & (ranks(-doubt, free)[..., None, :] == nth[..., None] - 1)
        sets = torch.where((alone & (turn > 0))[..., None], other, surest[..., None, :] ^ other)
        first = F.logsigmoid(doubt).sum(-1, keepdim=True)
        cost = (doubt.masked_fill(~free, 0.0)[..., None, :] * other).sum(-1)
        chance = (first - torch.where(alone, 0.0, cost)).exp()
        chance = chance * torch.where(alone, (alone_chances(confidence, where)[..., None, :] * sets).sum(-1), 1.0)
        return sets, torch.where(other.any(-1) | ((turn == 0) & where.any(-1, keepdim=True)), chance, 0.0)


@dataclass(frozen=True)
class EntropyBound:
    """Reveal in order of entropy while the running sum stays under a bound; at least one.

    Attributes:
        bound: In nats.
    """

    bound: float
    needs_entropy: ClassVar[bool] = True

    def __call__(self, scored: Candidates) -> Tensor:
        """See `RevealRule`."""
        assert scored.entropy is not None
        entropy = scored.entropy.masked_fill(~scored.where, torch.inf)
        ordered, order = entropy.sort(dim=-1, descending=False, stable=True)
        below = ordered.cumsum(-1) < self.bound
        under = torch.empty_like(below).scatter_(-1, order, below)
        return (scored.where & under) | best_by(-entropy, scored.where)

    def likely(self, guessed: Candidates, count: int) -> tuple[Tensor, Tensor]:
        """See `RevealRule`: the surest ones, about as many as estimated confidences leave room for.

        Where there is room for one, there are no fewer: in place of these stands another one alone, and all is as uncertain as
        which one is the surest.
        """
        where, odds = guessed.where, guessed.confidence.clamp(-MOST_ODDS, MOST_ODDS)
        place = ranks(odds, where)
        entropy = likely_entropy(odds).masked_fill(~where, 0.0)
        total = (entropy[..., None, :] * (place[..., None, :] <= place[..., None])).sum(-1)
        room = (where & (total < self.bound)).sum(-1, keepdim=True).clamp(min=1)
        more = constant(tuple((turn + 1) // 2 * (-1) ** (turn + 1) for turn in range(count)), where.device)  # 0, 1, -1, 2, ...
        size, several = room + more, more.abs()
        chance = ((size >= 1) & (size <= where.sum(-1, keepdim=True))) * EACH_MORE ** several.to(odds.dtype)
        sets = where[..., None, :] & (place[..., None, :] < size[..., None])
        one, surest = room == 1, alone_chances(odds, where)
        alone = one & (more <= 0)
        sets = torch.where(alone[..., None], where[..., None, :] & (place[..., None, :] == several[:, None]), sets)
        chance = torch.where(one, chance * surest.amax(-1, keepdim=True), chance)
        return sets, torch.where(alone, (surest[..., None, :] * sets).sum(-1), chance)


def likely_entropy(odds: Tensor) -> Tensor:
    """Estimate entropies, in nats, from the log-odds [...] of the likeliest tokens alone."""
    p, log_p, log_q = odds.sigmoid(), F.logsigmoid(odds), F.logsigmoid(-odds)
    return -p * log_p - (1 - p) * log_q + (1 - p) * TAIL_NATS


def reveal_schedule(block_size: int, denoising_steps: int | None) -> Tensor:
    """[block_size] long: how many positions each denoising step of a block reveals, then zeros."""
    steps = denoising_steps or block_size
    counts = torch.zeros(block_size, dtype=torch.long)
    counts[:steps] = block_size // steps
    counts[: block_size % steps] += 1
    return counts


__all__ = [
    "EACH_MORE",
    "MOST_ODDS",
    "ORDER_SHARPNESS",
    "TAIL_NATS",
    "THRESHOLD_SHARPNESS",
    "Candidates",
    "Dynamic",
    "EntropyBound",
    "RevealRule",
    "Sequential",
    "Static",
    "alone_chances",
    "best_by",
    "likely_entropy",
    "likely_orders",
    "logit",
    "ranks",
    "reveal_schedule",
    "top_by",
]
