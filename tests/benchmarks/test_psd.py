"""PSD: which drafts are agreed with, by hand, and that nothing but agreement changes a text."""

import random
from typing import Any

import pytest
from conftest import make_model
from helpers import left_padded

from benchmarks.psd import Consistent, Reading, parallel_speculative
from modeling_mrp.rules.draft import Node
from modeling_mrp.rules.reveal import Dynamic, EntropyBound, RevealRule, Sequential, Static, logit
from modeling_mrp.rules.state import Scores, State

RULES: dict[str, tuple[RevealRule, dict[str, Any]]] = {
    "static": (Static((1,) * 8), {}),
    "dynamic": (Dynamic(logit(0.3)), {"confidence_threshold": 0.3}),
    "sequential": (Sequential((1,) * 8), {}),
    "entropy_bound": (EntropyBound(5.0), {"entropy_threshold": 5.0}),
}
M = 60


def state(*ids: int) -> State:
    free = tuple(column for column, token in enumerate(ids) if token == M)
    return State((0, ids), free, len(ids), len(free), 0)


CHAIN = [state(50, M, M, M), state(50, 11, M, M), state(50, 11, 12, M)]


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
    rule = Consistent(Static((1,) * 4), reading)
    rule.follow([Node(one, -1, None) for one in CHAIN])
    assert rule.reveal(CHAIN[0], Scores(token, [0.0, odds, odds, 2.0]), None)[0] == where
    rule.follow([])
    assert rule.reveal(CHAIN[0], Scores(token, [0.0, odds, odds, 2.0]), None)[0] == where  # of the round before, too
    rule.follow([])
    assert rule.reveal(CHAIN[0], Scores(token, [0.0, odds, odds, 2.0]), None)[0] == (3,)


def test_what_a_depth_adds() -> None:
    odds = [0.0, 1.0, 3.0, 2.0]
    assert [Consistent(Dynamic(0.5), Reading(adds)).likely(CHAIN[0], odds, 1)[0][0] for adds in (0, 1, 2)] == [
        (1, 2, 3),
        (2,),
        (2, 3),
    ]


@pytest.mark.parametrize("target", list(RULES))
def test_where_nothing_is_agreed_with_the_text_is_the_policys(target: str) -> None:
    """Random models, float64. Where all is, a text takes fewer forwards."""
    rule, options = RULES[target]
    rng = random.Random(target)
    saved = 0
    for trial, states in enumerate((2, 3, 5)):
        model = make_model(trial, block_size=8)
        prompts = [[rng.randrange(1, 50) for _ in range(rng.randint(1, 19))] for _ in range(rng.choice((1, 4)))]
        new = rng.randint(8, 25)
        out = model.generate(
            **left_padded(prompts), decoding=target, **options, max_new_tokens=new, return_dict_in_generate=True
        )
        generated = out.sequences[:, max(map(len, prompts)) :]
        expected = [row[steps >= 0].tolist() for row, steps in zip(generated, out.reveal_step, strict=True)]
        for first in (False, True):
            strict = parallel_speculative(rule, states, Reading(1, first, 1.0))(model, prompts, new, [])
            assert strict.ids == expected
            eager = parallel_speculative(rule, states, Reading(1, first))(model, prompts, new, [])
            assert list(map(len, eager.ids)) == [new] * len(prompts)
            saved += sum(strict.forwards) - sum(eager.forwards)
    assert saved > 0
