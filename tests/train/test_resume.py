"""Runs that were killed, or whose checkpoint was cut off, go on as if nothing had been: no noise is a global generator's."""

import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mrp_trainer.train.checkpoints import last_whole_checkpoint
from training_runs import Run, result, start

from modeling_mrp import MRPForCausalLM

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
