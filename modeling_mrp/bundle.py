"""Generator of a repository's remote code: this package's modules in one file, as remote code has
no subpackages.

`package_mrp.py` holds all modules that the model imports, directly or indirectly, and the module of
its family. They are in the order of `READING`, below one section of imports. `modeling_mrp.py` is
the file that transformers loads. It is made from the code of `entry.py`, and waits until
`package_mrp.py` is complete. Modules must import each other by `from .module import name` at the
top of a file, and no two modules may define the same name differently. ``python -m
modeling_mrp.bundle hub_configs/sdar-tiny-mrp`` writes the files of a repository again; with
``--check`` it reports whether they are the files that this package would write.
"""

import argparse
import ast
import hashlib
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from . import __version__
from .model.code import AUTO_MAP, CUSTOM_GENERATE, MODELING, PACKAGE, code_files, write_code
from .model.families.sdar import DENSE, backbone_of
from .model.layouts import json_object

HERE = Path(__file__).parent
# Modules and packages in reading order. A module that another one needs for its import always comes
# before that one.
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
    "generate.decide",
    "generate.output",
    "model",
    "rules.state",
    "rules.reveal",
    "rules.published",
    "rules.constraint",
    "rules",
    "rules.draft",
    "rules.sources",
    "rules.lookup",
    "rules.costs",
    "rules.gain",
    "generate.loop",
    "generate.refine",
    "generate.batching",
    "generate.joining",
    "generate.request",
    "generate",
    "constraints.languages",
    "constraints.schema",
    "constraints.patterns",
    "constraints.automaton",
    "constraints.block",
    "constraints.grammar",
    "networks.networks",
    "networks.runner",
    "networks.sampler",
    "networks.picker",
    "networks.layers",
    "networks.cache",
    "networks.predicted",
    "networks",
    "kernels",
]
# The path of a call from loading to text: definitions of the bundle, in the order in which they are
# reached, and the purpose of each.
CALL_PATH = [
    (
        "MRPPreTrainedModel.from_pretrained",
        "load: read config.json, and let transformers' loader fill the model",
    ),
    (
        "MRPForCausalLM.__init__",
        "make backbone, head and lm_head; a head repository's head is attached to its backbone "
        "instead",
    ),
    (
        "MRPPreTrainedModel.attach_head",
        "read a head's tensors, check that they fit, and put the head on the backbone",
    ),
    (
        "MRPGenerationMixin.generate",
        "check the arguments; transformers' `generate` prepares the others, and calls `_prepare`",
    ),
    ("resolved", "merge and check the options of the call and of the generation config"),
    ("_prepare", "make rule, picker and rows of the call"),
    ("_picker", "sort transformers' logits processors by kind, into what picks tokens"),
    (
        "laid_out",
        "make a row of each prompt: its text in whole blocks, with masks where tokens are to come",
    ),
    ("_decode", "make cache and networks, and run the decoder"),
    (
        "Decoder.decode",
        "compute the prompts' keys and values, then go round by round until every row has ended",
    ),
    ("RoundDecoder.round", "run one round, in four steps:"),
    (
        "RoundDecoder.draft",
        "1. choose the states to score: the next one of each row, and drafts (`build_draft`)",
    ),
    (
        "Networks.score",
        "2. run one forward of the backbone over all of them, and pick a token at each masked "
        "position",
    ),
    (
        "RoundDecoder.accept",
        "3. follow the reveal rule from state to state (`accept`), and commit clean blocks to the "
        "cache",
    ),
    (
        "RoundDecoder.write",
        "4. refine the last reveal by the head, where the mode says so, and write it into the "
        "row's text",
    ),
    ("output_of", "make the tensors that are returned"),
]
GLOSSARY = [
    (
        "row",
        "Row",
        "one sequence of the batch: its text (prompt, tokens, masks), where it may end, and its "
        "`Counts`",
    ),
    (
        "state",
        "State",
        "a block of a row with some of its tokens revealed, and masks in the other columns "
        "(positions in the block)",
    ),
    (
        "clean",
        "State",
        "a state without masks: its keys and values can be committed, and the next block begins "
        "behind it",
    ),
    (
        "memo",
        "RevealRule",
        "a small value by which a reveal rule remembers earlier steps of a row; None for most "
        "rules",
    ),
    (
        "pick",
        "Picker",
        "the token, and its log-odds, that logits give at a masked position, greedy or sampled",
    ),
    (
        "draft",
        "Node",
        "states that may come later, scored beside the row's next one; they change the time, never "
        "the text",
    ),
    (
        "pending reveal",
        "PendingReveal",
        "a row's last accepted state and the reveal there, whose result nothing has scored yet",
    ),
    (
        "hold, cut",
        "BlockCache",
        "a cache notes the texts whose keys and values it holds; a later call cuts it to what it "
        "can reuse",
    ),
    (
        "target",
        "Mode",
        "the mode whose text `self_spec` and `mrp_spec` repeat: `static`, unless a call or "
        "generation_config.json says another",
    ),
]
# Every call in the bundle that touches files, the network or other code, by the definition that
# makes it. A test compares this list with the code.
EFFECTS = [
    (
        "MRPPreTrainedModel.from_pretrained",
        "from_pretrained, load_adapter",
        "transformers reads config, generation config and safetensors; where the repository is an "
        "adapter on a head's, transformers and peft read the adapter, in the formats that they "
        "take",
    ),
    (
        "MRPPreTrainedModel.load_adapter",
        "load_adapter",
        "transformers and peft read an adapter",
    ),
    (
        "MRPPreTrainedModel.from_backbone",
        "from_pretrained",
        "the same, of the named backbone; then `attach_head`",
    ),
    ("read_gguf", "from_pretrained", "transformers reads a GGUF file, for `from_backbone`"),
    (
        "MRPPreTrainedModel._shared_model",
        "from_pretrained",
        f"reads config and head of a repository, for {CUSTOM_GENERATE}",
    ),
    (
        "MRPPreTrainedModel._read_head",
        "from_pretrained, safe_open",
        "reads config and safetensors, for `attach_head`",
    ),
    ("MRPConfig.get_config_dict", "get_config_dict", "transformers reads config.json"),
    (
        "stored_json",
        "cached_file",
        "finds config.json or generation_config.json in a folder or the cache, or fetches it",
    ),
    ("weight_files", "cached_file", "the same for safetensors and their index"),
    ("stored_names", "cached_file, safe_open", "the same, and reads the names of the tensors"),
    ("json_object", "read_text", "reads such a JSON file"),
    (
        "MRPPreTrainedModel.save_pretrained",
        "save_pretrained, save_file, mkdir, unlink",
        "writes weights and configs into the folder that it is given, and removes weights of an "
        "earlier save there; with push_to_hub=True transformers uploads the folder",
    ),
    (
        "MRPConfig.save_pretrained",
        "save_pretrained, write_code",
        "writes config.json (push_to_hub as above) and this code",
    ),
    ("write_code", "mkdir, write_text", "writes the three code files into that folder"),
    (
        "code_files",
        "read_text, getsource, import_module",
        "reads these files, to write them; imports only inside the package",
    ),
    ("check_head_folder", "iterdir", "lists the folder into which a head is to be saved"),
    (
        "MRPGenerationMixin.generate",
        "generate",
        "transformers' own `generate`. If a caller passes custom_generate and "
        "trust_remote_code=True, transformers FETCHES AND EXECUTES the code that they name",
    ),
    (
        "MRPGenerationMixin._prepared",
        "generate",
        "transformers' own `generate`, for processors and criteria of the options",
    ),
    ("MRPGenerationMixin.generate_batch", "generate", "the `generate` above"),
    (
        "generate_on_stock",
        "get_class_from_dynamic_module, generate",
        f"never called here: its text is saved as {CUSTOM_GENERATE}, where it fetches and executes "
        "that repository's code",
    ),
    (
        "check_other_variants",
        "glob",
        "when saving: looks for shards of another variant in the folder",
    ),
    (
        "families",
        "glob, import_module",
        "imports the other backbones in the package; in this file nothing, as there is one",
    ),
]
_TITLE = (
    "MRP for block-diffusion language models: the model, `generate` and all that they need, in "
    "reading order."
)
_ENTRY_TITLE = (
    "MRP for block-diffusion language models: what transformers imports first (`auto_map` in "
    "config.json)."
)
_ENTRY = f"""
Everything is in {PACKAGE}: read that file, which has a table of contents. transformers copies both
files into its cache of modules without a lock, so that another process may still be copying them.
This one is short enough to be written at once. It waits until {PACKAGE} is whole, and imports it.

Imports: Python's standard library, then {PACKAGE}, which lists what it imports.
Reads: {PACKAGE} beside it. Writes: nothing, but that Python keeps byte code of what it imports.
Network: nothing.
"""
_ENTRY_END = """
import_whole(
    f"{{__package__}}.{module}",
    Path(__file__).with_name("{file}"),
    "{end}",
)
# Loaded by now. transformers copies the files that are imported in lines like this one.
from .{module} import {exported}
"""
_SOURCES = """
Paths and packages that comments and messages name (docs/, benchmarks/, mrp_trainer) belong to the
project in which this file is generated, and are not in a model's repository.
"""
_NETWORK = """
On load, transformers imports modeling_mrp.py, which imports this file, and calls `from_pretrained`
below. custom_generate/generate.py is not run then: it is for a caller who passes this repository as
custom_generate to the `generate` of another model.

Importing this file does no more than importing those packages does. Files and the network are
touched by these calls alone. What is read lies in a local folder or, by huggingface_hub, in a
repository on the Hub, whose files its cache on disk keeps: the repository that a call names and,
where its config names a backbone, that one. With HF_HUB_OFFLINE=1 or local_files_only=True nothing
is sent. This file itself reads JSON and safetensors, no pickles, and runs no code that a
checkpoint's config names; where a caller passes custom_generate, transformers does (see below).
"""
_MEMORY = """
What else outlives a call, in memory and on disk:
- On an NVIDIA GPU `generate` moves weights of layers to new storage (`pack`), those of a caller's
  stock model, too. The parameters stay the same objects with the same values; their addresses
  change. kernels=True does so on any device.
- On an NVIDIA GPU CUDA graphs and a cache of keys and values stay with the model for later calls,
  until `release_graphs` is called, weights move, or a call needs a larger cache. triton compiles
  kernels, and keeps them in its own cache on disk.
- The process remembers which kernels failed or were checked; a stock model, the MRP model that was
  made of it.
- A manager of `init_continuous_batching` decodes in a daemon thread until it is stopped.
- Weights that a caller offloads (device_map) are kept on disk or in another memory by transformers
  and accelerate, and read from there in each call.
"""


class Module(NamedTuple):
    """A module of this package that goes into the bundle.

    Attributes:
        text: The source of the module.
        imports: Maps the name of each other module of the package from which this one imports to
            the names that it imports from there.
        needed: The names of those other modules whose definitions are used already while this
            module is imported, for instance as a base class.
    """

    text: str
    imports: dict[str, set[str]]
    needed: set[str]


def used_on_import(node: ast.AST) -> Iterator[str]:
    """Yield the names that a piece of code reads while it is imported: all names outside of
    function bodies and annotations. `node` is the syntax tree of the code."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id
    children: list[ast.AST | None] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        children = [
            *node.args.defaults,
            *node.args.kw_defaults,
            *getattr(node, "decorator_list", []),
        ]
    elif isinstance(node, ast.AnnAssign):
        children = [node.value]
    for child in children:
        if child is not None:
            yield from used_on_import(child)


def read_module(name: str) -> Module:
    """Read a module of this package. Its name is given relative to the package, such as
    "model.head"."""
    path = HERE.joinpath(*name.split(".")).with_suffix(".py")
    if not path.exists():
        raise ValueError(
            f"{path} does not exist: where a package is imported from, name its module in full, as "
            "in `from .rules.reveal import RevealRule`"
        )
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    imports: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            source = ".".join([*name.split(".")[: -node.level], str(node.module)])
            names = imports.setdefault(source, set())
            for alias in node.names:
                names.add(alias.asname or alias.name)
    used = {*used_on_import(tree)}
    needed = {source for source, names in imports.items() if names & used}
    return Module(text, imports, needed)


def modules_of(family: str = DENSE) -> dict[str, Module]:
    """Read the modules that the bundle of a model family contains: `modeling`, the module of the
    family's backbone, and all modules of this package that they import, directly or indirectly.

    Args:
        family: The name of the family. Its own module is left out if it lies outside this package.

    Returns:
        The modules by name. They are in reading order (the list `READING` in this module), with
        one exception: the modules whose names a module needs while it is imported (`Module.needed`)
        come before that module.
    """
    family_module = backbone_of(family).__module__.removeprefix(f"{__package__}.")
    pending = ["modeling"]
    if family_module.startswith("model.families."):
        pending.append(family_module)
    modules: dict[str, Module] = {}
    while pending:
        name = pending.pop()
        if name not in modules:
            modules[name] = read_module(name)
            pending += modules[name].imports
    ordered: dict[str, Module] = {}

    def append(name: str) -> None:
        for dependency in sorted(modules[name].needed, key=reading_rank):
            append(dependency)
        ordered.setdefault(name, modules[name])

    for name in sorted(modules, key=reading_rank):
        append(name)
    return ordered


def reading_rank(name: str) -> tuple[int, str]:
    """Return a key that sorts the names of modules by reading order: a pair of a number and the
    name.

    The number is an index in `READING`, a list of modules and packages in this order. It is the
    index of the module itself, if the list has it, or else of the innermost package around the
    module that the list has: "model.head" stands at "model.head", and "model.layouts" at "model".
    If the list has neither, the number is the length of the list, so that the module comes last.
    """
    components = name.split(".")
    for length in range(len(components), 0, -1):
        entry = ".".join(components[:length])
        if entry in READING:
            return READING.index(entry), name
    return len(READING), name


def code_of(text: str, imported: dict[str, set[str]]) -> str:
    """Return the text of a module without its top-level imports and without `__all__`.

    Args:
        text: The source of the module.
        imported: Collects the removed imports of other packages; the function adds to it. It maps
            the first words of an import statement, such as "from torch import ", to the names that
            follow these words. Imports from this package are not added.
    """
    removed: set[int] = set()  # line numbers
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            imported.setdefault("import ", set()).update(map(ast.unparse, node.names))
        elif isinstance(node, ast.ImportFrom):
            if not node.level:
                names = imported.setdefault(f"from {node.module} import ", set())
                names.update(map(ast.unparse, node.names))
        elif not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"):
            continue
        removed.update(range(node.lineno, (node.end_lineno or 0) + 1))
    code = "\n".join(
        line for number, line in enumerate(text.splitlines(), 1) if number not in removed
    ).strip()
    return re.sub(r'^("""(?:.|\n)*?""")\n{4,}', r"\1\n\n\n", code)


def import_lines(imported: dict[str, set[str]]) -> str:
    """Write the imports that `code_of` collected in `imported`, sorted, with one line per
    module."""
    lines = [f"import {name}" for name in sorted(imported["import "])]
    for start, names in sorted(imported.items()):
        if start != "import ":
            lines.append(start + ", ".join(sorted(names)))
    return "\n".join(lines)


def imported_packages(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of the packages that are imported by the statements among `nodes`. Relative
    imports are left out."""
    packages: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            packages.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            packages.add(str(node.module).partition(".")[0])
    return packages


def packages_of(modules: dict[str, Module]) -> tuple[list[str], list[str]]:
    """Return the names of the packages outside the standard library that modules import, as two
    lists. The first are required: they are imported at the top level of a module. The others are
    optional: they are only imported further in, for instance in a function or a `try`."""
    required: set[str] = set()
    optional: set[str] = set()
    for module in modules.values():
        tree = ast.parse(module.text)
        required |= imported_packages(tree.body)
        optional |= imported_packages(ast.walk(tree))
    required -= sys.stdlib_module_names
    optional -= required | sys.stdlib_module_names
    return sorted(required), sorted(optional)


def sources_digest() -> str:
    """Compute a digest of the source files of this package. It is equal in every clone of a
    commit."""
    digest = hashlib.sha256()
    for path in sorted(HERE.rglob("*.py"), key=lambda path: path.relative_to(HERE).as_posix()):
        name = path.relative_to(HERE).as_posix()
        text = path.read_text(encoding="utf-8")
        digest.update(name.encode() + b"\0" + text.encode() + b"\0")
    return digest.hexdigest()[:16]


def about(title: str) -> str:
    """Return the text with which a generated file begins: the given title, the command that
    generated the file, the version of this package, and the digest of its sources."""
    digest = sources_digest()
    return f"""{title}

Generated by `python -m modeling_mrp.bundle` from modeling_mrp {__version__}, sources {digest}:
change it there. In a clone, `git log -S {digest} -- hub_configs` finds the commit with these
sources (a SHA-256 of their text).
With the package installed, `python -m modeling_mrp.bundle --check FOLDER` tells by its exit status
whether the code in a folder is the package's; it runs none of that code."""


def end_mark() -> str:
    """Return the last line of `package_mrp.py`. A copy of the file that does not end with this line
    has not been written to its end yet."""
    return f"# The end of {PACKAGE}, sources {sources_digest()}"


def first_sentence(text: str) -> str:
    """Return the first sentence of a module's docstring in one line, without its full stop. `text`
    is the source of the module."""
    paragraph = " ".join(str(ast.get_docstring(ast.parse(text))).partition("\n\n")[0].split())
    return re.split(r"\.(?= |$)", paragraph)[0]


def listing(entries: Iterable[tuple[str, str]], lines: Mapping[str, int]) -> str:
    """Write a list: each text, after the line number of the thing that it describes. Long texts are
    wrapped; how many lines the list takes does not depend on the line numbers.

    Args:
        entries: Pairs of a name and the text to write for it.
        lines: Maps each of these names to the line number to write before its text.
    """
    filled = []
    for name, text in entries:
        entry = f"{lines[name]:6,}  {text}"
        filled.append(textwrap.fill(entry, 100, subsequent_indent=" " * 10, break_on_hyphens=False))
    return "\n".join(filled)


def section_line(name: str) -> str:
    """Return the line that is written above the code of a module, and that names the module."""
    return f"# {'-' * 80} {name}"


def lines_of(text: str, modules: Iterable[str]) -> dict[str, int]:
    """Return the line numbers at which modules, functions, classes and methods begin in the text of
    a generated file. They are given by name; the name of a method is "Class.method".

    Args:
        text: The text of the file.
        modules: The names of the modules in it.
    """
    text_lines = text.splitlines()
    lines = {name: text_lines.index(section_line(name)) + 1 for name in modules}
    for definition in ast.parse(text).body:
        if isinstance(definition, ast.FunctionDef | ast.ClassDef):
            lines[definition.name] = definition.lineno
        if isinstance(definition, ast.ClassDef):
            for node in definition.body:
                if isinstance(node, ast.FunctionDef):
                    lines[f"{definition.name}.{node.name}"] = node.lineno
    return lines


def header(modules: Mapping[str, Module], lines: Mapping[str, int]) -> str:
    """Write the docstring of `package_mrp.py`: table of contents, the path from loading to text, a
    glossary, the packages that are imported, and all calls that touch files, the network or other
    code.

    Args:
        modules: The modules of the file, by name, in reading order.
        lines: Maps the names of modules and definitions to their line numbers in the file.
    """
    required, optional = packages_of(dict(modules))
    imports = (
        f"Imports {', '.join(required)}, Python's standard library and, if installed, "
        f"{', '.join(optional)}."
    )
    contents = [
        (name, f"{name}: {first_sentence(module.text)}") for name, module in modules.items()
    ]
    call_path = [(name, f"{name}: {text}") for name, text in CALL_PATH]
    words = [(name, f"{word} (`{name}`): {text}") for word, name, text in GLOSSARY]
    effects = [(name, f"{name} calls {calls}: {text}") for name, calls, text in EFFECTS]
    sections = [
        about(_TITLE),
        "Contents, by line:\n\n" + listing(contents, lines),
        "From loading to text, by line:\n\n" + listing(call_path, lines),
        "Words, by the line of the class that they belong to:\n\n" + listing(words, lines),
        _SOURCES,
        textwrap.fill(imports, 120),
        _NETWORK,
        listing(effects, lines),
        _MEMORY,
    ]
    return "\n\n".join(section.strip("\n") for section in sections)


def package_text(family: str) -> str:
    """Generate the text of `package_mrp.py` for a family: docstring, imports, and the modules, each
    below a line with its name."""
    modules = modules_of(family)
    imported: dict[str, set[str]] = {}
    sections = [
        f"{section_line(name)}\n\n{code_of(module.text, imported)}"
        for name, module in modules.items()
    ]
    imports = f"from __future__ import annotations\n\n{import_lines(imported)}"

    def assemble(lines: Mapping[str, int]) -> str:
        start = f'"""{header(modules, lines)}\n"""\n\n{imports}'
        return "\n\n\n".join([start, *sections, end_mark()]) + "\n"

    draft = assemble(defaultdict(int))  # has the final number of lines
    return assemble(lines_of(draft, modules))


def entry_text() -> str:
    """Generate the text of `modeling_mrp.py`. When this file is imported, it waits until
    `package_mrp.py` beside it, which another process may still be copying, has been written to its
    end, and imports it (`entry.import_whole`)."""
    imported: dict[str, set[str]] = {}
    code = code_of(read_module("entry").text, imported)
    code = code.removeprefix(f'"""{ast.get_docstring(ast.parse(code), clean=False)}"""').strip()
    module = PACKAGE.removesuffix(".py")
    exported = sorted({name.partition(".")[2] for name in AUTO_MAP.values()})
    ending = _ENTRY_END.format(
        module=module, file=PACKAGE, end=end_mark(), exported=", ".join(exported)
    )
    docstring = f'"""{about(_ENTRY_TITLE)}\n\n{_ENTRY.strip()}\n"""'
    return "\n\n\n".join([f"{docstring}\n\n{import_lines(imported)}", code, ending.strip()]) + "\n"


@cache
def bundled(family: str = DENSE) -> dict[str, str]:
    """Generate the remote code of a family. Return the text of each file, by file name. The module
    of the family is left out if it lies outside this package."""
    return {MODELING: entry_text(), PACKAGE: package_text(family)}


def differences(folder: Path) -> list[str]:
    """Return a message for each difference between the code in a checkpoint's folder and the code
    that this package would write there; an empty list if there is none. None of this code is run.

    Two things are compared: the texts of all Python files, and the classes that `auto_map` names in
    config files. Raise `ValueError` for a malformed config.
    """
    fields = {path.name: json_object(path) for path in sorted(folder.glob("*config.json"))}
    expected = code_files(fields.get("config.json", {}).get("family", DENSE))
    present = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    lines = [f"{name} is missing" for name in sorted(expected.keys() - present)]
    for name, path in sorted(present.items()):
        if name not in expected:
            lines.append(f"{name} is no file of this package")
        elif (text := path.read_text(encoding="utf-8", errors="replace")) != expected[name]:
            sources = re.search(r"from modeling_mrp (\S+), sources (\w+)", text)
            if sources is None:
                origin = "names no origin"
            else:
                origin = f"names modeling_mrp {sources[1]}, sources {sources[2]}"
            lines.append(f"{name} differs, and {origin}")
    for name, config in fields.items():
        names = config.get("auto_map")
        is_expected = name == "config.json" and names == AUTO_MAP
        if names is not None and not is_expected:
            lines.append(f"auto_map of {name} names other code: {names}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the remote code into the folders of checkpoints or, with `--check`, compare the code
    there with it.

    Args:
        arguments: The arguments of the command: folders, and possibly `--check`. None: those of the
            process.

    Returns:
        The exit status: 1 if `--check` finds a difference, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m modeling_mrp.bundle", description="Write or check a repository's code."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing: say whether the code is this package's"
    )
    parser.add_argument(
        "folders",
        nargs="+",
        type=Path,
        metavar="FOLDER",
        help="a checkpoint's folder, with config.json",
    )
    options = parser.parse_args(arguments)
    status = 0
    for folder in options.folders:
        if not folder.is_dir():
            parser.error(
                f"{folder} is no folder: download the repository first (hf download org/name "
                "--local-dir FOLDER)"
            )
        if not options.check:
            write_code(folder, json_object(folder / "config.json").get("family", DENSE))
            continue
        try:
            lines = differences(folder)
        except ValueError as error:
            lines = [str(error)]
        status = status or int(bool(lines))
        package = f"modeling_mrp {__version__}, sources {sources_digest()}"
        for line in lines or [f"its code is that of {package}"]:
            print(f"{folder}: {line}")
        if lines:
            print(
                f"{folder}: its code is NOT that of {package}. For another version install that "
                "one, and check again"
            )
    return status


if __name__ == "__main__":
    sys.exit(main())
