"""Samples of large data. Several processes encode them, and the cache of `datasets` keeps them.

All processes of a machine read samples from this cache on disk as needed, and so does a later run
with the same data, tokenizer and options. Small data are encoded in memory, without the cache.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import __version__ as transformers_version

from .chat import RecordEncoder
from .fields import FieldError
from .samples import Sample
from .sources import JsonFile, Problems, Source, TableRows, outcomes

_LARGE_BYTES, _LARGE_ROWS = 8 << 20, 20_000  # from these sizes on, a file or a table is large
_SHARD_BYTES, _SHARD_ROWS = 4 << 20, 10_000
_MAX_PROCESSES = 16


@dataclass(frozen=True)
class Shard:
    """A part of a table of records (see `Source`), which one process encodes.

    Attributes:
        name: The table's name in error messages.
        rows: The records of the part, a `JsonFile` or a `TableRows`.
        first: The number of its first record in the table, counted from 1.
        weight: How often each record is used. With 2.3, a record is used twice, and with a chance
            of 0.3 once more.
    """

    name: str
    rows: Any
    first: int
    weight: float


class EncodedSamples(Sequence[Sample]):
    """A sequence of training samples (see `Sample`) in a table on disk. A sample is read from disk
    when it is accessed. Learned tokens are those that have a loss.

    Args:
        table: A `datasets.Dataset`, made by `encode_large`, with a row for each use of a record.
            Rows without tokens are skipped: the record is malformed, or no learned token is left of
            it.

    Attributes:
        tokens: int [n], the number of tokens in each sample.
        learned: int [n], the number of learned tokens in each sample.
        blocks: int [n], for each sample, how many of its blocks have learned tokens.
        uncut: bool [n], False for a sample whose text was longer than a sample may be, so that its
            end was cut off.
        prompted: bool [n], whether each sample begins with a prompt.
    """

    def __init__(self, table: Any) -> None:
        columns = table.with_format("numpy")
        self._numbers = columns["tokens"][:].nonzero()[0]
        self.tokens, self.learned, self.blocks, cut, self.prompted = (
            columns[name][:][self._numbers]
            for name in ("tokens", "learned", "blocks", "cut", "prompted")
        )
        self.uncut = ~cut
        # the format numpy costs ten times as much per sample
        self._table = table.with_format("arrow")

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        row = self._table[int(self._numbers[index])]
        ids, response, steps = (
            row[name].chunk(0).flatten().to_numpy(zero_copy_only=False)
            for name in ("ids", "response", "steps")
        )
        return Sample(
            0,
            ids,
            response,
            row["length"][0].as_py() if self.uncut[index] else None,
            steps if len(steps) else None,
        )


def encode_large(
    source: Source, encoder: RecordEncoder, processes: int | None, skip: bool
) -> tuple[EncodedSamples, int] | None:
    """Encode the records of a large source as training samples in several processes, and keep the
    samples in the cache of `datasets`. A later call with the same data, tokenizer and options finds
    them there.

    Args:
        source: The records.
        encoder: Makes the sample of each record.
        processes: The largest number of processes; None for one per CPU, but at most 16.
        skip: Whether malformed records are left out.

    Returns:
        The samples, and the number of well-formed records, in which a record counts as often as it
            is used. Return None, and encode nothing, if the source is small (no file has 8 MiB or
            more, and no table 20,000 rows or more), if some of its records are in memory, if
            `datasets` is not installed, or if the tokenizer has no backend of the library
            `tokenizers`, which the cache needs to recognise the tokenizer.

    Raises:
        RecordError: if a record is malformed; with `skip`, only if no record is well-formed.
    """
    if not _is_large(source) or find_spec("datasets") is None:
        return None
    if (fingerprint := _fingerprint(source, encoder)) is None:
        return None
    datasets = import_module("datasets")
    shards = [shard for name in source.tables for shard in _shards_of(source, name)]
    if processes is None:
        processes = min(os.cpu_count() or 1, _MAX_PROCESSES)
    value, of = datasets.Value, datasets.Sequence
    table = datasets.Dataset.from_generator(
        _encoded_rows,
        features=datasets.Features(
            {
                "ids": of(value("int32")),
                "response": of(value("bool")),
                "steps": of(value("int32")),
                "length": value("int32"),
                "tokens": value("int32"),
                "learned": value("int32"),
                "blocks": value("int32"),
                "cut": value("bool"),
                "prompted": value("bool"),
                "problem": value("string"),
            }
        ),
        gen_kwargs={"shards": shards, "encoder": encoder},
        num_proc=min(processes, len(shards)),
        fingerprint=fingerprint,
    )
    problems = Problems(skip)
    named = table["problem"][:]
    for text in named:
        if text:
            problems.add(text)
    problems.count = len(named)
    problems.report()
    return EncodedSamples(table), len(named) - len(problems.texts)


def _is_large(source: Source) -> bool:
    """Return whether at least one table is large. Return False if some table is neither a file nor
    a table of `datasets`, since it might not be readable twice."""
    large = False
    for rows in source.tables.values():
        if isinstance(rows, JsonFile):
            large = large or os.path.getsize(rows.path) >= _LARGE_BYTES
        elif isinstance(rows, TableRows):
            large = large or len(rows) >= _LARGE_ROWS
        else:
            return False
    return large


def _fingerprint(source: Source, encoder: RecordEncoder) -> str | None:
    """Compute a digest of everything that determines the samples: data, tokenizer, options and
    code. Return None for a tokenizer that has no backend to describe it."""
    tokenizer: Any = encoder.tokenizer
    if not hasattr(tokenizer, "backend_tokenizer"):
        return None
    parts: list[Any] = [_code_digest(), transformers_version]
    for name, rows in source.tables.items():
        parts.append([name, source.weights.get(name, 1.0)])
        if isinstance(rows, JsonFile):
            status = os.stat(rows.path)
            parts.append([os.path.abspath(rows.path), status.st_size, status.st_mtime_ns])
        elif isinstance(rows, TableRows):
            parts.append(rows.table._fingerprint)
    for option in fields(encoder):
        if option.name != "tokenizer":
            parts.append([option.name, getattr(encoder, option.name)])
    parts += [tokenizer.chat_template, tokenizer.special_tokens_map]
    parts.append(
        json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    )
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]


@cache
def _code_digest() -> str:
    """Compute a digest of the code in this folder, which determines how records are read."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _shards_of(source: Source, name: str) -> list[Shard]:
    """Divide a table into shards for several processes: lines of a file by their bytes, rows of a
    table by their number."""
    rows: Any = source.tables[name]
    weight = source.weights.get(name, 1.0)
    if isinstance(rows, JsonFile):
        return [Shard(name, part, first, weight) for part, first in rows.parts(_SHARD_BYTES)]
    shards = []
    for begin in range(0, len(rows), _SHARD_ROWS):
        end = min(begin + _SHARD_ROWS, len(rows))
        part = TableRows(rows.table.select(range(begin, end)))
        shards.append(Shard(name, part, begin + 1, weight))
    return shards


def _encoded_rows(shards: list[Shard], encoder: RecordEncoder) -> Iterator[dict[str, Any]]:
    """Yield table rows for the records of the given shards. A record gives its sample, as often as
    the record is used, or its error."""
    for shard in shards:
        for outcome in outcomes(shard.name, shard.rows, shard.first, shard.weight, encoder.sample):
            if isinstance(outcome.parsed, FieldError):
                yield _row(None, encoder.block_size, outcome.problem)
            else:
                for _ in range(outcome.copies):
                    yield _row(outcome.parsed, encoder.block_size, "")


def _row(sample: Sample | None, block_size: int, problem: str) -> dict[str, Any]:
    if sample is None:
        return {
            "ids": [],
            "response": [],
            "steps": [],
            "length": 0,
            "tokens": 0,
            "learned": 0,
            "blocks": 0,
            "cut": False,
            "prompted": False,
            "problem": problem,
        }
    return {
        "ids": sample.ids,
        "response": sample.response,
        "steps": [] if sample.reveal_step is None else sample.reveal_step,
        "length": sample.length or 0,
        "tokens": len(sample.ids),
        "learned": int(sample.response.sum()),
        "blocks": len(sample.response_blocks(block_size)),
        "cut": sample.length is None,
        "prompted": not sample.response[0],
        "problem": problem,
    }
