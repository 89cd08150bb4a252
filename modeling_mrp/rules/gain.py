"""How much a round drafts: a fixed amount, or the one with the largest expected gain.

The search for a draft gives each state the chance that the row's path reaches it. Corrected by what
came of earlier drafts at its depth, it is the number of denoising steps that the state is worth.
What states cost is a table (`RoundCosts`). A round has as many states as make the most expected
steps for their cost, and a head pass if that makes more. No clock decides: the amount depends on
the call and the table alone.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .costs import WIDTHS, RoundCosts, draft_sizes
from .draft import Node

Drafts = Sequence[Sequence[Node]]  # by row of the batch, its nodes; none if it has ended


@dataclass(frozen=True)
class Amount:
    """An amount of drafting in one round.

    Attributes:
        states: States that a row submits, at most, its own included.
        passes: Head passes of the round; 0: drafts come from stale logits.
    """

    states: int
    passes: int = 0


class DraftAmount(Protocol):
    """Decides how much each round drafts.

    Attributes:
        outline: States of the drafts, made without the head, that `plan` looks at.
    """

    @property
    def outline(self) -> int:
        """See `Attributes`."""

    def plan(self, drafts: Drafts) -> Amount:
        """Choose the round's amount from drafts of `outline` states."""

    def cut(self, amount: Amount, drafts: Drafts) -> int:
        """Choose how many states to submit, at most `amount.states`, once the head has read
        drafts."""

    def learn(self, amount: Amount, outlines: Drafts, drafts: Drafts) -> None:
        """Learn which nodes of the submitted drafts were accepted (`Node.accepted`)."""


@dataclass(frozen=True)
class Fixed:
    """The same amount in every round.

    Attributes:
        states: K; 1: nothing is drafted, and a row that ends a block also submits the first state
            of the next.
        passes: Head passes, fewer than `states`.
    """

    states: int = 1
    passes: int = 0

    @property
    def outline(self) -> int:
        """See `DraftAmount`: what the first head pass reads, or all."""
        return draft_sizes(self.states, self.passes)[0] if self.passes else self.states

    def plan(self, drafts: Drafts) -> Amount:
        """See `DraftAmount`."""
        if self.states > 1:
            return Amount(self.states, self.passes)
        clean = any(nodes and not nodes[0].state.masks for nodes in drafts)
        return Amount(2 if clean else 1)

    def cut(self, amount: Amount, drafts: Drafts) -> int:
        """See `DraftAmount`."""
        return amount.states

    def learn(self, amount: Amount, outlines: Drafts, drafts: Drafts) -> None:
        """Learn nothing."""


class Calibration:
    """By depth, the factor between the chances of drafts and how often they are accepted.

    A depth of which little is known takes the factor of the depth before it, times `decay`.
    """

    WEIGHT = 3.0  # expected acceptances that the assumed factor counts for
    FADE = 0.99  # of what is known, with each round

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.predicted: list[float] = []
        self.accepted: list[float] = []

    def factors(self, depth: int) -> list[float]:
        """Return the factors of depths 0 (the row's own state) to `depth`."""
        factors = [1.0]
        for index in range(depth):
            factor = factors[-1] * self.decay
            if index < len(self.predicted):
                factor = (self.accepted[index] + self.WEIGHT * factor) / (
                    self.predicted[index] + self.WEIGHT
                )
            factors.append(min(1.0, factor))
        return factors

    def learn(self, predicted: Drafts, drafts: Drafts) -> None:
        """Learn from the chances of `predicted`, and how many nodes of `drafts` were accepted."""
        for index in range(len(self.predicted)):
            self.predicted[index] *= self.FADE
            self.accepted[index] *= self.FADE
        for nodes in predicted:
            for node in nodes:
                if node.depth and not node.opens:
                    while len(self.predicted) < node.depth:
                        self.predicted.append(0.0)
                        self.accepted.append(0.0)
                    self.predicted[node.depth - 1] += node.chance
        for nodes in drafts:
            for node in nodes:
                if node.accepted and 0 < node.depth <= len(self.accepted) and not node.opens:
                    self.accepted[node.depth - 1] += 1.0


class ExpectedGain:
    """The amount of drafting with the most expected denoising steps for its cost.

    Args:
        states: The most states of a row.
        passes: Head passes of a round in which the head drafts; 0: it never does.
        costs: What states cost.
    """

    # How the acceptance of drafts falls with depth, as long as nothing is known: of stale drafts,
    # and of the head's by its own chances and by those of the stale drafts that it starts from.
    STALE_DECAY = 0.75
    HEAD_DECAY = 0.9
    UNREAD_DECAY = 0.95
    # What the head has to make more than stale drafts: both are estimates, and the larger one is
    # more often too large.
    HEAD_MARGIN = 1.03

    def __init__(self, states: int, passes: int, costs: RoundCosts) -> None:
        self.widths = [width for width in WIDTHS if width <= states]
        self.outline = self.widths[-1]
        self.passes = passes
        self.costs = costs
        self.stale = Calibration(self.STALE_DECAY)
        # of the head's drafts by the chances that the head gives them, and by those of the stale
        # drafts that it starts from
        self.read = Calibration(self.HEAD_DECAY)
        self.unread = Calibration(self.UNREAD_DECAY)

    def plan(self, drafts: Drafts) -> Amount:
        """See `DraftAmount`."""
        best_rate = 0.0
        best = Amount(1)
        ways = [(0, self.stale, 1.0)]
        if self.passes:
            ways.append((self.passes, self.unread, self.HEAD_MARGIN))
        for passes, calibration, margin in ways:
            steps = expected_steps(drafts, calibration, self.widths)
            for width, expected in zip(self.widths, steps, strict=True):
                rate = expected / (margin * self.costs.of_round(len(drafts), width, passes))
                if passes < width and rate > best_rate:
                    best_rate = rate
                    best = Amount(width, passes)
        return best

    def cut(self, amount: Amount, drafts: Drafts) -> int:
        """See `DraftAmount`."""
        if not amount.passes:
            return amount.states
        widths = self.widths[: bisect_left(self.widths, amount.states) + 1]
        steps = expected_steps(drafts, self.read, widths)
        rows = len(drafts)
        head = self.costs.of_head(rows, amount.states, amount.passes)
        rates = []
        for width, expected in zip(widths, steps, strict=True):
            rates.append(expected / (head + self.costs.of_round(rows, width, 0)))
        return widths[rates.index(max(rates))]

    def learn(self, amount: Amount, outlines: Drafts, drafts: Drafts) -> None:
        """See `DraftAmount`."""
        if not amount.passes:
            self.stale.learn(drafts, drafts)
            return
        self.read.learn(drafts, drafts)
        width = max(map(len, drafts))
        self.unread.learn([nodes[:width] for nodes in outlines], drafts)


def expected_steps(drafts: Drafts, calibration: Calibration, widths: Sequence[int]) -> list[float]:
    """Compute for each number of states the denoising steps that the first so many nodes of all
    rows are expected to make."""
    totals = [0.0] * widths[-1]
    factors = calibration.factors(widths[-1])
    for nodes in drafts:
        for index, node in enumerate(nodes[: widths[-1]]):
            if node.state.masks:
                totals[index] += min(1.0, node.chance * factors[node.depth])
    steps = []
    total = 0.0
    begin = 0
    for width in widths:
        total += sum(totals[begin:width])
        begin = width
        steps.append(total)
    return steps
