"""Environments of this project's dependencies, each made once for what pip resolves. The standard
library is enough."""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = ROOT / "constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# What a pip without configuration keeps: how it reaches the registry, not which or what beside it.
NEUTRAL = {"PIP_CERT", "PIP_PROXY", "PIP_DEFAULT_TIMEOUT"}
# Requirements of extras that the registry has as sources alone; a foreign Python's resolution needs
# them as wheels.
SOURCES_ONLY = ("rouge-score", "sqlitedict", "word2number")


class Failed(Exception):
    """A command ended in an error; the message is the end of what it printed."""


def cache() -> Path:
    """Return the folder where environments are kept between clones."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "modeling-mrp" / "versions"


def variables(isolated: bool) -> dict[str, str]:
    """Return variables for a command; pip's are left out if `isolated`, so that it knows the
    registry alone."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in {"PYTHONPATH", "VIRTUAL_ENV"}
    }
    if isolated:
        env = {
            name: value
            for name, value in env.items()
            if not name.startswith("PIP_") or name in NEUTRAL
        }
        env["PIP_CONFIG_FILE"] = os.devnull
    return {**env, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def run(
    command: Sequence[str | Path], env: dict[str, str], folder: Path = ROOT, timeout: float = 3000
) -> str:
    """Run a command in a folder and return what it prints; `Failed` if it ends in an error or does
    not end."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{' '.join(words)}: not done after {timeout} s") from error
    if done.returncode:
        raise Failed(f"{' '.join(words)}\n{(done.stdout + done.stderr)[-6000:]}")
    return done.stdout


@functools.cache
def interpreters() -> dict[str, str]:
    """Return the Pythons on this machine that can make environments, by version: this one, on PATH,
    or pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    works = {}
    for version in PYTHONS:
        paths = [
            sys.executable,
            shutil.which(f"python{version}"),
            *sorted(map(str, pyenv.glob(f"{version}.*/bin/python"))),
        ]
        asks = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
        for path in filter(None, paths):
            done = subprocess.run([path, "-c", asks], capture_output=True, text=True)
            if done.returncode == 0 and done.stdout.strip() == version:
                works[version] = path
                break
    return works


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder of the cache against other processes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def made(
    folder: Path, version: str, packages: Sequence[str], isolated: bool, *options: str
) -> Path:
    """Make an environment of a Python with these packages unless it is there whole; return its
    Python."""
    python, whole = folder / "bin" / "python", folder / ".whole"
    with locked(folder):
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            env = variables(isolated)
            run([interpreters()[version], "-m", "venv", folder], env)
            run([python, "-m", "pip", "install", "--quiet", *options, *packages], env)
            whole.touch()
    return python


def installer(version: str, isolated: bool) -> Path:
    """Return a Python whose pip is new enough to resolve without downloading (23.3)."""
    nearest = version if version in interpreters() else max(interpreters(), key=PYTHONS.index)
    return made(cache() / f"pip-{nearest}", nearest, ["pip>=25"], isolated, "--upgrade")


@dataclass(frozen=True)
class Resolution:
    """What pip would install: versions by name, and which come from this machine's disk."""

    versions: dict[str, str]
    local: frozenset[str]

    @property
    def pins(self) -> list[str]:
        """Return requirements of exactly these versions."""
        return [f"{name}=={version}" for name, version in sorted(self.versions.items())]

    def key(self, version: str) -> str:
        """Return a short hash of these versions on a version of Python."""
        text = json.dumps([version, self.pins, sorted(self.local)])
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def foreign(version: str, isolated: bool) -> list[str]:
    """Return pip's options to resolve for a Python that is not here: wheels alone, those of sources
    made for it."""
    if version in interpreters():
        return []
    wheels = cache() / "wheels"
    if not wheels.exists():
        command = [
            installer(version, isolated),
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            wheels,
        ]
        run([*command, *SOURCES_ONLY], variables(isolated))
    return [
        "--python-version",
        version,
        "--only-binary=:all:",
        "--target",
        str(cache() / "none"),
        "--find-links",
        str(wheels),
    ]


def resolve(version: str, requirements: Sequence[str], isolated: bool, *options: str) -> Resolution:
    """Ask pip what it would install for a Python, downloading nothing; `Failed` if nothing fits.

    For a Python that is not on this machine pip takes its wheels, and reads markers as of the
    nearest Python that is.
    """
    report = cache() / f"report-{os.getpid()}.json"
    pip = [
        installer(version, isolated),
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
    ]
    command = [*pip, "--report", report, *foreign(version, isolated), *options, *requirements]
    try:
        run(command, variables(isolated))
        items = json.loads(report.read_text())["install"]
    finally:
        report.unlink(missing_ok=True)
    ours = re.sub(r"[-_.]+", "-", PROJECT["name"])
    versions = {
        re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower(): item["metadata"]["version"]
        for item in items
    }
    disk = {
        item["metadata"]["name"].lower()
        for item in items
        if item["download_info"]["url"].startswith("file:")
    }
    versions.pop(ours, None)
    return Resolution(versions, frozenset(disk & versions.keys()))


def pinned(name: str) -> str:
    """Return the requirement of a package in constraints.txt, such as `torch==2.13.0`."""
    (line,) = (
        line for line in CONSTRAINTS.read_text().splitlines() if line.startswith(f"{name}==")
    )
    return line


def lowest(requirements: Sequence[str]) -> list[str]:
    """Return the requirements with each lower bound as the version; those without one are left
    out."""
    bounds = (
        re.match(r"([\w-]+)(?:\[[^]]*\])?>=([\w.]+)", requirement) for requirement in requirements
    )
    return [f"{bound[1]}=={bound[2]}" for bound in bounds if bound]


def wheel(folder: Path) -> Path:
    """Build the project's wheel into a folder; return its path."""
    # files of an earlier build would come along
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
    version = max(interpreters(), key=PYTHONS.index)
    command = [
        installer(version, False),
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        folder,
        ROOT,
    ]
    run(command, variables(False))
    return next(folder.glob("*.whl"))
