"""The command that counts failing first loads counts them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modeling_mrp.model.code import MODELING, PACKAGE
from tests.support.places import ROOT, TINY


def counted(model: Path, *arguments: str) -> dict[str, Any]:
    """Run the command without other busy processes; return its last line."""
    environment = {name: value for name, value in os.environ.items() if name != "HF_MODULES_CACHE"}
    command = [
        sys.executable,
        "-m",
        "benchmarks.first_loads",
        "--busy",
        "0",
        "--processes",
        "2",
        "--model",
        str(model),
    ]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    counts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == (counts["failed"] > 0), done.stderr
    return counts


@pytest.mark.parametrize("source", ["hub", "folder"])
def test_loads_that_fail_are_counted(source: str, tmp_path: Path) -> None:
    """A repository whose file lacks its end fails in each process, as it is, by forks; whole it
    fails in none."""
    folder = Path(shutil.copytree(TINY, tmp_path / "model"))
    whole = counted(folder, "--source", source, "--loads", "4")
    assert (whole["loads"], whole["failed"]) == (4, 0)
    entry, package = (folder / MODELING).read_text(), (folder / PACKAGE).read_text()
    (folder / MODELING).write_text(entry.replace("float = 60.0", "float = 0.1"))
    (folder / PACKAGE).write_text(package[:-20])
    cut = counted(folder, "--source", source, "--loads", "2")
    assert (cut["loads"], cut["failed"]) == (2, 2)
    assert all(
        error.startswith("ImportError") and "is not whole" in error for error in cut["errors"]
    )
