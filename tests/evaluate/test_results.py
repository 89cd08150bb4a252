"""Files of results: complete lines only, nobody else's file is touched, and lines of other weights or code are not taken."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, make_model
from mrp_trainer.evaluate import provenance
from mrp_trainer.evaluate.provenance import deciding, digests
from mrp_trainer.evaluate.results import ResultsFile

import modeling_mrp
from benchmarks import tables
from benchmarks.common import embedded_weights, header, read_lines


def test_a_cut_line_is_removed_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    results = ResultsFile(path, "asked")
    results.add({"asked": 1, "tau": 0.5, "value": 3})
    results.add({"asked": 1, "tau": 0.7, "value": 4})
    first, second = path.read_bytes().splitlines(keepends=True)
    for length in range(1, len(second)):
        path.write_bytes(first + second[:length])
        again = ResultsFile(path, "asked")
        assert [line["value"] for line in again.lines] == [3]
        assert path.read_bytes() == first
    again.add({"asked": 2, "tau": 0.7, "value": 5})
    assert [json.loads(line)["value"] for line in path.read_text().splitlines()] == [3, 5]
    assert (again.find(asked=1, tau=0.5), again.find(asked=1, tau=0.7)) == (again.lines[0], None)


@pytest.mark.parametrize(("held", "line"), [('{"asked": 1}\n{"prompt": "x"}\n', 2), ("[1]\n", 1), ("notes without an end", 1)])
def test_other_files_are_left_alone(tmp_path: Path, held: str, line: int) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(held)
    with pytest.raises(ValueError, match=f"line {line}: no result of this command"):
        ResultsFile(path, "asked")
    assert path.read_text() == held


ALONE = {"asked": 1, "mode": "static", "head_per_token": 0.0}
DRAFTED = {"asked": 1, "mode": "mrp_spec", "head_per_token": 0.3}


@pytest.mark.parametrize(
    ("part", "taken", "whose"),
    [("backbone", [], "that of sdar-tiny-mrp"), ("head", [ALONE], "that of sdar-tiny-mrp"), ("deciding", [], "today's")],
)
def test_lines_of_other_weights_or_code_are_measured_again(tmp_path: Path, part: str, taken: list[Any], whose: str) -> None:
    """But for modes without a head where only the head is another; tables refuse them until that is done. A line belongs to the
    nearest header before it."""
    path, today = tmp_path / "tiny_sweep.jsonl", {**embedded_weights(), "deciding": deciding()}
    old = {"benchmark": "sweep", **today, part: "0123456789ab", "options": {"count": 200, "batch_size": [1, 8], "before": None}}
    path.write_text("".join(json.dumps(line) + "\n" for line in (old, ALONE, DRAFTED)))
    what = "deciding code" if part == "deciding" else part
    told = f"{path}: measured with the {what} 0123456789ab, and {whose} is {today[part]}: "
    told += f"measure again with `python -m benchmarks.sweep --count 200 --batch-size 1 8 > {path}`"
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        read_lines(path)
    results = ResultsFile(path, "asked")
    results.begin({"benchmark": "sweep", **today})
    assert [line for line in (ALONE, DRAFTED) if results.find(mode=line["mode"])] == taken
    results.add(DRAFTED)
    results.add(DRAFTED)
    assert results.find(mode="mrp_spec") == DRAFTED
    assert [json.loads(line) for line in path.read_text().splitlines()][3:] == [results.header, DRAFTED, DRAFTED]
    assert read_lines(path) == [*taken, DRAFTED, DRAFTED]


def test_a_digest_changes_with_its_part_alone() -> None:
    model = make_model().float()
    before = digests(model)
    assert digests(model.to(torch.float64)) == before, "the same weights, computing in float64"
    for part, tensor in (("head", model.mrp_head.norm.weight), ("backbone", model.lm_head.weight)):
        with torch.no_grad():
            tensor.view(-1)[0] += 1e-3
        after = digests(model)
        assert {name for name in after if after[name] != before[name]} == {part}
        before = after
    model.detach_head()
    assert digests(model) == {**before, "head": None}


def test_the_digest_of_what_decides(tmp_path: Path) -> None:
    """A rule's code changes it; comments, docstrings and other modules do not."""
    copy = Path(shutil.copytree(Path(modeling_mrp.__file__).parent, tmp_path / "a"))
    reveal = copy / "rules" / "reveal.py"
    reveal.write_text('"""Rules."""\n# of reveals\n' + reveal.read_text().split('"""', 2)[2])
    (copy / "generate" / "budget.py").write_text("")
    assert deciding(copy) == deciding()
    other = Path(shutil.copytree(copy, tmp_path / "b"))
    (other / "rules" / "draft.py").write_text((copy / "rules" / "draft.py").read_text() + "1 + 1\n")
    assert deciding(other) != deciding()


def test_a_header_says_commit_weights_and_options() -> None:
    model = make_model()
    said = provenance.header("sweep", SimpleNamespace(model=str(ROOT / "hub_configs"), count=3), model)
    assert said.items() >= digests(model).items()
    assert said["options"] == {"model": "hub_configs", "count": 3}
    assert provenance.header("compiled", SimpleNamespace())["backbone"] is None
    checkout = (ROOT / ".git").exists()
    assert re.fullmatch(r"[0-9a-f]{7,}( with changes)?", said["commit"]) if checkout else said["commit"] is None


def test_nothing_is_written_beside_the_results_while_the_code_has_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "commit", lambda: "0123abc with changes")
    path = tmp_path / "benchmarks" / "results" / "new.jsonl"
    path.parent.mkdir(parents=True)
    (printed := tmp_path / "1").symlink_to(path)  # as of a shell's redirection
    for write_there in (
        lambda: header("soak", SimpleNamespace(output=path)),
        lambda: header("host", SimpleNamespace(), printed=printed),
        lambda: ResultsFile(path, "asked").begin(provenance.header("mrp evaluate", SimpleNamespace())),
    ):
        with pytest.raises(ValueError, match="the code has changes that no commit holds: commit them first, or name another"):
            write_there()
    assert header("soak", SimpleNamespace(output=tmp_path / "new.jsonl"))["deciding"] == deciding()
    monkeypatch.setattr(provenance, "commit", lambda: "0123abc")
    assert header("soak", SimpleNamespace(output=path))["commit"] == "0123abc"


def test_every_committed_result_says_what_it_measured() -> None:
    """Also those that no table shows; training logs are none."""
    for path in sorted(tables.RESULTS.glob("*.jsonl")):
        if not path.stem.endswith("_log"):
            assert read_lines(path, embedded=path.stem not in ("tiny_lists", "long")), path
            first = json.loads(path.read_text().splitlines()[0])
            assert first["commit"], path
            assert "deciding" not in first or "with changes" not in first["commit"], path
