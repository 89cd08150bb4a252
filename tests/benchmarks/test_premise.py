"""How far guesses are from what the backbone says, on models of which that is known."""

import pytest
import torch
from conftest import make_model

from benchmarks.premise import APART, measured

PROMPTS = [list(range(1, 12)), [3, 5]]


def test_a_head_that_adds_nothing_guesses_what_was_said_before() -> None:
    """And one that adds something does not. The further apart, the fewer positions."""
    model = make_model(block_size=8)
    sums = measured(model, "static", PROMPTS, 16)
    assert list(sums) == list(APART)
    counts = [float(sums[steps][0]) for steps in APART]
    assert counts == sorted(counts, reverse=True)
    assert all(one[1] > 0 and one[1] != one[2] for one in sums.values())
    torch.nn.init.zeros_(model.mrp_head.norm.weight)
    for one in measured(model, "static", PROMPTS, 16).values():
        assert one[1] == pytest.approx(one[2])
        assert one[3] == one[4]
        assert one[5] == 0


def test_where_positions_do_not_look_at_each_other_nothing_changes() -> None:
    model = make_model(block_size=8)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    for one in measured(model, "sequential", PROMPTS, 16).values():
        assert one[1] == pytest.approx(0, abs=1e-9)
        assert one[3] == one[0]
