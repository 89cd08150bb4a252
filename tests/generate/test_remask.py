"""Which reveals `mrp_remask` takes back: each rule by hand on beliefs that a table tells."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from modeling_mrp.generate.refine import Refinement, RereadRemask, ResidualRemask, Reveal, ThresholdRemask, refined
from modeling_mrp.rules.reveal import logit
from modeling_mrp.rules.state import Frontier, Row, Scores, State

M = 60
A, B, C = 0, 1, 2  # columns of the reveals; column 3 stays masked
NO = -math.inf


class TableHead:
    """Networks whose head's log-odds for columns A, B and C depend on which of them it is shown, by a table per row."""

    def __init__(self, *tables: dict[tuple[int, ...], list[float]]) -> None:
        self.tables = tables
        self.shown: list[list[tuple[int, ...]]] = [[] for _ in tables]

    def head(
        self, rows: Sequence[Row], asked: Sequence[Sequence[tuple[State, Any]]], residual: bool = False
    ) -> list[list[Any]]:
        made: list[list[Any]] = []
        for row, states in enumerate(asked):
            given = [tuple(column for column in range(4) if state.ids[column] != M) for state, _ in states]
            self.shown[row] += given
            made.append([[*self.tables[row][columns], NO] for columns in given])
        return made

    def token_odds(self, asked: Sequence[Any], hidden: Sequence[list[float]]) -> list[list[float]]:
        return [
            [said if c in where else NO for c, said in enumerate(one)]
            for (_, _, where, _), one in zip(asked, hidden, strict=True)
        ]

    def magnitudes(self, asked: Sequence[Any], hidden: Sequence[list[float]]) -> list[list[float]]:
        return [[abs(said) for said in one] for one in hidden]


def refine(rule: Refinement, head: TableHead, confidence: list[list[float]]) -> list[list[int]]:
    """The columns that stay, by row; a confidence of -inf is a position that was not revealed."""
    networks: Any = head
    rows = [Row(at, [M] * 4, 4, M, frozenset(), 0, 0, 4, 4, 0, 0) for at in range(len(confidence))]
    reveals = []
    for row, odds in zip(rows, confidence, strict=True):
        where = tuple(column for column in range(4) if odds[column] > NO)
        hidden: Any = SimpleNamespace()
        reveals.append(
            Reveal(row, row.place, Frontier(row.state, Scores([7] * 4, odds, hidden=hidden), where, None, row.state))
        )
    rule(networks, rows, reveals)
    return [list(reveal.where) for reveal in reveals]


REREAD = RereadRemask(logit(0.5), logit(0.25))
SURE = [3.0, 2.0, 1.0, NO]  # A is the surest
CASES: dict[str, tuple[dict[tuple[int, ...], list[float]], list[int], list[int]]] = {
    # Beliefs when shown these, what `threshold` keeps at tau = 0.5 (log-odds 0), what `reread` keeps: under the surest alone
    # a confidence of 0.25 is enough, log-odds -1.1.
    "contradiction": ({(A, B, C): [-1, -2, 1], (A, C): [3, 9, 2], (A,): [3, -5, 2]}, [C], [A, C]),
    "one at a time": ({(A, B, C): [2, -1, -2], (A, B): [2, 1, 9], (A,): [3, 1, 1]}, [A], [A, B]),
    "the surest goes": ({(A, B, C): [-1, 2, 3], (B, C): [9, 2, 3], (B,): [9, 3, 1]}, [B, C], [B, C]),
    "wrong together": ({(A, B, C): [1, 1, 1], (A,): [3, -1.2, -1]}, [A, B, C], [A, C]),
    "nothing believed": ({(A, B, C): [-3, -1, -2], (B, C): [9, -1, -2]}, [B], [B]),
    "a belief of tau stays": ({(A, B, C): [0, 0, 0], (A,): [3, 0, 0]}, [A, B, C], [A, B, C]),
}


@pytest.mark.parametrize("case", CASES)
def test_threshold_and_reread_by_hand(case: str) -> None:
    beliefs, by_threshold, by_reread = CASES[case]
    head = TableHead(beliefs)
    assert refine(ThresholdRemask(logit(0.5)), head, [SURE]) == [by_threshold]
    assert head.shown == [[(A, B, C)]]
    assert refine(REREAD, TableHead(beliefs), [SURE]) == [by_reread]


def test_rows_are_read_as_often_as_they_need() -> None:
    """Row 0 has one reveal and asks nothing; row 1 settles at once; row 2 loses B and is then read again; row 3 ends with one
    reveal, which nothing is left to contradict."""
    settled = {(A, B, C): [1.0, 1, 1], (A,): [3.0, 1, 1]}
    loses_one = {(A, B, C): [2.0, -1, 1], (A, C): [1.0, 9, 0], (A,): [3.0, 1, 1]}
    loses_all = {(A, B, C): [2.0, -1, -2], (A, B): [2.0, -1, 9]}
    head = TableHead({}, settled, loses_one, loses_all)
    assert refine(REREAD, head, [[NO, 1.0, NO, NO], SURE, SURE, SURE]) == [[B], [A, B, C], [A, C], [A]]
    assert head.shown == [[], [(A, B, C), (A,)], [(A, B, C), (A, C), (A,)], [(A, B, C), (A, B)]]


@pytest.mark.parametrize(("delta", "kept"), [(0.5, [B]), (1.0, [B]), (2.0, [A, B]), (0.1, [A])])
def test_residual_by_hand(delta: float, kept: list[int]) -> None:
    """The head reads the state before the reveal; where everything moves too much, the backbone's surest stays."""
    head = TableHead({(): [-2.0, 0.5, 9.0]})
    assert refine(ResidualRemask(delta), head, [[3.0, 2.0, NO, NO]]) == [kept]
    assert head.shown == [[()]]


def test_a_row_without_a_reveal_puts_nothing_back() -> None:
    """Whatever it put back a step before; the head is not asked."""
    networks: Any = TableHead({})
    row = Row(0, [M] * 4, 4, M, frozenset(), 0, 0, 4, 4, 0, 0)
    row.remasked = (B,), [7] * 4
    assert refined(REREAD, networks, [row], [None]) == [None]
    assert row.remasked == ((), [])
    assert networks.shown == [[]]
