"""Pictures of decodes: their facts by hand, what is safe and visible in them, and that the committed one is what is drawn."""

import re
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from conftest import ROOT
from mrp_trainer import cli
from mrp_trainer.picture import Decode, draw, read_decode, show
from mrp_trainer.picture.facts import Forward, Token, token_texts
from mrp_trainer.picture.options import ShowOptions
from mrp_trainer.picture.svg import visible
from mrp_trainer.publish.folder import PICTURE
from typer.testing import CliRunner

SVG = "{http://www.w3.org/2000/svg}"


class Bytes:
    """A tokenizer whose ids are bytes, with an end of text."""

    all_special_ids = (0,)

    def decode(self, ids: list[int], **options: Any) -> str:
        assert options == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return "<end>" if ids == [0] else bytes(ids).decode(errors="replace")


def output(text: str, reveal_step: list[int], **rounds: list[int]) -> Any:
    """One row's output, behind a prompt of one byte; each token but given ones with probability 1/2."""
    ids = torch.tensor([[65, *text.encode()]])
    stats = SimpleNamespace(
        rounds={name: torch.tensor(counts)[:, None] for name, counts in rounds.items()},
        revocations=torch.tensor([[0, 1, 66], [0, 1, 67], [1, 0, 66]]),
        row_head_forwards=torch.tensor([2]),
    )
    step = torch.tensor([reveal_step])
    logprobs = torch.where(step < 0, 0.0, torch.tensor(0.5).log())
    return SimpleNamespace(sequences=ids, reveal_step=step, token_logprobs=logprobs, stats=stats)


# The prefill takes step 0; the next forward has three drafts and takes steps 1 and 2; the third has one, refused, and takes 3.
ROUNDS = {"row_forwards": [1, 2, 3], "steps": [1, 3, 4], "drafted": [0, 3, 4], "accepted": [0, 1, 1], "column": [-3, 1, 1]}


def drawn() -> Decode:
    return read_decode(output("abcde", [0, 2, -1, 1, 3], **ROUNDS), Bytes(), "mine")


def test_facts_by_hand() -> None:
    found = drawn()
    assert found.tokens == (
        Token("a", 1, 0, False, pytest.approx(0.5)),
        Token("b", 2, 2, True, pytest.approx(0.5), 2),
        Token("c", None),
        Token("d", 2, 1, False, pytest.approx(0.5)),
        Token("e", 3, 3, False, pytest.approx(0.5)),
    )
    assert found.forwards == (Forward(1, 0, 0), Forward(1, 1, 2), Forward(1, 0, 1))
    assert (found.head_forwards, found.drafted, found.accepted, found.blocks) == (2, 4, 1, (1,))
    assert found.tokens_per_forward == pytest.approx(4 / 3)


def test_a_character_of_several_tokens_stands_at_the_last() -> None:
    """Also one that is cut short, and bytes with which none begins."""
    for text, texts in (
        ("aé🦙b".encode(), ["a", "", "é", "", "", "", "🦙", "b"]),
        (b"\xf0\x9f", ["\ufffd"] * 2),
        (b"\xff" * 9, ["\ufffd"] * 9),
    ):
        assert token_texts(list(text), Bytes()) == texts


def test_everything_is_visible() -> None:
    """Of every kind of character: one that is drawn is left as it is, the others are told by their code points."""
    assert visible("a b\t漢🦙e\u0301\r\n\x1b") == "a b⇥漢🦙e\u0301↵\n⟨1B⟩"
    unseen = ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp")
    for character in {unicodedata.category(chr(code)): chr(code) for code in range(14, sys.maxunicode)}.values():
        shown = f"⟨{ord(character):X}⟩" if unicodedata.category(character) in unseen else character
        assert visible(character) == shown


@pytest.mark.parametrize("animated", [False, True])
def test_a_picture_is_whole_in_itself(animated: bool) -> None:
    hostile = "</text><script>alert(1)</script>&amp;\"']]><!--\x00\ud800\n\u202e漢🦙"
    nasty = replace(drawn(), name=hostile, tokens=tuple(replace(token, text=hostile) for token in drawn().tokens))
    picture = draw([nasty, drawn()], prompt=hostile * 30, animated=animated)
    root = ElementTree.fromstring(picture.svg.encode())  # encodes and parses: nothing that XML does not allow
    assert {one.tag.removeprefix(SVG) for one in root.iter()} <= {
        *("svg", "style", "rect", "text", "g", "path", "circle", "title", "clipPath")
    }
    assert re.findall(r"(?:https?:|//)[^\"' ]*", picture.svg) == ["http://www.w3.org/2000/svg"]
    assert all(found.startswith("url(#mrp-") for found in re.findall(r"url\([^)]*\)", picture.svg))
    assert not any(name.startswith("on") or "href" in name for one in root.iter() for name in one.attrib)
    assert ("@keyframes" in picture.svg) == animated
    name = root.attrib["id"]
    style = root.findtext(f"{SVG}style") or ""
    rules = re.findall(r"[{}]\s*([^{}@]+)\{", style)
    assert all(rule.startswith(f"#{name}") or re.fullmatch(r"[\d.,%]+", rule) for rule in rules), "bound to this picture"


def test_a_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as large as the picture; where nothing is installed that draws it, that is said."""
    pytest.importorskip("cairosvg", reason="needs cairosvg: pip install -e '.[picture]'")
    picture = draw([drawn()], prompt="What?", animated=True)
    data = picture.save(tmp_path / "a.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20]) == 2 * float(ElementTree.fromstring(picture.svg).attrib["width"])
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(ImportError, match=r"a \.png needs cairosvg: pip install '\.\[picture\]', or name an \.svg"):
        picture.save(tmp_path / "b.png")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: read_decode(torch.zeros(1, 3), Bytes()), "output is a Tensor without stats.rounds: pass what generate"),
        (lambda: read_decode(output("a", [0], **ROUNDS), Bytes(), row=1), "row is 1: the output has the rows 0 to 0"),
        (lambda: show({}, Bytes()), "there are no decodes to draw"),
        (lambda: draw([drawn()]).save("a.gif"), "a.gif: a picture is an SVG or a PNG, give a name that ends in .svg or .png"),
        (lambda: ShowOptions(output="a.png", animated=True), "a.png, and a .png does not move: name an .svg"),
    ],
)
def test_what_cannot_be_drawn(wrong: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        wrong()


def test_the_committed_picture_is_what_the_command_draws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command is that of `make picture`."""
    monkeypatch.chdir(ROOT)
    (command,) = re.findall(r"mrp_trainer\.cli (show .*)", (ROOT / "Makefile").read_text())
    *arguments, path = command.split()
    assert path == f"./hub_configs/sdar-tiny-mrp/{PICTURE}"
    result = CliRunner().invoke(cli.app, [*arguments, str(tmp_path / "it.svg")])
    assert result.stdout == f"wrote {tmp_path / 'it.svg'}: sequential: 25 forwards; mrp_spec of sequential K=8: 7 forwards\n"
    assert (tmp_path / "it.svg").read_text() == (ROOT / path).read_text()


def test_a_notebook_shows_a_drafted_batch(tiny_model: Any, tiny_tokenizer: Any) -> None:
    """A row of a batch with padding is drawn as it is alone."""
    inputs = tiny_tokenizer(["def double(x):", "def f(value):\n    if"], return_tensors="pt", padding=True)
    options = {"decoding": "mrp_spec", "max_new_tokens": 24, "return_dict_in_generate": True}
    out = tiny_model.generate(**inputs, **options)
    alone = tiny_model.generate(**tiny_tokenizer("def double(x):", return_tensors="pt"), **options)
    picture = show(out, tiny_tokenizer, row=0)
    assert picture._repr_html_() == show(alone, tiny_tokenizer).svg
    found = read_decode(out, tiny_tokenizer, row=1)
    assert sum(one.own + one.accepted for one in found.forwards) == int((out.reveal_step[1] >= 0).sum())
    assert any(token.drafted for token in found.tokens)
