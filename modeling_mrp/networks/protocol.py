"""The needs of decoding from a model, and no more: a test's model of twenty lines has it, and so has `MRPForCausalLM`."""

from typing import Any, Protocol

import torch
from torch import Tensor

from .cache import BlockCache


class Config(Protocol):
    """The numbers of a model that decoding reads."""

    block_size: int
    mask_token_id: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int


class BlockDiffusionModel(Protocol):
    """A block-diffusion language model with or without a head."""

    @property
    def config(self) -> Any:
        """A `Config`."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states, keys and values."""
        ...

    def backbone(
        self, input_ids: Tensor, position_ids: Tensor, mask: Any, past_key_values: Any = None, compiled: bool = True
    ) -> Tensor:
        """Compute the final hidden states h_A, [batch, length, hidden_size].

        Args:
            input_ids: [batch, length] long.
            position_ids: [batch, length] long, absolute.
            mask: [batch, 1, length, keys] bool, True where a query sees a key, or a `RoundMask`.
            past_key_values: The `BlockCache` that layers write to and read from.
            compiled: Whether a compiled backbone runs as compiled.
        """
        ...

    def residual(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        position_ids: Tensor,
        mask: Any,
        past_key_values: Any = None,
        compiled: bool = True,
    ) -> Tensor:
        """Compute the head's h_C, [batch, length, hidden_size], of ids x' and hidden states h_A; otherwise as `backbone`."""
        ...

    def block_cache(
        self, batch_size: int, capacity: int, scratch: int, with_head: bool, fixed: bool | None = None
    ) -> BlockCache:
        """Make an empty cache for `batch_size` rows of `capacity` tokens, with room for `scratch` tokens being scored."""
        ...


__all__ = ["BlockDiffusionModel", "Config"]
