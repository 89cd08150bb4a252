"""A sampler that batches rows of similar length, and a dataset that pads evaluation rows for
several processes."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Sampler

from .rows import RecordRows
from .samples import Sample, samples_of


class LengthBucketSampler(Sampler[int]):
    """A sampler of rows for training, in which each training step gets rows of similar length. It
    yields indices of a dataset; each `batch_size` of them in turn are the rows of one step.

    It goes through the dataset in windows of 16 steps. The rows of a window are sorted by their
    length in a packed pass (clean tokens plus twice the response tokens) and cut into steps, and
    these steps are shuffled.

    Indices continue over epochs: in a dataset of n rows, row i is yielded as i, then as n + i, then
    as 2 * n + i, and so on. So the samples of a row have another `Sample.index`, and therefore
    other noise, each time. If the rows do not fill the last step of an epoch, it continues with the
    first rows of the next epoch. (accelerate would fill it with rows that depend on the number of
    processes.)

    The order depends only on the lengths of the rows, `batch_size` and where a window begins. So a
    resumed run has the same steps, and it does not matter how a step is divided among processes and
    accumulation passes.

    Args:
        dataset: A map-style dataset of rows; each row is a `Sample` or a list of several.
        batch_size: Number of rows in one step, over all processes and accumulation passes.
        epoch: A function that returns the current epoch, counted from 0. It is called when an
            iteration begins. (In a resumed run over several processes, accelerate would not tell
            the sampler the epoch.)
    """

    def __init__(self, dataset: Any, batch_size: int, epoch: Callable[[], int]) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size) * self.batch_size

    def __iter__(self) -> Iterator[int]:
        window = 16 * self.batch_size
        first = self.epoch() * len(self)
        end = first + len(self)
        for begin in range(first, end, window):
            order = sorted(range(begin, min(begin + window, end)), key=self._cost)
            batches = [
                order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)
            ]
            random.Random(begin).shuffle(batches)
            for batch in batches:
                yield from batch

    def _cost(self, visit: int) -> int:
        """Estimate the length of a row in a packed pass: the number of its clean tokens plus twice
        the number of its response tokens."""
        # whose rows a resumed run would read up to its step
        if isinstance(self.dataset, RecordRows):
            tokens, learned = self.dataset.size(visit)
            return tokens + 2 * learned
        return sum(
            len(sample.ids) + 2 * int(sample.response.sum())
            for sample in samples_of(self.dataset[visit])
        )


Row = Sample | Sequence[Sample]


class PaddedRows(Dataset[Row]):
    """A dataset for an evaluation in several processes. It consists of the dataset `rows` and,
    after it, added rows that have no loss, so that each process gets the same number of rows.
    Without them, accelerate would repeat the first rows of the dataset, and these would count
    twice.

    Args:
        rows: A map-style dataset; an item is a `Sample` or a list of several.
        multiple: The number of rows that all processes together take in one step. Rows are added
            until the length is a multiple of it.
    """

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
