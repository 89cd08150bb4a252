"""The networks of a round on the engine: forwards over its pools, in place of a cache of our own.

K states that share a prefix and do not see each other are K rows of one batch of the engine that share its slots, so attention
needs no mask. A state that looks at a clean block of the same round has that block's slots behind its prefix: every layer
writes keys and values before it reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from modeling_mrp.networks.networks import Hidden, Networks, gathered
from modeling_mrp.networks.picker import Picker
from modeling_mrp.rules.state import Row, Scores, State

from .picker import Pickers, Sampling
from .scratch import Borrowed

# States of a row, each with the place of the clean one that it looks at, or -1.
Packed = Sequence[Sequence[tuple[State, int]]]


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
    """The states of a round, flat.

    Attributes:
        row: Where each stands.
        states: Each state.
        pool_row: [n] long, its row of the pool.
        slots: [n, block] long, what its keys and values are written to.
        prefix: What it sees in tokens; itself not included.
    """

    row: list[int]
    states: list[State]
    pool_row: Tensor
    slots: Tensor
    prefix: list[int]


def share_prefixes(table: Tensor, own: Own, lent: Borrowed) -> None:
    """Give the borrowed rows the prefixes of their batch rows; `table` [pool rows, positions] maps positions to slots."""
    if lent.width and (longest := max(own.starts)):
        table[lent.rows, :longest] = table[own.rows, None, :longest]


def place_states(table: Tensor, own: Own, lent: Borrowed, packed: Packed, held: Sequence[int], parents: bool) -> Cells:
    """Give each state a row of the pool, and lay out there what it sees.

    A row's first state writes to the row's own slots, as long as its block is the one that the engine is at.

    Args:
        table: [pool rows, positions], maps positions to slots; borrowed rows are written to.
        own: The batch's rows.
        lent: What is borrowed; its rows have their prefixes (`share_prefixes`).
        packed: Of each row its states.
        held: So many tokens each row has by now.
        parents: Whether states see their clean parents.
    """
    block, device = own.slots.shape[1], table.device
    row, states, home, behind, prefix = [], [], [], [], []  # home: 0 own, then borrowed; behind: what stands behind the prefix
    for r, (start, of_row) in enumerate(zip(own.starts, packed, strict=True)):
        further = held[r] > start  # the engine's block is clean, and kept
        for j, (state, looks_at) in enumerate(of_row):
            row.append(r)
            states.append(state)
            home.append(max(j, 1) if further else j)
            behind.append(0 if further else looks_at if parents else -1)
            prefix.append(start + block * (behind[-1] >= 0))
    at, homes, seen = torch.tensor([row, home, behind], dtype=torch.long, device=device).unbind()
    pool_rows = torch.cat([own.rows[:, None], lent.rows], 1)
    slots = torch.cat([own.slots[:, None], lent.slots], 1)
    cells = Cells(row, states, pool_rows[at, homes], slots[at, homes], prefix)
    moved = homes > 0
    looking = moved & (seen >= 0)
    _write(table, cells.pool_row[looking], own, at[looking], 0, slots[at[looking], seen[looking]])
    _write(table, cells.pool_row[moved], own, at[moved], looking[moved].long() * block, cells.slots[moved])
    return cells


def _write(table: Tensor, pool_row: Tensor, own: Own, row: Tensor, behind: Tensor | int, slots: Tensor) -> None:
    starts = torch.tensor(own.starts, device=table.device)[row] + behind
    positions = starts[:, None] + torch.arange(slots.shape[1], device=table.device)
    table[pool_row[:, None], positions] = slots.to(table.dtype)


def packed_batch(batch: Any, own: Own, cells: Cells, translator: Any) -> Any:
    """Make a `ForwardBatch` of states out of the one that the engine made of their rows.

    Args:
        batch: The engine's.
        own: Its rows.
        cells: Where the states stand.
        translator: The model runner's `kv_index_translator`.
    """
    block, device, count = cells.slots.shape[1], cells.slots.device, len(cells.prefix)
    ids = torch.tensor([state.ids for state in cells.states], device=device)
    positions = torch.tensor([state.start for state in cells.states], device=device)[:, None] + torch.arange(
        block, device=device
    )
    lengths = [prefix + block for prefix in cells.prefix]
    of_rows = [own.places[row] for row in cells.row]
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
        kv_loc_plan=None,
        kv_loc_cols=None,
        out_cache_loc_virtual=None,
        out_cache_loc_is_physical=False,
        forward_metadata_ready=False,
        residual_stream=None,
    )
    translator.own_plan(made).bind(made, translator)
    return made


class EngineNetworks(Networks):
    """Backbone, head and pick over one round of a batch of the engine.

    The head's keys and values lie in the same slots as the backbone's, in layers of their own, and are there for every
    committed block as soon as it is: whoever shares a prefix by the engine's cache shares the head's view of it.

    Args:
        engine: The engine's `ModelRunner`.
        batch: Its `ForwardBatch` of the rows.
        own: The rows.
        lent: What is borrowed for the round.
        with_head: Whether the head takes part.
        pickers: Pick tokens, for reveals and drafts.
        block: Tokens of a block.

    Attributes:
        graph_ran: Whether the last forward of the backbone was a CUDA graph's.
    """

    def __init__(
        self, engine: Any, batch: Any, own: Own, lent: Borrowed, with_head: bool, pickers: Pickers, block: int
    ) -> None:
        self.engine, self.batch, self.own, self.lent = engine, batch, own, lent
        self.with_head, self.block = with_head, block
        self.pickers, each = pickers, cast(Picker, pickers)  # they have all of it that `Networks` asks for
        self.picker = self.drafter = each
        self.device, self.graph_ran, self.shifted = batch.input_ids.device, False, False
        self.forwards = {"prefill": 0, "denoise": 0, "head": 0}
        self._scored: Tensor | None = None
        share_prefixes(self._table, own, lent)

    @property
    def _table(self) -> Tensor:
        table: Tensor = self.engine.req_to_token_pool.req_to_token
        return table

    def _network(self, packed: Packed, held: Sequence[int], hidden: Tensor | None = None) -> Tensor:
        """See `Networks`; what no state stands for is zero."""
        cells = place_states(self._table, self.own, self.lent, packed, held, parents=hidden is None)
        batch = packed_batch(self.batch, self.own, cells, self.engine.kv_index_translator)
        width = max(map(len, packed))
        at = [row * width + place for row, states in enumerate(packed) for place in range(len(states))]
        places = torch.tensor(at, device=self.device)
        if hidden is None:
            output = self.engine.forward(batch, pp_proxy_tensors=None)
            self.graph_ran = bool(output.can_run_graph)
            made = output.logits_output.hidden_states
        else:
            made = self.engine.model.run_head(self.engine, batch, hidden[places].flatten(0, 1))
        spread = made.new_zeros(len(packed) * width, self.block, made.shape[-1])
        spread[places] = made.unflatten(0, (-1, self.block))
        return spread

    def picked(
        self,
        picker: Any,
        states: Sequence[tuple[Any, State]],
        hidden: Sequence[Hidden],
        parents: Sequence[State | None] = (),
        shortlists: Sequence[Hidden | None] = (),
    ) -> list[Scores]:
        """See `Networks.picked`; rows with the same `Sampling` are picked for together."""
        groups: dict[Sampling, list[int]] = {}
        for at, (row, _) in enumerate(states):
            groups.setdefault(row.sampling, []).append(at)
        found: dict[int, Scores] = {}
        for sampling, places in groups.items():
            part: list[Any] = [[of[at] for at in places] if of else of for of in (states, hidden, parents, shortlists)]
            found |= zip(places, super().picked(self.pickers.of(sampling), *part), strict=True)
        return [found[at] for at in range(len(states))]

    def head(
        self, rows: Sequence[Row], asked: Sequence[Sequence[tuple[State, Hidden]]], residual: bool = False
    ) -> list[list[Hidden]]:
        """See `Networks.head`; no block is behind here."""
        width, filler = max(map(len, asked)), next(states[0][1] for states in asked if states)
        given = gathered([one for states in asked for one in [*(h for _, h in states), *[filler] * (width - len(states))]])
        made = self._network([[(state, -1) for state, _ in states] for states in asked], [row.held for row in rows], given)
        self.forwards["head"] += 1
        for row, states in zip(rows, asked, strict=True):
            row.counts.head_forwards += bool(states)
        made = made if residual else given + made
        return [[(made, at * width + place) for place in range(len(states))] for at, states in enumerate(asked)]

    def commit(self, rows: Sequence[Row], clean: Sequence[Sequence[int]]) -> None:
        """Keep the accepted clean state of each row, and have the head read it.

        A clean state that was drafted lies in borrowed slots: they become the row's, whose own are given back in their place.
        """
        drafted = [(at, slots[0]) for at, slots in enumerate(clean) if slots and slots[0] > 0]
        if drafted:
            at, slot = torch.tensor(drafted, device=self.device).unbind(1)
            taken = self.lent.swap(at, slot - 1, self.own.slots[at])
            self.own.slots[at] = taken
            starts = torch.tensor([rows[place].held for place, _ in drafted], device=self.device)
            positions = starts[:, None] + torch.arange(self.block, device=self.device)
            self._table[self.own.rows[at][:, None], positions] = taken.to(self._table.dtype)
        if self.with_head:
            assert self._scored is not None
            width = len(self._scored) // len(rows)
            self.head(
                rows,
                [
                    [(row.opened(row.held), (self._scored, at * width + slots[0]))] if slots else []
                    for at, (row, slots) in enumerate(zip(rows, clean, strict=True))
                ],
            )
        for row, slots in zip(rows, clean, strict=True):
            row.held += self.block * bool(slots)


__all__ = ["Cells", "EngineNetworks", "Own", "packed_batch", "place_states", "share_prefixes"]
