"""The kernels between the matrix products of a layer, as cases of `gpu_kernels`."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from modeling_mrp.kernels.fused_layers import gated, rotated, rotated_ref, sum_and_norm, sum_and_norm_ref
from modeling_mrp.runner.cache import BlockCache

from .gpu_kernels import KERNEL, ROUNDED, Case, Way, between, normed_exactly
from .roofline import Shape, Work

_SILU = ACT2FN["silu"]


@dataclass(frozen=True)
class Layer:
    """A layer's inputs in a round.

    Attributes:
        shape: Of the model.
        batch: Rows.
        states: Of each row.
        dtype: Of everything.
        device: Where it lies.
    """

    shape: Shape
    batch: int
    states: int
    dtype: torch.dtype
    device: torch.device

    @property
    def tokens(self) -> int:
        """Of a row."""
        return self.states * self.shape.block_size

    def numbers(self, seed: int, *widths: int) -> tuple[Tensor, ...]:
        """[batch, tokens, width] of each width."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shapes = [(self.batch, self.tokens, width) for width in widths]
        return tuple(torch.randn(shape, generator=generator, device=self.device).to(self.dtype) for shape in shapes)

    def cases(self) -> Iterator[Case]:
        """`sum_and_norm`, `rotated` and `gated`."""
        yield self._sum()
        yield self._rotated()
        yield self._gated()

    def _case(
        self, name: str, widths: tuple[int, ...], ways: dict[str, Way], exact: Way, moved: int, flops: int, roundings: int
    ) -> Case:
        """For a token `moved` numbers are read or written and `flops` computed; results are rounded so often in a row."""

        def inputs(seed: int) -> tuple[Tensor, ...]:
            return self.numbers(seed, *widths)

        fields = {"batch": self.batch, "states": self.states, "dtype": str(self.dtype)[6:]}
        tokens, error = self.batch * self.tokens, partial(between, inputs, ways["kernel"], exact)
        work = Work(tokens * moved * self.dtype.itemsize, tokens * flops)
        return Case(name, fields, inputs, ways, error, max(1, roundings / 2) * ROUNDED[self.dtype], work)

    def _norm(self, size: int) -> Any:
        norm = Qwen3RMSNorm(size).to(self.device, self.dtype).requires_grad_(False)
        norm.weight.normal_(1.0, 0.2, generator=torch.Generator(self.device).manual_seed(size))
        return norm

    def _sum(self) -> Case:
        size = self.shape.hidden_size
        norm = self._norm(size)

        def exact(hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
            total = hidden.double() + added.double()
            return total, normed_exactly(total.to(self.dtype).double(), norm)

        ways: dict[str, Way] = {
            "kernel": lambda hidden, added: sum_and_norm(hidden, added, norm, KERNEL),
            "torch": lambda hidden, added: sum_and_norm_ref(hidden, added, norm),
        }
        return self._case("sum_and_norm", (size, size), ways, exact, 4 * size, 5 * size, 2)

    def _rotated(self) -> Case:
        shape, dim = self.shape, self.shape.head_dim
        attention = SimpleNamespace(head_dim=dim, layer_idx=0, q_norm=self._norm(dim), k_norm=self._norm(dim))
        cache = BlockCache(self.batch, shape.num_key_value_heads, dim, [self.device], 0, self.tokens, self.dtype)
        cache.target_scratch(self.tokens, 0)
        (angles,) = self.numbers(0, dim // 2)
        angles = torch.cat([angles, angles], -1)
        rotary = angles.cos(), angles.sin()

        def exact(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
            query, key, value = (x.double().unflatten(-1, (-1, dim)).transpose(1, 2) for x in (query, key, value))
            query, key = normed_exactly(query, attention.q_norm), normed_exactly(key, attention.k_norm)
            cos, sin = (x.double()[:, None] for x in rotary)
            turned = [x * cos + torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1) * sin for x in (query, key)]
            return *turned, value

        ways: dict[str, Way] = {
            "kernel": lambda q, k, v: (rotated(attention, q, k, v, rotary, cache, KERNEL), *cache.written(0)),
            "torch": lambda q, k, v: (rotated_ref(attention, q, k, v, rotary, cache), *cache.written(0)),
        }
        widths = tuple(dim * heads for heads in (shape.num_attention_heads, *2 * [shape.num_key_value_heads]))
        return self._case("rotated", widths, ways, exact, 2 * sum(widths) + 2 * dim, 7 * (widths[0] + widths[1]), 4)

    def _gated(self) -> Case:
        size = self.shape.intermediate_size
        ways: dict[str, Way] = {
            "kernel": lambda gate, up: gated(gate, up, _SILU, KERNEL),
            "torch": lambda gate, up: _SILU(gate) * up,
        }
        return self._case("gated", (size, size), ways, lambda g, u: _SILU(g.double()) * u.double(), 3 * size, 5 * size, 2)
