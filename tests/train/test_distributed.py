"""Several processes (gloo, on CPUs), gradient accumulation and sharding against one process."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import close
from safetensors.torch import load_file
from training_runs import Result, Run, result, small_model, start
from transformers import AutoModelForCausalLM

from modeling_mrp import MRPForCausalLM

# By processes, rows a process takes at once, and how many times a step.
LAYOUTS = [(1, 4, 1), (2, 2, 1), (2, 1, 2)]
WHOLE = LAYOUTS[0]
# Ten rows, so that the third step goes on with those of the next round, and the fourth is in the second epoch. The rows
# without anything to learn are the cheapest and meet in one batch, where they are all that some processes have. Of the five
# held-out rows the processes do not get equally many.
ROWS = {"rows": 10, "without_response": (3, 7), "eval_rows": 5}
HEAD = {"objective": "mrp", "unroll": 2, "max_steps": 5, "eval_strategy": "steps", "eval_steps": 5}


def options_of(layout: tuple[int, int, int], **options: Any) -> dict[str, Any]:
    _, at_once, times = layout
    return {
        **options,
        "per_device_train_batch_size": at_once,
        "per_device_eval_batch_size": at_once,
        "gradient_accumulation_steps": times,
    }


@pytest.fixture(scope="module")
def head_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int, int], Run]:
    """The head's training in every layout, in float64."""
    runs = {}
    for layout in LAYOUTS:
        runs[layout] = Run(tmp_path_factory.mktemp("run"), options_of(layout, **HEAD), double=True, **ROWS)
        assert start(runs[layout], layout[0]) == [0] * layout[0]
    return runs


def assert_same(left: Result, expected: Result, atol: float) -> None:
    """First gradients, last weights, and all that was logged."""
    assert left.gradients.keys() == expected.gradients.keys()
    for name, value in expected.gradients.items():
        close(left.gradients[name], value, atol)
    for name, value in expected.weights.items():
        close(left.weights[name], value, atol)
    assert len(left.lines) == len(expected.lines)
    assert len(left.evaluations) == len(expected.evaluations)
    for line, other in zip(left.lines + left.evaluations, expected.lines + expected.evaluations, strict=True):
        assert line == pytest.approx(other, rel=1e-6, abs=max(atol, 1e-9))


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_a_step_does_not_depend_on_how_it_is_divided(
    layout: tuple[int, int, int], head_runs: dict[tuple[int, int, int], Run]
) -> None:
    """Also where a process has nothing to learn in its part; all processes end with the same weights."""
    expected = result(head_runs[WHOLE])
    assert len(expected.lines) == 5
    assert len(expected.evaluations) == 1
    assert {"eval_loss", "eval_kl_head", "eval_gap_closed"} < expected.evaluations[0].keys()
    assert {"loss", "kl_head", "kl_stale", "gap_closed", "agreement"} < expected.lines[0].keys()
    assert all(name.startswith("mrp_head.") for name in expected.gradients)
    assert min(value.abs().max().item() for value in expected.gradients.values()) > 1e-6
    for rank in range(layout[0]):
        assert_same(result(head_runs[layout], rank), expected, 1e-10)


def test_the_backbone_on_two_processes(tmp_path: Path) -> None:
    """With a head in the model, which does not train, and activation checkpointing."""
    options = {"objective": "block_diffusion", "inverse_level": True}
    one = Run(tmp_path / "one", options, double=True, **ROWS)
    two = replace(one, folder=tmp_path / "two", options=options_of((2, 2, 1), **options, gradient_checkpointing=True))
    assert start(one) == [0]
    assert start(two, 2) == [0, 0]
    assert_same(result(two, 1), result(one), 1e-10)
    assert not any(name.startswith("mrp_head.") for name in result(one).gradients)


def test_sharded_training_equals_one_process(tmp_path: Path) -> None:
    """FSDP2 on two processes, in float32, also of a run that was taken up in its second epoch. Each holds half of the model,
    the frozen backbone included. It is saved whole at the end, though its checkpoints hold shards, and loads here and as
    remote code."""
    one = Run(tmp_path / "one", {"objective": "mrp", "unroll": 2, "max_steps": 5})
    assert start(one) == [0]
    options = options_of((2, 2, 1), **one.options, save_strategy="steps", save_steps=4)
    options |= {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
    run = Run(tmp_path / "sharded", options, sharded=True)
    assert start(run, 2) == [0, 0]
    for rank in (0, 1):
        assert_same(result(run, rank), result(one), 1e-5)
        assert 0.45 < result(run, rank).share < 0.55
    before, trained = small_model().state_dict(), result(run).weights
    for name, value in trained.items():
        assert torch.equal(value, before[name]) != name.startswith("mrp_head."), name
    own = MRPForCausalLM.from_pretrained(run.folder / "final")
    remote = AutoModelForCausalLM.from_pretrained(run.folder / "final", trust_remote_code=True)
    assert type(remote).__module__.startswith("transformers_modules")
    shutil.copytree(run.folder / "checkpoint-4", tmp_path / "resumed" / "checkpoint-4")
    resumed = replace(run, folder=tmp_path / "resumed", resume=True, seed=3)
    assert not (resumed.folder / "checkpoint-4" / "model.safetensors").exists()
    assert start(resumed, 2) == [0, 0]
    assert result(resumed).lines == result(run).lines
    for found in (own.state_dict(), remote.state_dict(), result(resumed, 1).weights):
        assert found.keys() == trained.keys()
        assert all(torch.equal(trained[name], value) for name, value in found.items())


def test_an_adapter_beside_a_sharded_model(tmp_path: Path) -> None:
    """It alone trains, as in one process, of a model that names the arguments of its forward (CAUSAL_LM). lm_head, whose
    forward nobody calls, then is a unit of its own."""
    options = options_of((2, 2, 1), objective="mrp", unroll=2, max_steps=3)
    one = Run(tmp_path / "one", {"objective": "mrp", "unroll": 2, "max_steps": 3}, adapter=True)
    two = Run(tmp_path / "two", {**options, "fsdp": True, "fsdp_config": {"version": 2}}, sharded=True, adapter=True)
    assert start(one) == [0]
    assert start(two, 2) == [0, 0]
    assert_same(result(two), result(one), 1e-5)
    assert all(".lora_" in name for name in result(one).gradients)
    saved, expected = (load_file(run.folder / "final" / "adapter_model.safetensors") for run in (two, one))
    assert saved.keys() == expected.keys()
    for name, value in expected.items():
        close(saved[name], value, 1e-5)
