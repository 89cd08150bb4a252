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
    header = {"benchmark": "yardstick", **embedded_weights(), **header}
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *lines)))


def point(axis: str, mode: str, speed: float, states: int | None, batch_size: int = 1) -> dict[str, Any]:
    line = {"axis": axis, "family": "math", "batch_size": batch_size, "mode": mode, "tokens_per_forward": speed}
    line |= {"tokens_per_forward_95": [speed - 0.1, speed + 0.1], "head_per_token": 0.5, "prompt_tokens": 21.0}
    line |= {} if states is None else {"states": states, "states_per_forward": states, "accepted_percent": 60.0}
    return line | ({"prompt_asked": 20} if axis == "prompt" else {})


@pytest.fixture
def results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A folder with a sweep and predictions."""
    lines = [point("states", "static", 1.0, None)]
    lines += [point("states", mode, 1 + k / 4, k) for k in (1, 2, 4) for mode in ("released", "self_spec", "mrp_spec")]
    lines += [point("batch", "released", 2 / size, 4, size) for size in (1, 8)]
    lines += [point("prompt", "mrp_spec", 2.5, 4)]
    write(tmp_path / "tiny_sweep.jsonl", lines)
    (tmp_path / "tiny_yardstick.jsonl").write_text("")
    cost_model.main(["--counts", str(tmp_path / "tiny_sweep.jsonl"), "--shape", "4b", "--batch", "1", "128"])
    (tmp_path / "cost_model.jsonl").write_text(capsys.readouterr().out)
    return tmp_path


def test_figures_are_the_same_every_time(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["sweep_states.svg", "sweep_batch.svg", "sweep_prompt.svg", "cost_h200_4b.svg"]
    drawn = []
    for _ in range(2):
        plots.main(["--results", str(results)])
        assert [Path(line).name for line in capsys.readouterr().out.splitlines()] == names
        drawn.append([(results / name).read_text() for name in names])
    assert drawn[0] == drawn[1]
    for text in drawn[0]:
        assert "<dc:date>" not in text
        words = {
            "".join(element.itertext()).strip() for element in ElementTree.fromstring(text).iter() if "text" in element.tag
        }
        assert words & {"tokens per backbone forward", "speed over static"}
    assert "mrp_spec K=4" in drawn[0][3]


def test_the_table_of_a_sweep(results: Path) -> None:
    states, _, batch, _, prompt = (part.splitlines() for part in _sections(tables.sweep(results)))
    assert states[-1].startswith("| 4 | 1.00 | 2.00 | 2.00 | 2.00 | 4.0 | 60 | 4.0 | 60 | 0.50 |")
    assert batch[-2:] == ["| 1 | 2.00 |", "| 8 | 0.25 |"]
    assert prompt[-1].startswith("| 20 | 2.50 |")


def _sections(text: str) -> list[str]:
    return text.split("\n\n")[1:]


def test_the_table_of_predictions(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables.main(["cost", "--results", str(results)])
    choices, _, limits = _sections(capsys.readouterr().out)
    assert choices.splitlines()[0] == "| device | shape | batch | math K=2 | math K=4 |"
    assert choices.splitlines()[-1] == "| H200 | 4B | 128 | static 1.00x | static 1.00x |"
    assert [row.split(" | ")[2] for row in limits.splitlines()[2:]] == ["self_spec", "mrp_spec"]


def test_tables_of_the_yardstick_with_and_without_intervals(tmp_path: Path) -> None:
    old = {"family": "math", "batch_size": 1, "mode": "mrp_spec K=4", "tokens_per_forward": 2.5, "over_released": 1.4}
    new = {**old, "batch_size": 8, "over_released_95": [1.31, 1.52], "over_batch_1": 1.0, "over_batch_1_95": [0.99, 1.01]}
    alone = {**new, "batch_size": 1, "mode": "mrp_spec K=8", "over_self_spec": 1.3, "over_self_spec_95": [1.2, 1.4]}
    alone.pop("over_batch_1")
    path = tmp_path / "tiny_yardstick.jsonl"
    write(path, [old, new])
    assert tables.yardstick(tmp_path).splitlines()[-1] == "| mrp_spec K=4 | 2.50 (1.40x) | 2.50 (1.40x, 1.31-1.52) |"
    write(path, [old, new, alone])
    assert tables.ratios(tmp_path).splitlines()[2:] == [
        "| mrp_spec K=4 | batch 8 over batch 1 | 1.00x, 0.99-1.01 |",
        "| mrp_spec K=8 | over self_spec | 1.30x, 1.20-1.40 |",
    ]


def test_ratios_leave_out_modes_that_lose_nothing_in_any_family(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    for mode, ratio, interval in (("self_spec K=4", 1.0, [1.0, 1.0]), ("released K=4", 0.57, [0.56, 0.58])):
        for family in ("math", "code"):
            line = {"family": family, "batch_size": 8, "mode": mode, "tokens_per_forward": 2.0}
            lines.append({**line, "over_batch_1": ratio, "over_batch_1_95": interval})
    path = tmp_path / "tiny_yardstick.jsonl"
    write(path, lines)
    assert tables.ratios(tmp_path).splitlines()[2:] == [
        "| released K=4 | batch 8 over batch 1 | 0.57x, 0.56-0.58 | 0.57x, 0.56-0.58 |"
    ]
    lines[1] |= {"over_batch_1": 0.99, "over_batch_1_95": [0.98, 1.0]}
    write(path, lines)
    assert tables.ratios(tmp_path).splitlines()[2] == (
        "| self_spec K=4 | batch 8 over batch 1 | 1.00x, 1.00-1.00 | 0.99x, 0.98-1.00 |"
    )


def test_the_short_tables_are_parts_of_the_long_ones(tmp_path: Path) -> None:
    modes = ("static", "released K=8", "self_spec K=8 chain", "self_spec K=8", "mrp_spec K=4", "mrp_spec K=8")
    lines = [{"family": "math", "batch_size": 1, "mode": mode, "tokens_per_forward": 1 + n} for n, mode in enumerate(modes)]
    write(tmp_path / "tiny_yardstick.jsonl", lines)
    assert tables.drafting(tmp_path).splitlines()[2:] == [
        "| released K=8 | 2.00 |",
        "| self_spec K=8 | 4.00 |",
        "| mrp_spec K=8 | 6.00 |",
    ]
    settings: list[dict[str, Any]] = [{"decoding": "static"}, {"decoding": "mrp_spec", "num_draft_states": 4}]
    settings += [{"decoding": mode, "confidence_threshold": tau} for mode in ("dynamic", "mrp_remask") for tau in (0.5, 0.9)]
    for family, accuracy in (("math", 90.0), ("code", 80.0)):
        measured = {"accuracy": accuracy, "accuracy_95": [accuracy - 2, accuracy + 1.5]}
        measured |= {"tokens_per_forward": 1.25, "tokens_per_forward_95": [1.2, 1.3]}
        path = tmp_path / f"tiny_heldout_{family}.jsonl"
        write(path, [{"family": family, **one, **measured} for one in settings])
    assert tables.eager(tmp_path).splitlines()[2:] == [
        f"| {mode} | 90.0 (88.0-91.5) | 1.25 (1.20-1.30) | 80.0 (78.0-81.5) | 1.25 (1.20-1.30) |"
        for mode in ("static", "dynamic tau=0.5", "mrp_remask tau=0.5")
    ]


OTHER = {"backbone": "0123456789ab", "head": "ba9876543210"}
ALONE = {"family": "math", "batch_size": 1, "mode": "self_spec K=8", "tokens_per_forward": 2.0, "head_per_token": 0.0}
DRAFTED = {**ALONE, "mode": "mrp_spec K=8", "tokens_per_forward": 3.0, "head_per_token": 0.3}


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
    path = tmp_path / "tiny_yardstick.jsonl"
    write(path, lines, **{part: OTHER[part]}, options=options)
    told = f"{path}: measured with the {part} {OTHER[part]}, and that of sdar-tiny-mrp is {embedded_weights()[part]}: "
    told += f"measure again with `python -m benchmarks.yardstick --count 200 --batch-size 1 8 > {path}`"
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        tables.drafting(tmp_path)


def test_what_no_head_took_part_in_holds_for_another_head(tmp_path: Path) -> None:
    write(tmp_path / "tiny_yardstick.jsonl", [ALONE], head=OTHER["head"])
    assert tables.drafting(tmp_path).splitlines()[2:] == ["| self_spec K=8 | 2.00 |"]


def test_lines_that_do_not_say_what_they_measured_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny_yardstick.jsonl"
    for first in ("", '{"benchmark": "yardstick", "options": {}}\n'):
        path.write_text(first + json.dumps(ALONE))
        with pytest.raises(ValueError, match="measured with the backbone unknown, and that of sdar-tiny-mrp is"):
            tables.drafting(tmp_path)


def test_a_file_that_was_continued_shows_what_was_measured_again(tmp_path: Path) -> None:
    """A line belongs to the nearest header before it; what needs no head was not measured again."""
    path = tmp_path / "tiny_yardstick.jsonl"
    write(path, [ALONE, DRAFTED], head=OTHER["head"])
    before = path.read_text()
    write(path, [{**DRAFTED, "tokens_per_forward": 4.0}])
    path.write_text(before + path.read_text())
    assert tables.drafting(tmp_path).splitlines()[2:] == ["| self_spec K=8 | 2.00 |", "| mrp_spec K=8 | 4.00 |"]


def test_every_committed_result_says_what_it_measured() -> None:
    """Also those that no table shows; training logs are none."""
    for path in sorted(tables.RESULTS.glob("*.jsonl")):
        if not path.stem.endswith("_log"):
            assert read_lines(path), path
            header = json.loads(path.read_text().splitlines()[0])
            assert header["commit"], path
