"""What users do, in environments of the lowest, the pinned and the newest versions: `make
versions`.

Prints one table, environments by exact versions and checks, and writes it to
build/versions/table.md; failures are in build/versions/NAME.log. It ends in an error if a check
fails. Environments are kept in the user's cache folder, and made anew when what pip resolves
changes.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from environments import (
    CONSTRAINTS,
    PROJECT,
    PYTHONS,
    ROOT,
    Failed,
    Resolution,
    cache,
    interpreters,
    lowest,
    made,
    pinned,
    resolve,
    run,
    variables,
    wheel,
)

KINDS = ("floor", "pinned", "newest", "pre")
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [
    *PROJECT["dependencies"],
    *EXTRAS["serve"],
    *EXTRAS["gpu"],
    "pytest>=8",
    "pytest-xdist>=3",
]
SHOWN = (
    *(
        "torch",
        "transformers",
        "tokenizers",
        "huggingface-hub",
        "safetensors",
        "accelerate",
        "peft",
    ),
    *("numpy", "triton", "typer", "fastapi"),
)
BUILD = ROOT / "build" / "versions"
TINY = "./hub_configs/sdar-tiny-mrp"
UNUSED_DAYS = 14  # after which an environment of an earlier resolution is removed
README = (ROOT / "README.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Environment:
    """An environment with the project's wheel beside it, and a folder like the root of a clone to
    work in."""

    python: Path
    site: Path
    folder: Path
    tests: tuple[str, ...]
    versions: dict[str, str]

    @property
    def stand_in(self) -> Path:
        """Return a folder for Python's path that renames what MRP_RENAMED names, for trials of this
        check."""
        folder = self.folder.parent / "stand_in"
        if not folder.exists():
            folder.mkdir()
            shutil.copyfile(Path(__file__).with_name("stand_in.py"), folder / "sitecustomize.py")
        return folder

    def variables(self) -> dict[str, str]:
        """Return variables by which commands take the wheel, one thread, and nothing from the
        network."""
        path = f"{self.site / 'bin'}:{self.python.parent}:{os.environ['PATH']}"
        offline = {
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.folder / "hf"),
            "TOKENIZERS_PARALLELISM": "false",
        }
        python = {"PYTHONPATH": f"{self.site}:{self.stand_in}", "OMP_NUM_THREADS": "1"}
        return {**variables(False), **offline, **python, "PATH": path}

    def run(self, command: str, *words: str) -> str:
        """Run a command line of a user's and words after it; return what it prints."""
        return run([*shlex.split(command), *words], self.variables(), self.folder)


def blocks(heading: str, kind: str) -> list[str]:
    """Return the fenced blocks of a kind in a section of README."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(rf"^```{kind}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def main_commands() -> list[str]:
    """Return README's two commands."""
    return [
        line
        for block in blocks("Install", "")
        for line in block.splitlines()
        if line.startswith("mrp ")
    ]


def readme_commands(env: Environment) -> None:
    """Draw the picture and print the table."""
    picture, table = map(env.run, main_commands())
    svg = (env.folder / "decode.svg").read_text()
    if not svg.startswith("<svg") or "sequential" not in table:
        raise Failed(f"README's commands print\n{picture}{table}")


def readme_python(env: Environment) -> None:
    """Run README's Python; it prints what README says."""
    (code,), (expected,) = blocks("Decode", "python"), blocks("Decode", "text")
    printed = env.run("python -c", code)
    if printed.strip() != expected.strip():
        raise Failed(f"README's Python prints {printed!r}, not {expected!r}")


def inner_loop(env: Environment) -> None:
    """Run the tests of `make check`."""
    settings = {**variables(False), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(env.stand_in)}
    words = [env.python, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider"]
    run([*words, *env.tests], settings)


def training(env: Environment) -> None:
    """Train a head for ten steps."""
    env.run("mrp tasks --family math --count 40 --output math.jsonl")
    env.run(
        f"mrp train head --model {TINY} --data math.jsonl --output-dir head --max-length 128 "
        "--steps 10"
    )


def push(env: Environment) -> None:
    """List what a push of the trained head would send."""
    printed = env.run("mrp push head org/my-head --base-model org/backbone --dry-run")
    if "model.safetensors" not in printed:
        raise Failed(f"mrp push --dry-run prints\n{printed}")


def ask(
    url: str, body: dict[str, object] | None = None
) -> dict[str, list[dict[str, dict[str, str]]]]:
    """Get the JSON of a server's answer, to a body if there is one."""
    data, headers = (
        (json.dumps(body).encode(), {"Content-Type": "application/json"}) if body else (None, {})
    )
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=300) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def server(env: Environment) -> None:
    """Start the server, ask it for its models and for one text, and stop it."""
    command = f"mrp serve {TINY} --decoding mrp_spec --target sequential --port 0".split()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=env.folder,
        env=env.variables(),
    ) as process:
        late = threading.Timer(600, process.kill)
        late.start()
        lines = []
        try:
            for line in process.stdout or ():
                lines.append(line)
                if address := re.search(r"running on (http://[\w.]+:\d+)", line):
                    break
            else:
                raise Failed(f"mrp serve ends with\n{''.join(lines[-40:])}")
            threading.Thread(target=process.communicate, daemon=True).start()
            chat = [
                {"role": "user", "content": "Sum the numbers of a list that are even, each plus 5."}
            ]
            models = ask(f"{address[1]}/v1/models")["data"]
            answer = ask(
                f"{address[1]}/v1/chat/completions",
                {"messages": chat, "max_tokens": 32, "temperature": 0},
            )
            if not models or not answer["choices"][0]["message"]["content"]:
                raise Failed(f"the server answers {models} and {answer}")
        finally:
            late.cancel()
            process.kill()


def whole_tests(env: Environment) -> None:
    """Run the tests of `make test`."""
    path = os.pathsep.join(
        str(part) for part in (ROOT, ROOT / "trainer", ROOT / "serving", env.stand_in)
    )
    settings = {**variables(False), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    words = [env.python, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider"]
    run([*words, "--ignore=tests/kernels/test_compiled.py"], settings)


def peers(env: Environment) -> None:
    """Run transformers' and PEFT's own tests, of the versions of the environment, on our model."""
    projects = ("transformers", "peft")
    folder = cache() / "-".join(["peers", *(env.versions[project] for project in projects)])
    if not (folder / ".whole").exists():
        requirements = [f"{project}=={env.versions[project]}" for project in projects]
        run(
            [sys.executable, ROOT / "tests" / "peers" / "unpack.py", folder, *requirements],
            variables(False),
        )
        (folder / ".whole").touch()
    path = os.pathsep.join(
        str(part) for part in (ROOT, ROOT / "trainer", ROOT / "serving", env.stand_in)
    )
    settings = {
        **variables(False),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "MRP_PEERS": str(folder),
        "HF_HUB_OFFLINE": "1",
    }
    run(
        [env.python, "-m", "pytest", "-n", "2", "-o", "addopts=-q", "--tb=line", "tests/peers"],
        settings,
    )


WHOLE: dict[str, Callable[[Environment], None]] = {"make test": whole_tests, "make peers": peers}
CHECKS: dict[str, Callable[[Environment], None]] = {
    "README's two commands": readme_commands,
    "README's Python": readme_python,
    "make check": inner_loop,
    "ten steps of training": training,
    "push, dry run": push,
    "server": server,
}


def torch_choice(choice: str, version: str) -> list[str]:
    """Return the requirement of torch beside the project's: a version, `local`: that of
    constraints.txt if pip's configuration knows a wheel of it on this machine; `own`: none."""
    if choice == "own":
        return []
    if choice != "local":
        return [f"torch=={choice}"]
    try:
        found = resolve(version, [pinned("torch")], False, "--no-deps")
    except Failed:
        return []
    return [pinned("torch")] if "torch" in found.local else []


def resolution(
    kind: str, version: str, torch: list[str], isolated: bool, whole: bool
) -> Resolution:
    """Ask pip for the versions of an environment."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        requirements, options = (
            [*REQUIREMENTS, *(EXTRAS["dev"] + ["parameterized>=0.9"] if whole else []), *torch],
            [],
        )
        if kind == "floor":
            bounds = [
                bound
                for bound in lowest(PROJECT["dependencies"])
                if not (torch and bound.startswith("torch=="))
            ]
            file.write("\n".join(bounds))
            file.flush()
            options = ["-c", file.name]
        elif kind == "pinned":
            lines = CONSTRAINTS.read_text().splitlines(keepends=True)
            file.writelines(line for line in lines if not (torch and line.startswith("torch==")))
            file.flush()
            options = ["-c", file.name]
        elif kind == "pre":
            (bound,) = (
                bound
                for bound in lowest(PROJECT["dependencies"])
                if bound.startswith("transformers==")
            )
            requirements.append(f"{bound.replace('==', '>=')}.dev0")
        return resolve(version, requirements, isolated, *options)


def environment(kind: str, version: str, resolved: Resolution, isolated: bool) -> Path:
    """Return the Python of the environment of a resolution; those not used for long are removed."""
    folder = cache() / f"{kind}-{version}-{resolved.key(version)}"
    python = made(folder, version, resolved.pins, isolated, "--no-deps")
    (folder / ".whole").touch()
    for other in cache().glob(f"{kind}-{version}-*/.whole"):
        if other.stat().st_mtime < time.time() - UNUSED_DAYS * 86400:
            shutil.rmtree(other.parent)
    return python


def check(
    python: Path,
    package: Path,
    tests: tuple[str, ...],
    versions: dict[str, str],
    checks: dict[str, Callable[[Environment], None]],
    log: Path,
) -> dict[str, str]:
    """Run the checks in an environment of packages by version; return a cell of the table for
    each."""
    cells = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(
            [
                python,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--target",
                folder / "site",
                package,
            ],
            variables(False),
        )
        (folder / "clone").mkdir()
        (folder / "clone" / "hub_configs").symlink_to(ROOT / "hub_configs")
        env = Environment(python, folder / "site", folder / "clone", tests, versions)
        for title, function in checks.items():
            begin = time.monotonic()
            try:
                function(env)
                cells[title] = f"passes, {time.monotonic() - begin:.0f} s"
            except (Failed, OSError, KeyError) as error:
                cells[title] = "FAILS"
                with log.open("a") as file:
                    file.write(f"# {title}\n{error}\n")
                print(f"{log.stem}: {title}: {str(error)[-1500:]}", file=sys.stderr, flush=True)
    return cells


def table(columns: dict[str, dict[str, str]]) -> str:
    """Return the Markdown table with a column an environment, and rows in the order of the fullest
    column."""
    rows = list(dict.fromkeys(row for cells in columns.values() for row in cells))
    lines = [["", *columns], ["---"] * (1 + len(columns))]
    lines += [[row, *(cells.get(row, "none") for cells in columns.values())] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def wanted(only: list[str], pythons: list[str]) -> list[tuple[str, str]]:
    """Return the environments as kinds and Pythons: all kinds on the lowest Python, the newest
    versions on the others."""
    here = [
        version
        for version in PYTHONS
        if version in interpreters() and (not pythons or version in pythons)
    ]
    pairs = [
        (kind, version)
        for version in here
        for kind in KINDS
        if version == here[0] or kind == "newest"
    ]
    return [(kind, version) for kind, version in pairs if not only or kind in only]


def main() -> int:
    """Print the table; return 1 if a check fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="*", default=[], choices=KINDS, help="kinds of environments; all without it"
    )
    parser.add_argument(
        "--python",
        nargs="*",
        default=[],
        choices=PYTHONS,
        help="Pythons; all that are here without it",
    )
    parser.add_argument(
        "--torch",
        default="own",
        help="a version for all; local: the pinned one if its wheel is on this machine",
    )
    parser.add_argument(
        "--isolated", action="store_true", help="without pip's configuration and local wheels"
    )
    parser.add_argument("--tests", nargs="+", required=True, help="the test files of make check")
    parser.add_argument(
        "--whole", action="store_true", help="all tests, and those of transformers and PEFT"
    )
    asked = parser.parse_args()
    checks = (
        {name: check for name, check in CHECKS.items() if name != "make check"} | WHOLE
        if asked.whole
        else CHECKS
    )
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    package, columns = wheel(BUILD), {}
    newest: dict[str, Resolution] = {}
    pairs = wanted(asked.only, asked.python)
    if not pairs:
        parser.error(f"no environment fits; the Pythons here are {', '.join(interpreters())}")
    for kind, version in pairs:
        name = f"{kind}, Python {version}"
        log = BUILD / f"{kind}-{version}.log"
        try:
            resolved = resolution(
                kind, version, torch_choice(asked.torch, version), asked.isolated, asked.whole
            )
            if kind == "pre" and version in newest and newest[version] == resolved:
                print("The registry has no pre-release of transformers that fits.", file=sys.stderr)
                continue
            newest |= {version: resolved} if kind == "newest" else {}
            python = environment(kind, version, resolved, asked.isolated)
            shown = {
                package: resolved.versions[package]
                for package in SHOWN
                if package in resolved.versions
            }
            columns[name] = {
                **shown,
                **check(python, package, tuple(asked.tests), resolved.versions, checks, log),
            }
        except Failed as error:
            log.write_text(str(error))
            columns[name] = dict.fromkeys(CHECKS, "FAILS: not installed")
            print(f"{name}: {error}", file=sys.stderr, flush=True)
        (BUILD / "table.md").write_text(table(columns))
    print(table(columns), end="")
    return int(
        any(cell.startswith("FAILS") for cells in columns.values() for cell in cells.values())
    )


if __name__ == "__main__":
    sys.exit(main())
