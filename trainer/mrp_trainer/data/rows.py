"""Datasets of samples: by number or streaming, one sample a row or several, in an order that (seed, epoch) decides."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from tqdm import tqdm
from transformers.utils import logging

from .chat import RecordEncoder
from .records import FieldError, Problem, RecordError
from .samples import Sample
from .sources import Place, Places, Source, Stream, TableSource, checked, open_source

logger = logging.get_logger(__name__)

_ORDER = 2 << 32  # keeps these draws apart from the noise's, which use the same seed
_EPOCH_STRIDE = 1 << 40  # records an epoch of a stream may have


class ChatDataset(Dataset[Sample]):
    """Samples of a user's records, one a row.

    Every record is checked, then every record is encoded once to learn its length; only places and lengths stay in
    memory, and the samples that were last used. Item `visit` of epoch `visit // len` is another record in every epoch.

    Args:
        source: The records.
        encoder: Makes samples of them.
        seed: With the epoch's number, decides the order.
        shuffle: Whether to shuffle; if not, item i is the i-th record in every epoch.
        cache_size: How many samples are kept.
        show_progress: Whether to show progress bars on a terminal.

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
        source: TableSource,
        encoder: RecordEncoder,
        seed: int = 0,
        shuffle: bool = True,
        cache_size: int = 4096,
        show_progress: bool = False,
    ) -> None:
        self.source = source
        self.encoder = encoder
        self.seed = _checked_seed(seed)
        self.shuffle = shuffle
        self._cached = lru_cache(cache_size)(self._again)
        self._places = Places()
        for place, _ in checked(source, encoder.check, show_progress=show_progress):
            self._places.append(place)
        numbers = tqdm(range(len(self._places)), "Counting tokens", unit=" records", disable=None if show_progress else True)
        lengths = np.fromiter((_signed_length(self._encode(number)) for number in numbers), np.int64, len(self._places))
        self._kept = lengths.nonzero()[0]
        self.lengths = np.abs(lengths[self._kept])
        self.dropped, self.cut = len(lengths) - len(self._kept), int((lengths < 0).sum())
        _report_cuts(self.dropped, self.cut, len(lengths), encoder, source)

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
        record = int(self._kept[number])
        return replace(self._cached(record), index=index)

    def _again(self, record: int) -> Sample:
        if (sample := self._encode(record)) is None:
            raise RuntimeError(f"{', '.join(self.source.names)} changed while it was trained on: start again")
        return sample

    def _encode(self, record: int) -> Sample | None:
        place = self._places[record]
        return _encoded(self.encoder, self.source, place, self.source.at(place), record)


class PackedDataset(Dataset[list[Sample]]):
    """Rows of several samples each, at most `max_length` tokens together.

    The rows' shapes are the same in every epoch, so that there are equally many; which of the samples of equal length goes
    where, and the order of the rows, is drawn anew in each. A sample's index is epoch * samples + its number.

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
        self._drawn = -1, self._slots
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
        slots = self._slots
        if self.dataset.shuffle:
            row = int(_order(len(self), self.dataset.seed, epoch)[row])
            slots = self._exchanged(epoch)
        numbers = slots[self._begins[row] : self._begins[row + 1]].tolist()
        return [self.dataset.sample(number, epoch * len(self.dataset) + number) for number in numbers]

    def _exchanged(self, epoch: int) -> np.ndarray:
        """[samples] the slots' samples in an epoch: those of equal length have changed places."""
        if self._drawn[0] != epoch:
            lengths = self.dataset.lengths
            shuffled = _order(len(lengths), self.dataset.seed, epoch)
            slots = np.empty_like(self._slots)
            slots[lengths[self._slots].argsort(kind="stable")] = shuffled[lengths[shuffled].argsort(kind="stable")]
            self._drawn = epoch, slots
        return self._drawn[1]


class ChatStream(IterableDataset[Sample | list[Sample]]):
    """Samples of records as they come, for sources too long to go through before: rows of one, or packed.

    The order is a function of (seed, epoch): a resumed run skips what it has seen and goes on. A Trainer needs `max_steps`,
    and `repeat`: it takes what has no length for one epoch when it resumes. Each rank reads everything and keeps its share,
    which accelerate sees to when it is told `dispatch_batches=False`.

    Args:
        source: The records.
        encoder: Makes samples of them.
        seed: With the epoch's number, decides the order.
        buffer: How many records wait to be drawn from, at random; 0 leaves their order.
        packed: Whether rows hold several samples, `encoder.capacity` tokens together.
        window: How many samples are packed together.
        repeat: Whether the next epoch follows at the end, without end.
        check: Whether to go through all records first, so that malformed ones are found before training starts; else, and for a
            source that can be read once, each is checked as it comes.
        show_progress: Whether that shows a progress bar on a terminal.

    Raises:
        RecordError: Records are malformed, or there is none.
    """

    def __init__(
        self,
        source: Source,
        encoder: RecordEncoder,
        seed: int = 0,
        buffer: int = 4096,
        packed: bool = True,
        window: int = 1024,
        repeat: bool = False,
        check: bool = True,
        show_progress: bool = False,
    ) -> None:
        self.source = source
        self.encoder = encoder
        self.seed = _checked_seed(seed)
        self.buffer = buffer
        self.packed = packed
        self.window = window
        self.repeat = repeat
        self.epoch = 0
        self.fill: float | None = None
        self._once = isinstance(source, Stream) and source.once
        if check and not self._once:
            for _ in checked(source, encoder.check, show_progress=show_progress):
                pass

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order and the noise of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample | list[Sample]]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(
                f"dataloader_num_workers is {worker.num_workers}: each worker would yield the whole stream, set it to 0 or 1"
            )
        if isinstance(self.source, Stream) and self.source.spent:
            logger.warning(f"{self.source.names[0]} has come to its end, there is no further epoch of it")
            return
        for epoch in itertools.count(self.epoch) if self.repeat and not self._once else [self.epoch]:
            samples = self._samples(epoch)
            yield from self._rows(samples, epoch) if self.packed else samples

    def _samples(self, epoch: int) -> Iterator[Sample]:
        random = np.random.Generator(np.random.Philox(key=[self.seed + _ORDER, epoch]))
        seen = dropped = cut = 0
        for number, (place, raw) in _shuffled(enumerate(self.source.entries()), self.buffer, random):
            seen += 1
            sample = _encoded(self.encoder, self.source, place, raw, epoch * _EPOCH_STRIDE + number)
            length = _signed_length(sample)
            dropped, cut = dropped + (length == 0), cut + (length < 0)
            if seen == self.window:  # training may end before the stream does
                _report_cuts(dropped, cut, seen, self.encoder, self.source)
            if sample is not None:
                yield sample
        if not seen:
            raise RecordError([Problem(self.source.names[0], None, None, "found no records: at least one is needed")])
        _report_cuts(dropped, cut, seen, self.encoder, self.source)

    def _rows(self, samples: Iterable[Sample], epoch: int) -> Iterator[list[Sample]]:
        random = np.random.Generator(np.random.Philox(key=[self.seed + _ORDER + 1, epoch]))
        tokens = rows = 0
        for waiting in _windows(samples, self.window):
            lengths = np.asarray([len(sample.ids) for sample in waiting])
            packed = pack(lengths, self.encoder.capacity)
            tokens, rows = tokens + int(lengths.sum()), rows + len(packed)
            self.fill = tokens / (rows * self.encoder.capacity)
            for row in random.permutation(len(packed)) if self.buffer else range(len(packed)):
                yield [waiting[i] for i in packed[row]]


def open_rows(
    paths: Sequence[str],
    encoder: RecordEncoder,
    packed: bool = True,
    streaming: bool = False,
    split: str = "train",
    seed: int = 0,
    shuffle: bool = True,
    show_progress: bool = True,
) -> ChatDataset | PackedDataset | ChatStream:
    """What to train on, of the paths a user gives: see `open_source` for these, and the classes for the rest.

    A stream repeats without end, but for the standard input.

    Raises:
        RecordError: A path is missing, or a record malformed.
        ValueError: The paths do not go together or come in order only and are not streamed; or no record is short enough.
        ImportError: A folder is given and `datasets` is not installed.
    """
    source = open_source(paths, split, streaming)
    if streaming:
        return ChatStream(source, encoder, seed, 4096 if shuffle else 0, packed, repeat=True, show_progress=show_progress)
    if isinstance(source, Stream):
        raise ValueError(f"{source.names[0]} comes in order only: turn streaming on, or write it to a .jsonl file")
    return rows_from(source, encoder, packed, seed, shuffle, show_progress=show_progress)


def rows_from(
    source: TableSource | Stream,
    encoder: RecordEncoder,
    packed: bool = True,
    seed: int = 0,
    shuffle: bool = True,
    repeat: bool = True,
    show_progress: bool = True,
) -> ChatDataset | PackedDataset | ChatStream:
    """What to train on, of a source; a stream's records, which may have no end, are checked as they come.

    Raises:
        RecordError: A record is malformed.
        ValueError: No record is short enough.
    """
    if isinstance(source, Stream):
        return ChatStream(source, encoder, seed, 4096 if shuffle else 0, packed, repeat=repeat, check=False)
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


def _shuffled(items: Iterable[Any], buffer: int, random: np.random.Generator) -> Iterator[Any]:
    """Items in random order, as far as a buffer of them allows."""
    waiting: list[Any] = []
    for item in items:
        if len(waiting) < buffer:
            waiting.append(item)
            continue
        if waiting:
            chosen = int(random.integers(len(waiting)))
            waiting[chosen], item = item, waiting[chosen]
        yield item
    for chosen in random.permutation(len(waiting)):
        yield waiting[chosen]


def _windows(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    window: list[Sample] = []
    for sample in samples:
        window.append(sample)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def _encoded(encoder: RecordEncoder, source: Source, place: Place, raw: Any, index: int) -> Sample | None:
    try:
        return encoder.sample(raw, index)
    except FieldError as error:
        problem = Problem(source.names[place.file], place.line, error.field_name, str(error))
        raise RecordError([problem]) from error


def _signed_length(sample: Sample | None) -> int:
    """A sample's tokens, below 0 of one that was cut and 0 of none."""
    return 0 if sample is None else -len(sample.ids) if sample.length is None else len(sample.ids)


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


def _checked_seed(seed: int) -> int:
    if seed < 0:
        raise ValueError(f"seed is {seed}: 0 or more is needed")
    return seed
