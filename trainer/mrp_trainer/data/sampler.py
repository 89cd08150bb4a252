"""The order in which rows are visited; and evaluation rows padded to equal numbers for several processes."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler

from .samples import Sample, samples_of


class LengthBucketSampler(Sampler[int]):
    """A sampler that visits the dataset in windows of 16 batches, and puts rows of similar length of a window into one batch.

    Yielded numbers go on over the epochs: row i is visited as i, len + i, 2 * len + i and so on, and carries that number as its
    `Sample.index`, so that every visit has noise of its own. An epoch is rounded up to whole steps with the first rows of the
    next epoch: accelerate would fill up a short step, with other rows for another number of processes. The order depends only
    on the window's number, so a resumed run sees the same batches, and on the batch over all processes and accumulation steps,
    so that it does not matter how a step is divided among them.

    Args:
        dataset: Rows by number: a sample, or several that share a row.
        batch_size: Rows of one step.
        epoch: Returns the epoch of an iteration that begins: accelerate's wrappers would not pass it on in a resumed run over
            several processes.
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
        """Count the columns of the row's packed pass, roughly: clean tokens, and response tokens twice."""
        return sum(len(sample.ids) + 2 * int(sample.response.sum()) for sample in samples_of(self.dataset[visit]))


Row = Sample | Sequence[Sample]


class FilledUp(Dataset[Row]):
    """A dataset filled up with rows that have nothing to learn, to a multiple of the rows that all processes take at once:
    accelerate would fill the last batches up with first rows, which would count twice."""

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
