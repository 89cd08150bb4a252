"""The exporter: a file that holds all of the package that a repository needs, and in which nothing is lost or meant twice."""

import ast
from collections.abc import Iterator

import pytest

from modeling_mrp import bundle
from modeling_mrp.model.families.sdar import families


def bound(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """The names that statements bind when they run, those under `if` and `try` too, each with the code that does it."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from bound(node.body)
        elif isinstance(node, DEFINED):
            yield node.name, ast.dump(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((a.asname or a.name, f"{getattr(node, 'module', None)} {a.name}") for a in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (
                (n.id, ast.dump(node))
                for target in targets
                for n in ast.walk(target)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            )


@pytest.mark.parametrize("family", sorted(families()))
def test_one_file_holds_what_a_repository_needs(family: str) -> None:
    """No name means two things, no import is relative, and every class and function of the modules that are taken in is there,
    with its docstring. A module that fails: rename what both define, and import siblings by `from .module import name`, at the
    top."""
    tree = ast.parse(bundle.bundled(family))
    meant: dict[str, set[str]] = {}
    for name, code in bound(tree.body):
        meant.setdefault(name, set()).add(code)
    assert {name for name, codes in meant.items() if len(codes) > 1} <= {"triton", "tl", *OPTIONAL}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [node.module for node in nodes if node.level]
    assert not [alias.name for node in nodes for alias in node.names if alias.name.startswith("_")]
    taken: dict[str, str] = {}
    bundle.add_modules("modeling", taken)
    there = {(node.name, ast.get_docstring(node)) for node in ast.walk(tree) if isinstance(node, DEFINED)}
    for text in taken.values():
        for node in ast.walk(ast.parse(text)):
            assert not isinstance(node, DEFINED) or (node.name, ast.get_docstring(node)) in there, node.name


DEFINED = ast.FunctionDef | ast.ClassDef
OPTIONAL = {"AlignDevicesHook", "add_hook_to_module", "fetched"}  # None where the library is not there
