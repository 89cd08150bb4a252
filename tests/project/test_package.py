"""What is installed, under which names."""

import os
import shutil
import subprocess
import sys
import tomllib
import warnings
import zipfile
from pathlib import Path

import mrp_trainer
import pytest
from conftest import ROOT, TINY
from mrp_trainer.embedded import located

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EMBEDDED = "mrp_trainer.sdar-tiny-mrp"  # a folder of files that no one imports


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel puts on Python's path."""
    build = pytest.importorskip("setuptools.build_meta", reason="what builds the distribution is not installed")
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("modeling_mrp", "trainer", "serving", "hub_configs/sdar-tiny-mrp"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a class that only this module has, which no other process of a test run can read
        patch.chdir(source)
        wheel = site / build.build_wheel(str(site))
    zipfile.ZipFile(wheel).extractall(site)
    return site


def test_every_package_is_installed_under_the_projects_own_names() -> None:
    """Another distribution installs a package called `trainer`: with both, each would overwrite the other's files."""
    tools = PROJECT["tool"]["setuptools"]
    found = {
        ".".join((top, *path.parent.relative_to(ROOT / folder).parts))
        for top, folder in tools["package-dir"].items()
        if top != EMBEDDED
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(tools["packages"]) == found | {EMBEDDED}
    assert {name.partition(".")[0] for name in found} == {"modeling_mrp", "mrp_trainer", "mrp_serving"}


def test_the_small_checkpoint_is_in_the_wheel(installed: Path) -> None:
    """And what else is no Python: templates, recipes, marks for type checkers."""
    held = installed / EMBEDDED.replace(".", "/")
    assert {path.relative_to(held) for path in held.rglob("*")} >= {
        path.relative_to(TINY) for path in TINY.rglob("*") if "__pycache__" not in path.parts
    }
    for top, folder in PROJECT["tool"]["setuptools"]["package-dir"].items():
        if top != EMBEDDED:
            files = [path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix not in (".pyc", ".py")]
            assert [path for path in files if not (installed / top / path.relative_to(ROOT / folder)).is_file()] == []
            assert (installed / top / "py.typed").is_file()


def test_the_installed_package_finds_it_from_any_folder(installed: Path, tmp_path: Path) -> None:
    code = "import mrp_trainer; print(mrp_trainer.TINY)"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{installed}/{EMBEDDED.replace('.', '/')}\n"


def test_a_folder_of_that_name_is_meant_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert located("sdar-tiny-mrp") == mrp_trainer.TINY == str(TINY)
    assert located("org/sdar-tiny-mrp") == "org/sdar-tiny-mrp"
    (tmp_path / "sdar-tiny-mrp").mkdir()
    assert located("sdar-tiny-mrp") == "sdar-tiny-mrp"
