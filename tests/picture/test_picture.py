"""Pictures of decodes: their facts, what is safe and visible in them, and that the committed one is
what is drawn."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from mrp_trainer import cli
from mrp_trainer.picture import Decode, draw, read_decode, show
from mrp_trainer.picture.facts import token_texts
from mrp_trainer.picture.options import ShowOptions
from mrp_trainer.publish.folder import PICTURE
from typer.testing import CliRunner

from tests.support.places import ROOT

SVG = "{http://www.w3.org/2000/svg}"
QUESTIONS = (
    "Sum the numbers of a list that are even, each plus 5.",
    "Write a function of a number: plus 9 when even, otherwise plus 3.",
)
DRAFTS: dict[str, Any] = {"decoding": "mrp_spec", "target": "sequential", "num_draft_states": 8}


class Bytes:
    """A tokenizer whose ids are bytes."""

    def decode(self, ids: list[int], **options: Any) -> str:
        return bytes(ids).decode(errors="replace")


def decoded(model: Any, tokenizer: Any, *questions: str, **options: Any) -> Any:
    chats = [[{"role": "user", "content": question}] for question in questions]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )
    return model.generate(**inputs, max_new_tokens=64, return_dict_in_generate=True, **options)


@pytest.fixture(scope="module")
def drafted(tiny_model: Any, tiny_tokenizer: Any) -> Any:
    """Two rows with drafts, each state of which reveals one token."""
    return decoded(tiny_model, tiny_tokenizer, *QUESTIONS, **DRAFTS)


@pytest.fixture
def drawn(drafted: Any, tiny_tokenizer: Any) -> Decode:
    return read_decode(drafted, tiny_tokenizer, "mine")


def test_facts_are_those_of_the_output(drafted: Any, tiny_model: Any, tiny_tokenizer: Any) -> None:
    stats = drafted.stats
    for row in range(len(QUESTIONS)):
        found = read_decode(drafted, tiny_tokenizer, row=row)
        own, accepted, refused = (
            [getattr(one, name) for one in found.forwards]
            for name in ("own", "accepted", "refused")
        )
        assert len(own) == stats.row_forwards[row]
        assert set(own) == {1}
        assert sum(own) + sum(accepted) == len(found.tokens)
        assert sum(accepted) == sum(token.drafted for token in found.tokens) > 0
        assert 0 <= found.accepted - sum(accepted) <= 1, "one may be of what stands behind the end"
        assert found.accepted == stats.accepted[row]
        assert (
            sum(refused)
            == found.drafted - found.accepted
            == stats.drafted[row] - stats.accepted[row]
            > 0
        )
        assert found.head_forwards == stats.row_head_forwards[row]
        assert found.tokens_per_forward == pytest.approx(drafted.tokens_per_forward[row].item())
        assert [token.step for token in found.tokens] == drafted.reveal_step[
            row, : len(found.tokens)
        ].tolist()
        forwards = [token.forward for token in sorted(found.tokens, key=lambda token: token.step)]
        assert forwards == sorted(forwards)
        odds = drafted.token_logprobs[row, : len(found.tokens)].exp().tolist()
        assert [token.probability for token in found.tokens] == pytest.approx(odds)
    out = decoded(
        tiny_model, tiny_tokenizer, QUESTIONS[0], decoding="mrp_remask", confidence_threshold=0.3
    )
    back = sum(token.taken_back for token in read_decode(out, tiny_tokenizer).tokens)
    assert back == len(out.stats.revocations) > 0


def test_a_row_of_a_batch_is_drawn_as_it_is_alone(
    drafted: Any, tiny_model: Any, tiny_tokenizer: Any
) -> None:
    """As a notebook shows it, without the batch's padding."""
    for row, question in enumerate(QUESTIONS):
        alone = decoded(tiny_model, tiny_tokenizer, question, **DRAFTS)
        assert (
            show(drafted, tiny_tokenizer, row=row)._repr_html_() == show(alone, tiny_tokenizer).svg
        )


def test_a_character_of_several_tokens_stands_at_the_last() -> None:
    """Also one that is cut short, and bytes with which none begins."""
    for text, texts in (
        ("aé🦙b".encode(), ["a", "", "é", "", "", "", "🦙", "b"]),
        (b"\xf0\x9f", ["\ufffd"] * 2),
        (b"\xff" * 9, ["\ufffd"] * 9),
    ):
        assert token_texts(list(text), Bytes()) == texts


@pytest.mark.parametrize("animated", [False, True])
def test_a_picture_is_whole_in_itself(animated: bool, drawn: Decode) -> None:
    hostile = "</text><script>alert(1)</script>&amp;\"']]><!--\x00\ud800\n\u202e漢🦙"
    nasty = replace(
        drawn, name=hostile, tokens=tuple(replace(token, text=hostile) for token in drawn.tokens)
    )
    picture = draw([nasty, drawn], prompt=hostile * 30, animated=animated)
    # encodes and parses: nothing that XML does not allow
    root = ElementTree.fromstring(picture.svg.encode())
    assert {one.tag.removeprefix(SVG) for one in root.iter()} <= {
        *("svg", "style", "rect", "text", "g", "path", "circle", "title", "clipPath")
    }
    assert re.findall(r"(?:https?:|//)[^\"' ]*", picture.svg) == ["http://www.w3.org/2000/svg"]
    assert all(found.startswith("url(#mrp-") for found in re.findall(r"url\([^)]*\)", picture.svg))
    assert not any(
        name.startswith("on") or "href" in name for one in root.iter() for name in one.attrib
    )
    assert ("@keyframes" in picture.svg) == animated
    assert " g *{color:inherit}" in picture.svg, (
        "colours stay in a page that has its own for everything"
    )
    name = root.attrib["id"]
    style = root.findtext(f"{SVG}style") or ""
    rules = re.findall(r"[{}]\s*([^{}@]+)\{", style)
    assert all(rule.startswith(f"#{name}") or re.fullmatch(r"[\d.,%]+", rule) for rule in rules), (
        "bound to this picture"
    )


def test_a_png(drawn: Decode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as large as the picture; where nothing is installed that draws it, that is said."""
    pytest.importorskip("cairosvg", reason="needs cairosvg: pip install -e '.[picture]'")
    picture = draw([drawn], prompt="What?", animated=True)
    data = picture.save(tmp_path / "a.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20]) == 2 * float(
        ElementTree.fromstring(picture.svg).attrib["width"]
    )
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(
        ImportError,
        match=r"a \.png needs cairosvg: pip install 'modeling-mrp\[picture\]', or name an \.svg",
    ):
        picture.save(tmp_path / "b.png")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_what_cannot_be_drawn(drawn: Decode, drafted: Any, tiny_tokenizer: Any) -> None:
    wrong: dict[str, Any] = {
        "output is a Tensor without stats.rounds: pass what": lambda: read_decode(
            torch.zeros(1, 3), tiny_tokenizer
        ),
        "row is 2: the output has the rows 0 to 1": lambda: read_decode(
            drafted, tiny_tokenizer, row=2
        ),
        "there are no decodes to draw": lambda: show({}, tiny_tokenizer),
        "a.gif: a picture is an SVG or a PNG, give a name": lambda: draw([drawn]).save("a.gif"),
        "a.png, and a .png does not move: name an .svg": lambda: ShowOptions(
            output="a.png", animated=True
        ),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_the_committed_picture_is_what_the_command_draws(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The command is that of `make picture`."""
    monkeypatch.chdir(ROOT)
    (command,) = re.findall(r"mrp_trainer\.cli (show .*)", (ROOT / "Makefile").read_text())
    *arguments, path = command.split()
    assert path == f"./hub_configs/sdar-tiny-mrp/{PICTURE}"
    result = CliRunner().invoke(cli.app, [*arguments, str(tmp_path / "it.svg")])
    assert (
        result.stdout
        == f"wrote {tmp_path / 'it.svg'}: sequential: 25 forwards; mrp_spec of sequential K=8: 7 "
        "forwards\n"
    )
    assert (tmp_path / "it.svg").read_text() == (ROOT / path).read_text()
