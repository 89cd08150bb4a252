"""The amount of drafting of each round: fixed, or as much as measured time and acceptance so far say pays.

Drafts never change the text, so that how much is drafted is free to follow the clock. The host reads one summary a round, which
waits for the device: the time from one to the next is the round's, whatever it ran on.
"""

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn

from .modes import Mode

# States a row may submit, of which one is chosen; each has its own recording on CUDA.
WIDTHS = (1, 2, 3, 4, 6, 8)
# As many where nothing follows the clock: several processes decide alike so, and counts can be repeated.
UNTIMED_STATES = 4


@dataclass(frozen=True)
class Amount:
    """An amount of drafting.

    Attributes:
        states: States that a row may submit in a round; 1: it drafts nothing.
        passes: Head passes of the round; 0: drafts come from stale logits, and the head rests.
    """

    states: int = 1
    passes: int = 0


@dataclass
class Fixed:
    """The same amount in every round.

    Attributes:
        amount: It.
    """

    amount: Amount

    def choose(self) -> Amount:
        """Choose it."""
        return self.amount

    def learn(self, amount: Amount, width: int, passed: list[int], rows: int, seconds: float) -> None:
        """Learn nothing."""


@dataclass
class Pace:
    """Chooses the amount that makes the most accepted states for its time.

    A round of n states accepts the chances of its slots added up; what it takes is an average over rounds of that width, of
    one never tried a line through those that were. Now and then a neighbour of the best amount is tried, so that what changes
    is noticed.

    Attributes:
        amounts: What may be chosen, the first of them drafts nothing.
        seconds: By width and whether the head took part, what a round took.
        chances: By the same flag, the chance that the state in each slot is accepted; below 0 where none was offered.
        rounds: How many were chosen,
        tries: and how often each amount was.
        tried: What was chosen last.
    """

    amounts: tuple[Amount, ...]
    seconds: dict[tuple[int, bool], float] = field(default_factory=dict)
    chances: dict[bool, list[float]] = field(init=False)
    rounds: int = 0
    tries: dict[Amount, int] = field(default_factory=dict)
    tried: Amount | None = None

    # Other work of the machine makes rounds slower, never faster: a shorter time counts for more than a longer one.
    FASTER_RATE, SLOWER_RATE, CHANCE_RATE, TRY_EVERY = 0.5, 0.15, 0.1, 25
    # Rounds of an amount until its time can be believed: the first ones compile, allocate or record.
    WARM = 3
    # A round that took so many times what it does on average is no sign of anything.
    OUTLIER = 3.0

    def __post_init__(self) -> None:
        most = max(amount.states for amount in self.amounts)
        self.chances = {flag: [1.0] + [-1.0] * (most - 1) for flag in (False, True)}

    def choose(self) -> Amount:
        """Choose for the next round."""
        self.rounds += 1
        if self.tried is None or self.tries[self.tried] >= self.WARM:
            self.tried = self._chosen()
        self.tries[self.tried] = self.tries.get(self.tried, 0) + 1
        return self.tried

    def _chosen(self) -> Amount:
        if (1, False) not in self.seconds:
            return self.amounts[0]
        tried = {amount.passes > 0: amount.states for amount in sorted(self.tries, key=lambda amount: amount.states)}
        best = max((amount for amount in self.amounts if amount.states <= self._next(tried, amount)), key=self.worth)
        if self.rounds % self.TRY_EVERY:
            return best
        others = self._neighbours(best)
        return others[self.rounds // self.TRY_EVERY % len(others)]

    def _next(self, tried: dict[bool, int], amount: Amount) -> int:
        """The width that comes behind the widest of an amount's kind that was tried: further no estimate reaches."""
        widest = tried.get(amount.passes > 0, 1)
        return min((each.states for each in self.amounts if each.states > widest), default=widest)

    def worth(self, amount: Amount) -> float:
        """Estimate accepted states in a second; of a slot that was never offered the chance is that of the one before."""
        flag, states, chance = amount.passes > 0, 0.0, 1.0
        for known in self.chances[flag][: amount.states]:
            chance = known if known >= 0 else chance
            states += chance
        return states / self._time(amount.states, flag)

    def learn(self, amount: Amount, width: int, passed: list[int], rows: int, seconds: float) -> None:
        """Learn from a round.

        Args:
            amount: What was chosen.
            width: States that rows had room for.
            passed: How many rows accepted the state in each slot offered, of
            rows: so many that could.
            seconds: What it took.
        """
        flag = amount.passes > 0 and width > 1
        before = self.seconds.get((width, flag), seconds)
        warm = self.tries.get(amount, 0) > self.WARM
        rate = self.SLOWER_RATE if seconds > before else self.FASTER_RATE if warm else 1.0
        self.seconds[width, flag] = before + rate * (min(seconds, self.OUTLIER * before) - before)
        for slot in range(1, min(len(passed), len(self.chances[flag])) if rows else 1):
            share, before = passed[slot] / rows, self.chances[flag][slot]
            self.chances[flag][slot] = share if before < 0 else before + self.CHANCE_RATE * (share - before)

    def _neighbours(self, best: Amount) -> list[Amount]:
        """None, the next wider and narrower amount, and the other one of the same width."""
        alike = [amount for amount in self.amounts if amount.passes == best.passes or amount.states == 1]
        place = alike.index(best)
        others = [amount for amount in self.amounts if amount.states == max(best.states, 2) and amount not in alike]
        near = [*alike[max(0, place - 1) : place], *alike[place + 1 : place + 2], *others]
        return [each for one in near for each in ((one, alike[0]) if place else (one,))]

    def _time(self, width: int, flag: bool) -> float:
        if (known := self.seconds.get((width, flag))) is not None:
            return known
        points = sorted((w, t) for (w, f), t in self.seconds.items() if f == flag or w == 1)
        below = [point for point in points if point[0] < width]
        above = [point for point in points if point[0] > width]
        if below and above:
            (a, t_a), (b, t_b) = below[-1], above[0]
        elif len(points) > 1:
            (a, t_a), (b, t_b) = (below or above)[-2:] if below else points[:2]
        else:
            return points[0][1]  # nothing is known of drafts: they are worth a try
        return max(t_a + (t_b - t_a) / (b - a) * (width - a), min(t_a, t_b) / 2)


_PACES: "weakref.WeakKeyDictionary[nn.Module, dict[Hashable, Pace]]" = weakref.WeakKeyDictionary()


def pace_of(model: nn.Module, mode: Mode, rows: int) -> Pace | Fixed:
    """Choose the amounts of a decode of so many rows; what was learnt stays with the model, for the calls that follow.

    Where several processes run, which must decide alike if they share a model, nothing follows the clock.
    """
    drafting = mode.drafting
    if drafting is None or not drafting.paced:
        return Fixed(Amount() if drafting is None else Amount(drafting.states, drafting.passes))
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        states = min(drafting.states, UNTIMED_STATES)
        return Fixed(Amount(states, min(drafting.passes, states - 1)))
    kept = _PACES.setdefault(model, {})
    key = mode, rows, next(model.parameters()).device, next(model.parameters()).dtype
    return kept.setdefault(key, Pace(paced(drafting.states, drafting.passes)))


def paced(states: int, passes: int) -> tuple[Amount, ...]:
    """List the amounts of up to so many states and head passes, the least first."""
    widths = [width for width in WIDTHS if width <= states]
    kinds = [0, passes] if passes else [0]
    return (Amount(), *(Amount(width, min(kind, width - 1)) for kind in kinds for width in widths if width > 1))


__all__ = ["UNTIMED_STATES", "WIDTHS", "Amount", "Fixed", "Pace", "pace_of", "paced"]
