"""Tables and figures from lines of measurements."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import cost_model, plots, tables
from benchmarks.common import embedded_weights, read_lines


def write(path: Path, lines: list[dict[str, Any]], **header: Any) -> None:
    """A file of results of the embedded weights, or of what the header says."""
    header = {"benchmark": "sweep", **embedded_weights(), **header}
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *lines)))


def point(axis: str, mode: str, speed: float, states: int | None, batch_size: int = 1) -> dict[str, Any]:
    line = {"axis": axis, "family": "math", "batch_size": batch_size, "mode": mode, "tokens_per_forward": speed}
    line |= {"tokens_per_forward_95": [speed - 0.1, speed + 0.1], "head_per_token": 0.5, "prompt_tokens": 21.0}
    line |= {} if states is None else {"states": states, "states_per_forward": states, "accepted_percent": 60.0}
    return line | ({"prompt_asked": 20} if axis == "prompt" else {})


@pytest.fixture
def results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with a sweep and predictions."""
    lines = [point("batch", "static", 1.0, None)]
    lines += [point("batch", mode, 1 + k / 4, k) for k in (2, 4) for mode in ("released", "self_spec", "mrp_spec")]
    lines += [point("batch", "released", 0.25, 4, 8), point("prompt", "mrp_spec", 2.5, 4)]
    write(tmp_path / "tiny_sweep.jsonl", lines)
    asked = ["--counts", str(tmp_path / "tiny_sweep.jsonl"), "--shape", "4b", "--batch", "1", "128", "--states", "1", "2", "4"]
    cost_model.main(asked)
    (tmp_path / "cost_model.jsonl").write_text(capsys.readouterr().out)
    return tmp_path


def test_figures_are_the_same_every_time(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = []
    for _ in range(2):
        plots.main(["--results", str(results)])
        assert [Path(line).name for line in capsys.readouterr().out.splitlines()] == ["cost_h200_4b.svg"]
        drawn.append((results / "cost_h200_4b.svg").read_text())
    assert drawn[0] == drawn[1]
    assert "<dc:date>" not in drawn[0]
    words = {
        "".join(element.itertext()).strip() for element in ElementTree.fromstring(drawn[0]).iter() if "text" in element.tag
    }
    assert "speed over static" in words
    assert "mrp_spec K=4" in drawn[0]


def test_the_table_of_a_sweep(results: Path) -> None:
    two, _, four, _, prompt = (part.splitlines() for part in _sections(tables.sweep(results)))
    assert two[-1].startswith("| 1 | 1.00 | 1.50 | 1.50 | 1.50 | 2.0 | 60 | 2.0 | 60 | 0.50 |")
    assert [row.split(" | ")[:3] for row in four[2:]] == [["| 1", "1.00", "2.00"], ["| 8", "", "0.25"]]
    assert prompt[-1].startswith("| 20 | 2.50 |")


def _sections(text: str) -> list[str]:
    return text.split("\n\n")[1:]


def test_the_table_of_predictions(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables.main(["cost", "--results", str(results)])
    choices, _, limits = _sections(capsys.readouterr().out)
    assert choices.splitlines()[0] == "| device | shape | batch | math K=2 | math K=4 |"
    assert choices.splitlines()[-1] == "| H200 | 4B | 128 | static 1.00x | static 1.00x |"
    assert [row.split(" | ")[2] for row in limits.splitlines()[2:]] == ["self_spec", "mrp_spec"]


OTHER = {"backbone": "0123456789ab", "head": "ba9876543210"}
ALONE = {"family": "math", "mode": "self_spec", "tokens_per_forward": 2.0, "head_per_token": 0.0}
DRAFTED = {**ALONE, "mode": "mrp_spec", "tokens_per_forward": 3.0, "head_per_token": 0.3}


@pytest.mark.parametrize(
    ("part", "lines"),
    [
        ("backbone", [ALONE]),
        ("backbone", [DRAFTED]),
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
