"""Qwen3 layers in a round of decoding, with what lies between their matrix products fused.

A layer called module by module launches about seventy operations, nearly all of them on a few thousand numbers: on a GPU each
takes longer to start than to run, also inside a CUDA graph. Here it is four matrix products, the round's attention, and five
launches more: a sum and its norm (twice); queries and keys under norm and rotation, with keys and values put into the cache;
and the MLP's gate. Casts are those of transformers' modules: what these round to the model's dtype is rounded here.

Products with the same input are one where `pack` has put their weights together; else each `nn.Linear`, or what stands there
(LoRA, quantised weights), is called.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3MLP,
    Qwen3RMSNorm,
    apply_rotary_pos_emb,
)

from ..networks.cache import BlockCache
from .dispatch import LAUNCH, Dispatch, more_than, sample_of, tl, triton
from .noise import scattered
from .round_attention import RoundMask, attend

_HEADS = 8  # heads, of one token or more, that a program of `_rotate` takes


def fused(
    owner: Any, layers: Sequence[Any], mask: object, cache: object, kind: type[nn.Module] | None = None
) -> Callable[[Tensor, tuple[Tensor, Tensor]], Tensor] | None:
    """Find what stands in a round for calling layers and the norm behind them; None: they are to be called.

    They are called outside of rounds, where something of them was compiled (then torch fuses), and where a module does more
    than its class does, hooks for instance. What was found counts for as long as the mask's `plans` do: for a decode.

    Args:
        owner, layers: The module of the norm, `norm`, and its decoder layers.
        mask: In a round a `RoundMask`, whose dispatch decides between kernels and their twins.
        cache: In a round the `BlockCache` that gets keys and values, at its target.
        kind: What the owner has to be if it is not called either; None: this is asked for by its own forward.

    Returns:
        A function of what the first layer reads, [rows, tokens, hidden_size], and of cos and sin, [rows, tokens, head_dim]
        each; it gives [rows, tokens, hidden_size], and raises a RuntimeError if a forced kernel fails.

    Raises:
        ValueError: if kernels are forced and cannot be used here.
    """
    if not isinstance(mask, RoundMask) or not isinstance(cache, BlockCache) or owner._compiled_call_impl is not None:
        return None
    if owner not in mask.plans:
        mask.plans[owner] = _plan(owner, layers, mask.dispatch, kind)
    plan = mask.plans[owner]
    return None if plan is None else partial(_walk, plan, owner.norm, mask, cache)


def _plan(owner: Any, layers: Sequence[Any], dispatch: Dispatch, kind: type[nn.Module] | None) -> list[Any] | None:
    """Pair each layer with its packed weights (see `packed`); None if the layers have to run as modules."""
    obstacle = None
    for module, expected in _parts(owner, layers, kind):
        if module._compiled_call_impl is not None:
            return None
        if (obstacle := more_than(module, expected)) is not None:
            break
    usable = obstacle is None
    if dispatch.forced is not False:
        usable = dispatch.run("fused_layers", lambda: True, lambda: False, next(owner.parameters()), obstacle=obstacle)
    return [(layer, packed(_of_attention(layer)), packed(_of_mlp(layer))) for layer in layers] if usable else None


def _parts(owner: Any, layers: Sequence[Any], kind: type[nn.Module] | None) -> Iterator[tuple[Any, type[nn.Module]]]:
    """The modules that are not called, each with what it has to be: what is not need not have the parts that come next."""
    if kind is not None:
        yield owner, kind
    yield owner.norm, Qwen3RMSNorm
    for layer in layers:
        yield layer, Qwen3DecoderLayer
        yield layer.self_attn, Qwen3Attention
        yield layer.mlp, Qwen3MLP
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn.q_norm, layer.self_attn.k_norm):
            yield norm, Qwen3RMSNorm


def _walk(
    plan: Sequence[Any], norm: Any, mask: RoundMask, cache: BlockCache, hidden: Tensor, rotary: tuple[Tensor, Tensor]
) -> Tensor:
    """The function that `fused` gives."""
    dispatch, added = mask.dispatch, None
    for layer, attention_weight, mlp_weight in plan:
        hidden, normed = sum_and_norm(hidden, added, layer.input_layernorm, dispatch)
        added = _attended(layer, normed, attention_weight, rotary, mask, cache)
        hidden, normed = sum_and_norm(hidden, added, layer.post_attention_layernorm, dispatch)
        added = _gated(layer, normed, mlp_weight)
    return sum_and_norm(hidden, added, norm, dispatch)[1]


def _attended(
    layer: Any, normed: Tensor, weight: Tensor | None, rotary: tuple[Tensor, Tensor], mask: RoundMask, cache: BlockCache
) -> Tensor:
    attention = layer.self_attn
    query = rotated(attention, products(normed, _of_attention(layer), weight), rotary, cache, mask.dispatch)
    return attention.o_proj(attend(query, *cache.read(attention.layer_idx), mask, attention.scaling).flatten(2))


def _gated(layer: Any, normed: Tensor, weight: Tensor | None) -> Tensor:
    both = products(normed, _of_mlp(layer), weight)
    gate, up = both.chunk(2, -1) if isinstance(both, Tensor) else both
    return layer.mlp.down_proj(layer.mlp.act_fn(gate) * up)


def _of_attention(layer: Any) -> list[Any]:
    return [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]


def _of_mlp(layer: Any) -> list[Any]:
    return [layer.mlp.gate_proj, layer.mlp.up_proj]


@torch.inference_mode(False)
@torch.no_grad()
def pack(model: nn.Module) -> None:
    """Lay weights that are multiplied with the same input behind one another in memory, for `products`.

    They stay the parameters that they are, now parts of a larger storage: nothing is held twice, and what is loaded, saved,
    trained or cast goes on as before. Left as they are: layers that are more than a plain `nn.Linear` (adapters, quantised
    weights, hooks), that lie elsewhere than their neighbours, or were compiled.
    """
    moved = None
    for layer in model.modules():
        if not isinstance(layer, Qwen3DecoderLayer) or layer._compiled_call_impl is not None:
            continue
        for linears in (_of_attention(layer), _of_mlp(layer)):
            weights = [linear.weight.data for linear in linears if _plain(linear)]
            if len(weights) == len(linears) and packed(linears) is None and len({w.device for w in weights}) == 1:
                moved = torch.cat(weights)
                for linear, part in zip(linears, moved.split([len(w) for w in weights]), strict=True):
                    linear.weight.data = part
    if moved is not None and moved.is_cuda:
        torch.cuda.empty_cache()  # where the weights lay, in pieces that little else fits


def packed(linears: Sequence[Any]) -> Tensor | None:
    """View weights of linear layers as one matrix [sum of out_features, in_features]; None if they do not lie side by side."""
    if not all(map(_plain, linears)):
        return None
    first = linears[0].weight
    storage, place = first.untyped_storage().data_ptr(), first.data_ptr()
    for linear in linears:
        if linear.weight.data_ptr() != place or linear.weight.untyped_storage().data_ptr() != storage:
            return None
        place += linear.weight.nbytes
    return first.as_strided((sum(len(linear.weight) for linear in linears), first.shape[1]), first.stride())


def _plain(linear: Any) -> bool:
    """Tell if a module is a plain linear layer: no bias, no hooks or subclass, and a contiguous weight."""
    return (
        type(linear) is nn.Linear
        and linear.bias is None
        and type(linear.weight) is nn.Parameter
        and linear.weight.is_contiguous()
        and not linear.weight.is_meta
        and more_than(linear, nn.Linear) is None
    )


def products(hidden: Tensor, linears: Sequence[Any], weight: Tensor | None) -> Tensor | list[Tensor]:
    """Compute the results of linear layers, [..., out_features] each; by their `packed` weight, if any, side by side in one."""
    return [linear(hidden) for linear in linears] if weight is None else F.linear(hidden, weight)


def sum_and_norm(hidden: Tensor, added: Tensor | None, norm: Any, dispatch: Dispatch) -> tuple[Tensor, Tensor]:
    """`hidden + added`, and that under a `Qwen3RMSNorm`.

    Args:
        hidden: [..., hidden_size].
        added: The same shape; None: nothing is added.
        norm: The norm.
        dispatch: Kernel or PyTorch.

    Returns:
        Both, each [..., hidden_size].
    """
    return dispatch.run(
        "sum_and_norm",
        lambda: _sum_and_norm_kernel(hidden, added, norm),
        lambda: sum_and_norm_ref(hidden, added, norm),
        *(hidden, norm.weight, hidden if added is None else added),
    )


def sum_and_norm_ref(hidden: Tensor, added: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """`sum_and_norm` in PyTorch."""
    total = hidden if added is None else hidden + added
    return total, norm(total)


def _sum_and_norm_kernel(hidden: Tensor, added: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
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


def rotated(
    attention: Any,
    projected: Tensor | list[Tensor],
    rotary: tuple[Tensor, Tensor],
    cache: BlockCache,
    dispatch: Dispatch,
) -> Tensor:
    """Queries and keys under their norms and rotated; keys and values go to the cache's target.

    Args:
        attention: A `Qwen3Attention`, for its norms, its layer and the size of its heads.
        projected: [rows, tokens, (heads + 2 * kv_heads) * head_dim]: queries, keys and values of each token; or these three.
        rotary: cos and sin, [rows, tokens, head_dim] each.
        cache, dispatch: Where keys and values go; kernel or PyTorch.

    Returns:
        [rows, heads, tokens, head_dim], the queries.
    """
    keys, values = cache.written(attention.layer_idx)
    parts = [projected] if isinstance(projected, Tensor) else projected
    return dispatch.run(
        "rotated",
        lambda: _rotated_kernel(attention, torch.cat(parts, -1) if len(parts) > 1 else parts[0], rotary, keys, values),
        lambda: rotated_ref(attention, projected, rotary, cache),
        *(*parts, *rotary, attention.q_norm.weight, attention.k_norm.weight, keys, values),
    )


def rotated_ref(attention: Any, projected: Tensor | list[Tensor], rotary: tuple[Tensor, Tensor], cache: BlockCache) -> Tensor:
    """`rotated` in PyTorch."""
    if isinstance(projected, Tensor):
        size = cache.num_key_value_heads * attention.head_dim
        projected = list(projected.split([projected.shape[-1] - 2 * size, size, size], -1))
    query, key, value = (part.unflatten(-1, (-1, attention.head_dim)) for part in projected)
    query, key = attention.q_norm(query).transpose(1, 2), attention.k_norm(key).transpose(1, 2)
    query, key = apply_rotary_pos_emb(query, key, *rotary)
    cache.store(key, value.transpose(1, 2), attention.layer_idx)
    return query


def _rotated_kernel(attention: Any, projected: Tensor, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> Tensor:
    projected, cos, sin = (each.contiguous() for each in (projected, *rotary))
    (rows, tokens, size), head_dim, kv_heads = projected.shape, attention.head_dim, keys.shape[1]
    heads = size // head_dim - 2 * kv_heads
    queries = projected.new_empty(rows, tokens, heads, head_dim)
    _rotate[(triton.cdiv(rows * tokens * size // head_dim, _HEADS),)](
        *(projected, attention.q_norm.weight, attention.k_norm.weight, cos, sin, queries, keys, values),
        *(*keys.stride()[:3], rows, tokens, heads, kv_heads, attention.q_norm.variance_epsilon),
        HEAD_DIM=head_dim,
        PADDED=triton.next_power_of_2(head_dim),
        HEADS=_HEADS,
        **LAUNCH,
    )
    return queries.transpose(1, 2)


def _sample_norm(width: int, like: Tensor, seed: int = 0) -> Qwen3RMSNorm:
    norm = Qwen3RMSNorm(width).to(like.device, like.dtype)
    norm.weight.copy_(1 + scattered(width, like=like, seed=seed) / 4)
    return norm


def _sample_tokens(width: int, like: Tensor, seed: int = 0) -> Tensor:
    """Two rows of three tokens: a large one, one of usual size, and one that is not large beside a norm's epsilon."""
    return scattered(2, 3, width, like=like, seed=seed) * torch.tensor([9.0, 1.0, 1e-3], device=like.device)[:, None].to(like)


@sample_of("sum_and_norm")
def _sum_samples(hidden: Tensor, *_: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens as wide as the model's."""
    given, added = (_sample_tokens(hidden.shape[-1], hidden, seed) for seed in range(2))
    norm = _sample_norm(hidden.shape[-1], hidden)
    yield from zip(_sum_and_norm_kernel(given, added, norm), sum_and_norm_ref(given, added, norm), strict=True)


@sample_of("rotated")
def _rotated_samples(*given: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens with all heads: queries, and keys and values where the cache has them."""
    *parts, cos, _, _, _, keys, _ = given
    width, dim, kv_heads = sum(part.shape[-1] for part in parts), cos.shape[-1], keys.shape[1]
    norms = {"q_norm": _sample_norm(dim, cos), "k_norm": _sample_norm(dim, cos, 1)}
    attention = SimpleNamespace(head_dim=dim, layer_idx=0, **norms)
    angles = 3 * scattered(2, 3, dim // 2, like=cos).repeat(1, 1, 2)
    projected, rotary = _sample_tokens(width, cos, 1), (angles.cos(), angles.sin())
    cache = BlockCache(2, kv_heads, dim, [keys.device], 0, 3, keys.dtype)
    cache.target(0, 3)
    into = [torch.full_like(each, torch.nan) for each in cache.written(0)]
    query = _rotated_kernel(attention, projected, rotary, *into)
    yield query, rotated_ref(attention, projected, rotary, cache)
    yield from zip(into, cache.written(0), strict=True)


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
