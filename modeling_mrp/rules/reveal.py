"""Reveal rules: they choose the columns (positions within the block) that a backbone step reveals,
and guess these columns for drafts.

A rule is a function of **one scored state and a memo**. The memo is a small immutable value that is
carried along the accepted path; it is None at the first state of a text. Acceptance walks that path
state by state, so a drafted state reveals exactly what it would have revealed without drafts. So
drafts are lossless for every rule, also for a rule with a memo.

Each rule also guesses, from estimates in place of scores, what it is `likely` to reveal. Guesses
decide what is drafted, but never change the text.

A rule is one class. With a name, as in `class Nearest(RevealRule, name="nearest")`, it becomes a
value of `decoding` and `target`, and the options that it declares become options of `generate`.
Tables, flags, documents and tests take both from `RULES`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Self

from .options import NATS, PROBABILITY, STEPS, Option
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
# The assumed entropy, in nats, of a position's tokens other than the likeliest one.
TAIL_NATS = 2.0
# Log-odds are clipped to this magnitude, which is as good as certainty, so that their sums stay
# finite.
MOST_ODDS = 1e4


DENOISING_STEPS = Option(
    "denoising_steps", None, STEPS, "steps per block; None: `block_size`, one token a step"
)
CONFIDENCE_THRESHOLD = Option("confidence_threshold", 0.9, PROBABILITY, "tau, a probability")
ENTROPY_THRESHOLD = Option(
    "entropy_threshold",
    0.35,
    NATS,
    "bound in nats on the summed entropy of a step's reveals (`eb_sampler`: less the largest)",
)

# The rules by name, in the order of their definitions; rules without a name are left out.
RULES: "dict[str, type[RevealRule]]" = {}


class RevealRule(ABC):
    """Decides which columns a backbone step reveals. Each rule is a frozen dataclass of its
    parameters.

    Args:
        name: A class argument of subclasses: the value of `decoding` and `target` that selects the
            rule. If it is "", the rule can only be selected by passing an object of it. A name has
            an effect only for classes of this package, because the table of options is made when
            the package is imported. For your own classes, pass an object.

    Attributes:
        options: The options of `generate` from which the rule is made.
        needs_entropy: Whether the rule reads `Scores.entropy`.
        stale_acceptance: The share of the chances of `likely` that is assumed to come true in
            drafts from stale scores, before a call has observed any (`ExpectedGain`).
    """

    options: ClassVar[tuple[Option, ...]] = ()
    needs_entropy: ClassVar[bool] = False
    stale_acceptance: ClassVar[float] = 0.75

    def __init_subclass__(cls, name: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name in RULES:
            raise TypeError(f"the reveal rule {cls.__name__} is named {name!r}, as another is")
        if name:
            RULES[name] = cls

    @classmethod
    def from_options(cls, options: Any, block_size: int) -> Self:
        """Make the rule for a model's block size from checked options (an `MRPGenerationConfig`).
        This implementation uses neither, and makes the rule with the defaults of its fields."""
        return cls()

    @property
    def left_to_right(self) -> bool:
        """Whether each step reveals exactly the leftmost mask. If so, all tokens to the left of a
        reveal are known."""
        return False

    @abstractmethod
    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """Choose the columns to reveal: at least one of `state.free`, which is not empty. Return
        these columns and the memo after the reveal.

        `memo` is what this method returned at the state before; None at the first state of a text.
        It covers all columns chosen there, also those that a ban or the head then turned into masks
        again. Drafting also calls this method for states that the last round scored, with the memo
        of the row's accepted path so far, and uses only the columns. So a rule must accept any
        state with any memo: None, or its own memo of another state.
        """

    def likely(self, state: State, log_odds: Sequence[float], count: int) -> Guesses:
        """Guess which sets of columns a step may reveal at `state`, from estimated `log_odds`
        [block] and without a memo. Return a list of up to `count` pairs: a set of columns and its
        chance.

        Likelier sets mostly come first. Chances only rank the guesses, so a single guess may have
        the chance 1. This implementation is for rules that mostly reveal the most confident column.
        """
        ordered = by_odds(state.free, log_odds)[:count]
        chances = first_reveal_probabilities(ordered, state.free, log_odds)
        return [((column,), chance) for column, chance in chances.items()]


@dataclass(frozen=True)
class CheckedRule(RevealRule):
    """A caller's rule whose results are checked.

    Attributes:
        rule: The caller's rule.

    Raises:
        ValueError: for a rule that is not hashable; from the methods, for columns that cannot be
            revealed.
    """

    rule: RevealRule

    def __post_init__(self) -> None:
        try:
            hash(self.rule)
        except TypeError as error:
            raise ValueError(
                f"the reveal rule {self.rule!r} cannot be hashed ({error}): make it a frozen "
                "dataclass with fields that can be, such as tuples"
            ) from None
        object.__setattr__(self, "needs_entropy", self.rule.needs_entropy)
        object.__setattr__(self, "stale_acceptance", self.rule.stale_acceptance)

    @property
    def left_to_right(self) -> bool:
        """Whether the caller's rule always reveals exactly the leftmost mask
        (`RevealRule.left_to_right`)."""
        return self.rule.left_to_right

    def checked(self, method: str, state: State, columns: Any) -> Columns:
        """Return as a tuple the columns that a method of the rule returned.

        Raise `ValueError` unless there is at least one column, no column occurs twice, and all of
        them are in `state.free`. `method` is the name of the method, for the message.
        """
        kept = tuple(columns) if isinstance(columns, list | tuple) else ()
        if not kept or len({*kept}) < len(kept) or not {*state.free}.issuperset(kept):
            raise ValueError(
                f"{type(self.rule).__name__}.{method} returned the columns {columns!r} where "
                f"{state.free} can be revealed: return a tuple of one or more of these"
            )
        return kept

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """Choose the columns to reveal by the caller's rule, and check them. Return them and the
        rule's memo."""
        columns, new_memo = self.rule.reveal(state, scores, memo)
        return self.checked("reveal", state, columns), new_memo

    def likely(self, state: State, log_odds: Sequence[float], count: int) -> Guesses:
        """Return the guesses of the caller's rule (`RevealRule.likely`), after checking their
        columns."""
        guesses = self.rule.likely(state, log_odds, count)
        return [(self.checked("likely", state, columns), chance) for columns, chance in guesses]


def most_confident(columns: Sequence[int], log_odds: Sequence[float]) -> int:
    """Return the column with the highest log-odds; the leftmost one if several are equal."""
    return max(columns, key=log_odds.__getitem__)


def by_odds(columns: Columns, log_odds: Sequence[float]) -> list[int]:
    """Sort columns in order of decreasing log-odds; columns with equal log-odds stay in their
    order."""
    return sorted(columns, key=log_odds.__getitem__, reverse=True)


def first_reveal_probabilities(
    candidates: Sequence[int], columns: Sequence[int], log_odds: Sequence[float]
) -> dict[int, float]:
    """Map each column of `candidates` to the estimated chance that it is the most confident one of
    all `columns`.

    Args:
        candidates: Some of the columns, in order of decreasing log-odds, beginning with the highest
            of all `columns`.
        columns: All columns that may be the most confident one.
        log_odds: For each column of the block, the estimated log-odds.
    """
    max_log_odds = log_odds[candidates[0]]
    if max_log_odds > MOST_ODDS:
        return first_reveal_probabilities(
            candidates, columns, [min(value, MOST_ODDS) for value in log_odds]
        )
    exp = math.exp
    total = sum([exp(ORDER_SHARPNESS * (log_odds[column] - max_log_odds)) for column in columns])
    return {
        column: exp(ORDER_SHARPNESS * (log_odds[column] - max_log_odds)) / total
        for column in candidates
    }


def likely_over(
    columns: Columns, log_odds: Sequence[float], threshold: float, count: int
) -> Guesses:
    """Guess the reveals of a rule that reveals all columns above a threshold in log-odds (a column
    exactly at it is left out), and at least the most confident column.

    The first guess is what the rule reveals if the estimates are right. Each of the others adds or
    leaves out one column whose estimate is close to the threshold. If the first guess is a single
    column, another column may turn out to be the most confident one; so a guess of some other
    column alone follows each guess that adds a column.

    Args:
        columns: The free columns of the state.
        log_odds: For each column of the block, the estimated log-odds.
        threshold: The threshold.
        count: The largest number of guesses.

    Returns:
        Guesses, each a pair of the columns and the chance that the rule reveals just these.
    """
    best = most_confident(columns, log_odds)
    threshold = bounded(threshold, 2 * MOST_ODDS)
    exp = math.exp
    if count == 1:
        likeliest = [column for column in columns if log_odds[column] > threshold or column == best]
        return [(tuple(likeliest), 1.0)]
    confident = []
    distances = list[tuple[float, int]]()
    chance = 1.0
    for column in columns:
        margin = THRESHOLD_SHARPNESS * (log_odds[column] - threshold)
        if column == best or margin > 0:
            confident.append(column)
        if column != best:
            chance /= 1.0 + exp(-abs(margin))
            distances.append((abs(margin), column))
    distances = sorted(distances)[: count - 1]
    if len(confident) > 1:
        guesses = [(tuple(confident), chance)]
        for distance, column in distances:
            if column in confident:
                alternative = [member for member in confident if member != column]
            else:
                alternative = [*confident, column]
            guesses.append((tuple(sorted(alternative)), chance * exp(-distance)))
        return guesses
    del distances[count // 2 :]
    probabilities = first_reveal_probabilities(
        [best, *(column for _, column in distances)], columns, log_odds
    )
    guesses = [((best,), chance * probabilities[best])]
    for distance, column in distances:
        guesses.append(
            ((best, column) if best < column else (column, best), chance * exp(-distance))
        )
        guesses.append(((column,), chance * probabilities[column]))
    return guesses[:count]


def likely_first(
    columns: Columns,
    log_odds: Sequence[float],
    room_of: Callable[[list[int], list[float]], int],
    count: int,
) -> Guesses:
    """Guess the reveals of a rule that reveals the most confident columns, as many as `room_of`
    returns.

    If it returns n, the guesses are the n most confident columns, then the n + 1, the n - 1, the
    n + 2 most confident ones and so on, as far as there are such numbers of columns. If n is 1, no
    guess can be smaller: in place of the smaller ones, other columns are guessed, each alone.

    Args:
        columns: The free columns of the state.
        log_odds: For each column of the block, the estimated log-odds.
        room_of: A function that returns the number of columns that the rule reveals, given
            `columns` in order of decreasing log-odds, and log-odds (clipped to be finite).
        count: The largest number of guesses.

    Returns:
        Guesses, each a pair of the columns and a chance, which serves to rank the guesses.
    """
    log_odds = [bounded(value, MOST_ODDS) for value in log_odds]
    ordered = by_odds(columns, log_odds)
    room = max(room_of(ordered, log_odds), 1)
    probabilities = (
        first_reveal_probabilities(ordered[:count], ordered, log_odds) if room == 1 else {}
    )
    guesses: Guesses = []
    for index in range(count):
        offset = (index + 1) // 2
        is_larger = index % 2 == 1
        size = room + (offset if is_larger else -offset)
        if probabilities and not is_larger:
            if offset < len(ordered):
                guesses.append(((ordered[offset],), probabilities[ordered[offset]]))
        elif 1 <= size <= len(ordered):
            chance = EACH_MORE**offset * (probabilities[ordered[0]] if probabilities else 1.0)
            guesses.append((tuple(sorted(ordered[:size])), chance))
    return guesses


def bounded(log_odds: float, limit: float) -> float:
    """Clip log-odds to [-`limit`, `limit`], so that their sums stay finite."""
    return log_odds if -limit <= log_odds <= limit else math.copysign(limit, log_odds)


def log_sigmoid(log_odds: float) -> float:
    """Compute the log of a probability from its log-odds."""
    if log_odds > 0:
        return -math.log1p(math.exp(-log_odds))
    return log_odds - math.log1p(math.exp(log_odds))


def sigmoid(log_odds: float) -> float:
    """Compute a probability from its log-odds."""
    return math.exp(log_sigmoid(log_odds))


def logit(probability: float) -> float:
    """Compute the log-odds of a probability, infinite at 0 and 1."""
    if probability <= 0:
        return -math.inf
    if probability >= 1:
        return math.inf
    return math.log(probability) - math.log1p(-probability)


def schedule_of(block_size: int, denoising_steps: int | None) -> Columns:
    """Return the number of columns that each denoising step of a block reveals. Each step reveals
    an equal share of the block; if that leaves a remainder, the first steps reveal one more. If
    `denoising_steps` is None, each step reveals one column."""
    steps = denoising_steps or block_size
    return tuple([block_size // steps + (step < block_size % steps) for step in range(steps)])


@dataclass(frozen=True)
class Static(RevealRule, name="static"):
    """Reveal the n most confident columns, where n depends on the denoising step.

    Attributes:
        schedule: The number n for each denoising step of a block. `schedule_of` makes one in which
            the steps share the columns of the block equally.
    """

    schedule: Columns
    options: ClassVar[tuple[Option, ...]] = (DENOISING_STEPS,)
    stale_acceptance = 0.8

    @classmethod
    def from_options(cls, options: Any, block_size: int) -> Self:
        """Make the rule from the block size and `denoising_steps`, a checked option in `options`
        (an `MRPGenerationConfig`)."""
        return cls(schedule_of(block_size, options.denoising_steps))

    def quota(self, state: State) -> int:
        """Return n, the number of columns that the step at a state reveals: the entry of `schedule`
        for this step, or its last entry after more steps than it has."""
        return self.schedule[min(state.step, len(self.schedule) - 1)]

    def first(self, state: State, log_odds: Sequence[float]) -> Columns:
        """Return the n most confident free columns of a state, or all of them if fewer are left.
        `log_odds` has the log-odds of each column of the block."""
        quota = self.quota(state)
        if quota == 1:
            return (most_confident(state.free, log_odds),)
        return tuple(sorted(by_odds(state.free, log_odds)[:quota]))

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """Return the n most confident free columns of `state` by `scores.log_odds`, where n is the
        number of tokens that this step of the block reveals. The memo is not used, and is returned
        as it is."""
        return self.first(state, scores.log_odds), memo

    def likely(self, state: State, log_odds: Sequence[float], count: int) -> Guesses:
        """Guess up to `count` sets of columns that the rule may reveal at `state`, each with its
        chance, from estimated `log_odds`. All guesses have the n - 1 most confident columns, which
        are taken as certain, and differ in the last column. If fewer than n columns are free, the
        only guess is all of them."""
        quota = self.quota(state)
        if count == 1 or len(state.free) < quota:
            return [(self.first(state, log_odds), 1.0)]
        ordered = by_odds(state.free, log_odds)
        first = ordered[: quota - 1]
        uncertain = ordered[quota - 1 :]
        chances = first_reveal_probabilities(uncertain[:count], uncertain, log_odds)
        guesses = []
        for last, chance in chances.items():
            guesses.append((tuple(sorted([*first, last])), chance))
        return guesses


@dataclass(frozen=True)
class Dynamic(RevealRule, name="dynamic"):
    """Reveal every column whose confidence exceeds tau, a probability, and at least the most
    confident column.

    Attributes:
        threshold: The log-odds of tau (`logit`).
    """

    threshold: float
    options: ClassVar[tuple[Option, ...]] = (CONFIDENCE_THRESHOLD,)
    stale_acceptance = 0.5  # stale scores miss columns that this step brings over the threshold

    @classmethod
    def from_options(cls, options: Any, block_size: int) -> Self:
        """Make the rule from `confidence_threshold`, a checked option in `options` (an
        `MRPGenerationConfig`). The block size is not used."""
        return cls(logit(options.confidence_threshold))

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """Return the columns that the rule reveals at `state`, judging by `scores.log_odds`. The
        memo is not used, and is returned as it is."""
        log_odds = scores.log_odds
        threshold = self.threshold
        best = most_confident(state.free, log_odds)
        return tuple(
            [column for column in state.free if log_odds[column] > threshold or column == best]
        ), memo

    def likely(self, state: State, log_odds: Sequence[float], count: int) -> Guesses:
        """Guess up to `count` sets of columns that the rule may reveal at `state`, each with its
        chance. The first guess is what the rule reveals if the estimated `log_odds` are right. Most
        others add or leave out one column whose estimate is close to the threshold
        (`likely_over`)."""
        return likely_over(state.free, log_odds, self.threshold, count)


@dataclass(frozen=True)
class Sequential(Static, name="sequential"):
    """Reveal the n leftmost masked columns. The number n is that of `Static`."""

    stale_acceptance = 0.95

    @property
    def left_to_right(self) -> bool:
        """Whether each step reveals exactly the leftmost mask, which means that n is always 1."""
        return max(self.schedule) == 1

    def first(self, state: State, log_odds: Sequence[float]) -> Columns:
        """Return the n leftmost free columns of a state, or all of them if fewer are left. The
        log-odds are not used."""
        return state.free[: self.quota(state)]

    def likely(self, state: State, log_odds: Sequence[float], count: int) -> Guesses:
        """Return a single guess, the n leftmost free columns, with the chance 1."""
        return [(self.first(state, log_odds), 1.0)]


@dataclass(frozen=True)
class EntropyBound(RevealRule, name="entropy_bound"):
    """Reveal columns in order of increasing entropy while the sum of their entropies stays below a
    bound; at least one column.

    Attributes:
        bound: The bound, in nats.
    """

    bound: float
    options: ClassVar[tuple[Option, ...]] = (ENTROPY_THRESHOLD,)
    needs_entropy = True
    stale_acceptance = 0.45

    @classmethod
    def from_options(cls, options: Any, block_size: int) -> Self:
        """Make the rule from `entropy_threshold`, a checked option in `options` (an
        `MRPGenerationConfig`). The block size is not used."""
        return cls(options.entropy_threshold)

    def leading(self, entropies: Sequence[float]) -> int:
        """Return the largest number of entropies, from the first on, whose sum is below the bound.
        If it is 0, `reveal` reveals one column all the same. `entropies` are those of the free
        columns, in nats, in increasing order."""
        return sum([total < self.bound for total in accumulate(entropies)])

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """Return the columns that the rule reveals at `state`, judging by `scores.entropy`. The
        memo is not used, and is returned as it is."""
        entropy = scores.entropy
        assert entropy is not None
        ordered = sorted(state.free, key=entropy.__getitem__)
        count = max(self.leading([entropy[column] for column in ordered]), 1)
        return tuple(sorted(ordered[:count])), memo

    def likely(self, state: State, log_odds: Sequence[float], count: int) -> Guesses:
        """Guess up to `count` sets of columns that the rule may reveal at `state`, each with its
        chance. The first guess is the most confident columns, as many as the bound allows if their
        entropies are what `likely_entropy` estimates from `log_odds`. Most others have a few more
        or fewer columns (`likely_first`)."""

        def room_of(ordered: list[int], log_odds: list[float]) -> int:
            return self.leading([likely_entropy(log_odds[column]) for column in ordered])

        return likely_first(state.free, log_odds, room_of, count)


def likely_entropy(log_odds: float) -> float:
    """Estimate the entropy at a position, in nats, from only the log-odds of its likeliest
    token."""
    log_p = log_sigmoid(log_odds)
    log_q = log_sigmoid(-log_odds)
    p = math.exp(log_p)
    return -p * log_p - (1 - p) * log_q + (1 - p) * TAIL_NATS
