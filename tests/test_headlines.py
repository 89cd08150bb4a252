"""The headline tables, decoded again on the first problems of math and code: what a line counted, to the last forward.

In float64, so that no other machine rounds a count away.
"""

from typing import Any

import pytest
import torch
from conftest import TINY
from mrp_trainer.tasks import Family, problems

from benchmarks.common import load, read_lines
from benchmarks.loops import measure_loop
from benchmarks.measure import SAMPLE, Measured, measure
from benchmarks.novel import JUDGED
from benchmarks.released import Released
from benchmarks.tables import RESULTS
from benchmarks.targets import TARGETS, ways


@pytest.fixture(scope="module")
def exact() -> Any:
    """The embedded checkpoint in float64, and its tokenizer."""
    model, tokenizer = load(TINY)
    return model.to(torch.float64), tokenizer


def sampled(file: str, **fields: Any) -> Any:
    """The sample of the one line with these fields."""
    lines = [line for line in read_lines(RESULTS / file) if all(line.get(name) == value for name, value in fields.items())]
    (line,) = lines
    return line["sample"]


@pytest.mark.parametrize("family", JUDGED)
@pytest.mark.parametrize("target", TARGETS)
def test_targets(exact: Any, family: Family, target: str) -> None:
    """Alone, and drafted with K = 8 by stale logits and by the head."""
    asked = problems(family, "heldout", SAMPLE)
    for drafts in (None, ("self_spec", 8, 0), ("mrp_spec", 8, 1)):
        line = {"drafts": None} if drafts is None else dict(zip(("drafts", "K", "passes"), drafts, strict=True))
        measured = measure(*exact, asked, SAMPLE, **ways(target, drafts))
        assert measured.sample() == sampled("tiny_targets.jsonl", family=family, target=target, **line), drafts


@pytest.mark.parametrize("family", JUDGED)
def test_the_yardstick(exact: Any, family: Family) -> None:
    """One by one, K = 8; the released reference too, if the lines have it and not the older reading of its loop."""
    asked = problems(family, "heldout", SAMPLE)
    measured: dict[str, Measured] = {"mrp_spec K=8": measure(*exact, asked, 1, decoding="mrp_spec", num_draft_states=8)}
    if any(line["mode"] == "released K=8" for line in read_lines(RESULTS / "tiny_yardstick.jsonl")):
        measured["released K=8"] = measure_loop(Released(8), *exact, asked, 1)
    for mode, found in measured.items():
        assert found.sample() == sampled("tiny_yardstick.jsonl", family=family, mode=mode, batch_size=1), mode
