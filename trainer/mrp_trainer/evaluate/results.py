"""Files of results, with one JSON line for each measurement. They are written line by line, resumed
after the last complete line, and read again.

A line with a field `benchmark` is a header (see `provenance`). It describes the software, options
and weights with which the lines after it, up to the next header, were measured.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..outputs import check_output, replace_file

Line = dict[str, Any]
_HEADER = '{"benchmark":'


def mode_name(line: Mapping[str, Any]) -> str:
    """Return a name for the mode of a result line of `mrp evaluate`, or of a dict with the same
    settings. It is made from the settings that vary, such as "mrp_spec of dynamic K=4 tau=0.9" or
    "static temperature=0.7" (K is `num_draft_states`, tau is `confidence_threshold`)."""
    name = str(line["decoding"])
    if "target" in line:
        name += f" of {line['target']}"
    if "num_draft_states" in line:
        name += f" K={line['num_draft_states']}"
    if "confidence_threshold" in line:
        name += f" tau={line['confidence_threshold']}"
    for option, value in line.get("set", {}).items():
        name += f" {option}={value}"
    return name


def with_headers(lines: Iterable[Line]) -> Iterator[tuple[Line, Line]]:
    """Yield each measurement among the lines of a result file as a pair (header, measurement). A
    header is a line with the field `benchmark`, and describes how the lines after it were measured;
    all other lines are measurements. A measurement's header is the last one before it, or an empty
    dict if there is none."""
    header: Line = {}
    for line in lines:
        if "benchmark" in line:
            header = line
        else:
            yield header, line


def other_weights(
    header: Mapping[str, Any], line: Mapping[str, Any], weights: Mapping[str, Any]
) -> str | None:
    """Compare the digests of weights and code in a measurement's header with those in `weights`.

    Args:
        header: The header above the measurement in its file, with the digests (see
            `provenance.header`).
        line: The measurement.
        weights: The digests to compare with, under the same names. It may be another header.

    Returns:
        The name of the first of these parts whose digests differ, or None if no part differs:
        `backbone`: The backbone's weights. It differs if `header` has no such field. It is not
            compared if it is None in `header`, as no checkpoint was measured then.
        `deciding`: The code that decides what is revealed, drafted and accepted (see
            `provenance.deciding`). It is not compared if it is None in `weights`.
        `head`: The head's weights. They are not compared if the field is None in `header`, as there
            was no head then, or several; or if `line` has no head passes (`head_per_token` is 0).
    """
    if "backbone" not in header:
        return "backbone"
    if header["backbone"] not in (None, weights["backbone"]):
        return "backbone"
    if weights.get("deciding") not in (None, header.get("deciding")):
        return "deciding"
    counts_head = line.get("head_per_token", 1) > 0
    return "head" if counts_head and header["head"] not in (None, weights["head"]) else None


def check_clean(path: str | Path, header: Mapping[str, Any]) -> None:
    """Raise `ValueError` if the result file `path` is in `benchmarks/results`, and the field
    `commit` of its `header` (see `provenance.header`) says that the code had uncommitted
    changes."""
    if Path(path).resolve().parent.parts[-2:] == (
        "benchmarks",
        "results",
    ) and "with changes" in str(header.get("commit")):
        raise ValueError(
            f"{path}: the code has changes that no commit holds: commit them first, or name "
            "another file"
        )


class ResultsFile:
    """A file of results, one JSON object per line: lines that earlier runs of a command wrote, and
    lines that this run appends. Lines with the field `benchmark` are headers, which tell the
    weights, code and options with which the lines after them were measured.

    The file's folders are made if they are missing. An incomplete last line (left by a killed
    process or a full disk) is removed when the file is opened again.

    Args:
        path: The file.
        key: The name of a field that the command writes into every line except headers. By this
            field, results of the command are told from other content.

    Raises:
        ValueError: if `path` is a folder or a read-only file; if its nearest existing parent is a
            file or a read-only folder; or if a line of the file is no header and lacks the field
            `key`. In the last case, the message gives the number of the first such line. The file
            is left as it is.
    """

    def __init__(self, path: str | Path, key: str) -> None:
        self.path = Path(path)
        self.header: Line | None = None
        check_output(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        complete, newline, cut = text.rpartition("\n")
        lines = [_record(line) for line in complete.splitlines()]
        foreign = [
            number for number, line in enumerate(lines, 1) if not {key, "benchmark"} & line.keys()
        ]
        # An incomplete line is recognised by its beginning, the first line by that of a header; a
        # complete line has the key.
        record = _record(cut)
        recognized = cut.startswith("{" if lines else _HEADER)
        if record:
            recognized = bool({key, "benchmark"} & record.keys())
        if foreign or (cut and not recognized):
            number = foreign[0] if foreign else len(lines) + 1
            raise ValueError(
                f"{path}, line {number}: no result of this command: write into another file, or "
                "remove it"
            )
        self.lines: list[Line] = lines
        if cut:
            replace_file(Path(os.path.realpath(self.path)), (complete + newline).encode())

    def begin(self, header: Line) -> None:
        """Set the header of the lines that this run adds (see `provenance.header`). The first `add`
        writes this header, unless it is already the last one in the file. From now on, `find`
        returns only lines that were measured with the same weights and code as in the header.

        Raises:
            ValueError: if the file is in `benchmarks/results`, and the header says that the code
                had uncommitted changes.
        """
        check_clean(self.path, header)
        self.header = header

    def find(self, **fields: Any) -> Line | None:
        """Return the last line that has these fields (compared as JSON) and was measured with the
        weights and code of the header set by `begin`; None if there is none."""
        query = json.loads(json.dumps(fields))
        last = None
        for header, line in with_headers(self.lines):
            if self.header is not None and other_weights(header, line, self.header) is not None:
                continue
            if all(line.get(name) == value for name, value in query.items()):
                last = line
        return last

    def add(self, *lines: Line) -> None:
        """Append lines to the file, and wait until they are on the disk. The header set by `begin`
        is written before them, unless it is already the last one in the file."""
        newest = next((line for line in reversed(self.lines) if "benchmark" in line), None)
        if self.header is not None and json.loads(json.dumps(self.header)) != newest:
            lines = (self.header, *lines)
        with self.path.open("ab") as file:
            file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        self.lines += lines


def _record(line: str) -> Line:
    """Parse a line as a JSON object; return an empty dict if it is anything else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
