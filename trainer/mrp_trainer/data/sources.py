"""Where records come from: JSON lines, folders, files and repositories that `datasets` reads, streams."""

import os
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from tqdm import tqdm

from modeling_mrp.model.layouts import is_hub_id

from .records import FieldError, Problem, RecordError

_LINES = (".jsonl", ".ndjson")
_BUILDERS = {".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Place(NamedTuple):
    """Where a record is: number of the file, line from 1 on, and what finds it again (byte or row)."""

    file: int
    line: int
    offset: int


class Places:
    """Places of many records, 20 bytes each."""

    def __init__(self) -> None:
        self._columns = array("l"), array("q"), array("q")

    def append(self, place: Place) -> None:
        """One more."""
        for column, value in zip(self._columns, place, strict=True):
            column.append(value)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, number: int) -> Place:
        return Place(*(column[number] for column in self._columns))


class Source(Protocol):
    """Records in order, as bytes of JSON or as rows."""

    @property
    def names(self) -> Sequence[str]:
        """The files, by number."""
        ...

    def entries(self) -> Iterator[tuple[Place, Any]]:
        """All of them, from the first."""
        ...


class TableSource(Source, Protocol):
    """A source that finds a record again."""

    def at(self, place: Place) -> Any:
        """The record of a place that `entries` gave."""
        ...


class JsonLines:
    """Files of one JSON object a line; lines without text are passed over.

    Args:
        paths: The files, read in this order.

    Raises:
        RecordError: A file is missing.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        self.names = [os.fspath(path) for path in paths]
        missing = [Problem(name, None, None, "there is no such file") for name in self.names if not os.path.isfile(name)]
        if missing:
            raise RecordError(missing)

    def entries(self) -> Iterator[tuple[Place, bytes]]:
        """Place and bytes of every line."""
        for number, name in enumerate(self.names):
            with open(name, "rb") as file:
                yield from _lines(file, number)

    def at(self, place: Place) -> bytes:
        """The line of a place."""
        with open(self.names[place.file], "rb") as file:  # a handle kept open would be shared by forked workers
            file.seek(place.offset)
            return file.readline()


class Rows:
    """Rows of a `datasets.Dataset`, or of a sequence of dictionaries.

    Args:
        table: The rows, by number.
        name: What errors call it; a row's number from 1 on stands for its line.
    """

    def __init__(self, table: Any, name: str) -> None:
        self.table = table
        self.names = [name]

    def entries(self) -> Iterator[tuple[Place, Any]]:
        """Place and row, of every row."""
        for number, row in enumerate(self.table):
            yield Place(0, number + 1, number), row

    def at(self, place: Place) -> Any:
        """The row of a place."""
        return self.table[place.offset]


class Stream:
    """Rows that only come in order: a `datasets.IterableDataset`, or lines that are piped in.

    Args:
        open_stream: Gives the rows or lines from the first.
        name: What errors call it.
        once: It can be read once only, as a pipe can.

    Attributes:
        spent: Whether it cannot be read any more.
    """

    def __init__(self, open_stream: Callable[[], Iterable[Any]], name: str, once: bool = False) -> None:
        self.open_stream = open_stream
        self.names = [name]
        self.once = once
        self.spent = False

    def entries(self) -> Iterator[tuple[Place, Any]]:
        """Place and row (or line), of every one.

        Raises:
            RuntimeError: It can be read once and was.
            RecordError: `datasets` cannot read it.
        """
        if self.spent:
            raise RuntimeError(f"{self.names[0]} can be read once: write it to a file to train on it for more than one epoch")
        self.spent = self.once
        if self.once:
            yield from _lines(self.open_stream(), 0)
            return
        try:
            for number, row in enumerate(self.open_stream()):
                yield Place(0, number + 1, number), row
        except Exception as error:  # as in _load
            raise RecordError([Problem(self.names[0], None, None, f"datasets cannot read it: {_cause(error)}")]) from error


def open_source(paths: Sequence[str], split: str = "train", streaming: bool = False) -> TableSource | Stream:
    """The source behind paths a user gives.

    Args:
        paths: `.jsonl` files; or one folder that `datasets` saved or can load, or one file of its formats, or the id of a
            dataset on the Hub; or "-", the standard input, one JSON object a line.
        split: The split to read of a folder or a dataset that has several.
        streaming: Read what `datasets` loads as a stream, without converting it first.

    Raises:
        RecordError: A path is missing, or cannot be read.
        ValueError: These paths do not go together.
        ImportError: A folder is given and `datasets` is not installed.
    """
    if not paths:
        raise ValueError("no data: give at least one file or folder")
    if list(paths) == ["-"]:
        return Stream(lambda: sys.stdin.buffer, "standard input", once=True)
    check_paths(paths)
    if all(Path(path).suffix in _LINES and os.path.isfile(path) for path in paths):
        return JsonLines(paths)
    if len(paths) > 1:
        raise ValueError(f"found {', '.join(paths)}: several paths must all be {' or '.join(_LINES)} files")
    return _load(Path(paths[0]), split, streaming)


def source_of(dataset: Any, name: str) -> TableSource | Stream | None:
    """Find the records in a dataset that a program has.

    Args:
        dataset: A `datasets.Dataset` or `datasets.IterableDataset`; a list of records, or any other dataset by number whose
            first item is one; a path that `open_source` takes.
        name: What errors call it.

    Returns:
        Its records; None of a dataset of something else.

    Raises:
        RecordError: A path is missing, or cannot be read.
    """
    if isinstance(dataset, str | os.PathLike):
        return open_source([os.fspath(dataset)])
    if hasattr(dataset, "column_names") and not hasattr(dataset, "__len__"):
        return Stream(lambda: dataset, name)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return None
    return Rows(dataset, name) if len(dataset) == 0 or isinstance(dataset[0], Mapping) else None


def check_paths(paths: Sequence[str]) -> None:
    """Raises `RecordError` for paths of data that are not there."""
    if list(paths) != ["-"]:
        missing = [path for path in paths if not os.path.exists(path) and not is_hub_dataset(path)]
        if missing:
            raise RecordError([Problem(path, None, None, "there is no such file or folder") for path in missing])


def is_hub_dataset(path: str) -> bool:
    """Whether a path that is not here can be the id of a dataset on the Hub, `org/name`."""
    return not os.path.exists(path) and is_hub_id(path) and Path(path).suffix not in (*_LINES, *_BUILDERS)


def checked(
    source: Source, check: Callable[[Any], object], most: int = 20, show_progress: bool = False
) -> Iterator[tuple[Place, Any]]:
    """The source's entries, each once `check` has passed it; behind the first bad one they are only checked.

    Args:
        source: The records.
        check: Raises a FieldError for a malformed one.
        most: How many problems are collected before they are raised.
        show_progress: Whether to show a progress bar on a terminal.

    Raises:
        RecordError: Some record is malformed, or there is none.
    """
    problems: list[Problem] = []
    used: set[int] = set()
    entries = source.entries()
    with tqdm(desc="Checking records", unit=" records", disable=None if show_progress else True) as bar:
        for place, raw in entries:  # not through the bar, which would close them when the loop is left
            bar.update()
            used.add(place.file)
            try:
                check(raw)
            except FieldError as error:
                problems.append(Problem(source.names[place.file], place.line, error.field_name, str(error)))
                if len(problems) == most:
                    break
            if not problems:
                yield place, raw
    more = len(problems) == most and next(entries, None) is not None
    if not more:
        empty = [name for number, name in enumerate(source.names) if number not in used]
        problems += [Problem(name, None, None, "found no records: at least one is needed") for name in empty]
    if problems:
        raise RecordError(problems, more)


def _lines(file: BinaryIO | Iterable[bytes], number: int) -> Iterator[tuple[Place, bytes]]:
    offset = 0
    for line, raw in enumerate(file, start=1):
        text = raw.removeprefix(_BYTE_ORDER_MARK) if line == 1 else raw
        if text.strip():
            yield Place(number, line, offset + len(raw) - len(text)), text
        offset += len(raw)


def _load(path: Path, split: str, streaming: bool) -> Rows | Stream:
    if path.is_file() and path.suffix not in _BUILDERS:
        known = ", ".join([*_LINES, *_BUILDERS])
        raise RecordError([Problem(str(path), None, None, f"found the ending {path.suffix!r}: one of {known} is needed")])
    try:
        datasets = import_module("datasets")
    except ImportError as error:
        raise ImportError(
            f"{path} is read with the package datasets: pip install modeling-mrp[train], or give .jsonl files"
        ) from error
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            table = datasets.load_from_disk(str(path))
            if isinstance(table, datasets.DatasetDict):
                table = table[split]
        elif path.is_file():
            table = datasets.load_dataset(_BUILDERS[path.suffix], data_files=str(path), split="train", streaming=streaming)
        else:
            table = datasets.load_dataset(str(path), split=split, streaming=streaming)
    except Exception as error:  # datasets raises what its readers raise: their errors, OSError, KeyError, ValueError
        nowhere = "" if path.exists() else "there is no such file or folder here, and on the Hub "
        message = f"{nowhere}datasets cannot read split {split!r} of it: {_cause(error)}"
        raise RecordError([Problem(str(path), None, None, message)]) from error
    if isinstance(table, datasets.IterableDataset):
        return Stream(lambda: table, str(path))
    return Rows(table, str(path))


def _cause(error: Exception) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}"
