"""Fast-dLLM v2 (`Fast_dLLM_Qwen`, arXiv 2509.26328): Qwen2.5 layers, with the shift of
autoregressive models.

The hidden state at position i predicts the token at i + 1. So a block's first token is predicted by
the last hidden state of the previous block, once that block is clean; this hidden state does not
see the token's own block.
"""

from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2Attention,
    Qwen2DecoderLayer,
    Qwen2RMSNorm,
    Qwen2RotaryEmbedding,
)

from .backbone import FamilyBackbone


class FastDLLMBackbone(FamilyBackbone):
    """The backbone of Fast-dLLM v2. Its layers are transformers' Qwen2 layers, whose queries, keys
    and values have a bias and no norm. The hidden state at a position predicts the token at the
    next position."""

    family = "fast_dllm_v2"
    models = "Fast-dLLM v2"
    paper = "2509.26328"
    shifted = True
    layer = Qwen2DecoderLayer
    attention = Qwen2Attention
    norm_kind = Qwen2RMSNorm
    rotary = Qwen2RotaryEmbedding
    published = {"model_type": "Fast_dLLM_Qwen"}
    renamed = {"bd_size": "block_size"}
    unsaid = {"block_size": 32, "mask_token_id": 151665}
