"""Stable-DiffCoder-8B (ByteDance Seed): Llama layers. Its configs have the model type `llama`, so
they are recognised by their `architectures`."""

from typing import Any, ClassVar

from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from .backbone import FamilyBackbone


class StableDiffCoderBackbone(FamilyBackbone):
    """The backbone of Stable-DiffCoder. Its layers are transformers' Llama layers, which have no
    norms of queries and keys.

    Attributes:
        fields: Maps the names of config fields that the family has beyond those of `MRPConfig` to
            their defaults.
    """

    family = "stable_diffcoder"
    models = "Stable-DiffCoder"
    paper = None
    fields: ClassVar[dict[str, Any]] = {"mlp_bias": False}
    layer = LlamaDecoderLayer
    attention = LlamaAttention
    norm_kind = LlamaRMSNorm
    rotary = LlamaRotaryEmbedding
    published = {"model_type": "llama", "architectures": ["StableDiffcoderForCausalLM"]}
    unsaid = {"block_size": 4, "mask_token_id": 5}
