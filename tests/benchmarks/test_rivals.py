"""Rivals of the head's drafts: the released reference, draft graphs and PSD. By hand, and that texts are their target's."""

import random
from typing import Any

import pytest
import torch
from conftest import make_model
from handmade import M, row, says, state
from helpers import generate, texts

from benchmarks.draft_graph import Build, DraftGraph, Ranking, drafted, graph_drafts, recorded_paths
from benchmarks.psd import Consistent, Reading, parallel_speculative
from benchmarks.released import Released
from modeling_mrp.rules.draft import Node
from modeling_mrp.rules.reveal import Dynamic, EntropyBound, RevealRule, Sequential, Static, logit
from modeling_mrp.rules.state import Row
from tests.random_cases import random_prompts

RULES: dict[str, tuple[RevealRule, dict[str, Any]]] = {
    "static": (Static((1,) * 8), {}),
    "dynamic": (Dynamic(logit(0.3)), {"confidence_threshold": 0.3}),
    "sequential": (Sequential((1,) * 8), {}),
    "entropy_bound": (EntropyBound(5.0), {"entropy_threshold": 5.0}),
}


@pytest.mark.parametrize("target", RULES)
def test_texts_are_those_of_the_target(target: str) -> None:
    """Random models, float64, graphs calibrated on the very prompts; of PSD where no prediction is likely enough to agree with.
    Graphs save forwards, and so does PSD where all predictions are."""
    rule, options = RULES[target]
    rng, by_graph, by_psd = random.Random(target), 0, 0
    for states, eos in ((2, []), (3, [7, 11]), (5, []), (8, list(range(1, 12)))):
        model, prompts, new = make_model(states, block_size=8), random_prompts(rng, rng.choice((1, 4)), 19), rng.randint(8, 25)
        asked = {**options, "decoding": target, "max_new_tokens": new, "eos_token_id": eos or None}
        alone = generate(model, prompts, **asked).stats.row_forwards.tolist()
        paths = recorded_paths(model, rule, prompts, new, eos)
        assert all(path == sorted(path, key=len) for path in paths)
        loops = [graph_drafts(rule, graph, states) for graph in (DraftGraph.calibrated(paths, 12), DraftGraph((), frozenset()))]
        loops += [parallel_speculative(rule, states, Reading(1, first, 1.0)) for first in (False, True)]
        loops += [Released(states, prefix) for prefix in (False, True) if target == "static"]
        graph, _, *strict = made = [loop(model, prompts, new, eos) for loop in loops]
        expected = texts(model, prompts, **asked)
        assert all(one.ids == expected for one in made)
        assert all(own <= other for own, other in zip(graph.forwards, alone, strict=True))
        by_graph += sum(alone) - sum(graph.forwards)
        if not eos:
            eager = parallel_speculative(rule, states, Reading(1))(model, prompts, new, eos)
            assert list(map(len, eager.ids)) == [new] * len(prompts)
            by_psd += sum(strict[0].forwards) - sum(eager.forwards)
    assert by_graph > 0
    assert by_psd > 0


# ------------------------------------------------------------------------------------------------- draft graphs

FIRST, SECOND, BOTH, OTHER = (frozenset(ranks) for ranks in ({(0, 0)}, {(1, 0)}, {(0, 0), (1, 0)}, {(0, 1)}))


def test_the_node_that_most_paths_come_to_next_is_taken_next() -> None:
    """Of nine paths five begin with the first pick, two each with the second and with another token. Behind the first, four go
    on to both picks, which are taken next; then the other token, first of two that two paths wait for."""
    paths = [[FIRST, BOTH]] * 4 + [[FIRST]] + [[SECOND, BOTH]] * 2 + [[OTHER]] * 2
    assert DraftGraph.calibrated(paths, 1).nodes == (FIRST,)
    graph = DraftGraph.calibrated(paths, 9)
    assert graph.nodes == (FIRST, BOTH, OTHER, SECOND)
    assert graph.edges == {(-1, 0), (0, 1), (-1, 2), (-1, 3), (3, 1)}  # two ways lead to BOTH


def test_a_graph_is_built_of_what_picks_may_name() -> None:
    """With one token a position, paths end before the pick of another; K = 3 has two nodes, twice as many four."""
    paths = [[FIRST, BOTH]] * 4 + [[OTHER, FIRST | OTHER]] * 5 + [[SECOND, BOTH]] * 2
    assert DraftGraph.built(Build(1, True, 2), paths, 3).nodes == (OTHER, FIRST | OTHER)
    assert DraftGraph.built(Build(1, False, 1), paths, 3) == DraftGraph((FIRST, BOTH), frozenset({(-1, 0), (0, 1)}), False)
    assert len(DraftGraph.built(Build(2, False, 2), paths, 3).nodes) == 4


RANKING = Ranking([0.0, 3.0, 2.0, 1.0], [[9, 8, 7], [11, 21, 31], [12, 22, 32], [13, 23, 33]], [[0.5, 0.3, 0.1]] * 4)
TREE = DraftGraph((FIRST, SECOND, BOTH, OTHER), frozenset({(-1, 0), (-1, 1), (0, 2), (1, 2), (-1, 3)}))


def test_states_of_a_graph_by_hand() -> None:
    """Both picks lead on from the first and from the second, whose scores rise by it: sqrt(0.5 * 0.5) against 0.3."""

    def states_of(states: int, graph: DraftGraph) -> list[tuple[int, ...]]:
        of: Row = row([50], 7, eos=())
        of.state, of.source = of.opened(0), says([0.0] * 4, [0] * 4)
        return [node.state.ids for node in drafted(graph, of, RANKING, states)]

    assert states_of(4, TREE) == [(50, M, M, M), (50, 11, M, M), (50, M, 12, M), (50, 11, 12, M)]
    assert states_of(5, TREE)[4] == (50, 21, M, M)
    rare_first = DraftGraph((OTHER, FIRST, BOTH), frozenset({(-1, 0), (-1, 1), (1, 2)}), pruned=False)
    assert states_of(3, rare_first)[1:] == [(50, 21, M, M), (50, 11, M, M)]  # as they come


# ------------------------------------------------------------------------------------------------- PSD

CHAIN = [state(ids, 0, 0) for ids in ([50, M, M, M], [50, 11, M, M], [50, 11, 12, M])]


@pytest.mark.parametrize(
    ("reading", "token", "odds", "where"),
    [
        (Reading(), [0, 11, 99, 99], 1.0, (1,)),  # the next draft alone is held to what is said here
        (Reading(), [0, 98, 12, 99], 1.0, (3,)),  # it is not what is said: the policy reveals the surest
        (Reading(first=True), [0, 11, 12, 99], 1.0, (1, 2)),
        (Reading(first=True), [0, 11, 99, 99], 1.0, (1,)),
        (Reading(first=True), [0, 99, 12, 99], 1.0, (3,)),  # the deepest agrees in what it adds last, not in all
        (Reading(first=True, least=0.5), [0, 11, 12, 99], -1.0, (3,)),  # said, and not likely enough
    ],
)
def test_which_draft_is_taken(reading: Reading, token: list[int], odds: float, where: tuple[int, ...]) -> None:
    """Of the round and of the one before; then the policy goes on."""
    rule, scores = Consistent(Static((1,) * 4), reading), says([0.0, odds, odds, 2.0], token)
    rule.follow([Node(one, -1, None) for one in CHAIN])
    for expected in (where, where, (3,)):
        assert rule.reveal(CHAIN[0], scores, None)[0] == expected
        rule.follow([])


@pytest.mark.parametrize(("adds", "where"), [(0, (1, 2, 3)), (1, (2,)), (2, (2, 3))])
def test_what_a_depth_adds(adds: int, where: tuple[int, ...]) -> None:
    assert Consistent(Dynamic(0.5), Reading(adds)).likely(CHAIN[0], [0.0, 1.0, 3.0, 2.0], 1)[0][0] == where


# ------------------------------------------------------------------------------------------------- the released reference


@pytest.mark.parametrize(
    ("block_size", "states", "rounds", "head"),
    [
        (4, 3, 1, 2),  # the seed reveals one; states with 3, 2 and 1 masks; the bonus of the last ends the block
        (4, 2, 2, 1),  # 3 and 2 masks, a bonus; 1 mask, behind which nothing is drafted
        (8, 3, 2, 4),  # 7, 6 and 5 masks, a bonus; 4, 3, 2 and 1
        (8, 8, 1, 7),  # 7 masks to 1, and one state behind the block
    ],
)
def test_forwards_of_the_released_reference_by_hand(block_size: int, states: int, rounds: int, head: int) -> None:
    """Positions do not look at each other, so that every draft is right. Beside its rounds a block takes a seed forward and a
    store; the last one needs no store, and the prompt's block one forward of its own. The head drafts all but slot 0 of a
    block's first round, and of later ones all but slots 0 and 1."""
    model = make_model(block_size=block_size)
    for layer in (*model.model.layers, *model.mrp_head.layers):
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    torch.nn.init.zeros_(model.mrp_head.norm.weight)
    made = Released(states)(model, [list(range(1, 1 + block_size))], 3 * block_size, [])
    assert made.forwards == [1 + 3 * (rounds + 2) - 1]
    assert made.head_forwards == [3 * head]
