"""Where records come from: JSON lines, and what `datasets` reads."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tqdm import tqdm

from modeling_mrp.model.layouts import is_hub_id

from .records import FieldError, Problem, RecordError

_LINES = (".jsonl", ".ndjson")
_BUILDERS = {".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonLines:
    """Read files of one JSON object a line, as (file, line from 1 on, bytes); lines without text are passed over.

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

    def __iter__(self) -> Iterator[tuple[str, int, bytes]]:
        for name in self.names:
            with open(name, "rb") as file:
                for line, raw in enumerate(file, start=1):
                    text = raw.removeprefix(_BYTE_ORDER_MARK) if line == 1 else raw
                    if text.strip():
                        yield name, line, text


class Rows:
    """Read the rows of a `datasets.Dataset`, or of a sequence of dictionaries, as (name, number from 1 on, row).

    Args:
        table: The rows.
        name: What errors call it.
    """

    def __init__(self, table: Any, name: str) -> None:
        self.table = table
        self.names = [name]

    def __iter__(self) -> Iterator[tuple[str, int, Any]]:
        for number, row in enumerate(self.table, start=1):
            yield self.names[0], number, row


Source = JsonLines | Rows


def open_source(paths: Sequence[str], split: str = "train") -> Source:
    """The source behind paths a user gives.

    Args:
        paths: `.jsonl` files; or one folder that `datasets` saved or can load, or one file of its formats, or the id of a
            dataset on the Hub.
        split: The split to read of a folder or a dataset that has several.

    Raises:
        RecordError: A path is missing, or cannot be read.
        ValueError: These paths do not go together.
        ImportError: A folder is given and `datasets` is not installed.
    """
    if not paths:
        raise ValueError("no data: give at least one file or folder")
    check_paths(paths)
    if all(Path(path).suffix in _LINES and os.path.isfile(path) for path in paths):
        return JsonLines(paths)
    if len(paths) > 1:
        raise ValueError(f"found {', '.join(paths)}: several paths must all be {' or '.join(_LINES)} files")
    return _load(Path(paths[0]), split)


def source_of(dataset: Any, name: str) -> Source | None:
    """Make a source of whatever a caller passed as a dataset.

    Args:
        dataset: A `datasets.Dataset`; a list of records, or any other dataset by number whose first item is one; a path that
            `open_source` takes; a source.
        name: What errors call it.

    Returns:
        Its records; None if its first item is no record.

    Raises:
        RecordError: A path is missing, or cannot be read.
        ValueError: The dataset has no length.
    """
    if isinstance(dataset, str | os.PathLike):
        return open_source([os.fspath(dataset)])
    if isinstance(dataset, JsonLines | Rows):
        return dataset
    if not hasattr(dataset, "__len__"):
        raise ValueError(f"{name} is a {type(dataset).__name__}, which comes in order only: give a list, or a .jsonl file")
    return Rows(dataset, name) if len(dataset) == 0 or isinstance(dataset[0], Mapping) else None


def check_paths(paths: Sequence[str]) -> None:
    """Raises `RecordError` for paths of data that are not there."""
    missing = [path for path in paths if not os.path.exists(path) and not is_hub_dataset(path)]
    if missing:
        raise RecordError([Problem(path, None, None, "there is no such file or folder") for path in missing])


def is_hub_dataset(path: str) -> bool:
    """Whether a path that is not here can be the id of a dataset on the Hub, `org/name`."""
    return not os.path.exists(path) and is_hub_id(path) and Path(path).suffix not in (*_LINES, *_BUILDERS)


def checked(
    source: Source, read: Callable[[Any], Any], most: int = 20, show_progress: bool = False
) -> Iterator[tuple[int, Any]]:
    """Iterate over the records of a source, each its line and what `read` makes of it.

    Behind the first malformed record none is yielded: the others are read only for their problems, raised together at the end.

    Args:
        source: The records.
        read: Raises a FieldError for a malformed one.
        most: How many problems are collected before they are raised.
        show_progress: Whether to show a progress bar on a terminal.

    Raises:
        RecordError: Some record is malformed, or there is none.
    """
    problems: list[Problem] = []
    used: set[str] = set()
    entries = iter(source)
    with tqdm(desc="Reading records", unit=" records", disable=None if show_progress else True) as bar:
        for name, line, raw in entries:  # not through the bar, which would close them when the loop is left
            bar.update()
            used.add(name)
            try:
                made = read(raw)
            except FieldError as error:
                problems.append(Problem(name, line, error.field_name, str(error)))
                if len(problems) == most:
                    break
            else:
                if not problems:
                    yield line, made
    more = len(problems) == most and next(entries, None) is not None
    if not more:
        empty = [name for name in source.names if name not in used]
        problems += [Problem(name, None, None, "found no records: at least one is needed") for name in empty]
    if problems:
        raise RecordError(problems, more)


def _load(path: Path, split: str) -> Rows:
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
            table = table[split] if isinstance(table, datasets.DatasetDict) else table
        elif path.is_file():
            table = datasets.load_dataset(_BUILDERS[path.suffix], data_files=str(path), split="train")
        else:
            table = datasets.load_dataset(str(path), split=split)
    except Exception as error:  # datasets raises what its readers raise: their errors, OSError, KeyError, ValueError
        nowhere = "" if path.exists() else "there is no such file or folder here, and on the Hub "
        cause = error.__cause__ or error
        message = f"{nowhere}datasets cannot read split {split!r} of it: {type(cause).__name__}: {cause}"
        raise RecordError([Problem(str(path), None, None, message)]) from error
    return Rows(table, str(path))
