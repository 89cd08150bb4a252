"""Draft graphs: which nodes are taken, what is drafted by them, and that no text changes. By hand, and on random models."""

import random
from typing import Any

import pytest
from conftest import make_model
from helpers import left_padded

from benchmarks.draft_graph import (
    Build,
    DraftGraph,
    Node,
    Ranking,
    drafted,
    graph_drafts,
    recorded_paths,
)
from modeling_mrp.rules.reveal import Dynamic, EntropyBound, RevealRule, Sequential, Static, logit
from modeling_mrp.rules.state import Row, Scores

RULES: dict[str, tuple[RevealRule, dict[str, Any]]] = {
    "static": (Static((1,) * 8), {}),
    "dynamic": (Dynamic(logit(0.3)), {"confidence_threshold": 0.3}),
    "sequential": (Sequential((1,) * 8), {}),
    "entropy_bound": (EntropyBound(5.0), {"entropy_threshold": 5.0}),
}


M = 60


def picks(*ranks: tuple[int, int]) -> Node:
    return frozenset(ranks)


FIRST, SECOND, BOTH, OTHER = picks((0, 0)), picks((1, 0)), picks((0, 0), (1, 0)), picks((0, 1))


def test_the_node_that_most_paths_come_to_next_is_taken_next() -> None:
    """Of nine paths five begin with the first pick, two each with the second and with another token. Behind the first, four go
    on to both picks, which are taken next; then the other token, first of two that two paths wait for."""
    paths = [[FIRST, BOTH]] * 4 + [[FIRST]] + [[SECOND, BOTH]] * 2 + [[OTHER]] * 2
    assert DraftGraph.calibrated(paths, 1).nodes == (FIRST,)
    graph = DraftGraph.calibrated(paths, 3)
    assert graph.nodes == (FIRST, BOTH, OTHER)
    graph = DraftGraph.calibrated(paths, 9)
    assert graph.nodes == (FIRST, BOTH, OTHER, SECOND)
    assert graph.edges == {(-1, 0), (0, 1), (-1, 2), (-1, 3), (3, 1)}  # two ways lead to BOTH


def test_a_graph_is_built_of_what_picks_may_name() -> None:
    """With one token a position, paths end before the pick of another; K = 3 has two nodes, twice as many four."""
    paths = [[FIRST, BOTH]] * 4 + [[OTHER, FIRST | OTHER]] * 5 + [[SECOND, BOTH]] * 2
    assert DraftGraph.built(Build(1, True, 2), paths, 3).nodes == (OTHER, FIRST | OTHER)
    assert DraftGraph.built(Build(1, False, 1), paths, 3) == DraftGraph((FIRST, BOTH), frozenset({(-1, 0), (0, 1)}), False)
    assert len(DraftGraph.built(Build(2, False, 2), paths, 3).nodes) == 4


def row_at(*ids: int, limit: int = 8, eos: tuple[int, ...] = ()) -> Row:
    """A row that stands at a state of its first block of 4."""
    text = [*ids, *[M] * 4]
    row = Row(0, text, 4, M, frozenset(eos), 1, 1, limit, limit, 1, 0)
    row.state = row.opened(0)
    row.source = Scores([0] * 4, [0.0] * 4)
    return row


RANKING = Ranking([0.0, 3.0, 2.0, 1.0], [[9, 8, 7], [11, 21, 31], [12, 22, 32], [13, 23, 33]], [[0.5, 0.3, 0.1]] * 4)


def states_of(row: Row, states: int, graph: DraftGraph) -> list[tuple[int, ...]]:
    return [node.state.ids for node in drafted(graph, row, RANKING, states)]


def graph_of(*nodes: Node, edges: set[tuple[int, int]]) -> DraftGraph:
    return DraftGraph(nodes, frozenset(edges))


TREE = graph_of(FIRST, SECOND, BOTH, OTHER, edges={(-1, 0), (-1, 1), (0, 2), (1, 2), (-1, 3)})


def test_states_of_a_graph_by_hand() -> None:
    """Both picks lead on from the first and from the second, whose scores rise by it: sqrt(0.5 * 0.5) against 0.3."""
    assert states_of(row_at(50, M, M, M), 4, TREE) == [(50, M, M, M), (50, 11, M, M), (50, M, 12, M), (50, 11, 12, M)]
    assert states_of(row_at(50, M, M, M), 5, TREE)[4] == (50, 21, M, M)
    rare_first = DraftGraph((OTHER, FIRST, BOTH), frozenset({(-1, 0), (-1, 1), (1, 2)}), pruned=False)
    assert states_of(row_at(50, M, M, M), 3, rare_first)[1:] == [(50, 21, M, M), (50, 11, M, M)]  # as they come


@pytest.mark.parametrize("target", list(RULES))
def test_a_graph_gives_the_text_of_its_target_in_fewer_forwards(target: str) -> None:
    """Random models, float64; the graph is calibrated on the very prompts. One without nodes drafts nothing."""
    rule, options = RULES[target]
    rng = random.Random(target)
    saved = 0
    for trial, count in enumerate((2, 3, 5, 8)):
        model = make_model(trial, block_size=rng.choice((4, 8)))
        prompts = [[rng.randrange(1, 50) for _ in range(rng.randint(1, 19))] for _ in range(rng.choice((1, 4)))]
        eos = rng.choice(([], [7, 11], list(range(1, 12))))
        new = rng.randint(8, 25)
        wanted = {"max_new_tokens": new, "eos_token_id": eos or None, "return_dict_in_generate": True}
        out = model.generate(**left_padded(prompts), decoding=target, **options, **wanted)
        generated = out.sequences[:, max(map(len, prompts)) :]
        expected = [row[steps >= 0].tolist() for row, steps in zip(generated, out.reveal_step, strict=True)]
        paths = recorded_paths(model, rule, prompts, new, eos)
        assert all(path == sorted(path, key=len) for path in paths)
        made = graph_drafts(rule, DraftGraph.calibrated(paths, 12), count)(model, prompts, new, eos)
        assert made.ids == expected
        assert all(own <= alone for own, alone in zip(made.forwards, out.stats.row_forwards.tolist(), strict=True))
        saved += sum(out.stats.row_forwards.tolist()) - sum(made.forwards)
        none = graph_drafts(rule, DraftGraph((), frozenset()), count)(model, prompts, new, eos)
        assert none.ids == expected
    assert saved > 0
