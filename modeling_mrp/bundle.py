"""Remote code of a repository: this package in two files, generated, since code on the Hub lies flat.

transformers copies remote code file by file, also while another process reads it: the fewer files, the better. A file holds the
modules that its entries import, directly or not, each behind those that it imports, below one section of imports. Of the
families of backbones it has the one that a checkpoint needs.
``python -m modeling_mrp.bundle hub_configs/sdar-tiny-mrp`` writes it anew.
"""

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .model.families.registry import DENSE, backbone_of
from .model.layouts import json_object
from .model.saving import CONFIGURATION, MODELING, write_code

PACKAGE = Path(__file__).parent


class BundleError(ValueError):
    """The package cannot be bundled as it is."""


@dataclass(frozen=True)
class Module:
    """A source file: its text, that parsed, and its imports of this package with the modules they name."""

    text: str
    tree: ast.Module
    siblings: dict[ast.ImportFrom, str]

    @classmethod
    def read(cls, package: Path, name: str) -> "Module":
        """Parse the module of that name.

        Raises:
            BundleError: for an import that has no counterpart in a single file.
        """
        text = package.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8")
        tree, siblings = ast.parse(text), dict[ast.ImportFrom, str]()
        at_top = list(_statements(tree.body))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                if not node.module or node not in at_top or any(alias.asname for alias in node.names):
                    raise BundleError(
                        f"{name}, line {node.lineno}: in a bundle only `from .module import name` at the top of a file works"
                    )
                siblings[node] = ".".join([*name.split(".")[: -node.level], node.module])
        return cls(text, tree, siblings)

    def outside(self) -> Iterator[ast.Import | ast.ImportFrom]:
        """Iterate over the imports of other packages that the file makes for all modules; those under `try` stay."""
        yield from (n for n in self.tree.body if isinstance(n, ast.Import | ast.ImportFrom) and n not in self.siblings)

    def bound(self) -> Iterator[tuple[str, str]]:
        """Iterate over the names that it binds, each with the code that does it."""
        for node in _statements(self.tree.body):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name, ast.dump(node)
            elif isinstance(node, ast.Import | ast.ImportFrom) and node not in self.siblings:
                yield from ((a.asname or a.name, f"{getattr(node, 'module', None)} {a.name}") for a in node.names)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                yield from (
                    (n.id, ast.dump(node)) for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
                )

    def code(self) -> str:
        """Its text, without the imports that the file makes and `__all__`."""
        gone: list[ast.stmt] = [*self.outside(), *self.siblings]
        for node in self.tree.body:
            emptied = isinstance(node, ast.If) and all(inside in self.siblings for inside in node.body)
            if emptied or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"):
                gone.append(node)
        lines = {line for node in gone for line in range(node.lineno, (node.end_lineno or 0) + 1)}
        return "\n".join(line for number, line in enumerate(self.text.splitlines(), 1) if number not in lines).strip()


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Iterate over the statements that run when a module is imported, those under `if` and `try` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.body)


def modules_of(package: Path, entry: str, without: Mapping[str, str]) -> dict[str, Module]:
    """Find a module and all that it imports of its package, each behind what it imports.

    Raises:
        BundleError: if modules import each other in a circle.
    """
    found: dict[str, Module] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise BundleError(f"modules import each other in a circle: {' -> '.join([*path[path.index(name) :], name])}")
        if name not in found and name not in without:
            module = Module.read(package, name)
            for other in module.siblings.values():
                visit(other, (*path, name))
            found[name] = module

    visit(entry, ())
    return found


def files_of(package: Path, entries: Mapping[str, str | Sequence[str]]) -> dict[str, str]:
    """Generate a package's files, of each the modules whose imports it takes in; later files import from earlier ones.

    Raises:
        BundleError: if two modules bind one name to different things, or what they import has no counterpart in a file.
    """
    made: dict[str, str] = {}
    file_of: dict[str, str] = {}  # of the modules of earlier files
    bound: dict[str, tuple[str, str]] = {"__all__": ("", "")}
    for file, named in entries.items():
        modules: dict[str, Module] = {}
        for entry in [named] if isinstance(named, str) else named:
            modules |= modules_of(package, entry, {**file_of, **dict.fromkeys(modules, file)})
        imported: dict[str, set[str]] = {}  # names, by the beginning of the line
        for name, module in modules.items():
            for what, code in module.bound():
                other, known = bound.setdefault(what, (name, code))
                if other not in ("", name) and code != known:
                    raise BundleError(f"{name} and {other} both define {what}: rename one, since both lie in one file")
            for node in module.outside():
                start = f"from {node.module} import " if isinstance(node, ast.ImportFrom) else "import "
                imported.setdefault(start, set()).update(map(ast.unparse, node.names))
            for node, other in module.siblings.items():
                if other in file_of:
                    imported.setdefault(f"from .{Path(file_of[other]).stem} import ", set()).update(
                        map(ast.unparse, node.names)
                    )
        file_of |= dict.fromkeys(modules, file)
        head = f'"""Generated by `python -m {package.name}.bundle` from the package {package.name}: change it there."""'
        lines = [f"import {name}" for name in sorted(imported.pop("import ", ()))]
        lines += [
            start + ", ".join(sorted(imported[start])) for start in sorted(imported, key=lambda start: (start[5] == ".", start))
        ]
        sections = [f"# {'-' * 100} {name}\n\n{module.code()}" for name, module in modules.items()]
        made[file] = "\n\n\n".join([head + "\n\n" + "\n".join(lines), *sections]) + "\n"
    return made


@cache
def files(family: str = DENSE) -> dict[str, str]:
    """The generated files of this package, by name, for models of a family; one that is registered elsewhere is not in them."""
    configuration = ["model.configuration"]
    home = backbone_of(family).__module__.removeprefix(f"{__package__}.")
    if family != DENSE and home.startswith("model.families."):
        configuration.append(home)
    return files_of(PACKAGE, {CONFIGURATION: configuration, MODELING: "modeling"})


if __name__ == "__main__":
    for target in sys.argv[1:]:
        write_code(Path(target), json_object(Path(target, "config.json")).get("family", DENSE))
