"""Reveal rules from papers that remember a block's earlier steps: their memo is a tuple that begins with `State.start`.

In another block they begin anew. A memo holds numbers of the picked tokens alone: where a paper keeps whole distributions, the
rule says what is cut.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .published import at_least
from .reveal import (
    MOST_ODDS,
    Columns,
    Guesses,
    bounded,
    by_odds,
    likely_first,
    likely_over,
    log_sigmoid,
    logit,
    sigmoid,
    surest,
)
from .state import Scores, State


def recalled(memo: Any, state: State, default: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a memo holds of the state's block; the default in another block."""
    return memo[1:] if memo is not None and memo[0] == state.start else default


@dataclass(frozen=True)
class BoundedAdaptive:
    """Reveal what is as confident as the mean of the block's reveals so far, within bounds.

    BACD of TDAR (arXiv 2602.09555): the threshold is that mean, clamped to 0.6 to 0.9; at first it is the clamped confidence of
    the surest column. Nothing is cut.

    Attributes:
        upper, lower: Probabilities.
    """

    upper: float
    lower: float
    needs_entropy = False
    left_to_right = False

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`: the memo has how many columns were revealed, and the sum of their confidences."""
        count, total = recalled(memo, state, (0, 0.0))
        mean = total / count if count else sigmoid(scores.odds[surest(state.free, scores.odds)])
        where = at_least(state.free, scores.odds, logit(min(max(mean, self.lower), self.upper)))
        return where, (state.start, count + len(where), total + sum([sigmoid(scores.odds[column]) for column in where]))

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: as `Dynamic` with the upper bound."""
        return likely_over(state.free, odds, logit(self.upper), count)


@dataclass(frozen=True)
class SlowFast:
    """Explore from the left until the span of what is fairly sure is stable, then finish that span, and so on.

    SlowFast sampling (arXiv 2506.10848). While exploring, each step estimates where a span ends, at the last column of at least
    `low` (0.3); two estimates in a row that differ by less than two, or six steps, settle it, at the last estimate or the mean
    of the last two. Steps reveal what is of at least `threshold` (0.9), one at least: of all from the span's begin while
    exploring, then of the span alone until it is clean. The reading is the paper's; its code explores for all six steps. Cut:
    logits behind the span, which the paper keeps from the first fast step, are computed anew.

    Attributes:
        threshold, low: In log-odds.
        explores: Steps of exploration, at most.
    """

    threshold: float
    low: float
    explores: int = 6
    needs_entropy = False
    left_to_right = False

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`: the memo has where the span begins and ends (0 while exploring), steps, and the last estimate."""
        begin, end, steps, last = recalled(memo, state, (0, 0, 0, 0))
        free, odds = state.free, scores.odds
        if end and not any(begin <= column < end for column in free):  # it is clean
            begin, end, steps, last = end, 0, 0, 0
        scope = tuple([column for column in free if begin <= column and (not end or column < end)]) or free
        if not end:
            estimate = 1 + max([column for column in scope if odds[column] >= self.low], default=begin)
            steps += 1
            if steps > 1 and abs(estimate - last) < 2:
                end = estimate
            elif steps == self.explores:
                end = max((estimate + last) // 2, begin + 1)
            last = estimate
        return at_least(scope, odds, self.threshold), (state.start, begin, end, steps, last)

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: as `Dynamic`."""
        return likely_over(state.free, odds, self.threshold, count)


@dataclass(frozen=True)
class Coherent:
    """Reveal, of the few most confident columns, those that already were so a step before, with the same token.

    CCD with adaptive budgets (arXiv 2512.02044), by its code: a buffer holds the `few` (4) most confident columns behind those
    that a step reveals; where none of them stays, the surest goes. Cut: confidences are those of this step, not those of
    distributions averaged over steps, and of the picked token, not entropies; and the buffer does not grow in the first steps.

    Attributes:
        few: Columns of the buffer.
    """

    few: int = 4
    needs_entropy = False
    left_to_right = False

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`: the memo has the buffer's columns and tokens."""
        (buffer,) = recalled(memo, state, ((),))
        ordered, before, token = by_odds(state.free, scores.odds), dict(buffer), scores.token
        same = [column for column in ordered[: self.few] if before.get(column) == token[column]]
        where = tuple(sorted(same)) or (ordered[0],)
        rest = [column for column in ordered if column not in where][: self.few]
        return where, (state.start, tuple([(column, token[column]) for column in rest]))

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: one in a block's first step, then about as many as the buffer has."""
        odds = [bounded(one, MOST_ODDS) for one in odds]
        ordered = by_odds(state.free, odds)
        return likely_first(ordered, odds, min(self.few, len(ordered)) if state.step else 1, count)


@dataclass(frozen=True)
class Credit:
    """Reveal what is confident enough with the credit that its token has earned in earlier steps.

    CreditDecoding (arXiv 2510.06133), with the numbers of dInfer's code: each step the credit of the likeliest token decays by
    beta and grows by its confidence to the power gamma, and alpha log(1 + credit) is added to its logit, which adds as much to
    its log-odds. Cut: a column keeps the credit of the token picked last; one that another token replaces loses it, while the
    paper goes on fusing both. The text's log-probabilities are without credit.

    Attributes:
        threshold: In log-odds.
    """

    threshold: float
    alpha: float = 0.7
    gamma: float = 0.2
    beta: float = 0.8
    needs_entropy = False
    left_to_right = False

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`: the memo has columns, tokens and credits."""
        (earned,) = recalled(memo, state, ((),))
        before, now, fused = {(column, token): credit for column, token, credit in earned}, [], list(scores.odds)
        for column in state.free:
            token = scores.token[column]
            credit = self.beta * before.get((column, token), 0.0) + sigmoid(fused[column]) ** self.gamma
            fused[column] += self.alpha * math.log1p(credit)
            now.append((column, token, credit))
        return at_least(state.free, fused, self.threshold), (state.start, tuple(now))

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: as `Dynamic`, with the credit of a sure token that never changed."""
        credit = (1 - self.beta ** (state.step + 1)) / (1 - self.beta)
        return likely_over(state.free, odds, self.threshold - self.alpha * math.log1p(credit), count)


@dataclass(frozen=True)
class Klass:
    """Reveal what is confident and stable: its distribution hardly changed in the last steps; else the surest.

    KLASS (arXiv 2511.05664), with a divergence below 0.01 in each of the last two steps and a confidence above 0.9. Cut: the
    divergence of a step from the one before is that of the two events *this token* and *another one*, of which the whole one
    is never less; a token that was not picked before counts as unstable.

    Attributes:
        threshold: In log-odds.
        divergence: In nats.
        steps: Steps in which it has to be less.
    """

    threshold: float
    divergence: float = 0.01
    steps: int = 2
    needs_entropy = False
    left_to_right = False

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`: the memo has columns, tokens, odds, and for how many steps these have been stable."""
        (seen,) = recalled(memo, state, ((),))
        before = {(column, token): (odds, stable) for column, token, odds, stable in seen}
        now, where = [], []
        for column in state.free:
            token, odds = scores.token[column], scores.odds[column]
            was, stable = before.get((column, token), (None, 0))
            stable = 0 if was is None or not divergence(odds, was) < self.divergence else min(stable + 1, self.steps)
            now.append((column, token, odds, stable))
            if stable == self.steps and odds > self.threshold:
                where.append(column)
        return tuple(where) or (surest(state.free, scores.odds),), (state.start, tuple(now))

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: the surest in a block's first steps, then as `Dynamic`."""
        return likely_over(state.free, odds, self.threshold if state.step >= self.steps else math.inf, count)


def divergence(odds: float, before: float) -> float:
    """The divergence in nats of an event of these log-odds from what it was before; 0 of one that stays certain."""
    odds, before = bounded(odds, MOST_ODDS), bounded(before, MOST_ODDS)
    return sigmoid(odds) * (log_sigmoid(odds) - log_sigmoid(before)) + sigmoid(-odds) * (
        log_sigmoid(-odds) - log_sigmoid(-before)
    )
