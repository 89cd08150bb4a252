"""What is installed, under which names."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
import zipfile
from itertools import chain
from pathlib import Path

import mrp_trainer
import pytest
from mrp_trainer.embedded import resolve_source

from tests.support.places import ROOT, TINY

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EMBEDDED = "mrp_trainer.sdar-tiny-mrp"  # a folder of files that no one imports


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel puts on Python's path."""
    build = pytest.importorskip(
        "setuptools.build_meta", reason="what builds the distribution is not installed"
    )
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("modeling_mrp", "trainer", "serving", "hub_configs/sdar-tiny-mrp"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # of a class that only this module has, which no other process of a test run can read
        warnings.simplefilter("ignore")
        patch.chdir(source)
        wheel = site / build.build_wheel(str(site))
    zipfile.ZipFile(wheel).extractall(site)
    return site


def test_the_wheel_holds_the_packages_and_the_small_checkpoint(
    installed: Path, tmp_path: Path
) -> None:
    """Under the project's own names: another distribution installs a package called `trainer`. With
    what is no Python, such as templates, recipes and marks for type checkers; the checkpoint is
    found from any folder."""
    for top, folder in PROJECT["tool"]["setuptools"]["package-dir"].items():
        files = [
            path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*") if path.is_file()
        ]
        there = installed / top.replace(".", "/")
        assert [
            file for file in files if file.suffix != ".pyc" and not (there / file).is_file()
        ] == []
        assert top == EMBEDDED or (there / "py.typed").is_file()
    names = {path.name for path in installed.iterdir() if path.suffix not in (".dist-info", ".whl")}
    assert names == {"modeling_mrp", "mrp_trainer", "mrp_serving"}
    command = [sys.executable, "-c", "import mrp_trainer; print(mrp_trainer.TINY)"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{installed}/{EMBEDDED.replace('.', '/')}\n"


def test_readmes_python_runs_from_the_wheel_in_an_empty_folder(
    installed: Path, tmp_path: Path
) -> None:
    """As it stands there, and it prints what README says: nothing of the clone is needed."""
    code, *outputs = re.findall(
        r"^```(?:python|text)\n(.*?)^```$",
        (ROOT / "README.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    environment = {**os.environ, "PYTHONPATH": str(installed), "HF_HOME": str(tmp_path / "hf")}
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-c", f"{code}\nassert path.startswith({str(installed)!r})"]
    done = subprocess.run(
        command,
        cwd=tmp_path / "empty",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [done.stdout] == outputs
    assert list((tmp_path / "empty").iterdir()) == []


def test_what_the_packages_import_is_declared() -> None:
    """As a dependency, or as a requirement of an extra; two come with the engine that an extra
    names."""
    project = PROJECT["project"]
    declared = chain(project["dependencies"], *project["optional-dependencies"].values())
    known = {"modeling_mrp", "mrp_trainer", "mrp_serving", *sys.stdlib_module_names}
    known |= {re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in declared}
    # pyyaml; of transformers[serving] and of sglang
    known |= {"yaml", "fastapi", "uvicorn", "prometheus_client"}
    imported = set()
    for folder in ("modeling_mrp", "trainer", "serving"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    imported.add(node.module.split(".")[0])
    assert imported - known == set()
    assert {"filelock", "packaging"} <= imported


def test_the_lowest_versions_that_were_run_are_those_that_the_package_admits() -> None:
    """Of docs/versions.md, whose first column `make versions` prints for the lower bounds of
    pyproject.toml."""
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    first_table = page.split("\nPrinted by ")[1]
    ran = dict(re.findall(r"^\| ([\w-]+) \| (\d[\d.]*) \|", first_table, re.MULTILINE))
    bounds = dict(
        re.fullmatch(r"([\w-]+)>=([\d.]+)", text).groups()
        for text in PROJECT["project"]["dependencies"]
    )  # type: ignore[union-attr]
    wrong = {
        name
        for name in ran.keys() & bounds.keys()
        if not f"{ran[name]}.0.0".startswith(f"{bounds[name]}.")
    }
    assert wrong == set()
    assert {"transformers", "huggingface-hub", "peft", "numpy"} <= ran.keys() & bounds.keys()
    # the table may have a machine's own torch
    assert f"The lowest torch, {bounds['torch']}.0, ran" in page


def test_a_folder_of_that_name_is_meant_where_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_source("sdar-tiny-mrp") == mrp_trainer.TINY == str(TINY)
    assert resolve_source("org/sdar-tiny-mrp") == "org/sdar-tiny-mrp"
    (tmp_path / "sdar-tiny-mrp").mkdir()
    assert resolve_source("sdar-tiny-mrp") == "sdar-tiny-mrp"
