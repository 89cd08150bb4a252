"""Which folders are fit to be published, and what of them: all of it is known before anything is sent."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import make_model
from helpers import hashes
from mrp_trainer.publishing import publish
from safetensors.torch import load_file, save_file

from modeling_mrp.model.pushing import kind_of

DEEP = '{"model_type": "sdar_mrp", "a": ' + "[" * 100_000


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder") / "full"
    make_model().save_pretrained(folder)
    return folder


def broken_folders() -> list[Any]:
    def pickled(folder: Path) -> None:
        (folder / "pytorch_model.bin").write_bytes(b"")

    def cut(folder: Path) -> None:
        whole = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(whole[:-10])

    def no_weights(folder: Path) -> None:
        (folder / "model.safetensors").unlink()

    def no_auto_map(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "auto_map"}))

    def foreign(folder: Path) -> None:
        (folder / "config.json").write_text('{"model_type": "llama"}')

    def empty(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()

    def called_a_head(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | {"base_model_name_or_path": "org/backbone"}
        (folder / "config.json").write_text(json.dumps(config))

    def head_called_full(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file({n: t for n, t in tensors.items() if n.startswith("mrp_head.")}, folder / "model.safetensors")

    def stale(folder: Path) -> None:
        shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")

    def climbing(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../secret.safetensors"}}')

    def text(name: str, content: str) -> Callable[[Path], None]:
        def tampered(folder: Path) -> None:
            (folder / name).write_text(content)

        return tampered

    def linked(name: str) -> Callable[[Path], None]:
        def link(folder: Path) -> None:
            (folder.parent / "secret_token").write_text("hf_secret")
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to("../secret_token")

        return link

    def both(folder: Path) -> None:
        (folder / "adapter_config.json").write_text("{}")

    messages: list[tuple[Callable[[Path], None], str]] = [
        (pickled, "pytorch_model.bin: files of that kind can run code when loaded and are never published"),
        (cut, "model.safetensors is not a whole safetensors file"),
        (no_weights, "lacks model.safetensors: save the weights again"),
        (no_auto_map, "has no auto_map"),
        *(
            (text(name, content), message)
            for name, content, message in (
                ("model.safetensors.index.json", '{"weight_map": {"a": ["b"]}}', r"names the shard \['b'\]"),
                ("model.safetensors.index.json", "[]", "is not an index of shards"),
                ("generation_config.json", "[]", r"generation_config\.json holds a list, not an object"),
                ("generation_config.json", DEEP, r"generation_config\.json is not JSON that is read here"),
                ("config.json", DEEP, "holds a config.json that cannot be read"),
                ("config.json", '{"model_type": "sdar_mrp", "auto_map": [1]}', "has no auto_map"),
            )
        ),
        (foreign, "holds a model of type 'llama': give a folder that save_pretrained"),
        (empty, "holds no checkpoint: give a folder"),
        (called_a_head, "says that this is a head, and its weights hold 25 other tensors, such as lm_head.weight"),
        (head_called_full, "holds no backbone, and config.json names none"),
        (stale, "model-00001-of-00002.safetensors, which the model does not use"),
        (climbing, "names the shard '../../secret.safetensors': a shard is a .safetensors file beside"),
        (both, "holds both an adapter and a whole model"),
        *(
            (
                linked(name),
                rf"{name} is a link to .*/secret_token, outside of the folder, and would be published with its content",
            )
            for name in ("vocab.json", "LICENSE", "chat_template.jinja", "tokenizer.json", "README.md", "config.json")
        ),
    ]
    return [pytest.param(*each, id=f"{each[0].__name__}-{number}") for number, each in enumerate(messages)]


def test_links_within_the_folder_and_those_of_the_cache_are_followed(full: Path, tmp_path: Path) -> None:
    """A snapshot of the Hub's cache has nothing but links. What is not published may link where it likes."""
    snapshot, blobs = tmp_path / "models--org--name" / "snapshots" / ("a" * 40), tmp_path / "models--org--name" / "blobs"
    shutil.copytree(full, snapshot)
    blobs.mkdir()
    for path in snapshot.glob("*.*"):
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    (snapshot / "LICENSE").symlink_to("README")
    (snapshot / "README").write_text("free")
    (snapshot / "notes.txt").symlink_to("/etc/hostname")
    (tmp_path / "link").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "link"):
        assert publish(folder, "org/name", dry_run=True).sizes.keys() > {"config.json", "model.safetensors", "LICENSE"}


@pytest.mark.parametrize(("spoil", "message"), broken_folders())
def test_a_folder_that_is_not_fit_is_refused_before_anything_is_sent(
    full: Path, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    folder = shutil.copytree(full, tmp_path / "model")
    spoil(folder)
    before = hashes(folder)
    with pytest.raises(ValueError, match=message):
        publish(folder, "org/name")
    assert hashes(folder) == before


def test_what_is_not_declared_is_left_out(full: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(full, tmp_path / "model")
    others = ["training_args.bin", "optimizer.pt", ".env", "notes.txt", "evil_mrp.py", "checkpoint-5/model.safetensors"]
    for name in others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"secret")
    plan = publish(folder, "org/name", dry_run=True)
    assert plan.left_out == sorted(others)
    assert not set(others) & set(plan.sizes)
    assert plan.sizes["model.safetensors"] == (folder / "model.safetensors").stat().st_size
    assert f"left out: {', '.join(sorted(others))}" in str(plan)


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({}, None),
        ({".gitattributes": b"", "README.md": b""}, None),
        ({"config.json": b'{"model_type": "sdar_mrp"}'}, "full"),
        ({"config.json": b'{"model_type": "sdar_mrp", "base_model_name_or_path": "a/b"}'}, "head"),
        ({"adapter_config.json": b"{}"}, "adapter"),
        ({"config.json": b"[]"}, "a config.json that cannot be read"),
        ({"config.json": b"{"}, "a config.json that cannot be read"),
    ],
)
def test_the_kind_of_a_repository(files: dict[str, bytes], kind: str | None) -> None:
    assert kind_of(set(files), files.__getitem__) == kind
