"""Training rows of one or several samples; the order of the rows depends only on seed and epoch."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from torch.utils.data import Dataset
from transformers.utils import logging

from .chat import RecordEncoder
from .encoded import encode_large
from .samples import Sample
from .sources import Source, checked

logger = logging.get_logger(__name__)

_ORDER = 2 << 32  # keeps these draws apart from those of the noise, which use the same seed
_WINDOW = 4096  # number of samples among which rows are packed
# with `fit`, the least rows of an epoch, and the most tokens of a row of short samples
_FIT_ROWS, _FIT_LENGTH = 256, 2048


class RecordRows(Dataset[list[Sample]]):
    """A dataset of rows to train on. A row is a list of one sample (see `Sample`) or, if `packed`,
    of several. All epochs have the same rows, and item i belongs to epoch i // (number of rows).
    The `index` of a sample is epoch * (number of samples) + (number of the sample).

    Every record is checked and encoded once. Samples are kept in memory; those of large files and
    tables are kept on disk instead, in the cache of `datasets` (see `encode_large`).

    Args:
        source: The records.
        encoder: Makes the sample of each record. Its capacity is the largest number of tokens in a
            row.
        packed: Whether a row may hold several samples.
        seed: Seed of the order of rows, of packing, and of the choice of samples to hold back.
        shuffle: Whether the rows have another order in each epoch, which depends on `seed`.
            Otherwise the rows have the order of their first records.
        fit: Whether packed rows are limited to fewer tokens than the capacity. The limit is then
            the number of tokens of the longest sample or, if this is larger, 1/256 of all tokens
            (which gives 256 rows or more), but at most 2,048.
        hold_back: The largest number of samples that are held back from the rows. Only samples that
            begin with a prompt are held back, and at most a tenth of all samples.
        skip_malformed: Whether malformed records are left out, with a warning that names them.
        processes: The number of processes that encode large data; None for one per CPU, but at most
            16.

    Attributes:
        held_back: The samples that were held back.
        row_length: The largest number of tokens that a row may have.

    Raises:
        RecordError: if records are malformed, or there are none.
        ValueError: if no record fits whole into `max_length` of the encoder: each one lost its end,
            or everything in it that is learned.
    """

    def __init__(
        self,
        source: Source,
        encoder: RecordEncoder,
        packed: bool = True,
        seed: int = 0,
        shuffle: bool = True,
        fit: bool = False,
        hold_back: int = 0,
        skip_malformed: bool = False,
        processes: int | None = None,
    ) -> None:
        self.seed = seed
        self.shuffle = shuffle
        samples: Sequence[Sample]
        if (encoded := encode_large(source, encoder, processes, skip_malformed)) is not None:
            samples, record_count = encoded
            lengths = samples.tokens
            learned = samples.learned
            blocks = samples.blocks
            uncut = int(samples.uncut.sum())
            prompted = samples.prompted
        else:
            samples = []
            record_count = 0
            for _, sample in checked(source, encoder.sample, skip_malformed):
                record_count += 1
                if sample is not None:
                    samples.append(sample)
            lengths = np.asarray([len(sample.ids) for sample in samples])
            learned = np.asarray([sample.response.sum() for sample in samples])
            blocks = np.asarray(
                [len(sample.response_blocks(encoder.block_size)) for sample in samples]
            )
            prompted = np.asarray([not sample.response[0] for sample in samples])
            uncut = sum(sample.length is not None for sample in samples)
        self._samples = samples
        count = len(samples)
        if uncut < record_count:
            problem = (
                f"{', '.join(source.tables)}: of {record_count} records {count - uncut} lose their "
                f"end to max_length {encoder.max_length}, and {record_count - count} all that is "
                "learned"
            )
            if not uncut:
                raise ValueError(f"{problem}: raise max_length, or shorten the records")
            logger.warning_once(f"{problem}. Raise max_length to learn from all of them")
        held_back = self._choose_held_back(prompted, hold_back)
        self.held_back = [samples[number] for number in held_back.tolist()]
        self._numbers = np.setdiff1d(np.arange(count), held_back)
        lengths = lengths[self._numbers]
        self._lengths = lengths
        self._learned = learned[self._numbers]
        self._blocks = blocks[self._numbers]
        count = len(self._numbers)
        self.row_length = encoder.capacity
        if fit:
            filled = min(int(lengths.sum()) // _FIT_ROWS, _FIT_LENGTH)
            whole = max(int(lengths.max()), filled) // encoder.block_size * encoder.block_size
            self.row_length = min(whole, encoder.capacity)
        if packed:
            order = _order(count, seed, 0) if shuffle else np.arange(count)
            self._rows: list[np.ndarray] = []
            for begin in range(0, count, _WINDOW):
                numbers = order[begin : begin + _WINDOW]
                for row in pack(lengths[numbers], self.row_length):
                    self._rows.append(numbers[row])
        else:
            self._rows = list(np.arange(count)[:, None])

    def _choose_held_back(self, prompted: np.ndarray, count: int) -> np.ndarray:
        """Choose up to `count` samples that begin with a prompt, but at most a tenth of all
        samples. Return their numbers in ascending order."""
        numbers = np.flatnonzero(prompted)
        count = min(count, len(numbers), len(prompted) // 10)
        return np.sort(numbers[_order(len(numbers), self.seed, 0)[:count]])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[list[Sample]]:
        return (self[number] for number in range(len(self)))  # larger numbers are later epochs

    def __getitem__(self, visit: int) -> list[Sample]:
        first = visit // len(self) * len(self._numbers)
        return [
            replace(self._samples[int(self._numbers[number])], index=first + number)
            for number in self._samples_at(visit).tolist()
        ]

    def _samples_at(self, visit: int) -> np.ndarray:
        """Return the numbers of the samples in item `visit`."""
        epoch, row = divmod(visit, len(self))
        if self.shuffle:
            row = int(_order(len(self), self.seed, epoch)[row])
        return self._rows[row]

    def size(self, visit: int) -> tuple[int, int]:
        """Return the number of tokens, and the number of tokens with a loss, in item `visit` of the
        dataset. As an index of an item, `visit` continues over epochs. No sample is read."""
        numbers = self._samples_at(visit)
        return int(self._lengths[numbers].sum()), int(self._learned[numbers].sum())

    def widest(self) -> tuple[int, int]:
        """Return two maxima over all rows: the number of a row's blocks that have tokens with a
        loss, and the number of a row's tokens. No row is read."""
        blocks = max(int(self._blocks[numbers].sum()) for numbers in self._rows)
        return blocks, max(int(self._lengths[numbers].sum()) for numbers in self._rows)


def pack(lengths: np.ndarray, max_length: int) -> list[np.ndarray]:
    """Pack samples into rows by first-fit decreasing: from the longest sample to the shortest, each
    goes into the first row that has room for it.

    Args:
        lengths: int64 [n], the number of tokens of each sample, at most `max_length`.
        max_length: The largest number of tokens in a row.

    Returns:
        For each row, the indices in `lengths` of its samples, in ascending order. The rows are
            sorted by the first index in each.
    """
    room = np.full(len(lengths), max_length)
    rows: list[list[int]] = []
    for number in np.argsort(-lengths, kind="stable").tolist():
        row = int(np.argmax(room[: len(rows) + 1] >= lengths[number]))  # the last row is empty
        if row == len(rows):
            rows.append([])
        room[row] -= lengths[number]
        rows[row].append(number)
    return [np.asarray(sorted(row)) for row in sorted(rows, key=min)]


@lru_cache(maxsize=8)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed + _ORDER, epoch])).permutation(count)
