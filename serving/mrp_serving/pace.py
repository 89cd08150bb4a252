"""The draft budget of an engine's rounds: if several processes share a model, the clock of the
first one decides for all."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from modeling_mrp.generate.budget import Amount, Auto, Budget, budget_of
from modeling_mrp.generate.loop import Mode
from modeling_mrp.rules.state import Row

# A broadcast that every process calls with its own numbers, and that returns the first process's
# numbers to each.
Share = Callable[[list[int]], list[int]]


class BroadcastBudget:
    """A draft budget of several processes: the first process chooses the amounts for all.

    Args:
        budget: The budget of this process, which learns from its own clock.
        share: Broadcasts the first process's numbers.
    """

    def __init__(self, budget: Budget, share: Share) -> None:
        self.budget = budget
        self.share = share

    def choose(self, rows: Sequence[Row]) -> Amount:
        """See `Budget`."""
        amount = self.budget.choose(rows)
        states, passes, narrow = self.share([amount.states, amount.passes, int(amount.narrow)])
        return Amount(states, passes, bool(narrow))

    def learn(
        self, amount: Amount, rows: Sequence[Row], steps: Sequence[int], seconds: float
    ) -> None:
        """See `Budget`."""
        self.budget.learn(amount, rows, steps, seconds)


def pace_of(model: Any, mode: Mode, share: Share | None) -> Budget:
    """Make the budget of an engine's rounds.

    Args:
        model: The engine's model.
        mode: The decoding mode of the server.
        share: Broadcasts the first process's numbers; None if there is only this process.
    """
    drafting = mode.drafting
    if drafting is None or not drafting.paced or torch.are_deterministic_algorithms_enabled():
        return budget_of(model, mode)
    by_clock = Auto(drafting.states, drafting.passes)
    return by_clock if share is None else BroadcastBudget(by_clock, share)


def share_in(group: Any) -> Share | None:
    """Make the broadcast from a group's first process, by way of the host; return None if the group
    has a single process."""
    if dist.get_world_size(group) == 1:
        return None

    def share(numbers: list[int]) -> list[int]:
        received = torch.tensor(numbers)
        dist.broadcast(received, group=group, group_src=0)
        return list(map(int, received))

    return share
