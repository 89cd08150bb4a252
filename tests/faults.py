"""Training and pushes that are killed, or whose disk is full, at random places, and what comes of running them again.

    python tests/faults.py --times 20 [--seed 0] [--first 0]

A trial is a function of the seed and its number: training of a small head or backbone ended by SIGKILL at an event of a step or
while a file of a checkpoint is written, or on a disk of random size; a push to a Hub on loopback ended by SIGKILL at one of its
requests, or with no room for its temporary files. Run again, training must end with the weights and the log of a run that
nothing happened to, bit for bit, and a push with its files, in one commit; until then the repository holds all of them or none.
One line a trial; exit status 1 if one of them came to something else. Disks need root, who may mount.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from conftest import ROOT, make_model
from hub_server import HubServer
from mrp_trainer.train.checkpoints import last_whole_checkpoint
from test_resume import OPTIONS, assert_equal, run_of, take_up
from training_runs import Result, Run, result, start

EVENTS = ("on_step_begin", "on_pre_optimizer_step", "on_step_end", "on_save")
WRITTEN = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")
TITLES = ["Upload a full model", "initial commit"]


@contextmanager
def disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """A file system of that size."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def enlarge(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=32m", str(folder)], check=True)


class Trials:
    """What all trials are compared with, and the trials."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trained: dict[str, Result] = {}
        for objective in OPTIONS:
            run = run_of(objective, folder / objective)
            assert start(run) == [0]
            self.trained[objective] = result(run)
        self.model = folder / "model"
        make_model().float().save_pretrained(self.model)
        self.hub = HubServer(folder / "hub").__enter__()
        self.hub.add_user("alice", token="hf_alice", organizations=["org"])
        with self.pushing("org/undisturbed", folder / "home") as process:
            assert process.wait() == 0
        self.pushed, self.requests = self.files("org/undisturbed"), len(self.hub.requests)

    def close(self) -> None:
        self.hub.close()

    def train_killed(self, draw: random.Random, folder: Path) -> str:
        step, objective = draw.randrange(1, 8), draw.choice(list(OPTIONS))
        if draw.random() < 0.5 and (step % 2 == 0 or step == 7):
            kill = (step, draw.choice(WRITTEN))
        else:
            kill = (step, draw.choice(EVENTS[:3]))
        run = run_of(objective, folder / "run", kill=kill)
        codes = start(run)
        if codes == [0] and "." in kill[1]:
            return f"{objective} was done before {kill[1]} of step {step} was seen"
        assert codes == [-signal.SIGKILL], codes
        return f"{objective} killed at {kill[1]} of step {step}, {self.taken_up(run)}"

    def train_starved(self, draw: random.Random, folder: Path) -> str:
        size, objective = draw.randrange(200, 2000), draw.choice(list(OPTIONS))
        with disk(folder / "disk", size) as small:
            run = run_of(objective, small)
            codes = start(run)
            assert codes in ([0], [1]), codes
            enlarge(small)
            return f"{objective} on {size} KB {'failed' if codes[0] else 'fitted'}, {self.taken_up(run)}"

    def taken_up(self, run: Run) -> str:
        """Go on, and compare."""
        newest = last_whole_checkpoint(run.folder)
        if newest is None:  # it begins, so with the weights that it began with
            run = replace(run, kill=None, resume=True)
            assert start(run) == [0]
        else:
            run = take_up(run)
        assert_equal(run, self.trained[str(run.options["objective"])])
        return f"taken up {'from the start' if newest is None else f'at {newest.name}'}"

    @contextmanager
    def pushing(self, repo: str, home: Path, **more: str) -> "Iterator[subprocess.Popen[str]]":
        """Push the model in a process of its own."""
        home.mkdir(exist_ok=True)
        environment = {**self.hub.environment(home, "hf_alice", **more), "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "mrp_trainer.cli", "push", str(self.model), repo]
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def push_killed(self, draw: random.Random, folder: Path) -> str:
        repo, at = f"org/killed-{draw.randrange(1 << 30)}", draw.randrange(self.requests)
        done, is_dead = draw.random() < 0.5, threading.Event()

        def held(body: bytes) -> bytes:
            is_dead.wait(60)
            return body

        fault = self.hub.fail(".*", skip=at, **({"change": held} if done else {"silent": True}))
        with self.pushing(repo, folder / "home") as process:
            while fault.times and process.poll() is None:
                time.sleep(0.01)
        is_dead.set()
        self.hub.faults.clear()
        what = f"killed at request {at} of {self.requests}, {'done' if done else 'not done'}"
        return f"{what}, {self.pushed_again(repo, folder / 'home')}"

    def push_starved(self, draw: random.Random, folder: Path) -> str:
        repo, size = f"org/starved-{draw.randrange(1 << 30)}", draw.randrange(4, 40)
        with disk(folder / "disk", size) as small:
            with self.pushing(repo, small / "home", TMPDIR=str(small)) as process:
                _, told = process.communicate()
            assert "Traceback" not in told, told
            if process.returncode == 0:
                assert self.files(repo) == self.pushed
            enlarge(small)
            ended = "failed" if process.returncode else "fitted"
            return f"with {size} KB for temporary files {ended}, {self.pushed_again(repo, small / 'home')}"

    def files(self, repo: str) -> dict[str, bytes]:
        """The files of a repository, whose card names it."""
        own = repo.partition("/")[2].encode()
        return {name: content.replace(own, b"it") for name, content in self.hub.files(repo).items()}

    def pushed_again(self, repo: str, home: Path) -> str:
        """Push once more, and compare."""
        was_there = self.hub.store.find(repo) is not None and "config.json" in self.hub.files(repo)
        assert not was_there or self.files(repo) == self.pushed, "neither all nor nothing was there"
        with self.pushing(repo, home) as process:
            _, told = process.communicate()
        assert process.returncode == 0, told
        assert (found := self.files(repo)) == self.pushed, [one for one in self.pushed if found.get(one) != self.pushed[one]]
        titles = [commit.title for commit in self.hub.repository(repo).history("main")]
        assert titles == TITLES, titles
        return f"{'all' if was_there else 'nothing'} was there, pushed again"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    equal, console = 0, os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # trainers print every step
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder))
        kinds = (trials.train_killed, trials.push_killed, trials.train_starved, trials.push_starved)
        for number in range(options.first, options.first + options.times):
            own = Path(folder) / f"trial-{number}"
            own.mkdir()
            try:
                told = kinds[number % 4](random.Random(f"{options.seed}/{number}"), own)
                equal += 1
            except Exception:
                told = f"NOT EQUAL\n{traceback.format_exc()}"
            print(f"{number:>3} {kinds[number % 4].__name__}: {told}", file=console)
            shutil.rmtree(own, ignore_errors=True)
        trials.close()
    print(f"{equal} of {options.times} equal", file=console)
    return int(equal < options.times)


if __name__ == "__main__":
    raise SystemExit(main())
