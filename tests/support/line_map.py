"""Which tests run which lines of the packages, measured once, so that
`python -m tests.mutants` runs
the tests that can see a fault.

Each file of tests runs once under a tracer, in a fork of a process that has imported the libraries,
and leaves a file in `build/mutants`: for each test that passed its seconds and the lines inside
functions that it ran. Other lines run when a module is imported, and what a process of its own runs
is not seen: for those all tests count that run some line of the file, and those of the room of the
same name. A source file that has changed since counts as such a line.
"""

import hashlib
import inspect
import json
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
# Calls of a function in a test whose lines are recorded; what only later ones run is not seen.
RECORDED_CALLS = 50
FOLDER = ROOT / "build" / "mutants"
PACKAGES = ("modeling_mrp", "trainer/mrp_trainer")
ROOMS = (
    "rules",
    "generate",
    "networks",
    "model",
    "train",
    "data",
    "evaluate",
    "publish",
    "cli",
    "picture",
    "doctor",
    "server",
    "kernels",
)
# These compare sources as texts, so that they see every change of one, whatever it does; or they
# need what is not here.
TEXTUAL = ("tests/model/test_bundle.py", "tests/kernels/test_compiled.py")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def sources(folders: Sequence[str] = PACKAGES) -> list[str]:
    """List the Python files of folders, or files, relative to the root."""
    files = (
        path
        for folder in folders
        for path in ([ROOT / folder] if folder.endswith(".py") else (ROOT / folder).rglob("*.py"))
    )
    return sorted(str(path.relative_to(ROOT)) for path in files)


def test_files() -> list[str]:
    files = (
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in sorted((ROOT / "tests" / room).glob("test_*.py"))
    )
    return [file for file in files if file not in TEXTUAL]


class LineRecorder:
    """A pytest plugin that records, for each test that passes, its seconds and the lines of the
    packages that it ran."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self.failed: set[str] = set()
        self.lines: defaultdict[str, set[int]] = defaultdict(set)
        self.calls: Counter[CodeType] = Counter()
        # of the source file of a function; "" for what is not to be traced
        self.names: dict[CodeType, str] = {}

    def name_of(self, code: CodeType) -> str:
        if code not in self.names:
            inside = code.co_filename.startswith(
                tuple(f"{ROOT / package}/" for package in PACKAGES)
            )
            function = bool(code.co_flags & inspect.CO_OPTIMIZED)
            self.names[code] = (
                os.path.relpath(code.co_filename, ROOT) if inside and function else ""
            )
        return self.names[code]

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not (name := self.name_of(frame.f_code)):
            return None
        self.calls[frame.f_code] += 1
        if self.calls[frame.f_code] > RECORDED_CALLS:
            return None
        lines = self.lines[name]

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line

    def pytest_runtest_logstart(self) -> None:
        self.lines.clear()
        self.calls.clear()
        threading.settrace(self.trace)
        sys.settrace(self.trace)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)
        test = self.tests.setdefault(report.nodeid, {"seconds": 0.0, "lines": {}})
        test["seconds"] = round(test["seconds"] + report.duration, 3)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        self.tests[nodeid]["lines"] = {name: sorted(lines) for name, lines in self.lines.items()}


def measure(file: str) -> tuple[str, float]:
    """Run a file of tests in a process of its own and write its lines; return its name and
    seconds."""
    import pytest

    start = time.monotonic()
    if not (child := os.fork()):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.chdir(ROOT)
        recorder = LineRecorder()
        pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", file], plugins=[recorder])
        passed = {
            test: facts for test, facts in recorder.tests.items() if test not in recorder.failed
        }
        record = {"sources": {name: digest(ROOT / name) for name in sources()}, "tests": passed}
        path = measured(file)
        path.with_suffix(".part").write_text(json.dumps(record), encoding="utf-8")
        path.with_suffix(".part").rename(path)
        os._exit(0)
    os.waitpid(child, 0)
    return file, time.monotonic() - start


def measure_all(words: Sequence[str], workers: int) -> int:
    """Run all files of tests, or those whose names have one of some words."""
    files = [file for file in test_files() if not words or any(word in file for word in words)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for count, (file, seconds) in enumerate(pool.imap_unordered(measure, files), 1):
            print(f"{count}/{len(files)} {file}: {seconds:.0f} s", flush=True)
    return 0


def measured(file: str) -> Path:
    return FOLDER / f"{file.replace('/', '.')}.json"


def is_older(path: Path, other: Path) -> bool:
    return not path.exists() or path.stat().st_mtime < other.stat().st_mtime


@dataclass(frozen=True)
class LineMap:
    """Lines that tests ran, from the files in `build/mutants`.

    Attributes:
        seconds: Of each test.
        lines: For each source file, for each test that ran it, the lines.
        changed: Source files that are not what they were when they were measured.
        unmeasured: Files of tests that have no measurement, or were changed since.
    """

    seconds: Mapping[str, float]
    lines: Mapping[str, Mapping[str, frozenset[int]]]
    changed: frozenset[str]
    unmeasured: tuple[str, ...]

    @classmethod
    def load(cls) -> "LineMap":
        seconds: dict[str, float] = {}
        lines: defaultdict[str, dict[str, frozenset[int]]] = defaultdict(dict)
        changed: set[str] = set()
        now = {name: digest(ROOT / name) for name in sources()}
        for path in sorted(FOLDER.glob("tests.*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            changed |= {name for name in now if now[name] != record["sources"].get(name)}
            for test, facts in record["tests"].items():
                seconds[test] = facts["seconds"]
                for name, numbers in facts["lines"].items():
                    lines[name][test] = frozenset(numbers)
        unmeasured = tuple(file for file in test_files() if is_older(measured(file), ROOT / file))
        return cls(seconds, lines, frozenset(changed), unmeasured)

    def tests_of(self, file: str, first: int, last: int, function: range) -> list[str]:
        """List the tests that can see a change of some lines, likely finders first.

        Args:
            file: The source file.
            first, last: The lines that changed.
            function: Lines of the function around them; empty if there is none.
        """
        ran = self.lines.get(file, {})
        lines = range(first, last + 1) if function and file not in self.changed else range(0)
        seen = {
            test: numbers.intersection(function)
            for test, numbers in ran.items()
            if not numbers.isdisjoint(lines)
        }
        return list(self.varied(seen)) or list(
            dict.fromkeys((*self.of_room(file), *self.varied(ran)))
        )

    def varied(self, ran: Mapping[str, frozenset[int]]) -> Iterator[str]:
        """Order tests so that the first ones differ in the lines that they ran, and quick ones come
        before slow ones."""
        groups: defaultdict[frozenset[int], list[str]] = defaultdict(list)
        for test in sorted(ran, key=lambda test: self.seconds[test]):
            groups[ran[test]].append(test)
        while groups:
            for key in list(groups):
                yield groups[key].pop(0)
                if not groups[key]:
                    del groups[key]

    def of_room(self, file: str) -> list[str]:
        """List the tests of the room that has the name of the file or of its folder, quick ones
        first."""
        tests = (test for test in self.seconds if test.startswith(rooms_of(file)))
        return sorted(tests, key=lambda test: self.seconds[test])

    def unmeasured_of(self, file: str) -> list[str]:
        """List the files of tests of the room, and those that test the file by its name, that were
        not measured."""
        return [
            tests
            for tests in self.unmeasured
            if tests.startswith(rooms_of(file)) or Path(file).stem in tests
        ]


def rooms_of(file: str) -> tuple[str, ...]:
    names = {*Path(file).parts, Path(file).stem}
    return tuple(f"tests/{room}/" for room in ROOMS if room in names)
