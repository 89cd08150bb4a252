"""The frontier's settings, lines, table and figure."""

import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from mrp_trainer.data.tasks import problems
from mrp_trainer.evaluate.results import ResultsFile

from benchmarks import frontier, plots, tables
from benchmarks.frontier import (
    JUDGED,
    Setting,
    lines,
    of_target,
    on_frontier,
    problems_of,
    references,
    rival_settings,
    rivals,
    rule_settings,
    sampled_settings,
    setting_name,
    settings,
)
from benchmarks.measure import Measured
from modeling_mrp.generate.options import MRPGenerationConfig


@pytest.mark.parametrize(
    ("made", "against", "some"),
    [
        (
            settings,
            references,
            {"mrp_remask reread tau=0.5", "mrp_direct steps=2", "psd K=8 tau=0.7"},
        ),
        (
            settings,
            references,
            {
                "draft_graph of dynamic K=4 tau=0.9",
                "mrp_spec of sequential K=8 list=16 lookup",
            },
        ),
        (
            rival_settings,
            rivals,
            {"psd dynamic K=8 tau=0.9", "mrp_spec of static K=8 list=16 passes=2"},
        ),
        (
            sampled_settings,
            of_target,
            {"static T=1.0", "mrp_spec of dynamic K=8 tau=0.9 list=64 T=1.0"},
        ),
        (
            rule_settings,
            None,
            {
                "klass",
                "cad tau=0.8",
                "mrp_spec of eb_sampler K=4",
                "mrp_spec of dynamic K=8 tau=0.9",
            },
        ),
    ],
)
def test_every_setting_has_a_name_of_its_own_and_is_held_against_others(
    made: Any, against: Any, some: set[str]
) -> None:
    """Drafts against their targets and their rivals at the same K; `generate` takes all but what it
    does not have."""
    measured = made()
    names = [setting_name(setting) for setting in measured]
    assert len(set(names)) == len(names)
    assert some < set(names)
    for setting in measured:
        if setting["decoding"] not in (frontier.GRAPH, frontier.PSD, frontier.RELEASED):
            MRPGenerationConfig(**setting).check(16, True)
        others = [setting_name(other) for other in against(setting).values()] if against else []
        assert set(others) < set(names)
        assert bool(others) == ("target" in setting) or against is None


def test_fresh_problems_are_none_of_the_tables() -> None:
    used = {problem.prompt for problem in problems("code", "heldout", 500)}
    asked = problems_of("code", "heldout", 200, 36)
    assert len(asked) == 200
    assert not used & {problem.prompt for problem in asked}
    assert problems_of("code", "heldout", 3, 0) == problems("code", "heldout", 3)


def test_what_is_on_the_frontier() -> None:
    """B is as accurate as A and faster, C less accurate than B and slower, D slower and more
    accurate; E is as good as B."""
    points = {
        "A": (90.0, 1.0),
        "B": (90.0, 2.0),
        "C": (80.0, 1.5),
        "D": (95.0, 1.0),
        "E": (90.0, 2.0),
    }
    every = [
        {"accuracy": accuracy, "tokens_per_unit": speed} for accuracy, speed in points.values()
    ]
    assert [name for name, line in zip(points, every, strict=True) if on_frontier(line, every)] == [
        "B",
        "D",
        "E",
    ]


class Stub:
    """Makes, of four problems, two tokens each in a forward; notes what it was asked. A text of
    `mrp_spec` is another."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def decoded(self, setting: Setting, asked: Any) -> Measured:
        self.asked.append(setting_name(setting))
        ids = [[1, 2], [3, 4], [5, 6], [7, 8 + (setting["decoding"] == "mrp_spec")]]
        return Measured(ids, [1] * 4, [0] * 4, [1] * 4, [True, True, True, False])


def test_lines_of_settings(tmp_path: Path) -> None:
    """Over what each is held against, which is decoded for it; a setting that has a line is not
    measured again."""
    asked, results, identity = (
        problems("math", "heldout", 4),
        ResultsFile(tmp_path / "lines.jsonl", "asked"),
        {"problems": 4},
    )
    results.begin({"benchmark": "frontier", "backbone": "a", "head": "b"})
    names = ("static", "self_spec of static K=3", "mrp_spec of static K=8 list=16")
    wanted, stub = [setting for setting in settings() if setting_name(setting) in names], Stub()
    made = {setting_name(line): line for line in lines(stub, asked, wanted, results, identity)}
    first, second, other = (made[name] for name in names)
    assert (first["accuracy"], first["tokens_per_forward"], first["tokens_per_forward_95"]) == (
        75.0,
        2.0,
        [2.0, 2.0],
    )
    assert "texts_that_differ" not in first
    assert second["over_target"] == second["over_released"] == 1
    assert (second["texts_that_differ"], other["texts_that_differ"]) == (0, 1)
    assert {*names, "released of static K=3", "self_spec of static K=8"} < {*stub.asked}
    assert len({*stub.asked}) == len(stub.asked), "each is decoded once"
    results.add(first)
    stub.asked.clear()
    assert list(lines(stub, asked, [{"decoding": "static"}], results, identity)) == []
    assert stub.asked == []


def test_ratios_are_paired() -> None:
    """Twice as fast on every problem, however hard: the ratio is 2 in every resample; other
    problems cannot be paired."""
    texts, forwards = [[1] * length for length in (10, 40, 25, 60)], [5, 30, 9, 41]
    fast, slow = (
        Measured(texts, forwards, [0] * 4, forwards),
        Measured(texts, [2 * count for count in forwards], [0] * 4, forwards),
    )
    assert fast.over(slow=slow) == {"over_slow": 2.0, "over_slow_95": [2.0, 2.0]}
    assert fast.speed.low < 0.95 * fast.speed.value
    with pytest.raises(ValueError, match="same shape"):
        fast.over(other=Measured(texts[:1], [1], [0], [1]))


def test_the_figure_of_the_committed_lines(tmp_path: Path) -> None:
    """A panel a family; every setting has a place in it."""
    for family in JUDGED:
        shutil.copy(tables.RESULTS / f"tiny_frontier_{family}.jsonl", tmp_path)
    plots.main(["--results", str(tmp_path)])
    drawn = ElementTree.fromstring((tmp_path / "frontier.svg").read_text())
    words = {"".join(one.itertext()).strip() for one in drawn.iter() if "text" in one.tag}
    assert words >= {*JUDGED, "dynamic", "mrp_spec of dynamic", "problems solved, %"}
    assert "tokens per unit, 4B on one H200 at batch 1" in words
