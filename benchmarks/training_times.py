"""Time what a user of `mrp train head` waits for: a few chats of one's own, and a run on many
records that is started again.

    python -m benchmarks.training_times
    python -m benchmarks.training_times --chats 0

Two measurements of the embedded checkpoint, each in processes of its own, with files in a temporary
folder that are removed. First `mrp train head` without any flags but model, data and output, on 50
chats, from the command's start to its end. Then a run on 100,000 chats, from the start of Python to
its first step: where nothing is encoded yet, and where it goes on from its checkpoint. Prints a
JSON line each, with seconds of wall clock and of a CPU; the latter hardly grow with what else a
machine does, and leave out the processes that encode. The exit status is 1 if the chats take more
than 60 seconds of a CPU, or the repeated run more than 10 to its first step.
"""

import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .common import TINY, parser_of

LONGEST_TRAINING, LONGEST_START = 60.0, 10.0

# Goes on from the newest checkpoint, if any, for a step, and tells when it begins.
_UNTIL_FIRST_STEP = """
import sys, time
from mrp_trainer.train.runs import open_run
from mrp_trainer.train.settings import read_settings
from transformers import TrainerCallback

class OneStep(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        print("first step at", time.time(), time.process_time(), state.global_step, flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = control.should_training_stop = True

model, data, folder = sys.argv[1:]
flags = {"model": model, "data": [data], "output_dir": folder, "max_steps": 1000}
run = open_run(read_settings("mrp", None, flags, ["use_cpu=true", "disable_tqdm=true"]))
run.trainer.add_callback(OneStep())
run.trainer.train(resume_from_checkpoint=True)
"""


def chats(count: int) -> Iterator[str]:
    """Make short chats of different lengths, as JSON lines."""
    rng = random.Random(0)
    for number in range(count):
        words = " ".join(
            rng.choices(("apples", "pens", "coins", "and", "more"), k=rng.randint(2, 9))
        )
        question = f"Ana has {number} {words}. How many does she have?"
        answer = f"n = {number} + 0 = {number}\n#### {number}"
        repeats = (("user", question), ("assistant", answer))
        yield json.dumps(
            {"messages": [{"role": role, "content": content} for role, content in repeats]}
        )


def run(arguments: list[str], folder: Path) -> tuple[str, float, float, float]:
    """Run Python with arguments; return its output, when it started, and its seconds of wall clock
    and of CPUs."""
    environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    previous = _cpu_seconds()
    started = time.time()
    finished = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True
    )
    wall = time.time() - started
    if finished.returncode:
        raise SystemExit(finished.stderr)
    return finished.stdout, started, wall, _cpu_seconds() - previous


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def own_chats(count: int, folder: Path) -> dict[str, Any]:
    """Time the training of a few chats without flags."""
    data = folder / "chats.jsonl"
    data.write_text("\n".join(chats(count)))
    command = ["-m", "mrp_trainer.cli", "train", "head", "--model", str(TINY)]
    command += ["--data", str(data), "--output-dir", str(folder / "head")]
    output, _, wall, cpu = run(command, folder)
    verdict = next(line for line in output.splitlines() if line.startswith("verdict"))
    return {
        "measured": "mrp train head without flags",
        "chats": count,
        "seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "verdict": verdict,
    }


def starts(count: int, folder: Path) -> list[dict[str, Any]]:
    """Time a run until its first step, with nothing encoded, and again from its checkpoint."""
    data = folder / "many.jsonl"
    data.write_text("\n".join(chats(count)))
    lines = []
    for name in ("first start", "started again"):
        arguments = ["-c", _UNTIL_FIRST_STEP, str(TINY), str(data), str(folder / "run")]
        output, started, _, _ = run(arguments, folder)
        begun, cpu, step = map(float, output.rpartition("first step at ")[2].split()[:3])
        lines.append(
            {
                "measured": f"until the first step, {name}",
                "records": count,
                "steps_made_before": int(step),
                "seconds": round(begun - started, 1),
                "cpu_seconds_of_its_process": round(cpu, 1),
            }
        )
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_of("training_times", __doc__ or "")
    parser.add_argument("--chats", type=int, default=50)
    parser.add_argument("--records", type=int, default=100_000)
    options = parser.parse_args(arguments)
    late = False
    with TemporaryDirectory() as name:
        if options.chats:
            trained = own_chats(options.chats, Path(name))
            print(json.dumps(trained), flush=True)
            late = trained["cpu_seconds"] > LONGEST_TRAINING
        if options.records:
            begun = starts(options.records, Path(name))
            for line in begun:
                print(json.dumps(line), flush=True)
            late = late or begun[-1]["cpu_seconds_of_its_process"] > LONGEST_START
    if late:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
