"""Confidence intervals of measurements on a list of problems.

There are two kinds. A share of problems (accuracy, identical texts) has Wilson's score interval,
whose width is not zero even at 0 or 100 %. Any quantity that is counted within problems (tokens
over forwards, accepted over offered drafts, ...) is a ratio of sums over problems. It has the
percentile interval of a bootstrap that draws whole problems with replacement.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """A measured value and its confidence interval."""

    value: float
    low: float
    high: float

    def rounded(self, digits: int = 3, times: int = 1) -> list[float]:
        """Return [low, high], multiplied by `times` and rounded to `digits` digits."""
        return [round(times * self.low, digits), round(times * self.high, digits)]


def wilson(correct: int, count: int, level: float = 0.95) -> Interval:
    """Return the share `correct` / `count` with Wilson's score interval. `ValueError` if `count` is
    0, or if `correct` is not between 0 and `count`."""
    if not 0 <= correct <= count or count == 0:
        raise ValueError(
            f"{correct} of {count}: a share needs at least one problem, and no more right than "
            "there are"
        )
    z = NormalDist().inv_cdf((1 + level) / 2)
    share = correct / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = (
        z / (1 + z * z / count) * np.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    )
    return Interval(share, max(0.0, float(middle - half)), min(1.0, float(middle + half)))


def resampled_sums(columns: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Sum per-problem counts over problems drawn with replacement.

    Args:
        columns: Counts [problems, counts].
        resamples: The number of resamples. Each draws as many problems as there are.
        seed: Seed of the draws; the same seed and number of problems give the same draws.

    Returns:
        Sums [resamples, counts].
    """
    problems = len(columns)
    times = np.random.default_rng(seed).multinomial(
        problems, np.full(problems, 1 / problems), size=resamples
    )
    return times @ columns


def percentiles(value: float, resampled: np.ndarray, level: float = 0.95) -> Interval:
    """Return `value` together with its percentile interval at `level`. `resampled`, float
    [resamples], has the same statistic computed on each resample."""
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


def ratio_of_sums(
    numerators: Sequence[float],
    denominators: Sequence[float],
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval | None:
    """Divide the sum of `numerators` by the sum of `denominators`. Both have one number for each
    problem. Return None if the sum of `denominators` is 0.

    The interval is that of a bootstrap over problems. Resamples in which the denominators sum to 0
    do not count.
    """
    if sum(denominators) == 0:
        return None
    sums = resampled_sums(np.stack([numerators, denominators], 1), resamples, seed)
    sums = sums[sums[:, 1] != 0]
    return percentiles(sum(numerators) / sum(denominators), sums[:, 0] / sums[:, 1], level)
