"""Small faults put into the packages, one at a time, to see whether the tests find them: `make
mutants`. With `--seed`, faults that are drawn anew from the syntax trees (`drawn_faults.py`).

`tests/mutants.json` lists the faults: the file, a text that occurs there once, its replacement, the
test that found the fault, and the reason if no test can: such a fault is left out. Each fault is
made in a copy of the package, on which a fast selection of tests runs in a process of its own, up
to the first failure. Faults that survive are printed at the end.
"""

import argparse
import ast
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from tests.drawn_faults import campaign
from tests.support.line_map import PACKAGES, measure_all, rooms_of

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tests" / "mutants.json"
# The tests, quickest finders first: a few seeds of the fuzz, tests of the fault's subpackage, of
# the others, the whole fuzz.
FIRST = [f"tests/generate/test_fuzz.py::test_random_decodes[{seed}]" for seed in range(8)]
SELECTION = {
    "rules": ("rules", "gain", "golden_traces"),
    "generate": ("golden_traces", "decoding", "cache", "score", "unscored"),
    "networks": ("cache", "sampling", "graphs", "layers"),
    "kernels": ("pick", "kernels", "round_layers", "sampling", "recorded_kernels"),
}
# Modules that the parent imports, so that no child process has to.
WARM = ("pytest", "tokenizers", "transformers.trainer", "transformers.models.qwen3.modeling_qwen3")
SECONDS = 300  # of CPU time for the tests of a mutant; one that takes longer counts as found

Mutant = dict[str, str]


def file_of(mutant: Mutant) -> str:
    """Return the path of its file from the root; the list's are within `modeling_mrp`, or begin
    with `trainer/`."""
    return (
        mutant["file"]
        if mutant["file"].startswith("trainer/")
        else f"modeling_mrp/{mutant['file']}"
    )


def changed(mutant: Mutant) -> str | None:
    """Return the text of its file with the change; None if the old text does not stand there once,
    or it is no Python."""
    text = (ROOT / file_of(mutant)).read_text(encoding="utf-8")
    made = text.replace(mutant["old"], mutant["new"])
    with suppress(SyntaxError):
        return made if text.count(mutant["old"]) == 1 and ast.parse(made) else None
    return None


def selected(mutant: Mutant) -> list[list[str]]:
    """List the tests to run, in order, a list for each call of pytest; the test that found the
    mutant before comes first."""
    room = mutant["file"].split("/")[0]
    if room not in SELECTION:
        of_room = []
        # files beside the rooms, such as outputs.py, are the command line's
        for folder in rooms_of(file_of(mutant)) or ("tests/cli/",):
            of_room += sorted(str(path) for path in (ROOT / folder).glob("test_*.py"))
        return [[mutant["found_by"]], of_room] if mutant["found_by"] else [of_room]
    names = dict.fromkeys(name for one in (room, *SELECTION) for name in SELECTION[one])
    files = [[str(next(ROOT.glob(f"tests/*/test_{name}.py")))] for name in names]
    files.insert({"rules": 2, "kernels": 6}.get(room, 0), FIRST)
    found = [[mutant["found_by"]]] if mutant["found_by"].startswith("tests/") else []
    return [*found, *files, ["tests/generate/test_fuzz.py"]]


def outcome(tests: Sequence[list[str]], file: str, text: str, folder: Path) -> str:
    """Run tests in a process of its own, on a copy in which a file has this text; return what
    failed first, "" if nothing did."""
    report = folder / "report"
    shutil.rmtree(folder, ignore_errors=True)
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    (folder / "hub_configs").symlink_to(ROOT / "hub_configs")  # the embedded checkpoint
    (folder / file).write_text(text, encoding="utf-8")
    if not (child := os.fork()):
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        run_tests(tests, folder, report)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "a run without end" if os.WTERMSIG(status) == signal.SIGXCPU else "a crash"
    return (
        report.read_text(encoding="utf-8") if report.exists() else "an error before the first test"
    )


def run_tests(calls: Sequence[list[str]], folder: Path, report: Path) -> None:
    """Run tests on the package in a folder, and write the first failure to `report`."""
    import pytest
    from transformers import dynamic_module_utils

    # where code of repositories is kept for later loads: that of another fault is there otherwise
    dynamic_module_utils.HF_MODULES_CACHE = str(folder / "modules")

    class Note:
        """A pytest plugin that notes the first failure."""

        failed = ""

        def pytest_collectreport(self, report: pytest.CollectReport | pytest.TestReport) -> None:
            if report.failed and not self.failed:
                self.failed = report.nodeid

        pytest_runtest_logreport = pytest_collectreport

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.chdir(ROOT)
    sys.path[:0] = [str(folder), str(folder / "trainer")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # of processes that tests start
    note, options = (
        Note(),
        [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-o",
            f"pythonpath={folder} {folder}/trainer . trainer serving",
        ],
    )
    ran = False
    for tests in calls:  # a test that fails at once need not wait for the others' imports
        # a test that is gone ends with a code of its own, and so does a package that cannot be
        # imported
        if not note.failed:
            ran |= pytest.main([*options, *tests], plugins=[note]) <= pytest.ExitCode.TESTS_FAILED
    if ran:
        report.write_text(note.failed, encoding="utf-8")


def of_list(arguments: Sequence[str], begin: int, count: int | None) -> int:
    """Try all mutants of the list, or those whose file or text has an argument in it; `harmless`
    selects those that no test can find. Of these, `count` from number `begin` on are tried."""
    mutants: list[Mutant] = json.loads(RECORD.read_text(encoding="utf-8"))
    stale = [f"{one['file']}: {one['old']!r}" for one in mutants if changed(one) is None]
    if stale:
        raise SystemExit(
            "old text not once in its file, or new text no Python, mend tests/mutants.json:\n"
            + "\n".join(stale)
        )
    chosen = [
        one
        for one in mutants
        if ("harmless" in one) == ("harmless" in arguments)
        and (
            not arguments
            or any(word in f"{one['file']}{one['old']} harmless" for word in arguments)
        )
    ]
    end = len(chosen) if count is None else min(begin + count, len(chosen))
    survivors = []
    finders: set[str] = set()
    sound = file_of(mutants[0]), (ROOT / file_of(mutants[0])).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "copy"
        everything = selected({**mutants[0], "found_by": ""})
        if not (arguments or begin) and (failed := outcome(everything, *sound, folder)):
            raise SystemExit(f"the tests fail without a fault: {failed}")
        for place, mutant in enumerate(chosen[begin:end], begin + 1):
            text = str(changed(mutant))
            mutant["found_by"] = outcome(selected(mutant), file_of(mutant), text, folder)
            RECORD.write_text(json.dumps(mutants, indent=1) + "\n", encoding="utf-8")
            line = f"{mutant['file']}: {mutant['old']!r} -> {mutant['new']!r}"
            print(f"{place}/{len(chosen)} {line}: {mutant['found_by'] or 'SURVIVES'}", flush=True)
            if not mutant["found_by"]:
                survivors.append(line)
            elif mutant["found_by"].startswith("tests/"):
                finders.add(mutant["found_by"])
        alarms = []
        names = sorted(finders)
        for first in range(0, len(names), 20):
            if failed := outcome([names[first : first + 20]], *sound, folder):
                alarms.append(f"fails without a fault, so that it finds none: {failed}")
    tried = max(0, end - begin)
    print(f"{tried} mutants, {len(survivors)} of them survive", *survivors, *alarms, sep="\n")
    return int(bool(survivors or alarms))


def main(arguments: Sequence[str]) -> int:
    """Try faults of the list, or with `--seed` new ones, for which `--measure` has to run
    before."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words",
        nargs="*",
        help="of the list, those whose file or text has one of these; or `harmless`",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure which lines the tests run, those of files named by WORDS",
    )
    parser.add_argument("--seed", type=int, help="draw faults from the syntax trees")
    parser.add_argument("--count", type=int, help="how many; by default all of the list, or 150")
    parser.add_argument("--first", type=int, default=0, help="of the list, begin with this number")
    parser.add_argument(
        "--only", nargs="+", default=PACKAGES, metavar="FOLDER", help="of these folders or files"
    )
    parser.add_argument(
        "--seconds", type=float, default=120, help="of tests for each fault, as they were measured"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="processes side by side"
    )
    options = parser.parse_args(arguments)
    # read where libraries are imported, which here is before tests/conftest.py sets them
    for name in ("TRITON_INTERPRET", "HF_HUB_OFFLINE"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in WARM:
        import_module(name)
    if options.measure:
        return measure_all(options.words, options.workers)
    if options.seed is not None:
        count = options.count or 150
        return campaign(options.seed, count, options.only, options.seconds, options.workers)
    return of_list(options.words, options.first, options.count)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
