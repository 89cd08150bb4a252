"""Reveal rules: which columns a step of the backbone reveals, and which it is likely to reveal where that is only guessed.

A rule is a function of **one scored state and a memo**: a small immutable value that is carried along the accepted path, from
None at the first state of a text. Acceptance walks that path state by state, so that a drafted state reveals what it would have
revealed had the text come to it step by step: drafts are lossless for every rule, also for one with a memory.

Each rule also says, of estimates in place of scores, what it is `likely` to do: that decides what is drafted, never what the
text is.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from .state import Scores, State

Columns = tuple[int, ...]
# Sets of columns that a step may reveal, each with its chance.
Guesses = list[tuple[Columns, float]]

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


class RevealRule(ABC):
    """Decides what a step of the backbone reveals: a frozen dataclass of its numbers.

    Attributes:
        needs_entropy: Whether it reads `Scores.entropy`.
    """

    needs_entropy: ClassVar[bool] = False

    @property
    def left_to_right(self) -> bool:
        """Whether it reveals the leftmost masks, one a step: then all before a reveal is known."""
        return False

    @abstractmethod
    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """Choose the columns that are revealed, one at least, of `state.free`, which is not empty; and the memo behind it.

        The memo covers all columns chosen here, also those that a ban or the head takes back later. Drafting calls this, too:
        for a remembered state, with the memo of the row's accepted path so far, and keeps the columns alone. So a rule must
        take any memo, None or one of its own of another state, with any state.
        """

    @abstractmethod
    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """Guess up to `count` sets of columns, the likeliest mostly first, by estimates of the log-odds [block]; no memo.

        The chance of a single one orders nothing: it may be 1.
        """


def surest(columns: Sequence[int], odds: Sequence[float]) -> int:
    """The column with the largest odds; of equals the leftmost."""
    return max(columns, key=odds.__getitem__)


def by_odds(columns: Columns, odds: Sequence[float]) -> list[int]:
    """The columns by their odds, the surest first; of equals the leftmost."""
    return sorted(columns, key=odds.__getitem__, reverse=True)


def alone_chances(few: Sequence[int], columns: Sequence[int], odds: Sequence[float]) -> dict[int, float]:
    """The chance of each of a few columns, the surest first, to be the surest of all `columns`, by estimates of the odds."""
    most = odds[few[0]]
    if most > MOST_ODDS:
        return alone_chances(few, columns, [min(one, MOST_ODDS) for one in odds])
    exp = math.exp
    total = sum([exp(ORDER_SHARPNESS * (odds[column] - most)) for column in columns])
    return {column: exp(ORDER_SHARPNESS * (odds[column] - most)) / total for column in few}


def likely_over(columns: Columns, odds: Sequence[float], threshold: float, count: int) -> Guesses:
    """Guess what exceeds a threshold in log-odds, at least the surest: a column goes over it or not the likelier, the further
    the estimate is from it.

    Where none but the surest one is likely to, it is as uncertain which one that is as under `Static`: every second set is
    another one alone.
    """
    best, threshold, exp = surest(columns, odds), bounded(threshold, 2 * MOST_ODDS), math.exp
    if count == 1:
        return [(tuple([column for column in columns if odds[column] > threshold or column == best]), 1.0)]
    over, doubts, chance = [], list[tuple[float, int]](), 1.0
    for column in columns:
        gap = THRESHOLD_SHARPNESS * (odds[column] - threshold)
        if column == best or gap > 0:
            over.append(column)
        if column != best:
            chance /= 1.0 + exp(-abs(gap))
            doubts.append((abs(gap), column))
    doubts = sorted(doubts)[: count - 1]
    if len(over) > 1:
        guesses = [(tuple(over), chance)]
        for doubt, column in doubts:
            other = [one for one in over if one != column] if column in over else [*over, column]
            guesses.append((tuple(sorted(other)), chance * exp(-doubt)))
        return guesses
    del doubts[count // 2 :]
    alone = alone_chances([best, *(column for _, column in doubts)], columns, odds)
    guesses = [((best,), chance * alone[best])]
    for doubt, column in doubts:
        guesses.append(((best, column) if best < column else (column, best), chance * exp(-doubt)))
        guesses.append(((column,), chance * alone[column]))
    return guesses[:count]


def likely_first(
    columns: Columns, odds: Sequence[float], room_of: Callable[[list[int], list[float]], int], count: int
) -> Guesses:
    """Guess how many of the columns go, the surest first: about as many as `room_of` says, given the order and finite odds.

    Where there is room for one, there are no fewer: in place of these stands another one alone, and all is as uncertain as
    which one is the surest.
    """
    odds = [bounded(one, MOST_ODDS) for one in odds]
    ordered = by_odds(columns, odds)
    room = max(room_of(ordered, odds), 1)
    alone = alone_chances(ordered[:count], ordered, odds) if room == 1 else {}
    guesses: Guesses = []
    for turn in range(count):
        several, more = (turn + 1) // 2, turn % 2 == 1
        size = room + (several if more else -several)
        if alone and not more:
            if several < len(ordered):
                guesses.append(((ordered[several],), alone[ordered[several]]))
        elif 1 <= size <= len(ordered):
            chance = EACH_MORE**several * (alone[ordered[0]] if alone else 1.0)
            guesses.append((tuple(sorted(ordered[:size])), chance))
    return guesses


def bounded(odds: float, most: float) -> float:
    """Log-odds of which sums stay finite."""
    return odds if -most <= odds <= most else math.copysign(most, odds)


def log_sigmoid(odds: float) -> float:
    """log of the probability whose log-odds these are."""
    return -math.log1p(math.exp(-odds)) if odds > 0 else odds - math.log1p(math.exp(odds))


def sigmoid(odds: float) -> float:
    """The probability whose log-odds these are."""
    return math.exp(log_sigmoid(odds))


def logit(probability: float) -> float:
    """log p - log (1 - p), infinite at 0 and 1."""
    if probability <= 0:
        return -math.inf
    return math.inf if probability >= 1 else math.log(probability) - math.log1p(-probability)


def schedule_of(block_size: int, denoising_steps: int | None) -> Columns:
    """How many columns each denoising step of a block reveals: `block_size / denoising_steps`, the remainder to the first."""
    steps = denoising_steps or block_size
    return tuple([block_size // steps + (step < block_size % steps) for step in range(steps)])


@dataclass(frozen=True)
class Static(RevealRule):
    """Reveal the n most confident columns.

    Attributes:
        schedule: n, by denoising step of the block (`schedule_of`).
    """

    schedule: Columns

    def quota(self, state: State) -> int:
        """How many columns the step at a state reveals."""
        return self.schedule[min(state.step, len(self.schedule) - 1)]

    def first(self, state: State, odds: Sequence[float]) -> Columns:
        """The n surest columns, or all that are left."""
        quota = self.quota(state)
        return (surest(state.free, odds),) if quota == 1 else tuple(sorted(by_odds(state.free, odds)[:quota]))

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        return self.first(state, scores.odds), memo

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: all but the last are the surest, and the last one is uncertain."""
        quota = self.quota(state)
        if count == 1 or len(state.free) < quota:
            return [(self.first(state, odds), 1.0)]
        ordered = by_odds(state.free, odds)
        first, rest = ordered[: quota - 1], ordered[quota - 1 :]
        chances = alone_chances(rest[:count], rest, odds)
        return [(tuple(sorted([*first, last])), chance) for last, chance in chances.items()]


@dataclass(frozen=True)
class Sequential(Static):
    """Reveal the n leftmost masked columns."""

    @property
    def left_to_right(self) -> bool:
        """See `RevealRule`."""
        return max(self.schedule) == 1

    def first(self, state: State, odds: Sequence[float]) -> Columns:
        """The n leftmost columns, or all that are left."""
        return state.free[: self.quota(state)]

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: there is one such set."""
        return [(self.first(state, odds), 1.0)]


@dataclass(frozen=True)
class Dynamic(RevealRule):
    """Reveal every column whose confidence exceeds tau; at least the most confident one.

    Attributes:
        threshold: tau, in log-odds (`logit`).
    """

    threshold: float

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        odds, threshold = scores.odds, self.threshold
        best = surest(state.free, odds)
        return tuple([column for column in state.free if odds[column] > threshold or column == best]), memo

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`."""
        return likely_over(state.free, odds, self.threshold, count)


@dataclass(frozen=True)
class EntropyBound(RevealRule):
    """Reveal in order of entropy while the running sum stays under a bound; at least one.

    Attributes:
        bound: In nats.
    """

    bound: float
    needs_entropy = True

    def leading(self, entropies: Sequence[float]) -> int:
        """Count the columns that go, of entropies in rising order; 0 stands for one."""
        return sum([total < self.bound for total in accumulate(entropies)])

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        entropy = scores.entropy
        assert entropy is not None
        ordered = sorted(state.free, key=entropy.__getitem__)
        shown = max(self.leading([entropy[column] for column in ordered]), 1)
        return tuple(sorted(ordered[:shown])), memo

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: about as many of the surest as estimated confidences leave room for."""

        def room_of(ordered: list[int], odds: list[float]) -> int:
            return self.leading([likely_entropy(odds[column]) for column in ordered])

        return likely_first(state.free, odds, room_of, count)


def likely_entropy(odds: float) -> float:
    """Estimate an entropy, in nats, from the log-odds of the likeliest token alone."""
    log_p, log_q = log_sigmoid(odds), log_sigmoid(-odds)
    p = math.exp(log_p)
    return -p * log_p - (1 - p) * log_q + (1 - p) * TAIL_NATS
