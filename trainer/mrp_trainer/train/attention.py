"""Implementations of attention for training passes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

from modeling_mrp.modeling import MRPForCausalLM

TRAINING_FLEX, TILES = "flex_attention_of_one_type", "tiles"
_QUERIES = 128  # queries per tile


@cache
def compiled_flex_attention() -> Any:
    """Return flex attention, compiled for fixed shapes. Passes with and without gradients, in
    training and in evaluation, share this one compiled function. Each combination of shapes is one
    entry of the compiler's cache, which holds at most 8. Beyond that limit, attention would run
    uncompiled, with all scores in memory."""
    return torch.compile(flex_attention, dynamic=False)


def flex_attention_of_one_type(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: BlockMask,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Convert queries and keys to the dtype of the values, make all three contiguous, and run flex
    attention on them. Arguments and results are those of attention in transformers.

    Under autocast, the float32 weights of q_norm and k_norm make queries and keys float32, while
    values are bfloat16. Flex attention on CUDA has no backward pass for such mixed dtypes. Without
    contiguous tensors, every other combination of strides would be compiled, too.
    """
    heads = query.shape[1]
    # grouped heads, which flex attention supports only for powers of two
    grouped = heads & (heads - 1) == 0
    if not grouped:
        key = repeat_kv(key, heads // key.shape[1])
        value = repeat_kv(value, heads // value.shape[1])
    inputs = [tensor.to(value.dtype).contiguous() for tensor in (query, key, value)]
    output = compiled_flex_attention()(
        *inputs, block_mask=attention_mask, scale=scaling, enable_gqa=grouped
    )
    return output.transpose(1, 2).contiguous(), None


@dataclass(frozen=True)
class Tiles:
    """A mask cut into tiles. A tile is a group of queries, with only those columns that at least
    one of the queries sees.

    Attributes:
        tiles: For each tile: the slice of its queries; the columns, int64 [n], that at least one of
            these queries sees in at least one row; and a mask, bool [rows, 1, queries, n], that is
            True where a query does not see a column.
    """

    tiles: Sequence[tuple[slice, Tensor, Tensor]]

    @classmethod
    def of(cls, mask: Tensor) -> "Tiles":
        """Cut a dense mask, bool [rows, 1, queries, columns] and True where a query sees a column,
        into tiles."""
        tiles = []
        for begin in range(0, mask.shape[2], _QUERIES):
            visible = mask[:, :, begin : begin + _QUERIES]
            columns = visible.any(2).any(1).any(0).nonzero()[:, 0]
            tiles.append((slice(begin, begin + _QUERIES), columns, ~visible[..., columns]))
        return cls(tiles)


def tiled_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tiles,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention tile by tile, by matrix products over the columns of each tile. On CPUs,
    fused attention would compute masked columns, too.

    Args:
        module: The attention layer; not used.
        query: [rows, heads, queries, head_dim].
        key: [rows, KV heads, columns, head_dim].
        value: [rows, KV heads, columns, head_dim].
        attention_mask: The mask, cut into tiles.
        scaling: The factor of the scores.
        kwargs: Further arguments that transformers passes; not used.

    Returns:
        The output, [rows, queries, heads, head_dim], and None in place of attention weights.
    """
    outputs = []
    heads = query.shape[1] // key.shape[1]
    for queries, columns, hidden in attention_mask.tiles:
        keys = repeat_kv(key.index_select(2, columns), heads)
        values = repeat_kv(value.index_select(2, columns), heads)
        scores = (query[:, :, queries] * scaling) @ keys.transpose(2, 3)
        outputs.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values)
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(TRAINING_FLEX, flex_attention_of_one_type)
AttentionInterface.register(TILES, tiled_attention)


def training_attention(model: MRPForCausalLM, choice: str, device: torch.device) -> str:
    """Return the name of the attention implementation for packed passes, as transformers knows it.
    `choice` is a value of `MRPTrainingArguments.packed_attention`:

    - `sdpa` or `tiles`: this name.
    - `flex_attention`: the name of `flex_attention_of_one_type`.
    - `auto`: on CUDA, the same as `flex_attention`; on a CPU, `tiles` if the model uses SDPA
      without dropout; otherwise the name of the model's own attention.
    """
    if choice == "auto":
        choice = model.config._attn_implementation
        if device.type == "cuda":
            choice = "flex_attention"
        elif (
            choice == "sdpa"
            and device.type == "cpu"
            and not getattr(model.config, "attention_dropout", 0.0)
        ):
            choice = TILES
    return TRAINING_FLEX if choice == "flex_attention" else choice


@contextmanager
def attention_implementation(model: MRPForCausalLM, implementation: str) -> Iterator[None]:
    """Give a model the attention implementation with the name `implementation` while the context is
    open. Afterwards, the model has its previous implementation again."""
    previous = model.config._attn_implementation
    if implementation != previous:
        model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        if implementation != previous:
            model.set_attn_implementation(previous)
