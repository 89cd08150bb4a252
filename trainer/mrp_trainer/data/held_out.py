"""Rows to evaluate on, of which several processes get equally many."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from .samples import Sample, samples_of

Row = Sample | Sequence[Sample]


def rows_of(dataset: Any) -> Iterator[Row]:
    """The rows of an epoch: a dataset's numbers may go on behind it."""
    return (dataset[i] for i in range(len(dataset)))


class FilledUp(Dataset[Row]):
    """The rows of a dataset, and behind them as many with nothing to learn as make it a multiple of the rows that all processes
    take at once: accelerate would fill the last batches up with first rows, which would count twice."""

    def __init__(self, rows: Any, multiple: int) -> None:
        self.rows = rows
        self.multiple = multiple

    def __len__(self) -> int:
        return -(-len(self.rows) // self.multiple) * self.multiple

    def __getitem__(self, number: int) -> Row:
        if number < len(self.rows):
            return self.rows[number]
        sample = samples_of(self.rows[0])[0]
        return replace(sample, response=np.zeros_like(sample.response))
