"""Ways that take turns: their order, ratios, texts and lines."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks import host, tables, turns
from benchmarks.common import embedded_weights
from benchmarks.server import Measured
from benchmarks.serving import compared


def test_another_way_begins_each_time() -> None:
    called: list[tuple[int, str]] = []

    def way(name: str) -> Any:
        return lambda turn: called.append((turn, name)) or float(turn)

    assert turns.take_turns({"a": way("a"), "b": way("b")}, 3) == {"a": [0, 1, 2], "b": [0, 1, 2]}
    assert called == [(-1, "b"), (-1, "a"), (0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_drafts_over_their_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the schedule of "auto" alone a row takes few forwards more: one that ends a block scores the next state later."""
    ways = ("alone", "rests", "3", "auto")
    turns.main(["--batches", "2", "--targets", "static", "dynamic", "--states", *ways, "--count", "4"])
    header, *found = lines(capsys)
    assert header["benchmark"] == "turns"
    assert {name: header[name] for name in ("backbone", "head")} == embedded_weights()
    assert [(line["target"], line["states"]) for line in found] == [*product(("static", "dynamic"), ways)]
    assert all(line["texts_equal"] for line in found)
    alone, rests, drafted, _ = found[:4]
    assert drafted["forwards"] < alone["forwards"] <= rests["forwards"] <= 1.2 * alone["forwards"]
    assert "over_first" not in alone
    assert drafted["over_first"]["range"][0] > 0
    (tmp_path / "turns.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (header, *found)))
    head, _, *rows = tables.turns(tmp_path).splitlines()
    assert head == "| rows | K | `static` | `dynamic` |"
    assert [row.split("|")[1:3] for row in rows] == [[" 2 ", f" {way} "] for way in ways[1:]]


def test_the_host_alone_decides_as_it_did_with_the_networks(capsys: pytest.CaptureFixture[str]) -> None:
    """It asserts the same texts."""
    host.main(["--batches", "3", "--states", "1", "3", "--blocks", "4", "--repeats", "1"])
    _, *found = lines(capsys)
    assert [line["states"] for line in found] == [1, 3]
    assert all(min(line["microseconds"].values()) > 0 for line in found)


def served(lengths: list[int], forwards: int, token: int = 5) -> Measured:
    """A turn whose answers have so many tokens."""
    cost = {"meta_info": {"mrp": {"accepted": 1, "drafted": 4}}}
    return Measured([{"output_ids": [token] * length, **cost} for length in lengths], 1.0, forwards)


def test_turns_of_a_served_model_are_counted_together() -> None:
    """30 tokens over 12 forwards, against 30 over 30."""
    stock, mrp = [served([6, 4], 10)] * 3, [served([6, 4], forwards) for forwards in (5, 4, 3)]
    counts = {"tokens_per_forward": [1.0, 2.5], "ratio": 2.5, "acceptance": 0.25, "texts_that_differ": 0, "texts": 2}
    assert compared(stock, mrp) == counts
    assert compared([served([8], 8)], [served([4], 2, token=7)])["texts_that_differ"] == 1
