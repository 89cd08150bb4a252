"""Rows of samples by number, one sample each or several, in an order that (seed, epoch) decides."""

from array import array
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
from torch.utils.data import Dataset
from transformers.utils import logging

from .chat import RecordEncoder
from .records import FieldError, Problem, RecordError
from .samples import Sample
from .sources import Place, Source, checked

logger = logging.get_logger(__name__)

_ORDER = 2 << 32  # keeps these draws apart from the noise's, which use the same seed


class RecordRows(Dataset[list[Sample]]):
    """Rows of samples of a user's records: one sample each, or several, at most the encoder's capacity of tokens together.

    Every record is checked and encoded once to learn its length; only places and lengths stay in memory, and the samples
    that were last used. A row holds the same samples in every epoch, and the order of the rows is drawn anew in each: item
    `visit` belongs to epoch `visit // len`. A sample's index is epoch * samples + its number.

    Args:
        source: The records.
        encoder: Makes samples of them.
        packed: Whether rows hold several samples.
        seed: With the epoch's number, decides the order.
        shuffle: Whether to shuffle; if not, rows come in the records' order in every epoch.
        show_progress: Whether to show a progress bar on a terminal.
        cache_size: How many samples are kept.
        window: How many samples are packed together.

    Attributes:
        lengths: [records] int64, tokens of each one's whole blocks.
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
        cache_size: int = 4096,
        window: int = 4096,
    ) -> None:
        if seed < 0:
            raise ValueError(f"seed is {seed}: 0 or more is needed")
        self.source, self.encoder, self.seed, self.shuffle = source, encoder, seed, shuffle
        self._cached = lru_cache(cache_size)(self._encode)
        self._places, lengths = array("q"), array("q")
        for place, length in checked(source, self._length, show_progress=show_progress):
            self._places.extend(place)
            lengths.append(length)
        signed = np.asarray(lengths)
        self._kept = signed.nonzero()[0]
        self.lengths = np.abs(signed[self._kept])
        self.dropped, self.cut = len(signed) - len(self._kept), int((signed < 0).sum())
        _report_cuts(self.dropped, self.cut, len(signed), encoder, source)
        count = len(self._kept)
        order = _order(count, seed, 0) if shuffle and packed else np.arange(count)
        rows = [] if packed else np.split(order, count)
        for begin in range(0, count if packed else 0, window):
            numbers = order[begin : begin + window]
            rows += [numbers[row] for row in pack(self.lengths[numbers], encoder.capacity)]
        self._slots, self._begins = np.concatenate(rows), np.cumsum([0, *map(len, rows)])

    def __len__(self) -> int:
        return len(self._begins) - 1

    def __iter__(self) -> Iterator[list[Sample]]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, visit: int) -> list[Sample]:
        if visit < 0:
            raise IndexError(f"visit {visit}: visits count from 0")
        epoch, row = divmod(visit, len(self))
        if self.shuffle:
            row = int(_order(len(self), self.seed, epoch)[row])
        numbers = self._slots[self._begins[row] : self._begins[row + 1]].tolist()
        first = epoch * len(self._kept)
        return [replace(self._cached(int(self._kept[number])), index=first + number) for number in numbers]

    def _length(self, raw: object) -> int:
        """A record's tokens, below 0 of one that is cut and 0 of one that is left out."""
        sample = self.encoder.sample(raw, 0)  # type: ignore[arg-type]  # the parser looks what it is
        return 0 if sample is None else -len(sample.ids) if sample.length is None else len(sample.ids)

    def _encode(self, record: int) -> Sample:
        place = Place(*self._places[3 * record : 3 * record + 3])
        try:
            sample = self.encoder.sample(self.source.at(place), record)
        except FieldError as error:
            raise RecordError([Problem(self.source.names[place.file], place.line, error.field_name, str(error))]) from error
        if sample is None:
            raise RuntimeError(f"{', '.join(self.source.names)} changed while it was trained on: start again")
        return sample


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
