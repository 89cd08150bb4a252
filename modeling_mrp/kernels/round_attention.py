"""Attention of a decoding round: a Triton kernel and its PyTorch twin. How layers come to use it: `round_layers_mrp`.

In a round every row submits some states of one block each. A query sees the committed prefix of its row, the keys of its own
state and, where its state has a parent, those of the parent. Keys and values are read where `BlockCache` holds them: the
committed slots first, then those of all states.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import AUTOMATIC, MULTIPLY_ADD, Dispatch, ceil_div, power_of_two, processors, tl, triton

KERNEL = "round_attention"
_KEYS_PER_PROGRAM = 128  # at least: fewer cost more in merging than they win
_PROCESSORS = 132  # of an H200; what a CPU stands in for
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class RoundMask:
    """Who sees whom in a round, in place of a mask tensor.

    Attributes:
        committed: [rows] long, how many committed slots each row sees.
        parent: [rows, width] long, the slot of the state that a state looks at beyond the prefix, -1 if none; None: none has.
        width: States per row.
        block_size: Tokens per state.
        dispatch: Whether the kernel runs.
        sees_all: Whether every query sees every key: there is one state, and all rows are equally long.
    """

    committed: Tensor
    parent: Tensor | None
    width: int
    block_size: int
    dispatch: Dispatch = AUTOMATIC
    sees_all: bool = False
    _biases: dict[Any, Tensor] = field(default_factory=dict, repr=False, compare=False)  # all layers of a forward share one

    def to(self, *args: Any, **kwargs: Any) -> "RoundMask":
        """On another device: accelerate moves what a layer is given to where the layer is."""
        parent = None if self.parent is None else self.parent.to(*args, **kwargs)
        return replace(self, committed=self.committed.to(*args, **kwargs), parent=parent)

    def dense(self, used: int) -> Tensor:
        """[rows, 1, width * block_size, used + width * block_size] bool over the first `used` slots and what is scored."""
        rows, device = len(self.committed), self.committed.device
        sees = torch.eye(self.width, dtype=torch.bool, device=device).repeat(rows, 1, 1)
        if self.parent is not None:
            parent = self.parent[..., None]
            sees |= (parent == torch.arange(self.width, device=device)) & (parent >= 0)
        scratch = sees.repeat_interleave(self.block_size, 1).repeat_interleave(self.block_size, 2)
        prefix = torch.arange(used, device=device) < self.committed[:, None]
        return torch.cat([prefix[:, None].expand(-1, scratch.shape[1], -1), scratch], -1)[:, None]

    def bias(self, used: int, dtype: torch.dtype) -> Tensor | None:
        """What to add to the scores of `dense`: 0 or -inf; None where all is seen."""
        if self.sees_all:
            return None
        name = used, dtype, self.committed.device
        if name not in self._biases:
            seen = self.dense(used)
            self._biases[name] = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        return self._biases[name]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: RoundMask, scale: float) -> Tensor:
    """`round_attention` or its twin, as the mask's dispatch decides."""
    return mask.dispatch.run(
        KERNEL,
        lambda: round_attention(query, key, value, mask, scale),
        lambda: round_attention_twin(query, key, value, mask, scale),
        query,
        key,
        value,
        mask.committed,
    )


def round_attention_twin(query: Tensor, key: Tensor, value: Tensor, mask: RoundMask, scale: float) -> Tensor:
    """Compute `round_attention` of the same arguments through SDPA."""
    bias, grouped = mask.bias(key.shape[2] - query.shape[2], query.dtype), query.device.type == "cpu"
    if not grouped:  # with a mask, SDPA's fast kernels of a GPU take no groups
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous()


def round_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: RoundMask, scale: float, splits: int | None = None
) -> Tensor:
    """Attention of a round in Triton kernels.

    A program takes a tile of a row's queries, all query heads of one KV head among them, and one of `splits` shares of what
    that row sees; a second kernel merges the shares. Neither the launch nor the shapes depend on `committed` or `parent`,
    so that a round can be captured in a CUDA graph.

    Floor: `2 * rows * kv_heads * (queries + committed) * head_dim` numbers read and twice the queries' own read or written;
    `4 * rows * heads * queries * (queries + committed) * head_dim` FLOPs.

    Args:
        query: [rows, heads, queries, head_dim] of any strides, queries = width * block_size.
        key, value: [rows, kv_heads, used + queries, head_dim] of any strides: `used` committed slots, then what is scored; what
            lies in a slot that a row does not see is never read.
        mask: Who sees whom.
        scale: Multiplies the scores.
        splits: Shares of the prefix; by default as many as fill the device.

    Returns:
        [rows, queries, heads, head_dim].

    Raises:
        ValueError: if the shapes do not fit each other.
    """
    rows, heads, queries, head_dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    if queries != mask.width * mask.block_size or len(mask.committed) != rows or keys < queries or heads % kv_heads:
        raise ValueError(
            f"query {list(query.shape)} and key {list(key.shape)} do not fit {len(mask.committed)} rows of {mask.width} states "
            f"of {mask.block_size} tokens: they are [rows, heads, width * block_size, head_dim] and [rows, kv_heads, "
            "used + width * block_size, head_dim]"
        )
    group, used = heads // kv_heads, keys - queries
    tile_rows, tile_keys, warps = _tiles(queries * group, head_dim, query.dtype)
    tiles = ceil_div(queries * group, tile_rows)
    if splits is None:
        splits = _splits(tiles * rows * kv_heads, used, query.device)
    out = query.new_empty(rows, queries, heads, head_dim)
    shares = (rows * kv_heads, splits, queries * group) if splits > 1 else (0,)
    total = torch.empty(shares, dtype=torch.float32, device=query.device)
    peak = torch.empty_like(total)
    partial = torch.empty(*shares, head_dim, dtype=torch.float32, device=query.device)
    committed = mask.committed.contiguous()
    parent = committed if mask.parent is None else mask.parent.contiguous()  # unread in the first case
    sizes = {"HEAD_DIM": head_dim, "PADDED": max(16, power_of_two(head_dim)), "GROUP": group}
    _attend[(tiles, splits, rows * kv_heads)](
        query,
        key,
        value,
        out,
        partial,
        peak,
        total,
        committed,
        parent,
        *query.stride(),
        *key.stride(),
        *value.stride(),
        kv_heads,
        queries,
        used,
        mask.width,
        splits,
        scale * _LOG2_E,
        HAS_PARENT=mask.parent is not None,
        BLOCK_SIZE=mask.block_size,
        SPLIT=splits > 1,
        TILE_ROWS=tile_rows,
        TILE_KEYS=tile_keys,
        # Of float32, three products of its halves, as in SDPA's own kernel for it: right to the last bits.
        PRECISION="tf32x3" if query.dtype == torch.float32 else "tf32",
        WIDEN=query.dtype == torch.bfloat16 and triton.knobs.runtime.interpret,  # whose products of bfloat16 are wrong
        **sizes,
        num_warps=warps,
        **MULTIPLY_ADD,
        num_stages=2,
    )
    if splits > 1:
        merged = min(16, power_of_two(queries * group))
        _merge[(ceil_div(queries * group, merged), rows * kv_heads)](
            partial, peak, total, out, kv_heads, queries, splits, TILE_ROWS=merged, **sizes, num_warps=4, **MULTIPLY_ADD
        )
    return out


def _tiles(rows: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Rows and keys of a tile, and warps: what fits the registers and, two tiles of keys deep, 99 KB of shared memory."""
    most = 32 if dtype == torch.float32 else 128 if head_dim <= 128 else 64
    tile_rows = max(16, min(power_of_two(rows), most))
    # With 64 rows, 64 keys would spill registers and leave room for one program less.
    keys = 32 if dtype == torch.float32 or head_dim > 128 or tile_rows == 64 else 64
    return tile_rows, keys, 8 if tile_rows == 128 else 4


def _splits(programs: int, used: int, device: torch.device) -> int:
    """Into how many shares a prefix is cut, so that one wave of programs fills the device."""
    return max(1, min(processors(device, _PROCESSORS) // programs, ceil_div(used, _KEYS_PER_PROGRAM)))


if triton is not None:

    @triton.jit
    def _absorb(  # type: ignore[no-untyped-def]
        sums,
        total,
        peak,
        queries,
        key_at,
        value_at,
        seen,
        loaded,
        scale,
        MASKED: tl.constexpr,
        PADS: tl.constexpr,
        PRECISION: tl.constexpr,
        WIDEN: tl.constexpr,
    ):
        """One tile of keys and values into the running softmax: sums of values, sum of weights, greatest score."""
        if MASKED or PADS:
            keys = tl.load(key_at, mask=tl.trans(loaded), other=0.0)
            values = tl.load(value_at, mask=loaded, other=0.0)
        else:
            keys = tl.load(key_at)
            values = tl.load(value_at)
        if WIDEN:
            queries, keys, values = queries.to(tl.float32), keys.to(tl.float32), values.to(tl.float32)
        scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
        if MASKED:
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # where nothing has been seen yet
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(peak - level)
        total = total * fade + tl.sum(weights, 1)
        sums = tl.dot(weights.to(values.dtype), values, sums * fade[:, None], input_precision=PRECISION)
        return sums, total, higher

    @triton.jit(do_not_specialize=["tokens", "used", "width", "splits"])
    def _attend(  # type: ignore[no-untyped-def]
        query,
        key,
        value,
        out,
        partial,
        peaks,
        totals,
        committed,
        parent,
        query_row,
        query_head,
        query_token,
        query_dim,
        key_row,
        key_head,
        key_token,
        key_dim,
        value_row,
        value_head,
        value_token,
        value_dim,
        kv_heads,
        tokens,
        used,
        width,
        splits,
        scale,
        HAS_PARENT: tl.constexpr,
        BLOCK_SIZE: tl.constexpr,
        SPLIT: tl.constexpr,
        TILE_ROWS: tl.constexpr,
        TILE_KEYS: tl.constexpr,
        PRECISION: tl.constexpr,
        WIDEN: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        PADDED: tl.constexpr,
        GROUP: tl.constexpr,
    ):
        """Program (tile of queries x heads of a group, share of the prefix, batch row x KV head)."""
        split = tl.program_id(1)
        pair = tl.program_id(2).to(tl.int64)  # offsets into the cache may not fit 32 bits
        row, head = pair // kv_heads, pair % kv_heads
        at = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        token, member = at // GROUP, at % GROUP
        dims = tl.arange(0, PADDED)
        inside = dims < HEAD_DIM
        real = at < tokens * GROUP
        offsets = (head * GROUP + member) * query_head + token * query_token
        queries = tl.load(
            query + row * query_row + offsets[:, None] + dims[None, :] * query_dim,
            mask=real[:, None] & inside[None, :],
            other=0.0,
        )
        state = token // BLOCK_SIZE
        before = tl.full([TILE_ROWS], -1, tl.int32)
        if HAS_PARENT:
            before = tl.load(parent + row * width + state, mask=real, other=-1).to(tl.int32)

        columns = tl.arange(0, TILE_KEYS)
        key_at = key + row * key_row + head * key_head + columns[None, :] * key_token + dims[:, None] * key_dim
        value_at = value + row * value_row + head * value_head + columns[:, None] * value_token + dims[None, :] * value_dim
        sums = tl.zeros([TILE_ROWS, PADDED], tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)

        # The first share takes the scratch, too: a tile sees but a part of that.
        scored_key, scored_value = key_at + used * key_token, value_at + used * value_token
        for start in range(0, tl.where(split == 0, tokens, 0), TILE_KEYS):
            slot = start + columns
            of = slot // BLOCK_SIZE
            seen = (of[None, :] == state[:, None]) | (of[None, :] == before[:, None])
            there = slot < tokens
            sums, total, peak = _absorb(
                sums,
                total,
                peak,
                queries,
                scored_key + start * key_token,
                scored_value + start * value_token,
                seen & there[None, :],
                there[:, None] & inside[None, :],
                scale,
                True,
                HEAD_DIM != PADDED,
                PRECISION,
                WIDEN,
            )

        length = tl.minimum(tl.load(committed + row), used).to(tl.int32)
        share = tl.cdiv(tl.cdiv(length, TILE_KEYS), splits) * TILE_KEYS
        begin = tl.minimum(split * share, length)
        end = tl.minimum(begin + share, length)
        whole = begin + (end - begin) // TILE_KEYS * TILE_KEYS
        for start in range(begin, whole, TILE_KEYS):
            sums, total, peak = _absorb(
                sums,
                total,
                peak,
                queries,
                key_at + start * key_token,
                value_at + start * value_token,
                True,
                (columns >= 0)[:, None] & inside[None, :],
                scale,
                False,
                HEAD_DIM != PADDED,
                PRECISION,
                WIDEN,
            )
        for start in range(whole, end, TILE_KEYS):  # the row's last tile, once or never
            there = start + columns < end
            sums, total, peak = _absorb(
                sums,
                total,
                peak,
                queries,
                key_at + start * key_token,
                value_at + start * value_token,
                real[:, None] & there[None, :],
                there[:, None] & inside[None, :],
                scale,
                True,
                HEAD_DIM != PADDED,
                PRECISION,
                WIDEN,
            )

        if SPLIT:
            place = (pair * splits + split) * (tokens * GROUP) + at
            tl.store(peaks + place, peak, mask=real)
            tl.store(totals + place, total, mask=real)
            some = real & (peak > float("-inf"))  # a share that saw nothing has no sums, and none are read
            tl.store(partial + place[:, None] * HEAD_DIM + dims[None, :], sums, mask=some[:, None] & inside[None, :])
        else:
            result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
            place = (row * tokens + token) * (kv_heads * GROUP) + head * GROUP + member
            tl.store(
                out + place[:, None] * HEAD_DIM + dims[None, :],
                result.to(out.dtype.element_ty),
                mask=real[:, None] & inside[None, :],
            )

    @triton.jit(do_not_specialize=["tokens", "splits"])
    def _merge(  # type: ignore[no-untyped-def]
        partial,
        peaks,
        totals,
        out,
        kv_heads,
        tokens,
        splits,
        TILE_ROWS: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        PADDED: tl.constexpr,
        GROUP: tl.constexpr,
    ):
        """Program (tile of queries x heads of a group, batch row x KV head): the shares of the prefix into one result."""
        pair = tl.program_id(1).to(tl.int64)
        at = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        dims = tl.arange(0, PADDED)
        inside = dims < HEAD_DIM
        real = at < tokens * GROUP
        sums = tl.zeros([TILE_ROWS, PADDED], tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        for split in range(0, splits):
            place = (pair * splits + split) * (tokens * GROUP) + at
            own = tl.load(peaks + place, mask=real, other=float("-inf"))
            weight = tl.load(totals + place, mask=real, other=0.0)
            some = own > float("-inf")
            values = tl.load(
                partial + place[:, None] * HEAD_DIM + dims[None, :], mask=some[:, None] & inside[None, :], other=0.0
            )
            higher = tl.maximum(peak, own)
            level = tl.where(higher == float("-inf"), 0.0, higher)
            fade, rise = tl.exp2(peak - level), tl.exp2(own - level)
            sums = sums * fade[:, None] + values * rise[:, None]
            total = total * fade + weight * rise
            peak = higher
        result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        place = (pair // kv_heads * tokens + at // GROUP) * (kv_heads * GROUP) + pair % kv_heads * GROUP + at % GROUP
        tl.store(
            out + place[:, None] * HEAD_DIM + dims[None, :],
            result.to(out.dtype.element_ty),
            mask=real[:, None] & inside[None, :],
        )


__all__ = ["KERNEL", "RoundMask", "attend", "round_attention", "round_attention_twin"]
