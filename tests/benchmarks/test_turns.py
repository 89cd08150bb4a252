"""Ways that take turns: their order, ratios, texts and lines."""

import json
from itertools import product
from typing import Any

import pytest

from benchmarks import host, turns
from benchmarks.common import embedded_weights
from benchmarks.server import Measured
from benchmarks.serving import compared


def test_another_way_begins_each_time() -> None:
    called: list[tuple[int, str]] = []

    def way(name: str) -> Any:
        return lambda turn: called.append((turn, name)) or float(turn)

    assert turns.take_turns({"a": way("a"), "b": way("b")}, 3) == {"a": [0, 1, 2], "b": [0, 1, 2]}
    assert called == [
        (-1, "b"),
        (-1, "a"),
        (0, "a"),
        (0, "b"),
        (1, "b"),
        (1, "a"),
        (2, "a"),
        (2, "b"),
    ]


def test_drafts_over_their_target(capsys: pytest.CaptureFixture[str]) -> None:
    """With the schedule of "auto" alone a row takes few forwards more: one that ends a block scores
    the next state later."""
    ways = ("alone", "rests", "3", "auto")
    turns.main(
        ["--batches", "2", "--targets", "static", "dynamic", "--states", *ways, "--count", "4"]
    )
    header, *found = map(json.loads, capsys.readouterr().out.splitlines())
    assert {name: header[name] for name in ("backbone", "head")} == embedded_weights()
    assert [(line["target"], line["states"]) for line in found] == [
        *product(("static", "dynamic"), ways)
    ]
    assert all(line["texts_equal"] for line in found)
    alone, rests, drafted, _ = found[:4]
    assert drafted["forwards"] < alone["forwards"] <= rests["forwards"] <= 1.2 * alone["forwards"]


def test_the_host_alone_decides_as_it_did_with_the_networks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It asserts the same texts."""
    host.main(["--batches", "3", "--states", "1", "3", "--blocks", "4", "--repeats", "1"])
    _, *found = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["states"] for line in found] == [1, 3]
    assert all(min(line["microseconds"].values()) > 0 for line in found)


def test_turns_of_a_served_model_are_counted_together() -> None:
    """30 tokens over 12 forwards, against 30 over 30; of texts that differ the first turn's
    count."""

    def served(forwards: int, token: int) -> Measured:
        cost = {"meta_info": {"mrp": {"accepted": 1, "drafted": 4}}}
        return Measured(
            [{"output_ids": ids, **cost} for ids in ([5] * 6, [5] * 2, [token] * 2)], 1.0, forwards
        )

    counts = {
        "tokens_per_forward": [1.0, 2.5],
        "ratio": 2.5,
        "acceptance": 0.25,
        "texts_that_differ": 1,
        "texts": 3,
    }
    assert compared([served(10, 5)] * 3, [served(5, 7), served(4, 5), served(3, 5)]) == counts
