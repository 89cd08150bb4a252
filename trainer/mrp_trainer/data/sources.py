"""Sources of records: files of JSON lines, and datasets that the package `datasets` reads."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tqdm import tqdm

from modeling_mrp.model.layouts import is_hub_id

from .records import FieldError, RecordError, parse_line

_MAX_PROBLEMS = 20  # malformed records that are collected before an error is raised


@dataclass(frozen=True)
class Source:
    """Tables of records by the names that errors use; an item is a row, or a line of JSON as bytes,
    skipped if blank."""

    tables: Mapping[str, Iterable[Any]]


def json_lines(paths: Sequence[str]) -> Source:
    """Make a source of files with one JSON object per line; the source can be read only once."""
    return Source({path: _lines(path) for path in paths})


def _lines(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from file


def open_source(paths: Sequence[str], split: str = "train") -> Source:
    """Open data as a source: files of JSON lines, or the `split` of one dataset, which is a folder
    that `datasets` saved or can load, or an id on the Hub.

    Raises:
        RecordError: if a path is missing or cannot be read.
        ValueError: if there is no path, or several that are not all files.
        ImportError: if a folder or an id is given and `datasets` is not installed.
    """
    if not paths:
        raise ValueError("no data: give --data, or data in the YAML file")
    files = [path for path in paths if os.path.isfile(path)]
    on_hub = [
        path
        for path in paths
        if not os.path.exists(path) and is_hub_id(path) and not path.endswith((".json", ".jsonl"))
    ]
    if missing := [path for path in paths if not os.path.exists(path) and path not in on_hub]:
        raise RecordError([f"{path}: there is no such file or folder" for path in missing])
    if len(files) == len(paths):
        return json_lines(paths)
    if len(paths) > 1:
        raise ValueError(f"found {', '.join(paths)}: several paths must all be files of JSON lines")
    return _load(Path(paths[0]), split)


def source_of(dataset: Any, name: str) -> Source | None:
    """Make the source of a dataset: a `datasets.Dataset`, a list of records or another map-style
    dataset of mappings, a path that `open_source` takes, or a source. Errors call the dataset
    `name`.

    Returns None if the first item is not a mapping. `ValueError` if the dataset has no length,
    `RecordError` if a path cannot be read.
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
    """The rows of a `datasets.Dataset` without nulls, with which a table fills what is missing in a
    row, also in the arguments of a tool call: templates would print them."""

    table: Any

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[Any]:
        return map(_without_nulls, self.table)


def _without_nulls(value: Any) -> Any:
    """Drop nulls in objects, at any depth."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def checked(source: Source, read: Callable[[Any], Any]) -> Iterator[tuple[int, Any]]:
    """Read the records of a source; yield the number of each line, from 1 on, and what `read`
    returns for its record.

    `read` raises `FieldError` for a malformed record. After the first malformed record nothing is
    yielded: the rest is read only to collect further errors, and all are raised together.

    Raises:
        RecordError: if some record is malformed, or a table has none.
    """
    problems: list[str] = []
    for name, rows in source.tables.items():
        empty = True
        for line, row in enumerate(
            tqdm(rows, f"reading {name}", disable=None, leave=False), start=1
        ):
            if isinstance(row, bytes) and not row.strip():
                continue
            empty = False
            try:
                parsed = read(parse_line(row) if isinstance(row, bytes) else row)
            except FieldError as error:
                location = f"{name}, line {line}"
                if error.field_name:
                    location += f", field {error.field_name}"
                problems.append(f"{location}: {error}")
                if len(problems) == _MAX_PROBLEMS:
                    raise RecordError(problems, incomplete=True) from error
            else:
                if not problems:
                    yield line, parsed
        if empty:
            problems.append(f"{name}: found no records: at least one is needed")
    if problems:
        raise RecordError(problems)


def _load(path: Path, split: str) -> Source:
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
        else:
            table = datasets.load_dataset(str(path), split=split)
    # datasets passes errors of its readers on: their own, OSError, KeyError, ValueError
    except Exception as error:
        cause = error.__cause__ or error
        raise RecordError(
            [f"{path}: datasets cannot read split {split!r} of it: {type(cause).__name__}: {cause}"]
        ) from error
    return Source({str(path): TableRows(table)})
