"""The amount of drafting of each round: fixed, or as much as measured time and acceptance so far say pays.

Drafts never change the text, so that how much is drafted is free to follow the clock. The host reads one summary a round, which
waits for the device: the time from one to the next is the round's, whatever it ran on.
"""

import math
import weakref
from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from .decode_state import RoundPlan
from .modes import Amount, Mode

# States a row may submit, of which one is chosen; each has its own recording on CUDA.
WIDTHS = (1, 2, 3, 4, 6, 8)
# As many where nothing follows the clock: several processes decide alike so, and counts can be repeated.
UNTIMED_STATES = 4
# Room for two states behind some rows that are clean is room for two in all rows.
NARROW = Amount(narrow=True)


@dataclass(frozen=True)
class Fixed:
    """The same amount in every round.

    Attributes:
        amount: It.
    """

    amount: Amount

    def begin(self) -> None:
        """Begin a call."""

    def choose(self, plan: RoundPlan, rows: int, branches: int | None, behind: bool) -> Amount:
        """Choose it."""
        return self.amount

    def learn(
        self, plan: RoundPlan, accepted: Sequence[int], rows: int, seconds: float, catch_up: float = 0.0, usual: bool = True
    ) -> None:
        """Learn nothing."""


class RoundTimes:
    """Times of rounds by the states that they score, all rows together: averages, and lines between them.

    Args:
        below: Times of rounds that do the same and less; None: there are none.
    """

    # Other work of the machine makes rounds slower, never faster: a shorter time counts for more than a longer one.
    FASTER_RATE, SLOWER_RATE = 0.5, 0.15
    # A round that took so many times what it does on average is no sign of anything.
    OUTLIER = 3.0

    def __init__(self, below: "RoundTimes | None" = None) -> None:
        self.below, self.states, self.seconds = below, list[int](), dict[int, float]()

    def learn(self, states: int, seconds: float) -> None:
        """Learn what a round of so many states took."""
        if (before := self.seconds.get(states)) is None:
            insort(self.states, states)
            before = seconds
        rate = self.SLOWER_RATE if seconds > before else self.FASTER_RATE if 2 * seconds > before else 1.0
        self.seconds[states] = before + rate * (min(seconds, self.OUTLIER * before) - before)

    def knows(self, states: int) -> bool:
        """Tell if a time was measured here, or on both sides, or for no more than twice as many states."""
        return bool(self.states) and self.states[0] <= 2 * states and states <= self.states[-1]

    def estimate(self, states: int) -> float:
        """Estimate the seconds of a round of so many states: outside of what is known rather too few than too many."""
        if (known := self.seconds.get(states)) is not None:
            return known
        if not self.states:
            return self.below.estimate(states) if self.below else 0.0
        place = bisect_left(self.states, states)
        if 0 < place < len(self.states):
            a, b = self.states[place - 1 : place + 1]
            return self.seconds[a] + (self.seconds[b] - self.seconds[a]) / (b - a) * (states - a)
        end = self.states[0 if place == 0 else -1]
        return max(self.seconds[end] + self.slope() * (states - end), self.seconds[end] * min(1.0, states / end))

    @property
    def reach(self) -> int:
        """The most states that a round may be tried with: no more than twice as many as one had."""
        below = self.below.states[-1] if self.below and self.below.states else 0
        return max(below, 2 * self.states[-1] if self.states else 0)

    def slope(self) -> float:
        """Seconds for one more state."""
        if len(self.states) < 2:
            return self.below.slope() if self.below else 0.0
        first, last = self.states[0], self.states[-1]
        return max(0.0, (self.seconds[last] - self.seconds[first]) / (last - first))


class Chances:
    """Chances that the state in each slot is accepted, as shares of those offered lately.

    Args:
        slots: States that a row may submit.
        below: Chances of drafts that are no better; None: nothing is known of any.

    Attributes:
        sums: By slot, the states accepted up to it, on average.
    """

    # So many states count, the newest most; before any was seen, so many with the chance that is supposed.
    WINDOW, PRIOR = 256.0, 4.0
    # Of so many the share can be believed.
    ENOUGH = 8.0

    def __init__(self, slots: int, below: "Chances | None" = None) -> None:
        self.below = below
        self.offered, self.accepted, self.sums = [0.0] * slots, [0.0] * slots, [1.0] * slots
        self.add_up()

    def learn(self, accepted: Sequence[int], rows: int) -> None:
        """Learn from a round in which so many of `rows` rows accepted the state in each slot."""
        fading = max(0.0, 1 - rows / self.WINDOW)
        for slot, count in enumerate(accepted):
            self.offered[slot] = fading * self.offered[slot] + rows
            self.accepted[slot] = fading * self.accepted[slot] + count
        self.add_up()

    def add_up(self) -> None:
        """Compute the sums: whenever chances below have changed, too."""
        before, chance = 1.0, 1.0
        for slot in range(1, len(self.sums)):
            # Unseen, a slot falls behind the one before as that one does; what is no worse is supposed to be much better.
            supposed = chance * min(1.0, chance / before) if before else 0.0
            if self.below is not None:
                supposed = min(chance, math.sqrt(self.below.sums[slot] - self.below.sums[slot - 1]))
            share = (self.accepted[slot] + self.PRIOR * supposed) / (self.offered[slot] + self.PRIOR)
            before, chance = chance, share
            self.sums[slot] = self.sums[slot - 1] + share

    def knows(self, states: int) -> bool:
        """Tell if the chances of so many slots can be believed."""
        return states < 2 or self.offered[states - 1] >= self.ENOUGH


class Prospect(NamedTuple):
    """An amount for a round: seconds for each state accepted, how many are, and the amount."""

    each: float
    accepted: float
    amount: Amount


class Trial(NamedTuple):
    """A round whose amount is tried: seconds for each state accepted of the best one, and what comes behind it."""

    each: float
    behind: float


@dataclass
class Pace:
    """Chooses the amount with which rows come furthest for its time, for all batch sizes of a model.

    A row comes as far as the states that the target would have scored one by one: of a draft, the accepted ones that have masks
    left. What a round takes is a function of the states that it scores and of whether the head takes part. An amount of which
    too little is known has a hopeful estimate, and where that beats all that is known, the amount is tried; one that was not
    chosen for long is tried again. What trying loses is measured, and limited to a share of all time, one round to start with.

    Attributes:
        amounts: What may be chosen, the first of them drafts nothing; beside them `NARROW`, where some rows are clean.
        times: What rounds take that draft nothing, draft from stale logits, draft with the head.
        chances: Of drafts from stale logits, and with the head.
        spent: Seconds of all rounds.
        lost: Seconds that trying lost.
        saved: Seconds that drafts were faster than what drafts nothing.
        catch_up: Seconds that it takes to have the head read what it has not, on average.
        rounds: Rounds so far,
        begun: how many of them before this call,
        usual: and how many a call has, on average.
        chosen: By amount, the round for which it was chosen last,
        waits: and how many rounds later it is tried again: each time in vain twice as many.
    """

    amounts: tuple[Amount, ...]
    times: tuple[RoundTimes, RoundTimes, RoundTimes] = field(init=False)
    chances: tuple[Chances, Chances] = field(init=False)
    spent: float = 0.0
    lost: float = 0.0
    saved: float = 0.0
    catch_up: float = 0.0
    rounds: int = 0
    begun: int = 0
    usual: float = 0.0
    chosen: dict[Amount, int] = field(default_factory=dict)
    waits: dict[Amount, int] = field(default_factory=dict)

    # What trying may lose: to start with, rounds that draft nothing; a share of the time so far; a share of the time saved, but
    # no more than another one of the time so far.
    CREDIT, SHARE, OF_SAVED, MOST_OF_SAVED = 1.0, 0.01, 0.1, 0.02
    # Rounds after which an amount is tried again, at least and at most.
    WAIT, LONGEST_WAIT = 50, 800
    # Drafts have to win by so much: times are estimates.
    MARGIN = 1.05
    # How much of a new number goes into an average.
    RATE = 0.3

    def __post_init__(self) -> None:
        most = max(amount.states for amount in self.amounts)
        plain = RoundTimes()
        stale = RoundTimes(plain)
        self.times = plain, stale, RoundTimes(stale)
        guessed = Chances(most)
        self.chances = guessed, Chances(most, guessed)
        drafting = self.amounts[1:]
        self._kinds = [amount for amount in drafting if not amount.passes], [amount for amount in drafting if amount.passes]
        self._last = self.amounts[0]
        self._stays = 0  # rounds for which the head is tried yet
        self._trial: Trial | None = None
        self._alone = 0.0  # seconds that it takes with none

    def begin(self) -> None:
        """Begin a call."""
        if (rounds := self.rounds - self.begun) > 0:
            self.usual += (rounds - self.usual) * (self.RATE if self.usual else 1.0)
        self.begun = self.rounds

    def choose(self, plan: RoundPlan, rows: int, branches: int | None, behind: bool) -> Amount:
        """Choose for the next round.

        Args:
            plan: What is known of it.
            rows: Places of the batch.
            branches: As for `RoundPlan.with_slots`.
            behind: Whether the head has to catch up before it can draft.
        """
        if plan.drafting:
            states, trying = rows * plan.room_for(1, branches), self._trial is not None
            self._trial = None
            alone = self.times[0].seconds.get(states)
            # Where nothing is drafted is no loss to the target: it may be learnt at any time.
            self._last = self.amounts[0] if alone is None else self._chosen(plan, rows, branches, behind, alone, trying)
            self.chosen[self._last] = self.rounds
        elif self._last.narrow:
            self._last = self.amounts[0]
        return self._last

    def _chosen(self, plan: RoundPlan, rows: int, branches: int | None, behind: bool, alone: float, trying: bool) -> Amount:
        self._alone = alone / plan.active
        known, hopes = self._options(plan, rows, branches, behind)
        best = min(known, key=attrgetter("each"))
        self.waits.pop(best.amount, None)
        left = self.CREDIT * alone + self._left()
        if left <= 0:
            return best.amount
        if trying and not behind and self._stays > 0:
            self._stays -= 1
            self._trial = Trial(best.each, 0.0)
            return self._last
        # For one round the head should not catch up: there has to be time for some.
        ready = not behind or left > 2 * self.catch_up
        again = self.catch_up if best.amount.passes and not behind else 0.0  # behind what does without it
        if hopes := [hope for hope in hopes if hope.each < best.each]:
            hopes = [hope for hope in hopes if not hope.amount.passes or (ready and self.chances[False].knows(2))]
            chosen = min(hopes, key=attrgetter("each"), default=best)
        else:
            due = [
                one for one in known if self.chosen.get(one.amount, 0) + self.waits.get(one.amount, self.WAIT) <= self.rounds
            ]
            due = [one for one in due if ready or not one.amount.passes]
            chosen = min(due, key=attrgetter("each"), default=best)
            if (chosen.each - best.each) * chosen.accepted + again * (not chosen.amount.passes) > left:
                return best.amount
            self.waits[chosen.amount] = min(2 * self.waits.get(chosen.amount, self.WAIT), self.LONGEST_WAIT)
        if chosen is not best:
            self._stays = math.ceil(Chances.ENOUGH / plan.active) if behind and chosen.amount.passes else 0
            self._trial = Trial(best.each, again * (not chosen.amount.passes))
        return chosen.amount

    def _options(self, plan: RoundPlan, rows: int, branches: int | None, behind: bool) -> tuple[list[Prospect], list[Prospect]]:
        """List the amounts of which enough is known, and those that may be tried."""
        done = self.rounds - self.begun
        switch = self.catch_up / max(done, self.usual - done, 1.0) if behind else 0.0
        known, hopes = [Prospect(self._alone, float(plan.active), self.amounts[0])], list[Prospect]()
        if plan.clean:
            # The clean rows come no further so. Half as many states take half as long, at best.
            narrow, moving = self.times[0].seconds.get(rows), float(plan.active - plan.clean)
            seconds = self._alone * plan.active / 2 if narrow is None else narrow
            leaving = 0.0 if behind else self.catch_up  # of the head, for a round or two
            options = hopes if narrow is None else known
            options.append(Prospect(self.MARGIN * (seconds + leaving) / moving, moving, NARROW))
        for with_head, amounts in enumerate(self._kinds):
            times, chances, width = self.times[1 + with_head], self.chances[with_head], 1
            most = max(2 * rows, times.reach)
            for amount in amounts:
                room = plan.room_for(amount.states, branches)
                states, before, width = rows * room, width, min(room, amount.states)
                if width == before or states > most:  # no more than the one before, or more than may be tried
                    break
                accepted = plan.clean + (plan.active - plan.clean) * chances.sums[width - 1]
                each = self.MARGIN * (times.estimate(states) + switch * with_head) / accepted
                enough = times.knows(states) and chances.knows(width)
                (known if enough else hopes).append(Prospect(each, accepted, amount))
        return known, hopes

    def _left(self) -> float:
        """Compute the seconds that trying may lose yet, without the credit."""
        of_saved = min(self.OF_SAVED * self.saved, self.MOST_OF_SAVED * self.spent)
        return self.SHARE * self.spent + max(0.0, of_saved) - self.lost

    def learn(
        self, plan: RoundPlan, accepted: Sequence[int], rows: int, seconds: float, catch_up: float = 0.0, usual: bool = True
    ) -> None:
        """Learn from a round.

        Args:
            plan: What it was.
            accepted: How many rows accepted the state in each slot, of those that had masks left.
            rows: Places of the batch.
            seconds: What it took,
            catch_up: and what the head took before to catch up.
            usual: Whether it ran as it will again: not where it was recorded, say.
        """
        drafts, with_head = plan.per_row > 1, plan.amount.passes > 0
        states, width = rows * plan.room, min(plan.per_row, plan.room)
        times = self.times[drafts * (1 + with_head)]
        if not usual:
            seconds = min(seconds, times.estimate(states))
        elif drafts or not with_head:  # a head that reads along takes time of its own
            times.learn(states, seconds)
        if catch_up:
            self.catch_up += (catch_up - self.catch_up) * (self.RATE if self.catch_up else 1.0)
        passed = (0 if plan.amount.narrow else plan.clean) + sum(accepted[:width])
        if (trial := self._trial) is not None:
            self.lost = max(0.0, self.lost + seconds + catch_up + trial.behind - trial.each * passed)
        elif drafts:
            self.saved += self._alone * passed - seconds - catch_up
        if width > 1 and plan.active > plan.clean:
            self.chances[with_head].learn(accepted[:width], plan.active - plan.clean)
            if not with_head:
                self.chances[True].add_up()
        self.spent += seconds + catch_up
        self.rounds += 1


_PACES: "weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Pace]]" = weakref.WeakKeyDictionary()


def pace_of(model: nn.Module, mode: Mode) -> Pace | Fixed:
    """Give what chooses the amounts of a call; what was learnt stays with the model, for the calls that follow.

    Where several processes run, which must decide alike if they share a model, nothing follows the clock.
    """
    drafting = mode.drafting
    if drafting is None or not drafting.paced:
        return Fixed(Amount() if drafting is None else Amount(drafting.states, drafting.passes))
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        states = min(drafting.states, UNTIMED_STATES)
        return Fixed(Amount(states, min(drafting.passes, states - 1)))
    key = mode, next(model.parameters()).device, next(model.parameters()).dtype
    return _PACES.setdefault(model, {}).setdefault(key, Pace(paced(drafting.states, drafting.passes)))


def paced(states: int, passes: int) -> tuple[Amount, ...]:
    """List the amounts of up to so many states and head passes, the least first."""
    widths = [width for width in WIDTHS if width <= states]
    kinds = [0, passes] if passes else [0]
    return (Amount(), *(Amount(width, min(kind, width - 1)) for kind in kinds for width in widths if width > 1))


__all__ = ["NARROW", "UNTIMED_STATES", "WIDTHS", "Chances", "Fixed", "Pace", "RoundTimes", "pace_of", "paced"]
