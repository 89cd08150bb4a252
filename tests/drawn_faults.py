"""Faults drawn at random from the syntax trees of the packages, each tried on the tests that can
see it.

`python -m tests.mutants --measure` has to run before: it measures which tests run which lines
(`line_map.py`). Then `--seed 7 --count 150 --only trainer/mrp_trainer` draws faults, as many of
each kind (`fault_kinds.py`), and tries each in a copy of the tree, in a fork of a process that has
collected the tests (`fault_server.py`) or has imported the libraries alone, up to the first test
that fails. Results lie in `build/mutants`; the same
command goes on where it was interrupted, and tries those again that survived.
`tests/harmless_faults.json` lists faults that no test can find, with the reason.
"""

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import cache_from_source
from pathlib import Path
from queue import Empty
from types import ModuleType
from typing import Any

from tests.support.fault_kinds import KINDS, Fault, faults_of
from tests.support.fault_server import FaultServer, exchange
from tests.support.line_map import FOLDER, ROOT, LineMap, sources

HARMLESS = ROOT / "tests" / "harmless_faults.json"
# of a process that tries a fault; one that takes longer has no end
CPU_SECONDS, WALL_SECONDS = 300, 1200
ENDLESS, CRASHED, HARMLESS_NAME = "a run without end", "a crash", "harmless"
OUT_OF_REACH = "not within a function"
Result = dict[str, Any]


def harmless() -> dict[tuple[str, str, str], str]:
    """Read the reasons by `Fault.key`; an error if a line is not in its file."""
    entries = json.loads(HARMLESS.read_text(encoding="utf-8"))
    for entry in entries:
        if entry["before"] not in " ".join(
            (ROOT / entry["file"]).read_text(encoding="utf-8").split()
        ):
            raise SystemExit(
                f"{entry['file']} has no {entry['before']!r}, mend {HARMLESS.relative_to(ROOT)}"
            )
    return {
        (entry["file"], entry["before"], entry["after"]): entry["harmless"] for entry in entries
    }


def drawn(files: Iterable[str], seed: int, count: int) -> list[Fault]:
    """Draw faults, the same number of each kind as far as there are so many.

    Whether a fault is drawn depends on the seed and its own lines, so that an edit elsewhere draws
    few others.
    """
    texts = {file: (ROOT / file).read_bytes() for file in files}
    by_kind: dict[str, list[Fault]] = {kind: [] for kind in KINDS}
    for file in texts:
        for fault in faults_of(ROOT, file):
            by_kind[fault.kind].append(fault)
    for faults in by_kind.values():
        faults.sort(key=lambda fault: random.Random(f"{seed} {fault.key}").random())
    chosen: dict[tuple[str, str, str], Fault] = {}
    while len(chosen) < count and any(by_kind.values()):
        for faults in by_kind.values():
            while faults and len(chosen) < count:
                fault = faults.pop()
                if fault.key not in chosen and fault.valid(texts[fault.file]):
                    chosen[fault.key] = fault
                    break
    return list(chosen.values())


class Tree:
    """A copy of the tree in which one file at a time is faulty.

    Args:
        folder: Where to make it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            check=True,
        )
        for name in listed.stdout.decode().split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)

    def first_failure(
        self, tests: Sequence[str], fault: Fault | None = None, options: Sequence[str] = ("-x",)
    ) -> str:
        """Run tests in a process that imports the package; return the names of those that failed,
        by lines, or what else ended it."""

        def run() -> str:
            self.enter()
            return self.run(tests, options)

        return self.outcome(run, fault)

    def outcome(self, work: Callable[[], str], fault: Fault | None = None) -> str:
        """Call `work` in a process of its own, with a fault in its file, and return its result, or
        what else ended the process."""
        path = self.folder / fault.file if fault else None
        if fault and path:
            source = (ROOT / fault.file).read_bytes()
            self.write(path, fault.applied(source))
        report = self.folder.with_suffix(".report")
        report.unlink(missing_ok=True)
        if not (child := os.fork()):
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
            from transformers import dynamic_module_utils

            # where code of repositories is kept for later loads, that of another fault otherwise
            with tempfile.TemporaryDirectory() as modules:
                dynamic_module_utils.HF_MODULES_CACHE = modules
                report.write_text(work(), encoding="utf-8")
            os._exit(0)
        status = waited(child)
        if fault and path:
            self.write(path, source)
        if status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
            return ENDLESS
        return report.read_text(encoding="utf-8") if report.exists() else CRASHED

    def write(self, path: Path, source: bytes) -> None:
        path.write_bytes(source)
        # it has the seconds of a file's time, and its size
        Path(cache_from_source(str(path))).unlink(missing_ok=True)

    def enter(self) -> None:
        """Let this process, and those that it starts, import what is in the copy; it says
        nothing."""
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        os.chdir(self.folder)
        inside = [str(self.folder / part) for part in ("", "trainer", "serving", "tests")]
        # which processes that tests start would import
        sys.modules["__main__"] = ModuleType("__main__")
        os.environ["PYTHONPATH"] = os.pathsep.join(inside[:3])
        sys.path[:] = [
            *inside,
            *(
                entry
                for entry in sys.path
                if not Path(entry or ".").resolve().is_relative_to(ROOT / "tests")
            ),
        ]

    def run(self, tests: Sequence[str], options: Sequence[str]) -> str:
        import pytest

        class Failures:
            """A pytest plugin that notes failures; a test that was renamed is none."""

            names: list[str] = []

            def pytest_collectreport(
                self, report: pytest.CollectReport | pytest.TestReport
            ) -> None:
                if report.failed:
                    self.names.append(report.nodeid)

            pytest_runtest_logreport = pytest_collectreport

        pytest.main(
            ["-q", *options, "-p", "no:cacheprovider", "-p", "no:xdist", *tests],
            plugins=[Failures()],
        )
        return "\n".join(Failures.names)


def waited(child: int) -> int | None:
    """Wait for a child, end what it started, and return its status; None if it took too long."""
    end, status = time.monotonic() + WALL_SECONDS, None
    while time.monotonic() < end:
        ended, state = os.waitpid(child, os.WNOHANG)
        if ended:
            status = state
            break
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status


def chosen_tests(fault: Fault, lines: LineMap, seconds: float) -> list[str]:
    """List the tests that can see a fault, in order, as many as took some seconds together, the
    first in any case; then files of tests that were not measured."""
    tests: list[str] = []
    for test in lines.tests_of(fault.file, fault.first, fault.last, fault.function):
        seconds -= lines.seconds[test]
        if tests and seconds < 0:
            break
        tests.append(test)
    return [*tests, *lines.unmeasured_of(fault.file)]


_tree: Tree
_lines: LineMap


def prepare(folder: str, lines: LineMap) -> None:
    """Make the copy of a worker."""
    global _tree, _lines
    _tree, _lines = Tree(Path(folder) / str(os.getpid())), lines


def tried(work: tuple[Fault, float]) -> Result:
    """Try a fault in a process that imports the package anew."""
    fault, seconds = work
    tests = chosen_tests(fault, _lines, seconds)
    start = time.monotonic()
    failure = _tree.first_failure(tests, fault).split("\n")[0] if tests else ""
    return result_of(fault, tests, start, failure)


def serve(folder: str, files: Sequence[str], faults: Any, results: Any) -> None:
    """Try faults with their tests from a queue until it gives None, in forks of this process, which
    has collected files of tests; the results are pairs of a fault and its result, None if it needs
    `tried`."""
    tree = Tree(Path(folder) / str(os.getpid()))

    def work(server: FaultServer) -> None:
        while (chosen := faults.get()) is not None:
            fault, tests = chosen
            start = time.monotonic()
            failure = OUT_OF_REACH
            if items := server.named(tests):
                failure = tree.outcome(partial(attempt, server, fault, items), fault)
            result = result_of(fault, tests, start, failure)
            results.put((fault, None if failure == OUT_OF_REACH else result))

    def attempt(server: FaultServer, fault: Fault, items: Sequence[Any]) -> str:
        source = (ROOT / fault.file).read_bytes()
        if not exchange(tree.folder / fault.file, source, fault, server.executed):
            return OUT_OF_REACH
        return server.first_failure(items)

    tree.enter()
    FaultServer(work).serve(files)


def tried_all(
    faults: Sequence[Fault], lines: LineMap, seconds: float, workers: int
) -> Iterator[Result]:
    """Try faults, those within functions first, in workers that have collected the tests."""
    context = multiprocessing.get_context("fork")
    queue, results = context.Queue(), context.Queue()
    chosen = [(fault, chosen_tests(fault, lines, seconds)) for fault in faults]
    files = sorted({test.split("::")[0] for _, tests in chosen for test in tests})
    left = []
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (scratch, files, queue, results)
        servers = [context.Process(target=serve, args=arguments) for _ in range(workers)]
        for server in servers:
            server.start()
        for work in [*chosen, *[None] * workers]:
            queue.put(work)
        for _ in faults:
            fault, result = taken(results, servers)
            if result is None:
                left.append(fault)
            else:
                yield result
        for server in servers:
            server.join()
        with context.Pool(workers, prepare, (scratch, lines)) as pool:
            yield from pool.imap_unordered(tried, [(fault, seconds) for fault in left])


def taken(results: Any, servers: Sequence[Any]) -> Any:
    """Wait for a result; an error if no server is left to give one."""
    while True:
        try:
            return results.get(timeout=10)
        except Empty:
            if not any(server.is_alive() for server in servers):
                raise SystemExit(
                    "the tests could not be collected: run them without a fault"
                ) from None


def result_of(fault: Fault, tests: Sequence[str], start: float, failure: str) -> Result:
    return {
        **described(fault),
        **{"tests": len(tests), "seconds": round(time.monotonic() - start, 1), "found_by": failure},
    }


def key_of(result: Result) -> tuple[str, str, str]:
    return result["file"], result["before"], result["after"]


def recorded(path: Path) -> dict[tuple[str, str, str], Result]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {key_of(result): result for result in map(json.loads, lines)}


def false_alarms(results: Sequence[Result], folder: Path) -> list[str]:
    """Run the tests that found faults without a fault; return those that fail."""
    tests = sorted(
        {result["found_by"] for result in results if result["found_by"].startswith("tests/")}
    )
    files = {test.split("::")[0] for test in tests}
    failures: list[str] = []
    for file in sorted(files):
        failures += (
            Tree(folder / f"sound-{Path(file).stem}")
            .first_failure([test for test in tests if test.split("::")[0] == file], options=())
            .split("\n")
        )
    return [failure for failure in failures if failure]


def table(results: Sequence[Result], column: str, name: Callable[[Result], str]) -> str:
    """Make a table of Markdown: how many faults were drawn, found, harmless, and survived, by a
    property of theirs."""
    lines = [f"| {column} | faults | found | harmless | survive |", "|---|---|---|---|---|"]
    groups = {
        key: [result for result in results if name(result) == key]
        for key in sorted(set(map(name, results)))
    }
    for key, group in {**groups, "all": results}.items():
        counts = Counter(
            "harmless" if result["found_by"] == HARMLESS_NAME else bool(result["found_by"])
            for result in group
        )
        lines.append(
            f"| {key} | {len(group)} | {counts[True]} | {counts['harmless']} | {counts[False]} |"
        )
    return "\n".join(lines)


def room(result: Result) -> str:
    return str(Path(result["file"]).parent)


def campaign(seed: int, count: int, only: Sequence[str], seconds: float, workers: int) -> int:
    """Draw faults, try those that no earlier run has found, print each result and tables; return 1
    if one survives."""
    lines, known = LineMap.load(), harmless()
    if not lines.seconds:
        raise SystemExit("no lines are measured yet: run python -m tests.mutants --measure")
    path = FOLDER / f"seed-{seed}.jsonl"
    earlier = recorded(path)
    results: list[Result] = []
    left: list[Fault] = []
    for fault in drawn(sources(only), seed, count):
        if fault.key in known:
            results.append({**described(fault), "found_by": HARMLESS_NAME})
        elif earlier.get(fault.key, {}).get("found_by"):
            results.append(earlier[fault.key])
        else:
            left.append(fault)
    total = len(results) + len(left)
    print(f"{total} faults, {len(results)} of them known to be found or harmless", flush=True)
    with path.open("a", encoding="utf-8") as file:
        for result in tried_all(left, lines, seconds, workers):
            results.append(result)
            print(json.dumps(result), file=file, flush=True)
            print(f"{len(results)}/{total} {summary_of(result)}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        alarms = false_alarms(results, Path(scratch))
    for result in results:
        if result["found_by"] in alarms:
            result["found_by"] = ""
    survivors = [result for result in results if not result["found_by"]]
    print("", *map(summary_of, survivors), sep="\n")
    print(*(f"fails without a fault, so that it finds none: {alarm}" for alarm in alarms), sep="\n")
    print(
        table(results, "kind", lambda result: str(result["kind"])),
        table(results, "folder", room),
        sep="\n\n",
    )
    return int(bool(survivors))


def described(fault: Fault) -> Result:
    return {
        "file": fault.file,
        "line": fault.line,
        "kind": fault.kind,
        "before": fault.before,
        "after": fault.after,
    }


def summary_of(result: Result) -> str:
    where = f"{result['file']}:{result['line']}: {result['kind']}"
    if result["found_by"]:
        return f"{where}: {result['found_by']}"
    return (
        f"{where}: SURVIVES {result['tests']} tests\n  - {result['before']}\n  + {result['after']}"
    )
