"""Files of results: complete lines only, and nobody else's file is touched."""

import json
from pathlib import Path

import pytest
from mrp_trainer.results import ResultsFile


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


def test_tuples_are_found_as_json_has_them(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path / "out.jsonl", "asked")
    results.add({"asked": {"steps": (1, 2)}})
    assert ResultsFile(tmp_path / "out.jsonl", "asked").find(asked={"steps": (1, 2)}) is not None


@pytest.mark.parametrize(
    ("held", "line"), [('{"asked": 1}\n{"prompt": "x"}\n', 2), ("# notes\n", 1), ("[1]\n", 1), ("notes without an end", 1)]
)
def test_other_files_are_left_alone(tmp_path: Path, held: str, line: int) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(held)
    with pytest.raises(ValueError, match=f"line {line}: no result of this command"):
        ResultsFile(path, "asked")
    assert path.read_text() == held
