"""The converter: every layout to every other that can hold it, to the byte, and what it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from mrp_trainer import cli
from mrp_trainer.publish.convert import convert, copy_renamed
from published import backbone_config, backbone_shapes, heavyball_tensors, published_config, random_tensors, write
from safetensors import safe_open
from transformers import GenerationConfig
from typer.testing import CliRunner

from modeling_mrp import MRPForCausalLM

PROMPT = torch.tensor([[5, 17, 80, 3, 44, 9]])


def command(source: Path | str, target: Path) -> Any:
    return CliRunner().invoke(cli.app, ["convert", str(source), str(target)])


def raw_bytes(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Type, shape and bytes of every tensor in a folder, from the files' own headers."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = (entry["dtype"], entry["shape"], data[start + begin : start + end])
    return found


@pytest.mark.parametrize(
    ("layout", "shards", "dtype"),
    [("heavyball", 3, torch.bfloat16), ("heavyball", 1, torch.float32), ("sdar", 2, torch.float32)],
)
def test_round_trip(layout: Any, shards: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """There and back: the same tensors to the byte in the same shards, and the config's fields."""
    kind = {"torch_dtype": str(dtype).removeprefix("torch.")}
    config = published_config(**kind) if layout == "heavyball" else backbone_config(**kind)
    tensors = heavyball_tensors(dtype=dtype) if layout == "heavyball" else random_tensors(backbone_shapes(), dtype=dtype)
    source = write(tmp_path / "theirs", config, tensors, shards)
    (source / "tokenizer.json").write_text('{"kept": true}')
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1], "temperature": 0.7, "do_sample": True}))
    (source / "modeling_sdar.py").write_text("raise SystemExit")
    (source / "training_args.bin").write_bytes(b"a pickle")
    ours = convert(source, tmp_path / "ours")
    back = convert(ours, tmp_path / "back", layout)
    theirs, converted = raw_bytes(source), raw_bytes(ours)
    assert {name.replace("mrp_modules.0.model", "mrp_head"): value for name, value in theirs.items()} == converted
    assert raw_bytes(back) == theirs
    for folder in (ours, back):
        assert (folder / "tokenizer.json").read_text() == '{"kept": true}'
        assert not (folder / "modeling_sdar.py").exists()
        assert not (folder / "training_args.bin").exists()
        assert len(list(folder.glob("*.safetensors"))) == shards
    fields = json.loads((back / "config.json").read_text())
    left_out = {"auto_map", "debug", "transformers_version"}  # their code is not copied, and they did not write this
    assert fields == {name: value for name, value in config.items() if name not in left_out}
    assert json.loads((back / "generation_config.json").read_text())["eos_token_id"] == [2, 1]
    loaded, original = MRPForCausalLM.from_pretrained(ours), MRPForCausalLM.from_pretrained(source)
    assert torch.equal(loaded(PROMPT).logits, original(PROMPT).logits)
    assert loaded.dtype == dtype
    if shards > 1:
        index = json.loads((back / "model.safetensors.index.json").read_text())
        assert index == json.loads((source / "model.safetensors.index.json").read_text())
        for name, shard in json.loads((ours / "model.safetensors.index.json").read_text())["weight_map"].items():
            with safe_open(ours / shard, "pt") as file:
                assert name in file.keys()  # noqa: SIM118


@pytest.mark.parametrize("with_head", [True, False])
def test_ours_to_theirs_and_back(with_head: bool, tmp_path: Path) -> None:
    model = make_model(num_nextn_predict_layers=2 if with_head else 0).float()
    model.generation_config.decoding = "self_spec"
    model.generation_config.eos_token_id = [2, 1]
    model.save_pretrained(tmp_path / "ours", max_shard_size="20KB")
    theirs = convert(tmp_path / "ours", tmp_path / "theirs", "heavyball" if with_head else "sdar")
    assert json.loads((theirs / "config.json").read_text())["model_type"] == "sdar"
    options = json.loads((theirs / "generation_config.json").read_text())
    assert "decoding" not in options
    assert GenerationConfig.from_pretrained(theirs).eos_token_id == [2, 1]
    again = convert(theirs, tmp_path / "again")
    assert raw_bytes(again) == raw_bytes(tmp_path / "ours")
    assert len(list(theirs.glob("*.safetensors"))) > 2
    assert MRPForCausalLM.from_pretrained(again).config.rope_parameters == model.config.rope_parameters


def test_scaled_rotary_embeddings(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
    source = write(tmp_path / "theirs", published_config(rope_scaling=scaling), heavyball_tensors())
    convert(source, tmp_path / "ours")
    fields = json.loads((convert(tmp_path / "ours", tmp_path / "back", "heavyball") / "config.json").read_text())
    assert fields["rope_theta"] == 1e6
    assert scaling.items() <= fields["rope_scaling"].items()


def test_the_bytes_of_types_that_torch_reads_and_of_empty_tensors(tmp_path: Path) -> None:
    """A header of a length that is not a multiple of 8 once renamed."""
    header = {
        "a": {"dtype": "F8_E4M3", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F32", "shape": [0], "data_offsets": [3, 3]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "in").write_bytes(len(text).to_bytes(8, "little") + text + b"\x01\x80\xff")
    copy_renamed(tmp_path / "in", tmp_path / "out.safetensors", lambda name: name + "-renamed")
    assert raw_bytes(tmp_path) == {"a-renamed": ("F8_E4M3", [3], b"\x01\x80\xff"), "b-renamed": ("F32", [0], b"")}
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["a-renamed", "b-renamed"]


# ------------------------------------------------------------------------------------------------ what is refused


def test_layouts_that_cannot_hold_it(tmp_path: Path) -> None:
    heavyball = write(tmp_path / "heavyball", published_config(), heavyball_tensors())
    sdar = write(tmp_path / "sdar", backbone_config(), random_tensors(backbone_shapes()))
    full = make_model()
    full.save_pretrained(tmp_path / "full")
    full.save_pretrained(tmp_path / "head", head_only=True, base_model_name_or_path="org/x")
    for source, layout, message in (
        (heavyball, "heavyball", r"in the layout 'heavyball' already"),
        (sdar, "sdar", r"in the layout 'sdar' already"),
        (tmp_path / "full", "mrp", r"in the layout 'mrp' already"),
        (heavyball, "sdar", r"has a head.*use 'heavyball', or detach_head"),
        (sdar, "heavyball", r"has no head.*use 'sdar', or attach_head"),
        (tmp_path / "head", "heavyball", r"is a head repository.*save it whole"),
        (sdar, "gguf", r"layout is 'gguf': choose one of mrp, sdar, heavyball"),
    ):
        with pytest.raises(ValueError, match=message):
            convert(source, tmp_path / "new", layout)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "head", "heavyball", "sdar"]


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path: Path) -> None:
    source = write(tmp_path / "theirs", published_config(), heavyball_tensors(), 2)
    target = tmp_path / "target"
    target.mkdir()
    (target / "note").write_text("mine")
    with pytest.raises(ValueError, match=r"target is not empty: name a new folder"):
        convert(source, target)
    assert [path.name for path in target.iterdir()] == ["note"]
    broken = Path(shutil.copytree(source, tmp_path / "broken"))
    (broken / "model-00002-of-00002.safetensors").write_bytes(b"\x10")
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        convert(broken, tmp_path / "new")
    lies = write(tmp_path / "lies", published_config(hidden_size=64), heavyball_tensors())
    with pytest.raises(ValueError, match=r"wrong shape: lm_head\.weight"):
        convert(lies, tmp_path / "new")
    unreadable = Path(shutil.copytree(source, tmp_path / "unreadable"))
    (unreadable / "vocab.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"vocab\.json is a link to .*/secret, outside of the folder"):
        convert(unreadable, tmp_path / "new")
    (unreadable / "vocab.json").unlink()
    (unreadable / "vocab.json").symlink_to("nowhere")  # fails once the shards are written
    with pytest.raises(FileNotFoundError):
        convert(unreadable, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "lies", "target", "theirs", "unreadable"]


@pytest.mark.parametrize(
    ("source", "message"), [("./nowhere", "check the path"), ("org/misspelt", "could not be read"), (".", "has no config")]
)
def test_a_source_that_is_none(source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = command(source, tmp_path / "new")
    assert done.exit_code == 1
    assert source in done.stderr
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []
