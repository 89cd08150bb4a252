"""The amount of drafting on an engine: where several processes share a model, the clock of the first one decides for all."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from modeling_mrp.generate.budget import Amount, Auto, Budget, budget_of
from modeling_mrp.generate.loop import Mode
from modeling_mrp.rules.state import Row

# Sends the first process's numbers to all; every process calls it, and gets those numbers.
Share = Callable[[list[int]], list[int]]


class Led:
    """A budget whose amounts the first of several processes chooses for all.

    Args:
        budget: Chooses, and learns, by the clock of this process.
        share: Sends the first process's numbers to all.
    """

    def __init__(self, budget: Budget, share: Share) -> None:
        self.budget, self.share = budget, share

    def choose(self, rows: Sequence[Row]) -> Amount:
        """See `Budget`."""
        own = self.budget.choose(rows)
        states, passes, narrow = self.share([own.states, own.passes, int(own.narrow)])
        return Amount(states, passes, bool(narrow))

    def learn(self, amount: Amount, rows: Sequence[Row], steps: Sequence[int], seconds: float) -> None:
        """See `Budget`."""
        self.budget.learn(amount, rows, steps, seconds)


def pace_of(model: Any, mode: Mode, share: Share | None) -> Budget:
    """Make the budget of an engine's rounds.

    Args:
        model: The engine's.
        mode: What is decoded.
        share: Sends the first process's numbers to all; None if there is only this process.
    """
    drafting = mode.drafting
    if drafting is None or not drafting.paced or torch.are_deterministic_algorithms_enabled():
        return budget_of(model, mode)
    by_clock = Auto(drafting.states, drafting.passes)
    return by_clock if share is None else Led(by_clock, share)


def share_in(group: Any) -> Share | None:
    """Make the broadcast from a group's first process, over the host; None for a single process."""
    if dist.get_world_size(group) == 1:
        return None

    def share(numbers: list[int]) -> list[int]:
        given = torch.tensor(numbers)
        dist.broadcast(given, group=group, group_src=0)
        return [int(number) for number in given]

    return share
