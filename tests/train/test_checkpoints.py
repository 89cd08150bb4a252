"""Checkpoints: what they hold, that runs which were killed go on from them as if nothing had been, and that none is of a number
that is not finite.
"""

import logging
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mrp_trainer.train.checkpoints import last_whole_checkpoint
from safetensors.torch import load_file, save_file
from training_runs import Run, result, rows_trainer, small_model, start

from modeling_mrp import MRPForCausalLM


@pytest.fixture
def loaded(tmp_path: Path) -> MRPForCausalLM:
    """A model that came from a folder, with a head that says something."""
    small_model().save_pretrained(tmp_path / "base")
    return MRPForCausalLM.from_pretrained(tmp_path / "base")


def test_a_checkpoint_is_a_head_repository(
    loaded: MRPForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the size of its head; it loads with its backbone, and training goes on from it, bit for bit, without a word of
    missing weights. An explicit `save_model` writes both."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    trainer = rows_trainer(tmp_path / "run", loaded, objective="mrp")
    trainer.train()
    trained = loaded.state_dict()
    stored = load_file(tmp_path / "run" / "checkpoint-3" / "model.safetensors")
    assert stored.keys() == {name for name in trained if name.startswith("mrp_head.")}
    other = MRPForCausalLM.from_pretrained(tmp_path / "base")
    rows_trainer(tmp_path / "run", other, objective="mrp").train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    for again in (MRPForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-3"), other):
        assert all(torch.equal(again.state_dict()[name], value) for name, value in trained.items())
    assert "missing" not in caplog.text
    trainer.save_model(str(tmp_path / "final"))
    assert load_file(tmp_path / "final" / "model.safetensors").keys() == trained.keys()


def test_a_checkpoint_without_a_part_of_the_head(loaded: MRPForCausalLM, tmp_path: Path) -> None:
    rows_trainer(tmp_path, loaded, objective="mrp", max_steps=1).train()
    weights = tmp_path / "checkpoint-1" / "model.safetensors"
    stored = load_file(weights)
    del stored["mrp_head.eh_proj.weight"]
    save_file(stored, weights, {"format": "pt"})
    with pytest.raises(ValueError, match=r"the checkpoint lacks mrp_head\.eh_proj\.weight and 0 more: resume from another"):
        rows_trainer(tmp_path, loaded, objective="mrp").train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_backbone_that_trains_is_saved_and_loses_its_name(loaded: MRPForCausalLM, tmp_path: Path) -> None:
    rows_trainer(tmp_path, loaded, max_steps=1).train()
    assert load_file(tmp_path / "checkpoint-1" / "model.safetensors").keys() == loaded.state_dict().keys()
    with pytest.raises(ValueError, match="base_model_name_or_path"):
        loaded.save_pretrained(tmp_path / "head", head_only=True)


# Two steps an epoch, seven in all, so that runs are taken up in the middle of an epoch; lines of the log over three steps.
OPTIONS = {"objective": "mrp", "unroll": 2, "logging_steps": 3, "max_steps": 7, "save_strategy": "steps", "save_steps": 2}
OPTIONS |= {"muon_learning_rate": 1e-2}
STEP, EVENT = random.Random(1).choice(
    [(step, event) for step in range(3, 7) for event in ("on_step_begin", "on_pre_optimizer_step", "on_step_end")]
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run from the first step to the last, with all its checkpoints."""
    run = Run(tmp_path_factory.mktemp("whole"), OPTIONS, rows=8)
    assert start(run) == [0]
    steps = [line["step"] for line in result(run).lines]
    assert steps == [2, 3, 4, 6, 7]  # every checkpoint ends a line
    assert len({line["loss"] for line in result(run).lines}) == len(steps)
    return run


def assert_goes_on(run: Run, uninterrupted: Run) -> None:
    """In another process, on other weights and with another seed, and other seeds again before each step; bit for bit."""
    options = {**run.options, "save_total_limit": 1}
    resumed = replace(run, resume=True, seed=5, scramble=True, kill=None, options=options)
    assert start(resumed) == [0]
    left, expected = result(resumed), result(uninterrupted)
    assert left.lines == expected.lines
    assert left.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert torch.equal(left.weights[name], value), name
    assert [path.name for path in run.folder.glob("checkpoint-*")] == ["checkpoint-7"]


def test_killed_and_resumed(uninterrupted: Run, tmp_path: Path) -> None:
    """At a random step."""
    run = replace(uninterrupted, folder=tmp_path, kill=(STEP, EVENT))
    assert start(run) == [-signal.SIGKILL]
    newest = last_whole_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name == f"checkpoint-{STEP // 2 * 2}"
    assert_goes_on(run, uninterrupted)


def test_a_checkpoint_cut_off_anywhere_leaves_the_one_before(uninterrupted: Run, tmp_path: Path) -> None:
    """Of the files of the newest, in the order in which they were written, some are whole, one is half there, and the others
    are missing."""
    folder = uninterrupted.folder
    files = [path for path in (folder / "checkpoint-7").rglob("*") if path.is_file()]
    written = sorted(files, key=lambda path: path.stat().st_mtime_ns)
    assert {"config.json", "model.safetensors", "optimizer.pt", "rng_state.pth"} < {path.name for path in written}
    assert last_whole_checkpoint(folder) == folder / "checkpoint-7"
    shutil.copytree(folder / "checkpoint-6", tmp_path / "checkpoint-6")
    cut = tmp_path / "checkpoint-7"
    cut.mkdir()
    for path in written:
        whole, place = path.read_bytes(), cut / path.relative_to(folder / "checkpoint-7")
        place.parent.mkdir(exist_ok=True)
        for length in (0, len(whole) // 2):
            place.write_bytes(whole[:length])
            assert last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-6"
        if path != written[-1]:
            place.write_bytes(whole)
    run = replace(uninterrupted, folder=tmp_path)
    assert_goes_on(run, uninterrupted)
    loaded = MRPForCausalLM.from_pretrained(tmp_path / "checkpoint-7").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in result(run).weights.items())


def test_the_newest_checkpoint_is_that_of_the_greatest_step(tmp_path: Path) -> None:
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    assert last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-10"


BROKEN = "model.layers.1.mlp.up_proj.weight"


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


@pytest.mark.parametrize("objective", ["block_diffusion", "mrp"])
def test_a_broken_weight_ends_training_before_anything_is_saved(objective: str, tmp_path: Path) -> None:
    """With accumulated gradients, and without a limit for their norm."""
    trainer = rows_trainer(tmp_path, objective=objective, gradient_accumulation_steps=2, max_grad_norm=0.0)
    trainer.model.get_parameter(BROKEN).data[3, 5] = float("nan")
    with pytest.raises(FloatingPointError, match=r"^the gradient norm of step 1 is nan, and nothing is saved: lower"):
        trainer.train()
    assert checkpoints(tmp_path) == []
    with pytest.raises(FloatingPointError, match=r"^the held-out loss is nan"):
        trainer.evaluate()


def test_a_gradient_of_a_finite_loss(tmp_path: Path) -> None:
    """In the second step: the first one's checkpoint stays, and training goes on from it."""
    trainer = rows_trainer(tmp_path)
    trainer.model.get_parameter(BROKEN).register_hook(lambda grad: grad / (trainer.state.global_step == 0))
    with pytest.raises(FloatingPointError, match=r"^the gradient norm of step 2 is (inf|nan).* learning_rate, which is 0\.01"):
        trainer.train()
    assert checkpoints(tmp_path) == ["checkpoint-1"]
    again = rows_trainer(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


@pytest.mark.parametrize("saves", ["steps", "no"])
def test_a_rate_that_blows_weights_up_in_the_last_step(saves: str, tmp_path: Path) -> None:
    """Behind which there is no loss."""
    with pytest.raises(FloatingPointError, match=r"^a weight behind step 1 is nan.*learning_rate, which is 1e\+39"):
        rows_trainer(tmp_path, objective="mrp", learning_rate=1e39, warmup_steps=0, max_steps=1, save_strategy=saves).train()
    assert checkpoints(tmp_path) == []
