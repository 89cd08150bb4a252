"""How many states a round submits, by simulated clocks: as fast as the best number would be, never much slower than none."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from modeling_mrp.generate.budget import WIDTHS, Amount, Auto, Fixed

BLOCK = 16


class Machine:
    """A clock on which rounds of one model take their time.

    Args:
        kind: "gpu": flat up to 230 tokens, and each new shape is recorded in its first two uses; "cpu": linear in tokens, with
            noise and outliers.
        head: What a head pass takes of a forward.
        stale, drafted: Chances of a draft to be accepted, of stale logits and of the head.
    """

    def __init__(self, kind: str, head: float, stale: float, drafted: float, seed: int = 0) -> None:
        self.kind, self.head, self.chances = kind, head, (stale, drafted)
        self.draw, self.shapes = random.Random(seed), dict[Any, int]()

    def seconds(self, rows: int, amount: Amount) -> float:
        tokens = rows * amount.states * BLOCK
        if self.kind == "cpu":
            time = (1e-3 + 2e-5 * tokens) * (1 + self.head * (amount.passes > 0))
            return time * self.draw.uniform(0.9, 1.1) * (3.0 if self.draw.random() < 0.01 else 1.0)
        time = 4e-3 * max(1.0, tokens / 230) * (1 + self.head * (amount.passes > 0))
        for shape in [(rows, amount.states)] + [(rows, amount.states, "head")] * (amount.passes > 0):
            uses = self.shapes[shape] = self.shapes.get(shape, 0) + 1
            time += {1: 0.025, 2: 0.110}.get(uses, 0.0)
        return time

    def steps(self, amount: Amount) -> int:
        chance, came = self.chances[amount.passes > 0], 1
        while came < amount.states and self.draw.random() < chance:
            came += 1
        return came


def call(budget: Any, machine: Machine, rows: int, steps: int) -> float:
    """Decode so many steps of each row; returns the seconds that it took."""
    left, time = [steps] * rows, 0.0
    batch: list[Any] = [SimpleNamespace(stop=None, state=SimpleNamespace(masks=1)) for _ in range(rows)]
    while any(one > 0 for one in left):
        amount = budget.choose(batch)
        came = [machine.steps(amount) if one > 0 else 0 for one in left]
        seconds = machine.seconds(rows, amount)
        budget.learn(amount, batch, came, seconds)
        left = [one - step for one, step in zip(left, came, strict=True)]
        for row, one in zip(batch, left, strict=True):
            row.stop = 0 if one <= 0 else None
        time += seconds
    return time


CLOCKS = [("gpu", 0.17), ("gpu", 0.27), ("cpu", 0.2)]
CHANCES = [(0.2, 0.3), (0.5, 0.75), (0.8, 0.85), (0.9, 0.95)]


@pytest.mark.parametrize(("kind", "head"), CLOCKS)
@pytest.mark.parametrize(("stale", "drafted"), CHANCES)
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
def test_in_steady_state_it_is_as_fast_as_the_best_number(
    kind: str, head: float, stale: float, drafted: float, rows: int
) -> None:
    def steady(budget: Any) -> float:
        machine = Machine(kind, head, stale, drafted)
        for _ in range(40):
            call(budget, machine, rows, 200)
        return sum(call(budget, machine, rows, 200) for _ in range(20))

    fixed = [Fixed(Amount(width, passes)) for width in WIDTHS for passes in ((0, 1) if width > 1 else (0,))]
    best = min(steady(one) for one in fixed)
    assert steady(Auto(8, 1)) <= 1.35 * best


@pytest.mark.parametrize(("kind", "head"), CLOCKS)
@pytest.mark.parametrize(("stale", "drafted"), CHANCES)
def test_a_first_call_costs_little_more_than_its_target(kind: str, head: float, stale: float, drafted: float) -> None:
    for seed in range(20):
        plain = call(Fixed(Amount()), Machine(kind, head, stale, drafted, seed), 1, 60)
        assert call(Auto(8, 1), Machine(kind, head, stale, drafted, seed), 1, 60) <= 1.35 * plain
