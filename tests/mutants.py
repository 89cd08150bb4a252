"""Small faults put into the engine, one at a time, to see whether the tests find them: `make mutants`.

The list is `tests/mutants.json`: of each its file, a text that stands there once, what stands in its place, the test that
found it, and where nothing can find it the reason. Each is made in a copy of the package, on which a fast selection of tests
runs in a process of its own, up to the first failure. What survives without a reason is printed at last.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tests" / "mutants.json"
# The quickest to find something first.
SELECTION = ("rules", "bans", "remask", "cache", "fuzz", "continuation", "active_rows", "sampling", "scores", "generate_output")
# What is imported before, so that no child has to.
WARM = ("pytest", "tokenizers", "transformers.trainer", "transformers.models.qwen3.modeling_qwen3")
SECONDS = 600  # after which a mutant counts as found: it does not come to an end

Mutant = dict[str, str]


def changed(mutant: Mutant) -> str | None:
    """The text of its file with the change; None where the old text does not stand there once."""
    text = (ROOT / "modeling_mrp" / mutant["file"]).read_text(encoding="utf-8")
    return text.replace(mutant["old"], mutant["new"]) if text.count(mutant["old"]) == 1 else None


def outcome(file: str, text: str, folder: Path) -> str:
    """Run the tests on a copy with another text of a file, in a process of its own; the test that failed, "" where none did."""
    package, report = folder / "modeling_mrp", folder / "report"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "modeling_mrp", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / file).write_text(text, encoding="utf-8")
    if not (child := os.fork()):
        signal.alarm(SECONDS)
        run_tests(folder, report)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "a run without end" if os.WTERMSIG(status) == signal.SIGALRM else "a crash"
    return report.read_text(encoding="utf-8") if report.exists() else "an error before the first test"


def run_tests(folder: Path, report: Path) -> None:
    """Run the selection on the package in a folder, and write down which test failed first."""
    import pytest

    class Note:
        """Notes the first failure."""

        failed = ""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and not self.failed:
                self.failed = report.nodeid

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed and not self.failed:
                self.failed = report.nodeid

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.chdir(ROOT)
    sys.path[:0] = [str(folder)]
    note, files = Note(), [f"tests/test_{name}.py" for name in SELECTION]
    options = ["-x", "-q", "-p", "no:cacheprovider", "-o", f"pythonpath={folder} . trainer serving"]
    pytest.main([*options, "-k", "not exact_distribution", *files], plugins=[note])
    report.write_text(note.failed, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Try all, or those whose file or text an argument names; `unfound` names those of which no test is known."""
    for name in WARM:
        import_module(name)
    mutants: list[Mutant] = json.loads(RECORD.read_text(encoding="utf-8"))
    stale = [f"{one['file']}: {one['old']!r}" for one in mutants if changed(one) is None]
    if stale:
        raise SystemExit("not once in its file, mend tests/mutants.json:\n" + "\n".join(stale))
    chosen = [
        one
        for one in mutants
        if not arguments
        or any(word in one["file"] + one["old"] or (word == "unfound" and not one["found_by"]) for word in arguments)
    ]
    survivors = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "copy"
        if not arguments and (failed := outcome("__init__.py", (ROOT / "modeling_mrp" / "__init__.py").read_text(), folder)):
            raise SystemExit(f"the tests fail as it is: {failed}")
        for place, mutant in enumerate(chosen, 1):
            mutant["found_by"] = outcome(mutant["file"], str(changed(mutant)), folder)
            RECORD.write_text(json.dumps(mutants, indent=1) + "\n", encoding="utf-8")
            what = mutant["found_by"] or ("harmless: " + mutant["harmless"] if "harmless" in mutant else "SURVIVES")
            line = f"{mutant['file']}: {mutant['old']!r} -> {mutant['new']!r}"
            print(f"{place}/{len(chosen)} {line}: {what}", flush=True)
            if what == "SURVIVES":
                survivors.append(line)
    print(f"{len(chosen)} mutants, {len(survivors)} of them survive without a reason", *survivors, sep="\n")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
