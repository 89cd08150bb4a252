"""Rows to evaluate on, of which several processes get equally many."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from .samples import Sample, samples_of

Row = Sample | Sequence[Sample]


def filled_up(rows: Any, multiple: int) -> Any:
    """A dataset or stream of rows, and behind them as many with nothing to learn as a multiple needs: accelerate would fill
    the last batches up with first rows, which would count twice.

    Args:
        rows: By number or as a stream.
        multiple: Rows that all processes take at once.
    """
    return _FilledStream(rows, multiple) if isinstance(rows, IterableDataset) else _FilledDataset(rows, multiple)


def rows_of(dataset: Any) -> Iterator[Row]:
    """The rows of an epoch: a dataset's numbers may go on behind it, and a stream has none."""
    return (dataset[i] for i in range(len(dataset))) if hasattr(dataset, "__len__") else iter(dataset)


class _FilledDataset(Dataset[Row]):
    def __init__(self, rows: Any, multiple: int) -> None:
        self.rows = rows
        self.multiple = multiple

    def __len__(self) -> int:
        return -(-len(self.rows) // self.multiple) * self.multiple

    def __getitem__(self, number: int) -> Row:
        return self.rows[number] if number < len(self.rows) else _unlearned(self.rows[0])


class _FilledStream(IterableDataset[Row]):
    def __init__(self, rows: Any, multiple: int) -> None:
        self.rows = rows
        self.multiple = multiple

    def __iter__(self) -> Iterator[Row]:
        count, first = 0, None
        for row in self.rows:
            count, first = count + 1, row if first is None else first
            yield row
        for _ in range(-count % self.multiple):
            assert first is not None
            yield _unlearned(first)


def _unlearned(row: Row) -> Row:
    sample = samples_of(row)[0]
    return replace(sample, response=np.zeros_like(sample.response))
