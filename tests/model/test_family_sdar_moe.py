"""SDAR-30B-A3B (`sdar_moe`): transformers' own Qwen3-MoE over the whole text is what it is compared to."""

import re
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
    config_of,
    loaded,
    twin_config,
)
from mrp_trainer.heads import new_head
from published import write
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from modeling_mrp import MRPConfig, MRPForCausalLM

TWIN = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
TWIN |= {"mlp_only_layers": [], "norm_topk_prob": True, "output_router_logits": False, "router_aux_loss_coef": 0.001}
TWIN |= {"model_type": "sdar_moe"}

# As on JetLM/SDAR-30B-A3B-Chat; its shape is Qwen3-30B-A3B's.
PUBLISHED = {
    **twin_config(**TWIN),
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_hidden_layers": 48, "head_dim": 128},
    **{"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4},
    **{"vocab_size": 151936, "mask_token_id": 151669, "max_position_embeddings": 32768, "block_size": 4},
    **{"eos_token_id": 151643, "bos_token_id": 151643, "pad_token_id": 151643},
}


def shapes_of(config: dict[str, Any]) -> dict[str, Shape]:
    """The published tensors of a config."""
    hidden, inner, width = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes: dict[str, Shape] = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (config["vocab_size"], hidden))
    shapes["model.norm.weight"] = (hidden,)
    for layer in (f"model.layers.{at}" for at in range(config["num_hidden_layers"])):
        shapes |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.{name}_norm.weight": (width,) for name in "qk"}
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (size, hidden) for name, size in (("q", heads), ("k", kv_heads))}
        shapes |= {f"{layer}.self_attn.v_proj.weight": (kv_heads, hidden), f"{layer}.self_attn.o_proj.weight": (hidden, heads)}
        shapes[f"{layer}.mlp.gate.weight"] = (config["num_experts"], hidden)
        for expert in (f"{layer}.mlp.experts.{at}" for at in range(config["num_experts"])):
            shapes |= {f"{expert}.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
            shapes[f"{expert}.down_proj.weight"] = (hidden, inner)
    return shapes


@pytest.fixture(scope="module", params=[4, 32])
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = twin_config(**TWIN, block_size=request.param)
    folder = tmp_path_factory.mktemp("sdar_moe") / "twin"
    model, tensors = loaded(folder, config, shapes_of(config), head_layers=2)
    write(folder / "as_qwen3", {**config, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}, tensors)
    reference = Qwen3MoeForCausalLM.from_pretrained(
        folder / "as_qwen3", dtype=torch.float64, experts_implementation="eager", attn_implementation="sdpa"
    )
    return model, reference


def test_undrafted_text_is_that_of_transformers_own_model(twin: Any) -> None:
    model, reference = twin
    assert isinstance(reference.config, Qwen3MoeConfig)

    @torch.no_grad()
    def logits(ids: list[int]) -> Tensor:
        mask = block_causal(len(ids), model.config.block_size)
        scores: Tensor = reference(torch.tensor([ids]), attention_mask=mask).logits[0]
        return scores

    assert_decodes(model, logits)


def test_drafts_are_lossless(twin: Any) -> None:
    assert_drafts_are_lossless(twin[0])


def test_it_is_saved_and_loaded_again(twin: Any, tmp_path: Path) -> None:
    model = twin[0]
    assert_saved_and_loaded(model, tmp_path)
    assert config_of(tmp_path / "whole")["num_experts"] == 8
    code = (tmp_path / "whole" / "configuration_mrp.py").read_text()
    assert "class SDARMoeBackbone" in code


def test_a_head_is_trained(tmp_path: Path) -> None:
    config = twin_config(**TWIN)
    model, _ = loaded(tmp_path / "twin", config, shapes_of(config), head_layers=1)
    assert_trains(model, tmp_path / "run")
    assert_saved_and_loaded(model.double(), tmp_path)
    with pytest.raises(ValueError, match="layers are Qwen3MoeDecoderLayers and a head's Qwen3DecoderLayers: use 'identity'"):
        new_head(model, 1, "backbone")


def test_the_published_size_has_the_published_tensors() -> None:
    count = assert_has_published_tensors(PUBLISHED, shapes_of(PUBLISHED))
    assert round(count / 1e9, 1) == 30.5


def test_what_does_not_fit_is_named_as_it_is_published(tmp_path: Path) -> None:
    config = twin_config(**TWIN)
    shapes = shapes_of(config)
    gone = "model.layers.1.mlp.experts.3.up_proj.weight"
    with pytest.raises(ValueError, match=f"missing: {re.escape(gone)}"):
        loaded(tmp_path / "gone", config, {name: shape for name, shape in shapes.items() if name != gone})
    with pytest.raises(ValueError, match=r"experts.3.up_proj.weight is \[16, 31\], needs \[16, 32\]"):
        loaded(tmp_path / "shape", config, {**shapes, gone: (16, 31)})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, num_experts 8"),
        ({"num_experts": "8"}, "num_experts is '8'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1"),
    ],
)
def test_a_config_of_no_model(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MRPConfig.from_dict(twin_config(**{**TWIN, **changed}))


def test_a_config_without_a_block_size_is_of_blocks_of_four() -> None:
    config = twin_config(**TWIN)
    del config["block_size"]
    assert MRPConfig.from_dict(config).block_size == 4
    with pytest.raises(ValueError, match="families here are"):
        MRPConfig(family="qwen9")
    assert MRPForCausalLM.config_class().family == "sdar"
