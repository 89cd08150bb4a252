"""README's commands on a fresh machine: an empty home, no pip configuration, no local wheels, from
a clone and from a wheel.

`make fresh` prints minutes and megabytes, as Markdown, for each Python that is here; README's
Python runs from the wheel, too.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from environments import PYTHONS, ROOT, interpreters, run, variables, wheel
from matrix import blocks, main_commands


def megabytes(folder: Path) -> int:
    """Return the size of a folder's files."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()) // 1_000_000


class Home:
    """An empty home, a folder to work in, and the steps that were taken there."""

    def __init__(self, folder: Path, version: str, title: str) -> None:
        self.work, self.version, self.title = folder / "work", version, title
        self.work.mkdir(parents=True)
        kept = {
            name: value
            for name, value in variables(True).items()
            if name.startswith("PIP_") or name == "SSL_CERT_FILE"
        }
        home = folder / "home"
        home.mkdir()
        path = f"{folder / 'shims'}:/usr/local/bin:/usr/bin:/bin"
        (folder / "shims").mkdir()
        (folder / "shims" / "python3").symlink_to(interpreters()[version])
        self.env = {**kept, "HOME": str(home), "TMPDIR": str(home), "PATH": path}
        self.home = home

    def step(self, name: str, command: list[str]) -> str:
        """Run a command, print its line of the table, and return what the command prints."""
        begin = time.monotonic()
        printed = run(command, self.env, self.work)
        minutes = (time.monotonic() - begin) / 60
        sizes = f"{megabytes(self.work):,} | {megabytes(self.home):,}"
        print(f"| {self.version} | {self.title} | {name} | {minutes:.1f} | {sizes} |", flush=True)
        return printed


def from_clone(folder: Path, version: str) -> None:
    """Run `make demo` in a clone, and README's Python."""
    home = Home(folder, version, "clone")
    shutil.rmtree(home.work)
    subprocess.run(
        ["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", home.work], check=True
    )
    home.step("`make demo`", ["make", "demo"])
    (code,), (expected,) = blocks("Decode", "python"), blocks("Decode", "text")
    assert home.step("README's Python", [".venv/bin/python", "-c", code]) == expected


def from_wheel(folder: Path, version: str, package: Path) -> None:
    """Install the wheel, run `mrp show`, `mrp evaluate` and README's Python in an empty folder."""
    home = Home(folder, version, "wheel")
    python = str(home.home / "venv" / "bin" / "python")
    home.step("`python3 -m venv`", ["python3", "-m", "venv", str(home.home / "venv")])
    home.step(
        "`pip install` of the wheel", [python, "-m", "pip", "install", "--quiet", str(package)]
    )
    mrp = str(Path(python).with_name("mrp"))
    for command in main_commands():
        words = [
            word
            for word in command.split()[1:]
            if word not in ("--model", "./hub_configs/sdar-tiny-mrp")
        ]
        home.step(f"`mrp {words[0]}`", [mrp, *words])
    (code,), (expected,) = blocks("Decode", "python"), blocks("Decode", "text")
    assert home.step("README's Python", [python, "-c", code]) == expected


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python",
        nargs="*",
        default=[],
        choices=PYTHONS,
        help="Pythons; all that are here without it",
    )
    asked = parser.parse_args().python
    print(
        "| Python | from a | step | minutes | MB in the folder | MB in the home |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    for version in interpreters():
        if asked and version not in asked:
            continue
        with tempfile.TemporaryDirectory() as name:
            from_clone(Path(name) / "clone", version)
        with tempfile.TemporaryDirectory() as name:
            from_wheel(Path(name) / "wheel", version, wheel(Path(name)))


if __name__ == "__main__":
    sys.exit(main())
