"""Attention of a decoding round: a Triton kernel and its PyTorch twin.

In a round every row submits some states of one block each. A query sees the committed prefix of its row, the keys of its own
state and, where its state has a parent, those of the parent. Keys and values are read where `BlockCache` holds them: the
committed slots first, then those of all states.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import AUTOMATIC, LAUNCH, Dispatch, Kernel, processors, tl, triton
from .noise import scattered

_PROGRAMS = 2  # wanted on a multiprocessor
_TILE_KEYS = 32
_KEYS_PER_PROGRAM = 128  # at least: fewer cost more in merging than they win
_MOST_SHARES = 16  # one program merges them, one after the other
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class RoundMask:
    """Who sees whom in a round, in place of a mask tensor.

    Attributes:
        committed: [rows] long, how many committed slots each row sees.
        parent: [rows, width] long, the slot of the state that a state looks at beyond the prefix, -1 if none.
        width: States per row.
        block_size: Tokens per state.
        dispatch: Whether the kernel runs.
        sees_all: Whether every query sees every key: there is one state, and all rows are equally long.
        plans: How layers run under masks of the same decode (`fused_forward`).
    """

    committed: Tensor
    parent: Tensor
    width: int
    block_size: int
    dispatch: Dispatch = AUTOMATIC
    sees_all: bool = False
    plans: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    _kept: dict[Any, Tensor] = field(default_factory=dict, repr=False, compare=False)  # what all layers of a forward share

    def to(self, *args: Any, **kwargs: Any) -> "RoundMask":
        """Return a copy with its tensors on another device; accelerate moves what a layer is given to where the layer is."""
        return replace(self, committed=self.committed.to(*args, **kwargs), parent=self.parent.to(*args, **kwargs))

    def dense(self, used: int) -> Tensor:
        """[rows, 1, width * block_size, used + width * block_size] bool over the first `used` slots and what is scored."""
        rows, queries = len(self.committed), self.width * self.block_size
        out = torch.empty(rows, 1, queries, used + queries, dtype=torch.bool, device=self.committed.device)
        out[..., :used] = (torch.arange(used, device=out.device) < self.committed[:, None])[:, None, None]
        slots = torch.arange(self.width, device=out.device)
        sees = (slots[:, None] == slots) | (self.parent[..., None] == slots)  # themselves and their parents
        out[:, 0, :, used:].unflatten(1, (self.width, -1)).unflatten(3, (self.width, -1)).copy_(sees[:, :, None, :, None])
        return out

    def bias(self, used: int, dtype: torch.dtype) -> Tensor | None:
        """Make the additive mask of `dense`: 0 where a key is visible, -inf elsewhere; None if all are visible."""
        if self.sees_all:
            return None
        name = used, dtype, self.committed.device
        if name not in self._kept:
            hidden = self.dense(used).logical_not_()
            self._kept[name] = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return self._kept[name]

    def arrived(self, count: int) -> Tensor:
        """Zeros [count] int32 for the kernel, which leaves them so behind each layer."""
        name = count, self.committed.device
        if name not in self._kept:
            self._kept[name] = torch.zeros(count, dtype=torch.int32, device=self.committed.device)
        return self._kept[name]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: RoundMask, scale: float) -> Tensor:
    """`round_attention` or its twin, as the mask's dispatch decides."""
    out: Tensor = mask.dispatch.run(ROUND_ATTENTION, query, key, value, mask, scale)
    return out


def round_attention_twin(
    query: Tensor, key: Tensor, value: Tensor, mask: RoundMask, scale: float, splits: int | None = None
) -> Tensor:
    """Compute `round_attention` of the same arguments through SDPA; in one share."""
    bias, grouped = mask.bias(key.shape[2] - query.shape[2], query.dtype), query.device.type == "cpu"
    if not grouped:  # with a mask, SDPA's fast kernels of a GPU take no groups
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous()


def round_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: RoundMask, scale: float, splits: int | None = None
) -> Tensor:
    """Attention of a round in one launch of a Triton kernel.

    A program takes a tile of a row's queries, all query heads of one KV head among them, and one of `splits` shares of what
    that row sees; the last one to arrive merges the shares, in their order. No shape depends on `committed` or `parent`.

    Args:
        query: [rows, heads, queries, head_dim], queries = width * block_size.
        key, value: [rows, kv_heads, used + queries, head_dim], laid out alike, each head's numbers side by side: `used`
            committed slots, then what is scored; what lies in a slot that a row does not see is never read.
        mask, scale: Who sees whom; what multiplies the scores.
        splits: Shares of the prefix; by default as many as fill the device.

    Returns:
        [rows, queries, heads, head_dim].
    """
    rows, heads, queries, head_dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    group, used = heads // kv_heads, keys - queries
    # So many that two programs fit a multiprocessor: its registers and, two tiles of keys deep, its shared memory.
    tile_rows = max(16, min(triton.next_power_of_2(queries * group), 32 if query.dtype == torch.float32 else 64))
    tiles = triton.cdiv(queries * group, tile_rows)
    if splits is None:  # one wave of programs
        most = _PROGRAMS * processors(query.device) // (tiles * rows * kv_heads)
        splits = max(1, min(most, triton.cdiv(used, _KEYS_PER_PROGRAM), _MOST_SHARES))
    out = query.new_empty(rows, queries, heads, head_dim)
    shares = (rows * kv_heads, splits, queries * group) if splits > 1 else (0,)
    level = torch.empty(*shares, dtype=torch.float32, device=query.device)
    partial = torch.empty(*shares, head_dim, dtype=torch.float32, device=query.device)
    if triton.knobs.runtime.interpret:  # whose products of bfloat16 are wrong
        query, key, value = query.float(), key.float(), value.float()
    _attend[(tiles, splits, rows * kv_heads)](
        *(query.transpose(1, 2).contiguous(), key, value, out, partial, level, mask.arrived(tiles * rows * kv_heads)),
        *(mask.committed, mask.parent, *key.stride()[:3], kv_heads, queries, used, scale * _LOG2_E),
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


def _samples(query: Tensor, key: Tensor, *others: Tensor) -> Iterator[tuple[Any, ...]]:
    """Three rows of two states, a child and one alone, behind prefixes of 5, 152 and 299 slots, in shares that are merged;
    twice, as in two layers."""
    heads, kv_heads, dim, block, used = query.shape[1], key.shape[1], query.shape[3], 4, 512
    parent = torch.arange(-1, 1, device=query.device).repeat(3, 1)
    mask = RoundMask(torch.arange(5, 300, 147, device=query.device), parent, 2, block)
    queries = 4 * scattered(3, 2 * block, heads, dim, like=query).transpose(1, 2)
    keys, values = scattered(3, used + 2 * block, 2, kv_heads, dim, like=key, seed=1).permute(2, 0, 3, 1, 4)
    yield from [(queries, keys, values, mask, dim**-0.5, 3)] * 2


ROUND_ATTENTION = Kernel("round_attention", round_attention, round_attention_twin, _samples)


if triton is not None:

    @triton.jit(do_not_specialize=["tokens", "used"])
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
        used,
        scale,
        BLOCK_SIZE: tl.constexpr,
        GROUP: tl.constexpr,
        HEAD_DIM: tl.constexpr,
        PADDED: tl.constexpr,
        TILE_ROWS: tl.constexpr,
        TILE_KEYS: tl.constexpr,
        SPLIT: tl.constexpr,
    ):
        """Program (tile of queries x heads of a group, share of the prefix, batch row x KV head)."""
        split, splits = tl.program_id(1), tl.num_programs(1)
        pair = tl.program_id(2).to(tl.int64)  # offsets into the cache may not fit 32 bits
        row, head = pair // kv_heads, pair % kv_heads
        at = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
        token = at // GROUP
        columns, dims = tl.arange(0, TILE_KEYS), tl.arange(0, PADDED)
        real, inside = at < tokens * GROUP, dims < HEAD_DIM
        whole = real[:, None] & inside[None, :]
        place = (((row * tokens + token) * kv_heads + head) * GROUP + at % GROUP)[:, None] * HEAD_DIM + dims[None, :]
        queries = tl.load(query + place, mask=whole, other=0.0)
        state = token // BLOCK_SIZE
        before = tl.load(parent + row * (tokens // BLOCK_SIZE) + state, mask=real, other=-1).to(tl.int32)

        # Of the running softmax: sums of values, sum of weights, greatest score.
        sums = tl.zeros([TILE_ROWS, PADDED], tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        length = tl.minimum(tl.load(committed + row), used).to(tl.int32)
        share = tl.cdiv(tl.cdiv(length, TILE_KEYS), splits) * TILE_KEYS
        begin = tl.minimum(split * share, length)
        end = tl.minimum(begin + share, length)
        own = tl.cdiv(end - begin, TILE_KEYS)
        scored = tl.where(split == 0, tl.cdiv(tokens, TILE_KEYS), 0)  # the first share takes the scratch, too
        for tile in range(0, own + scored):
            slot = tl.where(tile < own, begin + tile * TILE_KEYS, used + (tile - own) * TILE_KEYS) + columns
            of = tl.where(tile < own, -2, (slot - used) // BLOCK_SIZE)
            there = slot < tl.where(tile < own, end, used + tokens)
            seen = (slot < end)[None, :] | (of[None, :] == state[:, None]) | (of[None, :] == before[:, None])
            cell = row * key_row + head * key_head + slot.to(tl.int64) * key_token
            keys = tl.load(key + cell[None, :] + dims[:, None], mask=there[None, :] & inside[:, None], other=0.0)
            values = tl.load(value + cell[:, None] + dims[None, :], mask=there[:, None] & inside[None, :], other=0.0)
            # Of float32, three products of its halves, as in SDPA's own kernel for it: right to the last bits.
            scores = tl.where(seen, tl.dot(queries, keys, input_precision="tf32x3") * scale, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            level = tl.where(higher == float("-inf"), 0.0, higher)  # where nothing has been seen yet
            weights, fade = tl.exp2(scores - level[:, None]), tl.exp2(peak - level)
            total = total * fade + tl.sum(weights, 1)
            sums = tl.dot(weights.to(values.dtype), values, sums * fade[:, None], input_precision="tf32x3")
            peak = higher
        result = sums / tl.where(total == 0.0, 1.0, total)[:, None]

        if SPLIT:
            first = pair * splits * (tokens * GROUP) + at
            mine = first + split * (tokens * GROUP)
            tl.store(levels + mine, peak + tl.log2(total), mask=real)
            tl.store(partial + mine[:, None] * HEAD_DIM + dims[None, :], result, mask=whole)
            # All threads have stored before one of them tells so, with release; it hears with acquire how many told before.
            tl.debug_barrier()
            counter = arrived + pair * tl.num_programs(0) + tl.program_id(0)
            last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1
            if last:
                tl.store(counter, 0)  # for the next layer
            real = at < tl.where(last, tokens * GROUP, 0)
            whole = real[:, None] & inside[None, :]
            result = tl.zeros([TILE_ROWS, PADDED], tl.float32)
            total = tl.zeros([TILE_ROWS], tl.float32)
            peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
            for other in range(0, tl.where(last, splits, 0)):
                theirs = first + other * (tokens * GROUP)
                level = tl.load(levels + theirs, mask=real, other=0.0, cache_modifier=".cg")
                values = tl.load(
                    partial + theirs[:, None] * HEAD_DIM + dims[None, :], mask=whole, other=0.0, cache_modifier=".cg"
                )
                higher = tl.maximum(peak, level)  # the first share sees something, so this is finite
                fade, rise = tl.exp2(peak - higher), tl.exp2(level - higher)
                result = result * fade[:, None] + values * rise[:, None]
                total = total * fade + rise
                peak = higher
            result = result / tl.where(last, total, 1.0)[:, None]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=whole)
