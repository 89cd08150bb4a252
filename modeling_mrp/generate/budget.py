"""The amount of drafting of each round: fixed, or as much as measured time and acceptance so far say pays.

Drafts never change the text, so that how much is drafted is free to follow the clock.
"""

import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..rules.state import Row

# States a row may submit, of which one is chosen; each has its own recording on CUDA.
WIDTHS = (1, 2, 3, 4, 6, 8)
# As many where nothing follows the clock: several processes decide alike so, and counts can be repeated.
UNTIMED_STATES = 4


@dataclass(frozen=True)
class Amount:
    """An amount of drafting in one round.

    Attributes:
        states: States that a row may submit; 1: it drafts nothing.
        passes: Head passes of the round; 0: drafts come from stale logits, and the head rests.
        narrow: Each row submits one state, whatever that is: behind a clean one the next block begins a round later.
    """

    states: int = 1
    passes: int = 0
    narrow: bool = False


class Budget(Protocol):
    """Chooses how much each round drafts."""

    def choose(self, rows: Sequence[Row]) -> Amount:
        """Choose for the next round of a batch, of which rows with a `stop` have ended."""
        ...

    def learn(self, amount: Amount, rows: Sequence[Row], steps: Sequence[int], seconds: float) -> None:
        """Learn from a round what it took, and by row how many denoising steps it came to."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The same amount in every round.

    Attributes:
        amount: It.
    """

    amount: Amount

    def choose(self, rows: Sequence[Row]) -> Amount:
        """Choose it."""
        return self.amount

    def learn(self, amount: Amount, rows: Sequence[Row], steps: Sequence[int], seconds: float) -> None:
        """Learn nothing."""


class Times:
    """Times of rounds of one kind, by the states that they score, all rows together."""

    # Other work of the machine makes rounds slower, never faster: a shorter time counts for more than a longer one.
    FASTER, SLOWER, OUTLIER = 0.3, 0.15, 1.5
    KNOWN = 3  # uses make a time known: what is met first may be recorded or compiled meanwhile

    def __init__(self) -> None:
        self.seconds: dict[int, float] = {}
        self.first: dict[int, list[float]] = {}

    def learn(self, states: int, seconds: float) -> float | None:
        """Learn what a round of so many states took; once that is known return what first uses cost beyond it, else None."""
        first = self.first.setdefault(states, [])
        if len(first) < self.KNOWN:
            first.append(seconds)
            if len(first) < self.KNOWN:
                return None
            self.seconds[states] = min(first)
            return sum(first) - len(first) * min(first)
        before = self.seconds[states]
        rate = self.FASTER if seconds < before else self.SLOWER
        self.seconds[states] = before + rate * (min(seconds, self.OUTLIER * before) - before)
        return None

    def known(self, states: int) -> bool:
        """Tell if a time was measured often enough."""
        return states in self.seconds

    def estimate(self, states: int) -> float | None:
        """Estimate the seconds of a round of so many states, rather too few than too many; None: nothing is known."""
        if states in self.seconds or not self.seconds:
            return self.seconds.get(states)
        below = max((one for one in self.seconds if one < states), default=None)
        above = min((one for one in self.seconds if one > states), default=None)
        if below is None:
            return self.seconds[above] * states / above  # type: ignore[index, operator]
        if above is None:
            before = max((one for one in self.seconds if one < below), default=below)
            slope = (self.seconds[below] - self.seconds[before]) / max(1, below - before)
            return self.seconds[below] + 0.7 * max(0.0, slope) * (states - below)
        share = 0.5 * (states - below) / (above - below)  # flat at first, then a slope
        return self.seconds[below] + share * (self.seconds[above] - self.seconds[below])


class Auto:
    """Chooses the amount with which rows come furthest for its time.

    A row comes as far as the denoising steps that a round takes it. What a round costs is a function of the states that it
    scores and of whether the head takes part; how far it leads, of the chance that a draft of each depth is accepted, learnt
    for stale drafts and for the head's. An amount of which too little is known is tried where its best case beats what is
    known, and again after ever longer waits. What trying loses is measured, and limited to a share of all time.

    Args:
        states, passes: The most of both.
    """

    SHARE, CREDIT = 0.05, 1.0  # of all time may be lost by trying, and so many rounds that draft nothing
    ENOUGH = 10  # rows that had a draft of some depth make its chance known
    WINDOW = 400  # so many count, the newest most
    HOPES = (0.85, 0.95)  # the chance that is supposed of a first draft, of stale logits and of the head
    WAIT = 100  # rounds after which an amount is tried again that is at most `MARGIN` slower, and twice as many each time
    MARGIN = 1.4

    def __init__(self, states: int, passes: int) -> None:
        kinds = [0, passes] if passes else [0]
        drafts = [Amount(width, min(kind, width - 1)) for kind in kinds for width in WIDTHS if 1 < width <= states]
        self.amounts = [Amount(), Amount(narrow=True), *drafts]
        self.times = Times(), Times()  # without passes of the head, and with them
        self.offered, self.accepted = ([[0.0] * (states + 1) for _ in kinds] for _ in range(2))
        self.spent = self.lost = self.first_cost = 0.0
        self.rounds = self.trying = self.scored = 0
        self.best, self.each = Amount(), 0.0  # what is best by what is known, and the seconds that it takes for a step
        self.waits: dict[Amount, tuple[int, int]] = {}  # until which round an amount rests, and how long
        self.last = Amount()

    def choose(self, rows: Sequence[Row]) -> Amount:
        """See `Budget`."""
        size, going = len(rows), sum(row.stop is None for row in rows)
        clean = sum(not row.state.masks for row in rows if row.stop is None)
        known, hopes = dict[Amount, float](), dict[Amount, float]()
        for amount in self.amounts if clean < going else self.amounts[:1]:
            if amount.narrow > clean:
                continue
            each, is_known = self.prospect(amount, size, going, clean)
            (known if is_known else hopes)[amount] = each
        self.best = min(known, key=known.__getitem__, default=Amount())
        self.each = known.get(self.best, 0.0)
        started = self.times[self.last.passes > 0].known(self.states(self.last, size, clean))
        if self.trying > 0 and self.last in (known | hopes) and (not started or self.lost <= self.left()):
            self.trying -= 1
        else:
            self.trying, self.last = 0, self.best
            if known:
                self.last = self.tried({**known, **hopes}, hopes, going, size, clean)
        self.scored = self.states(self.last, size, clean)
        return self.last

    def tried(self, prospects: dict[Amount, float], hopes: dict[Amount, float], going: int, size: int, clean: int) -> Amount:
        """Choose what is tried: the best hope, or what has rested for long; else what is best."""
        due = [one for one in prospects if one != self.best and self.waits.get(one, (self.WAIT, 0))[0] <= self.rounds]
        better = [one for one in hopes if hopes[one] < self.each] or [
            one for one in due if prospects[one] < self.MARGIN * self.each
        ]
        chosen = min(better, key=prospects.__getitem__, default=self.best)
        if chosen == self.best:
            return chosen
        new = not self.times[chosen.passes > 0].known(self.states(chosen, size, clean))
        if self.lost + self.first_cost * new > self.left():
            return self.best
        self.lost += self.first_cost * new
        wait = self.waits.get(chosen, (0, self.WAIT))[1]
        self.waits[chosen] = self.rounds + wait, 2 * wait
        self.trying = max(Times.KNOWN, -(-self.ENOUGH // going)) - 1
        return chosen

    def left(self) -> float:
        """Compute the seconds that trying may lose in all so far."""
        return self.SHARE * self.spent + self.CREDIT * min(self.times[0].seconds.values(), default=0.0)

    def prospect(self, amount: Amount, size: int, going: int, clean: int) -> tuple[float, bool]:
        """Estimate the seconds for a step of a row, rather too few where too little is known; and tell whether enough is."""
        kind, states = int(amount.passes > 0), self.states(amount, size, clean)
        seconds = self.times[kind].estimate(states) or self.times[0].estimate(states) or float("inf")
        if states > 2 * max((*self.times[0].seconds, *self.times[1].seconds), default=states):
            seconds = float("inf")  # step by step: a wide round may take long
        known, reached, steps, chance = self.times[kind].known(states), 1.0, 1.0, self.HOPES[kind]
        for depth in range(1, amount.states):
            offered = self.offered[kind][depth]
            known &= offered >= self.ENOUGH
            chance = (self.accepted[kind][depth] + 2 * chance) / (offered + 2)
            reached *= chance
            steps += reached
        return seconds / (steps * (going - clean * amount.narrow)), known

    def states(self, amount: Amount, size: int, clean: int) -> int:
        """Count the states that a round scores."""
        return size * (amount.states if amount.states > 1 else 1 + (clean > 0 and not amount.narrow))

    def learn(self, amount: Amount, rows: Sequence[Row], steps: Sequence[int], seconds: float) -> None:
        """See `Budget`."""
        kind, came = int(amount.passes > 0), [one for one in steps if one]
        if (cost := self.times[kind].learn(self.scored, seconds)) is not None:
            self.first_cost = cost
        for depth in range(1, amount.states):
            offered = sum(one >= depth for one in came)
            fading = max(0.0, 1 - offered / self.WINDOW)
            self.offered[kind][depth] = fading * self.offered[kind][depth] + offered
            self.accepted[kind][depth] = fading * self.accepted[kind][depth] + sum(one > depth for one in came)
        self.spent += seconds
        if amount != self.best and self.each:  # what first uses take beyond that was charged before
            first = self.times[kind].first[self.scored]
            seconds = seconds if self.times[kind].known(self.scored) else min(first)
            self.lost = max(0.0, self.lost + seconds - self.each * sum(came))
        self.rounds += 1


_BUDGETS: "weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Auto]]" = weakref.WeakKeyDictionary()


def budget_of(model: nn.Module, mode: Hashable, states: int, passes: int, paced: bool) -> Budget:
    """Give what chooses the amounts of a call; what was learnt stays with the model, for the calls that follow.

    Where several processes run, which must decide alike if they share a model, and under deterministic algorithms nothing
    follows the clock.
    """
    alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    if paced and alone and not torch.are_deterministic_algorithms_enabled():
        weight = next(model.parameters())
        return _BUDGETS.setdefault(model, {}).setdefault((mode, weight.device, weight.dtype), Auto(states, passes))
    states = min(states, UNTIMED_STATES) if paced else states
    return Fixed(Amount(states, min(passes, states - 1)))


__all__ = ["UNTIMED_STATES", "WIDTHS", "Amount", "Auto", "Budget", "Fixed", "Times", "budget_of"]
