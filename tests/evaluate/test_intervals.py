"""Intervals against closed forms."""

import math

import numpy as np
import pytest
from mrp_trainer.evaluate.intervals import ratio_of_sums, wilson

Z = 1.959963984540054


@pytest.mark.parametrize(("right", "count"), [(1, 7), (8, 10), (250, 500)])
def test_wilson_solves_its_equation(right: int, count: int) -> None:
    """The ends are the shares p that the observed one is z standard errors of p away from."""
    found = wilson(right, count)
    for p in (found.low, found.high):
        assert abs(right / count - p) == pytest.approx(Z * math.sqrt(p * (1 - p) / count))
    assert found.low < found.value < found.high
    assert wilson(right, count, level=0.5).high < found.high


@pytest.mark.parametrize("share", [0.1])
def test_resampled_shares_are_binomial(share: float) -> None:
    """Zeros and ones: the sum over a resample is binomial(n, share), so the ends are its 2.5 % quantiles, to one problem."""
    count, right = 200, round(200 * share)

    def quantile(level: float) -> int:
        below, at = 0.0, -1
        while below < level:
            at += 1
            below += math.comb(count, at) * share**at * (1 - share) ** (count - at)
        return at

    found = ratio_of_sums([1] * right + [0] * (count - right), [1] * count)
    assert found is not None
    assert found.value == share
    assert count * found.low == pytest.approx(quantile(0.025), abs=1)
    assert count * found.high == pytest.approx(quantile(0.975), abs=1)


def test_a_ratio_of_sums_is_no_mean_of_ratios() -> None:
    """10 / 1 and 10 / 9: resamples are 20 / 2, 20 / 10 and 20 / 18."""
    found = ratio_of_sums([10, 10], [1, 9])
    assert found is not None
    assert (found.low, found.value, found.high) == pytest.approx((20 / 18, 2, 10))
    assert found == ratio_of_sums(np.array([10, 10]), np.array([1, 9]))  # type: ignore[arg-type]
