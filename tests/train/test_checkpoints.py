"""Runs that are killed and resumed, divided over processes (gloo, on CPUs) and sharded, and what
their checkpoints hold."""

import logging
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mrp_trainer.train.checkpoints import last_whole_checkpoint, under_own_class
from mrp_trainer.train.trainer import MRPTrainer
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from modeling_mrp import MRPForCausalLM
from tests.support.helpers import close
from tests.support.random_cases import make_model
from tests.support.training_runs import Result, Rows, Run, result, start, trainer_of


def saving(folder: Path, model: Any = None, **options: Any) -> MRPTrainer:
    """A trainer that saves every step."""
    chosen = {"save_strategy": "steps", "save_steps": 1, **options}
    return trainer_of(folder, model or make_model().float(), Rows(12), Rows(4), **chosen)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_a_checkpoint_is_a_head_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the size of its head; it loads with its backbone, and training goes on from it, bit for
    bit, without a word of missing weights, unless they are of the head; weights that the model has
    not are named in a warning. An explicit `save_model` writes the same; a backbone that trained is
    another."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    make_model().float().save_pretrained(tmp_path / "base")
    loaded, other = (MRPForCausalLM.from_pretrained(tmp_path / "base") for _ in range(2))
    trainer = saving(tmp_path / "run", loaded, objective="mrp")
    trainer.train()
    trained = loaded.state_dict()
    stored = load_file(tmp_path / "run" / "checkpoint-3" / "model.safetensors")
    assert stored.keys() == {name for name in trained if name.startswith("mrp_head.")}
    again = saving(tmp_path / "run", other, objective="mrp")
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    for found in (MRPForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-3"), other):
        assert all(torch.equal(found.state_dict()[name], value) for name, value in trained.items())
    assert "missing" not in caplog.text
    trainer.save_model(str(tmp_path / "final"))
    assert load_file(tmp_path / "final" / "model.safetensors").keys() == stored.keys()
    newest = tmp_path / "run" / "checkpoint-3"
    spare = {**stored, "mrp_head.spare": torch.ones(1)}
    save_file(spare, newest / "model.safetensors", {"format": "pt"})
    again.train(resume_from_checkpoint=str(newest))
    assert "unexpected keys in the checkpoint model loaded: ['mrp_head.spare']" in caplog.text
    del stored["mrp_head.eh_proj.weight"]
    save_file(stored, tmp_path / "run" / "checkpoint-3" / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError,
        match=r"the checkpoint lacks mrp_head\.eh_proj\.weight and 0 more: resume from another",
    ):
        again.train(resume_from_checkpoint=True)
    saving(tmp_path / "backbone", loaded.requires_grad_(True), max_steps=1).train()
    assert (
        load_file(tmp_path / "backbone" / "checkpoint-1" / "model.safetensors").keys()
        == trained.keys()
    )
    with pytest.raises(ValueError, match=r"model\.backbone_source"):
        loaded.save_pretrained(tmp_path / "head", head_only=True)


@pytest.mark.parametrize("state", [None, '{"global_'])
def test_weights_without_a_state_are_no_checkpoint(state: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    model: Any = make_model().float()
    model.save_pretrained(folder)
    if state is not None:
        (folder / "trainer_state.json").write_text(state)
    with pytest.raises(ValueError, match=rf"{folder} holds no whole trainer_state\.json: resume"):
        saving(tmp_path / "run").train(resume_from_checkpoint=str(folder))
    assert checkpoints(tmp_path / "run") == []


@pytest.mark.parametrize("steps", [2, 3])
def test_a_run_that_is_done_makes_no_further_step(steps: int, tmp_path: Path) -> None:
    """Taken up in the middle of an epoch, or at its end, three steps."""
    saving(tmp_path, max_steps=steps, objective="mrp").train()
    again = saving(tmp_path, max_steps=steps, objective="mrp")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == steps
    stored = load_file(tmp_path / f"checkpoint-{steps}" / "model.safetensors")
    weights = again.model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in stored.items())


# Two steps an epoch, seven in all, so that runs are taken up in the middle of an epoch; lines of
# the log over three steps.
KILLED = {
    "objective": "mrp",
    "unroll": 2,
    "logging_steps": 3,
    "max_steps": 7,
    "save_strategy": "steps",
    "save_steps": 2,
}
KILLED |= {"muon_learning_rate": 1e-2}


def test_killed_and_resumed(tmp_path: Path) -> None:
    """In a random step, and with the newest checkpoint cut off anywhere: of its files, in the order
    in which they were written, some are whole, one is half there, and the others are missing. The
    one before is gone on from in another process, on other weights and with another seed; bit for
    bit."""
    whole, run = (Run(tmp_path / name, KILLED, Rows(8)) for name in ("whole", "killed"))
    assert start(whole) == [0]
    expected = result(whole)
    # every checkpoint ends a line
    assert [line["step"] for line in expected.lines] == [2, 3, 4, 6, 7]
    assert len({line["loss"] for line in expected.lines}) == 5
    step = random.Random(1).randrange(4, 7)
    assert start(replace(run, kill=step)) == [-signal.SIGKILL]
    newest = run.folder / f"checkpoint-{step // 2 * 2}"
    before = run.folder / f"checkpoint-{step // 2 * 2 - 2}"
    assert last_whole_checkpoint(run.folder) == newest
    written = sorted(
        (path for path in newest.rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_mtime_ns,
    )
    assert {"config.json", "model.safetensors", "optimizer.pt", "rng_state.pth"} < {
        path.name for path in written
    }
    contents = [path.read_bytes() for path in written]
    for path in written:
        path.unlink()
    for path, held in zip(written, contents, strict=True):
        for length in (0, len(held) // 2):
            path.write_bytes(held[:length])
            assert last_whole_checkpoint(run.folder) == before
        if path != written[-1]:
            path.write_bytes(held)
    assert start(replace(run, resume=True, seed=5, options={**KILLED, "save_total_limit": 1})) == [
        0
    ]
    left = result(run)
    assert left.lines == expected.lines
    loaded = MRPForCausalLM.from_pretrained(run.folder / "checkpoint-7").state_dict()
    for weights in (left.weights, loaded):
        assert weights.keys() == expected.weights.keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.weights.items())
    assert checkpoints(run.folder) == ["checkpoint-7"]
    later = run.folder / "checkpoint-10"  # by number, not by name
    (run.folder / "checkpoint-7").rename(later)
    (later / "trainer_state.json").write_text('{"global_step": 10}')
    (run.folder / "checkpoint-9").mkdir()
    (run.folder / "checkpoint-9" / "trainer_state.json").write_text('{"global_step": 9}')
    assert last_whole_checkpoint(run.folder) == later


def test_a_broken_weight_ends_training_before_anything_is_saved(tmp_path: Path) -> None:
    """With accumulated gradients, and without a limit for their norm."""
    trainer = saving(tmp_path, objective="mrp", gradient_accumulation_steps=2, max_grad_norm=0.0)
    trainer.model.get_parameter("model.layers.1.mlp.up_proj.weight").data[3, 5] = float("nan")
    with pytest.raises(
        FloatingPointError,
        match=r"^the gradient norm of step 1 is nan, and nothing is saved: lower",
    ):
        trainer.train()
    assert checkpoints(tmp_path) == []
    with pytest.raises(FloatingPointError, match=r"^the held-out loss is nan"):
        trainer.evaluate()


@pytest.mark.parametrize("saves", ["steps", "no"])
def test_a_rate_that_blows_weights_up_in_the_last_step(saves: str, tmp_path: Path) -> None:
    """Behind which there is no loss."""
    with pytest.raises(
        FloatingPointError, match=r"^a weight behind step 1 is nan.*learning_rate, which is 1e\+39"
    ):
        saving(
            tmp_path,
            objective="mrp",
            learning_rate=1e39,
            warmup_steps=0,
            max_steps=1,
            save_strategy=saves,
        ).train()
    assert checkpoints(tmp_path) == []


# Ten rows, so that the third step goes on with those of the next round, and the fourth is in the
# second epoch. The rows without anything to learn are the cheapest and meet in one batch, where
# they are all that some processes have. Of the five held-out rows the processes do not get equally
# many.
ROWS: dict[str, Any] = {"rows": Rows(10, (3, 7)), "held_out": Rows(5), "double": True}
HEAD = {"objective": "mrp", "unroll": 2, "max_steps": 5, "eval_strategy": "steps", "eval_steps": 5}


def divided(run: Run, folder: Path, at_once: int = 2, times: int = 1, **options: Any) -> Run:
    """The same run for two processes, which take so many rows at once, so many times a step."""
    sizes = {"per_device_train_batch_size": at_once, "per_device_eval_batch_size": at_once}
    return replace(
        run,
        folder=folder,
        options={**run.options, **sizes, "gradient_accumulation_steps": times, **options},
    )


def assert_same(left: Result, expected: Result, atol: float) -> None:
    """All that was logged, norms of gradients too, and the last weights."""
    for name, value in expected.weights.items():
        close(left.weights[name], value, atol)
    for line, other in zip(left.lines, expected.lines, strict=True):
        assert line == pytest.approx(other, rel=1e-6, abs=max(atol, 1e-9))


def test_a_step_does_not_depend_on_how_it_is_divided(tmp_path: Path) -> None:
    """Also where a process has nothing to learn in its part; all processes end with the same
    weights."""
    whole = Run(tmp_path / "whole", HEAD, **ROWS)
    assert start(whole) == [0]
    expected = result(whole)
    assert len(expected.lines) == 6
    assert {"eval_loss", "eval_kl_head", "eval_gap_closed"} < expected.lines[-1].keys()
    assert {"loss", "kl_head", "kl_stale", "gap_closed", "agreement"} < expected.lines[0].keys()
    for name, value in make_model().state_dict().items():
        assert torch.equal(expected.weights[name], value) != name.startswith("mrp_head."), name
    for at_once, times in ((2, 1), (1, 2)):
        run = divided(whole, tmp_path / str(times), at_once, times)
        assert start(run, 2) == [0, 0]
        for rank in (0, 1):
            assert_same(result(run, rank), expected, 1e-10)


def test_the_backbone_on_two_processes(tmp_path: Path) -> None:
    """With a head in the model, which does not train, and activation checkpointing."""
    one = Run(tmp_path / "one", {"objective": "block_diffusion", "inverse_level": True}, **ROWS)
    two = divided(one, tmp_path / "two", gradient_checkpointing=True)
    assert start(one) == [0]
    assert start(two, 2) == [0, 0]
    assert_same(result(two, 1), result(one), 1e-10)
    for name, value in make_model().state_dict().items():
        assert torch.equal(result(one).weights[name], value) == name.startswith("mrp_head."), name


def test_a_checkpoint_begins_a_line_of_the_log(tmp_path: Path) -> None:
    """A run that is taken up there then has the same lines as one that goes on."""
    trainer = saving(tmp_path, save_steps=2, logging_steps=3, max_steps=4)
    trainer.train()
    lines = [line["step"] for line in trainer.state.log_history if "loss" in line]
    assert lines == [2, 3, 4]


def test_a_save_leaves_a_sharded_model_sharded() -> None:
    """Also one that fails: without FSDP's class no later step would synchronize gradients."""
    model = torch.nn.Linear(2, 2)
    sharded = type("FSDPLinear", (FSDPModule, torch.nn.Linear), {})
    model.__class__ = sharded
    with pytest.raises(pytest.fail.Exception, match=r"^Linear$"), under_own_class(model):
        pytest.fail(type(model).__name__)
    assert type(model) is sharded


def test_sharded_training_equals_one_process(tmp_path: Path) -> None:
    """FSDP2 on two processes, in float32, also of a run that was taken up in its second epoch. Each
    holds half of the model, the frozen backbone included. It is saved whole at the end, though its
    checkpoints hold shards, and loads here and as remote code."""
    one = Run(tmp_path / "one", {"objective": "mrp", "unroll": 2, "max_steps": 5})
    assert start(one) == [0]
    shards = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
    run = divided(
        replace(one, sharded=True),
        tmp_path / "sharded",
        save_strategy="steps",
        save_steps=4,
        **shards,
    )
    assert start(run, 2) == [0, 0]
    for rank in (0, 1):
        assert_same(result(run, rank), result(one), 1e-5)
        assert 0.45 < result(run, rank).share < 0.55
    before, trained = make_model().float().state_dict(), result(run).weights
    for name, value in trained.items():
        assert torch.equal(value, before[name]) != name.startswith("mrp_head."), name
    own = MRPForCausalLM.from_pretrained(run.folder / "final")
    remote = AutoModelForCausalLM.from_pretrained(run.folder / "final", trust_remote_code=True)
    assert isinstance(remote, MRPForCausalLM)
    shutil.copytree(run.folder / "checkpoint-4", tmp_path / "resumed" / "checkpoint-4")
    resumed = replace(run, folder=tmp_path / "resumed", resume=True, seed=3)
    assert not (resumed.folder / "checkpoint-4" / "model.safetensors").exists()
    assert start(resumed, 2) == [0, 0]
    assert result(resumed).lines == result(run).lines
    for found in (own.state_dict(), remote.state_dict(), result(resumed, 1).weights):
        assert found.keys() == trained.keys()
        assert all(torch.equal(trained[name], value) for name, value in found.items())


def test_an_adapter_beside_a_sharded_model(tmp_path: Path) -> None:
    """It alone trains, as in one process, of a model that names the arguments of its forward
    (CAUSAL_LM). lm_head, whose forward nobody calls, then is a unit of its own."""
    one = Run(tmp_path / "one", {"objective": "mrp", "unroll": 2}, adapter=True)
    two = divided(
        replace(one, sharded=True), tmp_path / "two", fsdp=True, fsdp_config={"version": 2}
    )
    assert start(one) == [0]
    assert start(two, 2) == [0, 0]
    assert_same(result(two), result(one), 1e-5)
    trained = {
        name.replace("base_model.model.", "").replace("base_layer.", ""): v
        for name, v in result(one).weights.items()
    }
    assert all(
        torch.equal(trained[name], value)
        for name, value in make_model().float().state_dict().items()
    )
    saved, expected = (
        load_file(run.folder / "final" / "adapter_model.safetensors") for run in (two, one)
    )
    assert saved.keys() == expected.keys()
    assert all(".lora_" in name for name in saved)
    for name, value in expected.items():
        close(saved[name], value, 1e-5)


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zeroed(path: Path) -> None:
    """As a disk leaves what it had no time to write."""
    path.write_bytes(bytes(path.stat().st_size))


def with_a_bit_turned(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: list[Any] = [
    halved,
    zeroed,
    Path.unlink,
    lambda path: path.write_bytes(b""),
    lambda path: path.write_text("[" * 9),
]


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"]
)
def test_a_damaged_checkpoint_is_passed_over(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever happened to one of its files: the one before it is gone on from, to the same
    weights, and a warning names the file. If no other is whole, the error says what to do; nothing
    is removed."""
    trainer = saving(tmp_path)
    trainer.train()
    right = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    newest, copy = tmp_path / "checkpoint-3", tmp_path / "copy"
    newest.rename(copy)
    for damage in [*DAMAGES, *([with_a_bit_turned] if name == "optimizer.pt" else [])]:
        shutil.copytree(copy, newest)
        assert last_whole_checkpoint(tmp_path) == newest
        damage(newest / name)
        caplog.clear()
        assert last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
        assert f"{newest} is damaged: " in caplog.text
        shutil.rmtree(newest)
    shutil.copytree(copy, newest)
    halved(newest / name)
    again = saving(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert all(torch.equal(again.model.state_dict()[key], value) for key, value in right.items())
    assert last_whole_checkpoint(tmp_path) == newest, "it was written anew"
    for step in (1, 2, 3):
        halved(tmp_path / f"checkpoint-{step}" / name)
    with pytest.raises(
        ValueError,
        match=rf"checkpoint-1 is damaged: {name} .*, and no older one is whole: .* --restart",
    ):
        again.train(resume_from_checkpoint=True)
    assert checkpoints(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
