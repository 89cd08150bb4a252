"""Who imports whom in the package: one way, and nothing of the project's other parts; and how many
files a decode needs."""

import ast
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import torch

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.loop import Decoder
from tests.support.places import ROOT

PACKAGE = ROOT / "modeling_mrp"
MODULES = {
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path
    for path in PACKAGE.rglob("*.py")
}


def imported(name: str, path: Path) -> set[str]:
    """What a module imports, dotted and absolute, wherever the import stands: in functions and
    under `TYPE_CHECKING` too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".")[: -node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            # a name may be a module
            found |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
    return found


GRAPH = {name: imported(name, path) for name, path in MODULES.items()}


def test_no_module_is_in_a_circle() -> None:
    TopologicalSorter(
        {name: sorted(others & MODULES.keys() - {name}) for name, others in GRAPH.items()}
    ).prepare()


def test_the_package_imports_nothing_of_the_projects_other_parts() -> None:
    for name, others in GRAPH.items():
        tops = {other.split(".")[0] for other in others}
        assert not tops & {
            "mrp_trainer",
            "mrp_serving",
            "trainer",
            "tests",
            "benchmarks",
            "serving",
        }, name


def test_rules_need_no_torch() -> None:
    """What decides about a row is Python and numpy, of modules that import each other alone."""
    for name, others in GRAPH.items():
        if name.startswith("modeling_mrp.constraints."):
            assert "torch" not in {other.split(".")[0] for other in others}, name
            assert all(
                other.startswith(("modeling_mrp.rules", "modeling_mrp.constraints"))
                for other in others
                if "modeling_mrp" in other
            ), name
        if name.startswith("modeling_mrp.rules."):
            assert "torch" not in {other.split(".")[0] for other in others}, name
            assert all(
                other.startswith("modeling_mrp.rules")
                for other in others
                if "modeling_mrp" in other
            ), name


def test_the_trainers_data_import_no_other_room() -> None:
    for path in (ROOT / "trainer" / "mrp_trainer" / "data").glob("*.py"):
        others = imported(f"mrp_trainer.data.{path.stem}", path)
        rooms = {other.split(".")[1] for other in others if other.startswith("mrp_trainer.")}
        assert rooms <= {"data"}, path.name


def test_a_repositorys_code_uses_public_names_only() -> None:
    """A private name of another library can one day stop every published repository from
    loading."""
    for name, others in GRAPH.items():
        # torch has pytrees under this name only.
        others = {other for other in others if not other.startswith("torch.utils._pytree")}
        private = [
            other for other in others if any(re.match("_(?!_)", part) for part in other.split("."))
        ]
        assert not private, f"{name}: {private}"


@contextmanager
def noted(files: set[str]) -> Iterator[None]:
    """Note the package's files of which a function is called meanwhile."""

    def note(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            files.add(path.relative_to(PACKAGE).as_posix())

    before = sys.gettrace()
    sys.settrace(note)
    try:
        yield
    finally:
        sys.settrace(before)


def test_files_from_generate_to_a_kernel(
    random_model: MRPForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a reader opens who follows a drafted decode, or one of its rounds: more files only with
    a reason."""
    ids, options = (
        torch.tensor([[1, 2, 3, 4, 5]]),
        {"decoding": "mrp_spec", "num_draft_states": 4, "max_new_tokens": 8},
    )
    random_model.generate(ids, **options)
    whole: set[str] = set()
    with noted(whole):
        random_model.generate(ids, **options)
    round_of, one = Decoder.round, {"generate/generation.py"}

    def traced(*args: Any) -> Any:
        with noted(one):
            return round_of(*args)

    monkeypatch.setattr(Decoder, "round", traced)
    random_model.generate(ids, **options)
    # what is looked at of a model's modules is one file, for cache, layers and recordings; another
    # one has copies to the device, which all make through pinned memory
    assert len(whole) <= 30, sorted(whole)
    # the backbone has a file of its own, as each family has one; so have the sampler, which a
    # serving engine's runner shares, and how much is drafted at what cost
    assert len(one) <= 16, sorted(one)
