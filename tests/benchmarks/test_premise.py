"""How far guesses are from what the backbone says, on models of which that is known."""

import pytest
import torch
from conftest import make_model

from benchmarks.premise import APART, measured

PROMPTS = [list(range(1, 12)), [3, 5]]


def test_guesses_of_a_head_that_adds_nothing_and_of_positions_that_see_nothing() -> None:
    """Such a head guesses what was said before, which another does not; the further apart, the fewer positions. Where positions
    do not look at each other nothing changes."""
    model = make_model(block_size=8)
    sums = measured(model, "static", PROMPTS, 16)
    assert list(sums) == list(APART)
    counts = [float(one[0]) for one in sums.values()]
    assert counts == sorted(counts, reverse=True)
    assert all(one[1] > 0 and one[1] != one[2] for one in sums.values())
    torch.nn.init.zeros_(model.mrp_head.norm.weight)
    for one in measured(model, "static", PROMPTS, 16).values():
        assert one[1] == pytest.approx(one[2])
        assert one[3] == one[4]
        assert one[5] == 0
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    for one in measured(model, "sequential", PROMPTS, 16).values():
        assert one[1] == pytest.approx(0, abs=1e-9)
        assert one[3] == one[0]
