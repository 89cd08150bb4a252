"""A round's states as rows of one batch of the engine.

K states that share a prefix and do not see each other are K rows that share its slots, so attention needs no mask. A state that
looks at a clean block of the same round has that block's slots behind its prefix: every layer writes keys and values before it
reads them.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from modeling_mrp.rules.states import States

from .scratch import Borrowed


@dataclass(frozen=True)
class Own:
    """The rows of a batch of the engine that take part in a round.

    Attributes:
        places: Theirs in the batch.
        rows: [rows] long, in the pool that maps positions to slots.
        slots: [rows, block] long, of the block that each is at.
        starts: That block's absolute position, by row.
    """

    places: list[int]
    rows: Tensor
    slots: Tensor
    starts: list[int]


@dataclass(frozen=True)
class Cells:
    """The valid ones of states [rows, n], flat.

    Attributes:
        row, place: [n] long, where each stands; `place` counts the row's states.
        pool_row: [n] long, its row of the pool.
        slots: [n, block] long, what its keys and values are written to.
        prefix: What it sees in tokens, by cell; itself not included.
    """

    row: Tensor
    place: Tensor
    pool_row: Tensor
    slots: Tensor
    prefix: list[int]

    def spread(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Spread values [n * block, any] over states: [rows, n, block, any], 0 where none is valid."""
        block = self.slots.shape[1]
        spread = values.new_zeros(*shape, block, values.shape[-1])
        spread[self.row, self.place] = values.unflatten(0, (-1, block))
        return spread


def share_prefixes(table: Tensor, own: Own, lent: Borrowed) -> None:
    """Give the borrowed rows the prefixes of their batch rows; `table` [pool rows, positions] maps positions to slots."""
    if lent.width and (longest := max(own.starts)):
        table[lent.rows, :longest] = table[own.rows, None, :longest]


def place_states(table: Tensor, own: Own, lent: Borrowed, states: States, committed: Tensor, parents: bool) -> Cells:
    """Give each valid state a row of the pool, and lay out there what it sees.

    A row's first state writes to the row's own slots, as long as its block is the one that the engine is at.

    Args:
        table: [pool rows, positions], maps positions to slots; borrowed rows are written to.
        own: The batch's rows.
        lent: What is borrowed; its rows have their prefixes (`share_prefixes`).
        states: [rows, n].
        committed: [rows] long, so many tokens each row has by now.
        parents: Whether states see their clean parents.
    """
    block, device = own.slots.shape[1], table.device
    parent = states.parent if parents else torch.full_like(states.parent, -1)
    read = torch.stack([parent, committed[:, None].expand_as(parent), states.valid.long()], -1).tolist()
    row, place, home, behind, prefix = [], [], [], [], []  # home: 0 own, then borrowed; behind: what stands behind the prefix
    for r, (start, cells) in enumerate(zip(own.starts, read, strict=True)):
        for j, (looks_at, held, valid) in enumerate(cells):
            if not valid:
                continue
            further = held > start  # the engine's block is clean, and kept
            row.append(r)
            place.append(j)
            home.append(max(j, 1) if further else j)
            behind.append(0 if further else looks_at)
            prefix.append(start + block * (behind[-1] >= 0))
    at, places, homes, seen = torch.tensor([row, place, home, behind], dtype=torch.long, device=device).unbind()
    pool_rows = torch.cat([own.rows[:, None], lent.rows], 1)
    slots = torch.cat([own.slots[:, None], lent.slots], 1)
    cells = Cells(at, places, pool_rows[at, homes], slots[at, homes], prefix)
    moved = homes > 0
    looking = moved & (seen >= 0)
    _write(table, cells.pool_row[looking], own, at[looking], 0, slots[at[looking], seen[looking]])
    _write(table, cells.pool_row[moved], own, at[moved], looking[moved].long() * block, cells.slots[moved])
    return cells


def _write(table: Tensor, pool_row: Tensor, own: Own, row: Tensor, behind: Tensor | int, slots: Tensor) -> None:
    starts = torch.tensor(own.starts, device=table.device)[row] + behind
    positions = starts[:, None] + torch.arange(slots.shape[1], device=table.device)
    table[pool_row[:, None], positions] = slots.to(table.dtype)


def packed_batch(batch: Any, own: Own, cells: Cells, states: States, translator: Any) -> Any:
    """Make a `ForwardBatch` of states out of the one that the engine made of their rows.

    Args:
        batch: The engine's.
        own: Its rows.
        cells: Where the states stand.
        states: [rows, n].
        translator: The model runner's `kv_index_translator`.
    """
    block, device, count = cells.slots.shape[1], cells.slots.device, len(cells.prefix)
    ids, starts = states.ids[cells.row, cells.place], states.start[cells.row, cells.place]
    positions = starts[:, None] + torch.arange(block, device=device)
    lengths = [prefix + block for prefix in cells.prefix]
    of_rows = [own.places[row] for row in cells.row.tolist()]
    sizes = {name: getattr(batch, name).dtype for name in ("seq_lens", "extend_seq_lens", "extend_prefix_lens")}
    nonpadded = batch.global_num_token_non_padded
    made = replace(
        batch,
        batch_size=count,
        input_ids=ids.flatten().to(batch.input_ids.dtype),
        positions=positions.flatten().to(batch.positions.dtype),
        req_pool_indices=cells.pool_row.to(batch.req_pool_indices.dtype),
        req_pool_indices_cpu=None,
        seq_lens=torch.tensor(lengths, dtype=sizes["seq_lens"], device=device),
        seq_lens_cpu=torch.tensor(lengths),
        seq_lens_sum=sum(lengths),
        orig_seq_lens=None if batch.orig_seq_lens is None else torch.tensor(lengths, device=device).to(batch.orig_seq_lens),
        out_cache_loc=cells.slots.flatten(),
        extend_num_tokens=count * block,
        extend_seq_lens=torch.full((count,), block, dtype=sizes["extend_seq_lens"], device=device),
        extend_prefix_lens=torch.tensor(cells.prefix, dtype=sizes["extend_prefix_lens"], device=device),
        extend_start_loc=torch.arange(0, count * block, block, device=device).to(batch.extend_start_loc),
        extend_seq_lens_cpu=[block] * count,
        extend_prefix_lens_cpu=cells.prefix,
        extend_logprob_start_lens_cpu=[0] * count,
        rids=[batch.rids[row] for row in of_rows],
        lora_ids=None if batch.lora_ids is None else [batch.lora_ids[row] for row in of_rows],
        global_num_token_non_padded=None if nonpadded is None else torch.full_like(nonpadded, count * block),
        global_num_token_non_padded_cpu=count * block,
        num_token_non_padded=None,
        dllm_prompt_mask=None,
        kv_loc_plan=None,
        kv_loc_cols=None,
        out_cache_loc_virtual=None,
        out_cache_loc_is_physical=False,
        forward_metadata_ready=False,
        residual_stream=None,
    )
    translator.own_plan(made).bind(made, translator)
    return made


__all__ = ["Cells", "Own", "packed_batch", "place_states", "share_prefixes"]
