"""A file of results, one JSON line a measurement: written line by line, and resumed behind its last complete line."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def mode_name(line: Mapping[str, Any]) -> str:
    """A result line's decoding with the settings that vary: "mrp_spec of dynamic K=4 tau=0.9", "static temperature=0.7"."""
    name = str(line["decoding"])
    name += f" of {line['target']}" if "target" in line else ""
    name += f" K={line['num_draft_states']}" if "num_draft_states" in line else ""
    name += f" tau={line['confidence_threshold']}" if "confidence_threshold" in line else ""
    return name + "".join(f" {option}={value}" for option, value in line.get("set", {}).items())


class ResultsFile:
    """The lines that earlier runs of a command left, and those that this one adds.

    A line that was cut short (the process was killed, the disk was full) is removed when the file is opened again.

    Args:
        path: Where; made with its folders if it is not there.
        key: A field that every line has.

    Raises:
        ValueError: if the file holds something else, naming the line; it is left as it is.
    """

    def __init__(self, path: str | Path, key: str) -> None:
        self.path = Path(path)
        self.lines: list[dict[str, Any]] = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        held = self.path.read_bytes() if self.path.exists() else b""
        whole, newline, cut = held.rpartition(b"\n")
        for number, line in enumerate(whole.split(b"\n") if whole else [], 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict) or key not in record:
                raise ValueError(f"{path}, line {number}: no result of this command: write into another file, or remove it")
            self.lines.append(record)
        if cut and not cut.startswith(b"{"):
            raise ValueError(f"{path}, line {len(self.lines) + 1}: no result of this command: write into another file")
        if cut:
            os.truncate(self.path, len(whole) + len(newline))

    def find(self, **fields: Any) -> dict[str, Any] | None:
        """The last line with all these fields, as JSON has them; None if there is none."""
        wanted = json.loads(json.dumps(fields))
        return next(
            (line for line in reversed(self.lines) if all(line.get(name) == value for name, value in wanted.items())), None
        )

    def add(self, line: dict[str, Any]) -> None:
        """Writes a line and waits until it is on the disk."""
        with self.path.open("ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(line)


__all__ = ["ResultsFile", "mode_name"]
