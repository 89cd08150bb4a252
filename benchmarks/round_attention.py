"""One layer's attention in a decoding round: the kernel, SDPA with a mask, flex attention, and the floor of all three."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from modeling_mrp.kernels.round_attention import RoundMask, round_attention, round_attention_twin

from .roofline import Work


@dataclass(frozen=True)
class Round:
    """The sizes of a round. Every row has the same prefix; the last of several states looks at the first one.

    Attributes:
        batch: Rows.
        states: K, states per row.
        block_size: Tokens per state.
        prefix: Committed tokens per row.
        heads: Query heads.
        kv_heads: Heads of keys and values.
        head_dim: Size of a head.
        dtype: Of queries, keys and values.
        device: Where they are.
    """

    batch: int
    states: int
    block_size: int
    prefix: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    @property
    def queries(self) -> int:
        """Tokens that a row submits."""
        return self.states * self.block_size

    @property
    def floor(self) -> Work:
        """What no implementation avoids: keys, values and queries read once, results written once, seen pairs multiplied."""
        kept = self.kv_heads * (self.queries + self.prefix) + self.heads * self.queries
        seen = self.queries * (self.prefix + self.block_size) + self.block_size**2 * (self.states > 1)
        size = self.batch * self.head_dim
        return Work(2 * size * kept * self.dtype.itemsize, 4 * size * self.heads * seen)

    def inputs(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Random queries [rows, heads, queries, head_dim], keys and values [rows, kv_heads, keys, head_dim].

        Laid out as in a decode: queries by token, keys and values in one buffer by slot.
        """
        random = torch.Generator(self.device).manual_seed(seed)
        used = 1 << (self.prefix - 1).bit_length()

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random, device=self.device, dtype=self.dtype)

        query = normal(self.batch, self.queries, self.heads, self.head_dim).transpose(1, 2)
        slots = normal(self.batch, used + self.queries, 2, self.kv_heads, self.head_dim)
        key, value = slots.permute(2, 0, 3, 1, 4)
        return query, key, value

    def mask(self) -> RoundMask:
        """Who sees whom."""
        committed = torch.full((self.batch,), self.prefix, device=self.device)
        parent = torch.full((self.batch, self.states), -1, device=self.device)
        parent[:, 1:][:, -1:] = 0
        return RoundMask(committed, parent, self.states, self.block_size)

    def contenders(self) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
        """What gives [rows, queries, heads, head_dim] of `inputs`, by name: `kernel`, `sdpa_mask` and `flex`.

        A round makes its masks once for all layers, so they are made here and not in the calls. What SDPA needs beside one,
        keys and values repeated for every query head, is part of its call, as it is of transformers'.
        """
        mask, scale = self.mask(), self.head_dim**-0.5
        keys = self.queries + (1 << (self.prefix - 1).bit_length())
        dense = mask.dense(keys - self.queries)
        group = self.heads // self.kv_heads
        sparse = create_block_mask(_rule(mask, keys - self.queries), self.batch, None, self.queries, keys, device=self.device)
        on_cuda = torch.device(self.device).type == "cuda"
        flex = torch.compile(flex_attention, dynamic=False) if on_cuda else flex_attention

        def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = (t.repeat_interleave(group, 1) for t in (key, value))
            return torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=dense, scale=scale
            ).transpose(1, 2)

        return {
            "kernel": lambda query, key, value: round_attention(query, key, value, mask, scale),
            "sdpa_mask": sdpa,
            "flex": lambda query, key, value: flex(
                query, key, value, block_mask=sparse, scale=scale, enable_gqa=True
            ).transpose(1, 2),
        }

    def exact(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The result of `inputs` in float64."""
        return round_attention_twin(query.double(), key.double(), value.double(), self.mask(), self.head_dim**-0.5)


def _rule(mask: RoundMask, used: int) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Who sees whom, as flex attention's `mask_mod`."""
    assert mask.parent is not None
    committed, parent, block = mask.committed, mask.parent, mask.block_size

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        state, other = query // block, (key - used) // block
        return torch.where(key < used, key < committed[row], (other == state) | (other == parent[row, state]))

    return sees
