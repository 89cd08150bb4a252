"""Which folders are fit to be published, and what of them: all of it is known before anything is sent."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import make_model
from helpers import hashes
from mrp_trainer.publish import publish
from mrp_trainer.publish.hub import kind_of
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

DEEP = '{"model_type": "sdar_mrp", "a": ' + "[" * 100_000
WORDS = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w63")))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folder") / "full"
    make_model().save_pretrained(folder)
    WORDS.save_pretrained(folder)
    return folder


def text(name: str, content: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(content)


def fields(file: str = "config.json", **changed: Any) -> Callable[[Path], Any]:
    """Change a JSON file; what is changed to None is left out."""

    def change(folder: Path) -> None:
        there = json.loads((folder / file).read_text()) | changed
        (folder / file).write_text(json.dumps({name: value for name, value in there.items() if value is not None}))

    return change


def weights(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def tamper(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return tamper


def stale(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")


def climbing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../secret.safetensors"}}')


def larger(folder: Path) -> None:
    tokens = Tokenizer(WordLevel({f"w{i}": i for i in range(65)}, unk_token="w63"))
    PreTrainedTokenizerFast(tokenizer_object=tokens).save_pretrained(folder)


def linked(name: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        (folder.parent / "secret_token").write_text("hf_secret")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("../secret_token")

    return link


BROKEN: list[tuple[Callable[[Path], Any], str]] = [
    (text("model.safetensors", "cut"), "model.safetensors is not a whole safetensors file"),
    (lambda folder: (folder / "model.safetensors").unlink(), "lacks model.safetensors: save the weights again"),
    (stale, "model-00001-of-00002.safetensors, which the model does not use"),
    (climbing, "names the shard '../../secret.safetensors': a shard is a .safetensors file beside"),
    (lambda folder: shutil.rmtree(folder) or folder.mkdir(), "holds no checkpoint: give a folder"),
    (text("adapter_config.json", "{}"), "holds both an adapter and a whole model"),
    # the config, and whether it fits the weights
    (text("config.json", '{"model_type": "llama"}'), "holds a model of type 'llama': give a folder that save_pretrained"),
    (text("config.json", DEEP), "holds a config.json that cannot be read"),
    (fields(auto_map=None), "has no auto_map"),
    (fields(hidden_size=-1), "hidden_size is -1: it must be an int of at least 1"),
    (fields(head_dim=16), r"wrong shape: model.layers.0.self_attn.k_norm.weight is \[8\], needs \[16\]"),
    (fields(base_model_name_or_path="org/backbone"), "(?s)does not fit its config.*unexpected: lm_head.weight"),
    (weights(lambda t: t.update(renamed=t.pop("model.norm.weight"))), "(?s)missing: model.norm.weight.*unexpected: renamed"),
    (text("generation_config.json", "[]"), r"generation_config\.json holds a list, not an object"),
    # the tokenizer
    (fields("tokenizer_config.json", auto_map={"AutoTokenizer": ["org/evil--t.T", None]}), "takes code from .*org/evil--t.T"),
    (text("tokenizer.json", ""), "the tokenizer of '.*' cannot be loaded"),
    (text("tokenizer.json", "{}"), "the tokenizer of '.*' cannot be loaded"),
    (text("tokenizer.json", DEEP), "the tokenizer of '.*' cannot be loaded"),
    (larger, "has 65 tokens, and the model 64: publish the model's own tokenizer"),
    *(
        (linked(name), rf"{name} is a link to .*/secret_token, outside of the folder, and would be published with its content")
        for name in ("vocab.json", "README.md", "config.json")
    ),
]


@pytest.mark.parametrize(("spoil", "message"), BROKEN)
def test_a_folder_that_is_not_fit_is_refused_before_anything_is_sent(
    full: Path, tmp_path: Path, spoil: Callable[[Path], Any], message: str
) -> None:
    folder = shutil.copytree(full, tmp_path / "model")
    spoil(folder)
    before = hashes(folder)
    with pytest.raises(ValueError, match=message):
        publish(folder, "org/name")
    assert hashes(folder) == before


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


def test_what_is_not_declared_is_left_out(full: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(full, tmp_path / "model")
    others = [
        "training_args.bin",
        "pytorch_model.bin",
        "optimizer.pt",
        ".env",
        "notes.txt",
        "evil_mrp.py",
        "checkpoint-5/model.safetensors",
    ]
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
        ({".gitattributes": b"", "README.md": b""}, None),
        ({"config.json": b'{"model_type": "sdar_mrp"}'}, "full"),
        ({"config.json": b'{"model_type": "sdar_mrp", "base_model_name_or_path": "a/b"}'}, "head"),
        ({"adapter_config.json": b"{}"}, "adapter"),
        ({"config.json": b"[]"}, "a config.json that cannot be read"),
    ],
)
def test_the_kind_of_a_repository(files: dict[str, bytes], kind: str | None) -> None:
    assert kind_of(set(files), files.__getitem__) == kind
