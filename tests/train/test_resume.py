"""Runs that were killed, or whose disk was full, go on as if nothing had been; and no noise comes from a global generator."""

import random
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mrp_trainer.train.checkpoints import last_whole_checkpoint
from safetensors.torch import load_file
from training_runs import Result, Run, result, start

from modeling_mrp import MRPForCausalLM

# Two steps an epoch, seven in all, so that runs are taken up in the middle of an epoch; lines of the log over three steps.
OPTIONS: dict[str, dict[str, Any]] = {
    "mrp": {"objective": "mrp", "unroll": 2, "logging_steps": 1},
    "block_diffusion": {"objective": "block_diffusion", "logging_steps": 3, "save_total_limit": 1},
}
SAVES = {"max_steps": 7, "save_strategy": "steps", "save_steps": 2}
STEP, EVENT = random.Random(1).choice(
    [(step, event) for step in range(3, 7) for event in ("on_step_begin", "on_pre_optimizer_step", "on_step_end")]
)


def run_of(objective: str, folder: Path, **kwargs: Any) -> Run:
    return Run(folder, {**SAVES, **OPTIONS[objective]}, rows=8, **kwargs)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run of each objective, from the first step to the last, with all its checkpoints."""
    runs = {}
    for objective in OPTIONS:
        run = run_of(objective, tmp_path_factory.mktemp(objective))
        runs[objective] = replace(run, options={**run.options, "save_total_limit": None})
        assert start(runs[objective]) == [0]
    return runs


def assert_equal(resumed: Run, expected: Result) -> None:
    """Bit for bit."""
    left = result(resumed)
    assert left.lines == expected.lines
    assert left.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert torch.equal(left.weights[name], value), name


def take_up(run: Run, **options: Any) -> Run:
    """Goes on in another process, on other weights and with another seed, and with other seeds again before each step."""
    resumed = replace(run, resume=True, seed=5, scramble=True, kill=None, options={**run.options, **options})
    assert start(resumed) == [0]
    return resumed


@pytest.mark.parametrize(("objective", "kill"), [("mrp", (STEP, EVENT)), ("block_diffusion", (4, "optimizer.pt"))])
def test_killed_and_resumed(objective: str, kill: tuple[int, str], uninterrupted: dict[str, Run], tmp_path: Path) -> None:
    """At a random step, and while the checkpoint of step 4 is written that replaces the one of step 2."""
    run = run_of(objective, tmp_path, kill=kill)
    assert start(run) == [-signal.SIGKILL]
    newest = last_whole_checkpoint(tmp_path)
    assert newest is not None
    assert newest.name == f"checkpoint-{kill[0] // 2 * 2}" or (objective, newest.name) == ("block_diffusion", "checkpoint-2")
    expected = result(uninterrupted[objective])
    steps = [line["step"] for line in expected.lines]
    assert steps == ([1, 2, 3, 4, 5, 6, 7] if objective == "mrp" else [2, 3, 4, 6, 7])  # every checkpoint ends a line
    assert len({line["loss"] for line in expected.lines}) == len(steps)
    halfway = load_file(newest / "model.safetensors")
    assert any(not torch.equal(halfway[name], value) for name, value in expected.weights.items())
    assert_equal(take_up(run), expected)
    if objective == "block_diffusion":
        assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-7"]


def test_killed_behind_the_last_step(tmp_path: Path) -> None:
    """What its checkpoint holds is the result, and a further step is not made: of three in an epoch and a half."""
    run = run_of("mrp", tmp_path)
    plan = {"max_steps": -1, "num_train_epochs": 1.5, "save_steps": 3}
    run = replace(run, kill=(3, "on_save"), options={**run.options, **plan})
    assert start(run) == [-signal.SIGKILL]
    last = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    before = {path.name for path in tmp_path.glob("checkpoint-*")}
    left = result(take_up(run))
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == before
    assert left.lines[-1]["step"] == 3
    assert all(torch.equal(left.weights[name], value) for name, value in last.items())
    saved = load_file(tmp_path / "final" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in last.items())


def test_a_checkpoint_cut_off_anywhere_leaves_the_one_before(uninterrupted: dict[str, Run], tmp_path: Path) -> None:
    """Of the files of the newest, in the order in which they were written, some are whole, one is half there, and the others
    are missing."""
    folder = uninterrupted["mrp"].folder
    files = [path for path in (folder / "checkpoint-7").rglob("*") if path.is_file()]
    written = sorted(files, key=lambda path: path.stat().st_mtime_ns)
    names = [path.name for path in written]
    assert names[-1] == "trainer_state.json"
    assert {"config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"} < set(names)
    assert last_whole_checkpoint(folder) == folder / "checkpoint-7"
    shutil.copytree(folder / "checkpoint-6", tmp_path / "checkpoint-6")
    cut = tmp_path / "checkpoint-7"
    cut.mkdir()
    for path in written:
        whole, place = path.read_bytes(), cut / path.relative_to(folder / "checkpoint-7")
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(b"")
        assert last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-6"
        place.write_bytes(whole[: len(whole) // 2])
        assert last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-6"
        if path != written[-1]:
            place.write_bytes(whole)
    run = replace(uninterrupted["mrp"], folder=tmp_path)
    assert_equal(take_up(run, save_total_limit=1), result(uninterrupted["mrp"]))
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-7"]
    loaded = MRPForCausalLM.from_pretrained(tmp_path / "checkpoint-7").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in result(run).weights.items())


def test_a_full_disk(uninterrupted: dict[str, Run], small_disk: Path) -> None:
    """There is no room for the second checkpoint beside the first; then there is."""
    run = run_of("block_diffusion", small_disk)
    assert start(run) == [1]
    assert (small_disk / "checkpoint-4").exists()
    assert last_whole_checkpoint(small_disk) == small_disk / "checkpoint-2"
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    assert_equal(take_up(run), result(uninterrupted["block_diffusion"]))
