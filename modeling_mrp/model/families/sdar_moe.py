"""SDAR-30B-A3B (`sdar_moe`): Qwen3-MoE layers (SDAR, arXiv 2510.06303). Checkpoints hold each
expert's matrices separately."""

from typing import Any, ClassVar

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from .backbone import FamilyBackbone


class SDARMoeBackbone(FamilyBackbone):
    """The backbone of SDAR models with experts. Its layers are transformers' Qwen3-MoE layers.

    Attributes:
        fields: Maps the names of config fields that the family has beyond those of `MRPConfig` to
            their defaults.
    """

    family = "sdar_moe"
    fields: ClassVar[dict[str, Any]] = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    layer = qwen3_moe.Qwen3MoeDecoderLayer
    attention = qwen3_moe.Qwen3MoeAttention
    norm_kind = qwen3_moe.Qwen3MoeRMSNorm
    rotary = qwen3_moe.Qwen3MoeRotaryEmbedding
    conversions = get_checkpoint_conversion_mapping("qwen3_moe")
    unsaid = {"block_size": 4}  # by the first checkpoints
