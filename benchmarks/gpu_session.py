"""Half an hour on a GPU: what is worth knowing of it, in three commands of at most ten minutes.

    python -m benchmarks.gpu_session correctness
    python -m benchmarks.gpu_session time
    python -m benchmarks.gpu_session training

Each runs its parts one after the other, the most useful first, in processes of their own: a part
that fails, hangs or breaks the device leaves the others. After every part the page is written
anew: `OUTPUT/correctness.md`, with the numbers in `OUTPUT/correctness/PART.jsonl` and what parts
print in `PART.log`. `--minutes` limits a command: parts for which no time is left are skipped.
`--only` runs some parts alone. Nothing is read from a network. The exit status is 1 if a part
failed or a check in it did.

    python -m benchmarks.gpu_session correctness time training --stand-ins --output build/rehearsal

rehearses all of it without a GPU: on a CPU, with small models, interpreted kernels, and tapes of
operations in place of CUDA graphs. Its times mean nothing.
"""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

# Nothing but the standard library is imported here: it has to run wherever Python does.
ROOT = Path(__file__).parent.parent
# By command its parts, functions of `gpu/COMMAND.py`, the most useful first; and the most minutes
# that each may take, in a session of `MINUTES`.
PARTS = {
    "correctness": {
        "machine": 0.7,
        "embedded": 3.0,
        "published": 2.0,
        "kernels": 2.0,
        "recordings": 1.5,
        "broken": 1.0,
        "tests": 3.0,
        "sanitizer": 1.5,
    },
    "time": {
        "rounds": 2.5,
        "profile": 1.0,
        "texts": 1.5,
        "costs": 1.5,
        "embedded": 1.5,
        "baselines": 2.0,
        "long_prefix": 1.5,
        "larger": 2.0,
    },
    "training": {
        "step": 3.0,
        "gradient": 1.5,
        "decoding": 2.0,
        "dense_step": 1.5,
        "commands": 3.0,
    },
}
MINUTES = 10.0
# Seconds of a part beyond its share before it is killed, and seconds under which none is begun.
GRACE, LEAST = 20.0, 10.0


@dataclass
class Outcome:
    """How a part ended: `ok`, `failed`, `out of time` or `skipped`; its seconds; the last line that
    it printed if it failed; and the rows of its tables."""

    part: str
    verdict: str
    seconds: float
    note: str
    lines: list[dict[str, Any]]

    @property
    def failed(self) -> bool:
        """Whether the part or a check in it failed."""
        verdicts = [line.get("verdict") for line in self.lines]
        return self.verdict == "**failed**" or "**failed**" in verdicts


def environment(stand_ins: bool) -> dict[str, str]:
    """Return the environment variables of a part."""
    folders = [str(ROOT), str(ROOT / "trainer"), str(ROOT / "serving"), str(ROOT / "tests")]
    folders += filter(None, [os.environ.get("PYTHONPATH")])
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    variables["PYTHONPATH"] = os.pathsep.join(folders)
    if stand_ins:
        variables |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return variables


def words_of(command: str, part: str, seconds: float, options: Namespace) -> list[str]:
    """Return the command line of a part."""
    words = [sys.executable, "-m", "benchmarks.gpu_session", command, "--output", options.output]
    words += ["--part", part, "--seconds", f"{seconds:.0f}"]
    return words + ["--stand-ins"] * options.stand_ins


def run_part(command: str, part: str, folder: Path, seconds: float, options: Namespace) -> Outcome:
    """Run a part in a process of its own, for at most `seconds`; read its lines."""
    lines = folder / f"{part}.jsonl"
    lines.write_text("")
    start = time.monotonic()
    verdict = "ok"
    note = ""
    with (folder / f"{part}.log").open("w") as log:
        process = subprocess.Popen(
            words_of(command, part, seconds, options),
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment(options.stand_ins),
            start_new_session=True,
        )
        try:
            if process.wait(seconds + GRACE):
                verdict = "**failed**"
        except subprocess.TimeoutExpired:
            verdict = "out of time"
        finally:
            if process.poll() is None:  # with all that it started
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if verdict != "ok":
        printed = (folder / f"{part}.log").read_text(errors="replace").strip().splitlines()
        note = printed[-1][:300] if printed else f"exit status {process.returncode}"
    return Outcome(part, verdict, time.monotonic() - start, note, read_lines(lines))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the rows that a part wrote; a last one that was cut short is left out."""
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(fields)} |" for fields in lines)


def cell(value: Any) -> str:
    """Format a cell."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "/").replace("\n", " ")


def page(command: str, outcomes: list[Outcome], options: Namespace) -> str:
    """Format the outcomes of a command as Markdown."""
    sections = [f"# A session on a GPU: {command}"]
    if options.stand_ins:
        sections.append(
            "**A rehearsal on a CPU**, with small models and stand-ins for the device: its times "
            "mean nothing."
        )
    rows = []
    for outcome in outcomes:
        failed_checks = sum(line.get("verdict") == "**failed**" for line in outcome.lines)
        note = outcome.note or (f"{failed_checks} failed" if failed_checks else "")
        row = [outcome.part, outcome.verdict, f"{outcome.seconds:.0f}", len(outcome.lines), note]
        rows.append([cell(value) for value in row])
    sections += ["## Parts", table(["part", "", "s", "lines", "note"], rows)]
    by_title: dict[str, list[dict[str, Any]]] = {}
    for outcome in outcomes:
        for line in outcome.lines:
            fields = {name: value for name, value in line.items() if name != "table"}
            by_title.setdefault(line["table"], []).append(fields)
    for title, lines in by_title.items():
        columns = list(dict.fromkeys(name for line in lines for name in line))
        body = [[cell(line.get(column)) for column in columns] for line in lines]
        heads = [column.replace("_", " ") for column in columns]
        sections += [f"## {title}", table(heads, body)]
    return "\n\n".join(sections) + "\n"


def run_command(command: str, options: Namespace) -> list[Outcome]:
    """Run the parts of a command as long as there is time; write its page after each."""
    end = time.monotonic() + 60 * options.minutes
    folder = Path(options.output) / command
    folder.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for part, minutes in PARTS[command].items():
        if options.only and part not in options.only:
            continue
        remaining = end - time.monotonic() - GRACE
        share = 60 * minutes * max(1.0, options.minutes / MINUTES)
        if remaining < LEAST:
            outcomes.append(Outcome(part, "skipped", 0.0, "no time is left", []))
        else:
            print(f"{command}: {part}", file=sys.stderr, flush=True)
            outcomes.append(run_part(command, part, folder, min(remaining, share), options))
        path = Path(options.output) / f"{command}.md"
        path.write_text(page(command, outcomes, options))
    return outcomes


def run_here(command: str, options: Namespace) -> None:
    """Run one part in this process."""
    import torch

    from .gpu.session import Session

    if options.stand_ins:
        from .gpu.stand_ins import stand_in

        stand_in()
    device = torch.device("cpu" if options.stand_ins else "cuda")
    run = getattr(import_module(f".gpu.{command}", __package__), options.part)
    lines = Path(options.output) / command / f"{options.part}.jsonl"
    with lines.open("a") as file:
        run(Session(device, options.stand_ins, time.monotonic() + options.seconds, file))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = ArgumentParser(
        prog="python -m benchmarks.gpu_session",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="+", choices=[*PARTS])
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of each command, at most")
    parser.add_argument("--output", default="gpu_session", help="folder of pages and numbers")
    names = sorted({name for parts in PARTS.values() for name in parts})
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help=", ".join(names))
    parser.add_argument("--stand-ins", action="store_true", help="rehearse on a CPU")
    parser.add_argument("--part", choices=names, help="run one part in this process")
    parser.add_argument("--seconds", type=float, default=600.0, help="of that part")
    options = parser.parse_args(arguments)
    options.output = str(Path(options.output).resolve())
    if options.part is not None:
        run_here(options.command[0], options)
        return
    failed = []
    for command in options.command:
        outcomes = run_command(command, options)
        print(Path(options.output) / f"{command}.md")
        failed += [f"{command} {outcome.part}" for outcome in outcomes if outcome.failed]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
