"""Remote code of a repository: this package in two files, generated, since code on the Hub lies flat.

transformers copies remote code file by file, also while another process reads it: the fewer files, the better. A file holds
what its entry imports of this package, directly or not; a module comes behind those that it imports, and beside those of its
room. ``python -m modeling_mrp.bundle hub_configs/sdar-tiny-mrp`` writes it anew.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from .model.saving import CONFIGURATION, MODELING, write_code

PACKAGE = Path(__file__).parent
# The file of a bundle, and the module whose imports it takes in.
ENTRIES = {CONFIGURATION: "model.configuration", MODELING: "modeling"}
ROOMS = ("model", "kernels", "rules", "runner", "generate")
_WIDTH = 128


class BundleError(ValueError):
    """The package cannot be bundled as it is."""


@dataclass(frozen=True)
class Module:
    """A source file.

    Attributes:
        name: Its path in the package, dotted.
        text: Its source.
        tree: That, parsed.
        siblings: The imports of this package in it, each with the name of the module it imports from.
    """

    name: str
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
        tree = ast.parse(text)
        return cls(name, text, tree, dict(_siblings(name, tree, package.name)))

    @property
    def path(self) -> str:
        """The path in the package."""
        return self.name.replace(".", "/") + ".py"

    @property
    def about(self) -> list[str]:
        """The lines of the docstring."""
        return (ast.get_docstring(self.tree) or "").splitlines()

    def outside(self) -> Iterator[tuple[ast.Import | ast.ImportFrom, ast.alias]]:
        """Iterate over the names that its head imports from other packages."""
        for node in self.tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom) and node not in self.siblings:
                yield from ((node, alias) for alias in node.names)

    def defined(self) -> dict[str, ast.stmt]:
        """The names that it defines, each with the statement that does it first."""
        found: dict[str, ast.stmt] = {}
        for node in _statements(self.tree.body):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.setdefault(node.name, node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for inside in ast.walk(node):
                    if isinstance(inside, ast.Name) and isinstance(inside.ctx, ast.Store):
                        found.setdefault(inside.id, node)
        found.pop("__all__", None)
        return found

    def section(self, known: Iterable[ast.stmt]) -> str:
        """Its code below a comment with its docstring, without imports that the file makes, `__all__`, and what is `known`."""
        first = self.tree.body[0]
        dropped: list[ast.stmt] = [*known, *self.siblings]
        dropped += [first] if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) else []
        for node in self.tree.body:
            of_all = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            emptied = isinstance(node, ast.If) and all(inside in self.siblings for inside in node.body)
            if isinstance(node, ast.Import | ast.ImportFrom) or of_all or emptied:
                dropped.append(node)
        gone = {line for node in dropped for line in range(node.lineno, (node.end_lineno or 0) + 1)}
        body = "\n".join(line for number, line in enumerate(self.text.splitlines(), 1) if number not in gone)
        return "\n".join(["# " + "-" * 100, f"# {self.path}", "#", *(f"# {line}".rstrip() for line in self.about)]) + (
            "\n\n" + body.strip("\n")
        )


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Iterate over the statements that run when a module is imported, those under `if` and `try` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node.body)


def _siblings(name: str, tree: ast.Module, package: str) -> Iterator[tuple[ast.ImportFrom, str]]:
    """Iterate over a module's imports of its package."""
    at_import = set(_statements(tree.body))
    for node in ast.walk(tree):
        plain = isinstance(node, ast.Import) and any(alias.name.split(".")[0] == package for alias in node.names)
        relative = isinstance(node, ast.ImportFrom) and (node.level > 0 or str(node.module).split(".")[0] == package)
        if not (plain or relative):
            continue
        if (
            not isinstance(node, ast.ImportFrom)
            or not (node.level and node.module)
            or node not in at_import
            or any(alias.asname for alias in node.names)
        ):
            raise BundleError(
                f"{name}, line {getattr(node, 'lineno', 0)}: in a bundle only `from .module import name` at the top of a file "
                "works"
            )
        yield node, ".".join([*name.split(".")[: -node.level], node.module])


def modules_of(package: Path, entry: str, without: Iterable[str] = ()) -> list[Module]:
    """Find a module and all that it imports of its package, each behind what it imports, as far as possible room by room.

    Raises:
        BundleError: if modules import each other in a circle.
    """
    found: dict[str, Module] = {}
    missing = [entry]
    while missing:
        name = missing.pop()
        if name not in found and name not in without:
            found[name] = Module.read(package, name)
            missing += found[name].siblings.values()
    order = TopologicalSorter({name: found.keys() & set(module.siblings.values()) for name, module in found.items()})
    try:
        order.prepare()
    except CycleError as error:
        raise BundleError(f"modules import each other in a circle: {' -> '.join(reversed(error.args[1]))}") from error
    ready, sorted_names = set(order.get_ready()), []
    room = ROOMS[0]
    while ready:
        chosen = min(ready, key=lambda name: (name.split(".")[0] != room, *_place(name)))
        room = chosen.split(".")[0]
        sorted_names.append(chosen)
        order.done(chosen)
        ready = ready - {chosen} | set(order.get_ready())
    return [found[name] for name in sorted_names]


def _place(name: str) -> tuple[int, str]:
    room = name.split(".")[0]
    return (ROOMS.index(room) if room in ROOMS else len(ROOMS)), name


def _imports(modules: Iterable[Module]) -> str:
    """The imports from other packages, of all modules, as one block; the standard library's first.

    Raises:
        BundleError: if a name stands for two things.
    """
    origin: dict[str, str] = {}
    groups: tuple[dict[str, set[str]], dict[str, set[str]]] = {}, {}
    for module in modules:
        for node, alias in module.outside():
            source = f"from {node.module} import " if isinstance(node, ast.ImportFrom) else "import "
            line, bound = source + ast.unparse(alias), alias.asname or alias.name
            if origin.setdefault(bound, line) != line:
                raise BundleError(f"{module.name}: `{line}`, and another module has `{origin[bound]}`: rename one")
            top = (node.module or "" if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
            groups[top not in sys.stdlib_module_names].setdefault(source, set()).add(ast.unparse(alias))
    for module in modules:
        if clash := sorted(origin.keys() & module.defined().keys()):
            raise BundleError(f"{module.name} defines {clash[0]}, and another module has `{origin[clash[0]]}`: rename one")
    return "\n\n".join("\n".join(_import_lines(group)) for group in groups if group)


def _import_lines(group: Mapping[str, set[str]]) -> Iterator[str]:
    """Iterate over the import statements of a group, `import x` before `from x import y`."""
    for source in sorted(group, key=lambda source: (source.startswith("from"), source)):
        names = sorted(group[source], key=str.casefold)
        if source == "import ":
            yield from (source + name for name in names)
        elif len(line := source + ", ".join(names)) <= _WIDTH:
            yield line
        else:
            yield f"{source}(\n" + "".join(f"    {name},\n" for name in names) + ")"


def files_of(package: Path, entries: Mapping[str, str]) -> dict[str, str]:
    """Generate a package's files.

    Args:
        package: Its folder.
        entries: Of each file the module whose imports it takes in. Later files import from earlier ones.

    Raises:
        BundleError: if two modules define different things of one name, or what they import has no counterpart in a file.
    """
    made: dict[str, str] = {}
    file_of: dict[str, str] = {}  # of the modules of earlier files
    defined: dict[str, tuple[str, ast.stmt]] = {}
    for file, entry in entries.items():
        modules = modules_of(package, entry, file_of)
        sections, own = [], {module.name for module in modules}
        for module in modules:
            known = []
            for name, node in module.defined().items():
                other, first = defined.setdefault(name, (module.name, node))
                if first is node:
                    continue
                if other not in own or not isinstance(node, ast.Assign) or ast.dump(first) != ast.dump(node):
                    raise BundleError(f"{module.name} and {other} both define {name}: rename one")
                known.append(node)  # the same constant
            sections.append(module.section(known))
        made[file] = "\n\n\n".join([_head(package.name, modules, entry, file_of), *sections]) + "\n"
        file_of |= dict.fromkeys(own, file)
    return made


def _head(package: str, modules: list[Module], entry: str, file_of: Mapping[str, str]) -> str:
    """The mark, the docstring with a table of contents, and all imports."""
    about = next(module.about for module in modules if module.name == entry)
    width = max(len(module.path) for module in modules)
    parts = [f"    {module.path:{width}}  {module.about[0] if module.about else ''}".rstrip() for module in modules]
    lines = [
        f"# Generated by `python -m {package}.bundle` from the package {package}: change it there.",
        f'"""{about[0] if about else entry}',
        *(["", "Its parts, in this order:", *parts] if len(parts) > 1 else []),
        '"""',
    ]
    blocks = ["\n".join(lines), _imports(modules)]
    names: dict[str, set[str]] = {}
    for module in modules:
        for node, other in module.siblings.items():
            if other in file_of:
                names.setdefault(f"from .{file_of[other].removesuffix('.py')} import ", set()).update(
                    a.name for a in node.names
                )
    return "\n\n".join([*blocks, *_import_lines(names)])


@cache
def files() -> dict[str, str]:
    """The generated files of this package, by name."""
    return files_of(PACKAGE, ENTRIES)


if __name__ == "__main__":
    for target in sys.argv[1:]:
        write_code(Path(target))
