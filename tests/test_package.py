"""What is installed, under which names."""

import subprocess
import sys
import tomllib

import mrp_trainer
import pytest
from conftest import ROOT
from mrp_trainer.arguments import MRPTrainingArguments
from mrp_trainer.trainer import MRPTrainer

import modeling_mrp

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_top_level_names_are_the_projects_own() -> None:
    """Another distribution installs a package called `trainer`: with both, each would overwrite the other's files."""
    tools = PROJECT["tool"]["setuptools"]
    assert {name.partition(".")[0] for name in tools["packages"]} == {"modeling_mrp", "mrp_trainer", "mrp_serving"}
    for name in tools["packages"]:
        top, _, rest = name.partition(".")
        assert (ROOT / tools["package-dir"][top] / rest.replace(".", "/") / "__init__.py").is_file(), name


def test_every_package_is_installed() -> None:
    tools = PROJECT["tool"]["setuptools"]
    found = {
        ".".join((top, *path.parent.relative_to(ROOT / folder).parts))
        for top, folder in tools["package-dir"].items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(tools["packages"]) == found


def test_type_checkers_read_what_is_installed() -> None:
    tools = PROJECT["tool"]["setuptools"]
    for top, folder in tools["package-dir"].items():
        assert (ROOT / folder / "py.typed").is_file()
        assert "py.typed" in tools["package-data"][top]


def test_the_trainer_exports_its_classes_when_they_are_asked_for() -> None:
    assert mrp_trainer.MRPTrainer is MRPTrainer
    assert mrp_trainer.MRPTrainingArguments is MRPTrainingArguments
    with pytest.raises(AttributeError, match="'mrp_trainer' has no attribute 'MRPTrain'"):
        mrp_trainer.MRPTrain  # noqa: B018
    code = "import sys, mrp_trainer; print(sorted({'torch', 'transformers', 'numpy'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_version_is_written_once() -> None:
    """The distribution takes it from the package, without importing that."""
    assert "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "modeling_mrp.__version__"}
    assert modeling_mrp.__version__ == mrp_trainer.__version__ == "0.1.0"
    expand = pytest.importorskip("setuptools.config.expand", reason="what builds the distribution is not installed")
    assert expand.read_attr("modeling_mrp.__version__", PROJECT["tool"]["setuptools"]["package-dir"], ROOT) == "0.1.0"
