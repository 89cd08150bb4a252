"""SDAR with an MRP head, made of the engine's own layers: the additions to the engine's
`SDARForCausalLM`."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_loader.weight_utils import default_weight_loader
from sglang.srt.models.sdar import SDARMLP, SDARAttention, SDARForCausalLM
from sglang.srt.runtime_context import get_exec, get_model
from torch import Tensor, nn

from . import ALGORITHM
from .checkpoint import backbone_weights, head_weight
from .head_graphs import HeadGraphs

# For each projection of a checkpoint that the engine stacks: the name of the stacked projection,
# and the part within it.
_STACKED: dict[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
}
_STACKED |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}


class HeadLayer(nn.Module):
    """A decoder layer of the head, made of the engine's modules. Its keys and values have a layer
    of their own in the engine's KV pool.

    Args:
        config: The model's config, which has the sizes.
        layer_id: The index of the layer in the KV pool.
        quant_config: The engine's quantization config for this layer; None if it is not quantized.
        prefix: The layer's name in the model, such as `mrp_head.layers.0`.
    """

    def __init__(self, config: Any, layer_id: int, quant_config: Any, prefix: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = SDARAttention(config, layer_id, quant_config, prefix=f"{prefix}.self_attn")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SDARMLP(config, quant_config, prefix=f"{prefix}.mlp")

    def forward(self, positions: Tensor, hidden: Tensor, batch: Any) -> Tensor:
        """Compute the layer's output [tokens, hidden_size], and write the keys and values of the
        tokens to the KV pool.

        Args:
            positions: [tokens], the absolute positions of the tokens.
            hidden: [tokens, hidden_size], the layer's input.
            batch: The engine's `ForwardBatch` of the tokens.
        """
        hidden = hidden + self.self_attn(positions, self.input_layernorm(hidden), batch)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Head(nn.Module):
    """The MRP head, as `modeling_mrp.model.head.MRPHead` defines it, made of the engine's layers.

    Args:
        config: The model's config, which has the sizes and, in `num_nextn_predict_layers`, the
            number of the head's layers.
        quant_config: The engine's quantization config for the head; None if it is not quantized.
    """

    def __init__(self, config: Any, quant_config: Any = None) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.rms_norm_eps
        first = config.num_hidden_layers
        self.enorm, self.hnorm, self.norm = (RMSNorm(size, eps=eps) for _ in range(3))
        self.eh_proj = ReplicatedLinear(2 * size, size, bias=False)
        self.layers = nn.ModuleList(
            HeadLayer(config, first + index, quant_config, f"mrp_head.layers.{index}")
            for index in range(config.num_nextn_predict_layers)
        )

    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor, batch: Any) -> Tensor:
        """Compute the head's output h_C, [tokens, hidden_size].

        Args:
            embeds: [tokens, hidden_size], the embeddings of the state after the reveal.
            hidden: [tokens, hidden_size], h_A: the backbone's hidden states before the reveal, or
                an estimate of them.
            positions: [tokens], the absolute positions of the tokens.
            batch: The engine's `ForwardBatch` of the tokens.
        """
        mixed, _ = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], -1))
        for layer in self.layers:
            mixed = layer(positions, mixed, batch)
        return self.norm(mixed)


class MRPForCausalLM(SDARForCausalLM):
    """SDAR with an MRP head. Under the algorithm `MRP`, the forward of this model returns hidden
    states in place of logits.

    Args:
        config: The model's config, an `MRPConfig`. The model has a head if
            `num_nextn_predict_layers` is not 0.
        quant_config: The engine's quantization config for the backbone, or None.
        prefix: The beginning of the names of the backbone's modules.
    """

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        rope = dict(getattr(config, "rope_parameters", None) or {})
        if rope:  # the engine's SDAR reads the fields of older configs
            config.rope_theta = rope.pop("rope_theta", getattr(config, "rope_theta", 10000.0))
            config.rope_scaling = None if rope.get("rope_type", "default") == "default" else rope
        super().__init__(config, quant_config, prefix)
        self.mrp_head = Head(config) if config.num_nextn_predict_layers else None
        self.head_graphs: HeadGraphs | None = None
        self.has_weights = False
        self.hands_out_hidden = get_exec().dllm.dllm_algorithm == ALGORITHM

    @property
    def end_layer(self) -> int:
        """One past the index of the last layer in the KV pool, where the head's layers follow the
        backbone's."""
        return self.model.end_layer + (
            len(self.mrp_head.layers) if self.mrp_head is not None else 0
        )

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> Any:
        """Compute logits, as a `LogitsProcessorOutput` of the engine. Under the algorithm `MRP`,
        which needs logits at only a few positions, its field `hidden_states` has the final hidden
        states [tokens, hidden_size] instead."""
        if not self.hands_out_hidden:
            return super().forward(
                input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors
            )
        hidden = self.model(input_ids, positions, forward_batch, input_embeds, pp_proxy_tensors)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)

    @torch.no_grad()
    def run_head(self, engine: Any, batch: Any, hidden: Tensor) -> Tensor:
        """Compute the head's residual h_C, [tokens, hidden_size], by a CUDA graph if one fits the
        batch.

        Args:
            engine: The engine's `ModelRunner`.
            batch: The `ForwardBatch` with the ids and positions of the tokens.
            hidden: [tokens, hidden_size], the hidden states h_A that the head reads.
        """

        def eagerly() -> Tensor:
            with forward_context(ForwardContext(attn_backend=engine.attn_backend)):
                engine.attn_backend.init_forward_metadata(batch)
                return self.residual(batch.input_ids, batch.positions, batch, hidden)

        graphs = self.head_graphs
        if graphs is None or not graphs.takes(batch):
            return eagerly()
        return graphs.checked.run(partial(graphs.replay, batch, hidden), eagerly)

    def residual(self, ids: Tensor, positions: Tensor, batch: Any, hidden: Tensor) -> Tensor:
        """Compute the head's residual h_C from ids [tokens], positions [tokens] and hidden states
        h_A, without a CUDA graph. Hidden states and residual are [tokens, hidden_size]. `batch` is
        the engine's `ForwardBatch` of the tokens."""
        assert self.mrp_head is not None
        output: Tensor = self.mrp_head(self.model.embed_tokens(ids), hidden, positions, batch)
        return output

    @torch.no_grad()
    def unembed(self, batch: Any, hidden: Tensor) -> Tensor:
        """Compute logits [n, vocab] of final hidden states [n, hidden_size]. `batch` is a
        `ForwardBatch` of the engine, which may have a buffer for the logits."""
        return self.logits_processor(None, hidden, self.lm_head, batch).full_logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors whose names are those of the checkpoint. The first call must give all
        tensors; later ones may give any of them, to update weights.

        The first call also loads the backbone that a head repository names. `open_checkpoint` has
        checked that no tensor is missing.

        Raises:
            ValueError: for a tensor of the head that the head does not have.
        """
        head = {} if self.mrp_head is None else dict(self.mrp_head.named_parameters())
        has_backbone = False

        def of_backbone() -> Iterator[tuple[str, Tensor]]:
            nonlocal has_backbone
            for name, tensor in weights:
                if (head_name := head_weight(name)) is None:
                    has_backbone = True
                    yield name, tensor
                else:
                    _load_head(head, head_name, tensor)

        super().load_weights(of_backbone())
        if not self.has_weights and not has_backbone:
            super().load_weights(backbone_weights(self.config, get_model().model_path))
        self.has_weights = True


def _load_head(head: dict[str, Any], name: str, tensor: Tensor) -> None:
    shards: tuple[str | int, ...] = ()
    for projection, (stacked, shard) in _STACKED.items():
        if f".{projection}." in name:
            name = name.replace(projection, stacked)
            shards = (shard,)
    if name not in head:
        raise ValueError(
            f"{name} is given for the head, which has no such tensor: check the config"
        )
    getattr(head[name], "weight_loader", default_weight_loader)(head[name], tensor, *shards)


class SDARMRPForCausalLM(MRPForCausalLM):
    """`MRPForCausalLM` under the name that published checkpoints give to this architecture."""
