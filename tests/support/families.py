"""Tiny twins of the published families, with tensors under their published names, and a reference
of each twin's logits: code written anew, or transformers' own class for such layers, over the whole
text under a dense block-causal mask."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mrp_trainer.heads import new_head
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3MoeForCausalLM

from modeling_mrp import MRPForCausalLM
from tests.support.published import (
    Shapes,
    attended,
    backbone_config,
    norm,
    random_tensors,
    rotate,
    swiglu,
    write,
)

Logits = Callable[[list[int]], Tensor]
# The fields that the published configs share, with small sizes; each family's config changes some.
COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
}
COMMON |= {
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 101,
}
COMMON |= {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
COMMON |= {"num_key_value_heads": 2, "max_position_embeddings": 512}


@dataclass(frozen=True)
class Family:
    """A family of block-diffusion models.

    Attributes:
        twin: The config of a tiny model, with the published fields.
        made: Writes a twin with random weights, in shards, under a config; returns a function from
            ids to the twin's logits.
        block_field: The config's field for the block size; None if the config has none.
    """

    twin: dict[str, Any]
    made: Callable[[Path, dict[str, Any]], Logits]
    block_field: str | None = "block_size"


def block_causal(length: int, block: int) -> Tensor:
    """Make the block-causal attention mask [1, 1, length, length] bool."""
    of = torch.arange(length) // block
    return (of <= of[:, None])[None, None]


def stock(
    kind: Any, block: str | int, shifted: bool = False
) -> Callable[[Path, dict[str, Any]], Logits]:
    """Make `Family.made` from a class of transformers; if `shifted`, a position has the logits of
    the position before."""

    def made(folder: Path, config: dict[str, Any]) -> Logits:
        torch.manual_seed(0)
        model = kind(
            kind.config_class.from_dict({**config, "model_type": kind.config_class.model_type})
        ).eval()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.25)
        model.save_pretrained(folder, max_shard_size="50KB")
        (folder / "config.json").write_text(json.dumps(config))
        model.double()
        if "num_experts" in config:
            model.set_experts_implementation("eager")

        @torch.no_grad()
        def logits(ids: list[int]) -> Tensor:
            mask = block_causal(len(ids), block if isinstance(block, int) else config[block])
            scores: Tensor = model(torch.tensor([ids]), attention_mask=mask).logits[0]
            return torch.cat([torch.zeros_like(scores[:1]), scores[:-1]]) if shifted else scores

        return logits

    return made


# -------------------------------------------------------------------------------------------------
# LLaDA2.0 written anew


def mlp_shapes(name: str, hidden: int, inner: int) -> Shapes:
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {f"{name}.{part}_proj.weight": shape for part, shape in shapes.items()}


def llada2_shapes(config: dict[str, Any]) -> Shapes:
    hidden, width, experts = config["hidden_size"], config["head_dim"], config["num_experts"]
    heads, kv_heads = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes: Shapes = dict.fromkeys(
        ("model.word_embeddings.weight", "lm_head.weight"), (config["vocab_size"], hidden)
    )
    shapes["model.norm.weight"] = (hidden,)
    for at in range(config["num_hidden_layers"]):
        layer = f"model.layers.{at}"
        shapes |= {
            f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")
        }
        shapes |= {
            f"{layer}.attention.{name}_layernorm.weight": (width,) for name in ("query", "key")
        }
        shapes[f"{layer}.attention.query_key_value.weight"] = (heads + 2 * kv_heads, hidden)
        shapes[f"{layer}.attention.dense.weight"] = (hidden, heads)
        if at < config["first_k_dense_replace"]:
            shapes |= mlp_shapes(f"{layer}.mlp", hidden, config["intermediate_size"])
            continue
        shapes |= {
            f"{layer}.mlp.gate.weight": (experts, hidden),
            f"{layer}.mlp.gate.expert_bias": (experts,),
        }
        inner = config["moe_intermediate_size"]
        shapes |= mlp_shapes(
            f"{layer}.mlp.shared_experts", hidden, config["num_shared_experts"] * inner
        )
        for expert in range(experts):
            shapes |= mlp_shapes(f"{layer}.mlp.experts.{expert}", hidden, inner)
    return shapes


def experts_of(config: dict[str, Any], tensors: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Mix for each token the best experts in the best groups; a group's score is the sum of its two
    best corrected scores."""
    out = []
    for token in x:
        scores = (tensors[f"{name}.gate.weight"] @ token).sigmoid()
        corrected = scores + tensors[f"{name}.gate.expert_bias"]
        groups = corrected.view(config["n_group"], -1)
        best = sorted(range(len(groups)), key=lambda g: -groups[g].sort().values[-2:].sum().item())[
            : config["topk_group"]
        ]
        there = [e for e in range(len(scores)) if e // groups.shape[1] in best]
        chosen = sorted(there, key=lambda e: -corrected[e].item())[: config["num_experts_per_tok"]]
        total = sum(scores[e] for e in chosen)
        routed = sum(
            scores[e] / total * swiglu(tensors, f"{name}.experts.{e}", token) for e in chosen
        )
        out.append(
            config["routed_scaling_factor"] * routed
            + swiglu(tensors, f"{name}.shared_experts", token)
        )
    return torch.stack(out)


def llada2(folder: Path, config: dict[str, Any]) -> Logits:
    heads, kv_heads, width = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    stored = random_tensors(llada2_shapes(config))
    write(folder, config, stored, shards=2)
    tensors = {name: tensor.double() for name, tensor in stored.items()}

    def logits(ids: list[int]) -> Tensor:
        x = tensors["model.word_embeddings.weight"][ids]
        for at in range(config["num_hidden_layers"]):
            layer = f"model.layers.{at}"
            normed = norm(x, tensors[f"{layer}.input_layernorm.weight"])
            fused = (normed @ tensors[f"{layer}.attention.query_key_value.weight"].T).unflatten(
                1, (-1, width)
            )
            query, key, value = fused.split([heads, kv_heads, kv_heads], 1)
            query, key = (
                rotate(
                    norm(part, tensors[f"{layer}.attention.{name}_layernorm.weight"]),
                    config["rotary_dim"],
                    600000,
                )
                for name, part in (("query", query), ("key", key))
            )
            x = (
                x
                + attended(query, key, value, config["block_size"])
                @ tensors[f"{layer}.attention.dense.weight"].T
            )
            normed = norm(x, tensors[f"{layer}.post_attention_layernorm.weight"])
            dense = at < config["first_k_dense_replace"]
            x = x + (
                swiglu(tensors, f"{layer}.mlp", normed)
                if dense
                else experts_of(config, tensors, f"{layer}.mlp", normed)
            )
        return norm(x, tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T

    return logits


# -------------------------------------------------------------------------------------------------
# the table

# JetLM/SDAR-30B-A3B-Chat; its shape is Qwen3-30B-A3B's.
SDAR_MOE = {
    **backbone_config(),
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
SDAR_MOE |= {
    "model_type": "sdar_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "output_router_logits": False,
}
SDAR_MOE["router_aux_loss_coef"] = 0.001

# inclusionAI/LLaDA2.0-mini. The mask's id is not in the published config.
LLADA2 = {
    **COMMON,
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "first_k_dense_replace": 1,
    "head_dim": 8,
}
LLADA2 |= {
    "num_hidden_layers": 3,
    "moe_intermediate_size": 16,
    "moe_router_enable_expert_bias": True,
    "norm_topk_prob": True,
}
LLADA2 |= {
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "num_shared_experts": 1,
}
LLADA2 |= {
    "num_nextn_predict_layers": 0,
    "partial_rotary_factor": 0.5,
    "rope_theta": 600000,
    "rotary_dim": 4,
}
LLADA2 |= {
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "sliding_window": 4096,
    "use_sliding_window": False,
}
LLADA2 |= {
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "router_dtype": "fp32",
    "norm_head": False,
}
LLADA2 |= {"mask_token_id": 97, "pad_token_id": 1, "eos_token_id": 1}

# Efficient-Large-Model/Fast_dLLM_v2_7B.
FAST = {
    **COMMON,
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "model_type": "Fast_dLLM_Qwen",
    "bd_size": 32,
}
FAST |= {
    "layer_types": ["full_attention"] * 2,
    "max_window_layers": 28,
    "sliding_window": None,
    "use_sliding_window": False,
}
FAST |= {"rope_theta": 1000000.0, "mask_token_id": 97, "eos_token_id": 1, "bos_token_id": 1}

# ByteDance-Seed/Stable-DiffCoder-8B-Instruct.
DIFFCODER = {
    **COMMON,
    "architectures": ["StableDiffcoderForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
}
DIFFCODER |= {
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "head_dim": None,
    "rope_theta": 500000.0,
}

FAMILIES: dict[str, Family] = {
    "sdar_moe": Family(SDAR_MOE, stock(Qwen3MoeForCausalLM, "block_size")),
    "llada2_moe": Family(LLADA2, llada2),
    "fast_dllm_v2": Family(FAST, stock(Qwen2ForCausalLM, "bd_size", shifted=True), "bd_size"),
    "stable_diffcoder": Family(DIFFCODER, stock(LlamaForCausalLM, 4), None),
    # Of docs/own_backbone.md: a Llama made block-causal.
    "my_llama": Family(
        {**DIFFCODER, "architectures": ["LlamaForCausalLM"], "head_dim": 8},
        stock(LlamaForCausalLM, 8),
        None,
    ),
}


@dataclass(frozen=True)
class Twin:
    """A tiny model in float64 with random weights and a random head, and its reference logits."""

    name: str
    model: Any
    logits: Logits


def twin_of(name: str, block: int | None, folder: Path, head_layers: int = 2) -> Twin:
    """Write a twin of a family to the folder's `twin`, and load it; `block` is its block size if
    its config has that field."""
    family = FAMILIES[name]
    logits = family.made(
        folder / "twin",
        {**family.twin, **({} if family.block_field is None else {family.block_field: block})},
    )
    model: Any = MRPForCausalLM.from_pretrained(folder / "twin", dtype=torch.float64).eval()
    if head_layers:
        torch.manual_seed(0)
        head = new_head(model, head_layers, "published")
        with torch.no_grad():
            head.norm.weight.fill_(0.05)
        model.attach_head(head)
    return Twin(name, model, logits)
