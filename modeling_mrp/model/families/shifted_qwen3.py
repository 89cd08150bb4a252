"""Autoregressive Qwen3 models, opened as block-diffusion backbones by `from_backbone` with
`shifted=True`: Qwen3 layers, whose hidden states still predict the next token."""

from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
)

from .backbone import FamilyBackbone


class ShiftedQwen3Backbone(FamilyBackbone):
    """The backbone of an autoregressive Qwen3 checkpoint that is opened as a block-diffusion model
    with `shifted=True`. Its layers are transformers' Qwen3 layers. It is shifted: as in the
    checkpoint, the hidden state at a position predicts the token at the next position."""

    family = "shifted_qwen3"
    models = "Qwen3"
    paper = None
    shifted = True
    layer = Qwen3DecoderLayer
    attention = Qwen3Attention
    norm_kind = Qwen3RMSNorm
    rotary = Qwen3RotaryEmbedding
