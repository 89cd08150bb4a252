"""Reveal rules from papers that read one scored state. Numbers are the papers' defaults; docs/rules.md has the table.

Many papers decode a whole text at once. Here a block is the unit, and what they say of the length of the text is said of the
block. Each rule reveals the surest column where it would reveal none.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from .reveal import (
    MOST_ODDS,
    Columns,
    Guesses,
    Static,
    bounded,
    by_odds,
    likely_entropy,
    likely_first,
    likely_over,
    logit,
    quota_at,
    sigmoid,
    surest,
)
from .state import Scores, State


def at_least(columns: Columns, odds: Sequence[float], threshold: float) -> Columns:
    """The columns whose odds are a threshold's or more; at least the surest."""
    best = surest(columns, odds)
    return tuple([column for column in columns if odds[column] >= threshold or column == best])


def raised(odds: Sequence[float], columns: Set[int], low: float, high: float) -> list[float]:
    """Estimates of the odds, with those of some columns raised so that what reaches `low` reaches `high`."""
    by = max(bounded(high, MOST_ODDS) - bounded(low, MOST_ODDS), 0.0)
    return [one + by if column in columns else one for column, one in enumerate(odds)]


def factor_thresholds(block_size: int, factor: float) -> tuple[float, ...]:
    """The log-odds of 1 - factor / (i + 1), for i from 1 to the size of the block."""
    return tuple([logit(1 - factor / (i + 1)) for i in range(1, block_size + 1)])


@dataclass(frozen=True)
class FastDLLM:
    """Reveal the most confident columns, as many as each still have c_i >= 1 - f / (i + 1), i from 1; at least one.

    The factor rule of Fast-dLLM (arXiv 2505.22618): (n + 1)(1 - c_n) is at most f; for f = 1 the n tokens that are picked apart
    are then the likeliest ones together. Its code also reveals the last column where that alone fails; this does not.

    Attributes:
        thresholds: By i - 1, in log-odds (`factor_thresholds`).
    """

    thresholds: tuple[float, ...]
    needs_entropy = False
    left_to_right = False

    def _leading(self, ordered: Sequence[int], odds: Sequence[float]) -> int:
        """Count the columns, the surest first, that are confident enough together."""
        passed = 1
        while passed < len(ordered) and odds[ordered[passed]] >= self.thresholds[passed]:
            passed += 1
        return passed

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        ordered = by_odds(state.free, scores.odds)
        return tuple(sorted(ordered[: self._leading(ordered, scores.odds)])), memo

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: about as many as estimates say."""
        odds = [bounded(one, MOST_ODDS) for one in odds]
        ordered = by_odds(state.free, odds)
        return likely_first(ordered, odds, self._leading(ordered, odds), count)


@dataclass(frozen=True)
class EBSampler:
    """Reveal in order of entropy, as many as have a sum of entropies less their maximum of at most gamma; so one always.

    The EB-sampler as published (arXiv 2505.24857): what n tokens that are picked apart can miss of their joint distribution is
    bounded by that difference. `EntropyBound` is the running sum, the largest entropy included.

    Attributes:
        gamma: In nats.
    """

    gamma: float
    needs_entropy = True
    left_to_right = False

    def _leading(self, entropies: Sequence[float]) -> int:
        """Count the columns that go, of entropies in rising order: the largest of each set is its last."""
        total = 0.0
        for place, before in enumerate(entropies[:-1], 1):
            total += before
            if not total <= self.gamma:
                return place
        return len(entropies)

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        entropy = scores.entropy
        assert entropy is not None
        ordered = sorted(state.free, key=entropy.__getitem__)
        return tuple(sorted(ordered[: self._leading([entropy[column] for column in ordered])])), memo

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: about as many of the surest as estimated confidences leave room for."""
        odds = [bounded(one, MOST_ODDS) for one in odds]
        ordered = by_odds(state.free, odds)
        return likely_first(ordered, odds, self._leading([likely_entropy(odds[column]) for column in ordered]), count)


def runs(columns: Columns) -> Iterator[Columns]:
    """Iterate over the longest runs of neighbouring columns."""
    begin = 0
    for place in range(1, len(columns) + 1):
        if place == len(columns) or columns[place] > columns[place - 1] + 1:
            yield columns[begin:place]
            begin = place


@dataclass(frozen=True)
class Hierarchy:
    """Reveal what is above the high threshold, and of each run of masks the most confident one if above the low one.

    Hierarchical decoding of dInfer (arXiv 2510.08666), with 0.9 and 0.4: a reveal in its midst splits a run, so that tokens
    revealed together are rarely neighbours.

    Attributes:
        threshold, low: In log-odds.
    """

    threshold: float
    low: float
    needs_entropy = False
    left_to_right = False

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        odds, threshold, low = scores.odds, self.threshold, self.low
        bests = {surest(run, odds) for run in runs(state.free)}
        where = [one for one in state.free if odds[one] > threshold or (one in bests and odds[one] > low)]
        return tuple(where) or (surest(state.free, odds),), memo

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: as `Dynamic`, with the best of each run nearer to the threshold."""
        bests = {surest(run, odds) for run in runs(state.free)}
        return likely_over(state.free, raised(odds, bests, self.low, self.threshold), self.threshold, count)


@dataclass(frozen=True)
class LocalLeap:
    """Reveal the columns of at least the threshold, *anchors*, and within `radius` of one those of at least the low one.

    LocalLeap (arXiv 2510.07081), with 0.9, 0.75 and 4: near a token that is sure the others are likelier to be right.

    Attributes:
        threshold, low: In log-odds.
        radius: In columns.
    """

    threshold: float
    low: float
    radius: int = 4
    needs_entropy = False
    left_to_right = False

    def _near(self, free: Columns, odds: Sequence[float]) -> set[int]:
        """The columns within the radius of an anchor."""
        anchors = [column for column in free if odds[column] >= self.threshold]
        return {column for column in free if any(abs(column - anchor) <= self.radius for anchor in anchors)}

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        free, odds = state.free, scores.odds
        near = self._near(free, odds)
        where = [one for one in free if odds[one] >= self.threshold or (one in near and odds[one] >= self.low)]
        return tuple(where) or (surest(free, odds),), memo

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: as `Dynamic`, with what is near an anchor nearer to the threshold."""
        near = self._near(state.free, odds)
        return likely_over(state.free, raised(odds, near, self.low, self.threshold), self.threshold, count)


@dataclass(frozen=True)
class ConfidenceAdaptive:
    """Reveal, of the few most confident columns, those of at least the threshold; no eos in the first half.

    CAD of CD4LM (arXiv 2601.02236), with 4 columns and 0.8. The published half is that of the text's length; here it is the
    block's: until half of a block is revealed, an eos is revealed only where nothing else is left to reveal.

    Attributes:
        threshold: In log-odds.
        eos: Ids that end the text.
        most: Columns of a step, at most.
    """

    threshold: float
    eos: frozenset[int] = frozenset()
    most: int = 4
    needs_entropy = False
    left_to_right = False

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        free, block = state.free, len(state.ids)
        if 2 * (block - state.masks) < block:
            free = tuple([column for column in free if scores.token[column] not in self.eos]) or free
        few = tuple(sorted(by_odds(free, scores.odds)[: self.most]))
        return at_least(few, scores.odds, self.threshold), memo

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: as `Dynamic` of the few surest."""
        return likely_over(tuple(sorted(by_odds(state.free, odds)[: self.most])), odds, self.threshold, count)


def ascending(block_size: int) -> Columns:
    """How many columns each step of a block reveals: 1, 2, 4 and so on in log2(`block_size`) steps, the last all the rest."""
    steps = max(block_size.bit_length() - 1, 1)
    return (*[2**step for step in range(steps - 1)], block_size + 1 - 2 ** (steps - 1))


@dataclass(frozen=True)
class EosRejection:
    """Reveal the most confident columns, twice as many each step, where the confidence of an eos counts little at first.

    EOS early rejection with ascending step sizes (arXiv 2509.23924), the steps of a block in place of the text's. An eos counts
    with gamma times its confidence, which rises in line with the share of the block that the step completes.

    Attributes:
        schedule: Columns by step (`ascending`).
        eos: Ids that end the text.
        gamma: The factor at first, of the paper's code.
    """

    schedule: Columns
    eos: frozenset[int] = frozenset()
    gamma: float = 0.01
    needs_entropy = False
    left_to_right = False

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        steps = len(self.schedule)
        share = (2 ** min(state.step + 1, steps) - 1) / 2**steps
        factor = self.gamma + (1 - self.gamma) * share
        odds = list(scores.odds)
        for column in state.free:
            if scores.token[column] in self.eos:
                odds[column] = logit(factor * sigmoid(odds[column]))
        return tuple(sorted(by_odds(state.free, odds)[: quota_at(self.schedule, state)])), memo

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: as `Static`."""
        return Static(self.schedule).likely(state, odds, count)


@dataclass(frozen=True)
class Prophet:
    """Reveal the n most confident columns, and all that are left once the mean gap of their tokens is wide enough.

    The early commit of Prophet (arXiv 2508.19982), within a block. The published gap is that of the logits of the two likeliest
    tokens, over the answer's positions; here it is the log-odds of the token, its gap to all others together, which is never
    more, over the block's. The gap has to be 7.5 in the first third of the block's steps, 5 in the second, and 2.5 then.

    Attributes:
        schedule: n, by denoising step of the block.
    """

    schedule: Columns
    needs_entropy = False
    left_to_right = False

    def _margin(self, state: State, odds: Sequence[float]) -> float:
        """By how much the mean gap exceeds what is asked for at the state's step."""
        done, gaps = state.step / len(self.schedule), [odds[column] for column in state.free]
        return sum(gaps) / len(gaps) - (7.5 if done < 0.33 else 5.0 if done < 0.67 else 2.5)

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        if self._margin(state, scores.odds) >= 0:
            return state.free, memo
        return tuple(sorted(by_odds(state.free, scores.odds)[: quota_at(self.schedule, state)])), memo

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: all of it as likely as estimates say so, else as `Static`."""
        odds = [bounded(one, MOST_ODDS) for one in odds]
        chance = sigmoid(2 * self._margin(state, odds))
        guesses = Static(self.schedule).likely(state, odds, count)
        if guesses[0][0] == state.free:
            return guesses
        guesses = [(where, one * (1 - chance)) for where, one in guesses]
        guesses.insert(0 if chance >= 0.5 else max(count - 1, 1), (state.free, chance))
        return guesses[:count]
