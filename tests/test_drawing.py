"""Pictures in the cards of what is pushed: drawn where that is possible, else a line says why not and how one is made."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from helpers import hashes
from hub_client import Done, HubClient
from hub_server import HubServer
from mrp_trainer.loading import load_model, load_tokenizer
from mrp_trainer.picture.modes import draw_modes
from mrp_trainer.picture.options import ShowOptions
from mrp_trainer.publish import drawing
from mrp_trainer.publish.cardtext import NOT_SHOWN, SHOWN
from mrp_trainer.publish.folder import read_folder
from peft import LoraConfig, get_peft_model
from publishing import client, folders, hub, push, repo, server

from modeling_mrp import MRPForCausalLM

__all__ = ["client", "folders", "hub", "push", "repo", "server"]  # fixtures

BASE = "org/tiny"
WHY = "No picture was drawn for this card: "


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The embedded checkpoint without its picture and card, its head, and adapters of both on which it decodes otherwise."""
    at = tmp_path_factory.mktemp("tiny")
    shutil.copytree(TINY, at / "full", ignore=shutil.ignore_patterns("decode.svg", "README.md"))
    MRPForCausalLM.from_pretrained(TINY).save_pretrained(at / "head", head_only=True, base_model_name_or_path=BASE)
    for name, base, targets in (("adapter", BASE, ["eh_proj"]), ("of_head", "org/tiny-head", r"mrp_head\..*q_proj")):
        torch.manual_seed(0)
        adapted = get_peft_model(MRPForCausalLM.from_pretrained(TINY), LoraConfig(r=2, target_modules=targets))
        for parameter in (parameter for key, parameter in adapted.named_parameters() if "lora_B" in key):
            torch.nn.init.normal_(parameter, std=1.0)
        adapted.peft_config["default"].base_model_name_or_path = base
        adapted.save_pretrained(at / name)
    return {path.name: path for path in at.iterdir()}


@pytest.fixture(scope="module")
def cached(server: HubServer, client: HubClient, tiny: dict[str, Path]) -> Callable[[], None]:
    """Puts the model and the head that names it on the Hub, and into the cache of the process that pushes."""

    def fetch() -> None:
        for repo_id, kind in ((BASE, "full"), ("org/tiny-head", "head")):
            server.commit(repo_id, {file.name: file.read_bytes() for file in tiny[kind].iterdir() if file.is_file()})
        code = f"""
            from modeling_mrp import MRPForCausalLM
            from mrp_trainer.loading import load_tokenizer
            MRPForCausalLM.from_pretrained("org/tiny-head"), load_tokenizer({BASE!r})
        """
        assert client.run(code).error is None

    return fetch


def section(hub: HubServer, repo_id: str) -> str:
    """What a card says under its heading of the picture."""
    return hub.files(repo_id)["README.md"].decode().split("## A decode to look at\n\n")[1].split("\n## ")[0]


def drawn(model: Any, target: Path) -> bytes:
    options = ShowOptions(animated=True, output=str(target))
    draw_modes(model.eval(), load_tokenizer(str(TINY)), options)
    return target.read_bytes()


def test_a_picture_is_drawn(hub: HubServer, push: Callable[..., Done], tiny: dict[str, Path], repo: str) -> None:
    """Of a model that can be decoded here; the folder stays as it is."""
    before = hashes(tiny["full"])
    for options, shown in (({"picture": False}, f"{WHY}none was asked for. {NOT_SHOWN}"), ({}, SHOWN)):
        assert push(tiny["full"], repo, **options).error is None
        assert section(hub, repo) == f'{shown}\n\n```\nmrp show --model "{repo}" --animated --output decode.svg\n```\n'
        assert ("decode.svg" in hub.files(repo)) == (shown == SHOWN)
    picture = hub.files(repo)["decode.svg"]
    assert picture.startswith(b"<svg")
    assert b"sequential: 25 forwards; mrp_spec of sequential K=8: 7 forwards" in picture
    assert hashes(tiny["full"]) == before


def test_a_model_without_a_tokenizer(hub: HubServer, push: Callable[..., Done], folders: dict[str, Path], repo: str) -> None:
    assert push(folders["full"], repo).error is None
    assert section(hub, repo).startswith(f"{WHY}there is no tokenizer beside the model. {NOT_SHOWN}\n")


def test_a_head_and_adapters_are_drawn_where_their_base_is_in_the_cache(
    hub: HubServer, push: Callable[..., Done], tiny: dict[str, Path], cached: Callable[[], None], tmp_path: Path
) -> None:
    """Each with what it adds; before that the card names what lacked, and gives a command that fetches it."""
    bases = {"head": BASE, "adapter": BASE, "of_head": "org/tiny-head"}
    for kind, base in bases.items():
        assert push(tiny[kind], f"org/my-{kind}").error is None
        told = section(hub, f"org/my-{kind}")
        assert told.startswith(f"{WHY}{base} was not in the cache of the machine that pushed it. {NOT_SHOWN}\n")
        assert f'\nmrp show --model "org/my-{kind}" --tokenizer "{base}" --animated --output decode.svg\n' in told
    cached()
    seen = len(hub.requests)
    pictures = {}
    for kind in bases:
        assert push(tiny[kind], f"org/my-{kind}").error is None
        assert section(hub, f"org/my-{kind}").startswith(SHOWN)
        pictures[kind] = hub.files(f"org/my-{kind}")["decode.svg"]
    assert not [one for one in hub.requests[seen:] if "tiny" in one.path], "nothing is fetched for a picture"
    assert pictures["head"] == drawn(load_model(str(TINY)), tmp_path / "head.svg")
    for kind in ("adapter", "of_head"):
        model = load_model(str(TINY))
        model.load_adapter(str(tiny[kind]))
        assert pictures[kind] == drawn(model, tmp_path / f"{kind}.svg")
        assert pictures[kind] != pictures["head"]


def test_what_is_large_is_not_loaded_without_a_gpu(
    hub: HubServer, client: HubClient, tiny: dict[str, Path], cached: Callable[[], None], repo: str
) -> None:
    """The backbone of a head counts, too."""
    cached()
    small = (tiny["head"] / "model.safetensors").stat().st_size + (tiny["full"] / "model.safetensors").stat().st_size - 1
    for kind in ("full", "head"):
        done = client.run(
            f"""
            from mrp_trainer.publish import drawing, publish
            usual, drawing.LARGEST_DRAWN = drawing.LARGEST_DRAWN, {small if kind == "head" else 1 << 20}
            try:
                publish({str(tiny[kind])!r}, {repo + kind!r})
            finally:
                drawing.LARGEST_DRAWN = usual
            """
        )
        assert done.error is None
        expected = f"{WHY}the weights have 0 GB, and there was no GPU. {NOT_SHOWN}\n"
        assert section(hub, repo + kind).startswith(expected) or torch.cuda.is_available()


def test_a_model_that_cannot_be_decoded(tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """The card says so without the error, which may name folders of this machine; the log has it."""

    def fails(*_: Any) -> Iterator[None]:
        raise RuntimeError(f"out of memory in {tiny['full']}\nand more")

    monkeypatch.setattr(drawing, "draw_modes", fails)
    with drawing.with_picture(read_folder(tiny["full"])) as folder:
        assert folder.not_drawn == "the model could not be decoded where it was pushed"
        assert "decode.svg" not in folder.files
    assert f"where it was pushed (out of memory in {tiny['full']}). mrp show makes one" in caplog.text


def test_a_folder_is_not_taken_for_a_repository(tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the name that an adapter gives would be drawn in its place."""
    shutil.copytree(tiny["full"], tmp_path / BASE)
    monkeypatch.chdir(tmp_path)
    with drawing.with_picture(read_folder(tiny["adapter"])) as folder:
        assert folder.not_drawn == "what it belongs to is no repository by its name where it was pushed"
        assert "decode.svg" not in folder.files


def test_an_adapter_card_names_a_mode_that_its_base_has(hub: HubServer, push: Callable[..., Done], tmp_path: Path) -> None:
    """An adapter of a backbone alone tells of no head."""
    model = MRPForCausalLM.from_pretrained(TINY)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=r"model\.layers\.0\.self_attn\.q_proj"))
    adapted.save_pretrained(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": "org/headless"}))
    assert push(tmp_path, "org/my-backbones").error is None
    assert '--tokenizer "org/headless" --animated' in section(hub, "org/my-backbones")
    assert 'decoding="self_spec"' in hub.files("org/my-backbones")["README.md"].decode()
