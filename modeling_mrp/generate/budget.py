"""The amount of drafting of each round: fixed, or as much as measured time and acceptance so far say pays.

Drafts never change the text, so that how much is drafted is free to follow the clock.
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
    """The same amount in every round."""

    amount: Amount

    def choose(self, rows: Sequence[Row]) -> Amount:
        """Choose it."""
        return self.amount

    def learn(self, amount: Amount, rows: Sequence[Row], steps: Sequence[int], seconds: float) -> None:
        """Learn nothing."""


Shape = tuple[int, int, bool]  # rows of the batch, states of each that are scored, and whether the head reads
PLAIN = Amount()


class Times:
    """Seconds of rounds by states of all rows together, without the head and with it; and what first uses of a shape cost.

    Attributes:
        recording: Seconds that the first uses of a shape take beyond its rounds: the least of all shapes.
    """

    FIRST = 3  # uses make a time known: in those before a shape may be recorded or compiled
    RATE, OUTLIER = 0.1, 1.5

    def __init__(self) -> None:
        self.seconds: tuple[dict[int, float], dict[int, float]] = {}, {}
        self.first: defaultdict[Shape, list[float]] = defaultdict(list)
        self.recording, self.head = inf, 1.0  # `head`: a round with the head over one without

    def learn(self, shape: Shape, seconds: float) -> None:
        """Learn what a round took."""
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
        """Tell if a time is known, of the shape itself: others of as many states say nothing of its recording."""
        return len(self.first[shape]) == self.FIRST

    def estimate(self, scored: int, head: bool) -> float:
        """Estimate the seconds of a round, rather too few than too many: those of the largest known one below."""
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
        """Estimate what it may cost at worst to make a time known, given what a round is worth."""
        (rows, states, head), uses = shape, len(self.first[shape])
        seconds, scored, flat = self.estimate(rows * states, head), rows * states, self.seconds[False]
        if scored not in self.seconds[head]:
            seconds = max(seconds, flat[max(flat)] * scored / max(flat))
        return (1 + head) * (uses < self.FIRST - 1) * self.recording + max(1, self.FIRST - uses) * max(0.0, seconds - worth)


class Auto:
    """Chooses the amount with which rows come furthest for its time.

    A row cannot draft where its block is whole, or was before the last round; a round in which no row can drafts nothing,
    whatever is chosen. So an amount is judged by what it comes to with the rounds behind it that it makes such.

    An amount of which too little is known is tried where its best case beats what is best so far. More states come to more
    steps, but to ever fewer each, and cost no less time: so the best case of a width follows from the smaller ones. Trying is
    paid from a balance: a share of what the target alone would have taken, and all that drafts have won over it in batches of
    as many rows. A first call is thus at most about that share slower than its target.

    Args:
        states, passes: The most of both.
    """

    SHARE = 0.045  # of the target's time may be lost by trying
    ENOUGH = 0.98  # of the best time is hope enough to try an amount
    HOPE, SURE = 0.9, 4.0  # the chance of a draft of which nothing is known; steps are supposed 1 for so many more rounds
    FADE = 1 - 1 / 8000  # of what is known after each round

    def __init__(self, states: int, passes: int) -> None:
        kinds = [0, passes] if passes else [0]
        self.ladders = [[Amount(one, min(kind, one - 1)) for one in WIDTHS if 1 < one <= states] for kind in kinds]
        # Of each amount rounds, steps of a row in them, and the share of rows that could not draft next: sums that fade.
        self.gains = {amount: [0.0, 0.0, 0.0] for amount in (PLAIN, *(one for ladder in self.ladders for one in ladder))}
        self.times, self.plain = Times(), 0.0  # `plain`: seconds of a step of the target alone
        self.balance: defaultdict[int, float] = defaultdict(float)  # seconds, by rows of the batch
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
        """Choose what takes least time for a step, or what may and is tried.

        Args:
            size, going: Rows of the batch, and those that have not ended.
            two: Seconds of a round of two states.
            stuck: The share of rows that cannot draft after a round of the target alone.
        """
        if self.tried and self.tried[1][0] == size and not self.times.known(self.tried[1]):
            return self.tried[0]
        sure, hopes, shapes = {PLAIN: self.plain}, {PLAIN: self.plain}, {}
        most = 2 * max((*self.times.seconds[False], *self.times.seconds[True]))  # step by step: a wide round may take long
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
            price += self.times.recording  # of another size, where the batch shrinks meanwhile
        if price > self.balance[size]:
            return best
        self.tried = dream, shapes[dream]
        return dream

    def learn(self, amount: Amount, rows: Sequence[Row], steps: Sequence[int], seconds: float) -> None:
        """See `Budget`."""
        if (amount.states, amount.passes) != (self.amount.states, self.amount.passes):
            return  # there was no room for what was chosen
        self.times.learn(self.shape, seconds)
        came = [(1, step, not can_draft(row)) for step, row, one in zip(steps, rows, self.drafts, strict=True) if one]
        new = [sum(part) / len(came) for part in zip(*came, strict=True)]
        for each, gains in self.gains.items() if came else ():
            self.gains[each] = [self.FADE * old + (each == self.amount) * one for old, one in zip(gains, new, strict=True)]
        target = self.plain * sum(steps) if self.amount != PLAIN else seconds
        self.balance[len(rows)] += (1 + self.SHARE) * target - seconds


def can_draft(row: Row) -> bool:
    """Tell if anything says what may follow a row's state."""
    return row.state.masks > 0 and row.source is not None


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
