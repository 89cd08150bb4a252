"""Reveal rules from papers, with the papers' numbers; docs/rules.md lists them and says where a
rule differs from its paper.

Many papers decode a whole text at once. Here blocks are decoded, so the block's length replaces the
text's length. A rule that would reveal nothing reveals the most confident column. The last five
rules remember earlier steps of the block: their memo is a tuple that begins with `State.start`;
instead of distributions it holds only numbers about the picked tokens, such as log-odds. Thresholds
are log-odds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, ClassVar, Self

from .options import POSITIVE, PROBABILITY, Option
from .reveal import (
    CONFIDENCE_THRESHOLD,
    MOST_ODDS,
    Columns,
    Dynamic,
    EntropyBound,
    Guesses,
    RevealRule,
    Static,
    bounded,
    by_odds,
    likely_first,
    likely_over,
    log_sigmoid,
    logit,
    most_confident,
    sigmoid,
)
from .state import Scores, State

FACTOR = Option(
    "factor",
    1.0,
    POSITIVE,
    "f: n tokens go together if none is below a confidence of 1 - f / (n + 1)",
)
LOW_THRESHOLD = Option(
    "low_threshold",
    None,
    PROBABILITY,
    "the lower of two thresholds, a probability; None: the rule's own",
)


def thresholds_of(options: Any, published: float) -> tuple[float, float]:
    """Return a rule's two thresholds in log-odds; the lower one is of the published probability
    unless the option is set."""
    low = published if options.low_threshold is None else options.low_threshold
    return logit(options.confidence_threshold), logit(low)


def at_least(columns: Columns, log_odds: Sequence[float], threshold: float) -> Columns:
    """Select the columns whose log-odds reach a threshold, and always the most confident column."""
    best = most_confident(columns, log_odds)
    return tuple([column for column in columns if log_odds[column] >= threshold or column == best])


@dataclass(frozen=True)
class FastDLLM(RevealRule, name="fast_dllm"):
    """Reveal the n most confident columns, for the largest n with c_i >= 1 - f / (i + 1) for all i
    from 2 to n; at least one.

    The factor rule of Fast-dLLM (arXiv 2505.22618), which bounds (n + 1)(1 - c_n) by f; c_i is the
    i-th highest confidence. With f = 1, the n tokens picked independently are also the likeliest n
    tokens jointly.

    Attributes:
        factor: f.
    """

    factor: float
    options: ClassVar[tuple[Option, ...]] = (FACTOR,)

    @classmethod
    def from_options(cls, options: Any, block_size: int) -> Self:
        """See `RevealRule`."""
        return cls(options.factor)

    def leading(self, ordered: Sequence[int], log_odds: Sequence[float]) -> int:
        """Count the leading columns that satisfy the bound, of columns `ordered` by falling
        confidence."""
        count = 1
        while count < len(ordered) and log_odds[ordered[count]] >= logit(
            1 - self.factor / (count + 2)
        ):
            count += 1
        return count

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        ordered = by_odds(state.free, scores.log_odds)
        return tuple(sorted(ordered[: self.leading(ordered, scores.log_odds)])), memo

    def likely(self, state: State, log_odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: guess about as many columns as the bound allows under the estimates."""
        return likely_first(state.free, log_odds, self.leading, count)


@dataclass(frozen=True)
class EBSampler(EntropyBound, name="eb_sampler"):
    """Reveal columns by rising entropy while the sum of entropies but the largest is at most a
    bound; at least one column.

    The EB-sampler as published (arXiv 2505.24857): that sum bounds the divergence between n tokens
    picked independently and their joint distribution. `EntropyBound` bounds the sum of all
    entropies instead.
    """

    def leading(self, entropies: Sequence[float]) -> int:
        """See `EntropyBound`; each sum leaves out the last entropy, which is the largest in rising
        order."""
        return 1 + sum([total <= self.bound for total in accumulate(entropies[:-1])])


@dataclass(frozen=True)
class Hierarchy(Dynamic, name="hierarchy"):
    """Reveal the columns above the high threshold, and of each run of masks the most confident one
    if above the low threshold.

    Hierarchical decoding of dInfer (arXiv 2510.08666), with thresholds 0.9 and 0.4. A reveal inside
    a run of masks splits it, so tokens revealed together are rarely neighbours.

    Attributes:
        low: The low threshold, in log-odds like `threshold`.
    """

    low: float
    options: ClassVar[tuple[Option, ...]] = (CONFIDENCE_THRESHOLD, LOW_THRESHOLD)

    @classmethod
    def from_options(cls, options: Any, block_size: int) -> Self:
        """See `RevealRule`."""
        return cls(*thresholds_of(options, 0.4))

    def eased(self, free: Columns, log_odds: Sequence[float]) -> set[int]:
        """Find the columns that need only the low threshold: the most confident one of each run of
        masks."""
        # within a run of masks, column and index differ by a constant
        runs = groupby(enumerate(free), lambda pair: pair[1] - pair[0])
        eased = set()
        for _, run in runs:
            eased.add(most_confident([column for _, column in run], log_odds))
        return eased

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        free = state.free
        log_odds = scores.log_odds
        eased = self.eased(state.free, scores.log_odds)
        columns = []
        for column in free:
            if log_odds[column] > self.threshold or (
                column in eased and log_odds[column] > self.low
            ):
                columns.append(column)
        return tuple(columns) or (most_confident(free, log_odds),), memo

    def likely(self, state: State, log_odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: as `Dynamic`, after raising the estimates of eased columns by the
        difference of the thresholds."""
        increase = max(bounded(self.threshold, MOST_ODDS) - bounded(self.low, MOST_ODDS), 0.0)
        eased = self.eased(state.free, log_odds)
        raised_log_odds = list(log_odds)
        for column in eased:
            raised_log_odds[column] += increase
        return super().likely(state, raised_log_odds, count)


@dataclass(frozen=True)
class LocalLeap(Hierarchy, name="local_leap"):
    """Reveal the columns that reach the high threshold (*anchors*), and those near an anchor that
    reach the low one.

    LocalLeap (arXiv 2510.07081), with thresholds 0.9 and 0.75 and radius 4: tokens near a confident
    one are likelier right.

    Attributes:
        radius: Distance from an anchor, in columns.
    """

    radius: int = 4

    @classmethod
    def from_options(cls, options: Any, block_size: int) -> Self:
        """See `RevealRule`."""
        return cls(*thresholds_of(options, 0.75))

    def eased(self, free: Columns, log_odds: Sequence[float]) -> set[int]:
        """See `Hierarchy`: find the columns within the radius of an anchor."""
        anchors = [column for column in free if log_odds[column] >= self.threshold]
        neighbours = set[int]()
        for anchor in anchors:
            neighbours.update(range(anchor - self.radius, anchor + self.radius + 1))
        return neighbours.intersection(free)

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        free = state.free
        log_odds = scores.log_odds
        eased = self.eased(state.free, scores.log_odds)
        columns = []
        for column in free:
            if log_odds[column] >= self.threshold or (
                column in eased and log_odds[column] >= self.low
            ):
                columns.append(column)
        return tuple(columns) or (most_confident(free, log_odds),), memo


@dataclass(frozen=True)
class ConfidenceAdaptive(Dynamic, name="cad"):
    """Reveal the columns that reach the threshold among the `max_columns` most confident; no eos in
    the first half of a block.

    CAD of CD4LM (arXiv 2601.02236), with 4 columns and threshold 0.8. Until half of the block is
    revealed, an eos is revealed only where nothing else is left to reveal.

    Attributes:
        eos: Ids that end the text.
        max_columns: Columns revealed in a step, at most.
    """

    eos: frozenset[int] = frozenset()
    max_columns: int = 4

    @classmethod
    def from_options(cls, options: Any, block_size: int) -> Self:
        """See `RevealRule`."""
        return cls(logit(options.confidence_threshold), frozenset(options.eos_ids()))

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        free = state.free
        block = len(state.ids)
        if 2 * (block - state.masks) < block:
            free = (
                tuple([column for column in free if scores.token[column] not in self.eos]) or free
            )
        candidates = tuple(sorted(by_odds(free, scores.log_odds)[: self.max_columns]))
        return at_least(candidates, scores.log_odds, self.threshold), memo

    def likely(self, state: State, log_odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: as `Dynamic`, over the `max_columns` most confident columns."""
        candidates = tuple(sorted(by_odds(state.free, log_odds)[: self.max_columns]))
        return likely_over(candidates, log_odds, self.threshold, count)


def ascending(block_size: int) -> Columns:
    """List the number of columns that each step of a block reveals: 1, 2, 4 and so on, over
    log2(`block_size`) steps.

    The last step reveals all the rest.
    """
    steps = max(block_size.bit_length() - 1, 1)
    return (*[2**step for step in range(steps - 1)], block_size + 1 - 2 ** (steps - 1))


@dataclass(frozen=True)
class EosRejection(Static, name="eoser"):
    """Reveal the most confident columns, twice as many each step (`ascending`); lower the
    confidence of an eos at first.

    EOS early rejection with ascending step sizes (arXiv 2509.23924): the confidence of an eos is
    multiplied by a factor that rises from `gamma` to 1, linearly with the share of the block that
    is revealed after the step.

    Attributes:
        eos: Ids that end the text.
        gamma: The factor at a share of 0; the default is that of the paper's code.
    """

    eos: frozenset[int] = frozenset()
    gamma: float = 0.01
    options: ClassVar[tuple[Option, ...]] = ()

    @classmethod
    def from_options(cls, options: Any, block_size: int) -> Self:
        """See `RevealRule`."""
        return cls(ascending(block_size), frozenset(options.eos_ids()))

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        steps = len(self.schedule)
        share = (2 ** min(state.step + 1, steps) - 1) / 2**steps
        factor = self.gamma + (1 - self.gamma) * share
        log_odds = list(scores.log_odds)
        for column in state.free:
            if scores.token[column] in self.eos:
                log_odds[column] = logit(factor * sigmoid(log_odds[column]))
        return self.first(state, log_odds), memo


@dataclass(frozen=True)
class Prophet(Static, name="prophet"):
    """Reveal the n most confident columns, or all that are left once the mean of their log-odds is
    high enough.

    The early commit of Prophet (arXiv 2508.19982), within a block: the mean must reach 7.5 in the
    first third of the block's steps, 5 in the second and 2.5 in the last.
    """

    def margin(self, state: State, log_odds: Sequence[float]) -> float:
        """Compute by how much the mean log-odds exceed the bound at the state's step."""
        progress = state.step / len(self.schedule)
        if progress < 0.33:
            bound = 7.5
        elif progress < 0.67:
            bound = 5.0
        else:
            bound = 2.5
        free = [log_odds[column] for column in state.free]
        return sum(free) / len(free) - bound

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        if self.margin(state, scores.log_odds) >= 0:
            return state.free, memo
        return self.first(state, scores.log_odds), memo

    def likely(self, state: State, log_odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: guess all columns, with the chance that their mean reaches the bound,
        or else as `Static`."""
        log_odds = [bounded(value, MOST_ODDS) for value in log_odds]
        chance = sigmoid(2 * self.margin(state, log_odds))
        guesses = super().likely(state, log_odds, count)
        if guesses[0][0] == state.free:
            return guesses
        guesses = [(columns, share * (1 - chance)) for columns, share in guesses]
        guesses.insert(0 if chance >= 0.5 else max(count - 1, 1), (state.free, chance))
        return guesses[:count]


def recalled(memo: Any, state: State, default: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values of a memo `(start, *values)` of the state's block; the default for any
    other memo."""
    return memo[1:] if memo is not None and memo[0] == state.start else default


@dataclass(frozen=True)
class BoundedAdaptive(Dynamic, name="bacd"):
    """Reveal the columns at least as confident as the mean of the block's reveals so far, clipped
    to [`low`, `threshold`].

    BACD of TDAR (arXiv 2602.09555), with bounds 0.6 and 0.9. In a block's first step, the mean is
    the confidence of the most confident column. Drafts assume that it is `threshold`.

    Attributes:
        low: The lower threshold, in log-odds like `threshold`.
    """

    low: float
    options: ClassVar[tuple[Option, ...]] = (CONFIDENCE_THRESHOLD, LOW_THRESHOLD)

    @classmethod
    def from_options(cls, options: Any, block_size: int) -> Self:
        """See `RevealRule`."""
        return cls(*thresholds_of(options, 0.6))

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`: the memo holds the number of revealed columns and the sum of their
        confidences."""
        count, total = recalled(memo, state, (0, 0.0))
        if count:
            mean_log_odds = logit(total / count)
        else:
            mean_log_odds = scores.log_odds[most_confident(state.free, scores.log_odds)]
        columns = at_least(
            state.free, scores.log_odds, min(max(mean_log_odds, self.low), self.threshold)
        )
        return columns, (
            state.start,
            count + len(columns),
            total + sum([sigmoid(scores.log_odds[column]) for column in columns]),
        )


@dataclass(frozen=True)
class SlowFast(Dynamic, name="slow_fast"):
    """Explore from the left until the end of a confident span is stable, reveal the rest of that
    span, and repeat after the span.

    SlowFast sampling (arXiv 2506.10848). Each step of exploration estimates the end of the span:
    one past the last column that reaches `low` (0.3). Once two successive estimates differ by less
    than two columns, the later one is the end; after `explores` steps, the mean of the last two is.
    Each step reveals the columns that reach `threshold` (0.9), at least one: while exploring,
    anywhere from the beginning of the span on; then only within the span, until no mask is left in
    it.

    Attributes:
        low: The lower threshold, in log-odds like `threshold`.
        explores: Steps of exploration, at most.
    """

    low: float
    explores: int = 6
    options: ClassVar[tuple[Option, ...]] = (CONFIDENCE_THRESHOLD, LOW_THRESHOLD)

    @classmethod
    def from_options(cls, options: Any, block_size: int) -> Self:
        """See `RevealRule`."""
        return cls(*thresholds_of(options, 0.3))

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`: the memo holds the span's beginning and end (0 while exploring), the
        number of its steps, and the last estimate."""
        begin, end, steps, last = recalled(memo, state, (0, 0, 0, 0))
        free = state.free
        log_odds = scores.log_odds
        if end and not any(begin <= column < end for column in free):  # the span is clean
            begin = end
            end = 0
            steps = 0
            last = 0
        scope = (
            tuple([column for column in free if begin <= column and (not end or column < end)])
            or free
        )
        if not end:
            estimate = 1 + max(
                [column for column in scope if log_odds[column] >= self.low], default=begin
            )
            steps += 1
            if steps > 1 and abs(estimate - last) < 2:
                end = estimate
            elif steps == self.explores:
                end = max((estimate + last) // 2, begin + 1)
            last = estimate
        return at_least(scope, log_odds, self.threshold), (state.start, begin, end, steps, last)


@dataclass(frozen=True)
class Coherent(RevealRule, name="ccd"):
    """Reveal the columns among the `buffer_size` most confident that the buffer of the step before
    holds with the same token.

    CCD with adaptive budgets (arXiv 2512.02044), as in its code: the buffer holds the
    `buffer_size` (4) most confident columns that a step leaves masked, and their tokens. If no
    column qualifies, the most confident one is revealed.

    Attributes:
        buffer_size: Columns of the buffer.
    """

    buffer_size: int = 4

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`: the memo holds the buffer's columns and tokens."""
        (buffer,) = recalled(memo, state, ((),))
        ordered = by_odds(state.free, scores.log_odds)
        buffered_tokens = dict(buffer)
        token = scores.token
        stable = []
        for column in ordered[: self.buffer_size]:
            if buffered_tokens.get(column) == token[column]:
                stable.append(column)
        columns = tuple(sorted(stable)) or (ordered[0],)
        new_buffer = [(column, token[column]) for column in ordered if column not in columns]
        return columns, (state.start, tuple(new_buffer[: self.buffer_size]))

    def likely(self, state: State, log_odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: guess one column in a block's first step, later about
        `buffer_size`, as if all of the buffer qualified."""
        room = min(self.buffer_size, len(state.free)) if state.step else 1
        return likely_first(state.free, log_odds, lambda *_: room, count)


@dataclass(frozen=True)
class Credit(Dynamic, name="credit"):
    """Reveal the columns whose log-odds reach the threshold with the credit that their token has
    earned over the steps.

    CreditDecoding (arXiv 2510.06133), with the numbers of dInfer's code: in each step a picked
    token's credit becomes beta * credit + confidence ** gamma, and alpha * log(1 + credit) is added
    to its logit and so to its log-odds. The reported log-probabilities of the text leave credit
    out.
    """

    alpha: float = 0.7
    gamma: float = 0.2
    beta: float = 0.8

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`: the memo holds columns, their tokens and the tokens' credits."""
        (records,) = recalled(memo, state, ((),))
        credits = {(column, token): credit for column, token, credit in records}
        new_credits = []
        log_odds = list(scores.log_odds)
        for column in state.free:
            token = scores.token[column]
            credit = (
                self.beta * credits.get((column, token), 0.0)
                + sigmoid(log_odds[column]) ** self.gamma
            )
            log_odds[column] += self.alpha * math.log1p(credit)
            new_credits.append((column, token, credit))
        return at_least(state.free, log_odds, self.threshold), (state.start, tuple(new_credits))

    def likely(self, state: State, log_odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: as `Dynamic`, assuming at each column the credit of a confident token
        that has never changed."""
        credit = (1 - self.beta ** (state.step + 1)) / (1 - self.beta)
        return likely_over(
            state.free, log_odds, self.threshold - self.alpha * math.log1p(credit), count
        )


@dataclass(frozen=True)
class Klass(Dynamic, name="klass"):
    """Reveal the confident columns whose distribution hardly changed in the last steps, or else the
    most confident column.

    KLASS (arXiv 2511.05664), with a divergence below 0.01 in each of the last two steps and a
    confidence above 0.9.

    Attributes:
        divergence: Bound on the divergence between successive steps, in nats.
        steps: Successive steps in which the bound must hold.
    """

    divergence: float = 0.01
    steps: int = 2

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`: the memo holds columns, tokens, log-odds, and the steps for which each
        column has been stable."""
        (records,) = recalled(memo, state, ((),))
        previous_records = {
            (column, token): (log_odds, stable) for column, token, log_odds, stable in records
        }
        new_records = []
        columns = []
        for column in state.free:
            token = scores.token[column]
            log_odds = scores.log_odds[column]
            previous_log_odds, stable = previous_records.get((column, token), (None, 0))
            if (
                previous_log_odds is not None
                and divergence(log_odds, previous_log_odds) < self.divergence
            ):
                stable = min(stable + 1, self.steps)
            else:
                stable = 0
            new_records.append((column, token, log_odds, stable))
            if stable == self.steps and log_odds > self.threshold:
                columns.append(column)
        return tuple(columns) or (most_confident(state.free, scores.log_odds),), (
            state.start,
            tuple(new_records),
        )

    def likely(self, state: State, log_odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`: guess the most confident column in a block's first steps, then as
        `Dynamic`."""
        return likely_over(
            state.free, log_odds, self.threshold if state.step >= self.steps else math.inf, count
        )


def divergence(log_odds: float, previous: float) -> float:
    """Compute KL(now || before) in nats of a binary event from its log-odds now and before; 0 if it
    stays certain."""
    log_odds = bounded(log_odds, MOST_ODDS)
    previous = bounded(previous, MOST_ODDS)
    return sum(
        [
            sigmoid(current) * (log_sigmoid(current) - log_sigmoid(earlier))
            for current, earlier in ((log_odds, previous), (-log_odds, -previous))
        ]
    )
