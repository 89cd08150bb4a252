"""The MRP head, and the check that it fits a backbone.

Symbols follow the MRP paper (arXiv 2605.18817): h_A are the backbone's final hidden states at a
state x (text with masks), x' the state after a reveal, h_C the head's output; lm_head(h_A + h_C)
estimates the backbone's logits at x'.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from .compat import CACHE_NAME
from .configuration import MRPConfig

# Fields in which a head's config must agree with its backbone's.
_SHARED = (
    "family",
    "hidden_size",
    "vocab_size",
    "block_size",
    "mask_token_id",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
)


class MRPHead(nn.Module):
    """Predicts the residual h_C that a reveal adds to the backbone's hidden states (MRP, section
    3).

    ``h_C = norm(layers(eh_proj([enorm(embed(x')) ; hnorm(h_A)])))``, with Qwen3's layers: x' is the
    state after the reveal, and h_A are the backbone's hidden states before it. A new head, before
    any training, returns 0.

    Args:
        config: The config of the model. It has the sizes of the layers and, in
            `num_nextn_predict_layers`, their number.
    """

    def __init__(self, config: MRPConfig) -> None:
        super().__init__()
        # its layers are divided as the backbone's are
        self._tp_plan = dict(config.base_model_tp_plan or {})
        self.enorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, 0) for _ in range(config.num_nextn_predict_layers)
        )
        self.place_behind(config)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        nn.init.zeros_(self.norm.weight)

    def place_behind(self: Any, backbone: MRPConfig) -> None:
        """Place the head's layers behind those of a backbone: give them the cache indices that
        follow the indices of the backbone's layers, and the backbone's config, which selects how
        attention is computed."""
        for index, layer in enumerate(self.layers):
            layer.self_attn.layer_idx = backbone.num_hidden_layers + index
            layer.self_attn.config = backbone

    def forward(
        self,
        inputs_embeds: Tensor,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Cache | None = None,
    ) -> Tensor:
        """Predict the residual h_C, [batch, length, hidden_size].

        Where layers are fused, which is the default also on a CPU, `Networks._fused` does not call
        this method: it calls `project_inputs`, and runs the layers and `norm` itself. A new part of
        the head has to act there, too. If it does not, only drafts get worse, and no text shows it.

        Args:
            inputs_embeds: [batch, length, hidden_size], the embeddings of x' (the state after the
                reveal).
            hidden_states: [batch, length, hidden_size], h_A, or an estimate of it: h_A plus earlier
                residuals.
            attention_mask: As `Qwen3DecoderLayer` takes it, [batch, 1, length, keys].
            position_embeddings: cos and sin of the backbone's rotary embedding, [batch, length,
                head_dim] each.
            cache: A cache that the layers update, or None.
        """
        hidden = self.project_inputs(inputs_embeds, hidden_states)
        for layer in self.layers:
            hidden = layer(
                hidden,
                attention_mask=attention_mask,
                position_embeddings=position_embeddings,
                use_cache=cache is not None,
                **{CACHE_NAME: cache},
            )
        return self.norm(hidden)

    def project_inputs(self, inputs_embeds: Tensor, hidden_states: Tensor) -> Tensor:
        """Compute the input of the head's layers, [batch, length, hidden_size], from the embeddings
        of x' and from hidden states of the same shape: norm both, and project them together."""
        projected: Tensor = self.eh_proj(
            torch.cat([self.enorm(inputs_embeds), self.hnorm(hidden_states)], -1)
        )
        return projected


def pad_rotary(rotary: tuple[Tensor, Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
    """Extend cos and sin [batch, length, rotated dimensions] to [batch, length, head_dim], so that
    the added dimensions are rotated by an angle of 0."""
    cos, sin = rotary
    half = cos.shape[-1] // 2
    if 2 * half == head_dim:
        return cos, sin
    padding = (0, head_dim // 2 - half)
    cos = F.pad(cos[..., :half], padding, value=1.0)
    sin = F.pad(sin[..., :half], padding)
    return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)


def check_same_backbone(head: MRPConfig, backbone: MRPConfig, origin: str) -> None:
    """Raise `ValueError` unless the configs of a head and of a backbone agree in `family`,
    `block_size`, `mask_token_id`, the sizes of the head's layers, and all other fields that matter
    to the head (`_SHARED`). The message lists all differences; `origin` is the name or folder of
    the head's checkpoint, for the message."""
    differences = []
    for name in _SHARED:
        value = getattr(head, name)
        expected = getattr(backbone, name)
        if value != expected:
            differences.append(f"{name} is {value!r}, the backbone's {expected!r}")
    if differences:
        raise ValueError(
            f"the head of {origin} does not belong to this backbone: its "
            + "; its ".join(differences)
            + ". Use the backbone that it was trained on, or train a head for this one"
        )
