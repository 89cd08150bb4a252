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
