"""Files of results: lines of other weights than the embedded ones are refused."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mrp_trainer.evaluate import provenance
from mrp_trainer.evaluate.provenance import deciding
from mrp_trainer.evaluate.results import ResultsFile

import modeling_mrp
from benchmarks import tables
from benchmarks.common import embedded_weights, header, read_lines


def write(path: Path, lines: list[dict[str, Any]], **said: Any) -> None:
    """A file of results of the embedded weights, or of what the header says."""
    first = {"benchmark": "sweep", **embedded_weights(), **said}
    path.write_text("".join(json.dumps(line) + "\n" for line in (first, *lines)))


OTHER = {"backbone": "0123456789ab", "head": "ba9876543210"}
ALONE = {"family": "math", "mode": "self_spec", "tokens_per_forward": 2.0, "head_per_token": 0.0}
DRAFTED = {**ALONE, "mode": "mrp_spec", "tokens_per_forward": 3.0, "head_per_token": 0.3}


@pytest.mark.parametrize(("part", "lines"), [("backbone", [ALONE]), ("head", [ALONE, DRAFTED])])
def test_lines_of_other_weights_are_refused(tmp_path: Path, part: str, lines: list[dict[str, Any]]) -> None:
    """What no head took part in holds for another head; lines that do not say what they measured are refused, too."""
    options = {"count": 200, "batch_size": [1, 8], "before": None}
    path = tmp_path / "tiny_sweep.jsonl"
    write(path, lines, **{part: OTHER[part]}, options=options)
    told = f"{path}: measured with the {part} {OTHER[part]}, and that of sdar-tiny-mrp is {embedded_weights()[part]}: "
    told += f"measure again with `python -m benchmarks.sweep --count 200 --batch-size 1 8 > {path}`"
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        read_lines(path)


def test_a_file_that_was_continued_shows_what_was_measured_again(tmp_path: Path) -> None:
    """A line belongs to the nearest header before it; what needs no head was not measured again."""
    path = tmp_path / "tiny_sweep.jsonl"
    write(path, [ALONE, DRAFTED], head=OTHER["head"])
    before = path.read_text()
    write(path, [{**DRAFTED, "tokens_per_forward": 4.0}])
    path.write_text(before + path.read_text())
    assert read_lines(path) == [ALONE, {**DRAFTED, "tokens_per_forward": 4.0}]


def test_lines_of_code_that_decided_otherwise_are_refused(tmp_path: Path) -> None:
    """Also those of no head; those that do not say their code are read, and where today's was measured behind it, that."""
    path = tmp_path / "tiny_sweep.jsonl"
    write(path, [ALONE], deciding="0123456789ab", options={"count": 3})
    told = f"measured with the deciding code 0123456789ab, and today's is {deciding()}: measure again with `python -m benchm"
    with pytest.raises(ValueError, match=re.escape(told)):
        read_lines(path)
    before = path.read_text()
    write(path, [DRAFTED], deciding=deciding())
    path.write_text(before + path.read_text())
    assert read_lines(path) == [DRAFTED]
    write(path, [ALONE])
    assert read_lines(path) == [ALONE]


def test_the_digest_of_what_decides(tmp_path: Path) -> None:
    """A rule's code changes it; comments, docstrings and other modules do not."""
    copy = Path(shutil.copytree(Path(modeling_mrp.__file__).parent, tmp_path / "a"))
    reveal = copy / "rules" / "reveal.py"
    reveal.write_text('"""Rules."""\n# of reveals\n' + reveal.read_text().split('"""', 2)[2])
    (copy / "generate" / "budget.py").write_text("")
    assert deciding(copy) == deciding()
    other = Path(shutil.copytree(copy, tmp_path / "b"))
    (other / "rules" / "accept.py").write_text((copy / "rules" / "accept.py").read_text() + "1 + 1\n")
    assert deciding(other) != deciding()


def test_nothing_is_written_beside_the_results_while_the_code_has_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "commit", lambda: "0123abc with changes")
    path = tmp_path / "benchmarks" / "results" / "new.jsonl"
    told = f"{path}: the code has changes that no commit holds: commit them first, or name another file"
    with pytest.raises(ValueError, match=re.escape(told)):
        header("soak", SimpleNamespace(output=path))
    path.parent.mkdir(parents=True)
    (printed := tmp_path / "1").symlink_to(path)  # as of a shell's redirection
    with pytest.raises(ValueError, match="the code has changes"):
        header("host", SimpleNamespace(), printed=printed)
    with pytest.raises(ValueError, match=re.escape(told)):
        ResultsFile(path, "asked").begin(provenance.header("mrp evaluate", SimpleNamespace()))
    assert header("soak", SimpleNamespace(output=tmp_path / "new.jsonl"))["deciding"] == deciding()
    monkeypatch.setattr(provenance, "commit", lambda: "0123abc")
    assert header("soak", SimpleNamespace(output=path))["commit"] == "0123abc"


def test_every_committed_result_says_what_it_measured() -> None:
    """Also those that no table shows; training logs are none."""
    for path in sorted(tables.RESULTS.glob("*.jsonl")):
        if not path.stem.endswith("_log"):
            assert read_lines(path, embedded=path.stem != "tiny_lists"), path
            first = json.loads(path.read_text().splitlines()[0])
            assert first["commit"], path
            assert "deciding" not in first or "with changes" not in first["commit"], path
