"""Files of results: lines of other weights than the embedded ones are refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.common import embedded_weights, read_lines


def write(path: Path, lines: list[dict[str, Any]], **header: Any) -> None:
    """A file of results of the embedded weights, or of what the header says."""
    header = {"benchmark": "sweep", **embedded_weights(), **header}
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *lines)))


OTHER = {"backbone": "0123456789ab", "head": "ba9876543210"}
ALONE = {"family": "math", "mode": "self_spec", "tokens_per_forward": 2.0, "head_per_token": 0.0}
DRAFTED = {**ALONE, "mode": "mrp_spec", "tokens_per_forward": 3.0, "head_per_token": 0.3}


@pytest.mark.parametrize(
    ("part", "lines"),
    [
        ("backbone", [ALONE]),
        ("head", [ALONE, DRAFTED]),
        ("head", [{name: value for name, value in ALONE.items() if name != "head_per_token"}]),
    ],
)
def test_lines_of_other_weights_are_refused(tmp_path: Path, part: str, lines: list[dict[str, Any]]) -> None:
    options = {"count": 200, "batch_size": [1, 8], "before": None}
    path = tmp_path / "tiny_sweep.jsonl"
    write(path, lines, **{part: OTHER[part]}, options=options)
    told = f"{path}: measured with the {part} {OTHER[part]}, and that of sdar-tiny-mrp is {embedded_weights()[part]}: "
    told += f"measure again with `python -m benchmarks.sweep --count 200 --batch-size 1 8 > {path}`"
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        read_lines(path)


def test_what_no_head_took_part_in_holds_for_another_head(tmp_path: Path) -> None:
    path = tmp_path / "tiny_sweep.jsonl"
    write(path, [ALONE], head=OTHER["head"])
    assert read_lines(path) == [ALONE]


def test_lines_that_do_not_say_what_they_measured_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny_sweep.jsonl"
    for first in ("", '{"benchmark": "sweep", "options": {}}\n'):
        path.write_text(first + json.dumps(ALONE))
        with pytest.raises(ValueError, match="measured with the backbone unknown, and that of sdar-tiny-mrp is"):
            read_lines(path)


def test_a_file_that_was_continued_shows_what_was_measured_again(tmp_path: Path) -> None:
    """A line belongs to the nearest header before it; what needs no head was not measured again."""
    path = tmp_path / "tiny_sweep.jsonl"
    write(path, [ALONE, DRAFTED], head=OTHER["head"])
    before = path.read_text()
    write(path, [{**DRAFTED, "tokens_per_forward": 4.0}])
    path.write_text(before + path.read_text())
    assert read_lines(path) == [ALONE, {**DRAFTED, "tokens_per_forward": 4.0}]


def test_every_committed_result_says_what_it_measured() -> None:
    """Also those that no table shows; training logs are none."""
    for path in sorted(tables.RESULTS.glob("*.jsonl")):
        if not path.stem.endswith("_log"):
            assert read_lines(path), path
            header = json.loads(path.read_text().splitlines()[0])
            assert header["commit"], path
