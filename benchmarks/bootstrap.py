"""Intervals of tokens per forward and of their ratios: a paired bootstrap over problems.

Tokens per forward of a mode is a ratio of sums over problems. Two modes are compared on the same problems, so a resample
draws problems and takes both modes' counts of each: what makes a problem easy for both then cancels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from mrp_trainer.evaluate.decoded import Decoded
from mrp_trainer.evaluate.intervals import RESAMPLES, Interval, percentiles, resampled_sums


@dataclass(frozen=True)
class Cost:
    """What one mode spent on each problem of a list.

    Attributes:
        tokens: Generated tokens, by problem.
        forwards: Backbone forwards in which the problem's row took part.
        head_forwards: The same for the head.
    """

    tokens: Sequence[int]
    forwards: Sequence[int]
    head_forwards: Sequence[int]

    @classmethod
    def of(cls, decoded: Decoded) -> "Cost":
        """What decoding a list of problems cost."""
        return cls(decoded.tokens, decoded.row_forwards, decoded.row_head_forwards)

    @property
    def tokens_per_forward(self) -> float:
        """Over all problems together."""
        return sum(self.tokens) / sum(self.forwards)

    @property
    def head_per_token(self) -> float:
        """Head forwards per generated token."""
        return sum(self.head_forwards) / sum(self.tokens)


def tokens_per_forward(cost: Cost, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Tokens per forward of one mode, with its percentile interval over problems."""
    sums = resampled_sums(np.stack([cost.tokens, cost.forwards], 1), resamples, seed)
    return percentiles(cost.tokens_per_forward, sums[:, 0] / sums[:, 1], level)


def ratio(mode: Cost, over: Cost, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Tokens per forward of a mode over those of another on the same problems, with its paired percentile interval.

    Raises:
        ValueError: if the two have not the same number of problems.
    """
    if len(mode.tokens) != len(over.tokens):
        raise ValueError(f"{len(mode.tokens)} problems against {len(over.tokens)}: compare modes on the same problems")
    sums = resampled_sums(np.stack([mode.tokens, mode.forwards, over.tokens, over.forwards], 1), resamples, seed)
    ratios = (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
    return percentiles(mode.tokens_per_forward / over.tokens_per_forward, ratios, level)
