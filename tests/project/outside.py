"""Names of other Hugging Face packages that this project imports, overrides or reaches into, read
from its code."""

import ast
import importlib
import re
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.version import Version

PACKAGES = {"transformers", "accelerate", "peft", "huggingface_hub", "safetensors", "tokenizers"}
PAGE = Path(__file__).parents[2] / "docs" / "rests_on.md"
KINDS = {"Imported": "import", "Overridden": "override", "Reached into": "reach into"}


def listed(package: str) -> dict[str, set[str]]:
    """The names that the page's tables of a package hold, by kind; of those that another package
    has "from VERSION on" or had "before VERSION", the ones that the installed version has."""
    page = PAGE.read_text(encoding="utf-8")
    names: dict[str, set[str]] = {}
    for title, kind in KINDS.items():
        section = page.split(f"\n## {title} by `{package}`\n")[1].split("\n## ")[0]
        names[kind] = set()
        for first, second, reason in re.findall(
            r"^\| (`.*?) \| (.*?) \| (.+) \|$", section, re.MULTILINE
        ):
            begin = re.match(r"from ([\w-]+) ([\d.]+) on: ", reason)
            if begin and Version(version(begin[1])) < Version(begin[2]):
                continue
            end = re.match(r"before ([\w-]+) ([\d.]+): ", reason)
            if end and Version(version(end[1])) >= Version(end[2]):
                continue
            words = re.findall(r"`([^`]+)`", first if kind == "reach into" else second)
            names[kind] |= {
                word if kind == "reach into" else f"{first.strip('`')}.{word}" for word in words
            }
    return names


def modules(package: Path, dotted: str) -> dict[str, ast.Module]:
    """The syntax trees of a package's modules by dotted name."""
    trees = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join([dotted, *(part for part in parts if part != "__init__")])
        trees[name] = ast.parse(path.read_text(encoding="utf-8"))
    return trees


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports from other packages, wherever the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and _outside(node.module):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            whole = {alias.asname or alias.name for alias in node.names if _outside(alias.name)}
            used = (part for part in ast.walk(tree) if isinstance(part, ast.Attribute))
            yield from (ast.unparse(part) for part in used if ast.unparse(part.value) in whole)


def overridden(module: Any) -> Iterator[str]:
    """`Base.member` for members of a module's classes that replace one of another package's
    class."""
    for kind in vars(module).values():
        if isinstance(kind, type) and kind.__module__ == module.__name__:
            for member in vars(kind):
                owner = next((base for base in kind.__mro__[1:] if member in vars(base)), None)
                if (
                    owner is not None
                    and _outside(owner.__module__)
                    and not member.startswith(("__", "_abc_"))
                ):
                    yield f"{owner.__name__}.{member}"


def reached_into(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Private attributes, and those that `getattr` and `hasattr` name, which no module of the
    package defines."""
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {
        node.target.id
        for node in nodes
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    own |= {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }
    for node in nodes:
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "getattr",
            "hasattr",
            "delattr",
            "setattr",
        ):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
        else:
            continue
        if name.startswith("_") and not name.startswith("__") and name not in own:
            yield name


def outside_names(package: Path, dotted: str, kind: str) -> set[str]:
    """All names of a package of one kind: "import", "override", for which its modules are imported,
    or "reach into"."""
    trees = {
        name: tree
        for name, tree in modules(package, dotted).items()
        if not name.endswith(".__main__")
    }
    if kind == "import":
        return {name for tree in trees.values() for name in imported(tree)}
    if kind == "override":
        return {name for module in trees for name in overridden(importlib.import_module(module))}
    return set(reached_into(trees))


def exists(name: str) -> bool:
    """Whether a dotted name can be imported, as a module or from one."""
    module, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(module), attribute) or find_spec(name) is not None


def _outside(module: str | None) -> bool:
    return (module or "").split(".")[0] in PACKAGES
