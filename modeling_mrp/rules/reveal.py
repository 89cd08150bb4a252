"""Reveal rules: choose the columns (positions within the block) that a backbone step reveals, and
guess them for drafts.

A rule is a function of **one scored state and a memo**: a small immutable value that is carried
along the accepted path, from None at the first state of a text. Acceptance walks that path state by
state, so a drafted state reveals exactly what it would have revealed without drafts: drafts are
lossless for every rule, also for one with a memory.

Each rule also guesses, from estimates in place of scores, what it is `likely` to reveal. Guesses
decide what is drafted, never what the text is.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from .state import Scores, State

Columns = tuple[int, ...]
# Sets of columns that a step may reveal, each with an estimate of its chance.
Guesses = list[tuple[Columns, float]]

# Drafts suppose that a column is revealed first with a chance proportional to this power of its
# odds. Measured reveals follow the first power or a little more, but the fourth makes the best
# drafts: since a state that the path misses is remembered, a deep draft pays more than its chance
# says (`benchmarks/NOTES.md`, Few head passes a round).
ORDER_SHARPNESS = 4.0
# The log-odds that an estimate is on the right side of a threshold are its distance from the
# threshold times this.
THRESHOLD_SHARPNESS = 2.0
# The factor on the chance of a guess for each column more or less than the likeliest number
# (`likely_first`).
EACH_MORE = 0.35
# The entropy assumed among all tokens of a position but the likeliest one, in nats.
TAIL_NATS = 2.0
# Log-odds are clipped to this magnitude, which is as good as certainty, so that their sums stay
# finite.
MOST_ODDS = 1e4


class RevealRule(ABC):
    """Decides which columns a backbone step reveals; each rule is a frozen dataclass of its
    parameters.

    Attributes:
        needs_entropy: Whether the rule reads `Scores.entropy`.
    """

    needs_entropy: ClassVar[bool] = False

    @property
    def left_to_right(self) -> bool:
        """Whether each step reveals exactly the leftmost mask, so that all tokens to the left of a
        reveal are known."""
        return False

    @abstractmethod
    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """Choose the columns of `state.free` (not empty) to reveal, at least one; return them and
        the memo after the reveal.

        The memo covers all columns chosen here, also those that a ban or the head puts back to
        masks later. Drafting, too, calls this for remembered states, with the memo of the row's
        accepted path so far, and uses only the columns. So a rule must accept any memo (None, or
        its own of another state) with any state.
        """

    @abstractmethod
    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """Guess, without a memo, up to `count` sets of columns that a step may reveal from
        estimated log-odds [block].

        Likelier sets mostly come first. Chances only rank guesses: that of a single guess may be 1.
        """


def surest(columns: Sequence[int], odds: Sequence[float]) -> int:
    """Return the column with the largest odds, the leftmost if several are equal."""
    return max(columns, key=odds.__getitem__)


def by_odds(columns: Columns, odds: Sequence[float]) -> list[int]:
    """Sort columns by odds, the largest first; equal ones from left to right."""
    return sorted(columns, key=odds.__getitem__, reverse=True)


def alone_chances(
    few: Sequence[int], columns: Sequence[int], odds: Sequence[float]
) -> dict[int, float]:
    """Estimate for each column of `few` (by falling odds) the chance that it is the most confident
    of all `columns`."""
    most = odds[few[0]]
    if most > MOST_ODDS:
        return alone_chances(few, columns, [min(one, MOST_ODDS) for one in odds])
    exp = math.exp
    total = sum([exp(ORDER_SHARPNESS * (odds[column] - most)) for column in columns])
    return {column: exp(ORDER_SHARPNESS * (odds[column] - most)) / total for column in few}


def likely_over(columns: Columns, odds: Sequence[float], threshold: float, count: int) -> Guesses:
    """Guess the reveals of a rule that takes the columns above a threshold in log-odds, at least
    the most confident one.

    The further an estimate is from the threshold, the likelier its column is on the same side. If
    only one column is likely to be revealed, it is uncertain which one is the most confident, as
    under `Static`: so every second guess is another column alone.
    """
    best, threshold, exp = surest(columns, odds), bounded(threshold, 2 * MOST_ODDS), math.exp
    if count == 1:
        return [
            (
                tuple([column for column in columns if odds[column] > threshold or column == best]),
                1.0,
            )
        ]
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
    columns: Columns,
    odds: Sequence[float],
    room_of: Callable[[list[int], list[float]], int],
    count: int,
) -> Guesses:
    """Guess reveals of the most confident columns, about as many as `room_of` returns for columns
    in that order and all odds.

    If it returns 1, no guess can have fewer columns: other columns alone take the place of smaller
    guesses, since it is uncertain which one is the most confident. `room_of` gets finite odds.
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
    """Clip log-odds to [-`most`, `most`], so that their sums stay finite."""
    return odds if -most <= odds <= most else math.copysign(most, odds)


def log_sigmoid(odds: float) -> float:
    """Compute the log of a probability from its log-odds."""
    return -math.log1p(math.exp(-odds)) if odds > 0 else odds - math.log1p(math.exp(odds))


def sigmoid(odds: float) -> float:
    """Compute a probability from its log-odds."""
    return math.exp(log_sigmoid(odds))


def logit(probability: float) -> float:
    """Compute the log-odds of a probability, infinite at 0 and 1."""
    if probability <= 0:
        return -math.inf
    return math.inf if probability >= 1 else math.log(probability) - math.log1p(-probability)


def schedule_of(block_size: int, denoising_steps: int | None) -> Columns:
    """List how many columns each denoising step reveals: an equal share of the block, one more in
    the first if uneven."""
    steps = denoising_steps or block_size
    return tuple([block_size // steps + (step < block_size % steps) for step in range(steps)])


@dataclass(frozen=True)
class Static(RevealRule):
    """Reveal the n most confident columns.

    Attributes:
        schedule: n by denoising step of the block (`schedule_of`).
    """

    schedule: Columns

    def quota(self, state: State) -> int:
        """Return the number of columns that the step at a state reveals."""
        return self.schedule[min(state.step, len(self.schedule) - 1)]

    def first(self, state: State, odds: Sequence[float]) -> Columns:
        """Select the n most confident columns, or all that are left."""
        quota = self.quota(state)
        return (
            (surest(state.free, odds),)
            if quota == 1
            else tuple(sorted(by_odds(state.free, odds)[:quota]))
        )

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        return self.first(state, scores.odds), memo

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: guesses differ in the least confident of their n columns; the others
        are taken as certain."""
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
        """Select the n leftmost columns, or all that are left."""
        return state.free[: self.quota(state)]

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: return a single guess."""
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
        return tuple(
            [column for column in state.free if odds[column] > threshold or column == best]
        ), memo

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`."""
        return likely_over(state.free, odds, self.threshold, count)


@dataclass(frozen=True)
class EntropyBound(RevealRule):
    """Reveal columns by rising entropy while the running sum of entropies stays under a bound; at
    least one column.

    Attributes:
        bound: The bound, in nats.
    """

    bound: float
    needs_entropy = True

    def leading(self, entropies: Sequence[float]) -> int:
        """Count the columns to reveal, given entropies in rising order; a count of 0 means one
        column."""
        return sum([total < self.bound for total in accumulate(entropies)])

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        entropy = scores.entropy
        assert entropy is not None
        ordered = sorted(state.free, key=entropy.__getitem__)
        shown = max(self.leading([entropy[column] for column in ordered]), 1)
        return tuple(sorted(ordered[:shown])), memo

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: guess the most confident columns, about as many as their estimated
        entropies allow."""

        def room_of(ordered: list[int], odds: list[float]) -> int:
            return self.leading([likely_entropy(odds[column]) for column in ordered])

        return likely_first(state.free, odds, room_of, count)


def likely_entropy(odds: float) -> float:
    """Estimate the entropy of a position, in nats, from the log-odds of its likeliest token
    alone."""
    log_p, log_q = log_sigmoid(odds), log_sigmoid(-odds)
    p = math.exp(log_p)
    return -p * log_p - (1 - p) * log_q + (1 - p) * TAIL_NATS
