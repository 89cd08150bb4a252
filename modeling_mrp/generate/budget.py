"""Budgets, which choose how much a round drafts: a fixed amount, or the fastest one by the times
and the acceptance measured so far.

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

    # rounds after which a shape counts as timed: they may include recording or compiling
    WARMUP_ROUNDS = 3
    RATE = 0.1  # of the moving average
    OUTLIER = 1.5  # multiple of the average to which longer rounds are clipped

    def __init__(self) -> None:
        self.seconds: tuple[dict[int, float], dict[int, float]] = {}, {}
        self.warmup_seconds: defaultdict[Shape, list[float]] = defaultdict(list)
        # extra seconds of a shape's first rounds (graphs, compiling), the smallest of any shape
        self.recording = inf
        self.trial: Shape = (0, 0, 0)  # the last shape on trial

    def learn(self, shape: Shape, seconds: float) -> None:
        """Learn the seconds of a round of this shape."""
        rows, states, passes = shape
        averages = self.seconds[passes > 0]
        scored = rows * states
        if self.is_timed(shape):
            clipped = min(seconds, self.OUTLIER * averages[scored])
            averages[scored] += self.RATE * (clipped - averages[scored])
            return
        warmup = self.warmup_seconds[shape]
        warmup.append(seconds)
        if self.is_timed(shape):
            averages.setdefault(scored, min(warmup))
            self.recording = min(self.recording, sum(warmup) - len(warmup) * min(warmup))

    def is_timed(self, shape: Shape) -> bool:
        """Tell if this shape itself was timed: the time of another shape with as many states says
        nothing about this one's recording."""
        return len(self.warmup_seconds[shape]) == self.WARMUP_ROUNDS

    def estimate(self, scored: int, passes: int) -> float:
        """Estimate the seconds of a round of `scored` states, with head passes unless `passes` is
        0. If that was never timed, take the largest timed round without head passes and with no
        more states, which is rather too low; if there is none, return 0."""
        seconds = self.seconds[passes > 0].get(scored)
        if not seconds:
            plain = self.seconds[0]
            largest = max((timed for timed in plain if timed <= scored), default=None)
            seconds = 0.0 if largest is None else plain[largest]
        return seconds


class Auto:
    """Chooses the amount of drafting that makes the most denoising steps per second.

    A row cannot draft while its block is clean, nor before the next block is scored, so an amount
    (at most `states` and `passes`) is judged together with the undrafted rounds that follow from
    it. An amount about which too little is known is tried if its best case beats the best known
    amount: more states give more steps, each further state fewer than the last, and never cost less
    time. Trials are paid from a balance by number of rows: a share of the time that the target
    alone would have taken, and all time that drafts have saved. So a first call is at most about
    that share slower than its target.

    Each call has a copy (`copy.copy`) with its own current round. Copies share, under a lock, what
    was learnt.
    """

    SHARE = 0.045  # share of the target's time that trials may cost
    ENOUGH = 0.98  # an amount is tried if its best case is below this share of the best known time
    PRIOR_CHANCE = 0.9  # the assumed chance that an untried draft is accepted
    PRIOR_ROUNDS = 4.0  # assumed rounds of one step each beside the measured ones
    FADE = 1 - 1 / 8000  # factor on the sums in `gains` after each round

    def __init__(self, states: int, passes: int) -> None:
        # (states, passes) to choose from, without and with head passes, each in increasing order
        self.ladders: list[list[tuple[int, int]]] = []
        widths = [width for width in WIDTHS if 1 < width <= states]
        for max_passes in sorted({0, passes}):
            self.ladders.append([(width, min(max_passes, width - 1)) for width in widths])
        # By (states, passes), fading sums over rounds: of 1, of steps per row, and of the share of
        # rows that cannot draft next.
        self.gains = {PLAIN: [0.0, 0.0, 0.0]}
        for ladder in self.ladders:
            for pair in ladder:
                self.gains[pair] = [0.0, 0.0, 0.0]
        self.times = Times()
        self.plain_cost = 0.0  # seconds per step of the target alone
        # seconds, by number of rows in the batch
        self.balance: defaultdict[int, float] = defaultdict(float)
        self.lock = threading.Lock()
        # The current round: its states and passes, its shape, and whether each row could draft.
        self.pair = PLAIN
        self.shape: Shape = (1, 1, 0)
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
        if (amount.states, amount.passes) == self.pair:
            with self.lock:
                self._learn(rows, steps, seconds)

    def _choose(self, rows: Sequence[Row]) -> Amount:
        active = [row for row in rows if row.stop is None]
        clean = sum(not row.state.masks for row in active)
        self.drafts = [row.stop is None and can_draft(row) for row in rows]
        single = self.times.estimate(len(rows), 0)
        double = self.times.estimate(2 * len(rows), 0)
        narrow = 0 < clean < len(active) and single * len(active) < double * (len(active) - clean)
        self.pair = PLAIN
        self.plain_cost = 0.0
        if any(self.drafts) and single:
            self.pair = self.best(len(rows), len(active), single, double)
        states, passes = self.pair
        width = states if states > 1 else 1 + (clean > 0 and not narrow)
        self.shape = (len(rows), width, passes)
        return Amount(states, passes, narrow and states == 1)

    def best(self, size: int, active: int, single: float, double: float) -> tuple[int, int]:
        """Choose the (states, passes) of least known time per step, or one with a better best case
        if the balance pays for its trial.

        Of the batch's `size` rows, `active` have not ended; a round of 1 or 2 states a row takes
        `single` or `double` seconds.
        """
        times = self.times
        rounds, _, blocked = self.gains[PLAIN]
        blocked /= max(1.0, rounds)  # the share of rows that cannot draft after a plain round
        self.plain_cost = (single + blocked * double) / (1 + blocked) / active
        if times.trial[0] == size and not times.is_timed(times.trial):
            return times.trial[1:]
        known_costs = {PLAIN: self.plain_cost}
        best_cases = {PLAIN: self.plain_cost}
        # no width is tried far beyond timed ones
        max_scored = 2 * max((*times.seconds[0], *times.seconds[1]))
        for ladder in self.ladders:
            last_states = 1
            last_steps = 1.0
            slope = self.PRIOR_CHANCE
            undrafted = blocked
            for pair in ladder:
                states, passes = pair
                rounds, step_sum, blocked_sum = self.gains[pair]
                timed = times.is_timed((size, *pair))
                max_steps = last_steps + slope * (states - last_states)
                if rounds:
                    undrafted = (blocked_sum + undrafted) / (rounds + 1)
                    mean_steps = (step_sum + max_steps) / (rounds + 1)
                    deviation = sqrt(mean_steps * (mean_steps - 1) / (rounds + 1))
                    max_steps = min(max_steps, mean_steps + deviation)
                    slope = max(0.0, (max_steps - last_steps) / (states - last_states))
                    last_states = states
                    last_steps = max_steps
                seconds = times.estimate(size * states, passes)
                undrafted_seconds = double if active == 1 else seconds
                seconds = (seconds + undrafted * undrafted_seconds) / active
                if timed and rounds:
                    steps = (step_sum + self.PRIOR_ROUNDS) / (rounds + self.PRIOR_ROUNDS)
                    known_costs[pair] = seconds / (undrafted + steps)
                if timed or size * states <= max_scored:
                    best_cases[pair] = seconds / (undrafted + max_steps)
        best = min(known_costs, key=known_costs.__getitem__)
        candidate = min(best_cases, key=best_cases.__getitem__)
        if best_cases[candidate] >= self.ENOUGH * known_costs[best]:
            return best
        if self.trial_price(size, active, candidate) > self.balance[size]:
            return best
        times.trial = (size, *candidate)
        return candidate

    def trial_price(self, size: int, active: int, pair: tuple[int, int]) -> float:
        """Estimate the seconds that trying (states, passes) costs beyond the time of the target
        alone."""
        times = self.times
        states, passes = pair
        scored = size * states
        warmup_rounds = len(times.warmup_seconds[size, states, passes])
        seconds = times.estimate(scored, passes)
        if scored not in times.seconds[passes > 0]:
            plain = times.seconds[0]
            seconds = max(seconds, plain[max(plain)] * scored / max(plain))
        remaining = max(1, times.WARMUP_ROUNDS - warmup_rounds)
        price = remaining * max(0.0, seconds - self.plain_cost * active)
        price += (1 + (passes > 0)) * (warmup_rounds < times.WARMUP_ROUNDS - 1) * times.recording
        # again, should the batch shrink meanwhile
        price += (times.trial[1:] != pair) * times.recording
        return price

    def _learn(self, rows: Sequence[Row], steps: Sequence[int], seconds: float) -> None:
        self.times.learn(self.shape, seconds)
        drafting = 0
        step_sum = 0
        blocked_sum = 0
        for step, row, drafts in zip(steps, rows, self.drafts, strict=True):
            if drafts:
                drafting += 1
                step_sum += step
                blocked_sum += not can_draft(row)
        if drafting:
            gains = (1.0, step_sum / drafting, blocked_sum / drafting)
            for pair, sums in self.gains.items():
                faded = [self.FADE * value for value in sums]
                if pair == self.pair:
                    for index, gain in enumerate(gains):
                        faded[index] += gain
                self.gains[pair] = faded
        target = seconds
        if self.pair != PLAIN:
            target = self.plain_cost * sum(steps)
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
    distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if drafting.paced and not distributed and not torch.are_deterministic_algorithms_enabled():
        weight = next(model.parameters())
        key = (mode, weight.device, weight.dtype)
        with _BUDGETS_LOCK:
            budgets = _BUDGETS.setdefault(model, {})
            shared = budgets.setdefault(key, Auto(drafting.states, drafting.passes))
        return copy.copy(shared)
    states = min(drafting.states, UNTIMED_STATES) if drafting.paced else drafting.states
    return Fixed(Amount(states, min(drafting.passes, states - 1)))
