"""How many states a round submits, by simulated clocks: as fast as the best number would be, never
much slower than none."""

import random
from bisect import bisect
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn

from modeling_mrp.generate.budget import WIDTHS, Amount, Auto, Fixed, budget_of
from modeling_mrp.generate.loop import Drafting, Mode
from modeling_mrp.rules.reveal import Dynamic

# Steps that a row which can draft comes to in a round, by states, of stale drafts and the head's:
# the embedded checkpoint on 24 math problems; and the extremes.
STEPS = {
    "static": ((1.61, 2.10, 2.35, 2.83, 3.03), (1.75, 2.45, 2.86, 3.58, 4.04)),
    "sequential": ((1.82, 2.59, 3.18, 3.87, 4.59), (1.86, 2.77, 3.50, 4.54, 5.82)),
    "entropy_bound": ((1.28, 1.39, 1.46, 1.54, 1.61), (1.54, 2.05, 2.24, 2.39, 2.46)),
    "dynamic": ((1.39, 1.54, 1.64, 1.74, 1.79), (1.63, 2.14, 2.44, 2.66, 2.76)),
    "hopeless": ((1.0, 1.0, 1.0, 1.0, 1.0), (1.02, 1.03, 1.03, 1.03, 1.03)),
    "sure": ((1.95, 2.85, 3.7, 5.3, 6.8), (1.98, 2.95, 3.9, 5.8, 7.6)),
}
FIXED = [
    Fixed(Amount(width, passes)) for width in WIDTHS for passes in ((0, 1) if width > 1 else (0,))
]


def chance(mean: float, width: int) -> float:
    """The chance of each draft with which a chain of so many states comes to so many steps."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if sum(middle**depth for depth in range(width)) < mean else (low, middle)
        )
    return low


class Line:
    """A row, and its own state: `left` steps of the text, `todo` steps to the block's end, 0 where
    it is clean."""

    __slots__ = ("left", "masks", "source", "state", "stop", "todo")

    def __init__(self, left: int, todo: int) -> None:
        self.state, self.stop, self.source, self.masks = self, None, True, 1
        self.left, self.todo = left, todo

    def go(self, steps: int, todo: int, source: bool) -> int:
        self.left, self.todo, self.masks, self.source = self.left - steps, todo, todo, source
        self.stop = 0 if self.left <= 0 else None
        return steps


class Machine:
    """A clock on which rounds take their time, and texts that come to their steps.

    Args:
        clock: "gpu": flat up to 230 tokens, then linear, and each new shape is recorded in its
            first two uses; "experts": the same, but a round takes the longer, the more of 128
            experts its tokens choose, eight each (SDAR-30B-A3B on an H200,
            `benchmarks.cost_model`); "cpu": linear in tokens, with noise and outliers.
        target: Of `STEPS`.
        block: Tokens of a block.
    """

    def __init__(self, clock: str, target: str, block: int, seed: int = 0) -> None:
        self.clock, self.block = clock, block
        self.draw, self.shapes = random.Random(seed), dict[Any, int]()
        self.size = max(2, block * 6 // 16) if target in ("dynamic", "entropy_bound") else block
        self.reach = {}
        for passes, means in enumerate(STEPS[target]):
            for width, mean in zip(WIDTHS[1:], means, strict=True):
                right = chance(mean, width)
                self.reach[width, passes] = list(
                    accumulate(right**depth * (1 - right) for depth in range(width - 1))
                )

    def seconds(self, rows: int, states: int, head: bool) -> float:
        """What a round takes; the clock shows that with noise."""
        tokens, share = (
            rows * states * self.block,
            1 + (0.2 if self.clock == "cpu" else 0.27) * head,
        )
        if self.clock == "cpu":
            return (1e-3 + 2e-5 * tokens) * share
        time = 4e-3 * max(1.0, tokens / 230) * share
        if self.clock == "experts":
            time = (
                max(2e-3 + 13e-3 * (1 - (1 - 8 / 128) ** tokens), 1.1e-5 * tokens) + 0.6e-3 * head
            )
        for shape in [(rows, states)] + [(rows, states, "head")] * head:
            uses = self.shapes[shape] = self.shapes.get(shape, 0) + 1
            time += {1: 0.025, 2: 0.110}.get(uses, 0.0)
        return time

    def shown(self, seconds: float) -> float:
        noise = 0.1 if self.clock == "cpu" else 0.02
        outlier = 3.0 if self.clock == "cpu" and self.draw.random() < 0.01 else 1.0
        return seconds * self.draw.uniform(1 - noise, 1 + noise) * outlier

    def step(self, row: Line, amount: Amount, states: int) -> int:
        """Take a row through a round: a chain of drafts up to the clean state, and the first state
        behind that."""
        if row.stop is not None:
            return 0
        if not row.masks:
            return row.go(1, self.size - 1, True) if states > 1 else row.go(0, self.size, False)
        if amount.states == 1 or not row.source:
            return row.go(1, row.todo - 1, True)
        right = bisect(self.reach[amount.states, amount.passes], self.draw.random())
        if right < row.todo:
            return row.go(1 + right, row.todo - 1 - right, True)
        if amount.states >= row.todo + 2:
            return row.go(row.todo + 1, self.size - 1, True)
        return row.go(row.todo, self.size, False)

    def call(self, budget: Any, lengths: list[int]) -> float:
        """Decode rows of so many steps; returns the seconds that it took."""
        rows = [Line(length, self.size - 1) for length in lengths]
        time, least = 0.0, 1 if self.clock == "cpu" else 4
        while going := sum(row.stop is None for row in rows):
            while len(rows) > 1 and (half := (len(rows) + 1) // 2) >= max(going, least):
                rows = sorted(rows, key=lambda row: row.stop is not None)[:half]
            amount = budget.choose(rows)
            drafts = amount.states > 1 and any(
                row.stop is None and row.masks and row.source for row in rows
            )
            clean = any(row.stop is None and not row.masks for row in rows)
            states = amount.states if drafts else 1 + (clean and not amount.narrow)
            seconds = self.seconds(len(rows), states, drafts and amount.passes > 0)
            came = [self.step(row, amount, states) for row in rows]
            budget.learn(amount, rows, came, self.shown(seconds))
            time += seconds
        return time


def a_step(
    clock: str,
    target: str,
    block: int,
    rows: int,
    budget: Any,
    warm: float,
    measured: float,
    seed: int = 0,
) -> float:
    """Seconds of a row's step in calls of 50 to 150 steps a row, behind so many seconds of them."""
    machine, draw, clocked, steps = Machine(clock, target, block, seed), random.Random(1), 0.0, 0
    while clocked < warm + measured:
        lengths = [draw.randint(50, 150) for _ in range(rows)]
        before = clocked
        clocked += machine.call(budget, lengths)
        if before < warm:
            start = clocked
        else:
            steps += sum(lengths)
    return (clocked - start) / steps


CELLS = [
    ("gpu", "static", 16, 1),
    ("gpu", "entropy_bound", 16, 1),
    ("gpu", "sequential", 16, 4),
    ("gpu", "dynamic", 4, 16),
    ("gpu", "entropy_bound", 4, 64),
    ("experts", "hopeless", 4, 1),
    ("experts", "entropy_bound", 16, 16),
    ("cpu", "sequential", 16, 1),
    ("cpu", "dynamic", 16, 1),
    ("cpu", "static", 4, 1),
    ("cpu", "dynamic", 16, 16),
    ("cpu", "static", 16, 64),
]


@pytest.mark.parametrize(("clock", "target", "block", "rows"), CELLS)
def test_in_steady_state_it_is_as_fast_as_the_best_number(
    clock: str, target: str, block: int, rows: int
) -> None:
    warm = {"gpu": 60, "cpu": 40, "experts": 60}[clock]
    best = min(a_step(clock, target, block, rows, fixed, 2, 40) for fixed in FIXED)
    ours = [a_step(clock, target, block, rows, Auto(8, 1), warm, 40, seed) for seed in range(3)]
    assert sum(ours) / len(ours) <= 1.03 * best


@pytest.mark.parametrize("clock", ["gpu", "cpu", "experts"])
@pytest.mark.parametrize("target", STEPS)
@pytest.mark.parametrize(("block", "rows"), [(16, 1), (4, 4), (16, 64)])
def test_a_first_call_costs_little_more_than_its_target(
    clock: str, target: str, block: int, rows: int
) -> None:
    for seed in range(2):
        lengths = [random.Random(seed + row).randint(30, 90) for row in range(rows)]
        plain = Machine(clock, target, block, seed).call(Fixed(Amount()), lengths)
        assert Machine(clock, target, block, seed).call(Auto(8, 1), lengths) <= 1.1 * plain


@pytest.mark.parametrize("clock", ["gpu", "cpu"])
@pytest.mark.parametrize("target", ["sequential", "dynamic"])
def test_what_drafts_win_for_one_row_is_not_lost_by_sixteen(clock: str, target: str) -> None:
    machines, budgets = (
        [Machine(clock, target, 16) for _ in range(2)],
        (Auto(8, 1), Fixed(Amount())),
    )
    for machine, budget in zip(machines, budgets, strict=True):
        for _ in range(12):
            machine.call(budget, [100])
    drafted, plain = (
        machine.call(budget, [48] * 16) for machine, budget in zip(machines, budgets, strict=True)
    )
    assert 0.97 * drafted <= plain


def test_rows_that_cannot_draft_score_alone_where_that_pays() -> None:
    """One of four rows is clean: twice the time for a third more steps does not pay, a tenth more
    does."""
    for wide, narrow in ((2.0, True), (1.1, False)):
        auto, rows = Auto(8, 1), [Line(9, 4) for _ in range(4)]
        for states, seconds in ((1, 1.0), (2, wide)):
            for _ in range(3):
                auto.times.learn((4, states, False), seconds)
        rows[0].masks = 0
        assert auto.choose(rows) == Amount(narrow=narrow)  # type: ignore[arg-type]


def test_nothing_follows_the_clock_under_deterministic_algorithms() -> None:
    model, mode = nn.Linear(1, 1), Mode(Dynamic(0.0), drafting=Drafting(8, 3, 1, paced=True))
    assert isinstance(budget_of(model, mode), Auto)
    torch.use_deterministic_algorithms(True)
    try:
        assert budget_of(model, mode) == Fixed(Amount(4, 1))
    finally:
        torch.use_deterministic_algorithms(False)
