"""Stable-DiffCoder-8B: transformers' own Llama over the whole text is what it is compared to."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families import (
    Shape,
    assert_decodes,
    assert_drafts_are_lossless,
    assert_has_published_tensors,
    assert_saved_and_loaded,
    assert_trains,
    block_causal,
    loaded,
)
from published import write
from torch import Tensor
from transformers import LlamaForCausalLM

from modeling_mrp import MRPConfig, MRPForCausalLM

# The config of ByteDance-Seed/Stable-DiffCoder-8B-Instruct.
PUBLISHED: dict[str, Any] = {
    "architectures": ["StableDiffcoderForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_stable_diffcoder.StableDiffcoderForCausalLM"},
    "bos_token_id": 0,
    "eos_token_id": 2,
    "head_dim": None,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.009882118,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pad_token_id": 1,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 155136,
}
TWIN = {**PUBLISHED, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TWIN |= {"num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 512, "torch_dtype": "float32"}


def shapes_of(config: dict[str, Any]) -> dict[str, Shape]:
    """The published tensors of a config."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv_heads = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, Shape] = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (config["vocab_size"], hidden))
    shapes["model.norm.weight"] = (hidden,)
    for layer in (f"model.layers.{at}" for at in range(config["num_hidden_layers"])):
        shapes |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (kv_heads, hidden) for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
    return shapes


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("stable_diffcoder") / "twin"
    model, tensors = loaded(folder, TWIN, shapes_of(TWIN), head_layers=2)
    write(folder / "as_llama", {**TWIN, "architectures": ["LlamaForCausalLM"]}, tensors)
    return model, LlamaForCausalLM.from_pretrained(folder / "as_llama", dtype=torch.float64, attn_implementation="sdpa")


def test_undrafted_text_is_that_of_transformers_own_model(twin: Any) -> None:
    model, reference = twin
    assert (model.config.block_size, model.config.mask_token_id) == (4, 5)

    @torch.no_grad()
    def logits(ids: list[int]) -> Tensor:
        scores: Tensor = reference(torch.tensor([ids]), attention_mask=block_causal(len(ids), 4)).logits[0]
        return scores

    assert_decodes(model, logits)


def test_drafts_are_lossless(twin: Any) -> None:
    assert_drafts_are_lossless(twin[0])


def test_it_is_trained_saved_and_loaded_again(tmp_path: Path) -> None:
    model, _ = loaded(tmp_path / "twin", TWIN, shapes_of(TWIN), head_layers=1)
    assert_trains(model, tmp_path / "run")
    assert_saved_and_loaded(model.double(), tmp_path)


def test_the_published_size_has_the_published_tensors() -> None:
    assert round(assert_has_published_tensors(PUBLISHED, shapes_of(PUBLISHED)) / 1e9, 2) == 8.25


def test_another_llama_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "llama", {**TWIN, "architectures": ["LlamaForCausalLM"]}, {})
    with pytest.raises(ValueError, match="model_type is 'llama'"):
        MRPForCausalLM.from_pretrained(folder)
    assert MRPConfig.from_dict(PUBLISHED).head_dim == 128
