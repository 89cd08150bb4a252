"""The folders of the published shapes: they load as they lie, and have the published dimensions to the last parameter."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, TINY
from mrp_trainer.publish.folder import read_folder
from published import HEAD, Shapes, decoder_shapes
from transformers import GenerationConfig

from modeling_mrp import MRPConfig, MRPForCausalLM, MRPGenerationConfig
from modeling_mrp.model.code import code_files
from modeling_mrp.model.layouts import our_name

# The dimensions in which the published models differ, and those that they share.
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES = {"1.7b": (2048, 6144, 28, 16), "4b": (2560, 9728, 36, 32), "8b": (4096, 12288, 36, 32)}
SHARED: dict[str, Any] = {"model_type": "sdar_mrp", "architectures": ["MRPForCausalLM"], "vocab_size": 151936}
SHARED |= {"num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu", "attention_bias": False, "rms_norm_eps": 1e-6}
SHARED |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}, "max_position_embeddings": 32768}
SHARED |= {"tie_word_embeddings": False, "block_size": 16, "mask_token_id": 151669, "num_nextn_predict_layers": 3}
SHARED |= {"bos_token_id": 151643, "eos_token_id": 151643, "pad_token_id": 151643}


def folder_of(size: str) -> Path:
    return ROOT / "hub_configs" / f"sdar-{size}-mrp"


def published(size: str) -> dict[str, Any]:
    """The config of a published model."""
    return {**SHARED, **dict(zip(NAMES, SIZES[size], strict=True))}


def parameters(size: str) -> Shapes:
    """The parameters of a published model, by our names."""
    config = published(size)
    hidden, shapes = config["hidden_size"], decoder_shapes(config, norms=True)
    layers = decoder_shapes({**config, "num_hidden_layers": 3}, norms=True)
    shapes |= {name.replace("model.", "mrp_head."): shape for name, shape in layers.items() if ".layers." in name}
    shapes |= {f"mrp_head.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "norm")}
    return {**shapes, "mrp_head.eh_proj.weight": (hidden, 2 * hidden)}


@pytest.mark.parametrize("size", SIZES)
def test_a_folder_is_that_of_the_published_model(size: str) -> None:
    """Its config's values; names and shapes of parameters, also in the published layout, whose names are mapped to ours; and
    how it decodes. A folder without weights holds no code, nor does its config name any: the installed package reads it."""
    config, expected = MRPConfig.from_pretrained(folder_of(size)), published(size)
    expected |= {"layer_types": ["full_attention"] * expected["num_hidden_layers"], "dtype": torch.bfloat16}
    assert {name: getattr(config, name) for name in expected} == expected
    names = {path.relative_to(folder_of(size)).as_posix() for path in folder_of(size).rglob("*")}
    assert names == {"README.md", "config.json", "generation_config.json"}
    assert "auto_map" not in json.loads((folder_of(size) / "config.json").read_text())
    with torch.device("meta"):
        model = MRPForCausalLM(config).to(torch.bfloat16)
    ours = parameters(size)
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == ours
    assert set(model.state_dict()) == set(ours)  # no buffer is saved beside them
    theirs = {name.replace("mrp_head.", f"{HEAD}."): shape for name, shape in ours.items()}
    assert {our_name(name): shape for name, shape in theirs.items()} == ours
    options = MRPGenerationConfig.from_dict(GenerationConfig.from_pretrained(folder_of(size)).to_dict())
    options.check(16, True)
    expected = {"decoding": "mrp_spec", "target": "dynamic", "num_draft_states": "auto", "do_sample": False}
    expected |= {"eos_token_id": [151645, 151643], "bos_token_id": 151643, "pad_token_id": 151643}
    assert {name: getattr(options, name) for name in expected} == expected


def test_the_embedded_checkpoint_holds_what_its_repository_would() -> None:
    """Its code to the letter as the exporter generates it, in three files at most, and nothing that a push would leave out."""
    found = read_folder(TINY)
    code = {name: (TINY / name).read_text(encoding="utf-8") for name in found.code}
    assert code == code_files(), "the package was changed: run python -m modeling_mrp.bundle hub_configs/sdar-tiny-mrp"
    assert len(found.code) <= 3
    assert found.left_out == []


def test_the_project_has_no_symbolic_links() -> None:
    """A checkout on a file system without them loads all the same."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in ("build", "runs")]
        links = [name for name in (*folders, *names) if (Path(folder) / name).is_symlink()]
        assert not links, f"{folder}: {links}"
