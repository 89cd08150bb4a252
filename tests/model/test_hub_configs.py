"""The folders of the published shapes: they load as they lie, and have the published dimensions to the last parameter."""

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, TINY
from mrp_trainer.publish.folder import read_folder
from transformers import GenerationConfig

from modeling_mrp import MRPConfig, MRPForCausalLM, MRPGenerationConfig
from modeling_mrp.model.saving import code_files

VOCAB = 151936
HEAD_DIM = 128
KV_WIDTH = 8 * HEAD_DIM
HEAD_LAYERS = 3


@dataclass(frozen=True)
class Shape:
    """The dimensions in which the published models differ."""

    hidden: int
    intermediate: int
    layers: int
    heads: int

    @property
    def width(self) -> int:
        return self.heads * HEAD_DIM

    def layer_shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        return {
            f"{prefix}.self_attn.q_proj.weight": (self.width, self.hidden),
            f"{prefix}.self_attn.k_proj.weight": (KV_WIDTH, self.hidden),
            f"{prefix}.self_attn.v_proj.weight": (KV_WIDTH, self.hidden),
            f"{prefix}.self_attn.o_proj.weight": (self.hidden, self.width),
            f"{prefix}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{prefix}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{prefix}.mlp.gate_proj.weight": (self.intermediate, self.hidden),
            f"{prefix}.mlp.up_proj.weight": (self.intermediate, self.hidden),
            f"{prefix}.mlp.down_proj.weight": (self.hidden, self.intermediate),
            f"{prefix}.input_layernorm.weight": (self.hidden,),
            f"{prefix}.post_attention_layernorm.weight": (self.hidden,),
        }

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (VOCAB, self.hidden),
            "model.norm.weight": (self.hidden,),
            "lm_head.weight": (VOCAB, self.hidden),
            "mrp_head.enorm.weight": (self.hidden,),
            "mrp_head.hnorm.weight": (self.hidden,),
            "mrp_head.eh_proj.weight": (self.hidden, 2 * self.hidden),
            "mrp_head.norm.weight": (self.hidden,),
        }
        for index in range(self.layers):
            shapes |= self.layer_shapes(f"model.layers.{index}")
        for index in range(HEAD_LAYERS):
            shapes |= self.layer_shapes(f"mrp_head.layers.{index}")
        return shapes


SHAPES = {
    "1.7b": Shape(hidden=2048, intermediate=6144, layers=28, heads=16),
    "4b": Shape(hidden=2560, intermediate=9728, layers=36, heads=32),
    "8b": Shape(hidden=4096, intermediate=12288, layers=36, heads=32),
}
each_size = pytest.mark.parametrize("size", SHAPES)


def folder_of(size: str) -> Path:
    return ROOT / "hub_configs" / f"sdar-{size}-mrp"


@cache
def config_of(size: str) -> Any:
    return MRPConfig.from_pretrained(folder_of(size))


@cache
def meta_model(size: str) -> torch.nn.Module:
    with torch.device("meta"):
        return MRPForCausalLM(config_of(size)).to(config_of(size).dtype)


@each_size
def test_config_has_the_published_values(size: str) -> None:
    config, shape = config_of(size), SHAPES[size]
    published = {
        "model_type": "sdar_mrp",
        "architectures": ["MRPForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": 8,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * shape.layers,
        "block_size": 16,
        "mask_token_id": 151669,
        "num_nextn_predict_layers": HEAD_LAYERS,
        "num_mrp_heads": 1,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "pad_token_id": 151643,
        "dtype": torch.bfloat16,
    }
    assert {name: getattr(config, name) for name in published} == published


@each_size
def test_a_folder_without_weights_holds_no_code(size: str) -> None:
    """Nor does its config name any: the installed package reads it."""
    names = {path.relative_to(folder_of(size)).as_posix() for path in folder_of(size).rglob("*")}
    assert names == {"README.md", "config.json", "generation_config.json"}
    assert "auto_map" not in json.loads((folder_of(size) / "config.json").read_text())


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


@each_size
def test_parameter_names_and_shapes(size: str) -> None:
    model = meta_model(size)
    expected = SHAPES[size].parameter_shapes()
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == expected
    assert set(model.state_dict()) == set(expected)  # no buffer is saved beside them
    assert {(parameter.device.type, parameter.dtype) for parameter in model.parameters()} == {("meta", torch.bfloat16)}


@each_size
def test_generation_config_decodes_with_the_head(size: str) -> None:
    loaded = GenerationConfig.from_pretrained(folder_of(size))
    config = MRPGenerationConfig.from_dict(loaded.to_dict())
    config.check(16, True)
    expected = {
        "decoding": "mrp_spec",
        "target": "dynamic",
        "num_draft_states": "auto",
        "do_sample": False,
        "eos_token_id": [151645, 151643],
        "bos_token_id": 151643,
        "pad_token_id": 151643,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    with pytest.raises(ValueError, match="needs an MRP head"):
        config.check(16, False)
