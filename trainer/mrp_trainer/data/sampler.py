"""The order in which rows are visited, and rows to evaluate on, of which several processes get equally many."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler

from .samples import Sample, samples_of


class LengthBucketSampler(Sampler[int]):
    """Visits the dataset in windows of 16 batches; inside a window rows of like length meet in one batch.

    Yields numbers that go on over the epochs: row i is asked for as i, len + i, 2 * len + i and so on, and carries that number
    as its `Sample.index`, so that every visit has noise of its own. An epoch is rounded up to whole steps, which take the
    first rows of the next round: a short step would be filled up by accelerate, with other rows for another number of
    processes. The order is a function of the window's number alone, so a resumed run sees the same batches; and of the batch
    over all processes and accumulation steps, so that it does not matter how a step is divided among them.

    Args:
        dataset: Rows by number: a sample, or several that share a row.
        batch_size: Rows that make one step.
        epoch: Tells which epoch an iteration is when it begins: accelerate's wrappers of a resumed run over several processes
            would not pass it on.
    """

    def __init__(self, dataset: Any, batch_size: int, epoch: Callable[[], int]) -> None:
        self.dataset, self.batch_size, self.epoch = dataset, batch_size, epoch

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size) * self.batch_size

    def __iter__(self) -> Iterator[int]:
        window = 16 * self.batch_size
        first = self.epoch() * len(self)
        end = first + len(self)
        for begin in range(first, end, window):
            order = sorted(range(begin, min(begin + window, end)), key=self._cost)
            batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
            random.Random(begin).shuffle(batches)
            for batch in batches:
                yield from batch

    def _cost(self, visit: int) -> int:
        """Columns of the row's packed pass, up to a constant factor: clean tokens and the blocks noised twice."""
        return sum(len(sample.ids) + 2 * int(sample.response.sum()) for sample in samples_of(self.dataset[visit]))


Row = Sample | Sequence[Sample]


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
