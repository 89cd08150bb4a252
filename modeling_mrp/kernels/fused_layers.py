"""What lies between the matrix products of a Qwen3 layer in a round, fused: a Triton kernel each, and its PyTorch twin.

A layer called module by module launches about seventy operations, nearly all of them on a few thousand numbers: on a GPU each
takes longer to start than to run, also inside a CUDA graph. Here are three of the few that are left (`networks/layers.py`): a
sum and its norm (twice); queries and keys under norm and rotation, with keys and values put into the cache. Casts are those of
transformers' modules: what these round to the model's dtype is rounded here.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from .dispatch import LAUNCH, Kernel, tl, triton
from .noise import scattered

_HEADS = 8  # heads, of one token or more, that a program of `_rotate` takes


def sum_and_norm(hidden: Tensor, added: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """`hidden + added`, and that under a `Qwen3RMSNorm`, in one launch.

    Args:
        hidden: [..., hidden_size].
        added: The same shape; None: nothing is added.
        norm: The norm.

    Returns:
        Both, each [..., hidden_size].
    """
    hidden, size = hidden.contiguous(), hidden.shape[-1]
    normed = torch.empty_like(hidden)
    total = hidden if added is None else torch.empty_like(hidden)
    if rows := hidden.numel() // size:
        _sum_and_norm[(rows,)](
            *(hidden, None if added is None else added.contiguous(), norm.weight, total, normed, size, norm.variance_epsilon),
            TILE=triton.next_power_of_2(size),
            **LAUNCH | {"num_warps": 4 if size <= 2048 else 8},
        )
    return total, normed


def sum_and_norm_ref(hidden: Tensor, added: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """`sum_and_norm` in PyTorch."""
    total = hidden if added is None else hidden + added
    return total, norm(total)


def rotated(
    projected: Tensor | list[Tensor], norms: tuple[Any, Any], rotary: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Put queries and keys under their norms, rotate them, and write keys and values to the cache, in one launch.

    Args:
        projected: [rows, tokens, (heads + 2 * kv_heads) * head_dim]: queries, keys and values of each token; or these three.
        norms: `Qwen3RMSNorm`s of queries and keys, of one epsilon.
        rotary: cos and sin, [rows, tokens, head_dim] each.
        target: Where keys and values go, [rows, kv_heads, tokens, head_dim] each.

    Returns:
        The queries, [rows, heads, tokens, head_dim], and the target.
    """
    projected = projected.contiguous() if isinstance(projected, Tensor) else torch.cat(projected, -1)
    (cos, sin), (keys, values) = (each.contiguous() for each in rotary), target
    (rows, tokens, size), (kv_heads, head_dim) = projected.shape, keys.shape[1::2]
    heads = size // head_dim - 2 * kv_heads
    queries = projected.new_empty(rows, tokens, heads, head_dim)
    _rotate[(triton.cdiv(rows * tokens * size // head_dim, _HEADS),)](
        *(projected, norms[0].weight, norms[1].weight, cos, sin, queries, keys, values),
        *(*keys.stride()[:3], rows, tokens, heads, kv_heads, norms[0].variance_epsilon),
        HEAD_DIM=head_dim,
        PADDED=triton.next_power_of_2(head_dim),
        HEADS=_HEADS,
        **LAUNCH,
    )
    return queries.transpose(1, 2), keys, values


def rotated_ref(
    projected: Tensor | list[Tensor], norms: tuple[Any, Any], rotary: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """`rotated` in PyTorch."""
    keys, values = target
    size, head_dim = keys.shape[1] * keys.shape[3], keys.shape[3]
    if isinstance(projected, Tensor):
        projected = list(projected.split([projected.shape[-1] - 2 * size, size, size], -1))
    query, key, value = (part.unflatten(-1, (-1, head_dim)) for part in projected)
    query, key = apply_rotary_pos_emb(norms[0](query).transpose(1, 2), norms[1](key).transpose(1, 2), *rotary)
    keys.copy_(key)
    values.copy_(value.transpose(1, 2))
    return query, keys, values


def _sample_norm(width: int, like: Tensor, seed: int = 0) -> Qwen3RMSNorm:
    norm = Qwen3RMSNorm(width).to(like.device, like.dtype)
    norm.weight.copy_(1 + scattered(width, like=like, seed=seed) / 4)
    return norm


def _sample_tokens(width: int, like: Tensor, seed: int = 0) -> Tensor:
    """Two rows of three tokens: a large one, one of usual size, and one that is not large beside a norm's epsilon."""
    return scattered(2, 3, width, like=like, seed=seed) * torch.tensor([9.0, 1.0, 1e-3], device=like.device)[:, None].to(like)


def _sum_samples(hidden: Tensor, *_: Tensor) -> Iterator[tuple[Any, ...]]:
    """Tokens as wide as the model's."""
    width = hidden.shape[-1]
    yield _sample_tokens(width, hidden), _sample_tokens(width, hidden, 1), _sample_norm(width, hidden)


def _rotated_samples(*given: Tensor) -> Iterator[tuple[Any, ...]]:
    """Tokens with all heads, and a target where nothing is written yet."""
    *parts, _, _, cos, _, keys, _ = given
    width, dim, kv_heads = sum(part.shape[-1] for part in parts), cos.shape[-1], keys.shape[1]
    angles = 3 * scattered(2, 3, dim // 2, like=cos).repeat(1, 1, 2)
    target = cos.new_full((2, 2, kv_heads, 3, dim), torch.nan)
    norms = _sample_norm(dim, cos), _sample_norm(dim, cos, 1)
    yield _sample_tokens(width, cos, 1), norms, (angles.cos(), angles.sin()), target.unbind(0)


SUM_AND_NORM = Kernel("sum_and_norm", sum_and_norm, sum_and_norm_ref, _sum_samples)
ROTATED = Kernel("rotated", rotated, rotated_ref, _rotated_samples)


if triton is not None:

    @triton.jit
    def _sum_and_norm(hidden, added, scale, total, normed, size, epsilon, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        column = tl.arange(0, TILE)
        inside = column < size
        place = tl.program_id(0).to(tl.int64) * size + column
        kind = normed.dtype.element_ty
        x = tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32)
        if added is not None:
            x = (x + tl.load(added + place, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
            tl.store(total + place, x.to(kind), mask=inside)
        unit = x * tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)
        weight = tl.load(scale + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed + place, (weight * unit.to(kind).to(tl.float32)).to(kind), mask=inside)

    @triton.jit
    def _normed(x, size, is_query, query_scale, key_scale, dim, there, kind: tl.constexpr):  # type: ignore[no-untyped-def]
        """x * size under the scale of the queries or of the keys, at places `dim` of a head."""
        of_queries = tl.load(query_scale + dim, mask=there, other=0.0).to(tl.float32)[None, :]
        of_keys = tl.load(key_scale + dim, mask=there, other=0.0).to(tl.float32)[None, :]
        return (tl.where(is_query, of_queries, of_keys) * (x * size).to(kind).to(tl.float32)).to(kind).to(tl.float32)

    @triton.jit(do_not_specialize=["rows", "tokens"])
    def _rotate(  # type: ignore[no-untyped-def]
        projected,
        query_scale,
        key_scale,
        cos,
        sin,
        queries,
        keys,
        values,
        cache_row,
        cache_head,
        cache_token,
        rows,
        tokens,
        heads,
        kv_heads,
        epsilon,
        HEAD_DIM: tl.constexpr,
        PADDED: tl.constexpr,
        HEADS: tl.constexpr,
    ):
        """Program (tile of the heads of all tokens: each token's queries, then its keys, then its values)."""
        every = heads + 2 * kv_heads
        at = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
        token, head = at // every, at % every
        dim = tl.arange(0, PADDED)
        first, there = dim < HEAD_DIM // 2, dim < HEAD_DIM
        partner = tl.where(first, dim + HEAD_DIM // 2, dim - HEAD_DIM // 2)
        inside = (token < rows * tokens)[:, None] & there[None, :]
        is_query, is_value = (head < heads)[:, None], (head >= heads + kv_heads)[:, None]
        kind: tl.constexpr = queries.dtype.element_ty
        source = projected + at.to(tl.int64)[:, None] * HEAD_DIM
        value = tl.load(source + dim[None, :], mask=inside, other=0.0)
        own = value.to(tl.float32)
        other = tl.load(source + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        size = tl.rsqrt(tl.sum(own * own, 1) / HEAD_DIM + epsilon)[:, None]
        own = _normed(own, size, is_query, query_scale, key_scale, dim, there, kind)
        other = _normed(other, size, is_query, query_scale, key_scale, partner, there, kind)
        other = tl.where(first[None, :], -other, other)
        angle = token[:, None] * HEAD_DIM + dim[None, :]
        along = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        across = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        turned = ((own * along).to(kind).to(tl.float32) + (other * across).to(kind).to(tl.float32)).to(kind)
        tl.store(queries + ((token * heads + head) * HEAD_DIM)[:, None] + dim[None, :], turned, mask=inside & is_query)
        row = (token // tokens).to(tl.int64)  # offsets into the cache may not fit 32 bits
        slot = row * cache_row + (token % tokens).to(tl.int64) * cache_token + (head - heads) % kv_heads * cache_head
        slot = slot[:, None] + dim[None, :]
        tl.store(keys + slot, turned, mask=inside & ~is_query & ~is_value)
        tl.store(values + slot, value, mask=inside & is_value)
