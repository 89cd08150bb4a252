"""Banned sequences by hand: what may not stand where, whichever token comes last, and what a step may reveal at once."""

import pytest
from handmade import A, B, C, D, M, row, state

from modeling_mrp.rules.bans import Bans

WORDS = Bans(((1, 2), (3,), (4, 5, 6)))


@pytest.mark.parametrize(
    ("ids", "at", "barred"),
    [
        ([M], 0, {3}),
        ([1, M], 1, {2, 3}),
        ([M, 2], 0, {1, 3}),
        ([1, M, M], 2, {3}),  # what lies between is not known
        ([4, M, 6], 1, {3, 5}),
        ([4, 5, M], 2, {3, 6}),
        ([M, 5, 6, 9], 0, {3, 4}),
        ([4, 5, 7, M], 3, {3}),
        ([1, 9, 2], 1, {2, 1, 3}),  # whatever stands there now
    ],
)
def test_words(ids: list[int], at: int, barred: set[int]) -> None:
    assert WORDS.barred(ids, at, M) == barred


@pytest.mark.parametrize(
    ("size", "ids", "at", "barred"),
    [
        (1, [7, 8, M, 9], 2, {7, 8, 9}),
        (2, [1, 2, 3, 1, M], 4, {2}),
        (2, [M, 2, 5, 1, 2], 0, {1}),
        (2, [1, 2, M, 2], 2, {1, 2}),  # (1, 2) again; and (2, 2) twice
        (2, [1, 1, M], 2, {1}),
        (2, [1, 2, 3, M, M], 4, set()),  # alone among masks
        (2, [1, M, 3, 1, M], 4, set()),  # what came before is not known
        (3, [1, 2, 3, 9, 1, 2, M], 6, {3}),
        (3, [1, 2, 3, 9, M, 2, 3], 4, {1}),
        (3, [1, 2, 3, 9, 1, M, 3], 5, {2}),
        (3, [1, 2, 1, M], 3, set()),
        (3, [1, 2, 1, 2, M], 4, {1}),  # (1, 2, 1) again
        (3, [5, 5, M, 5, 5], 2, {5}),
    ],
)
def test_sequences_that_come_twice(size: int, ids: list[int], at: int, barred: set[int]) -> None:
    assert Bans((), size).barred(ids, at, M) == barred


@pytest.mark.parametrize(
    ("odds", "where", "kept"),
    [
        ([1, 2, 0, 0], (0, 1), (1,)),  # A before B is banned: the surer one stays
        ([2, 1, 0, 0], (0, 1), (0,)),
        ([2, 2, 0, 0], (0, 1), (0,)),  # of equals the leftmost
        ([1, 2, 3, 0], (0, 1, 2), (1, 2)),
        ([1, 2, 3, 0], (0, 2), (0, 2)),
        ([0, 0, 1, 2], (2, 3), (2, 3)),
    ],
)
def test_what_a_step_may_reveal_at_once(odds: list[float], where: tuple[int, ...], kept: tuple[int, ...]) -> None:
    assert Bans(((A, B), (C, B, D))).allowed([1, 2, 3, 4] + [M] * 4, 4, where, [A, B, C, D], odds, M) == kept


def test_what_is_known_of_a_text() -> None:
    """The row's text with a state's block, and given tokens behind it; before it a clean block that is not text yet."""
    of = row([1, 2, 3, 4], 12, given=[M, M, M, M, M, M, 5, M])
    assert of.text_at(state([A, M, C, M])) == [1, 2, 3, 4, A, M, C, M, M, M, 5]
    assert of.text_at(state([M, M, 5, M], 8), state([A, B, C, D])) == [1, 2, 3, 4, A, B, C, D, M, M, 5, M]
    assert row().text_at(state([A, M, C, M])) == [1, 2, 3, 4, A, M, C, M]
