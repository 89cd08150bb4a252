"""Generator of a repository's remote code: this package's modules in one file, since remote code has no subpackages.

`package_mrp.py` holds all modules that the model imports, directly or not, and its family's module, below one section of
imports, in the order of `READING`. `modeling_mrp.py`, which transformers loads, is the code of `entry.py`, which waits until
that file is whole. Modules must import each other by `from .module import name` at the top of a file, and no two may define one
name differently. ``python -m modeling_mrp.bundle hub_configs/sdar-tiny-mrp`` regenerates both.
"""

import ast
import hashlib
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from . import __version__
from .model.code import AUTO_MAP, CUSTOM_GENERATE, MODELING, PACKAGE, write_code
from .model.families.sdar import DENSE, backbone_of
from .model.layouts import json_object

HERE = Path(__file__).parent
# Modules, or rooms of them, as a reader meets them. What a module needs to be imported comes before it in any case.
READING = [
    "model.families",
    "model.configuration",
    "model.head",
    "modeling",
    "model.loading",
    "generate.generation",
    "generate.option_table",
    "generate.options",
    "generate.score",
    "generate.output",
    "model",
    "rules.state",
    "rules.reveal",
    "rules.published",
    "rules",
    "rules.draft",
    "generate.budget",
    "generate.loop",
    "generate.refine",
    "generate",
    "networks.networks",
    "networks.picker",
    "networks.layers",
    "networks.cache",
    "networks",
    "kernels",
]
_TITLE = "MRP for block-diffusion language models: the model, `generate` and all that they need, in reading order."
_ENTRY_TITLE = "MRP for block-diffusion language models: what transformers imports first (`auto_map` in config.json)."
_ENTRY = f"""
Everything is in {PACKAGE}: read that file, which has a table of contents. transformers copies both files into its
cache of modules without a lock, so that another process may still be copying them. This one is short enough to be
written at once. It waits until {PACKAGE} is whole, and imports it.

Imports, but for that: Python's standard library. Writes: byte code, as any import does. Network: nothing.
"""
_LAST = """
import_whole(
    f"{{__package__}}.{module}",
    Path(__file__).with_name("{file}"),
    "{end}",
)
# Loaded by now. transformers copies the files that are imported in lines like this one.
from .{module} import {exported}
"""
_EFFECTS = f"""
Importing this file reads and writes nothing else. Files and the network are touched in these calls only:
- `from_pretrained`, `from_backbone`, `attach_head` and a config's `from_pretrained` read JSON and safetensors, and no pickles,
  from a local folder or, by huggingface_hub, from a repository on the Hub (its cache on disk keeps them): the one that is named
  and, where its config names a backbone, that one. With HF_HUB_OFFLINE=1 or local_files_only=True nothing is sent.
- `save_pretrained` writes weights, configs and these files into the folder that it is given.
- `generate` and `score` read and write no files. On an NVIDIA GPU triton compiles kernels, and keeps them in its own cache.
- `from_stock_model`, for {CUSTOM_GENERATE}, reads this repository's config and head, as `from_pretrained` does.
- `push_to_hub` is transformers' own.
"""


class Module(NamedTuple):
    """A module of the bundle.

    Attributes:
        text: Its source.
        imports: Names that it imports from other modules of the package, by module.
        needed: Modules of which it uses a name while it is imported, such as that of a base class.
    """

    text: str
    imports: dict[str, set[str]]
    needed: set[str]


def used_on_import(node: ast.AST) -> Iterator[str]:
    """Find the names that code reads when it is imported: all but those in bodies of functions and in annotations."""
    if isinstance(node, ast.Name):
        yield node.id
    children: list[ast.AST | None] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        children = [*node.args.defaults, *node.args.kw_defaults, *getattr(node, "decorator_list", [])]
    elif isinstance(node, ast.AnnAssign):
        children = [node.value]
    for child in children:
        if child is not None:
            yield from used_on_import(child)


def read_module(name: str) -> Module:
    """Read a module of this package."""
    text = HERE.joinpath(*name.split(".")).with_suffix(".py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    imports: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            source = ".".join([*name.split(".")[: -node.level], str(node.module)])
            imports.setdefault(source, set()).update(alias.asname or alias.name for alias in node.names)
    used = {*used_on_import(tree)}
    return Module(text, imports, {source for source, names in imports.items() if names & used})


def modules_of(family: str = DENSE) -> dict[str, Module]:
    """Read the modules of a family's bundle, by name, in reading order; a family outside this package is not among them."""
    home = backbone_of(family).__module__.removeprefix(f"{__package__}.")
    waiting, modules = ["modeling", *([home] if home.startswith("model.families.") else [])], {}
    while waiting:
        if (name := waiting.pop()) not in modules:
            modules[name] = read_module(name)
            waiting += modules[name].imports
    ordered: dict[str, Module] = {}

    def place(name: str) -> None:
        for other in sorted(modules[name].needed, key=reading_rank):
            place(other)
        ordered.setdefault(name, modules[name])

    for name in sorted(modules, key=reading_rank):
        place(name)
    return ordered


def reading_rank(name: str) -> tuple[int, str]:
    """Rank a module by the longest entry of `READING` that is its name or its room; rooms that are not there come last."""
    parts = name.split(".")
    known = [".".join(parts[:length]) for length in range(len(parts), 0, -1) if ".".join(parts[:length]) in READING]
    return (READING.index(known[0]) if known else len(READING)), name


def code_of(text: str, imported: dict[str, set[str]]) -> str:
    """Return a module's text without imports; add those of other packages to `imported`, by `import ` or `from X import `."""
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in imports:
        start = "import " if isinstance(node, ast.Import) else f"from {node.module} import "
        if isinstance(node, ast.Import) or not node.level:
            imported.setdefault(start, set()).update(map(ast.unparse, node.names))
    gone = {number for node in imports for number in range(node.lineno, (node.end_lineno or 0) + 1)}
    code = "\n".join(line for number, line in enumerate(text.splitlines(), 1) if number not in gone).strip()
    return re.sub(r'^("""(?:.|\n)*?""")\n{4,}', r"\1\n\n\n", code)


def import_lines(imported: dict[str, set[str]]) -> str:
    """Write the imports that `code_of` collected, sorted, one line a module."""
    lines = [f"import {name}" for name in sorted(imported["import "])]
    return "\n".join(
        [*lines, *(start + ", ".join(sorted(names)) for start, names in sorted(imported.items()) if start != "import ")]
    )


def packages_of(modules: dict[str, Module]) -> tuple[list[str], list[str]]:
    """List the packages outside the standard library that modules import: those that are needed, and optional ones."""
    needed: set[str] = set()
    every: set[str] = set()
    for module in modules.values():
        tree = ast.parse(module.text)
        for nodes, names in ((tree.body, needed), (ast.walk(tree), every)):
            for node in nodes:
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names.add(str(node.module).partition(".")[0])
    return sorted(needed - sys.stdlib_module_names), sorted(every - needed - sys.stdlib_module_names)


def sources_digest() -> str:
    """Compute a digest of the package's sources, which is the same in every clone of a commit."""
    digest = hashlib.sha256()
    for path in sorted(HERE.rglob("*.py"), key=lambda path: path.relative_to(HERE).as_posix()):
        digest.update(path.relative_to(HERE).as_posix().encode() + b"\0" + path.read_text(encoding="utf-8").encode() + b"\0")
    return digest.hexdigest()[:16]


def about(title: str) -> str:
    """Say what a generated file is, and what it was generated from."""
    digest = sources_digest()
    return f"""{title}

Generated by `python -m modeling_mrp.bundle` from modeling_mrp {__version__}, sources {digest}: change it there. In a
clone, `git log -S {digest} -- hub_configs` finds the commit with these sources (a SHA-256 of their text)."""


def end_mark() -> str:
    """Return the last line of `package_mrp.py`, by which a whole file is known."""
    return f"# The end of {PACKAGE}, sources {sources_digest()}"


def titled(name: str, text: str, width: int = 66) -> str:
    """Shorten the first sentence of a module's docstring to a line of the contents."""
    title = " ".join(str(ast.get_docstring(ast.parse(text))).partition("\n\n")[0].split())
    return textwrap.shorten(re.split(r"[.;:(]", title)[0], width)


def package_text(family: str) -> str:
    """Generate `package_mrp.py`: docstring, imports, and the modules, each below a line with its name."""
    modules, imported = modules_of(family), dict[str, set[str]]()
    sections = {name: f"# {'-' * 100} {name}\n\n{code_of(module.text, imported)}" for name, module in modules.items()}
    needed, optional = packages_of(modules)
    imports = f"Imports {', '.join(needed)}, Python's standard library and, if installed, {', '.join(optional)}."

    def headed(height: int) -> str:
        """Return docstring and imports; the contents are right if these have `height` lines."""
        contents, line = [], height + 3
        for name, section in sections.items():
            contents.append(f"{line:6,}  {name:26}  {titled(name, modules[name].text)}")
            line += section.count("\n") + 3
        parts = [about(_TITLE), "Contents, by line:\n\n" + "\n".join(contents), textwrap.fill(imports, 120), _EFFECTS]
        docstring = "\n\n".join(map(str.strip, parts))
        return f'"""{docstring}\n"""\n\nfrom __future__ import annotations\n\n{import_lines(imported)}'

    head = headed(headed(0).count("\n") + 1)
    return "\n\n\n".join([head, *sections.values(), end_mark()]) + "\n"


def entry_text() -> str:
    """Generate `modeling_mrp.py`, which imports `package_mrp.py` once it is whole."""
    imported: dict[str, set[str]] = {}
    code = code_of(read_module("entry").text, imported)
    code = code.removeprefix(f'"""{ast.get_docstring(ast.parse(code), clean=False)}"""').strip()
    module, exported = PACKAGE.removesuffix(".py"), sorted({name.partition(".")[2] for name in AUTO_MAP.values()})
    last = _LAST.format(module=module, file=PACKAGE, end=end_mark(), exported=", ".join(exported))
    docstring = f'"""{about(_ENTRY_TITLE)}\n\n{_ENTRY.strip()}\n"""'
    return "\n\n\n".join([f"{docstring}\n\n{import_lines(imported)}", code, last.strip()]) + "\n"


@cache
def bundled(family: str = DENSE) -> dict[str, str]:
    """Generate a family's remote code, text by file; it lacks the family's module if that lies outside this package."""
    return {MODELING: entry_text(), PACKAGE: package_text(family)}


if __name__ == "__main__":
    for target in sys.argv[1:]:
        write_code(Path(target), json_object(Path(target, "config.json")).get("family", DENSE))
