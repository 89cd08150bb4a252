"""Predictions of where MRP pays behind an engine, and the forced drafts by which its speed is measured."""

import random

import pytest
from handmade import M, state
from mrp_trainer.evaluate.roofline import PUBLISHED, Device

from benchmarks.forced_engine import force
from benchmarks.serving_cost import seconds_a_token, stock_seconds_a_token, tokens_of
from modeling_mrp.rules.draft import Node
from modeling_mrp.rules.state import Scores


def test_a_chain_that_is_often_right_gives_as_many_tokens() -> None:
    assert tokens_of(4, 0.75) == 1 + 0.75 + 0.5625 + 0.421875
    assert tokens_of(1, 0.75) == 1


def test_on_a_device_of_bytes_alone_drafts_pay_by_their_tokens() -> None:
    """With endless FLOPs, and nothing to wait for, what a draft costs is the head."""
    shape, device = PUBLISHED["8B"], Device("bytes", 1e12, 1e30)
    stock = stock_seconds_a_token(shape, device, 1, 0, 0.0)
    alone, drafted = (seconds_a_token(shape, device, width, 0.75, 1, 0, 0.0, 0.0, 0.0) for width in (1, 4))
    assert stock / alone == pytest.approx(17 / 16, rel=1e-3)
    assert 2 < stock / drafted < tokens_of(4, 0.75)


@pytest.mark.parametrize(("chance", "token"), [(1.0, [[7, 5], [5, 8], [5, 5]]), (0.0, [[1, 5], [5, 5], [5, 5]])])
def test_drafts_are_right_by_a_coin(chance: float, token: list[list[int]]) -> None:
    """Where one is wrong nothing behind it is touched."""
    states = [[M, M], [7, M], [7, 8], [M, M]]
    nodes = [Node(state(ids, 0), parent, None) for ids, parent in zip(states, (-1, -1, -1, 2), strict=True)]
    scores = [Scores([5, 5], [0.0, 0.0]) for _ in nodes]
    force(nodes, scores, M, chance, random.Random(0))
    assert [said.token for said in scores] == [*token, [5, 5]]
    assert [[odds > 0 for odds in said.odds] for said in scores] == [[one != 5 for one in said.token] for said in scores]
