"""Autoregressive Llamas, opened as block-diffusion backbones by `from_backbone`: Llama layers,
whose hidden states still predict the next token."""

from typing import Any, ClassVar

from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from .backbone import FamilyBackbone


class ShiftedLlamaBackbone(FamilyBackbone):
    """The backbone of an autoregressive Llama checkpoint that is opened as a block-diffusion model.
    Its layers are transformers' Llama layers. It is shifted: as in the checkpoint, the hidden state
    at a position predicts the token at the next position.

    Attributes:
        fields: Maps the names of config fields that the family has beyond those of `MRPConfig` to
            their defaults.
    """

    family = "shifted_llama"
    models = "Llama"
    paper = None
    shifted = True
    fields: ClassVar[dict[str, Any]] = {"mlp_bias": False}
    layer = LlamaDecoderLayer
    attention = LlamaAttention
    norm_kind = LlamaRMSNorm
    rotary = LlamaRotaryEmbedding
