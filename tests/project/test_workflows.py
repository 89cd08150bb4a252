"""The workflows of `.github/` name what they use by digest, and what they run exists; what README
leaves is ignored."""

import re
import shlex
import shutil
import subprocess
import tomllib

import pytest
import yaml

from tests.support.places import ROOT

WORKFLOWS = {
    path.stem: path.read_text() for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
MAKEFILE = (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_action_is_named_by_its_digest_and_version(name: str) -> None:
    uses = re.findall(r"\buses: *(.*)", WORKFLOWS[name])
    assert uses
    assert [
        line
        for line in uses
        if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)
    ] == []


def test_an_action_has_one_digest() -> None:
    lines = {line for text in WORKFLOWS.values() for line in re.findall(r"\buses: *(.*)", text)}
    assert len({line.split("@")[0] for line in lines}) == len(lines)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_what_a_workflow_runs_exists(name: str) -> None:
    jobs = yaml.safe_load(WORKFLOWS[name])["jobs"]
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    for line in lines:
        program, *words = shlex.split(line)
        assert (ROOT / program).is_file() or re.search(rf"^{words[0]}:", MAKEFILE, re.MULTILINE), (
            line
        )
    assert lines


def test_the_matrix_has_every_python_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    matrix = yaml.safe_load(WORKFLOWS["versions"])["jobs"]["versions"]["strategy"]["matrix"]
    named = [
        line.split(" :: ")[-1]
        for line in project["classifiers"]
        if re.search(r"Python :: 3\.\d+$", line)
    ]
    assert set(named) <= set(matrix["python"])
    assert project["requires-python"] == f">={matrix['python'][0]}"
    assert matrix["versions"] == ["floor", "pinned", "newest"]


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="is no clone")
def test_git_ignores_what_the_documents_commands_leave() -> None:
    """In the root of a clone, where they run."""
    text = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    code = "".join(block for kind, block in blocks if kind in ("", "bash"))
    written = set(re.findall(r"--output(?:-dir)? ([\w.]+)", code))
    assert {"decode.svg", "math.jsonl", "head"} <= written
    paths = [f"{name}/config.json" if "." not in name else name for name in sorted(written)]
    done = subprocess.run(["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == paths, done.stderr
