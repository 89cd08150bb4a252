"""Drafts of a row by hand, without a model: how many states, which ones and in which order; `test_fuzz.py` holds whole decodes
against the slow reference."""

import math
from collections.abc import Sequence
from typing import Any

from handmade import A, B, C, D, M, row, says, state

from modeling_mrp.rules.draft import Node, build_draft, draft_sizes, target_nodes
from modeling_mrp.rules.reveal import ORDER_SHARPNESS, Static
from modeling_mrp.rules.state import Row

ONE = Static((1, 1, 1, 1))


def weights(*values: float) -> list[float]:
    """Log-odds whose power `ORDER_SHARPNESS` is in these proportions."""
    return [math.log(value) / ORDER_SHARPNESS for value in values]


def ids_of(nodes: Sequence[Node]) -> list[list[int]]:
    return [list(node.state.ids) for node in nodes]


def drafting_row(odds: Sequence[float], token: Sequence[int] = (A, B, C, D), at: Sequence[int] = (M,) * 4, **given: Any) -> Row:
    of = row(**given)
    of.state, of.source = state(at), says(odds, token)
    return of


def test_draft_sizes() -> None:
    assert [draft_sizes(4, passes) for passes in (1, 2, 3, 9)] == [[3], [2, 3], [1, 2, 3], [1, 2, 3]]
    assert [draft_sizes(8, 2), draft_sizes(8, 3), draft_sizes(2, 1)] == [[4, 7], [3, 5, 7], [1]]


def test_a_chain() -> None:
    """The surest first, then the surest of the rest; behind a clean state the next block, which looks at it."""
    of = drafting_row([1, 4, 3, 2])
    nodes = build_draft(of, ONE, 7, 1, {})
    assert ids_of(nodes) == [[M] * 4, [M, B, M, M], [M, B, C, M], [M, B, C, D], [A, B, C, D], [M] * 4]
    assert [node.parent for node in nodes] == [-1] * 5 + [4]
    assert [node.state.start for node in nodes] == [4] * 5 + [8]
    assert [node.source for node in nodes] == [of.source] * 5 + [None]
    assert ids_of(build_draft(of, ONE, 3, 1, {})) == [[M] * 4, [M, B, M, M], [M, B, C, M]]
    assert build_draft(row(), ONE, 4, 3, {})[0].state.ids == (M,) * 4, "nothing is known: nothing is drafted"
    assert len(build_draft(row(), ONE, 4, 3, {})) == 1


def test_orders_that_meet_add_up() -> None:
    """0.4, 0.3, 0.3 and no chance. Either order of columns 0 and 1 leads to both: 0.4 * 0.3 / 0.6 + 0.3 * 0.4 / 0.7 = 0.371 is
    more than 0.3, the chance of column 2 alone, and what follows it all but certainly has the third."""
    of = drafting_row([*weights(4, 3, 3), -1e4])
    nodes = build_draft(of, ONE, 5, 3, {})
    assert ids_of(nodes) == [[M] * 4, [A, M, M, M], [M, B, M, M], [A, B, M, M], [A, B, C, M]]
    alone = drafting_row([*weights(4, 3, 3), -1e4])
    assert ids_of(build_draft(alone, ONE, 4, 1, {})) == [[M] * 4, [A, M, M, M], [A, B, M, M], [A, B, C, M]]


def test_a_state_that_was_scored_stands_for_what_it_leads_to() -> None:
    """[A, M, M, M] was scored and leads to [A, M, M, 33], this to [A, M, 42, 33]: no forward is spent on either."""
    of = drafting_row([4, 3, 2, 1])
    first, second = says([0, 1, 2, 3], [30, 31, 32, 33]), says([0, 1, 2, 0], [40, 41, 42, 43])
    for ids, said in (([A, M, M, M], first), ([A, M, M, 33], second)):
        of.memory[4, tuple(ids)] = (state(ids), said)
    nodes = build_draft(of, ONE, 3, 1, {})
    assert ids_of(nodes) == [[M] * 4, [A, M, 42, 33], [A, 41, 42, 33]]
    assert nodes[1].source is second
    assert nodes[1].state.step == 3


def test_a_clean_states_successor() -> None:
    """One block at a time: a given one has to wait. What is given in it is there."""
    of = drafting_row([0] * 4, at=[A, B, C, D], given=[M, M, M, M, M, 5])
    assert ids_of(build_draft(of, ONE, 4, 3, {})) == [[A, B, C, D], [M, 5, M, M]]
    assert ids_of(target_nodes(of, False)) == [[A, B, C, D], [M, 5, M, M]]
    assert ids_of(target_nodes(of, True)) == [[A, B, C, D]]
    given = drafting_row([0] * 4, at=[A, B, C, D], new=12, given=[M, M, M, M, 5, 6, 7, 8, M])
    for nodes in (build_draft(given, ONE, 4, 3, {}), target_nodes(given, False)):
        assert ids_of(nodes) == [[A, B, C, D]]
    masked = drafting_row([0] * 4, at=[A, M, C, D])
    assert ids_of(target_nodes(masked, False)) == [[A, M, C, D]]
