"""What the head takes back, by hand: beliefs are given, and what stays is told; `test_fuzz.py` has whole decodes."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from handmade import A, B, C, M, row, says, state

from modeling_mrp.generate.refine import Refinement, RereadRemask, ResidualRemask, ThresholdRemask, refined
from modeling_mrp.rules.state import Frontier

NAN, NONE = math.nan, -math.inf


class Head:
    """Stands for the networks of a batch of one row: says its numbers [block] in order, and notes the states that it is given.

    Args:
        said: By pass.
    """

    def __init__(self, said: Sequence[Sequence[float]]) -> None:
        self.said, self.given = list(said), list[list[int]]()

    def head(self, rows: Any, given: Any, residual: bool = False) -> Any:
        self.given += [list(at.ids) for part in given for at, _ in part]
        return [[("hidden", 0)] for _ in rows]

    def token_odds(self, asked: Any, hidden: Any) -> Any:
        return [self.said.pop(0)]

    magnitudes = token_odds


def kept(refine: Refinement, odds: Sequence[float], where: tuple[int, ...], *said: Sequence[float]) -> tuple[Frontier, Any]:
    """Refine the reveal of some columns of an empty block; what is left, and the states that the head was given."""
    of, at = row(), state([M] * 4)
    head: Any = Head(said)
    scores = says(odds, hidden=("hidden", 0))
    (left,) = refined(refine, head, [of], [Frontier(at, scores, where, None, of.after(at, where, scores.token))])
    assert left is not None
    assert left.successor.key == of.after(at, left.where, scores.token).key
    assert tuple(sorted(left.where + left.remasked)) == where
    assert (of.counts.revoked, head.said) == (len(left.remasked), [])
    return left, head.given


@pytest.mark.parametrize(
    ("refine", "said", "stays"),
    [
        (ThresholdRemask(1.0), [1.0, 0.9, 5.0, NONE], (0, 2)),
        (ThresholdRemask(1.0), [0.1, 0.9, 0.5, NONE], (1,)),  # the most believed one
        (ResidualRemask(1.0), [1.0, 1.1, 0.5, NONE], (0, 2)),
        (ResidualRemask(1.0), [2.0, 3.0, 4.0, NONE], (2,)),  # the surest before
    ],
    ids=str,
)
def test_one_pass(refine: Refinement, said: list[float], stays: tuple[int, ...]) -> None:
    left, given = kept(refine, [1, 2, 3, 0], (0, 1, 2), said)
    assert left.where == stays
    assert given == [[M] * 4 if isinstance(refine, ResidualRemask) else [A, B, C, M]]


@pytest.mark.parametrize(
    ("odds", "where", "said", "given", "stays"),
    [
        ([1, 2, 3, 0], (2,), [], [], (2,)),  # alone it asks nothing
        # The least believed one goes, and all others are believed then; under the surest alone the last is no echo.
        (
            [1, 2, 3, 0],
            (0, 1, 2),
            [[0.5, 0.2, 4, NONE], [1.0, NONE, 4, NONE], [-1.0, NONE, 9, NONE]],
            [[A, B, C, M], [A, M, C, M], [M, M, C, M]],
            (0, 2),
        ),
        ([1, 2, 3, 0], (0, 2), [[2.0, NONE, 4, NONE], [-1.1, NONE, -9, NONE]], [[A, M, C, M], [M, M, C, M]], (2,)),
        ([1, 2, 3, 0], (0, 1), [[0.5, 0.5, NONE, NONE]], [[A, B, M, M]], (0,)),  # of two as little believed the left one stays
    ],
)
def test_reread(
    odds: list[float], where: tuple[int, ...], said: list[list[float]], given: list[list[int]], stays: tuple[int, ...]
) -> None:
    left, asked = kept(RereadRemask(1.0, -1.0), odds, where, *said)
    assert (left.where, asked) == (stays, given)
