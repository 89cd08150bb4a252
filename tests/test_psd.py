"""PSD's deepest consistent draft: by hand, and on models whose positions do not look at each other."""

from typing import Any

import pytest
import torch
from conftest import make_model

from benchmarks.psd import Consistent, parallel_speculative
from modeling_mrp.rules.draft import Node
from modeling_mrp.rules.reveal import Dynamic, Static, logit
from modeling_mrp.rules.state import Scores, State

M = 60


def state(*ids: int) -> State:
    free = tuple(column for column, token in enumerate(ids) if token == M)
    return State((0, ids), free, len(ids), len(free), 0)


def said(*token: int) -> Scores:
    return Scores(list(token), [0.0, 1.0, 2.0, 3.0])  # the policy would reveal column 3


@pytest.mark.parametrize(
    ("predicted", "taken"),
    [
        ([(0, 11, 12, 13), (0, 0, 12, 13), (0, 0, 0, 13)], [1, 2, 3]),  # all agree: the last reveals what the policy says
        ([(0, 11, 12, 13), (0, 0, 22, 13), (0, 0, 0, 13)], [1, 3, 3]),  # the second draft does not: the policy goes on there
        ([(0, 21, 12, 13), (0, 0, 12, 13), (0, 0, 0, 13)], [3, 2, 3]),  # nor the first, whatever comes behind
    ],
)
def test_the_deepest_consistent_draft_by_hand(predicted: list[tuple[int, ...]], taken: list[int]) -> None:
    """Three depths, each with one more revealed; the policy would reveal column 3 at all of them."""
    drafts = [state(50, M, M, M), state(50, 11, M, M), state(50, 11, 12, M)]
    rule = Consistent(Static((1,) * 4))
    rule.follow([Node(one, -1, None) for one in drafts])
    shown = [rule.reveal(one, said(*tokens), None)[0] for one, tokens in zip(drafts, predicted, strict=True)]
    assert shown == [(column,) for column in taken]


def independent(**overrides: Any) -> Any:
    model = make_model(**overrides)
    for layer in (*model.model.layers, *model.mrp_head.layers):
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    return model


@pytest.mark.parametrize(
    ("states_a_round", "forwards"),
    [
        (1, 1 + 3 + 4 + 4),  # a token a round; a clean state and the next block's first one share one
        (2, 1 + 2 + 3 + 3),  # 3 and 2 masks; 1 and none, which leaves the next block's state a round of its own
        (3, 1 + 1 + 2 + 2),  # 3, 2 and 1 masks; the clean state and the next block's
        (4, 1 + 1 + 2 + 2),  # 3 to no masks; the next block's state
        (5, 1 + 1 + 1 + 1),  # all of them
    ],
)
def test_its_forwards_by_hand(states_a_round: int, forwards: int) -> None:
    """Three blocks of 4 whose positions do not look at each other, so that every draft is consistent; tau is never met. The
    prompt's forward reveals the first token."""
    model = independent()
    made = parallel_speculative(Dynamic(logit(0.9999)), states_a_round)(model, [[1, 2, 3, 4]], 12, [])
    alone = model.generate(torch.tensor([[1, 2, 3, 4]]), decoding="dynamic", confidence_threshold=0.9999, max_new_tokens=12)
    assert made.ids == alone[:, 4:].tolist()
    assert made.forwards == [forwards]
    assert made.head_forwards == [0]


def test_it_is_not_lossless() -> None:
    """On models that change their mind some text is another than `dynamic`'s; each has its length."""
    differ = 0
    for trial in range(4):
        model, prompt = make_model(trial, block_size=8), list(range(1, 12))
        alone = model.generate(torch.tensor([prompt]), decoding="dynamic", confidence_threshold=0.9, max_new_tokens=24)
        ids = parallel_speculative(Dynamic(logit(0.9)), 6)(model, [prompt], 24, []).ids
        assert [len(row) for row in ids] == [24]
        differ += ids != alone[:, len(prompt) :].tolist()
    assert differ
