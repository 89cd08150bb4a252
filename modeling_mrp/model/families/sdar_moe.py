"""SDAR-30B-A3B (`sdar_moe`): Qwen3-MoE layers (SDAR, arXiv 2510.06303). Checkpoints hold each expert's matrices singly."""

from typing import Any, ClassVar

from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeAttention,
    Qwen3MoeDecoderLayer,
    Qwen3MoeExperts,
    Qwen3MoeRMSNorm,
    Qwen3MoeRotaryEmbedding,
    Qwen3MoeTopKRouter,
)

from .backbone import EXPERTS, FamilyBackbone
from .registry import family


@family("sdar_moe")
class SDARMoeBackbone(FamilyBackbone):
    """transformers' Qwen3-MoE layers under a given mask."""

    fields: ClassVar[dict[str, Any]] = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    layer, attention = Qwen3MoeDecoderLayer, Qwen3MoeAttention
    norm_kind, rotary = Qwen3MoeRMSNorm, Qwen3MoeRotaryEmbedding
    own_weights = (Qwen3MoeExperts, Qwen3MoeTopKRouter)
    conversions = EXPERTS
    unsaid = {"block_size": 4}  # by the first checkpoints
