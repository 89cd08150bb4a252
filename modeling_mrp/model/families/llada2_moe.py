"""LLaDA2.0-mini and -flash (`llada2_moe`, arXiv 2512.15745): transformers' GLM-4-MoE layers, under
other names.

A layer has one shared expert and 256 further experts. Among these, a sigmoid router with a
correction bias chooses experts from the best groups of experts. The rotary embedding rotates a part
of each head. Checkpoints hold the projections of queries, keys and values in one matrix, but each
expert's matrices separately.
"""

import re
from typing import Any, ClassVar

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.utils import logging as transformers_logging

from .backbone import FamilyBackbone

# Fields of published configs that choose between variants of a part, with the only value supported
# here.
_FIXED = {
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "norm_head": False,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "use_sliding_window": False,
}
# Published names of modules, with the names in transformers' layers.
_NAMES = {
    "word_embeddings": "embed_tokens",
    "attention.query_layernorm": "self_attn.q_norm",
    "attention.key_layernorm": "self_attn.k_norm",
    "attention.dense": "self_attn.o_proj",
    "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
}

logger = transformers_logging.get_logger(__name__)


class _SplitHeads(ConversionOps):
    """A conversion that splits the rows of a fused projection into three projections, of queries,
    keys and values. The numbers of heads in the config give their sizes."""

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: Any,
        target_patterns: list[str],
        **kwargs: Any,
    ) -> Any:
        (fused,) = input_dict.values()
        if isinstance(fused, list):
            fused = fused[0]
        config = kwargs["config"]
        sizes = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        projections = fused.split([size * config.head_dim for size in sizes])
        return {
            name: projection.contiguous()
            for name, projection in zip(target_patterns, projections, strict=True)
        }


class LLaDA2Backbone(FamilyBackbone):
    """The backbone of LLaDA2.0 models. Its layers are transformers' GLM-4-MoE layers, which have
    experts.

    Attributes:
        fields: Maps the names of config fields that the family has beyond those of `MRPConfig` to
            their defaults.
        unsaid: Maps config fields that published configs may leave out to the values that these
            then have.
        renamed: Maps the names of fields in published configs to their names here.
    """

    family = "llada2_moe"
    models = "LLaDA2.0"
    paper = "2512.15745"
    fields: ClassVar[dict[str, Any]] = {
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    }
    layer = glm4_moe.Glm4MoeDecoderLayer
    attention = glm4_moe.Glm4MoeAttention
    norm_kind = glm4_moe.Glm4MoeRMSNorm
    rotary = glm4_moe.Glm4MoeRotaryEmbedding
    unsaid: ClassVar[dict[str, Any]] = {
        "block_size": 32,
        "mask_token_id": 156895,
        "eos_token_id": 156892,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    }
    renamed: ClassVar[dict[str, str]] = {"num_shared_experts": "n_shared_experts"}
    conversions = (
        *(WeightRenaming(published, name) for published, name in _NAMES.items()),
        WeightConverter(
            source_patterns="attention.query_key_value.weight",
            target_patterns=[f"self_attn.{letter}_proj.weight" for letter in "qkv"],
            operations=[_SplitHeads()],
        ),
        *get_checkpoint_conversion_mapping("glm4_moe"),
    )
    _keep_in_fp32_modules_strict = ["e_score_correction_bias"]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if re.search(r"llada-?2\.[1-9]", config.name_or_path, re.IGNORECASE):
            logger.warning(
                f"{config.name_or_path} was trained to edit tokens that are already there. It "
                "decodes here with editing off: each token is final once it is revealed, as in "
                "LLaDA2.0"
            )

    @classmethod
    def translate_published(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Translate the fields of a published config into fields of `MRPConfig`, as the base class
        does.

        Args:
            fields: The fields of the published config, without those that are None.

        Returns:
            The dict that the base class returns, but with a `num_nextn_predict_layers` of 0. In
            published configs, this field counts layers that are no MRP head.

        Raises:
            ValueError: if a field chooses a variant of a layer that is not supported, such as
                `use_bias=True`. No published model has such a variant.
        """
        unsupported = {
            name: fields[name] for name, value in _FIXED.items() if fields.get(name, value) != value
        }
        if unsupported:
            raise ValueError(
                f"the config has {unsupported}: published models of the family 'llada2_moe' do "
                "not, nor does this"
            )
        return super().translate_published(
            {**fields, "num_nextn_predict_layers": 0}
        )  # theirs are no head
