"""Rows of samples by number, one sample each or several, in an order that (seed, epoch) decides."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
from torch.utils.data import Dataset
from transformers.utils import logging

from .chat import RecordEncoder
from .samples import Sample
from .sources import Source, checked

logger = logging.get_logger(__name__)

_ORDER = 2 << 32  # keeps these draws apart from the noise's, which use the same seed


class RecordRows(Dataset[list[Sample]]):
    """Hold the samples of a user's records in rows: one each, or several, at most the encoder's capacity of tokens together.

    Every record is checked and encoded once; its ids stay in memory, five bytes a token. A row holds the same samples in every
    epoch, and the order of the rows is drawn anew in each: item `visit` belongs to epoch `visit // len`. A sample's index is
    epoch * samples + its number.

    Args:
        source: The records.
        encoder: Makes samples of them.
        packed: Whether rows hold several samples.
        seed: With the epoch's number, decides the order.
        shuffle: Whether to shuffle; if not, rows come in the records' order in every epoch.
        show_progress: Whether to show a progress bar on a terminal.
        window: How many samples are packed together.

    Attributes:
        dropped: How many records were left out, since their prompts alone fill `max_length`.
        cut: How many of the others lost their end to it.

    Raises:
        RecordError: Records are malformed, or there is none.
        ValueError: All records were left out or cut, or the seed is negative.
    """

    def __init__(
        self,
        source: Source,
        encoder: RecordEncoder,
        packed: bool = True,
        seed: int = 0,
        shuffle: bool = True,
        show_progress: bool = False,
        window: int = 4096,
    ) -> None:
        if seed < 0:
            raise ValueError(f"seed is {seed}: 0 or more is needed")
        self.seed, self.shuffle = seed, shuffle
        made = [sample for _, sample in checked(source, encoder.sample, show_progress=show_progress)]
        self._samples = [sample for sample in made if sample is not None]
        self.dropped, self.cut = len(made) - len(self._samples), sum(sample.length is None for sample in self._samples)
        _report_cuts(self.dropped, self.cut, len(made), encoder, source)
        count = len(self._samples)
        if packed:
            lengths = np.asarray([len(sample.ids) for sample in self._samples])
            order = _order(count, seed, 0) if shuffle else np.arange(count)
            windows = [order[begin : begin + window] for begin in range(0, count, window)]
            self._rows = [numbers[row] for numbers in windows for row in pack(lengths[numbers], encoder.capacity)]
        else:
            self._rows = list(np.arange(count)[:, None])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[list[Sample]]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, visit: int) -> list[Sample]:
        if visit < 0:
            raise IndexError(f"visit {visit}: visits count from 0")
        epoch, row = divmod(visit, len(self))
        if self.shuffle:
            row = int(_order(len(self), self.seed, epoch)[row])
        first = epoch * len(self._samples)
        return [replace(self._samples[number], index=first + number) for number in self._rows[row].tolist()]


def pack(lengths: np.ndarray, max_length: int) -> list[np.ndarray]:
    """Puts samples into rows: the longest first, each into the first row with room.

    Args:
        lengths: [n] int64 tokens.
        max_length: Tokens a row may hold.

    Returns:
        Per row the numbers of its samples, ascending; the rows by their first samples.

    Raises:
        ValueError: A sample is longer than a row.
    """
    if lengths.max(initial=0) > max_length:
        raise ValueError(f"a sample of {lengths.max()} tokens does not fit a row of {max_length}: cut samples to max_length")
    room = np.full(len(lengths), max_length)
    rows: list[list[int]] = [[] for _ in lengths]
    for number in np.argsort(-lengths, kind="stable").tolist():
        row = int(np.argmax(room >= lengths[number]))
        room[row] -= lengths[number]
        rows[row].append(number)
    return [np.asarray(sorted(row)) for row in sorted(filter(None, rows), key=min)]


@lru_cache(maxsize=8)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=[seed + _ORDER, epoch])).permutation(count)


def _report_cuts(dropped: int, cut: int, seen: int, encoder: RecordEncoder, source: Source) -> None:
    """Warn of records that do not fit; raise `ValueError` if none does."""
    limit, found = f"max_length {encoder.max_length}", []
    if dropped:
        found.append(f"{dropped} of {seen} records are left out: nothing that is learned lies within {limit}")
    if cut:
        found.append(f"{cut} of {seen} records are cut to {limit}: their ends are not learned")
    names = ", ".join(source.names)
    if dropped + cut == seen:
        raise ValueError(f"{names}: {'; '.join(found)}. None fits: raise max_length, or shorten the records")
    if found:
        logger.warning_once(f"{names}: {'; '.join(found)}. Raise max_length to learn from all of them")
