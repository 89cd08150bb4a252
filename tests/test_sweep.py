"""What the sweeps measure: points asked for, and rounds whose cost is known beforehand."""

import json
from typing import Any

import pytest
import torch
from conftest import TINY, make_model
from helpers import left_padded
from mrp_trainer.tasks import problems, source_modules

from benchmarks import sweep
from benchmarks.measure import measure
from benchmarks.meter import Meter, seconds_by_part
from modeling_mrp import MRPForCausalLM

pytestmark = pytest.mark.skipif(not TINY.exists(), reason="the embedded checkpoint is not here")


def test_the_meter_counts_rounds_by_hand() -> None:
    """`static`, a prompt of one block of 4 and 8 new tokens. The prompt's forward also scores the first state; three states
    follow, then the clean one together with the next block's first, then three more, of which the last reveal ends the row."""
    meter = Meter(make_model())
    out = meter.generate(torch.tensor([[1, 2, 3, 4]]), max_new_tokens=8, return_dict_in_generate=True)
    assert out.stats is not None
    assert out.stats.forwards is not None
    assert meter.rounds == out.stats.forwards["denoise"] == 7
    assert meter.lengths == {"backbone": 4 * (7 + 1), "head": 0}
    assert meter.per_round() == {"states_per_forward": 1.143, "head_passes_per_round": 0.0, "states_per_head_pass": 0.0}
    assert not any(module._forward_pre_hooks for module in meter.model.modules()), "nothing stays hooked"


def test_the_profile_of_a_decode() -> None:
    """Parts lie inside the whole, and each of them takes its time."""
    model, ids = make_model(), torch.tensor([[1, 2, 3, 4]])
    spent = seconds_by_part(lambda: model.generate(ids, max_new_tokens=8, decoding="mrp_spec"))
    whole = spent.pop("whole")
    assert spent.keys() == {"backbone", "head", "vocabulary", "commit"}
    assert min(spent.values()) > 0
    assert sum(spent.values()) < whole
    assert seconds_by_part(lambda: model.generate(ids, max_new_tokens=8))["head"] == 0


def test_the_meter_counts_the_head(random_model: MRPForCausalLM) -> None:
    """All of a batch's passes, and no less than the row that took most."""
    meter = Meter(random_model)
    out = meter.generate(
        **left_padded([[1, 2, 3], [5, 6, 7, 8, 9]]), max_new_tokens=12, decoding="mrp_spec", return_dict_in_generate=True
    )
    assert out.stats is not None
    assert out.stats.forwards is not None
    assert meter.rounds == out.stats.forwards["denoise"] + out.stats.forwards["verify"]
    assert meter.calls["head"] == out.stats.forwards["head"] - out.stats.forwards["prefill"]
    rounds = meter.per_round()
    assert rounds["states_per_head_pass"] >= 1
    assert 1 <= rounds["states_per_forward"] <= 4


def test_cost_by_problem_adds_up(tiny_model: MRPForCausalLM, tiny_tokenizer: Any) -> None:
    """The batch a problem is in changes neither its tokens nor its forwards."""
    asked = problems("math", "tune", 3)
    alone, together = (measure(tiny_model, tiny_tokenizer, asked, size, decoding="self_spec") for size in (1, 3))
    assert together.ids == alone.ids
    assert (together.cost.tokens, together.cost.forwards) == (alone.cost.tokens, alone.cost.forwards)
    assert [len(ids) for ids in alone.ids] == alone.cost.tokens
    line = together.line() | together.over(alone=alone, missing=None)
    assert line["over_alone"] == 1
    assert line["over_alone_95"] == [1, 1]
    assert "over_missing" not in line
    assert line["tokens_per_forward_95"][0] <= line["tokens_per_forward"] <= line["tokens_per_forward_95"][1]


def test_prompts_of_every_length_end_at_the_same_place(tiny_tokenizer: Any) -> None:
    found = sweep.long_source(tiny_tokenizer, [32, 256], 4, "heldout")
    assert [p.answer for p in found[32]] == [p.answer for p in found[256]]
    for short, long in zip(found[32], found[256], strict=True):
        assert long.prompt.endswith(short.prompt)
        assert any(long.prompt + long.answer in module for module in source_modules("heldout"))
        for problem, length in ((short, 32), (long, 256)):
            assert len(tiny_tokenizer.encode(problem.prompt, add_special_tokens=False)) == pytest.approx(length, abs=20)
    with pytest.raises(ValueError, match="ask for shorter prompts"):
        sweep.long_source(tiny_tokenizer, [100_000], 1, "heldout")


def _lines(capsys: pytest.CaptureFixture[str], benchmark: str) -> list[dict[str, Any]]:
    first, *lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first["benchmark"] == benchmark
    assert set(first) >= {"python", "torch", "transformers", "date", "options"}
    assert first["options"]["model"] == "hub_configs/sdar-tiny-mrp"
    return lines


def test_the_sweep_prints_a_line_a_point(capsys: pytest.CaptureFixture[str]) -> None:
    sweep.main(["--count", "2", "--family", "math", "--batch-size", "1", "2", "--states", "1", "2", "--prompt", "24"])
    lines = _lines(capsys, "sweep")
    modes = ["released", "self_spec", "mrp_spec"]
    assert [(line["axis"], line["mode"], line.get("states"), line["batch_size"]) for line in lines] == [
        (axis, mode, states, size)
        for axis, sizes in (("batch", (1, 2)), ("prompt", (1,)))
        for size in sizes
        for mode, states in [("static", None), *((mode, k) for k in (1, 2) for mode in modes)]
    ]
    by = {(line["axis"], line["mode"], line.get("states"), line["batch_size"]): line for line in lines}
    assert by["batch", "mrp_spec", 1, 1]["over_static"] == 1
    assert by["batch", "mrp_spec", 2, 1]["over_static"] > 1.3
    assert by["batch", "mrp_spec", 2, 2]["tokens_per_forward"] == by["batch", "mrp_spec", 2, 1]["tokens_per_forward"]
    with pytest.raises(SystemExit):
        sweep.main(["--prompt", "1000"])
