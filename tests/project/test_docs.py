"""README and the pages of `docs/`: their Python runs and prints what they say, their commands and
links exist."""

import inspect
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from doctest import DocTestParser, DocTestRunner
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from modeling_mrp import MRPForCausalLM
from modeling_mrp.model.families.sdar import families
from tests.support.commands import command
from tests.support.places import ROOT, TINY
from tests.support.published import as_published

DOCUMENTS = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
    )
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What a page's Python needs beyond what `make test` installs.
NEEDS = {
    "docs/quantized.md": ("bitsandbytes",),
    "docs/serving.md": ("openai", "uvicorn", "fastapi"),
    "docs/decoding.md": ("outlines_core", "llguidance"),
}


def blocks(text: str, *kinds: str) -> list[str]:
    return [
        code
        for kind, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        if kind in kinds
    ]


def blocks_with_output(text: str) -> list[tuple[str, str]]:
    """Every block of Python, and the block of kind `text` that comes next, before any other block:
    what it prints."""
    every = [
        (kind, code)
        for kind, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]
    pairs = zip(every, [*every[1:], ("", "")], strict=True)
    return [
        (code, after if next_kind == "text" else "")
        for (kind, code), (next_kind, after) in pairs
        if kind == "python"
    ]


def run_page(name: str, **replaced: str) -> dict[str, Any]:
    """The names that a page's Python leaves; one block goes on from those before it, and prints
    what the page says, no more."""
    names: dict[str, Any] = {"__name__": "__main__"}
    assert all(any(old in code for code in blocks(DOCUMENTS[name], "python")) for old in replaced)
    for code, output in blocks_with_output(DOCUMENTS[name]):
        if "import sglang" in code:
            continue  # the engine has an environment of its own: tests/engine
        for old, new in replaced.items():
            code = code.replace(old, new)
        with redirect_stdout(StringIO()) as printed:
            exec(compile(code, name, "exec"), names)
        if "mrp_trainer.cli" not in code and "MRPTrainer(" not in code:  # training prints times
            assert printed.getvalue().rstrip() == output.rstrip(), code
    return names


# Python


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the root of a clone, but for what is written there; families that a page
    registers are its own."""
    monkeypatch.setitem(families(), "my_llama", None)
    del families()["my_llama"]  # until the page has it
    (tmp_path / "hub_configs").symlink_to(ROOT / "hub_configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def served() -> Iterator[str]:
    """The address of the page's own server, at a free port; it is killed at the end."""
    (command,) = (
        line
        for line in blocks(DOCUMENTS["docs/serving.md"], "bash")[0].splitlines()
        if line.startswith("mrp serve")
    )
    started = [sys.executable, "-m", "mrp_trainer.cli", *shlex.split(command)[1:], "--port", "0"]
    with subprocess.Popen(started, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            yield next(
                found[1]
                for line in server.stderr
                if (found := re.search(r"running on (http://\S+)", line))
            )
        finally:
            server.kill()


PAGES = [
    name for name, text in DOCUMENTS.items() if blocks(text, "python") and name != "docs/loading.md"
]


@pytest.mark.parametrize("name", PAGES)
def test_a_pages_python_runs_and_prints_what_it_says(name: str, elsewhere: Path) -> None:
    """Blocks of kind `text` are what the Python before them prints, line by line."""
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module, reason="of another extra: make test-extras")
    with served() if name == "docs/serving.md" else nullcontext() as address:
        run_page(name, **({"http://127.0.0.1:8000": address} if address else {}))


@pytest.mark.parametrize("shown", ["2\n3\n", "1\n2\n", "1\n3\n", "1\n2\n3\n4\n", None])
def test_a_page_that_misses_a_line_fails(
    shown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first, the last, or one between; so does one that has a line too many, or shows
    nothing."""
    code, output = "```python\nfor number in 1, 2, 3:\n    print(number)\n```\n", "1\n2\n3\n"
    monkeypatch.setitem(DOCUMENTS, "page.md", f"{code}\nIt prints\n\n```text\n{output}```\n")
    assert run_page("page.md")["number"] == 3
    wrong = code if shown is None else f"{code}\n```text\n{shown}```\n"
    monkeypatch.setitem(DOCUMENTS, "page.md", wrong)
    with pytest.raises(AssertionError):
        run_page("page.md")


@pytest.mark.parametrize(
    "described",
    [MRPForCausalLM, MRPForCausalLM.generate, MRPForCausalLM.from_backbone],
    ids=lambda each: each.__name__,
)
def test_the_example_of_a_docstring(
    described: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands alone, and needs no file of the clone."""
    monkeypatch.chdir(tmp_path)
    example = DocTestParser().get_doctest(
        inspect.getdoc(described) or "", {}, described.__name__, None, None
    )
    assert len(example.examples) >= 3
    assert DocTestRunner().run(example) == (0, len(example.examples))


def test_no_python_is_hidden_from_this_test() -> None:
    kinds = {
        kind
        for text in DOCUMENTS.values()
        for kind in re.findall(r"^```(\S+)$", text, re.MULTILINE)
    }
    assert kinds <= {"python", "bash", "text", "json"}


def test_the_python_of_the_page_of_loading(tmp_path: Path, elsewhere: Path) -> None:
    """Folders stand for what cannot be downloaded here: a backbone, a head in the published layout,
    a head of this package."""
    embedded: Any = MRPForCausalLM.from_pretrained(TINY)
    bare: Any = MRPForCausalLM.from_pretrained(TINY)
    bare.detach_head()
    bare.save_pretrained(tmp_path / "bare")
    AutoTokenizer.from_pretrained(TINY, trust_remote_code=True).save_pretrained(tmp_path / "bare")
    backbone = as_published(tmp_path / "bare", tmp_path / "backbone")
    embedded.backbone_source = (str(backbone), None)
    embedded.save_pretrained(tmp_path / "head", head_only=True)
    names = run_page(
        "docs/loading.md",
        # custom generation needs a Hub, and a stock model its repository's code:
        # tests/model/test_custom_generate.py
        **{
            'sdar.generate(\n    **inputs, custom_generate="org/sdar-4b-mrp-head"': "dict(head=1",
            "sdar = AutoModelForCausalLM": "sdar = MRPForCausalLM",
            "JetLM/SDAR-4B-Chat-b16": str(backbone),
            "heavyball/sdar-4b-mrp-3lyr": str(as_published(TINY, tmp_path / "both")),
            "org/sdar-4b-mrp-head": str(tmp_path / "head"),
        },
    )
    ids, options = names["inputs"], {**names["options"], "target": "static"}
    assert torch.equal(
        names["model"].generate(**ids, **options), embedded.generate(**ids, **options)
    )


# Commands


def told() -> Iterator[tuple[str, list[str]]]:
    """Every command of the documents in words; a block's own variables are filled in."""
    for name, text in DOCUMENTS.items():
        if name.startswith("benchmarks/"):
            continue  # what was measured then, with commands of then
        for block in blocks(text, "", "bash"):
            names = dict(re.findall(r'^(\w+)="(.*)"$', block, re.MULTILINE))
            block = re.sub(
                r"\$(\w+)",
                lambda match, names=names: names.get(match[1], match[0]),
                block.replace("\\\n", " "),
            )
            yield from (
                (name, words)
                for line in block.splitlines()
                if (words := shlex.split(line, comments=True))
            )


def test_every_command_is_one() -> None:
    """With the flags that it has, and choices that it takes; nothing is run."""
    commands = [words for _, words in told()]
    for program, *words in commands:
        if program == "mrp" and words[0].startswith("--"):
            assert {*words} <= {
                "--version",
                *(name for parameter in command().params for name in parameter.opts),
            }, words
        elif program == "mrp":
            found = command()
            while hasattr(found, "commands"):
                found = found.commands[words.pop(0)]
            found.make_context(found.name, words)  # which parses, and refuses what it does not know
        elif program == "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        elif program == "python" and words[0] == "-m":
            assert words[1].startswith("sglang.") or find_spec(words[1]), words
        elif program == "python":
            assert (ROOT / words[0]).is_file(), words
        elif (program, *words[:2]) == ("pip", "install", "-e"):
            assert set(re.findall(r"\w+", words[2])) <= PROJECT["optional-dependencies"].keys(), (
                words
            )
    asked = {words[1] for words in commands if words[0] == "mrp"}
    assert asked >= {"show", "tasks", "train", "decode", "evaluate", "push", "serve"}


# Links and names


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_leads_somewhere(name: str) -> None:
    """Of pages that are in no site, too: of those that are, `make docs` also checks headings."""
    links = {
        link.partition("#")[0]
        for link in re.findall(r"\]\(([^)\s]+)\)", DOCUMENTS[name])
        if "://" not in link
    }
    assert [link for link in links if not ((ROOT / name).parent / link).exists()] == []


# Where paths of the pages about the code begin, beside the root; names of files alone are looked
# for in the folders below.
BEGINS = [
    ROOT / begin for begin in ("modeling_mrp", "trainer/mrp_trainer", "hub_configs/sdar-tiny-mrp")
]


@pytest.mark.parametrize("name", ["docs/code.md", "docs/own_backbone.md", "CONTRIBUTING.md"])
def test_paths_of_the_pages_about_the_code_exist(name: str) -> None:
    """Those in backticks, in full or as the pages shorten them."""
    prose = re.sub(r"^```.*?^```$", "", DOCUMENTS[name], flags=re.MULTILINE | re.DOTALL)
    paths = {
        text
        for text in re.findall(r"`([\w./-]+)`", prose)
        if "/" in text or text.endswith((".py", ".json", ".md"))
    }
    short = {
        path: path if "/" in path else f"**/{path}" for path in paths if not (ROOT / path).exists()
    }
    assert paths
    assert [
        path
        for path, inside in short.items()
        if not any(next(begin.glob(inside), None) for begin in BEGINS)
    ] == []


def test_the_page_of_the_code_says_what_every_room_holds() -> None:
    section = DOCUMENTS["docs/code.md"].split("\n## The rooms\n")[1].split("\n## ")[0]
    rooms = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE))
    packages = ROOT / "modeling_mrp", ROOT / "trainer" / "mrp_trainer"
    assert sorted(rooms) == sorted(
        path.parent.name for package in packages for path in package.glob("*/__init__.py")
    )
