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
    """A measured value and its confidence interval.

    Attributes:
        value: The measured value.
        low, high: The ends of the interval.
    """

    value: float
    low: float
    high: float

    def rounded(self, digits: int = 3, times: int = 1) -> list[float]:
        """Return the ends of the interval as [low, high], each multiplied by `times` and then
        rounded to `digits` decimal places."""
        return [round(times * self.low, digits), round(times * self.high, digits)]


def wilson(correct: int, count: int, level: float = 0.95) -> Interval:
    """Return the share `correct` / `count` with Wilson's score interval at the confidence level
    `level`. `ValueError` if `count` is 0, or if `correct` is not between 0 and `count`."""
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
    """Return a statistic with its bootstrap percentile interval.

    Args:
        value: The statistic, computed on the data.
        resampled: The same statistic, computed on each bootstrap resample of the data; float
            [resamples].
        level: The confidence level. At 0.95, the interval reaches from the 0.025 quantile of
            `resampled` to its 0.975 quantile.
    """
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


def ratio_of_sums(
    numerators: Sequence[float],
    denominators: Sequence[float],
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval | None:
    """Divide the sum of `numerators` by the sum of `denominators`, with the percentile interval of
    a bootstrap over problems.

    Args:
        numerators: A number for each problem.
        denominators: A number for each problem.
        level: The confidence level of the interval.
        resamples: The number of bootstrap resamples. Those whose denominators sum to 0 do not
            count.
        seed: Seed of the resamples.

    Returns:
        The ratio with its interval; None if `denominators` sum to 0.
    """
    if sum(denominators) == 0:
        return None
    sums = resampled_sums(np.stack([numerators, denominators], 1), resamples, seed)
    sums = sums[sums[:, 1] != 0]
    return percentiles(sum(numerators) / sum(denominators), sums[:, 0] / sums[:, 1], level)
