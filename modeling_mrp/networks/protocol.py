"""The needs of decoding from a model, and no more: a test's model of twenty lines has it, and so has `MRPForCausalLM`."""

from typing import Any, Protocol

import torch
from torch import Tensor

from .cache import BlockCache


class BlockDiffusionModel(Protocol):
    """A block-diffusion language model with or without a head.

    Attributes:
        config: With `block_size`, `mask_token_id`, `hidden_size`, `num_hidden_layers` and `num_nextn_predict_layers`.
        dtype: Of hidden states, keys and values.
    """

    @property
    def config(self) -> Any: ...  # noqa: D102  above

    @property
    def dtype(self) -> torch.dtype: ...  # noqa: D102  above

    def backbone(
        self, input_ids: Tensor, position_ids: Tensor, mask: Any, past_key_values: Any = None, compiled: bool = True
    ) -> Tensor:
        """Compute h_A, [batch, length, hidden_size], as `MRPForCausalLM.backbone`; the cache is a `BlockCache`."""
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
