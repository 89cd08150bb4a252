"""The amount of drafting on an engine that runs in several processes."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from mrp_serving.options import settings_of
from mrp_serving.pace import Led, pace_of

from modeling_mrp.generate.budget import Amount, Auto, Fixed


class Noted:
    """Chooses one amount, and notes from which it learns."""

    def __init__(self, amount: Amount) -> None:
        self.amount, self.learnt = amount, list[Amount]()

    def choose(self, rows: Sequence[Any]) -> Amount:
        return self.amount

    def learn(self, amount: Amount, rows: Sequence[Any], steps: Sequence[int], seconds: float) -> None:
        self.learnt.append(amount)


def test_all_processes_draft_as_the_first_one_chooses() -> None:
    said: list[list[int]] = []

    def shared(first: bool) -> Callable[[list[int]], list[int]]:
        return lambda numbers: said.append(numbers) or numbers if first else said[-1]  # type: ignore[func-returns-value]

    chosen, own = Amount(4, 3), Amount(1, narrow=True)
    leads, follows = Led(Noted(chosen), shared(True)), Led(Noted(own), shared(False))
    assert [each.choose([]) for each in (leads, follows)] == [chosen, chosen]
    follows.learn(chosen, [], [], 0.1)
    assert isinstance(follows.budget, Noted)
    assert follows.budget.learnt == [chosen]


@pytest.mark.parametrize(
    ("states", "share", "kind"), [("auto", None, Auto), ("auto", list, Led), (4, None, Fixed), (4, list, Fixed)]
)
def test_what_follows_the_clock_is_led(states: Any, share: Any, kind: type) -> None:
    mode = settings_of({"num_draft_states": states, "target": "dynamic"}, {}, 16, True).mode
    assert isinstance(pace_of(torch.nn.Linear(1, 1), mode, share), kind)
