"""Stable-DiffCoder-8B (ByteDance Seed): Llama layers. The config declares `llama`; its architecture tells it from others."""

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from .backbone import FamilyBackbone
from .registry import family


@family("stable_diffcoder")
class StableDiffCoderBackbone(FamilyBackbone):
    """transformers' Llama layers under a given mask: no norms of queries and keys."""

    fields: ClassVar[dict[str, Any]] = {"mlp_bias": False}
    models, paper = "Stable-DiffCoder", None
    layer, attention = LlamaDecoderLayer, LlamaAttention
    norm_kind, rotary = LlamaRMSNorm, LlamaRotaryEmbedding
    unsaid = {"block_size": 4, "mask_token_id": 5}

    @classmethod
    def reads(cls, fields: Mapping[str, Any]) -> bool:
        """Tell if a published config is one of this family."""
        return fields.get("model_type") == "llama" and "StableDiffcoderForCausalLM" in (fields.get("architectures") or ())
