"""Draft graphs: which nodes are taken, what is drafted by them, and that no text changes. By hand, and on random models."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_model
from draft_tables import M, memory_of, states
from helpers import left_padded

from benchmarks.draft_graph import (
    DraftGraph,
    GraphDrafts,
    Node,
    Ranking,
    drafted,
    instantiated,
    node_of,
    recorded_paths,
    scores,
)
from modeling_mrp.rules.drafting import DRAFT_END, DRAFT_PARENT, DRAFT_STEP
from modeling_mrp.rules.revealing import Dynamic, EntropyBound, RevealRule, Sequential, Static, logit

RULES: dict[str, tuple[RevealRule, dict[str, Any]]] = {
    "static": (Static(), {}),
    "dynamic": (Dynamic(logit(0.3)), {"confidence_threshold": 0.3}),
    "sequential": (Sequential(), {}),
    "entropy_bound": (EntropyBound(5.0), {"entropy_threshold": 5.0}),
}


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


def test_a_node_is_named_by_the_ranks_of_what_it_reveals() -> None:
    place, token = torch.tensor([3, 1, 0, 2]), torch.tensor([[9, 8], [7, 6], [5, 4], [3, 2]])
    first = torch.tensor([1, M, M, M])
    assert node_of(first, torch.tensor([1, 6, 5, M]), place, token) == picks((1, 1), (0, 0))
    assert node_of(first, torch.tensor([1, M, 7, M]), place, token) is None


def standing(ids: list[int], memory: list[list[int]] = [], eos: tuple[int, ...] = ()) -> tuple[Any, Any]:  # noqa: B006
    """A task and a decode of one row that stands at a state of its first block, and remembers others."""
    known = memory_of(*((at, at, ([0] * 4, [0.0] * 4)) for at in memory or [[M] * 4]), lost=[] if memory else [0], eos=eos)
    request = SimpleNamespace(eos=torch.tensor(eos, dtype=torch.long), open_end=torch.tensor([8]))
    state = SimpleNamespace(current=states(ids, eos=eos), has_seed=torch.tensor([True]), memory=known)
    return SimpleNamespace(mask_token_id=M, reader=SimpleNamespace(request=request)), state


# Positions 2, 0, 1, 3 come in this order, each with 10 or 20 and its column.
RANKING = Ranking(
    order=torch.tensor([[0.8, 0.7, 0.9, 0.1]]),
    token=torch.tensor([[[10, 20, 30], [11, 21, 31], [12, 22, 32], [13, 23, 33]]]),
    chance=torch.tensor([[[0.8, 0.1, 0.05], [0.7, 0.2, 0.05], [0.9, 0.04, 0.01], [0.1, 0.1, 0.1]]]),
)
CHAIN = DraftGraph.calibrated([[FIRST, BOTH]] * 3 + [[OTHER]], 3)


def draft(task: Any, state: Any, states_a_round: int, graph: DraftGraph = CHAIN) -> list[list[int]]:
    made = drafted(graph, task, state, states([M] * 4, start=4), RANKING, states_a_round)
    assert made.valid[0].tolist() == sorted(made.valid[0].tolist(), reverse=True)
    return made.slots[0, made.valid[0]].tolist()


def test_states_of_a_graph_by_hand() -> None:
    """Position 0 is revealed already, so that 2 is the first that is left and 1 the second."""
    task, state = standing([50, M, M, M])
    made, local = instantiated(CHAIN, task, state, RANKING)
    assert made.ids[0].tolist() == [[50, M, 12, M], [50, 11, 12, M], [50, M, 22, M]]
    assert made.valid.all()
    assert made.step[0].tolist() == [2, 3, 2]
    torch.testing.assert_close(local[0], torch.tensor([0.9, (0.9 * 0.7) ** 0.5, 0.04]))
    # The first pick has a child: the mean of its own score and that one's.
    torch.testing.assert_close(scores(CHAIN, made.valid, local)[0, 0], (torch.tensor(0.9) * (0.9 * 0.7) ** 0.5).sqrt())
    assert [slot[:4] for slot in draft(task, state, 3)] == [[50, M, M, M], [50, M, 12, M], [50, 11, 12, M]]
    assert len(draft(task, state, 9)) == 4


def test_what_is_remembered_takes_no_place() -> None:
    task, state = standing([50, M, M, M], memory=[[50, M, 12, M]])
    assert [slot[:4] for slot in draft(task, state, 3)] == [[50, M, M, M], [50, 11, 12, M], [50, M, 22, M]]


def test_positions_that_are_not_left_make_no_state() -> None:
    """One mask: two picks are one too many; what the first makes is clean, and the next block's state rides behind it."""
    task, state = standing([50, 51, 52, M])
    slots = draft(task, state, 4)
    assert [slot[:4] for slot in slots] == [[50, 51, 52, M], [50, 51, 52, 13], [M] * 4, [50, 51, 52, 23]]
    assert [slot[DRAFT_PARENT] for slot in slots] == [-1, -1, 1, -1]
    assert [slot[:4] for slot in draft(task, state, 2)] == [[50, 51, 52, M], [50, 51, 52, 13]]  # no room to ride


def test_a_state_that_ends_its_row_is_not_drafted() -> None:
    """The first pick is an eos at position 2: with position 1 open behind it a state, with 1 revealed the end of the text."""
    task, state = standing([50, M, M, M], eos=(12,))
    slots = draft(task, state, 9)
    assert [slot[:4] for slot in slots] == [[50, M, M, M], [50, M, 12, M], [50, M, 22, M]]
    assert [slot[DRAFT_END] for slot in slots] == [4, 2, 4]
    assert [slot[DRAFT_STEP] for slot in slots] == [1, 2, 2]


def test_a_clean_state_is_followed_by_the_next_block_alone() -> None:
    task, state = standing([50, 51, 52, 53])
    slots = draft(task, state, 4)
    assert [slot[:4] for slot in slots] == [[50, 51, 52, 53], [M] * 4]
    assert slots[1][DRAFT_PARENT] == 0


def test_rows_without_a_source_draft_nothing() -> None:
    task, state = standing([50, M, M, M])
    state.has_seed = torch.tensor([False])
    assert len(draft(task, state, 4)) == 1


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
        made = GraphDrafts(rule, DraftGraph.calibrated(paths, 12), count)(model, prompts, new, eos)
        assert made.ids == expected
        assert all(own <= alone for own, alone in zip(made.forwards, out.stats.row_forwards.tolist(), strict=True))
        saved += sum(out.stats.row_forwards.tolist()) - sum(made.forwards)
        none = GraphDrafts(rule, replace(CHAIN, nodes=(), edges=frozenset()), count)(model, prompts, new, eos)
        assert none.ids == expected
    assert saved > 0
