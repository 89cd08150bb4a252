"""Budgets, which choose how much a round drafts: a fixed amount, or the fastest by time and
acceptance measured so far.

Drafts never change the text, so the amount may depend on the clock.
"""

import copy
import threading
import weakref
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from ..rules.state import Row

# The numbers of states per row to choose from; each has its own CUDA graph.
WIDTHS = (1, 2, 3, 4, 6, 8)
# States per row where the clock must not decide, so that several processes agree or counts are
# reproducible.
UNTIMED_STATES = 4


@dataclass(frozen=True)
class Amount:
    """An amount of drafting in one round.

    Attributes:
        states: States that a row may submit, its own included; 1: no drafts.
        passes: Head passes of the round; 0: drafts come from stale logits, and the head does not
            run.
        narrow: Whether each row submits only its own state; the next block after a clean state then
            starts a round later.
    """

    states: int = 1
    passes: int = 0
    narrow: bool = False


class Budget(Protocol):
    """Chooses how much each round drafts."""

    def choose(self, rows: Sequence[Row]) -> Amount:
        """Choose the amount for the batch's next round; rows whose `stop` is set have ended."""

    def learn(
        self, amount: Amount, rows: Sequence[Row], steps: Sequence[int], seconds: float
    ) -> None:
        """Learn from a round that took `seconds` and, by row, `steps` denoising steps."""


@dataclass(frozen=True)
class Fixed:
    """Chooses the same amount for every round."""

    amount: Amount

    def choose(self, rows: Sequence[Row]) -> Amount:
        """Return the fixed amount."""
        return self.amount

    def learn(
        self, amount: Amount, rows: Sequence[Row], steps: Sequence[int], seconds: float
    ) -> None:
        """Learn nothing."""


PLAIN = (1, 0)  # states and head passes of a round without drafts (the target alone)
Shape = tuple[int, int, int]  # of a round: rows of the batch, states scored per row, head passes


class Times:
    """Measured seconds of a round by the number of states of all rows together, without and with
    head passes."""

    # rounds after which the time of a shape is known: the first ones may include recording or
    # compiling
    FIRST = 3
    # of the moving average; the multiple of it to which longer rounds are clipped
    RATE, OUTLIER = 0.1, 1.5

    def __init__(self) -> None:
        self.seconds: tuple[dict[int, float], dict[int, float]] = {}, {}
        self.first: defaultdict[Shape, list[float]] = defaultdict(list)
        # extra seconds of a shape's first rounds (graphs, compiling), the least of any shape
        self.recording = inf
        self.tried: Shape = (0, 0, 0)  # the last shape on trial

    def learn(self, shape: Shape, seconds: float) -> None:
        """Learn the seconds of a round of this shape."""
        (rows, states, passes), first = shape, self.first[shape]
        known, scored = self.seconds[passes > 0], rows * states
        if self.known(shape):
            known[scored] += self.RATE * (
                min(seconds, self.OUTLIER * known[scored]) - known[scored]
            )
        else:
            first.append(seconds)
            if self.known(shape):
                known.setdefault(scored, min(first))
                self.recording = min(self.recording, sum(first) - len(first) * min(first))

    def known(self, shape: Shape) -> bool:
        """Tell if this shape itself was timed: the time of another with as many states says nothing
        of this one's recording."""
        return len(self.first[shape]) == self.FIRST

    def estimate(self, scored: int, passes: int) -> float:
        """Estimate the seconds of a round of `scored` states, with head passes unless `passes` is
        0. If never timed, take the largest timed round without head passes and with no more states,
        which is rather too low; if none was, return 0."""
        plain = self.seconds[0]
        below = [one for one in plain if one <= scored]
        return self.seconds[passes > 0].get(scored) or (plain[max(below)] if below else 0.0)


class Auto:
    """Chooses the amount of drafting that makes the most denoising steps per second.

    A row cannot draft while its block is clean, nor before the next block is scored, so an amount
    (at most `states` and `passes`) is judged together with the undrafted rounds that follow from
    it. An amount about which too little is known is tried if its best case beats the best known
    amount: more states give more steps, each further state fewer than the last, and never cost less
    time. Trials are paid from a balance by number of rows: a share of the time that the target
    alone would have taken, and all time that drafts have saved. So a first call is at most about
    that share slower than its target.

    Each call has a copy (`copy.copy`), with a round of its own. Copies share, under a lock, what
    was learnt.
    """

    SHARE = 0.045  # share of the target's time that trials may cost
    ENOUGH = 0.98  # an amount is tried if its best case is below this share of the best known time
    # supposed: the chance of an untried draft, and rounds of one step each beside the measured ones
    HOPE, SURE = 0.9, 4.0
    FADE = 1 - 1 / 8000  # factor on the sums in `gains` after each round

    def __init__(self, states: int, passes: int) -> None:
        widths = [one for one in WIDTHS if 1 < one <= states]
        self.ladders = [
            [(one, min(most, one - 1)) for one in widths] for most in sorted({0, passes})
        ]
        # By (states, passes), fading sums over rounds: of 1, of steps per row, and of the share of
        # rows that cannot draft next.
        self.gains = {
            way: [0.0, 0.0, 0.0]
            for way in (PLAIN, *(one for ladder in self.ladders for one in ladder))
        }
        self.times, self.plain = Times(), 0.0  # `plain`: seconds per step of the target alone
        # seconds, by number of rows in the batch
        self.balance: defaultdict[int, float] = defaultdict(float)
        self.lock = threading.Lock()
        # The current round: its states and passes, its shape, and whether each row could draft.
        self.way, self.shape = PLAIN, (1, 1, 0)
        self.drafts: list[bool] = []

    def choose(self, rows: Sequence[Row]) -> Amount:
        """See `Budget`."""
        with self.lock:
            return self._choose(rows)

    def learn(
        self, amount: Amount, rows: Sequence[Row], steps: Sequence[int], seconds: float
    ) -> None:
        """See `Budget`."""
        # else the round had no room for the chosen amount
        if (amount.states, amount.passes) == self.way:
            with self.lock:
                self._learn(rows, steps, seconds)

    def _choose(self, rows: Sequence[Row]) -> Amount:
        going = [row for row in rows if row.stop is None]
        clean = sum(not row.state.masks for row in going)
        self.drafts = [row.stop is None and can_draft(row) for row in rows]
        one, two = (self.times.estimate(states * len(rows), 0) for states in (1, 2))
        narrow = 0 < clean < len(going) and one * len(going) < two * (len(going) - clean)
        self.way, self.plain = PLAIN, 0.0
        if any(self.drafts) and one:
            self.way = self.best(len(rows), len(going), one, two)
        states, passes = self.way
        self.shape = len(rows), states if states > 1 else 1 + (clean > 0 and not narrow), passes
        return Amount(states, passes, narrow and states == 1)

    def best(self, size: int, going: int, one: float, two: float) -> tuple[int, int]:
        """Choose the (states, passes) of least known time per step, or of a better best case if the
        balance pays a trial.

        Of the batch's `size` rows, `going` have not ended; a round of 1 or 2 states a row takes
        `one` or `two` seconds.
        """
        times, (rounds, _, stuck) = self.times, self.gains[PLAIN]
        stuck /= max(1.0, rounds)
        self.plain = (one + stuck * two) / (1 + stuck) / going
        if times.tried[0] == size and not times.known(times.tried):
            return times.tried[1:]
        sure, hopes = {PLAIN: self.plain}, {PLAIN: self.plain}
        # no width is tried far beyond known ones
        most = 2 * max((*times.seconds[0], *times.seconds[1]))
        for ladder in self.ladders:
            below, steps, slope, behind = 1, 1.0, self.HOPE, stuck
            for way in ladder:
                (states, passes), (rounds, came, could_not), known = (
                    way,
                    self.gains[way],
                    times.known((size, *way)),
                )
                hope = steps + slope * (states - below)
                if rounds:
                    behind = (could_not + behind) / (rounds + 1)
                    mean = (came + hope) / (rounds + 1)
                    hope = min(hope, mean + sqrt(mean * (mean - 1) / (rounds + 1)))
                    slope = max(0.0, (hope - steps) / (states - below))
                    below, steps = states, hope
                seconds = times.estimate(size * states, passes)
                seconds = (seconds + behind * (two if going == 1 else seconds)) / going
                if known and rounds:
                    sure[way] = seconds / (behind + (came + self.SURE) / (rounds + self.SURE))
                if known or size * states <= most:
                    hopes[way] = seconds / (behind + hope)
        best, dream = (min(of, key=of.__getitem__) for of in (sure, hopes))
        if hopes[dream] >= self.ENOUGH * sure[best]:
            return best
        (states, passes), uses, flat = dream, len(times.first[size, *dream]), times.seconds[0]
        seconds, scored = times.estimate(size * states, passes), size * states
        if scored not in times.seconds[passes > 0]:
            seconds = max(seconds, flat[max(flat)] * scored / max(flat))
        price = max(1, times.FIRST - uses) * max(0.0, seconds - self.plain * going)
        price += (1 + (passes > 0)) * (uses < times.FIRST - 1) * times.recording
        # again, should the batch shrink meanwhile
        price += (times.tried[1:] != dream) * times.recording
        if price > self.balance[size]:
            return best
        times.tried = size, *dream
        return dream

    def _learn(self, rows: Sequence[Row], steps: Sequence[int], seconds: float) -> None:
        self.times.learn(self.shape, seconds)
        came = [
            (1, step, not can_draft(row))
            for step, row, one in zip(steps, rows, self.drafts, strict=True)
            if one
        ]
        new = [sum(part) / len(came) for part in zip(*came, strict=True)]
        for way, gains in self.gains.items() if came else ():
            self.gains[way] = [
                self.FADE * old + (way == self.way) * one
                for old, one in zip(gains, new, strict=True)
            ]
        target = self.plain * sum(steps) if self.way != PLAIN else seconds
        self.balance[len(rows)] += (1 + self.SHARE) * target - seconds


def can_draft(row: Row) -> bool:
    """Tell if a row has masks to reveal, and scores from which its drafts can start."""
    return row.state.masks > 0 and row.source is not None


_BUDGETS: "weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Auto]]" = weakref.WeakKeyDictionary()
_BUDGETS_LOCK = threading.Lock()


def budget_of(model: nn.Module, mode: Any) -> Budget:
    """Return the budget of a call with a `Mode`; what an `Auto` learns stays with the model, for
    other calls.

    The budget is fixed under deterministic algorithms, and where several processes run, which must
    decide alike.
    """
    drafting = mode.drafting
    if drafting is None:
        return Fixed(Amount())
    alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    if drafting.paced and alone and not torch.are_deterministic_algorithms_enabled():
        weight = next(model.parameters())
        key = mode, weight.device, weight.dtype
        with _BUDGETS_LOCK:
            learnt = _BUDGETS.setdefault(model, {}).setdefault(
                key, Auto(drafting.states, drafting.passes)
            )
        return copy.copy(learnt)
    states = min(drafting.states, UNTIMED_STATES) if drafting.paced else drafting.states
    return Fixed(Amount(states, min(drafting.passes, states - 1)))
