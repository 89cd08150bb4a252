"""The soak: what it compares, what it says of it, and that it finds what differs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import soak


@pytest.fixture(autouse=True)
def _threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    output = folder / "soak.jsonl"
    code = soak.main(["--output", str(output), "--minutes", "2", *arguments])
    header, *lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert header["benchmark"] == "soak"
    return code, lines


def test_a_few_cases(tmp_path: Path) -> None:
    code, (counts,) = run(tmp_path, "--cases", "8", "--seed", "3")
    assert (code, counts["mismatches"], counts["cases"], counts["seed"]) == (0, 0, 8, 3)
    assert counts["tokens"] == sum(counts["tokens_by_kind"].values()) > 1000
    assert counts["tokens_by_kind"].keys() == {"mode", "alone", "reference", "reuse"}
    assert counts["calls"] >= 8 * 3
    assert all(100 < megabytes < 16_000 for megabytes in counts["resident_mb"])


def test_it_stops_in_time(tmp_path: Path) -> None:
    _, (counts,) = run(tmp_path, "--minutes", "0")
    assert (counts["cases"], counts["tokens"]) == (0, 0)


def test_a_difference_is_found_and_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = soak.reference_decode

    def lies(*arguments: Any, **options: Any) -> Any:
        told = decode(*arguments, **options)
        told.tokens[0] += 1
        return told

    monkeypatch.setattr(soak, "reference_decode", lies)
    code, lines = run(tmp_path, "--cases", "8", "--seed", "3")
    *found, counts = lines
    assert (code, counts["mismatches"]) == (1, len(found))
    assert {line["mismatch"] for line in found} == {"reference"}
    again, lines = run(tmp_path, "--cases", "1", "--first", str(found[0]["case"]), "--seed", "3")
    assert (again, lines[:-1]) == (1, found[:1])
