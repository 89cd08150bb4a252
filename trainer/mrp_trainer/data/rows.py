"""Datasets of samples by number, one sample a row or several, in an order that (seed, epoch) decides."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from torch.utils.data import Dataset
from transformers.utils import logging

from .chat import RecordEncoder
from .records import FieldError, Problem, RecordError
from .samples import Sample
from .sources import Place, Source, checked, open_source

logger = logging.get_logger(__name__)

_ORDER = 2 << 32  # keeps these draws apart from the noise's, which use the same seed


class ChatDataset(Dataset[Sample]):
    """Samples of a user's records, one a row.

    Every record is checked and encoded once to learn its length; only places and lengths stay in memory, and the samples
    that were last used. Item `visit` of epoch `visit // len` is another record in every epoch.

    Args:
        source: The records.
        encoder: Makes samples of them.
        seed: With the epoch's number, decides the order.
        shuffle: Whether to shuffle; if not, item i is the i-th record in every epoch.
        cache_size: How many samples are kept.
        show_progress: Whether to show a progress bar on a terminal.

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
        seed: int = 0,
        shuffle: bool = True,
        cache_size: int = 4096,
        show_progress: bool = False,
    ) -> None:
        if seed < 0:
            raise ValueError(f"seed is {seed}: 0 or more is needed")
        self.source = source
        self.encoder = encoder
        self.seed = seed
        self.shuffle = shuffle
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

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, visit: int) -> Sample:
        if visit < 0:
            raise IndexError(f"visit {visit}: visits count from 0")
        epoch, number = divmod(visit, len(self))
        return self.sample(int(_order(len(self), self.seed, epoch)[number]) if self.shuffle else number, visit)

    def sample(self, number: int, index: int) -> Sample:
        """The sample of a record, by its number among those not left out, under an index."""
        return replace(self._cached(int(self._kept[number])), index=index)

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


class PackedDataset(Dataset[list[Sample]]):
    """Rows of several samples each, at most `max_length` tokens together.

    A row holds the same samples in every epoch, and the order of the rows is drawn anew in each. A sample's index is epoch *
    samples + its number.

    Args:
        dataset: The samples; its seed and `shuffle` hold here as well.
        max_length: Tokens a row may hold; the encoder's capacity if None.
        window: How many samples are packed together.

    Attributes:
        fill: Share of the rows' `max_length` that samples fill.

    Raises:
        ValueError: A sample is longer than `max_length`.
    """

    def __init__(self, dataset: ChatDataset, max_length: int | None = None, window: int = 4096) -> None:
        self.dataset = dataset
        self.max_length = dataset.encoder.capacity if max_length is None else max_length
        count = len(dataset)
        order = _order(count, dataset.seed, 0) if dataset.shuffle else np.arange(count)
        rows: list[np.ndarray] = []
        for begin in range(0, count, window):
            numbers = order[begin : begin + window]
            rows += [numbers[row] for row in pack(dataset.lengths[numbers], self.max_length)]
        self._slots = np.concatenate(rows)
        self._begins = np.cumsum([0, *map(len, rows)])
        self.fill = float(dataset.lengths.sum() / (len(rows) * self.max_length))
        logger.info(f"{count} samples fill {self.fill:.1%} of {len(rows)} rows of {self.max_length} tokens")

    def __len__(self) -> int:
        return len(self._begins) - 1

    def __iter__(self) -> Iterator[list[Sample]]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, visit: int) -> list[Sample]:
        if visit < 0:
            raise IndexError(f"visit {visit}: visits count from 0")
        epoch, row = divmod(visit, len(self))
        if self.dataset.shuffle:
            row = int(_order(len(self), self.dataset.seed, epoch)[row])
        numbers = self._slots[self._begins[row] : self._begins[row + 1]].tolist()
        return [self.dataset.sample(number, epoch * len(self.dataset) + number) for number in numbers]


def open_rows(
    data: Sequence[str] | Source,
    encoder: RecordEncoder,
    packed: bool = True,
    split: str = "train",
    seed: int = 0,
    shuffle: bool = True,
    show_progress: bool = True,
) -> ChatDataset | PackedDataset:
    """What to train on, of a source or the paths a user gives: see `open_source` for these, and the classes for the rest.

    Raises:
        RecordError: A path is missing, or a record malformed.
        ValueError: The paths do not go together, or no record is short enough.
        ImportError: A folder is given and `datasets` is not installed.
    """
    source = open_source(data, split) if isinstance(data, Sequence) else data
    dataset = ChatDataset(source, encoder, seed, shuffle, show_progress=show_progress)
    return PackedDataset(dataset) if packed else dataset


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
