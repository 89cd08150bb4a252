"""The frontier's settings, lines, table and figure."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from mrp_trainer.data.tasks import problems
from mrp_trainer.evaluate import cost
from mrp_trainer.evaluate.results import ResultsFile

from benchmarks import frontier, plots, tables
from benchmarks.common import embedded_weights
from benchmarks.frontier import Setting, lines, on_frontier, references, rule_of, rule_settings, setting_name, settings
from benchmarks.measure import Measured, ratio
from modeling_mrp.generate.option_table import TARGETS
from modeling_mrp.generate.options import MRPGenerationConfig
from modeling_mrp.rules.reveal import Dynamic, EntropyBound, Sequential, Static, logit


def test_every_setting_has_a_name_of_its_own_and_generate_takes_it() -> None:
    names = [setting_name(setting) for setting in settings()]
    assert len(set(names)) == len(names)
    assert {"mrp_remask reread tau=0.5", "draft_graph of dynamic K=4 tau=0.9", "entropy_bound bound=0.7"} < set(names)
    assert {"mrp_direct steps=2", "psd K=8 tau=0.7", "mrp_spec of entropy_bound K=3 bound=0.35"} < set(names)
    for setting in settings():
        decoding = setting["decoding"]
        if decoding not in (frontier.GRAPH, frontier.PSD, frontier.RELEASED):
            MRPGenerationConfig(**setting).check(16, True)
        others = {name: setting_name(other) for name, other in references(setting).items()}
        assert set(others.values()) < set(names)
        assert bool(others) == (decoding in (*frontier.DRAFTERS, frontier.RELEASED))


def test_what_a_draft_is_compared_with() -> None:
    """Its target, and at the same K what drafts without a head, and the released reference, which reproduces `static` alone."""
    named = {setting_name(setting): setting for setting in settings("source")}
    assert "psd K=8 tau=0.9" not in named
    compared = {
        name: {other: setting_name(one) for other, one in references(setting).items()} for name, setting in named.items()
    }
    assert compared["static"] == {}
    assert compared["released of static K=4"] == {"target": "static"}
    assert compared["released of static K=4 with a head prefix"] == {"target": "static", "released": "released of static K=4"}
    assert compared["self_spec of static K=8"] == {"target": "static", "released": "released of static K=8"}
    assert compared["mrp_spec of dynamic K=8 tau=0.9 passes=2"] == {
        "target": "dynamic tau=0.9",
        "self_spec": "self_spec of dynamic K=8 tau=0.9",
        "draft_graph": "draft_graph of dynamic K=8 tau=0.9",
    }
    assert compared["mrp_spec of dynamic K=16 tau=0.9 passes=2"] == {"target": "dynamic tau=0.9"}


def test_every_reveal_rule_is_measured_alone_and_drafted() -> None:
    measured = rule_settings()
    names = [setting_name(setting) for setting in measured]
    assert len(set(names)) == len(names) == 3 * len(TARGETS)
    assert {"klass", "cad tau=0.8", "mrp_spec of eb_sampler K=4", "mrp_spec of dynamic K=8 tau=0.9"} < set(names)
    for setting in measured:
        MRPGenerationConfig(**setting).check(16, True)


def test_the_rules_are_those_of_the_targets() -> None:
    rules = [rule_of(target) for target in ("static", "dynamic", "sequential", "entropy_bound")]
    assert rules == [Static((1,)), Dynamic(logit(0.9)), Sequential((1,)), EntropyBound(0.35)]


def test_what_is_on_the_frontier() -> None:
    """B is as accurate as A and faster, C less accurate than B and slower, D slower and more accurate; E is as good as B."""
    points = {"A": (90.0, 1.0), "B": (90.0, 2.0), "C": (80.0, 1.5), "D": (95.0, 1.0), "E": (90.0, 2.0)}
    every = [{"accuracy": accuracy, "tokens_per_unit": speed} for accuracy, speed in points.values()]
    assert [name for name, line in zip(points, every, strict=True) if on_frontier(line, every)] == ["B", "D", "E"]


class Stub:
    """Makes, of four problems, two tokens each in a forward; notes what it was asked. A text of `mrp_spec` is another."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def decoded(self, setting: Setting, asked: Any) -> Measured:
        self.asked.append(setting_name(setting))
        ids = [[1, 2], [3, 4], [5, 6], [7, 8 + (setting["decoding"] == "mrp_spec")]]
        return Measured(ids, [1] * 4, [0] * 4, [True, True, True, False])


def test_a_setting_that_has_a_line_is_not_measured_again(tmp_path: Path) -> None:
    """With other weights it is, of the head where it takes part; a target whose texts are needed is decoded for them."""
    asked, path, identity = problems("math", "heldout", 4), tmp_path / "lines.jsonl", {"problems": 4}
    wanted = [setting for setting in settings() if setting_name(setting) in ("static", "self_spec of static K=3")]
    stub: Any = Stub()

    def opened(backbone: str = "a", head: str = "b") -> ResultsFile:
        file = ResultsFile(path, "asked")
        file.begin({"benchmark": "frontier", "backbone": backbone, "head": head})
        return file

    results = opened()
    first = next(lines(stub, asked, wanted, results, identity))
    results.add(first)
    assert first["accuracy"] == 75.0
    assert first["accuracy_95"] == [
        30.1,
        95.4,
    ]  # Wilson's: (0.75 + z2 / 8 -+ z sqrt(3 / 64 + z2 / 64)) / (1 + z2 / 4), z2 = 3.8415
    assert (first["tokens_per_forward"], first["tokens_per_forward_95"]) == (2.0, [2.0, 2.0])
    assert "texts_that_differ" not in first
    stub.asked.clear()
    (second,) = lines(stub, asked, wanted, opened(), identity)
    assert (second["decoding"], second["texts_that_differ"]) == ("self_spec", 0)
    assert stub.asked == ["self_spec of static K=3", "static", "released of static K=3"]
    assert second["over_target"] == second["over_released"] == 1
    results.add(second)
    assert list(lines(stub, asked, wanted, opened(), identity)) == []
    assert list(lines(stub, asked, wanted, opened(head="c"), identity)) == []  # neither asks the head
    assert len(list(lines(stub, asked, wanted, opened(backbone="c"), identity))) == 2
    other = [setting for setting in settings() if setting_name(setting) == "mrp_spec of static K=8"]
    assert [line["texts_that_differ"] for line in lines(stub, asked, other, results, identity)] == [1]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with a file a family; drafts have their target's accuracy, and one text differs."""
    for family, accuracy in (("math", 90.0), ("code", 80.0)):
        made: list[dict[str, Any]] = [{"benchmark": "frontier", **embedded_weights()}]
        for setting, speed in (
            ({"decoding": "dynamic", "confidence_threshold": 0.5}, 3.0),
            ({"decoding": "dynamic", "confidence_threshold": 0.9}, 2.0),
            ({"decoding": "mrp_spec", "target": "dynamic", "confidence_threshold": 0.9, "num_draft_states": 4}, 4.0),
        ):
            value = accuracy - 20 * (setting.get("confidence_threshold") == 0.5)
            line = {
                "family": family,
                **setting,
                "accuracy": value,
                "accuracy_95": [value - 2, value + 1],
                "head_per_token": 0.25 if "target" in setting else 0.0,
            }
            line |= {"tokens_per_forward": speed, "tokens_per_forward_95": [speed - 0.1, speed + 0.1]}
            made.append(line | ({"texts_that_differ": 1} if "target" in setting else {}))
        (tmp_path / f"tiny_frontier_{family}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    return tmp_path


def test_the_table(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four tokens a forward with a head pass: at a quarter of a forward 3.2 a unit."""
    for shape, share in (("1.7B", 1.0), ("4B", 0.25), ("8B", 0.0)):
        monkeypatch.setitem(cost.HEAD_SHARES, shape, share)
    head, _, eager, target, drafted = tables.frontier(results).splitlines()
    families = "| math % | math: tokens / unit | code % | code: tokens / unit | at 1.7B (math, code) | at 8B (math, code) |"
    last = "tokens / forward (math, code) | head / token (math, code) | texts that differ (math, code) |"
    assert head == f"| mode {families} {last}"
    assert eager.startswith("| dynamic tau=0.5 | 70.0 (68.0-71.0) | 3.00 (2.90-3.10) | 60.0 ")
    assert target.endswith("| 80.0 (78.0-81.0) | 2.00 (1.90-2.10) | 2.00, 2.00 | 2.00, 2.00 | 2.00, 2.00 | 0.00, 0.00 |  |")
    assert drafted == (
        "| mrp_spec of dynamic K=4 tau=0.9 | 90.0 (88.0-91.0) | 3.20 (3.12-3.28) * | 80.0 (78.0-81.0) | 3.20 (3.12-3.28) * | "
        "2.00, 2.00 | 4.00, 4.00 | 4.00, 4.00 | 0.25, 0.25 | 1, 1 |"
    )


def test_the_figure_has_a_panel_a_family_and_is_the_same_every_time(results: Path) -> None:
    drawn = []
    for _ in range(2):
        plots.main(["--results", str(results)])
        drawn.append((results / "frontier.svg").read_text())
    assert drawn[0] == drawn[1]
    words = {"".join(e.itertext()).strip() for e in ElementTree.fromstring(drawn[0]).iter() if "text" in e.tag}
    assert words >= {"math", "code", "dynamic", "mrp_spec of dynamic", "problems solved, %"}
    assert "tokens per backbone forward, head passes charged as at 4B" in words


def test_every_setting_can_be_drawn() -> None:
    modes = {" ".join(filter(None, (setting["decoding"], setting.get("remask_rule")))) for setting in settings()}
    assert modes == set(plots.CURVES)


def test_ratios_are_paired() -> None:
    """Twice as fast on every problem, however hard: the ratio is 2 in every resample; other problems cannot be paired."""
    texts, forwards = [[1] * length for length in (10, 40, 25, 60)], [5, 30, 9, 41]
    fast, slow = Measured(texts, forwards, [0] * 4), Measured(texts, [2 * count for count in forwards], [0] * 4)
    assert fast.over(slow=slow) == {"over_slow": 2.0, "over_slow_95": [2.0, 2.0]}
    assert fast.speed.low < 0.95 * fast.speed.value
    with pytest.raises(ValueError, match="4 problems against 1"):
        ratio(fast, Measured(texts[:1], [1], [0]))
