"""Drafts by depth, by hand (`test_fuzz.py` holds the counts against the slow decoder), and intervals against closed forms."""

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_model
from helpers import generate
from mrp_trainer.evaluate.acceptance import acceptance_by_depth, mean_accepted_length, measure_acceptance
from mrp_trainer.evaluate.decoded import Decoded
from mrp_trainer.evaluate.intervals import ratio_of_sums, wilson
from transformers import PreTrainedTokenizerFast

from modeling_mrp import MRPForCausalLM


def made(**given: Any) -> Decoded:
    """Two problems, of which only some fields matter."""
    return Decoded(**{**dict.fromkeys(one.name for one in fields(Decoded)), **given})


def test_rates_by_hand() -> None:
    """10 of 12 offers at depth 1, none of 1 at depth 2, nothing behind. Problem 1 alone has a second draft."""
    decoded = made(
        offered_at_depth=np.array([[8, 1, 0], [4, 0, 0]]),
        accepted_at_depth=np.array([[6, 0, 0], [4, 0, 0]]),
        rounds=[8, 4],
        accepted=[6, 4],
    )
    first, second = acceptance_by_depth(decoded)
    assert (first[0], first[1].value) == (12, pytest.approx(10 / 12))
    assert (first[1].low, first[1].high) == (0.75, 1.0), "both draws problem 0, or both problem 1"
    assert (second[0], second[1].value) == (1, 0)
    length = mean_accepted_length(decoded)
    assert length is not None
    assert (length.value, length.low, length.high) == (pytest.approx(22 / 12), 14 / 8, 2)
    assert mean_accepted_length(made(rounds=[0, 0], accepted=[0, 0])) is None
    decoded = made(ids=[[1] * 6, [1] * 2], row_forwards=[3, 1], row_head_forwards=[1, 3])
    assert (decoded.tokens_per_forward, decoded.head_forwards_per_token) == (8 / 4, 4 / 8)


@pytest.fixture(scope="module")
def drafter() -> MRPForCausalLM:
    model = make_model(3, block_size=8)
    torch.nn.init.normal_(model.mrp_head.norm.weight, std=0.05, generator=torch.Generator().manual_seed(0))
    return model


def test_measured_as_counted(drafter: MRPForCausalLM, id_tokenizer: PreTrainedTokenizerFast) -> None:
    """The numbers are those of `generate`'s own counts; nothing is drawn, and no gradient is left."""
    rows = [[1, 2, 3, 4, 5], [9, 8, 7]]
    stats = generate(drafter, rows, decoding="mrp_spec", num_draft_states=5, max_new_tokens=12).stats
    rounds = int(stats.accepted_lengths.sum())
    expected = {
        "mean_accepted_length": 1 + int(stats.accepted.sum()) / rounds,
        "tokens_per_forward": 24 / int(stats.row_forwards.sum()),
        "first_draft_acceptance": int(stats.accepted_at_depth[:, 0].sum()) / int(stats.offered_at_depth[:, 0].sum()),
    }
    assert 1 < expected["mean_accepted_length"] < 5
    before = torch.get_rng_state()
    for size in (1, 16):
        assert measure_acceptance(drafter, id_tokenizer, rows, 12, size, num_draft_states=5) == pytest.approx(expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in drafter.parameters())
    with pytest.raises(ValueError, match="no prompt to decode"):
        measure_acceptance(drafter, id_tokenizer, [])


Z = 1.959963984540054


@pytest.mark.parametrize(("right", "count"), [(1, 7), (8, 10), (250, 500)])
def test_wilson_solves_its_equation(right: int, count: int) -> None:
    """The ends are the shares p that the observed one is z standard errors of p away from."""
    found = wilson(right, count)
    for p in (found.low, found.high):
        assert abs(right / count - p) == pytest.approx(Z * math.sqrt(p * (1 - p) / count))
    assert found.low < found.value < found.high
    assert wilson(right, count, level=0.5).high < found.high


def test_resampled_shares_are_binomial() -> None:
    """Zeros and ones: the sum over a resample is binomial(200, 0.1), whose 2.5 % quantiles are 12 and 29, to one problem."""
    found = ratio_of_sums([1] * 20 + [0] * 180, [1] * 200)
    assert found is not None
    assert (200 * found.low, 200 * found.value, 200 * found.high) == pytest.approx((12, 20, 29), abs=1)


def test_a_ratio_of_sums_is_no_mean_of_ratios() -> None:
    """10 / 1 and 10 / 9: resamples are 20 / 2, 20 / 10 and 20 / 18."""
    found = ratio_of_sums([10, 10], [1, 9])
    assert found is not None
    assert (found.low, found.value, found.high) == pytest.approx((20 / 18, 2, 10))
    assert found == ratio_of_sums(np.array([10, 10]), np.array([1, 9]))  # type: ignore[arg-type]
