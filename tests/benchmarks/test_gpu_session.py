"""The session on a GPU: parts that fail, hang or are cut short leave the others, and the page."""

import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import gpu_session
from benchmarks.gpu_session import PARTS, main, page, run_command

SCRIPTS = {
    "good": """write({"table": "Checks", "check": "a | b", "verdict": "ok", "ms": 1.23456})""",
    "wrong": """write({"table": "Checks", "verdict": "**failed**"})""",
    "bad": """write({"table": "Times", "ms": 2}); raise ValueError("no\\nmemory")""",
    "hangs": """write({"table": "Times", "ms": 3}); f.write('{"ta'); f.flush(); time.sleep(99)""",
    "dies": "import os; os.abort()",
    "late": "pass",
}
BEGIN = """
import json, time
f = open({path!r}, "a")
def write(line):
    print(json.dumps(line), file=f, flush=True)
"""


def test_what_becomes_of_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def words(command: str, part: str, seconds: float, options: Namespace) -> list[str]:
        path = tmp_path / command / f"{part}.jsonl"
        return [sys.executable, "-c", BEGIN.format(path=str(path)) + SCRIPTS[part]]

    parts = {name: 0.02 if name == "hangs" else 1.0 for name in SCRIPTS}
    monkeypatch.setattr(gpu_session, "PARTS", {"time": parts})
    monkeypatch.setattr(gpu_session, "words_of", words)
    monkeypatch.setattr(gpu_session, "GRACE", 1.0)
    options = Namespace(output=str(tmp_path), minutes=10.0, only=None, stand_ins=False)
    outcomes = run_command("time", options)
    verdicts = {outcome.part: (outcome.verdict, outcome.failed) for outcome in outcomes}
    assert verdicts == {
        "good": ("ok", False),
        "wrong": ("ok", True),
        "bad": ("**failed**", True),
        "hangs": ("out of time", False),
        "dies": ("**failed**", True),
        "late": ("ok", False),
    }
    text = (tmp_path / "time.md").read_text()
    assert text == page("time", outcomes, options)
    assert "| a / b | ok | 1.235 |" in text
    assert "| bad | **failed** | 0 | 1 | memory |" in text
    assert "## Times\n\n| ms |\n| --- |\n| 2 |\n| 3 |\n" in text
    options.minutes = 0.1  # under the least that a part is begun with
    skipped = run_command("time", options)
    assert {(outcome.verdict, outcome.failed) for outcome in skipped} == {("skipped", False)}


def test_every_part_is_there() -> None:
    """In ten minutes a command may begin at least its first four parts."""
    for command, parts in PARTS.items():
        module = import_module(f"benchmarks.gpu.{command}")
        assert all(callable(getattr(module, part)) for part in parts)
        assert sum(list(parts.values())[:4]) <= gpu_session.MINUTES


def test_a_part_on_stand_ins(tmp_path: Path) -> None:
    """In processes of their own."""
    parts = ["machine", "broken"]
    main(["correctness", "--only", *parts, "--stand-ins", "--output", str(tmp_path)])
    text = (tmp_path / "correctness.md").read_text()
    assert text.startswith("# A session on a GPU: correctness\n\n**A rehearsal on a CPU**")
    for part in parts:
        assert f"| {part} | ok |" in text
    assert "| bfloat16 |" in text
