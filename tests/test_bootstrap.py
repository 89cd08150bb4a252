"""Intervals against distributions that can be written down."""

import numpy as np
import pytest

from benchmarks.bootstrap import Cost, ratio, resampled_sums, tokens_per_forward


def test_two_problems_have_three_resamples() -> None:
    """Tokens 1 and 3, a forward each: the mean is 1, 2 or 3 with chances 1/4, 1/2, 1/4."""
    cost = Cost([1, 3], [1, 1], [0, 0])
    wide, narrow = tokens_per_forward(cost), tokens_per_forward(cost, level=0.4)
    assert (wide.low, wide.value, wide.high) == (1, 2, 3)
    assert (narrow.low, narrow.value, narrow.high) == (2, 2, 2)


def test_sums_are_of_whole_draws() -> None:
    sums = resampled_sums(np.array([[1, 10], [1, 20], [1, 40]]), 1000, seed=0)
    assert (sums[:, 0] == 3).all()
    assert set(sums[:, 1] // 10) <= {a + b + c for a in (1, 2, 4) for b in (1, 2, 4) for c in (1, 2, 4)}
    assert (sums == resampled_sums(np.array([[1, 10], [1, 20], [1, 40]]), 1000, seed=0)).all()
    assert (sums != resampled_sums(np.array([[1, 10], [1, 20], [1, 40]]), 1000, seed=1)).any()


def test_pairing_takes_away_what_problems_share() -> None:
    """Twice as fast on every problem, however hard: the ratio is 2 in every resample."""
    rng = np.random.default_rng(0)
    tokens, forwards = rng.integers(10, 60, 50), rng.integers(5, 60, 50)
    slow = Cost(tokens.tolist(), (2 * forwards).tolist(), [0] * 50)
    fast = Cost(tokens.tolist(), forwards.tolist(), [0] * 50)
    found = ratio(fast, slow)
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))
    assert tokens_per_forward(fast).low < 0.95 * tokens_per_forward(fast).value


def test_many_problems_approach_the_delta_method() -> None:
    """log(ratio of means) of independent columns has the variance sum of (sd / mean)^2 / n: two draws of 400 problems of a
    mean of 100 and a deviation of 20, each divided by a constant, give a half-width of 1.96 * sqrt(2) * 0.2 / 20."""
    rng = np.random.default_rng(1)
    costs = []
    for _ in range(2):
        tokens = rng.normal(0, 1, 400)
        tokens = 100 + 20 * (tokens - tokens.mean()) / tokens.std()
        costs.append(Cost(tokens.tolist(), [10] * 400, [0] * 400))
    apart = np.corrcoef(costs[0].tokens, costs[1].tokens)[0, 1]
    half = 1.96 * np.sqrt(2 * (1 - apart)) * 0.2 / 20
    found = ratio(*costs)
    assert found.value == pytest.approx(1)
    assert (np.log(found.low), np.log(found.high)) == pytest.approx((-half, half), rel=0.05)


def test_different_problems_cannot_be_paired() -> None:
    with pytest.raises(ValueError, match="2 problems against 1"):
        ratio(Cost([1, 2], [1, 1], [0, 0]), Cost([1], [1], [0]))
