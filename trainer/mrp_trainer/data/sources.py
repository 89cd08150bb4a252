"""Sources of records: JSON files, and datasets that the package `datasets` reads."""

import gzip
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers.utils import logging

from modeling_mrp.model.layouts import is_hub_id

from .records import FieldError, RecordError, parse_line

logger = logging.get_logger(__name__)

_MAX_PROBLEMS = 20  # number of malformed records that are named
_GZIP = b"\x1f\x8b"
# suffixes of files that `datasets` reads, with its readers
_TABLES = {".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True)
class DataPath:
    """The location of records. As a text it is PATH, or PATH:CONFIG for one configuration of a
    dataset; *WEIGHT may follow either, as in "chats.jsonl*2".

    Attributes:
        path: A file, a folder or the Hub id of a dataset.
        config: The name of the dataset's configuration; None for its default, and for files.
        weight: How often each record is used: 2 uses each record twice, 0.5 uses about half of
            them.
    """

    path: str
    config: str | None = None
    weight: float = 1.0

    @classmethod
    def of(cls, text: str) -> "DataPath":
        """Parse a text of the form PATH, PATH:CONFIG, PATH*WEIGHT or PATH:CONFIG*WEIGHT. If a file
        or folder has exactly the name `text`, the whole text is the path. `ValueError` if the
        weight is 0."""
        if os.path.exists(text):
            return cls(text)
        path, weight = text, 1.0
        if match := re.fullmatch(r"(.+)\*(\d+(?:\.\d+)?)", text):
            path, weight = match[1], float(match[2])
        if weight <= 0:
            raise ValueError(f"{text}: a weight is above 0; leave out what is not to be read")
        name, colon, config = path.partition(":")
        if (
            colon
            and config
            and not os.path.exists(path)
            and (is_hub_id(name) or Path(name).is_dir())
        ):
            return cls(name, config, weight)
        return cls(path, None, weight)


@dataclass(frozen=True)
class Source:
    """A source of records: one or more named tables. Each record is a mapping or, in a table of
    JSON lines, a line as bytes. Blank lines are skipped.

    Attributes:
        tables: Maps the name of each table, as error messages show it, to its records.
        weights: Maps the name of a table to how often each of its records is used, by default 1.
            With 2.3, a record is used twice, and with a chance of 0.3 once more.
    """

    tables: Mapping[str, Iterable[Any]]
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class JsonFile:
    """A JSON file, optionally compressed by gzip. It holds one record per line, or one array of
    records. Iteration yields the lines as bytes, or the records of the array; `FieldError` if the
    array is not JSON.

    Attributes:
        path: The path of the file.
        begin: In a file of lines, the byte where reading begins. It is the first byte of a line.
        end: In a file of lines, the byte where reading ends: lines that begin at or after it are
            not read. None reads up to the end of the file.
    """

    path: str
    begin: int = 0
    end: int | None = None

    def __iter__(self) -> Iterator[Any]:
        kind = self._kind()
        with (gzip.open if kind == "gzip" else open)(self.path, "rb") as lines:
            if kind != "lines" and _begins_array(lines):
                yield from parse_line(lines.read())
                return
            lines.seek(self.begin)
            position = self.begin
            for line in lines:
                if self.end is not None and position >= self.end:
                    break
                position += len(line)
                yield line

    def parts(self, size: int) -> Iterator[tuple["JsonFile", int]]:
        """Divide a file of uncompressed lines into parts of whole lines, of about `size` bytes
        each. Yield each part with the number of its first line in the file, counted from 1. A
        compressed file or an array is not divided: yield the whole file and 1."""
        if self._kind() != "lines":
            yield self, 1
            return
        begin = position = 0
        first = number = 1
        with open(self.path, "rb") as lines:
            for line in lines:
                position += len(line)
                number += 1
                if position - begin >= size:
                    yield JsonFile(self.path, begin, position), first
                    begin = position
                    first = number
        if position > begin:
            yield JsonFile(self.path, begin, position), first

    def _kind(self) -> str:
        """Return the kind of the file: "gzip", "array" or "lines"."""
        with open(self.path, "rb") as file:
            if file.read(len(_GZIP)) == _GZIP:
                return "gzip"
            return "array" if _begins_array(file) else "lines"


def _begins_array(file: Any) -> bool:
    """Return whether the first non-blank character of a file is the bracket that begins an array.
    Reading then starts at the beginning of the file again."""
    file.seek(0)
    first = b""
    for line in file:
        first = line.removeprefix(b"\xef\xbb\xbf").lstrip()
        if first:
            break
    file.seek(0)
    return first.startswith(b"[")


def json_lines(paths: Sequence[str]) -> Source:
    """Make a source with a table for each of the JSON files `paths`. The path of a file is the name
    of its table. Each record is used once."""
    return Source({path: JsonFile(path) for path in paths})


def open_source(paths: Sequence[str], split: str = "train") -> Source:
    """Open data as a source with a table for each path.

    Args:
        paths: Each is PATH, or PATH:CONFIG for one configuration of a dataset; *WEIGHT may follow
            (see `DataPath`). PATH is a JSON, parquet or CSV file, or a dataset: a folder that
            `datasets` saved or can load, or an id on the Hub.
        split: The split that is read of each dataset. Files are read as a whole.

    Raises:
        RecordError: if a path is missing or cannot be read.
        ValueError: if there is no path, or a weight is 0.
        ImportError: if `datasets` is needed and not installed.
    """
    if not paths:
        raise ValueError("no data: give --data, or data in the YAML file")
    places = [DataPath.of(path) for path in paths]
    missing = []
    for place in places:
        on_hub = is_hub_id(place.path) and not place.path.endswith((".json", ".jsonl"))
        if not os.path.exists(place.path) and not on_hub:
            missing.append(f"{place.path}: there is no such file or folder")
    if missing:
        raise RecordError(missing)
    tables: dict[str, Iterable[Any]] = {}
    weights = {}
    for text, place in zip(paths, places, strict=True):
        reader = _TABLES.get(Path(place.path).suffix)
        if os.path.isfile(place.path) and reader is None:
            tables[text] = JsonFile(place.path)
        else:
            tables[text] = _load(place, split, reader)
        weights[text] = place.weight
    return Source(tables, weights)


def source_of(dataset: Any, name: str) -> Source | None:
    """Return a dataset as a source of records.

    Args:
        dataset: A `datasets.Dataset`, a list of records, another map-style dataset, a path that
            `open_source` accepts, or a source, which is returned unchanged.
        name: The name of the dataset in error messages. It is not used for a path or a source.

    Returns:
        The source, or None if the items of the dataset are no records: the first is not a mapping.

    Raises:
        ValueError: if the dataset has no length.
        RecordError: if a path is missing or cannot be read.
        ImportError: if a path needs `datasets`, and it is not installed.
    """
    if isinstance(dataset, str | os.PathLike):
        return open_source([os.fspath(dataset)])
    if isinstance(dataset, Source):
        return dataset
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{name} is a {type(dataset).__name__}, which comes in order only: give a list, or a "
            ".jsonl file"
        )
    if len(dataset) > 0 and not isinstance(dataset[0], Mapping):
        return None
    # as a `datasets.Dataset` has
    return Source({name: TableRows(dataset) if hasattr(dataset, "features") else dataset})


@dataclass(frozen=True)
class TableRows:
    """The records of `table`, a `datasets.Dataset`. Iteration yields each record without fields
    that are null, also in nested objects. A `datasets.Dataset` fills missing fields of a record
    with null, even in the arguments of a tool call, and chat templates would print these nulls."""

    table: Any

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Any]:
        return map(_without_nulls, self.table)


def _without_nulls(value: Any) -> Any:
    """Return a value in which objects have no null fields, at any depth."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


class Problems:
    """A collector of the malformed records of a source.

    - Without `skip`, malformed records are an error: `add` raises it at the twentieth, and `report`
      raises it at the end if there are fewer.
    - With `skip`, they are left out: `report` logs a warning at the end, which counts them and
      names the first 20.

    Args:
        skip: Whether malformed records are left out.

    Attributes:
        texts: For each malformed record, a text that describes its error and where it is.
        count: Number of all records that were read, malformed or not. The caller keeps it up to
            date.
    """

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.texts: list[str] = []
        self.count = 0

    def add(self, text: str) -> None:
        """Add a malformed record, given as a text that describes its error and where it is. At the
        twentieth, raise `RecordError`, unless malformed records are skipped."""
        self.texts.append(text)
        if len(self.texts) == _MAX_PROBLEMS and not self.skip:
            raise RecordError(self.texts, incomplete=True)

    def report(self) -> None:
        """End the collection. If there are no malformed records, do nothing. Without `skip`, or if
        all records are malformed, raise `RecordError`. Otherwise log a warning about the malformed
        records, which were left out."""
        count = len(self.texts)
        if not count:
            return
        named = self.texts[:_MAX_PROBLEMS]
        if not self.skip or count >= self.count:
            raise RecordError(named, incomplete=count > _MAX_PROBLEMS)
        if count > _MAX_PROBLEMS:
            named = [*named, f"and {count - _MAX_PROBLEMS} more"]
        told = "\n  ".join(named)
        logger.warning(f"{count} of {self.count} records are malformed and left out:\n  {told}")


@dataclass(frozen=True)
class Outcome:
    """The outcome of reading one record, or of a table that cannot be read any further.

    Attributes:
        number: The number of the record in its table; 0 for an error of the whole table.
        parsed: What the reading function returned; after an error, the `FieldError`.
        copies: How often the record is used; 0 after an error.
        problem: A text that describes the error and where it is; empty without an error.
    """

    number: int
    parsed: Any
    copies: int = 1
    problem: str = ""


def outcomes(
    name: str, rows: Iterable[Any], first: int, weight: float, read: Callable[[Any], Any]
) -> Iterator[Outcome]:
    """Read the records of a table with the function `read`, and yield the outcome of each.

    A malformed record gives an outcome with the error. If the table itself cannot be read, such as
    an array that is not JSON or a damaged gzip file, the last outcome has the number 0 and this
    error.

    Args:
        name: The name of the table.
        rows: The records of the table. A record given as bytes is a line of JSON, and is parsed
            before `read` gets it; blank lines are skipped.
        first: The number of the first record, or of the first line of JSON.
        weight: How often each record is used. With a weight of 2.3, a record is used twice, and
            with a chance of 0.3 once more. The draw depends only on the name of the table and the
            number of the record.
        read: The function that is called with each record. It raises `FieldError` if the record is
            malformed.
    """
    try:
        for number, row in enumerate(rows, start=first):
            if isinstance(row, bytes) and not row.strip():
                continue
            try:
                parsed = read(parse_line(row) if isinstance(row, bytes) else row)
            except FieldError as error:
                location = f"{name}, {'line' if isinstance(row, bytes) else 'record'} {number}"
                if error.field_name:
                    location += f", field {error.field_name}"
                yield Outcome(number, error, 0, f"{location}: {error}")
                continue
            copies = int(weight)
            if weight % 1:
                copies += random.Random(f"{name} {number}").random() < weight % 1
            yield Outcome(number, parsed, copies)
    except (FieldError, EOFError, gzip.BadGzipFile) as error:
        whole = FieldError(None, str(error))
        yield Outcome(0, whole, 0, f"{name}: it cannot be read: {error}")


def checked(
    source: Source, read: Callable[[Any], Any], skip: bool = False
) -> Iterator[tuple[int, Any]]:
    """Read the records of a source with the function `read`. For each record, yield its number in
    its table, counted from 1, and the result of `read`.

    A record is yielded as often as the weight of its table says: with 2.3, twice, and with a chance
    of 0.3 once more.

    Args:
        source: The records.
        read: The function that is called with each record, as JSON or a dataset gives it. It raises
            `FieldError` if the record is malformed.
        skip: Whether malformed records are left out, with a warning that counts and names them.
            Otherwise nothing is yielded after the first malformed record: the remaining ones are
            only read to collect further errors, which are raised together.

    Raises:
        RecordError: if a record is malformed, or a table has no records; with `skip`, only if no
            record is well-formed.
    """
    problems = Problems(skip)
    for name, rows in source.tables.items():
        empty = True
        shown = tqdm(rows, f"reading {name}", disable=None, leave=False)
        for outcome in outcomes(name, shown, 1, source.weights.get(name, 1.0), read):
            empty = False
            problems.count += 1
            if outcome.problem:
                problems.add(outcome.problem)
            elif skip or not problems.texts:
                for _ in range(outcome.copies):
                    yield outcome.number, outcome.parsed
        if empty:
            problems.count += 1
            problems.texts.append(f"{name}: found no records: at least one is needed")
    problems.report()


def _load(place: DataPath, split: str, reader: str | None) -> "TableRows":
    """Load the dataset or file at `place`. `reader` is the name of the reader in `datasets` for a
    file of this kind, None for a dataset. `RecordError` if it cannot be read, `ImportError` if
    `datasets` is not installed."""
    path = Path(place.path)
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise ImportError(
            f"{path} is read with the package datasets: pip install 'modeling-mrp[train]', or give "
            ".jsonl files"
        ) from error
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            table = datasets.load_from_disk(str(path))
            if isinstance(table, datasets.DatasetDict):
                table = table[split]
        elif reader is not None:
            table = datasets.load_dataset(reader, data_files=str(path), split="train")
        else:
            config = [] if place.config is None else [place.config]
            table = datasets.load_dataset(str(path), *config, split=split)
    # datasets passes on errors of its readers: their own, OSError, KeyError, ValueError
    except Exception as error:
        cause = error.__cause__ or error
        raise RecordError(
            [f"{path}: datasets cannot read split {split!r} of it: {type(cause).__name__}: {cause}"]
        ) from error
    return TableRows(table)
