"""Who imports whom in the package: one way, and nothing of the project's other parts."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from conftest import ROOT

PACKAGE = ROOT / "modeling_mrp"
MODULES = {path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): path for path in PACKAGE.rglob("*.py")}


def imported(name: str, path: Path) -> set[str]:
    """What a module imports, dotted and absolute, wherever the import stands: in functions and under `TYPE_CHECKING` too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".")[: -node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            found |= {source, *(f"{source}.{alias.name}" for alias in node.names)}  # a name may be a module
    return found


GRAPH = {name: imported(name, path) for name, path in MODULES.items()}


def test_no_module_is_in_a_circle() -> None:
    TopologicalSorter({name: sorted(others & MODULES.keys() - {name}) for name, others in GRAPH.items()}).prepare()


def test_the_package_imports_nothing_of_the_projects_other_parts() -> None:
    for name, others in GRAPH.items():
        tops = {other.split(".")[0] for other in others}
        assert not tops & {"mrp_trainer", "mrp_serving", "trainer", "tests", "benchmarks", "serving"}, name


def test_rules_need_no_torch() -> None:
    """What decides about a row is Python and numpy, of modules that import each other alone."""
    for name, others in GRAPH.items():
        if name.startswith("modeling_mrp.rules."):
            assert "torch" not in {other.split(".")[0] for other in others}, name
            assert all(other.startswith("modeling_mrp.rules") for other in others if "modeling_mrp" in other), name


def test_the_trainers_data_import_no_other_room() -> None:
    for path in (ROOT / "trainer" / "mrp_trainer" / "data").glob("*.py"):
        others = imported(f"mrp_trainer.data.{path.stem}", path)
        rooms = {other.split(".")[1] for other in others if other.startswith("mrp_trainer.")}
        assert rooms <= {"data"}, path.name


def test_a_repositorys_code_uses_public_names_only() -> None:
    """A private name of another library can one day stop every published repository from loading."""
    for name, others in GRAPH.items():
        # torch has pytrees under this name only.
        others = {other for other in others if not other.startswith("torch.utils._pytree")}
        private = [other for other in others if any(part.startswith("_") for part in other.split(".") if part != "__future__")]
        assert not private, f"{name}: {private}"
