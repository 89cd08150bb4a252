"""Rivals of the head's drafts, the released reference, draft graphs and PSD: texts are their target's, and graphs by hand.

`test_headlines.py` decodes again what they are measured to do, to the last forward.
"""

import random
from typing import Any

import pytest
from handmade import M, row, says
from helpers import generate, texts

from benchmarks.draft_graph import Build, DraftGraph, Ranking, drafted, graph_drafts, recorded_paths
from benchmarks.frontier import rule_of
from benchmarks.psd import parallel_speculative
from benchmarks.released import Released
from tests.random_cases import make_model, random_prompts

OPTIONS: dict[str, dict[str, Any]] = {
    "static": {},
    "dynamic": {"confidence_threshold": 0.3},
    "sequential": {},
    "entropy_bound": {"entropy_threshold": 5.0},
}


@pytest.mark.parametrize("target", OPTIONS)
def test_texts_are_those_of_the_target(target: str) -> None:
    """Random models, float64, graphs calibrated on the very prompts; of PSD where no prediction is likely enough to agree with.
    Graphs save forwards, and so does PSD where all predictions are, but for `sequential`, whose drafts are its own reveals."""
    options, rule = OPTIONS[target], rule_of(target, **OPTIONS[target])
    rng, by_graph, by_psd = random.Random(target), 0, 0
    for states, eos in ((2, []), (3, [7, 11]), (5, []), (8, list(range(1, 12)))):
        model, prompts, new = make_model(states, block_size=8), random_prompts(rng, rng.choice((1, 4)), 19), rng.randint(8, 25)
        asked = {**options, "decoding": target, "max_new_tokens": new, "eos_token_id": eos or None}
        alone = generate(model, prompts, **asked).stats.row_forwards.tolist()
        paths = recorded_paths(model, rule, prompts, new, eos)
        assert all(path == sorted(path, key=len) for path in paths)
        loops = [graph_drafts(rule, graph, states) for graph in (DraftGraph.calibrated(paths, 12), DraftGraph((), frozenset()))]
        loops += [parallel_speculative(rule, states, 1.0)]
        loops += [Released(states, prefix) for prefix in (False, True) if target == "static"]
        graph, _, strict, *_ = made = [loop(model, prompts, new, eos) for loop in loops]
        expected = texts(model, prompts, **asked)
        assert all(one.ids == expected for one in made)
        assert all(own <= other for own, other in zip(graph.forwards, alone, strict=True))
        by_graph += sum(alone) - sum(graph.forwards)
        if not eos:
            eager = parallel_speculative(rule, states)(model, prompts, new, eos)
            assert list(map(len, eager.ids)) == [new] * len(prompts)
            by_psd += sum(strict.forwards) - sum(eager.forwards)
    assert by_graph > 0
    assert by_psd > 0 or target == "sequential"


FIRST, SECOND, BOTH, OTHER = (frozenset(ranks) for ranks in ({(0, 0)}, {(1, 0)}, {(0, 0), (1, 0)}, {(0, 1)}))


def test_the_node_that_most_paths_come_to_next_is_taken_next() -> None:
    """Of nine paths five begin with the first pick, two each with the second and with another token. Behind the first, four go
    on to both picks, which are taken next; then the other token, first of two that two paths wait for. With one token a
    position, paths end before the pick of another; K = 3 has two nodes, twice as many four."""
    paths = [[FIRST, BOTH]] * 4 + [[FIRST]] + [[SECOND, BOTH]] * 2 + [[OTHER]] * 2
    graph = DraftGraph.calibrated(paths, 9)
    assert graph.nodes == (FIRST, BOTH, OTHER, SECOND)
    assert graph.edges == {(-1, 0), (0, 1), (-1, 2), (-1, 3), (3, 1)}  # two ways lead to BOTH
    assert DraftGraph.built(Build(1, False, 1), [[OTHER, FIRST | OTHER]] * 9 + paths, 3).nodes == (FIRST, BOTH)
    assert len(DraftGraph.built(Build(2, False, 2), paths, 3).nodes) == 4


def test_states_of_a_graph_by_hand() -> None:
    """Both picks, of 0.52, lead on from the first, whose score rises by it from 0.3 to 0.4 and above the third's 0.35, and from
    the second, of 0.9."""
    chances = [[1.0] * 3, [0.3, 0.2, 0.1], [0.9, 0.1, 0.0], [0.35, 0.3, 0.2]]
    ranking = Ranking([0.0, 3.0, 2.0, 1.0], [[9, 8, 7], [11, 21, 31], [12, 22, 32], [13, 23, 33]], chances)

    def states_of(states: int, graph: DraftGraph) -> list[tuple[int, ...]]:
        of = row([50], 7, eos=())
        of.state, of.source = of.opened(0), says([0.0] * 4, [0] * 4)
        return [node.state.ids for node in drafted(graph, of, ranking, states)]

    third = frozenset({(2, 0)})
    tree = DraftGraph((FIRST, third, BOTH, SECOND), frozenset({(-1, 0), (-1, 1), (0, 2), (3, 2), (-1, 3)}))
    assert states_of(4, tree) == [(50, M, M, M), (50, M, 12, M), (50, 11, 12, M), (50, 11, M, M)]
    rare_first = DraftGraph((OTHER, FIRST, BOTH), frozenset({(-1, 0), (-1, 1), (1, 2)}), pruned=False)
    assert states_of(3, rare_first)[1:] == [(50, 21, M, M), (50, 11, M, M)]  # as they come
