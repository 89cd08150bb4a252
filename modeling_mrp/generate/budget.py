"""The amount of drafting of each round: fixed, or as much as measured time and acceptance so far say pays.

Drafts never change the text, so the amount may depend on the clock.
"""

import weakref
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..rules.state import Row

# The numbers of states per row to choose from; each has its own CUDA graph.
WIDTHS = (1, 2, 3, 4, 6, 8)
# States per row where the clock may not decide: so that several processes agree, or counts are reproducible.
UNTIMED_STATES = 4


@dataclass(frozen=True)
class Amount:
    """An amount of drafting in one round.

    Attributes:
        states: States that a row may submit, its own included; 1: no drafts.
        passes: Head passes of the round; 0: drafts come from stale logits, and the head does not run.
        narrow: Whether each row submits only its own state; the next block after a clean state then starts a round later.
    """

    states: int = 1
    passes: int = 0
    narrow: bool = False


class Budget(Protocol):
    """Chooses how much each round drafts."""

    def choose(self, rows: Sequence[Row]) -> Amount:
        """Choose the amount for the next round of a batch; rows with a `stop` have ended."""
        ...

    def learn(self, amount: Amount, rows: Sequence[Row], steps: Sequence[int], seconds: float) -> None:
        """Learn from a round: its seconds, and the number of denoising steps it took, by row."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The same amount in every round."""

    amount: Amount

    def choose(self, rows: Sequence[Row]) -> Amount:
        """Return the fixed amount."""
        return self.amount

    def learn(self, amount: Amount, rows: Sequence[Row], steps: Sequence[int], seconds: float) -> None:
        """Learn nothing."""


Shape = tuple[int, int, bool]  # rows of the batch, states of each that are scored, and whether the head reads
PLAIN = Amount()


class Times:
    """Measured seconds of a round by the number of states of all rows together, with and without the head.

    Attributes:
        recording: Seconds that the first rounds of a shape take beyond later ones (graphs, compiling): the least of all shapes.
    """

    FIRST = 3  # rounds of a shape make its time known; in the ones before, it may be recorded or compiled
    RATE, OUTLIER = 0.1, 1.5

    def __init__(self) -> None:
        self.seconds: tuple[dict[int, float], dict[int, float]] = {}, {}
        self.first: defaultdict[Shape, list[float]] = defaultdict(list)
        self.recording, self.head = inf, 1.0  # `head`: the time of a round with the head, over one without

    def learn(self, shape: Shape, seconds: float) -> None:
        """Learn the seconds of a round."""
        (rows, states, head), first = shape, self.first[shape]
        known, scored = self.seconds[head], rows * states
        if self.known(shape):
            known[scored] += self.RATE * (min(seconds, self.OUTLIER * known[scored]) - known[scored])
        else:
            first.append(seconds)
            if self.known(shape):
                known.setdefault(scored, min(first))
                self.recording = min(self.recording, sum(first) - len(first) * min(first))
        if head and scored in known:
            self.head = known[scored] / (self.estimate(scored, False) or known[scored])

    def known(self, shape: Shape) -> bool:
        """Tell if the time of this shape itself is known: another one with as many states says nothing of its recording."""
        return len(self.first[shape]) == self.FIRST

    def estimate(self, scored: int, head: bool) -> float:
        """Estimate the seconds of a round, rather too low than too high: those of the largest known smaller one."""
        known = self.seconds[head]
        if scored in known:
            return known[scored]
        if head:
            return self.estimate(scored, False) * self.head
        if below := [one for one in known if one < scored]:
            return known[max(below)]
        least = min(known, default=0)
        return known[least] * scored / least if least else 0.0

    def price(self, shape: Shape, worth: float) -> float:
        """Estimate the most seconds that learning a shape's time may cost, where a round of it is worth `worth` seconds."""
        (rows, states, head), uses = shape, len(self.first[shape])
        seconds, scored, flat = self.estimate(rows * states, head), rows * states, self.seconds[False]
        if scored not in self.seconds[head]:
            seconds = max(seconds, flat[max(flat)] * scored / max(flat))
        return (1 + head) * (uses < self.FIRST - 1) * self.recording + max(1, self.FIRST - uses) * max(0.0, seconds - worth)


class Auto:
    """Chooses the amount of drafting that makes the most denoising steps per second.

    A row cannot draft where its block is whole, or was before the last round; a round in which no row can draft drafts nothing,
    whatever was chosen. So an amount is judged together with the rounds without drafts that follow from it.

    An amount about which too little is known is tried if its best case beats the best known one. More states give more steps,
    each additional state fewer than the last, and never cost less time: so the best case of a width follows from the smaller
    widths. Trials are paid from a balance: a share of the time that the target alone would have taken, and all the time that
    drafts have won over it in batches of as many rows. So a first call is at most about that share slower than its target.

    Args:
        states, passes: Upper bounds of both.
    """

    SHARE = 0.045  # share of the target's time that trials may cost
    ENOUGH = 0.98  # an amount is tried if its best case is below this share of the best known time
    HOPE, SURE = 0.9, 4.0  # supposed: the chance of unknown drafts, and rounds of one step each
    FADE = 1 - 1 / 8000  # factor on what is known, after each round

    def __init__(self, states: int, passes: int) -> None:
        kinds = [0, passes] if passes else [0]
        self.ladders = [[Amount(one, min(kind, one - 1)) for one in WIDTHS if 1 < one <= states] for kind in kinds]
        # By amount, sums that fade: rounds, steps per row in them, and the share of rows that could not draft next.
        self.gains = {amount: [0.0, 0.0, 0.0] for amount in (PLAIN, *(one for ladder in self.ladders for one in ladder))}
        self.times, self.plain = Times(), 0.0  # `plain`: seconds per step of the target alone
        self.balance: defaultdict[int, float] = defaultdict(float)  # seconds, by number of rows in the batch
        self.amount, self.shape = PLAIN, (1, 1, False)
        self.tried: tuple[Amount, Shape] | None = None
        self.drafts: list[bool] = []

    def choose(self, rows: Sequence[Row]) -> Amount:
        """See `Budget`."""
        going = [row for row in rows if row.stop is None]
        clean = sum(not row.state.masks for row in going)
        self.drafts = [row.stop is None and can_draft(row) for row in rows]
        one, two = (self.times.estimate(states * len(rows), False) for states in (1, 2))
        narrow = 0 < clean < len(going) and one * len(going) < two * (len(going) - clean)
        self.amount, self.plain = PLAIN, 0.0
        if any(self.drafts) and one:
            rounds, _, stuck = self.gains[PLAIN]
            stuck /= max(1.0, rounds)
            self.plain = (one + stuck * two) / (1 + stuck) / len(going)
            self.amount = self.best(len(rows), len(going), two, stuck)
        states = self.amount.states if self.amount.states > 1 else 1 + (clean > 0 and not narrow)
        self.shape = len(rows), states, self.amount.passes > 0
        return Amount(narrow=narrow) if self.amount == PLAIN else self.amount

    def best(self, size: int, going: int, two: float, stuck: float) -> Amount:
        """Choose the amount with the least known time per step, or a more hopeful one if the balance allows to try it.

        Args:
            size, going: Rows of the batch, and those that have not ended.
            two: Seconds of a round of two states.
            stuck: The share of rows that cannot draft after a round of the target alone.
        """
        if self.tried and self.tried[1][0] == size and not self.times.known(self.tried[1]):
            return self.tried[0]
        sure, hopes, shapes = {PLAIN: self.plain}, {PLAIN: self.plain}, {}
        most = 2 * max((*self.times.seconds[False], *self.times.seconds[True]))  # no width is tried far beyond known ones
        for ladder in self.ladders:
            below, steps, slope, behind = 1, 1.0, self.HOPE, stuck
            for amount in ladder:
                (rounds, came, could_not), shape = self.gains[amount], (size, amount.states, amount.passes > 0)
                shapes[amount], hope = shape, steps + slope * (amount.states - below)
                if rounds:
                    behind = (could_not + behind) / (rounds + 1)
                    mean = (came + hope) / (rounds + 1)
                    hope = min(hope, mean + sqrt(mean * (mean - 1) / (rounds + 1)))
                    slope = max(0.0, (hope - steps) / (amount.states - below))
                    below, steps = amount.states, hope
                seconds = self.times.estimate(size * amount.states, amount.passes > 0)
                seconds = (seconds + behind * (two if going == 1 else seconds)) / going
                if self.times.known(shape) and rounds:
                    sure[amount] = seconds / (behind + (came + self.SURE) / (rounds + self.SURE))
                if self.times.known(shape) or size * amount.states <= most:
                    hopes[amount] = seconds / (behind + hope)
        best, dream = (min(of, key=of.__getitem__) for of in (sure, hopes))
        if hopes[dream] >= self.ENOUGH * sure[best]:
            return best
        price = self.times.price(shapes[dream], self.plain * going)
        if not (self.tried and self.tried[0] == dream):
            price += self.times.recording  # in case the batch shrinks meanwhile, another shape has to be recorded
        if price > self.balance[size]:
            return best
        self.tried = dream, shapes[dream]
        return dream

    def learn(self, amount: Amount, rows: Sequence[Row], steps: Sequence[int], seconds: float) -> None:
        """See `Budget`."""
        if (amount.states, amount.passes) != (self.amount.states, self.amount.passes):
            return  # there was no room for the chosen amount
        self.times.learn(self.shape, seconds)
        came = [(1, step, not can_draft(row)) for step, row, one in zip(steps, rows, self.drafts, strict=True) if one]
        new = [sum(part) / len(came) for part in zip(*came, strict=True)]
        for each, gains in self.gains.items() if came else ():
            self.gains[each] = [self.FADE * old + (each == self.amount) * one for old, one in zip(gains, new, strict=True)]
        target = self.plain * sum(steps) if self.amount != PLAIN else seconds
        self.balance[len(rows)] += (1 + self.SHARE) * target - seconds


def can_draft(row: Row) -> bool:
    """Tell if there are scores from which a row's drafts can start, and masks to reveal."""
    return row.state.masks > 0 and row.source is not None


_BUDGETS: "weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Auto]]" = weakref.WeakKeyDictionary()


def budget_of(model: nn.Module, mode: Hashable, states: int, passes: int, paced: bool) -> Budget:
    """Return the budget of a call; what an `Auto` has learnt stays with the model for later calls.

    Nothing depends on the clock where several processes run, since they must decide alike if they share a model, or under
    deterministic algorithms.
    """
    alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    if paced and alone and not torch.are_deterministic_algorithms_enabled():
        weight = next(model.parameters())
        return _BUDGETS.setdefault(model, {}).setdefault((mode, weight.device, weight.dtype), Auto(states, passes))
    states = min(states, UNTIMED_STATES) if paced else states
    return Fixed(Amount(states, min(passes, states - 1)))
