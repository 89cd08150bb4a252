"""Reveal rules from papers, with the papers' numbers; docs/rules.md lists them and says where a
rule differs from its paper.

Many papers decode a whole text at once. Here text is decoded in blocks, so the length of the block
replaces the length of the text. A rule that would reveal nothing reveals the most confident column.
The last five rules remember earlier steps of the block. Their memo is a tuple that begins with
`State.start`. It holds no distributions, but only numbers about the picked tokens, such as
log-odds. Thresholds are log-odds.
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
    """Return a rule's two thresholds in log-odds: first the high one, then the low one.

    Args:
        options: Checked options (an `MRPGenerationConfig`). The high threshold is the option
            `confidence_threshold`, the low one is the option `low_threshold`; both are
            probabilities.
        published: The probability that is used if `low_threshold` is None.
    """
    low = published if options.low_threshold is None else options.low_threshold
    return logit(options.confidence_threshold), logit(low)


def at_least(columns: Columns, log_odds: Sequence[float], threshold: float) -> Columns:
    """Return the columns whose log-odds are at least `threshold`; the most confident column is
    always among them."""
    best = most_confident(columns, log_odds)
    return tuple([column for column in columns if log_odds[column] >= threshold or column == best])


@dataclass(frozen=True)
class FastDLLM(RevealRule, name="fast_dllm"):
    """Reveal the n most confident columns, for the largest n with c_i >= 1 - f / (i + 1) for all i
    from 2 to n, where c_i is the i-th highest confidence; at least one column.

    This is the factor rule of Fast-dLLM (arXiv 2505.22618), which bounds (n + 1)(1 - c_n) by f.
    With f = 1, the n tokens picked independently are also the likeliest n tokens jointly.

    Attributes:
        factor: f.
    """

    factor: float
    options: ClassVar[tuple[Option, ...]] = (FACTOR,)

    @classmethod
    def from_options(cls, options: Any, block_size: int) -> Self:
        """Make the rule from `factor`, a checked option in `options` (an `MRPGenerationConfig`).
        The block size is not used."""
        return cls(options.factor)

    def leading(self, ordered: Sequence[int], log_odds: Sequence[float]) -> int:
        """Return how many columns to reveal, at least 1: the n of the rule.

        Args:
            ordered: The free columns, in order of decreasing confidence.
            log_odds: For each column of the block, the log-odds of the picked token.
        """
        count = 1
        while count < len(ordered) and log_odds[ordered[count]] >= logit(
            1 - self.factor / (count + 2)
        ):
            count += 1
        return count

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """Return the columns that the rule reveals at `state`, judging by `scores.log_odds`. The
        memo is not used, and is returned as it is."""
        ordered = by_odds(state.free, scores.log_odds)
        return tuple(sorted(ordered[: self.leading(ordered, scores.log_odds)])), memo

    def likely(self, state: State, log_odds: Sequence[float], count: int) -> Guesses:
        """Guess up to `count` sets of columns that the rule may reveal at `state`, each with its
        chance. The first guess is what the rule reveals if the estimated `log_odds` are right. Most
        others have a few more or fewer of the most confident columns (`likely_first`)."""
        return likely_first(state.free, log_odds, self.leading, count)


@dataclass(frozen=True)
class EBSampler(EntropyBound, name="eb_sampler"):
    """Reveal columns in order of increasing entropy while the sum of all their entropies but the
    largest is at most a bound; at least one column.

    This is the EB-sampler as published (arXiv 2505.24857): that sum bounds the divergence between
    the distribution of n tokens picked independently and their joint distribution. The rule
    `EntropyBound` bounds the sum of all entropies instead.
    """

    def leading(self, entropies: Sequence[float]) -> int:
        """Return the number of columns to reveal, as `EntropyBound.leading` does. Here, each sum
        leaves out its last entropy, which is the largest one because entropies are in increasing
        order."""
        return 1 + sum([total <= self.bound for total in accumulate(entropies[:-1])])


@dataclass(frozen=True)
class Hierarchy(Dynamic, name="hierarchy"):
    """Reveal the columns above the high threshold (`threshold`). In each run of adjacent masks,
    also reveal the most confident column if it is above the low threshold (`low`). If there are no
    such columns, reveal the most confident one.

    This is hierarchical decoding of dInfer (arXiv 2510.08666), by default with thresholds at the
    log-odds of the probabilities 0.9 and 0.4. A reveal inside a run of masks splits the run, so
    tokens revealed together are rarely neighbours.

    Attributes:
        low: The low threshold, in log-odds like `threshold`.
    """

    low: float
    options: ClassVar[tuple[Option, ...]] = (CONFIDENCE_THRESHOLD, LOW_THRESHOLD)

    @classmethod
    def from_options(cls, options: Any, block_size: int) -> Self:
        """Make the rule from the checked options (an `MRPGenerationConfig`):
        `confidence_threshold`, and `low_threshold` or, if that is None, the probability 0.4. The
        block size is not used."""
        return cls(*thresholds_of(options, 0.4))

    def eased(self, free: Columns, log_odds: Sequence[float]) -> set[int]:
        """Return the columns for which the low threshold is enough: the most confident column of
        each run of adjacent masks.

        Args:
            free: The columns that may be revealed, in increasing order.
            log_odds: For each column of the block, the log-odds of the picked token.
        """
        # within a run of masks, column and index differ by a constant
        runs = groupby(enumerate(free), lambda pair: pair[1] - pair[0])
        eased = set()
        for _, run in runs:
            eased.add(most_confident([column for _, column in run], log_odds))
        return eased

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """Return the columns that the rule reveals at `state`, judging by `scores.log_odds`. The
        memo is not used, and is returned as it is."""
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
        """Guess up to `count` sets of columns that the rule may reveal at `state`, each with its
        chance, from estimated `log_odds`. The first guess is the columns above their threshold: the
        low one where that is enough (`eased`), and the high one elsewhere."""
        increase = max(bounded(self.threshold, MOST_ODDS) - bounded(self.low, MOST_ODDS), 0.0)
        eased = self.eased(state.free, log_odds)
        raised_log_odds = list(log_odds)
        for column in eased:
            raised_log_odds[column] += increase
        return super().likely(state, raised_log_odds, count)


@dataclass(frozen=True)
class LocalLeap(Hierarchy, name="local_leap"):
    """Reveal the columns that reach the high threshold `threshold` (these columns are *anchors*),
    and the columns near an anchor that reach the low threshold `low`. If there are no anchors,
    reveal the most confident column.

    This is LocalLeap (arXiv 2510.07081), by default with thresholds at the log-odds of the
    probabilities 0.9 and 0.75, and radius 4. Tokens near a confident token are likelier to be
    right.

    Attributes:
        radius: The largest distance from an anchor that counts as near, in columns.
    """

    radius: int = 4

    @classmethod
    def from_options(cls, options: Any, block_size: int) -> Self:
        """Make the rule from the checked options (an `MRPGenerationConfig`):
        `confidence_threshold`, and `low_threshold` or, if that is None, the probability 0.75. The
        block size is not used."""
        return cls(*thresholds_of(options, 0.75))

    def eased(self, free: Columns, log_odds: Sequence[float]) -> set[int]:
        """Return the columns for which the low threshold is enough: those at most `radius` columns
        from an anchor. The arguments are as in `Hierarchy.eased`."""
        anchors = [column for column in free if log_odds[column] >= self.threshold]
        neighbours = set[int]()
        for anchor in anchors:
            neighbours.update(range(anchor - self.radius, anchor + self.radius + 1))
        return neighbours.intersection(free)

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """Return the columns that the rule reveals at `state`, judging by `scores.log_odds`. The
        memo is not used, and is returned as it is."""
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
    """Reveal those of the `max_columns` most confident columns that reach the threshold, at least
    the most confident one. Until half of the block is revealed, leave out columns at which an eos
    is picked.

    This is CAD of CD4LM (arXiv 2601.02236), with 4 columns; the paper's threshold is the
    probability 0.8. If an eos is picked at every free column, none is left out.

    Attributes:
        eos: Ids that end the text.
        max_columns: The largest number of columns that a step reveals.
    """

    eos: frozenset[int] = frozenset()
    max_columns: int = 4

    @classmethod
    def from_options(cls, options: Any, block_size: int) -> Self:
        """Make the rule from `confidence_threshold` and the eos ids of the checked options (an
        `MRPGenerationConfig`). The block size is not used."""
        return cls(logit(options.confidence_threshold), frozenset(options.eos_ids()))

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """Return the columns that the rule reveals at `state`, judging by the picked tokens and
        their log-odds in `scores`. The memo is not used, and is returned as it is."""
        free = state.free
        block = len(state.ids)
        if 2 * (block - state.masks) < block:
            free = (
                tuple([column for column in free if scores.token[column] not in self.eos]) or free
            )
        candidates = tuple(sorted(by_odds(free, scores.log_odds)[: self.max_columns]))
        return at_least(candidates, scores.log_odds, self.threshold), memo

    def likely(self, state: State, log_odds: Sequence[float], count: int) -> Guesses:
        """Guess up to `count` sets of columns that the rule may reveal at `state`, each with its
        chance, from estimated `log_odds`. The first guess is the columns above the threshold. All
        guesses are made of the `max_columns` most confident columns."""
        candidates = tuple(sorted(by_odds(state.free, log_odds)[: self.max_columns]))
        return likely_over(candidates, log_odds, self.threshold, count)


def ascending(block_size: int) -> Columns:
    """Return the number of columns that each step of a block reveals: 1, 2, 4 and so on, in
    log2(`block_size`) steps.

    The last step reveals all the rest.
    """
    steps = max(block_size.bit_length() - 1, 1)
    return (*[2**step for step in range(steps - 1)], block_size + 1 - 2 ** (steps - 1))


@dataclass(frozen=True)
class EosRejection(Static, name="eoser"):
    """Reveal the most confident columns, twice as many in each step as in the step before
    (`ascending`); in early steps, lower the confidence of an eos.

    This is EOS early rejection with ascending step sizes (arXiv 2509.23924). The confidence of an
    eos is multiplied by a factor that rises from `gamma` to 1. It rises linearly with the share of
    the block that is revealed after the step.

    Attributes:
        eos: Ids that end the text.
        gamma: The factor at a share of 0; the default is that of the paper's code.
    """

    eos: frozenset[int] = frozenset()
    gamma: float = 0.01
    options: ClassVar[tuple[Option, ...]] = ()

    @classmethod
    def from_options(cls, options: Any, block_size: int) -> Self:
        """Make the rule from the block size and the eos ids of the checked options (an
        `MRPGenerationConfig`)."""
        return cls(ascending(block_size), frozenset(options.eos_ids()))

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """Return the columns that the rule reveals at `state`, judging by the picked tokens and
        their log-odds in `scores`. The memo is not used, and is returned as it is."""
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
    """Reveal the n most confident columns, where n is that of `Static`. Once the mean log-odds of
    all masked columns are high enough, reveal all of them.

    This is the early commit of Prophet (arXiv 2508.19982), within a block: the mean must reach 7.5
    in the first third of the block's steps, 5 in the second and 2.5 in the last.
    """

    def margin(self, state: State, log_odds: Sequence[float]) -> float:
        """Compute by how much the mean log-odds of a state's free columns exceed the bound: 7.5, 5
        or 2.5, if the state's step is in the first, second or last third of the block's steps."""
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
        """Return the columns that the rule reveals at `state`, judging by `scores.log_odds`. The
        memo is not used, and is returned as it is."""
        if self.margin(state, scores.log_odds) >= 0:
            return state.free, memo
        return self.first(state, scores.log_odds), memo

    def likely(self, state: State, log_odds: Sequence[float], count: int) -> Guesses:
        """Guess up to `count` sets of columns that the rule may reveal at `state`, each with its
        chance.

        One guess is all free columns, with the estimated chance that their mean log-odds reach the
        bound. The others are those of `Static.likely`, with their chances times the remaining
        chance. If `Static` reveals all free columns anyway, the guesses are those of
        `Static.likely` alone.
        """
        log_odds = [bounded(value, MOST_ODDS) for value in log_odds]
        chance = sigmoid(2 * self.margin(state, log_odds))
        guesses = super().likely(state, log_odds, count)
        if guesses[0][0] == state.free:
            return guesses
        guesses = [(columns, share * (1 - chance)) for columns, share in guesses]
        guesses.insert(0 if chance >= 0.5 else max(count - 1, 1), (state.free, chance))
        return guesses[:count]


def recalled(memo: Any, state: State, default: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a memo remembers of the state's block: the values after the first of a tuple
    `(start, *values)` if `start` is where this block begins. Return `default` for a memo of another
    block, and for None."""
    return memo[1:] if memo is not None and memo[0] == state.start else default


@dataclass(frozen=True)
class BoundedAdaptive(Dynamic, name="bacd"):
    """Reveal the columns whose confidence is at least the mean confidence of the block's reveals so
    far, and at least the most confident column. The mean is clipped to the range from the low
    threshold (`low`) to the high one (`threshold`).

    This is BACD of TDAR (arXiv 2602.09555), by default with thresholds at the log-odds of the
    probabilities 0.6 and 0.9. The mean is one of probabilities. In the first step of a block, the
    confidence of the most confident column takes its place. Drafts assume that the mean is at the
    high threshold.

    Attributes:
        low: The low threshold, in log-odds like `threshold`.
    """

    low: float
    options: ClassVar[tuple[Option, ...]] = (CONFIDENCE_THRESHOLD, LOW_THRESHOLD)

    @classmethod
    def from_options(cls, options: Any, block_size: int) -> Self:
        """Make the rule from the checked options (an `MRPGenerationConfig`):
        `confidence_threshold`, and `low_threshold` or, if that is None, the probability 0.6. The
        block size is not used."""
        return cls(*thresholds_of(options, 0.6))

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """Return the columns that the rule reveals at `state`, judging by `scores.log_odds`, and
        the new memo. The memo is `State.start`, the number of columns that the block has revealed,
        and the sum of their confidences, which are probabilities."""
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
    """Explore from the left until the end of a confident span is stable; reveal the rest of that
    span; then repeat after the span.

    This is SlowFast sampling (arXiv 2506.10848). Each step of exploration estimates the end of the
    span as one past the last column that reaches `low`, by default the log-odds of the probability
    0.3. Once two successive estimates differ by less than two columns, the later estimate is the
    end. If this has not happened after `explores` steps, the mean of the last two estimates is the
    end.

    Each step reveals the columns that reach `threshold`, by default the log-odds of the probability
    0.9, and at least one column. While exploring, these columns may lie anywhere from the beginning
    of the span on; afterwards only within the span, until no mask is left in it.

    Attributes:
        low: The low threshold, in log-odds like `threshold`.
        explores: The largest number of exploration steps.
    """

    low: float
    explores: int = 6
    options: ClassVar[tuple[Option, ...]] = (CONFIDENCE_THRESHOLD, LOW_THRESHOLD)

    @classmethod
    def from_options(cls, options: Any, block_size: int) -> Self:
        """Make the rule from the checked options (an `MRPGenerationConfig`):
        `confidence_threshold`, and `low_threshold` or, if that is None, the probability 0.3. The
        block size is not used."""
        return cls(*thresholds_of(options, 0.3))

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """Return the columns that the rule reveals at `state`, judging by `scores.log_odds`, and
        the new memo. The memo is `State.start`, the first column of the span, one past its last
        column (0 while exploring), the number of its exploration steps, and the last estimate of
        its end."""
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
    """Reveal those of the `buffer_size` most confident columns that the buffer of the previous step
    holds with the same token.

    This is CCD with adaptive budgets (arXiv 2512.02044), as in its code. The buffer holds the
    `buffer_size` (4) most confident columns that a step leaves masked, and their tokens. If no
    column qualifies, the most confident one is revealed.

    Attributes:
        buffer_size: Number of columns in the buffer.
    """

    buffer_size: int = 4

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """Return the columns that the rule reveals at `state`, judging by the picked tokens and
        their log-odds in `scores`, and the new memo. The memo is `State.start` and the buffer:
        pairs of a column and its token."""
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
        """Guess up to `count` sets of columns that the rule may reveal at `state`, each with its
        chance. In the first step of a block, whose buffer is empty, the first guess is the most
        confident column. In later steps, it is the `buffer_size` most confident columns, as if the
        buffer held all of them. Most other guesses have a few more or fewer columns
        (`likely_first`)."""
        room = min(self.buffer_size, len(state.free)) if state.step else 1
        return likely_first(state.free, log_odds, lambda *_: room, count)


@dataclass(frozen=True)
class Credit(Dynamic, name="credit"):
    """Reveal the columns whose log-odds reach the threshold, and at least the most confident
    column, after adding a bonus for the credit that their token has earned over the steps.

    This is CreditDecoding (arXiv 2510.06133), with the numbers of dInfer's code. In each step, the
    credit of a picked token becomes beta * credit + confidence ** gamma, where the confidence is
    the token's probability. The bonus alpha * log(1 + credit) is added to the token's logit, and so
    to its log-odds. The reported log-probabilities of the text leave the bonus out.

    Attributes:
        alpha: The factor of the bonus.
        gamma: The exponent of the confidence.
        beta: The factor by which earlier credit is multiplied in each step.
    """

    alpha: float = 0.7
    gamma: float = 0.2
    beta: float = 0.8

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """Return the columns that the rule reveals at `state`, judging by the picked tokens and
        their log-odds in `scores`, and the new memo. The memo is `State.start` and triples: a
        column, its token, and the credit of that token."""
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
        """Guess up to `count` sets of columns that the rule may reveal at `state`, each with its
        chance, from estimated `log_odds`. The first guess is the columns above the threshold after
        each has got a bonus. This is the largest possible bonus, that of a token which every step
        of the block so far has picked with confidence 1."""
        credit = (1 - self.beta ** (state.step + 1)) / (1 - self.beta)
        return likely_over(
            state.free, log_odds, self.threshold - self.alpha * math.log1p(credit), count
        )


@dataclass(frozen=True)
class Klass(Dynamic, name="klass"):
    """Reveal the columns whose confidence is above the threshold, whose picked token has stayed the
    same in the last steps and whose confidence has hardly changed in them. If there are none,
    reveal the most confident column.

    This is KLASS (arXiv 2511.05664), by default with a divergence below 0.01 in each of the last
    two steps and a confidence above 0.9 (`threshold` holds its log-odds).

    Attributes:
        divergence: The bound below which a change of confidence from one step to the next counts as
            small. The change is measured as KL(now || before), in nats, where the confidence p
            stands for the distribution (p, 1 - p).
        steps: Number of successive steps in which the change has to be small.
    """

    divergence: float = 0.01
    steps: int = 2

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """Return the columns that the rule reveals at `state`, judging by the picked tokens and
        their log-odds in `scores`, and the new memo. The memo is `State.start` and, for each free
        column, its number, its token, the log-odds, and for how many steps the column has been
        stable."""
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
        """Guess up to `count` sets of columns that the rule may reveal at `state`, each with its
        chance, from estimated `log_odds`. In the first `steps` steps of a block no column can be
        stable yet, so the first guess is the most confident column alone. In later steps, all
        columns are taken to be stable, and the first guess is those above the threshold."""
        return likely_over(
            state.free, log_odds, self.threshold if state.step >= self.steps else math.inf, count
        )


def divergence(log_odds: float, previous: float) -> float:
    """Compute KL(now || before), in nats, of a binary event whose log-odds are `log_odds` now and
    were `previous` before. It is 0 if the event stays certain."""
    log_odds = bounded(log_odds, MOST_ODDS)
    previous = bounded(previous, MOST_ODDS)
    return sum(
        [
            sigmoid(current) * (log_sigmoid(current) - log_sigmoid(earlier))
            for current, earlier in ((log_odds, previous), (-log_odds, -previous))
        ]
    )
