"""Qwen3 layers in a round of decoding, with what lies between their matrix products fused.

A layer called module by module launches about seventy operations, nearly all of them on a few thousand numbers: on a GPU each
takes longer to start than to run, also inside a CUDA graph. Here it is its seven matrix products, the round's attention, and
four launches more: a sum and its norm (twice); queries and keys under norm and rotation, with keys and values put into the
cache; and the gate of the MLP. Casts are those of transformers' modules: what these round to the model's dtype is rounded here.

Matrix products are made by calling the layers' own `nn.Linear`, or what stands there: LoRA, quantised weights.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.cache_utils import Cache
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3MLP,
    Qwen3RMSNorm,
    apply_rotary_pos_emb,
)

from ..networks.cache import BlockCache
from .dispatch import LARGEST_ROW, MULTIPLY_ADD, Dispatch, ceil_div, more_than, power_of_two, tl, triton
from .round_attention import RoundMask, attend

_GATED = 1024  # numbers that a program of `_gate` takes
_HEADS = 8  # heads, of one token or more, that a program of `_rotate` takes


def run_layers(owner: Any, hidden: Tensor, mask: Any, rotary: tuple[Tensor, Tensor], cache: Cache | None) -> Tensor:
    """Run all layers of a module and the norm behind them, `fused` or one by one.

    Args:
        owner: Has decoder layers, `layers`, and the norm, `norm`.
        hidden: [rows, tokens, hidden_size], what the first layer reads.
        mask: As `Qwen3DecoderLayer` takes it, [rows, 1, tokens, keys]; in a round a `RoundMask`.
        rotary: cos and sin, [rows, tokens, head_dim] each.
        cache: Gets keys and values, or None.

    Returns:
        [rows, tokens, hidden_size].

    Raises:
        ValueError: if kernels are forced and cannot be used here.
        RuntimeError: if a forced kernel fails.
    """
    if (walk := fused(owner, len(owner.layers), mask, cache)) is not None:
        return walk(hidden, rotary)
    for layer in owner.layers:
        hidden = layer(
            hidden, attention_mask=mask, position_embeddings=rotary, past_key_values=cache, use_cache=cache is not None
        )
    return owner.norm(hidden)


def fused(
    owner: Any, depth: int, mask: object, cache: object, kind: type[nn.Module] | None = None
) -> Callable[[Tensor, tuple[Tensor, Tensor]], Tensor] | None:
    """Find what stands in a round for calling layers and the norm behind them; None: they are to be called.

    They are called outside of rounds, where kernels are off or cannot be used, where something of them was compiled (then torch
    fuses), and where a module does more than its class does, hooks for instance.

    Args:
        owner: Has decoder layers, `layers`, and the norm, `norm`.
        depth: So many of its first layers are meant.
        mask: In a round a `RoundMask`, whose dispatch decides.
        cache: In a round the `BlockCache` that gets keys and values, at its target.
        kind: What the owner has to be if it is not called either; None: this is asked for by its own forward.

    Returns:
        A function of what the first layer reads, [rows, tokens, hidden_size], and of cos and sin, [rows, tokens, head_dim]
        each; it gives [rows, tokens, hidden_size], and raises a RuntimeError if a forced kernel fails.

    Raises:
        ValueError: if kernels are forced and cannot be used here.
    """
    if not isinstance(mask, RoundMask) or not isinstance(cache, BlockCache) or mask.dispatch.forced is False:
        return None
    if owner._compiled_call_impl is not None:
        return None
    layers = list(owner.layers)[:depth]
    obstacle = None if kind is None else more_than(owner, kind)
    for module, expected in _parts(owner, layers) if obstacle is None else ():
        if module._compiled_call_impl is not None:
            return None
        if (obstacle := more_than(module, expected)) is not None:
            break
    walk = partial(_walk, layers, owner.norm, mask, cache)
    return mask.dispatch.run("fused_layers", lambda: walk, lambda: None, next(owner.parameters()), obstacle=obstacle)


def _parts(owner: Any, layers: Sequence[Any]) -> Iterator[tuple[Any, type[nn.Module]]]:
    """The modules that are not called, each with what it has to be; to be looked at one by one, since what is not as
    expected need not have the parts that would come next."""
    yield owner.norm, Qwen3RMSNorm
    for layer in layers:
        yield layer, Qwen3DecoderLayer
        yield layer.self_attn, Qwen3Attention
        yield layer.mlp, Qwen3MLP
        yield layer.mlp.act_fn, nn.SiLU if isinstance(layer.mlp.act_fn, nn.SiLU) else SiLUActivation
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn.q_norm, layer.self_attn.k_norm):
            yield norm, Qwen3RMSNorm


def _walk(
    layers: Sequence[Any], norm: Any, mask: RoundMask, cache: BlockCache, hidden: Tensor, rotary: tuple[Tensor, Tensor]
) -> Tensor:
    """The function that `fused` gives."""
    dispatch, added = mask.dispatch, None
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        hidden, normed = sum_and_norm(hidden, added, layer.input_layernorm, dispatch)
        projected = attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed)
        query = rotated(attention, *projected, rotary, cache, dispatch)
        seen = attend(query, *cache.read(attention.layer_idx), mask, attention.scaling)
        hidden, normed = sum_and_norm(hidden, attention.o_proj(seen.flatten(2)), layer.post_attention_layernorm, dispatch)
        added = mlp.down_proj(gated(mlp.gate_proj(normed), mlp.up_proj(normed), mlp.act_fn, dispatch))
    return sum_and_norm(hidden, added, norm, dispatch)[1]


def _tile(everything: int, usual: int) -> int:
    """Choose how much of `everything` a program takes: the usual on a GPU; all of it where programs run one after the other."""
    return power_of_two(everything) if triton.knobs.runtime.interpret else usual


# --------------------------------------------------------------------------------------------- a sum and its norm


def sum_and_norm(hidden: Tensor, added: Tensor | None, norm: Any, dispatch: Dispatch) -> tuple[Tensor, Tensor]:
    """`hidden + added`, and that under a `Qwen3RMSNorm`.

    Floor: 4 * rows * hidden_size numbers read and written: microseconds, less than its launch.

    Args:
        hidden: [..., hidden_size].
        added: The same shape; None: nothing is added.
        norm: The norm.
        dispatch: Kernel or PyTorch.

    Returns:
        Both, each [..., hidden_size].

    Raises:
        ValueError: if kernels are forced and cannot be used on these tensors, of several dtypes for instance.
        RuntimeError: if kernels are forced and this one fails.
    """
    tensors = (hidden, norm.weight) if added is None else (hidden, norm.weight, added)
    return dispatch.run(
        "sum_and_norm",
        lambda: _sum_and_norm_kernel(hidden, added, norm.weight, norm.variance_epsilon),
        lambda: sum_and_norm_ref(hidden, added, norm),
        *tensors,
        obstacle=_one_dtype(*tensors) or _too_wide(hidden),
    )


def sum_and_norm_ref(hidden: Tensor, added: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """`sum_and_norm` in PyTorch."""
    total = hidden if added is None else hidden + added
    return total, norm(total)


def _one_dtype(*tensors: Tensor) -> str | None:
    if len({tensor.dtype for tensor in tensors}) == 1:
        return None
    return f"dtypes {', '.join(sorted({str(tensor.dtype)[6:] for tensor in tensors}))} meet: load the model in one"


def _too_wide(hidden: Tensor) -> str | None:
    if hidden.shape[-1] <= LARGEST_ROW:
        return None
    return f"hidden_size is {hidden.shape[-1]}, more than {LARGEST_ROW}: run without this kernel"


def _sum_and_norm_kernel(hidden: Tensor, added: Tensor | None, scale: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    hidden = hidden.contiguous()
    size = hidden.shape[-1]
    rows = hidden.numel() // size
    normed = torch.empty_like(hidden)
    total = hidden if added is None else torch.empty_like(hidden)
    if rows:
        tile = _tile(rows, 1)
        _sum_and_norm[(ceil_div(rows, tile),)](
            *(hidden, hidden if added is None else added.contiguous(), scale, total, normed, rows, size, epsilon),
            ADDS=added is not None,
            ROWS=tile,
            TILE=power_of_two(size),
            num_warps=4 if size <= 2048 else 8,
            **MULTIPLY_ADD,
        )
    return total, normed


# --------------------------------------------------------------------------------------------- queries, keys and values


def rotated(
    attention: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: tuple[Tensor, Tensor],
    cache: BlockCache,
    dispatch: Dispatch,
) -> Tensor:
    """Queries and keys under their norms and rotated; keys and values go to the cache's target.

    Floor: each number of the three read and written once: microseconds, less than its launch.

    Args:
        attention: A `Qwen3Attention`, for its norms, its layer and the size of its heads.
        query: [rows, tokens, heads * head_dim], as projected.
        key, value: [rows, tokens, kv_heads * head_dim].
        rotary: cos and sin, [rows, tokens, head_dim] each.
        cache: Where keys and values go.
        dispatch: Kernel or PyTorch.

    Returns:
        [rows, heads, tokens, head_dim], the queries.

    Raises:
        ValueError, RuntimeError: as `sum_and_norm` does.
    """
    keys, values = cache.written(attention.layer_idx)
    tensors = (query, key, value, *rotary, attention.q_norm.weight, attention.k_norm.weight, keys, values)
    return dispatch.run(
        "rotated",
        lambda: _rotated_kernel(attention, query, key, value, rotary, keys, values),
        lambda: rotated_ref(attention, query, key, value, rotary, cache),
        *tensors,
        obstacle=_one_dtype(*tensors),
    )


def rotated_ref(
    attention: Any, query: Tensor, key: Tensor, value: Tensor, rotary: tuple[Tensor, Tensor], cache: BlockCache
) -> Tensor:
    """`rotated` in PyTorch."""
    query, key, value = (each.unflatten(-1, (-1, attention.head_dim)) for each in (query, key, value))
    query, key = attention.q_norm(query).transpose(1, 2), attention.k_norm(key).transpose(1, 2)
    query, key = apply_rotary_pos_emb(query, key, *rotary)
    cache.store(key, value.transpose(1, 2), attention.layer_idx)
    return query


def _rotated_kernel(
    attention: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotary: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    query, key, value, cos, sin = (each.contiguous() for each in (query, key, value, *rotary))
    rows, tokens, _ = query.shape
    head_dim = attention.head_dim
    heads, kv_heads = query.shape[2] // head_dim, key.shape[2] // head_dim
    turned = query.new_empty(rows, heads, tokens, head_dim)
    if rows * tokens:
        tile = _tile(rows * tokens * kv_heads, _HEADS)
        tiles = ceil_div(rows * tokens * heads, tile), ceil_div(rows * tokens * kv_heads, tile)
        _rotate[(tiles[0] + 2 * tiles[1],)](
            *(query, key, value, attention.q_norm.weight, attention.k_norm.weight, cos, sin, turned, keys, values),
            *(*keys.stride()[:3], rows, tokens, heads, kv_heads, *tiles),
            *(attention.q_norm.variance_epsilon, attention.k_norm.variance_epsilon),
            HEAD_DIM=head_dim,
            PADDED=power_of_two(head_dim),
            HEADS=tile,
            num_warps=4,
            **MULTIPLY_ADD,
        )
    return turned


# --------------------------------------------------------------------------------------------- the gate of the MLP


def gated(gate: Tensor, up: Tensor, act_fn: nn.Module, dispatch: Dispatch) -> Tensor:
    """`act_fn(gate) * up`, where `act_fn` is SiLU: of any shape, which both have. Raises as `sum_and_norm` does.

    Floor: 3 * numel numbers read and written: microseconds, less than its launch.
    """
    return dispatch.run(
        "gated", lambda: _gated_kernel(gate, up), lambda: act_fn(gate) * up, gate, up, obstacle=_one_dtype(gate, up)
    )


def _gated_kernel(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if numbers := gate.numel():
        tile = _tile(numbers, _GATED)
        _gate[(ceil_div(numbers, tile),)](gate, up, out, numbers, TILE=tile, num_warps=4, **MULTIPLY_ADD)
    return out


if triton is not None:

    @triton.jit(do_not_specialize=["rows"])
    def _sum_and_norm(  # type: ignore[no-untyped-def]
        hidden,
        added,
        scale,
        total,
        normed,
        rows,
        size,
        epsilon,
        ADDS: tl.constexpr,
        ROWS: tl.constexpr,
        TILE: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, TILE)
        there = column < size
        inside = (row < rows)[:, None] & there[None, :]
        place = row[:, None] * size + column[None, :]
        kind = normed.dtype.element_ty
        x = tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32)
        if ADDS:
            x = (x + tl.load(added + place, mask=inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
            tl.store(total + place, x.to(kind), mask=inside)
        unit = x * tl.rsqrt(tl.sum(x * x, 1) / size + epsilon)[:, None]
        weight = tl.load(scale + column, mask=there, other=0.0).to(tl.float32)
        tl.store(normed + place, (weight[None, :] * unit.to(kind).to(tl.float32)).to(kind), mask=inside)

    @triton.jit
    def _turn(  # type: ignore[no-untyped-def]
        source, scale, epsilon, cos, sin, target, at, token, inside, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr
    ):
        """Heads `at` of a source under their norm and rotated by half of a head; offsets of where they go are in `target`."""
        dim = tl.arange(0, PADDED)
        first = dim < HEAD_DIM // 2
        partner = tl.where(first, dim + HEAD_DIM // 2, dim - HEAD_DIM // 2)
        there = dim < HEAD_DIM
        inside = inside[:, None] & there[None, :]
        kind = scale.dtype.element_ty
        source += at.to(tl.int64)[:, None] * HEAD_DIM
        own = tl.load(source + dim[None, :], mask=inside, other=0.0).to(tl.float32)
        other = tl.load(source + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        size = tl.rsqrt(tl.sum(own * own, 1) / HEAD_DIM + epsilon)[:, None]
        own_scale = tl.load(scale + dim, mask=there, other=0.0).to(tl.float32)
        other_scale = tl.load(scale + partner, mask=there, other=0.0).to(tl.float32)
        own = (own_scale[None, :] * (own * size).to(kind).to(tl.float32)).to(kind).to(tl.float32)
        other = (other_scale[None, :] * (other * size).to(kind).to(tl.float32)).to(kind).to(tl.float32)
        other = tl.where(first[None, :], -other, other)
        along = tl.load(cos + token[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0).to(tl.float32)
        across = tl.load(sin + token[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0).to(tl.float32)
        turned = (own * along).to(kind).to(tl.float32) + (other * across).to(kind).to(tl.float32)
        tl.store(target[:, None] + dim[None, :], turned.to(kind), mask=inside)

    @triton.jit(do_not_specialize=["rows", "tokens", "query_tiles", "kv_tiles"])
    def _rotate(  # type: ignore[no-untyped-def]
        query,
        key,
        value,
        query_scale,
        key_scale,
        cos,
        sin,
        turned,
        keys,
        values,
        cache_row,
        cache_head,
        cache_token,
        rows,
        tokens,
        heads,
        kv_heads,
        query_tiles,
        kv_tiles,
        query_epsilon,
        key_epsilon,
        HEAD_DIM: tl.constexpr,
        PADDED: tl.constexpr,
        HEADS: tl.constexpr,
    ):
        """Program (tile of the heads of all tokens): the queries' tiles, then the keys', then the values'."""
        tile = tl.program_id(0)
        within = tl.arange(0, HEADS)
        if tile < query_tiles:
            at = tile * HEADS + within
            token = at // heads
            inside = token < rows * tokens
            head = (token // tokens * heads + at % heads) * tokens + token % tokens
            target = turned + head.to(tl.int64) * HEAD_DIM
            _turn(query, query_scale, query_epsilon, cos, sin, target, at, token, inside, HEAD_DIM, PADDED)
        else:
            own = tl.where(tile < query_tiles + kv_tiles, tile - query_tiles, tile - query_tiles - kv_tiles)
            at = own * HEADS + within
            token = at // kv_heads
            inside = token < rows * tokens
            row = (token // tokens).to(tl.int64)  # offsets into the cache may not fit 32 bits
            slot = row * cache_row + at % kv_heads * cache_head + token % tokens * cache_token
            if tile < query_tiles + kv_tiles:
                _turn(key, key_scale, key_epsilon, cos, sin, keys + slot, at, token, inside, HEAD_DIM, PADDED)
            else:
                dim = tl.arange(0, PADDED)
                real = inside[:, None] & (dim < HEAD_DIM)[None, :]
                copied = tl.load(value + at.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :], mask=real)
                tl.store(values + slot[:, None] + dim[None, :], copied, mask=real)

    @triton.jit  # specialised on whether `numbers` is a multiple of 16: else it would load one at a time
    def _gate(gate, up, out, numbers, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        inside = at < numbers
        kind = out.dtype.element_ty
        x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        opened = (x / (1.0 + tl.exp(-x))).to(kind).to(tl.float32)
        tl.store(out + at, (opened * tl.load(up + at, mask=inside, other=0.0).to(tl.float32)).to(kind), mask=inside)


__all__ = ["fused", "gated", "rotated", "rotated_ref", "run_layers", "sum_and_norm", "sum_and_norm_ref"]
