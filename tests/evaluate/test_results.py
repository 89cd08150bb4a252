"""Files of results: complete lines only, and nobody else's file is touched."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mrp_trainer.evaluate.provenance import digests, header
from mrp_trainer.evaluate.results import ResultsFile
from torch import nn


def test_a_cut_line_is_removed_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    results = ResultsFile(path, "asked")
    results.add({"asked": 1, "tau": 0.5, "value": 3})
    results.add({"asked": 1, "tau": 0.7, "value": 4})
    whole = path.read_bytes()
    for length in range(1, len(whole.split(b"\n")[1])):
        path.write_bytes(whole[: whole.index(b"\n") + 1 + length])
        again = ResultsFile(path, "asked")
        assert [line["value"] for line in again.lines] == [3]
        assert path.read_bytes() == whole[: whole.index(b"\n") + 1]
    again.add({"asked": 2, "tau": 0.7, "value": 5})
    assert [json.loads(line)["value"] for line in path.read_text().splitlines()] == [3, 5]
    assert again.find(asked=1, tau=0.5) == {"asked": 1, "tau": 0.5, "value": 3}
    assert again.find(asked=1, tau=0.7) is None
    assert again.find(asked=2) == again.lines[-1]


@pytest.mark.parametrize(
    ("held", "line"), [('{"asked": 1}\n{"prompt": "x"}\n', 2), ("# notes\n", 1), ("[1]\n", 1), ("notes without an end", 1)]
)
def test_other_files_are_left_alone(tmp_path: Path, held: str, line: int) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(held)
    with pytest.raises(ValueError, match=f"line {line}: no result of this command"):
        ResultsFile(path, "asked")
    assert path.read_text() == held


OLD = {"benchmark": "b", "backbone": "1", "head": "2"}


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        ({"backbone": "1", "head": "2"}, ["static", "mrp_spec"]),
        ({"backbone": "1", "head": "3"}, ["static"]),
        ({"backbone": "1", "head": None}, ["static"]),
        ({"backbone": "4", "head": "2"}, []),
    ],
)
def test_what_is_there_is_measured_again_with_other_weights(tmp_path: Path, weights: dict[str, str], found: list[str]) -> None:
    """Modes without a head are not, where only the head is another; the new lines have a header of their own."""
    path = tmp_path / "out.jsonl"
    lines = [{"asked": 1, "mode": "static", "head_per_token": 0.0}, {"asked": 1, "mode": "mrp_spec", "head_per_token": 0.3}]
    first = ResultsFile(path, "asked")
    first.begin(OLD)
    first.add(*lines)
    results = ResultsFile(path, "asked")
    results.begin({**OLD, **weights})
    assert [line["mode"] for line in lines if results.find(mode=line["mode"])] == found
    again = [line for line in lines if line["mode"] not in found]
    for line in again:
        results.add(line)
    assert all(results.find(mode=line["mode"]) == line for line in lines)
    held = [json.loads(line) for line in path.read_text().splitlines()]
    assert held == [OLD, *lines, *([{**OLD, **weights}] if again else []), *again]


class Parts(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = nn.Linear(2, 2, dtype=dtype)
        self.mrp_head = nn.Linear(2, 1, dtype=dtype)


def test_a_digest_changes_with_its_part_alone() -> None:
    torch.manual_seed(0)
    model = Parts()
    before = digests(model)
    assert digests(model.to(torch.float64)) == before, "the same weights, computing in float64"
    changes = (
        ("head", model.mrp_head.bias),
        ("backbone", model.model.weight),
    )
    for part, tensor in changes:
        with torch.no_grad():
            tensor.view(-1)[0] += 1e-3
        after = digests(model)
        assert {name for name in after if after[name] != before[name]} == {part}
        before = after
    model.model.weight = nn.Parameter(model.model.weight.reshape(1, 4))
    assert digests(model)["backbone"] != before["backbone"], "of another shape"
    del model.mrp_head
    assert digests(model)["head"] is None


def test_a_header_says_commit_and_weights() -> None:
    torch.manual_seed(0)
    model = Parts()
    said = header("sweep", SimpleNamespace(model=str(Path(__file__).parents[2] / "hub_configs"), count=3), model)
    assert {part: said[part] for part in ("backbone", "head")} == digests(model)
    assert said["options"] == {"model": "hub_configs", "count": 3}
    assert {part: header("compiled", SimpleNamespace())[part] for part in ("backbone", "head")} == dict.fromkeys(digests(model))
    checkout = (Path(__file__).parents[2] / ".git").exists()
    assert re.fullmatch(r"[0-9a-f]{7,}( with changes)?", said["commit"]) if checkout else said["commit"] is None
