"""The exporter: a file that holds all of the package that a repository needs, and in which nothing
is lost or meant twice."""

import ast
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from modeling_mrp import bundle
from modeling_mrp.model.code import CUSTOM_GENERATE, MODELING, PACKAGE, code_files
from modeling_mrp.model.families.sdar import families
from tests.support.fresh import Fresh
from tests.support.places import ROOT, TINY

DEFINED = ast.FunctionDef | ast.ClassDef
# None where the library is not there
OPTIONAL = {"AlignDevicesHook", "add_hook_to_module", "weights_on_device"}


def bound(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """The names that statements bind when they run, those under `if` and `try` too, each with the
    code that does it."""
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from bound(node.body)
        elif isinstance(node, DEFINED):
            yield node.name, ast.dump(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (
                (a.asname or a.name, f"{getattr(node, 'module', None)} {a.name}")
                for a in node.names
            )
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
    """No name means two things, no import is relative, and every class and function of the modules
    that are taken in is there, with its docstring. A module that fails: rename what both define,
    and import siblings by `from .module import name`, at the top."""
    tree = ast.parse(bundle.bundled(family)[PACKAGE])
    meant: dict[str, set[str]] = {}
    for name, code in bound(tree.body):
        meant.setdefault(name, set()).add(code)
    assert {name for name, codes in meant.items() if len(codes) > 1} <= {"triton", "tl", *OPTIONAL}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert not [node.module for node in nodes if node.level]
    assert not [alias.name for node in nodes for alias in node.names if alias.name.startswith("_")]
    there = {
        (node.name, ast.get_docstring(node)) for node in ast.walk(tree) if isinstance(node, DEFINED)
    }
    for module in bundle.modules_of(family).values():
        for node in ast.walk(ast.parse(module.text)):
            assert not isinstance(node, DEFINED) or (node.name, ast.get_docstring(node)) in there, (
                node.name
            )


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
    """With all of what the module's docstring says first."""
    text = bundle.bundled()[PACKAGE]
    lines, contents = text.splitlines(), entries(text, "Contents")
    assert [name for _, name, _ in contents] == list(bundle.modules_of())
    assert all(lines[number - 1] == f"# {'-' * 80} {name}" for number, name, _ in contents)
    assert {name: title for _, name, title in contents}["networks.picker"] == (
        "Picks: the token that is chosen at a masked position, and its log-odds"
    )
    assert not [title for _, _, title in contents if not title or title.endswith(("]", ".", ","))]


def entries(text: str, heading: str) -> list[tuple[int, str, str]]:
    """The list below a heading of the header: line, name and text of each entry."""
    block = re.split(r"\n\n(?=\S|$)", text[text.index(f"\n{heading}") :])[0].partition("\n\n")[2]
    matches = re.findall(r"^ {,5}([\d,]+)  (\S+?):? (.+(?:\n {10}.+)*)", block, re.MULTILINE)
    assert len(matches) == len(re.findall(r"^ {,5}\d", block, re.MULTILINE)) > 0
    return [
        (int(line.replace(",", "")), name, " ".join(rest.split())) for line, name, rest in matches
    ]


@pytest.mark.parametrize("family", sorted(families()))
def test_lines_of_the_header_are_those_of_definitions(family: str) -> None:
    """The call path's, the words' and the effects'."""
    text = bundle.bundled(family)[PACKAGE]
    lines, words = (
        text.splitlines(),
        re.findall(r"^ *([\d,]+)  [\w, ]+ \(`(\w+)`\): ", text, re.MULTILINE),
    )
    assert len(words) == len(bundle.GLOSSARY)
    named = [(int(line.replace(",", "")), name) for line, name in words]
    named += [
        (line, name)
        for heading in ("From loading to text", "Importing this file")
        for line, name, _ in entries(text, heading)
    ]
    assert len(named) == len(bundle.GLOSSARY) + len(bundle.CALL_PATH) + len(bundle.EFFECTS)
    for line, name in named:
        assert re.match(rf" *(def|class) {name.rpartition('.')[2]}\b", lines[line - 1]), name


# Calls by which a program touches files, the network or code that it was not given, and libraries
# that do nothing else.
TOUCHING = (
    "cached_file chmod copyfile download from_pretrained fromfile generate "
    "get_class_from_dynamic_module get_config_dict getenv getsource glob hf_hub_download "
    "import_module iterdir load_adapter load_file load_module loadtxt makedirs memmap mkdir "
    "open_code popen Popen push_to_hub read_bytes read_text reload remove rename request rglob "
    "rmdir rmtree run_module run_path safe_open save save_file save_pretrained savez savetxt "
    "snapshot_download socket spawn symlink_to system touch tofile unlink upload_file "
    "upload_folder urlopen write write_bytes write_code write_text"
)
# as methods (`model.eval()`) they are something else
BUILTIN = {"__import__", "compile", "eval", "exec", "open", "input"}
LIBRARIES = (
    "asyncio ctypes ftplib http httpx importlib.util marshal mmap multiprocessing pickle requests "
    "runpy shelve shutil smtplib socket sqlite3 ssl subprocess tempfile urllib webbrowser"
)


def touching(tree: ast.Module) -> dict[str, set[str]]:
    """The calls of `TOUCHING`, of `BUILTIN` and of loaders of torch and pickle, by function or
    method, "" outside of any.

    `write` of the rules, and the loop's of that name, write into a row of text.
    """
    calls: dict[str, set[str]] = {}

    def visit(node: ast.AST, owner: str, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            name = owner
            if isinstance(child, DEFINED) and not inside:
                name = f"{owner}.{child.name}".lstrip(".")
            if isinstance(child, ast.Call):
                called = ast.unparse(child.func)
                last = called.rpartition(".")[2]
                if (
                    last in TOUCHING.split() and called not in ("write", "self.write")
                ) or called in {
                    *BUILTIN,
                    "torch.load",
                    "torch.hub.load",
                }:
                    calls.setdefault(owner, set()).add(last)
            visit(child, name, inside or isinstance(child, ast.FunctionDef))

    visit(tree, "", False)
    return calls


@pytest.mark.parametrize("family", sorted(families()))
def test_the_header_names_all_that_touches_files_network_or_code(family: str) -> None:
    """What fails here is new in the bundle, or gone: say in `EFFECTS` of the bundler what it
    does."""
    text = bundle.bundled(family)[PACKAGE]
    tree = ast.parse(text)
    claimed = {
        name: set(re.split(", ", rest.removeprefix("calls ").partition(":")[0]))
        for _, name, rest in entries(text, "Importing this file")
    }
    assert touching(tree) == claimed
    modules = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {
        name
        for name in modules
        for library in LIBRARIES.split()
        if f"{name}.".startswith(f"{library}.")
    }


def test_each_kind_of_call_is_noticed() -> None:
    source = """
        open("x", "w")
        class A:
            def f(self):
                def inner(): path.unlink()
                self.write(1), model.eval(), tl.load(x), file.write("x"), torch.load(y)
        def g(): return eval("1"), [subprocess.Popen(x) for x in y], super().from_pretrained(x)
    """
    tree = ast.parse(re.sub("^        ", "", source, flags=re.MULTILINE))
    assert touching(tree) == {
        "": {"open"},
        "A.f": {"unlink", "write", "load"},
        "g": {"eval", "Popen", "from_pretrained"},
    }


def test_what_only_a_module_needs_is_left_out() -> None:
    """`__all__` of a module would be that of the file, `generate` is the model's, and no comment
    points at files beside it."""
    text = bundle.bundled()[PACKAGE]
    names = {name for name, _ in bound(ast.parse(text).body)}
    assert not names & {"__all__", "generate", "log"}
    assert not re.findall(r"`[\w/]+/\w+\.py`", text.replace(f"`{CUSTOM_GENERATE}`", ""))
    (function,) = [
        node
        for node in ast.parse(code_files()[CUSTOM_GENERATE]).body
        if isinstance(node, ast.FunctionDef)
    ]
    assert function.name == "generate"


def test_the_code_of_a_folder_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its exit status, and without running it: what is changed, missing, added or named beside
    it is told."""
    folder = Path(shutil.copytree(TINY, tmp_path / "folder"))

    def check() -> tuple[int, str]:
        return bundle.main(["--check", str(folder)]), capsys.readouterr().out

    assert check() == (
        0,
        f"{folder}: its code is that of modeling_mrp 0.1.0, sources {bundle.sources_digest()}\n",
    )
    entry = (folder / MODELING).read_text()
    (folder / MODELING).write_text("raise SystemExit('this ran')\n" + entry)
    (folder / "inner").mkdir()
    (folder / "inner" / "more.py").write_text("raise SystemExit('this ran')")
    (folder / CUSTOM_GENERATE).unlink()
    for name in ("config.json", "tokenizer_config.json"):
        fields = json.loads((folder / name).read_text())
        (folder / name).write_text(
            json.dumps({**fields, "auto_map": {"AutoConfig": "org/other--module.Class"}})
        )
    status, printed = check()
    assert status == 1
    for line in (
        f"{CUSTOM_GENERATE} is missing",
        "inner/more.py is no file of this package",
        f"{MODELING} differs, and names modeling_mrp 0.1.0, sources {bundle.sources_digest()}",
        "auto_map of config.json names other code: {'AutoConfig': 'org/other--module.Class'}",
        "auto_map of tokenizer_config.json names other code: {'AutoConfig': "
        "'org/other--module.Class'}",
        f"its code is NOT that of modeling_mrp 0.1.0, sources {bundle.sources_digest()}",
    ):
        assert f"{folder}: {line}" in printed
    assert PACKAGE not in printed
    (folder / "config.json").write_text("[]")
    assert check()[0] == 1
    with pytest.raises(SystemExit) as ended:
        bundle.main(["--check", str(tmp_path / "nowhere")])
    assert ended.value.code == 2
    assert f"python -m {bundle.__name__} --check FOLDER" in bundle.bundled()[PACKAGE]


def test_the_embedded_checkpoint_has_the_code_of_this_package() -> None:
    assert bundle.differences(TINY) == []


def test_reading_goes_from_the_model_to_the_kernels() -> None:
    """The model's bases are above it; no rule, no loop, no network and no kernel is, but what they
    need when they are made."""
    places = {name: number for number, name in enumerate(bundle.modules_of())}
    order = (
        "model.head",
        "modeling",
        "rules.reveal",
        "rules.draft",
        "generate.loop",
        "networks.networks",
        "networks.cache",
    )
    assert sorted(order, key=places.__getitem__) == list(order)
    assert places["kernels.round_layers"] == len(places) - 1
    above = {
        name.partition(".")[0] for name, number in places.items() if number < places["modeling"]
    }
    assert above == {"versions", "model", "generate"}
    assert "generate.loop" not in list(places)[: places["modeling"]]


def test_a_module_that_is_not_in_the_reading_order_has_a_place() -> None:
    """That of its room, and rooms that nobody listed come last."""
    new = ["zoo.lion", "model.new", "kernels.dispatch", "rules.state"]
    assert sorted(new, key=bundle.reading_rank) == [
        "model.new",
        "rules.state",
        "kernels.dispatch",
        "zoo.lion",
    ]


def test_names_that_an_import_needs() -> None:
    """Bases, decorators, defaults and constants; no annotations, and nothing that a function looks
    up when it is called."""
    source = """
        @decorated
        class A(Base):
            field: Kind = default
            def method(self, x: Hint = other) -> Result:
                return later(x)
        table = {name: (lambda: inner) for name in listed}
    """
    tree = ast.parse(re.sub("^        ", "", source, flags=re.MULTILINE))
    assert {*bundle.used_on_import(tree)} == {
        "decorated",
        "Base",
        "default",
        "other",
        "name",
        "listed",
    }


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
