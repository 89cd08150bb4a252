"""LLaDA2.0 (`llada2_moe`): compared to its layers written anew from their description, on tensors by published names."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
from fresh import Fresh
from mrp_trainer.publish.card import render_card
from published import random_tensors, write
from torch import Tensor

from modeling_mrp import MRPConfig, MRPForCausalLM

# The config of inclusionAI/LLaDA2.0-mini; -flash differs in sizes.
MINI: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig"},
    "dtype": "bfloat16",
    "embedding_dropout": 0.0,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "llada2_moe",
    "moe_intermediate_size": 512,
    "moe_router_enable_expert_bias": True,
    "n_group": 8,
    "norm_head": False,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 20,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "output_dropout": 0.0,
    "output_router_logits": False,
    "pad_token_id": 156892,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 600000,
    "rotary_dim": 64,
    "routed_scaling_factor": 2.5,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "use_bias": False,
    "use_cache": True,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "use_sliding_window": False,
    "vocab_size": 157184,
}
FLASH = {**MINI, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 9216, "moe_intermediate_size": 1024}
FLASH |= {"num_attention_heads": 32}

TWIN = {**MINI, "dtype": "float32", "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 8}
TWIN |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "num_experts": 16, "vocab_size": 101}
TWIN |= {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "max_position_embeddings": 512, "pad_token_id": 1}
TWIN |= {"eos_token_id": 1, "mask_token_id": 97, "rotary_dim": 4}  # the mask's id is not in the published config


def shapes_of(config: dict[str, Any]) -> dict[str, Shape]:
    """The published tensors of a config."""
    hidden, width, experts = config["hidden_size"], config["head_dim"], config["num_experts"]
    heads, kv_heads = config["num_attention_heads"] * width, config["num_key_value_heads"] * width

    def mlp(name: str, inner: int) -> dict[str, Shape]:
        return {
            f"{name}.gate_proj.weight": (inner, hidden),
            f"{name}.up_proj.weight": (inner, hidden),
            f"{name}.down_proj.weight": (hidden, inner),
        }

    shapes: dict[str, Shape] = {
        "model.word_embeddings.weight": (config["vocab_size"], hidden),
        "lm_head.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for at in range(config["num_hidden_layers"]):
        layer = f"model.layers.{at}"
        shapes |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}.attention.{name}_layernorm.weight": (width,) for name in ("query", "key")}
        shapes[f"{layer}.attention.query_key_value.weight"] = (heads + 2 * kv_heads, hidden)
        shapes[f"{layer}.attention.dense.weight"] = (hidden, heads)
        if at < config["first_k_dense_replace"]:
            shapes |= mlp(f"{layer}.mlp", config["intermediate_size"])
            continue
        shapes |= {f"{layer}.mlp.gate.weight": (experts, hidden), f"{layer}.mlp.gate.expert_bias": (experts,)}
        shapes |= mlp(f"{layer}.mlp.shared_experts", config["num_shared_experts"] * config["moe_intermediate_size"])
        for expert in range(experts):
            shapes |= mlp(f"{layer}.mlp.experts.{expert}", config["moe_intermediate_size"])
    return shapes


# ------------------------------------------------------------------------------------------------- written anew


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + MINI["rms_norm_eps"]).sqrt()


def rotate(x: Tensor, turned: int) -> Tensor:
    """Rotation of x [positions, heads, width]: of its first `turned` dimensions the pairs (i, i + turned / 2)."""
    angle = torch.arange(len(x))[:, None] * MINI["rope_theta"] ** (-torch.arange(0, turned, 2, dtype=torch.float64) / turned)
    first, second, rest = x.split([turned // 2, turned // 2, x.shape[-1] - turned], -1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def swiglu(tensors: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    gated = F.silu(x @ tensors[f"{name}.gate_proj.weight"].T) * (x @ tensors[f"{name}.up_proj.weight"].T)
    return gated @ tensors[f"{name}.down_proj.weight"].T


def experts(tensors: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Token by token: of the two best groups, by the sum of their two best corrected scores, the three best experts."""
    out = []
    for token in x:
        scores = (tensors[f"{name}.gate.weight"] @ token).sigmoid()
        corrected = scores + tensors[f"{name}.gate.expert_bias"]
        groups = corrected.view(TWIN["n_group"], -1)
        best = sorted(range(len(groups)), key=lambda g: -groups[g].sort().values[-2:].sum().item())[: TWIN["topk_group"]]
        there = [e for e in range(len(scores)) if e // groups.shape[1] in best]
        chosen = sorted(there, key=lambda e: -corrected[e].item())[: TWIN["num_experts_per_tok"]]
        total = sum(scores[e] for e in chosen)
        routed = sum(scores[e] / total * swiglu(tensors, f"{name}.experts.{e}", token) for e in chosen)
        out.append(TWIN["routed_scaling_factor"] * routed + swiglu(tensors, f"{name}.shared_experts", token))
    return torch.stack(out)


def logits_of(tensors: dict[str, Tensor], ids: list[int], block: int) -> Tensor:
    heads, kv_heads, width = TWIN["num_attention_heads"], TWIN["num_key_value_heads"], TWIN["head_dim"]
    sees = block_causal(len(ids), block)[0, 0]
    x = tensors["model.word_embeddings.weight"][ids]
    for at in range(TWIN["num_hidden_layers"]):
        layer = f"model.layers.{at}"
        normed = norm(x, tensors[f"{layer}.input_layernorm.weight"])
        fused = (normed @ tensors[f"{layer}.attention.query_key_value.weight"].T).unflatten(1, (-1, width))
        query, key, value = fused.split([heads, kv_heads, kv_heads], 1)
        query = rotate(norm(query, tensors[f"{layer}.attention.query_layernorm.weight"]), TWIN["rotary_dim"])
        key = rotate(norm(key, tensors[f"{layer}.attention.key_layernorm.weight"]), TWIN["rotary_dim"])
        key, value = (part.repeat_interleave(heads // kv_heads, 1) for part in (key, value))
        scores = torch.einsum("qhw,khw->hqk", query, key) / width**0.5
        mixed = torch.einsum("hqk,khw->qhw", scores.masked_fill(~sees, -torch.inf).softmax(-1), value).flatten(1)
        x = x + mixed @ tensors[f"{layer}.attention.dense.weight"].T
        normed = norm(x, tensors[f"{layer}.post_attention_layernorm.weight"])
        x = x + (swiglu if at < TWIN["first_k_dense_replace"] else experts)(tensors, f"{layer}.mlp", normed)
    return norm(x, tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T


@pytest.fixture(scope="module", params=[4, 32])
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = twin_config(**TWIN, block_size=request.param) if request.param == 4 else dict(TWIN)
    return loaded(tmp_path_factory.mktemp("llada2") / "twin", config, shapes_of(config), head_layers=2)


def test_undrafted_text_is_that_of_the_layers_written_anew(twin: Any) -> None:
    model, tensors = twin
    assert model.config.block_size in (4, 32)
    assert_decodes(model, lambda ids: logits_of(tensors, ids, model.config.block_size), 10)


def test_hidden_states_are_close(twin: Any) -> None:
    """transformers' norms, rotation and router are of float32."""
    model, tensors = twin
    ids = torch.randint(0, 90, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        logits = model(torch.tensor([[*ids, 97]])).logits[0]
    torch.testing.assert_close(logits, logits_of(tensors, [*ids, 97], model.config.block_size), rtol=0, atol=1e-4)


def test_drafts_are_lossless(twin: Any) -> None:
    assert_drafts_are_lossless(twin[0])


def test_it_is_saved_and_loaded_again(twin: Any, tmp_path: Path) -> None:
    assert_saved_and_loaded(twin[0], tmp_path)
    saved = config_of(tmp_path / "whole")
    assert (saved["family"], saved["n_group"], saved["rope_parameters"]["partial_rotary_factor"]) == ("llada2_moe", 4, 0.5)
    assert "class SplitHeads" in (tmp_path / "whole" / "configuration_mrp.py").read_text()


def test_it_loads_as_remote_code(fresh: Fresh, tmp_path: Path) -> None:
    """From a process without this package: the whole model, and its head, which loads the published checkpoint."""
    config = {**TWIN, "block_size": 4}
    model, _ = loaded(tmp_path / "twin", config, shapes_of(config), head_layers=1)
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "head", head_only=True)
    options = {"decoding": "mrp_spec", "target": "static", "max_new_tokens": 9}
    text = model.generate(torch.tensor([[15, 17, 8]]), **options).tolist()
    script = f"""
    from transformers import AutoModel
    for name in ("whole", "head"):
        model = AutoModel.from_pretrained("{tmp_path}/" + name, trust_remote_code=True, dtype=torch.float64)
        print(model.config.family, model.generate(torch.tensor([[15, 17, 8]]), **{options}).tolist())
    """
    assert fresh(script) == f"llada2_moe {text}\n" * 2


def test_its_card_names_it(twin: Any, tmp_path: Path) -> None:
    twin[0].save_pretrained(tmp_path)
    card = render_card(tmp_path, "full", "org/name")
    assert "A LLaDA2.0 block-diffusion language model with an MRP head." in card.text
    assert "LLaDA2.0: [arXiv 2512.15745]" in card.text
    assert "SDAR" not in card.text
    assert "llada2_moe" in card.data.tags


def test_a_head_is_trained(tmp_path: Path) -> None:
    config = {**TWIN, "block_size": 4}
    model, _ = loaded(tmp_path / "twin", config, shapes_of(config), head_layers=1)
    assert_trains(model, tmp_path / "run")
    assert_saved_and_loaded(model.double(), tmp_path)


@pytest.mark.parametrize(("config", "billions"), [(MINI, 16.3), (FLASH, 102.9)])
def test_the_published_sizes_have_the_published_tensors(config: dict[str, Any], billions: float) -> None:
    count = assert_has_published_tensors(config, shapes_of(config))
    assert round(count / 1e9, 1) == billions
    ours = MRPConfig.from_dict(config)
    assert (ours.block_size, ours.mask_token_id, ours.eos_token_id) == (32, 156895, 156892)
    assert ours.rope_parameters == {"rope_type": "default", "rope_theta": 600000, "partial_rotary_factor": 0.5}


def test_the_bias_of_the_router_stays_in_float32(tmp_path: Path) -> None:
    folder = write(tmp_path / "twin", TWIN, random_tensors(shapes_of(TWIN)))
    model = MRPForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"use_qkv_bias": True}, "the config has {'use_qkv_bias': True}"),
        ({"score_function": "softmax"}, "the config has {'score_function': 'softmax'}"),
        ({"n_group": 5}, "n_group is 5"),
        ({"topk_group": 5}, "topk_group 5"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({"num_shared_experts": 0}, "n_shared_experts 0"),
    ],
)
def test_a_config_of_no_model(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MRPConfig.from_dict({**TWIN, **changed})


@pytest.mark.parametrize(("name", "told"), [("LLaDA2.0-mini", False), ("LLaDA2.1-mini", True), ("LLaDA2.2-flash", True)])
def test_a_version_that_edits_says_that_it_does_not(
    name: str, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / name, TWIN, random_tensors(shapes_of(TWIN)))
    with caplog.at_level(logging.WARNING):
        MRPForCausalLM.from_pretrained(folder)
    assert ("with editing off" in caplog.text) == told
