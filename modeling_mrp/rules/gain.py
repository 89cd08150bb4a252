"""The amount of drafting in a round: either fixed, or the one with the largest expected gain.

The search for a draft estimates, for each state, the chance that the row's path reaches it. This
chance is corrected by how many earlier drafts at the same depth were accepted. It is then the
number of denoising steps that the state is expected to make. A table gives the costs of states
(`RoundCosts`). A round submits the number of states that has the most expected steps per cost, and
adds head passes if that makes more. No clock is involved: the amount depends only on the call and
the table.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

from .costs import WIDTHS, RoundCosts, draft_sizes
from .draft import Node

Drafts = Sequence[Sequence[Node]]  # by row of the batch, its nodes; none if it has ended


@dataclass(frozen=True)
class Amount:
    """How much one round drafts.

    Attributes:
        states: The largest number of states that a row submits, its own state included.
        passes: Number of head passes in the round. If 0, drafts come from scores that the backbone
            has made at earlier states.
    """

    states: int
    passes: int = 0


class DraftAmount(Protocol):
    """Decides how much each round drafts.

    Attributes:
        outline: The number of states in each draft that `plan` is given. These drafts are made
            without the head.
    """

    @property
    def outline(self) -> int:
        """The number of states in each draft that `plan` is given. These drafts are made without
        the head."""

    def plan(self, drafts: Drafts) -> Amount:
        """Choose the amount of a round. `drafts` has, for each row, a draft of up to `outline`
        states that is made without the head."""

    def cut(self, amount: Amount, drafts: Drafts) -> int:
        """Choose how many states each row submits, at most `amount.states`. `drafts` are the drafts
        after all head passes."""

    def learn(self, amount: Amount, outlines: Drafts, drafts: Drafts) -> None:
        """Learn from a round which nodes of the submitted `drafts` were accepted (`Node.accepted`).
        `outlines` are the drafts that `plan` was given."""


@dataclass(frozen=True)
class Fixed:
    """A `DraftAmount` that gives every round the same amount.

    Attributes:
        states: K, the largest number of states that a row submits. With 1, there are no drafts: a
            row submits its own state and, if that has no masks, also the first state of the next
            block.
        passes: Number of head passes, less than `states`.
    """

    states: int = 1
    passes: int = 0

    @property
    def outline(self) -> int:
        """The number of states in each draft that `plan` is given. If there are head passes, it is
        the number that the first of them reads (`draft_sizes`); if not, it is `states`."""
        return draft_sizes(self.states, self.passes)[0] if self.passes else self.states

    def plan(self, drafts: Drafts) -> Amount:
        """Return the amount of a round.

        Args:
            drafts: For each row, a draft that begins with the row's own state; empty if the row has
                ended.

        Returns:
            With drafts (`states` above 1), always the fixed amount. Without drafts, one state per
            row; but two if the own state of any row has no masks, because such a row also submits
            the first state of the next block.
        """
        if self.states > 1:
            return Amount(self.states, self.passes)
        clean = any(nodes and not nodes[0].state.masks for nodes in drafts)
        return Amount(2 if clean else 1)

    def cut(self, amount: Amount, drafts: Drafts) -> int:
        """Return the number of states of the amount: no draft is cut."""
        return amount.states

    def learn(self, amount: Amount, outlines: Drafts, drafts: Drafts) -> None:
        """Do nothing: the amount is fixed."""


class Calibration:
    """Corrects the estimated chances of drafts. It has a factor for each depth (the number of
    drafts on the path to a state). A chance, to the power `power`, times the factor of its depth is
    the share of such drafts that is expected to be accepted.

    The factor at depth 0 is 1. At a depth without observations, it is the factor of the depth
    before, times `decay`. With observations, this is gradually replaced by the number of accepted
    drafts divided by the sum of their chances (to that power).

    Args:
        decay: The factor by which acceptance is assumed to change from each depth to the next.
        power: The power of the chances: 1 if acceptance grows in proportion to them, less if it
            depends less on them.
    """

    WEIGHT = 3.0  # weight of the assumed factor, in expected acceptances
    FADE = 0.99  # factor by which observations decay in each round

    def __init__(self, decay: float, power: float = 1.0) -> None:
        self.decay = decay
        self.power = power
        self.predicted: list[float] = []
        self.accepted: list[float] = []

    def factors(self, depth: int) -> list[float]:
        """Return the factors of all depths from 0 (the row's own state) to `depth`."""
        factors = [1.0]
        for index in range(depth):
            factor = factors[-1] * self.decay
            if index < len(self.predicted):
                factor = (self.accepted[index] + self.WEIGHT * factor) / (
                    self.predicted[index] + self.WEIGHT
                )
            factors.append(factor)
        return factors

    def doubt(self) -> float:
        """Return how far the factor at depth 1 is still assumed rather than observed: from 1
        (nothing observed yet) down to nearly 0."""
        observed = self.predicted[0] if self.predicted else 0.0
        return self.WEIGHT / (self.WEIGHT + observed)

    def learn(self, predicted: Drafts, drafts: Drafts) -> None:
        """Update the factors after a round.

        Args:
            predicted: For each row, its nodes with the chances that the factors correct. At each
                depth, the sum of these chances is the predicted number of accepted drafts.
            drafts: For each row, the nodes that it submitted, with `Node.accepted`. They give the
                true number at each depth. They may be the same nodes.
        """
        for index in range(len(self.predicted)):
            self.predicted[index] *= self.FADE
            self.accepted[index] *= self.FADE
        for nodes in predicted:
            for node in nodes:
                if node.depth and not node.opens:
                    while len(self.predicted) < node.depth:
                        self.predicted.append(0.0)
                        self.accepted.append(0.0)
                    self.predicted[node.depth - 1] += node.chance**self.power
        for nodes in drafts:
            for node in nodes:
                if node.accepted and 0 < node.depth <= len(self.accepted) and not node.opens:
                    self.accepted[node.depth - 1] += 1.0


class ExpectedGain:
    """Chooses the amount of drafting with the most expected denoising steps per cost.

    Args:
        states: The largest number of states that a row submits.
        passes: Number of head passes in a round in which the head drafts. If 0, the head never
            drafts.
        costs: What backbone forwards and head passes cost by their number of states.
        stale_acceptance: The rule's `RevealRule.stale_acceptance`.
    """

    # Initial factors by which acceptance changes with each depth, for the head's drafts: by the
    # head's own chances, and by the chances of the stale drafts from which it starts. It helps most
    # where these are low, so acceptance grows with a power of them that is below 1.
    HEAD_DECAY = 0.9
    UNREAD_DECAY, UNREAD_POWER = 1.05, 0.5
    # The share that counts of the steps that a larger amount is expected to add to those of a
    # smaller one. Both are estimates, and the larger is more often too large than too small.
    COUNTED = 0.85
    # A pass of a head that a call has not tried yet is charged this share more: a head that does
    # not pay has to be tried to find that out.
    CAUTION = 1.0

    def __init__(
        self, states: int, passes: int, costs: RoundCosts, stale_acceptance: float
    ) -> None:
        self.widths = [width for width in WIDTHS if width <= states]
        self.outline = self.widths[-1]
        self.passes = passes
        self.costs = costs
        self.stale = Calibration(stale_acceptance)
        # calibrations of the head's drafts: by the chances that the head gives them, and by the
        # chances of the stale drafts from which it starts
        self.read = Calibration(self.HEAD_DECAY)
        self.unread = Calibration(self.UNREAD_DECAY, self.UNREAD_POWER)

    def plan(self, drafts: Drafts) -> Amount:
        """Choose the amount with the most expected denoising steps per cost, judging by the chances
        of the nodes in `drafts`, which are made without the head."""
        rows = len(drafts)
        choices = []
        ways = [(0, self.stale)]
        if self.passes:
            ways.append((self.passes, self.unread))
        for passes, calibration in ways:
            steps = expected_steps(drafts, calibration, self.widths)
            caution = self.CAUTION * calibration.doubt()
            for width, expected in zip(self.widths, steps, strict=True):
                cost = self.costs.of_round(rows, width, passes)
                cost += caution * self.costs.of_head(rows, width, passes)
                if passes < width:
                    choices.append((cost, expected, Amount(width, passes)))
        return self._best(choices)

    def _best(self, choices: list[tuple[float, float, Amount]]) -> Amount:
        """Return the best of several amounts, each with its cost and its expected steps. They are
        compared by cost, the smallest first. A larger one is better if its steps per cost are more,
        even if only the share `COUNTED` of its additional steps is made."""
        choices.sort(key=itemgetter(0))
        best_cost, best_steps, best = choices[0]
        for cost, steps, amount in choices:
            counted = best_steps + self.COUNTED * (steps - best_steps)
            if counted / cost > best_steps / best_cost:
                best_cost = cost
                best_steps = steps
                best = amount
        return best

    def cut(self, amount: Amount, drafts: Drafts) -> int:
        """Choose how many states each row submits, at most `amount.states`: the number with the
        most expected denoising steps per cost, now that the head has estimated the chances of the
        nodes in `drafts`. Without head passes, it is `amount.states`."""
        if not amount.passes:
            return amount.states
        widths = self.widths[: bisect_left(self.widths, amount.states) + 1]
        steps = expected_steps(drafts, self.read, widths)
        rows = len(drafts)
        head = self.costs.of_head(rows, amount.states, amount.passes)
        choices = []
        for width, expected in zip(widths, steps, strict=True):
            cost = head + self.costs.of_round(rows, width, 0)
            choices.append((cost, expected, Amount(width)))
        return self._best(choices).states

    def learn(self, amount: Amount, outlines: Drafts, drafts: Drafts) -> None:
        """Correct the estimated chances after a round, by which of them came true (`Calibration`).

        Args:
            amount: The amount of the round.
            outlines: The drafts that `plan` was given, whose chances were estimated without the
                head.
            drafts: The drafts that were submitted, with `Node.accepted`.
        """
        if not amount.passes:
            self.stale.learn(drafts, drafts)
            return
        self.read.learn(drafts, drafts)
        width = max(map(len, drafts))
        self.unread.learn([nodes[:width] for nodes in outlines], drafts)


def expected_steps(drafts: Drafts, calibration: Calibration, widths: Sequence[int]) -> list[float]:
    """Return, for each n in the increasing `widths`, the number of denoising steps that the first n
    nodes of every row are expected to make, summed over all rows. This is the sum of the nodes'
    chances, corrected by `calibration`; states without masks make no step."""
    totals = [0.0] * widths[-1]
    factors = calibration.factors(widths[-1])
    for nodes in drafts:
        for index, node in enumerate(nodes[: widths[-1]]):
            if node.state.masks:
                totals[index] += min(1.0, node.chance**calibration.power * factors[node.depth])
    steps = []
    total = 0.0
    begin = 0
    for width in widths:
        total += sum(totals[begin:width])
        begin = width
        steps.append(total)
    return steps
