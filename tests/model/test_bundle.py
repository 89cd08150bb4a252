"""The exporter: a file that holds all of the package that a repository needs, and in which nothing is lost or meant twice."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT
from fresh import Fresh

from modeling_mrp import bundle
from modeling_mrp.model.code import PACKAGE
from modeling_mrp.model.families.sdar import families

DEFINED = ast.FunctionDef | ast.ClassDef
OPTIONAL = {"AlignDevicesHook", "add_hook_to_module", "fetched"}  # None where the library is not there


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
    tree = ast.parse(bundle.bundled(family)[PACKAGE])
    meant: dict[str, set[str]] = {}
    for name, code in bound(tree.body):
        meant.setdefault(name, set()).add(code)
    assert {name for name, codes in meant.items() if len(codes) > 1} <= {"triton", "tl", *OPTIONAL}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [node.module for node in nodes if node.level]
    assert not [alias.name for node in nodes for alias in node.names if alias.name.startswith("_")]
    there = {(node.name, ast.get_docstring(node)) for node in ast.walk(tree) if isinstance(node, DEFINED)}
    for module in bundle.modules_of(family).values():
        for node in ast.walk(ast.parse(module.text)):
            assert not isinstance(node, DEFINED) or (node.name, ast.get_docstring(node)) in there, node.name


def test_every_familys_file_can_be_imported(fresh: Fresh, tmp_path: Path) -> None:
    """What a class needs when it is made stands above it, whatever the reading order asks for."""
    for family in families():
        (tmp_path / f"of_{family}.py").write_text(bundle.bundled(family)[PACKAGE], encoding="utf-8")
    printed = fresh(
        f"""
        from importlib import import_module
        sys.path.insert(0, {str(tmp_path)!r})
        for family in {sorted(families())}:
            print(family in import_module("of_" + family).FAMILIES)
        """
    )
    assert printed == "True\n" * len(families())


def test_a_reader_finds_a_module_where_the_contents_say() -> None:
    lines = bundle.bundled()[PACKAGE].splitlines()
    contents = [line for line in lines if re.match(r" *[\d,]+  \w", line)]
    places = {line.split()[1]: int(line.split()[0].replace(",", "")) for line in contents}
    assert places.keys() == bundle.modules_of().keys()
    assert all(lines[number - 1] == f"# {'-' * 100} {name}" for name, number in places.items())


def test_reading_goes_from_the_model_to_the_kernels() -> None:
    """The model's bases are above it; no rule, no loop, no network and no kernel is, but what they need when they are made."""
    places = {name: number for number, name in enumerate(bundle.modules_of())}
    order = ("model.head", "modeling", "rules.reveal", "rules.draft", "generate.loop", "networks.networks", "networks.cache")
    assert sorted(order, key=places.__getitem__) == list(order)
    assert places["kernels.round_layers"] == len(places) - 1
    above = {name.partition(".")[0] for name, number in places.items() if number < places["modeling"]}
    assert above == {"model", "generate"}
    assert "generate.loop" not in list(places)[: places["modeling"]]


def test_a_module_that_is_not_in_the_reading_order_has_a_place() -> None:
    """That of its room, and rooms that nobody listed come last."""
    new = ["zoo.lion", "model.new", "kernels.dispatch", "rules.state"]
    assert sorted(new, key=bundle.reading_rank) == ["model.new", "rules.state", "kernels.dispatch", "zoo.lion"]


def test_names_that_an_import_needs() -> None:
    """Bases, decorators, defaults and constants; no annotations, and nothing that a function looks up when it is called."""
    source = """
        @decorated
        class A(Base):
            field: Kind = default
            def method(self, x: Hint = other) -> Result:
                return later(x)
        table = {name: (lambda: inner) for name in listed}
    """
    tree = ast.parse(re.sub("^        ", "", source, flags=re.MULTILINE))
    assert {*bundle.used_on_import(tree)} == {"decorated", "Base", "default", "other", "name", "listed"}


def test_the_digest_is_that_of_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same wherever they lie, and another one for other sources."""
    copy = tmp_path / "elsewhere"
    for path in (ROOT / "modeling_mrp").rglob("*.py"):
        target = copy / path.relative_to(ROOT / "modeling_mrp")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    digest = bundle.sources_digest()
    assert f"sources {digest}" in bundle.bundled()[PACKAGE].splitlines()[2]
    monkeypatch.setattr(bundle, "HERE", copy)
    assert bundle.sources_digest() == digest
    (copy / "modeling.py").write_text("changed")
    assert bundle.sources_digest() != digest
