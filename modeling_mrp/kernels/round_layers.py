"""The fused layers of a round: Triton kernels, each beside its PyTorch twin, for everything between
the matrix products.

A layer that is called module by module launches about seventy operations. Nearly all of them work
on a few thousand numbers, so on a GPU each takes longer to start than to run, even inside a CUDA
graph. `run_fused` makes only a few launches per layer. Five of them are kernels of this module: the
sum of hidden states and the norm of this sum (twice); the norm and rotation of queries and keys,
which also copies keys and values to the cache; attention; and the SiLU of the gate, multiplied by
the values that it gates. Casts are the same as in transformers' modules: whatever these round to
the model's dtype is rounded here, too.

In a round every row submits some states, each of which is one block. A query sees the committed
prefix of its row, the keys of its own state and, if its state has a parent, the keys of the parent.
Keys and values are read where `BlockCache` holds them: first the committed slots, then the slots of
all states.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import AUTOMATIC, LAUNCH, Dispatch, Kernel, processors, tl, triton

_HEADS = 8  # heads per program of `_rotate`, of one token or several
_PROGRAMS = 2  # of attention per multiprocessor, wanted
_GATED_AT_ONCE = 1024  # numbers per program of `_gate`, of one token
_TILE_KEYS = 32
_KEYS_PER_PROGRAM = 128  # at least: with fewer, merging costs more than splitting saves
_MOST_SHARES = 16  # of a row's keys: one program merges them one after the other
_LOG2_E = 1.4426950408889634

Pair = tuple[Tensor, Tensor]
Linear = Callable[[Tensor], Tensor]
# Several linear layers on one input: their outputs side by side in one tensor, or in a list.
Product = Callable[[Tensor], Tensor | list[Tensor]]


@dataclass(frozen=True, slots=True)
class Norm:
    """The parameters of a `Qwen3RMSNorm`.

    Attributes:
        weight: [size], the factors of the normalised values.
        variance_epsilon: What is added to the mean square.
    """

    weight: Tensor
    variance_epsilon: float


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """A decoder layer as `run_fused` computes it. All modules and weights are looked up once, when
    a call plans its layers, as lookups take longer than many of a round's operations.

    Attributes:
        index: The index of the layer's keys and values in the cache.
        input_norm, mlp_norm: The norms before attention and before the MLP.
        query_norm, key_norm: The norms of queries and of keys, which have the same epsilon.
        scaling: The factor by which attention scores are multiplied.
        of_attention: Computes queries, keys and values from the layer's input.
        o_proj: Computes the output of attention.
        of_mlp: Computes gate and up from the MLP's input.
        activation: The module through which the gate goes.
        is_silu: Whether `activation` is a plain SiLU.
        down_proj: Computes the output of the MLP.
    """

    index: int
    input_norm: Norm
    mlp_norm: Norm
    query_norm: Norm
    key_norm: Norm
    scaling: float
    of_attention: Product
    o_proj: Linear
    of_mlp: Product
    activation: Linear
    is_silu: bool
    down_proj: Linear


# The layers of a network (backbone or head) in order, and its final norm.
Plan = tuple[list[FusedLayer], Norm]
Plans = dict[Any, Plan]


def sum_and_norm(hidden: Tensor, added: Tensor | None, norm: Any) -> Pair:
    """Return two tensors [..., hidden_size]: the sum `hidden + added` (`hidden` if `added` is
    None), and this sum after the RMS norm `norm`, a `Norm` or a `Qwen3RMSNorm`."""
    hidden, size = hidden.contiguous(), hidden.shape[-1]
    normed = torch.empty_like(hidden)
    total = hidden if added is None else torch.empty_like(hidden)
    _sum_and_norm[(hidden.numel() // size,)](
        *(
            hidden,
            None if added is None else added.contiguous(),
            norm.weight,
            total,
            normed,
            size,
            norm.variance_epsilon,
        ),
        TILE=triton.next_power_of_2(size),
        **LAUNCH | {"num_warps": 4 if size <= 2048 else 8},
    )
    return total, normed


def sum_and_norm_ref(hidden: Tensor, added: Tensor | None, norm: Any) -> Pair:
    """Compute the same as `sum_and_norm`, in PyTorch. `added` becomes the sum."""
    total = hidden if added is None else added.add_(hidden)
    return total, normed_by(norm, total)


def normed_by(norm: Any, hidden: Tensor) -> Tensor:
    """Apply an RMS norm to hidden states. It computes the same bits as a `Qwen3RMSNorm` with fewer
    new tensors, which saves time in large rounds."""
    return _of_unit_size(hidden, norm.variance_epsilon).mul_(norm.weight)


def _of_unit_size(hidden: Tensor, epsilon: float) -> Tensor:
    """Divide `hidden` by its root mean square over the last dimension; return a new tensor of the
    same dtype. The quotient is computed in float32, as in transformers' norms."""
    wide = hidden if hidden.dtype == torch.float32 else hidden.float()
    scale = wide.pow(2).mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    return (wide * scale).to(hidden.dtype)


def rotated(
    projected: Tensor | list[Tensor], norms: tuple[Any, Any], rotary: Pair, target: Pair
) -> tuple[Tensor, ...]:
    """Normalise and rotate queries and keys, and write keys and values to the cache.

    Args:
        projected: The queries, keys and values of each token in one tensor [rows, tokens, (heads +
            2 * kv_heads) * head_dim], or a list of three tensors: queries, keys and values.
        norms: The norms of queries and of keys, which have the same epsilon.
        rotary: cos and sin, [rows, tokens, head_dim] each; the first half of sin has its sign
            changed.
        target: The slots of the cache for keys and for values, [rows, kv_heads, tokens, head_dim]
            each.

    Returns:
        The queries [rows, heads, tokens, head_dim], then keys and values: the tensors of `target`.
    """
    projected = (
        projected.contiguous() if isinstance(projected, Tensor) else torch.cat(projected, -1)
    )
    cos = rotary[0].contiguous()
    sin = rotary[1].contiguous()
    keys, values = target
    rows, tokens, size = projected.shape
    kv_heads, head_dim = keys.shape[1::2]
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
    projected: Tensor | list[Tensor], norms: tuple[Any, Any], rotary: Pair, target: Pair
) -> tuple[Tensor, ...]:
    """Compute the same as `rotated`, in PyTorch. One copy of queries and keys is normalised and
    rotated in place, because small rounds take longer to start operations than to run them."""
    keys, values = target
    kv_heads, head_dim = keys.shape[1::2]
    if isinstance(projected, Tensor):
        size = kv_heads * head_dim
        projected = list(projected.split([projected.shape[-1] - 2 * size, size, size], -1))
    heads = torch.cat(projected[:2], -1).unflatten(-1, (-1, head_dim))
    sizes = [heads.shape[2] - kv_heads, kv_heads]
    heads = _of_unit_size(heads, norms[0].variance_epsilon)
    for part, norm in zip(heads.split_with_sizes(sizes, 2), norms, strict=True):
        part.mul_(norm.weight)
    cos = rotary[0][:, :, None]
    sin = rotary[1][:, :, None]
    across = heads.roll(head_dim // 2, -1).mul_(sin)
    query, key = heads.mul_(cos).add_(across).split_with_sizes(sizes, 2)
    keys.copy_(key.transpose(1, 2))
    values.copy_(projected[2].unflatten(-1, (-1, head_dim)).transpose(1, 2))
    return query.transpose(1, 2), keys, values


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up` [..., size]. `gate` and `up` [..., size] may be slices, along the
    last dimension, of a wider tensor."""
    size = gate.shape[-1]
    gates = gate.reshape(-1, size)
    ups = up.reshape(-1, size)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _gate[(len(gates), triton.cdiv(size, _GATED_AT_ONCE))](
        *(gates, ups, out, size, gates.stride(0), ups.stride(0)), TILE=_GATED_AT_ONCE, **LAUNCH
    )
    return out


def gated_ref(gate: Tensor, up: Tensor) -> Tensor:
    """Compute the same as `gated`, in PyTorch. `gate` becomes the result."""
    return F.silu(gate, inplace=True).mul_(up)


@dataclass(frozen=True)
class RoundMask:
    """The attention pattern of a round: which keys each state sees. It takes the place of a mask
    tensor.

    Attributes:
        committed: int64 [rows, width], where width is the number of states per row. For each state,
            the number of slots that it sees of the committed text of its row, counted from the
            first slot.
        parent: int64 [rows, width], for each state, the index (within the row) of the parent whose
            keys it also sees; -1 if it has none.
        block_size: The number of tokens per state.
        dispatch: Decides between kernels and PyTorch.
        sees_all: Whether every query sees every key: each row has one state, and all states see the
            same number of slots.
    """

    committed: Tensor
    parent: Tensor
    block_size: int
    dispatch: Dispatch = AUTOMATIC
    sees_all: bool = False
    # what all layers of a forward share
    _shared: dict[Any, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def dense(self, cached_slots: int) -> Tensor:
        """Make the mask as a tensor, bool [rows, 1, queries, cached_slots + queries] with queries =
        width * block_size: True where a query sees a key. The keys of a row are `cached_slots`
        slots of its committed text, then the tokens of all its states."""
        slots = torch.arange(self.parent.shape[1], device=self.parent.device)
        block = self.block_size
        # themselves and their parents
        visible = (slots[:, None] == slots) | (self.parent[..., None] == slots)
        scored = (
            visible[:, :, None, :, None].expand(-1, -1, block, -1, block).flatten(3).flatten(1, 2)
        )
        limits = self.committed.repeat_interleave(block, 1)[..., None]
        committed = torch.arange(cached_slots, device=slots.device) < limits
        return torch.cat([committed, scored], -1)[:, None]

    def bias(self, cached_slots: int, dtype: torch.dtype) -> Tensor | None:
        """Make the mask as a tensor that is added to attention scores: 0 where
        `dense(cached_slots)` is True, -inf elsewhere. Return None if every query sees every key.
        All layers of a forward get the same tensor."""
        if self.sees_all:
            return None
        if (key := (cached_slots, dtype)) not in self._shared:
            hidden = self.dense(cached_slots).logical_not_()
            self._shared[key] = torch.zeros(
                hidden.shape, dtype=dtype, device=hidden.device
            ).masked_fill_(hidden, -torch.inf)
        return self._shared[key]

    def arrived(self, count: int) -> Tensor:
        """Return counters for the attention kernel, int32 [count], which all layers of a forward
        share.

        There is one counter for each tile of queries, which is a part of a row's queries under one
        KV head. Several programs work on a tile, and the kernel counts there how many of them have
        finished. All counters are 0 when the kernel starts, and it sets them back to 0 before it
        ends.
        """
        if count not in self._shared:
            self._shared[count] = torch.zeros(
                count, dtype=torch.int32, device=self.committed.device
            )
        return self._shared[count]


def round_attention_ref(
    query: Tensor, key: Tensor, value: Tensor, mask: RoundMask, scale: float
) -> Tensor:
    """Compute the same as `round_attention`, by PyTorch's `scaled_dot_product_attention`."""
    bias = mask.bias(key.shape[2] - query.shape[2], query.dtype)
    grouped = query.device.type == "cpu"
    if not grouped:  # with a mask, SDPA's fast kernels on a GPU take no grouped heads
        group = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(group, 1)
        value = value.repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous()


def round_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: RoundMask, scale: float
) -> Tensor:
    """Compute the attention of a round in one launch; return [rows, queries, heads, head_dim].

    Each program takes a tile of a row's queries, with all query heads of one KV head, and one share
    of the keys that these queries see. The last of a tile's programs to finish merges the results
    of all shares, in order. No shape depends on `committed` or `parent`.

    Args:
        query: [rows, heads, queries, head_dim], where queries = width * block_size.
        key, value: [rows, kv_heads, cached_slots + queries, head_dim]: `cached_slots` committed
            slots, then the scored states. Both have the same strides, the last of which is 1.
            Committed slots that no state of a row sees are never read.
        mask: Which keys each state sees.
        scale: The factor by which attention scores are multiplied.
    """
    rows, heads, queries, head_dim = query.shape
    kv_heads = key.shape[1]
    keys = key.shape[2]
    group = heads // kv_heads
    cached_slots = keys - queries
    # So large that two programs, each with two tiles of keys, fit a multiprocessor's registers and
    # shared memory.
    tile_rows = max(
        16, min(triton.next_power_of_2(queries * group), 32 if query.dtype == torch.float32 else 64)
    )
    tiles = triton.cdiv(queries * group, tile_rows)
    # for one wave of programs
    max_splits = _PROGRAMS * processors(query.device) // (tiles * rows * kv_heads)
    splits = max(1, min(max_splits, triton.cdiv(cached_slots, _KEYS_PER_PROGRAM), _MOST_SHARES))
    out = query.new_empty(rows, queries, heads, head_dim)
    shares: tuple[int, ...] = (0,)
    if splits > 1:
        shares = (rows * kv_heads, splits, queries * group)
    level = torch.empty(*shares, dtype=torch.float32, device=query.device)
    sums = torch.empty(*shares, head_dim, dtype=torch.float32, device=query.device)
    if triton.knobs.runtime.interpret:  # the interpreter's products of bfloat16 are wrong
        query = query.float()
        key = key.float()
        value = value.float()
    _attend[(tiles, splits, rows * kv_heads)](
        *(
            query.transpose(1, 2).contiguous(),
            key,
            value,
            out,
            sums,
            level,
            mask.arrived(tiles * rows * kv_heads),
        ),
        *(
            mask.committed,
            mask.parent,
            *key.stride()[:3],
            kv_heads,
            queries,
            cached_slots,
            scale * _LOG2_E,
        ),
        BLOCK_SIZE=mask.block_size,
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED=max(16, triton.next_power_of_2(head_dim)),
        TILE_ROWS=tile_rows,
        TILE_KEYS=_TILE_KEYS,
        SPLIT=splits > 1,
        num_stages=2,
        **LAUNCH,
    )
    return out


SUM_AND_NORM = Kernel("sum_and_norm", sum_and_norm, sum_and_norm_ref)
ROTATED = Kernel("rotated", rotated, rotated_ref)
GATED = Kernel("gated", gated, gated_ref)
ROUND_ATTENTION = Kernel("round_attention", round_attention, round_attention_ref)


def listed(functions: Sequence[Linear]) -> Product:
    """Make a function that lists the results of several functions of one tensor."""
    return lambda hidden: [function(hidden) for function in functions]


def run_fused(plan: Plan, hidden: Tensor, rotary: Pair, mask: RoundMask, cache: Any) -> Tensor:
    """Run the planned layers of the backbone or the head, and the final norm, over hidden states;
    return the normed hidden states. Where kernels do not run, as on a CPU, their PyTorch twins do.

    Args:
        plan: The layers and the final norm.
        hidden: [rows, tokens, hidden_size].
        rotary: cos and sin, [rows, tokens, head_dim] each; the first half of sin has its sign
            changed.
        mask: Which keys each state sees.
        cache: A `BlockCache`. Keys and values are written to the slots that its method `target` has
            set.
    """
    run = mask.dispatch.run
    layers, norm = plan
    added = None
    for layer in layers:
        hidden, normed = run(SUM_AND_NORM, hidden, added, layer.input_norm)
        target = cache.written[layer.index]
        norms = (layer.query_norm, layer.key_norm)
        query, *_ = run(ROTATED, layer.of_attention(normed), norms, rotary, target)
        attended = run(ROUND_ATTENTION, query, *cache.read[layer.index], mask, layer.scaling)
        added = layer.o_proj(attended.flatten(2))
        hidden, normed = run(SUM_AND_NORM, hidden, added, layer.mlp_norm)
        gate_up = layer.of_mlp(normed)
        gate, up = gate_up.chunk(2, -1) if isinstance(gate_up, Tensor) else gate_up
        inner = run(GATED, gate, up) if layer.is_silu else layer.activation(gate) * up
        added = layer.down_proj(inner)
    _, last = run(SUM_AND_NORM, hidden, added, norm)
    return last


if triton is not None:

    @triton.jit
    def _sum_and_norm(  # type: ignore[no-untyped-def]
        hidden, added, scale, total, normed, size, epsilon, TILE: tl.constexpr
    ):
        column = tl.arange(0, TILE)
        inside = column < size
        offsets = tl.program_id(0).to(tl.int64) * size + column
        kind = normed.dtype.element_ty
        x = tl.load(hidden + offsets, mask=inside, other=0.0).to(tl.float32)
        if added is not None:
            x = (
                (x + tl.load(added + offsets, mask=inside, other=0.0).to(tl.float32))
                .to(kind)
                .to(tl.float32)
            )
            tl.store(total + offsets, x.to(kind), mask=inside)
        unit = x * tl.rsqrt(tl.sum(x * x, 0) / size + epsilon)
        weight = tl.load(scale + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed + offsets, (weight * unit.to(kind).to(tl.float32)).to(kind), mask=inside)

    @triton.jit
    def _gate(  # type: ignore[no-untyped-def]
        gates, ups, out, size, gate_row, up_row, TILE: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside = column < size
        kind = out.dtype.element_ty
        gate = tl.load(gates + row * gate_row + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(ups + row * up_row + column, mask=inside, other=0.0).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
        tl.store(out + row * size + column, (activated * up).to(kind), mask=inside)

    @triton.jit
    def _normed(  # type: ignore[no-untyped-def]
        x, size, is_query, query_scale, key_scale, dims, inside, kind: tl.constexpr
    ):
        """RMS-normalize x: multiply it by `size`, the inverse of its RMS, and by the weight of the
        query norm or, where `is_query` is False, of the key norm. `dims` are the columns of a
        head."""
        of_queries = tl.load(query_scale + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
        of_keys = tl.load(key_scale + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
        return (
            (tl.where(is_query, of_queries, of_keys) * (x * size).to(kind).to(tl.float32))
            .to(kind)
            .to(tl.float32)
        )

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
        """Do the work of `rotated`. A program takes HEADS heads. The heads are ordered by token
        and, within a token, as those of queries, then keys, then values."""
        heads_per_token = heads + 2 * kv_heads
        index = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
        token = index // heads_per_token
        head = index % heads_per_token
        dim = tl.arange(0, PADDED)
        first = dim < HEAD_DIM // 2
        inside_head = dim < HEAD_DIM
        partner = tl.where(first, dim + HEAD_DIM // 2, dim - HEAD_DIM // 2)
        inside = (token < rows * tokens)[:, None] & inside_head[None, :]
        is_query = (head < heads)[:, None]
        is_value = (head >= heads + kv_heads)[:, None]
        kind: tl.constexpr = queries.dtype.element_ty
        source = projected + index.to(tl.int64)[:, None] * HEAD_DIM
        value = tl.load(source + dim[None, :], mask=inside, other=0.0)
        x = value.to(tl.float32)
        partner_x = tl.load(source + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        size = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + epsilon)[:, None]
        x = _normed(x, size, is_query, query_scale, key_scale, dim, inside_head, kind)
        partner_x = _normed(
            partner_x, size, is_query, query_scale, key_scale, partner, inside_head, kind
        )
        angle = token[:, None] * HEAD_DIM + dim[None, :]
        along = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
        across = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
        turned = (
            (x * along).to(kind).to(tl.float32) + (partner_x * across).to(kind).to(tl.float32)
        ).to(kind)
        tl.store(
            queries + ((token * heads + head) * HEAD_DIM)[:, None] + dim[None, :],
            turned,
            mask=inside & is_query,
        )
        row = (token // tokens).to(tl.int64)  # offsets into the cache may not fit 32 bits
        slot = (
            row * cache_row
            + (token % tokens).to(tl.int64) * cache_token
            + (head - heads) % kv_heads * cache_head
        )
        slot = slot[:, None] + dim[None, :]
        tl.store(keys + slot, turned, mask=inside & ~is_query & ~is_value)
        tl.store(values + slot, value, mask=inside & is_value)

    @triton.jit(do_not_specialize=["tokens", "cached_slots"])
    def _attend(  # type: ignore[no-untyped-def]
        query,
        key,
        value,
        out,
        partial,
        levels,
        arrived,
        committed,
        parent,
        key_row,
        key_head,
        key_token,
        kv_heads,
        tokens,
        cached_slots,
        scale,
        BLOCK_SIZE: tl.constexpr,
        GROUP: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        PADDED: tl.constexpr,
        TILE_ROWS: tl.constexpr,
        TILE_KEYS: tl.constexpr,
        SPLIT: tl.constexpr,
    ):
        """Do the work of `round_attention`. The three program ids are the tile (of queries times
        the query heads of a KV head), the share of the prefix, and the pair of a batch row and a KV
        head."""
        split = tl.program_id(1)
        splits = tl.num_programs(1)
        pair = tl.program_id(2).to(tl.int64)  # offsets into the cache may not fit 32 bits
        row = pair // kv_heads
        head = pair % kv_heads
        index = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        token = index // GROUP
        columns = tl.arange(0, TILE_KEYS)
        dims = tl.arange(0, PADDED)
        inside_rows = index < tokens * GROUP
        inside_head = dims < HEAD_DIM
        inside_tile = inside_rows[:, None] & inside_head[None, :]
        offsets = (((row * tokens + token) * kv_heads + head) * GROUP + index % GROUP)[
            :, None
        ] * HEAD_DIM + dims[None, :]
        queries = tl.load(query + offsets, mask=inside_tile, other=0.0)
        state = token // BLOCK_SIZE
        state_of_batch = row * (tokens // BLOCK_SIZE) + state
        parent_state = tl.load(parent + state_of_batch, mask=inside_rows, other=-1).to(tl.int32)
        limit = tl.load(committed + state_of_batch, mask=inside_rows, other=0).to(tl.int32)

        # The running softmax: weighted sum of values, sum of weights, greatest score.
        sums = tl.zeros([TILE_ROWS, PADDED], tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        length = tl.minimum(tl.max(limit, 0), cached_slots).to(tl.int32)
        share = tl.cdiv(tl.cdiv(length, TILE_KEYS), splits) * TILE_KEYS
        begin = tl.minimum(split * share, length)
        end = tl.minimum(begin + share, length)
        prefix_tiles = tl.cdiv(end - begin, TILE_KEYS)
        # the first share takes the scored states, too
        scored = tl.where(split == 0, tl.cdiv(tokens, TILE_KEYS), 0)
        for tile in range(0, prefix_tiles + scored):
            slot = (
                tl.where(
                    tile < prefix_tiles,
                    begin + tile * TILE_KEYS,
                    cached_slots + (tile - prefix_tiles) * TILE_KEYS,
                )
                + columns
            )
            key_state = tl.where(tile < prefix_tiles, -2, (slot - cached_slots) // BLOCK_SIZE)
            readable = slot < tl.where(tile < prefix_tiles, end, cached_slots + tokens)
            visible = (
                (slot[None, :] < tl.minimum(limit, end)[:, None])
                | (key_state[None, :] == state[:, None])
                | (key_state[None, :] == parent_state[:, None])
            )
            cell = row * key_row + head * key_head + slot.to(tl.int64) * key_token
            keys = tl.load(
                key + cell[None, :] + dims[:, None],
                mask=readable[None, :] & inside_head[:, None],
                other=0.0,
            )
            values = tl.load(
                value + cell[:, None] + dims[None, :],
                mask=readable[:, None] & inside_head[None, :],
                other=0.0,
            )
            # float32 is multiplied as three TF32 products, as in SDPA's own kernel: right to the
            # last bits.
            scores = tl.where(
                visible, tl.dot(queries, keys, input_precision="tf32x3") * scale, float("-inf")
            )
            higher = tl.maximum(peak, tl.max(scores, 1))
            # where nothing has been seen yet
            level = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - level[:, None])
            fade = tl.exp2(peak - level)
            total = total * fade + tl.sum(weights, 1)
            sums = tl.dot(
                weights.to(values.dtype), values, sums * fade[:, None], input_precision="tf32x3"
            )
            peak = higher
        result = sums / tl.where(total == 0.0, 1.0, total)[:, None]

        if SPLIT:
            first = pair * splits * (tokens * GROUP) + index
            own_offsets = first + split * (tokens * GROUP)
            tl.store(levels + own_offsets, peak + tl.log2(total), mask=inside_rows)
            tl.store(
                partial + own_offsets[:, None] * HEAD_DIM + dims[None, :], result, mask=inside_tile
            )
            # All threads store before one of them counts this program as done (release) and reads
            # how many were (acquire).
            tl.debug_barrier()
            counter = arrived + pair * tl.num_programs(0) + tl.program_id(0)
            last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1
            if last:
                tl.store(counter, 0)  # reset for the next layer
            inside_rows = index < tl.where(last, tokens * GROUP, 0)
            inside_tile = inside_rows[:, None] & inside_head[None, :]
            result = tl.zeros([TILE_ROWS, PADDED], tl.float32)
            total = tl.zeros([TILE_ROWS], tl.float32)
            peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
            for share_index in range(0, tl.where(last, splits, 0)):
                share_offsets = first + share_index * (tokens * GROUP)
                level = tl.load(
                    levels + share_offsets, mask=inside_rows, other=0.0, cache_modifier=".cg"
                )
                values = tl.load(
                    partial + share_offsets[:, None] * HEAD_DIM + dims[None, :],
                    mask=inside_tile,
                    other=0.0,
                    cache_modifier=".cg",
                )
                # the first share sees something, so this is finite
                higher = tl.maximum(peak, level)
                fade = tl.exp2(peak - higher)
                rise = tl.exp2(level - higher)
                result = result * fade[:, None] + values * rise[:, None]
                total = total * fade + rise
                peak = higher
            result = result / tl.where(last, total, 1.0)[:, None]
        tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside_tile)
