"""Small checkpoints in the published layouts with random weights, and references of outputs,
written from method.md alone.

Nothing here uses the package: tensors are looked up by their published names.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, WIDTH = 32, 48, 2, 4, 2, 8
VOCAB, BLOCK, MASK, EPS, THETA = 101, 4, 97, 1e-6, 1e6
HEAD_LAYERS = 2
HEAD = "mrp_modules.0.model"
Shapes = dict[str, tuple[int, ...]]


def published_config(**changes: Any) -> dict[str, Any]:
    """Make the config of a published checkpoint with a head, as transformers 4.52 wrote it, at a
    small size."""
    return {
        "architectures": ["SDARMRPForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_sdar.SDARConfig",
            "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
        },
        "block_size": BLOCK,
        "bos_token_id": 1,
        "debug": False,
        "eos_token_id": 1,
        "fuse_cross_entropy": True,
        "head_dim": WIDTH,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "mask_token_id": MASK,
        "max_position_embeddings": 512,
        "max_window_layers": LAYERS,
        "model_type": "sdar",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "num_mrp_heads": 1,
        "num_nextn_predict_layers": HEAD_LAYERS,
        "pad_token_id": 1,
        "rms_norm_eps": EPS,
        "rope_scaling": None,
        "rope_theta": THETA,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.52.4",
        "use_sliding_window": False,
        "vocab_size": VOCAB,
        **changes,
    }


def backbone_config(**changes: Any) -> dict[str, Any]:
    """Make the same config in the SDAR layout, which has no head."""
    config = published_config(architectures=["SDARForCausalLM"], **changes)
    return {
        name: value
        for name, value in config.items()
        if name not in ("num_mrp_heads", "num_nextn_predict_layers")
    }


def backbone_shapes(layers: int = LAYERS) -> Shapes:
    """Return the shapes of transformers' Qwen3 tensors, whose names the published layouts use."""
    config = Qwen3Config.from_dict(backbone_config(model_type="qwen3", num_hidden_layers=layers))
    with torch.device("meta"):
        tensors = Qwen3ForCausalLM(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def head_shapes() -> Shapes:
    shapes: Shapes = {f"{HEAD}.{norm}.weight": (HIDDEN,) for norm in ("enorm", "hnorm", "norm")}
    shapes |= {
        name.replace("model", HEAD): shape
        for name, shape in backbone_shapes(HEAD_LAYERS).items()
        if ".layers." in name
    }
    return {**shapes, f"{HEAD}.eh_proj.weight": (HIDDEN, 2 * HIDDEN)}


def random_tensors(
    shapes: Shapes, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Draw weights, so that no two tensors have equal values; weights of norms are around one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = 0.25 * torch.randn(shape, generator=generator)
        tensors[name] = (noise + 1 if len(shape) == 1 else noise).to(dtype)
    return tensors


def heavyball_tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return random_tensors(backbone_shapes() | head_shapes(), seed, dtype)


def write(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], shards: int = 1
) -> Path:
    """Write a checkpoint of at least `shards` files of weights; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    size = sum(tensor.nbytes for tensor in tensors.values())
    save_torch_state_dict(tensors, folder, max_shard_size=size // shards + 1)
    return folder


def as_published(source: Path, folder: Path) -> Path:
    """Rewrite a single-file checkpoint of this package, and its tokenizer, in the published layout;
    return the new folder."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copyfile(path, folder / path.name)
    tensors = load_file(source / "model.safetensors")
    save_file(
        {name.replace("mrp_head.", f"{HEAD}."): tensor for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    fields = json.loads((source / "config.json").read_text())
    name = "SDARMRPForCausalLM" if fields["num_nextn_predict_layers"] else "SDARForCausalLM"
    fields |= {
        "model_type": "sdar",
        "architectures": [name],
        "rope_theta": fields.pop("rope_parameters")["rope_theta"],
    }
    left_out = (
        {"auto_map"}
        if fields["num_nextn_predict_layers"]
        else {"auto_map", "num_nextn_predict_layers", "num_mrp_heads"}
    )
    kept = {name: value for name, value in fields.items() if name not in left_out}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


# ------------------------------------------------------------------------------------------------
# what they compute


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def rotate(x: Tensor, turned: int, theta: float) -> Tensor:
    """Rotate x [positions, heads, width] in the pairs (i, i + turned / 2) of its first `turned`
    dimensions."""
    angle = torch.arange(len(x))[:, None] * theta ** (
        -torch.arange(0, turned, 2, dtype=torch.float64) / turned
    )
    first, second, rest = x.split([turned // 2, turned // 2, x.shape[-1] - turned], -1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def swiglu(tensors: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    gated = F.silu(x @ tensors[f"{name}.gate_proj.weight"].T) * (
        x @ tensors[f"{name}.up_proj.weight"].T
    )
    return gated @ tensors[f"{name}.down_proj.weight"].T


def attended(query: Tensor, key: Tensor, value: Tensor, size: int) -> Tensor:
    """Mix values [length, kv_heads, width] for queries [length, heads, width]: each sees its own
    block and earlier ones."""
    key, value = (
        part.repeat_interleave(query.shape[1] // key.shape[1], 1) for part in (key, value)
    )
    scores, block = (
        torch.einsum("qhw,khw->hqk", query, key) / query.shape[-1] ** 0.5,
        torch.arange(len(query)) // size,
    )
    probabilities = scores.masked_fill(block > block[:, None], -torch.inf).softmax(-1)
    return torch.einsum("hqk,khw->qhw", probabilities, value).flatten(1)


def layer(tensors: dict[str, Tensor], prefix: str, x: Tensor, size: int = BLOCK) -> Tensor:
    """Apply a Qwen3 decoder layer to x [length, hidden], block-causal: a token sees its own block
    and earlier ones."""

    def weight(name: str) -> Tensor:
        return tensors[f"{prefix}.{name}.weight"]

    normed = norm(x, weight("input_layernorm"))
    query, key, value = (
        (normed @ weight(f"self_attn.{k}_proj").T).unflatten(1, (-1, WIDTH)) for k in "qkv"
    )
    query, key = (
        rotate(norm(part, weight(f"self_attn.{name}_norm")), WIDTH, THETA)
        for name, part in (("q", query), ("k", key))
    )
    x = x + attended(query, key, value, size) @ weight("self_attn.o_proj").T
    return x + swiglu(tensors, f"{prefix}.mlp", norm(x, weight("post_attention_layernorm")))


def hidden_states(tensors: dict[str, Tensor], ids: list[int], size: int = BLOCK) -> Tensor:
    """Compute the backbone's hidden states h_A [length, hidden], in blocks of `size`."""
    x = tensors["model.embed_tokens.weight"][ids]
    for index in range(LAYERS):
        x = layer(tensors, f"model.layers.{index}", x, size)
    return norm(x, tensors["model.norm.weight"])


def residual(tensors: dict[str, Tensor], ids: list[int], hidden: Tensor) -> Tensor:
    """Compute h_C = Head(embed(x'), h) [length, hidden]; the embedding half of eh_proj comes
    first."""
    embedded = norm(tensors["model.embed_tokens.weight"][ids], tensors[f"{HEAD}.enorm.weight"])
    x = (
        torch.cat([embedded, norm(hidden, tensors[f"{HEAD}.hnorm.weight"])], -1)
        @ tensors[f"{HEAD}.eh_proj.weight"].T
    )
    for index in range(HEAD_LAYERS):
        x = layer(tensors, f"{HEAD}.layers.{index}", x)
    return norm(x, tensors[f"{HEAD}.norm.weight"])
