"""Load a repository for the first time by several processes at once on a busy machine, and count
the loads that fail.

    python -m benchmarks.first_loads [--loads 400] [--source hub] [--processes 4] [--busy 8]
        [--fresh]

transformers copies a repository's code into its cache of modules without a lock. Each round begins
with an empty cache: the processes are released at once, load the model with
`trust_remote_code=True`, and say what they met. They are forks of one that has imported torch and
transformers, which brings their copies closer together; with `--fresh` each is a Python of its own,
as `torchrun` starts them. `--source hub` reads a snapshot in the Hub's cache, `--source folder` a
local folder. The last line has the counts, and the exit status is 1 if a load failed. Nothing is
downloaded.
"""

import argparse
import hashlib
import importlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

TINY = Path(__file__).parent.parent / "hub_configs" / "sdar-tiny-mrp"
NAME, COMMIT = "org/first-loads", hashlib.sha1(b"first loads").hexdigest()
LOAD = """
import sys
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
"""


def stored(folder: Path, hf_home: Path) -> None:
    """Put a checkpoint's folder where a download would have put it in the Hub's cache under
    `hf_home`."""
    repository = hf_home / "hub" / f"models--{NAME.replace('/', '--')}"
    shutil.copytree(folder, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` processes busy meanwhile."""
    spinning = []
    for _ in range(count):
        spinning.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def load_in_fork(source: str, modules: Path, release: float, errors: Path) -> None:
    """Load a model in this process, a fork, from an empty cache of modules; write the error's last
    line to a file."""
    from transformers import AutoModelForCausalLM, dynamic_module_utils

    dynamic_module_utils.HF_MODULES_CACHE = str(modules)
    # spins, since processes that sleep wake up one after the other
    while time.monotonic() < release:
        pass
    try:
        with redirect_stdout(None), redirect_stderr(None):
            AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
    except BaseException as error:
        (errors / str(os.getpid())).write_text(
            f"{type(error).__name__}: {str(error).splitlines()[0]}"
        )


def round_of_forks(source: str, modules: Path, processes: int, errors: Path) -> None:
    """Load by forks of this process."""
    context: Any = multiprocessing.get_context("fork")
    release = time.monotonic() + 0.05
    forks = []
    for _ in range(processes):
        arguments = (source, modules, release, errors)
        forks.append(context.Process(target=load_in_fork, args=arguments))
    for fork in forks:
        fork.start()
    for number, fork in enumerate(forks):
        fork.join()
        if fork.exitcode:
            (errors / f"status {number}").write_text(f"ended with status {fork.exitcode}")


def round_of_fresh(source: str, modules: Path, processes: int, errors: Path) -> None:
    """Load by processes that import all they need."""
    environment = {**os.environ, "HF_MODULES_CACHE": str(modules)}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", LOAD, source]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    runs = []
    for _ in range(processes):
        runs.append(subprocess.Popen(command, env=environment, cwd=modules.parent, **quiet))
    for number, run in enumerate(runs):
        text = run.communicate()[1]
        if run.returncode:
            (errors / str(number)).write_text((text.strip().splitlines() or ["no output"])[-1])


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default=str(TINY), help="folder of the checkpoint, with its code"
    )
    parser.add_argument("--loads", type=int, default=400)
    parser.add_argument("--processes", type=int, default=4, help="loads at once")
    parser.add_argument("--busy", type=int, default=8, help="processes that do nothing but compute")
    parser.add_argument("--source", choices=("hub", "folder"), default="hub")
    parser.add_argument(
        "--fresh", action="store_true", help="start a Python for each load in place of a fork"
    )
    args = parser.parse_args()
    hf_home = Path(tempfile.mkdtemp())
    os.environ |= {
        "HF_HOME": str(hf_home),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    round_of: Callable[..., None] = round_of_fresh
    if not args.fresh:
        round_of = round_of_forks
        for name in (
            "torch",
            "transformers",
            "transformers.generation",
            "transformers.models.qwen3.modeling_qwen3",
        ):
            importlib.import_module(name)
        importlib.import_module("torch").set_num_threads(1)
    failures: Counter[str] = Counter()
    loads = 0
    modules = hf_home / "modules"
    errors = hf_home / "errors"
    try:
        stored(Path(args.model), hf_home)
        source = (
            NAME
            if args.source == "hub"
            else str(shutil.copytree(args.model, hf_home / "checkpoint"))
        )
        with busy(args.busy):
            while loads < args.loads:
                errors.mkdir()
                round_of(source, modules, args.processes, errors)
                loads += args.processes
                for path in errors.iterdir():
                    failures[path.read_text()[:200].replace(str(hf_home), "")] += 1
                shutil.rmtree(errors)
                shutil.rmtree(modules, ignore_errors=True)
    except KeyboardInterrupt:  # what was counted is printed
        pass
    finally:
        shutil.rmtree(hf_home, ignore_errors=True)
    settings = {
        "source": args.source,
        "processes": args.processes,
        "busy": args.busy,
        "fresh": args.fresh,
    }
    print(
        json.dumps(
            {**settings, "loads": loads, "failed": failures.total(), "errors": dict(failures)}
        )
    )
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
