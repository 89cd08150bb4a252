"""The soak: what it compares, what it says of it, and that it finds what differs."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import soak
from tests.support import random_cases


def run(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    output = folder / "soak.jsonl"
    code = soak.main(
        ["--output", str(output), "--minutes", "2", "--rows", "1", "3", "--seed", "3", *arguments]
    )
    return code, [json.loads(line) for line in output.read_text().splitlines()[1:]]


def test_a_difference_is_found_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, (counts,) = run(tmp_path, "--cases", "8")
    assert (code, counts["mismatches"], counts["cases"], counts["seed"]) == (0, 0, 8, 3)
    assert counts["tokens"] == sum(counts["tokens_by_kind"].values()) > 300
    assert counts["tokens_by_kind"].keys() == {"mode", "alone", "reference", "reuse"}
    decode = random_cases.reference_decode

    def lies(*arguments: Any, **options: Any) -> Any:
        told = decode(*arguments, **options)
        told.tokens[0] += 1
        return told

    monkeypatch.setattr(random_cases, "reference_decode", lies)
    code, (*found, counts) = run(tmp_path, "--cases", "2")
    assert (code, counts["mismatches"]) == (1, len(found))
    assert {line["mismatch"] for line in found} == {"reference"}
    again, lines = run(tmp_path, "--cases", "1", "--first", str(found[0]["case"]))
    assert (again, lines[:-1]) == (1, found[:1])
