"""The networks of a round on the engine: forwards over the engine's KV pools, in place of this
package's own cache.

States that share a prefix and do not attend to each other become rows of one engine batch that
share the prefix's slots, so attention needs no mask. If a state attends to a clean block (one
without masks) of its round, that block's slots are mapped after the prefix: every layer writes all
keys and values before it reads them.

The host assigns slots to states. A forward is one copy to the device, one gather of slots, one
indexed write to the map of positions to slots, the network, and one copy of the chosen tokens to
the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from modeling_mrp.networks.networks import Hidden, Networks, Packed
from modeling_mrp.networks.picker import Picker
from modeling_mrp.rules.state import Row, Scores, State

from .picker import Pickers, Sampling
from .scratch import Borrowed
from .transfer import Part, sent


@dataclass(frozen=True)
class Own:
    """The rows of an engine batch that take part in a round.

    Attributes:
        places: Their places in the batch.
        rows: Their rows in the pool that maps positions to slots.
        starts: The absolute position of each row's current block.
    """

    places: list[int]
    rows: list[int]
    starts: list[int]


class Room:
    """The places that the states of a round may take: rows of the pool, and blocks of slots.

    Args:
        slots: [batch, block] long, the slots of each batch row's current block.
        own: The batch rows that take part.
        lent: Rows and slots that are borrowed.

    Attributes:
        blocks: [batch + borrowed, block] long: `slots`, then the borrowed slots.
        rows: For each row that takes part, its own row of the pool and then its borrowed ones.
        homes: For each row that takes part, its own block and then its borrowed ones, as places in
            `blocks`.
    """

    def __init__(self, slots: Tensor, own: Own, lent: Borrowed) -> None:
        self.own, self.lent, self.batch = own, lent, len(slots)
        self.blocks = torch.cat([slots, lent.slots]) if lent.width else slots
        self.rows = [[row, *more] for row, more in zip(own.rows, lent.rows, strict=True)]
        self.homes = [
            [place, *range(self.batch + at * lent.width, self.batch + (at + 1) * lent.width)]
            for at, place in enumerate(own.places)
        ]

    def keep(self, at: int, home: int) -> int:
        """Swap row `at`'s own block for its block `home`, a borrowed one; return the place of its
        new block in `blocks`."""
        homes = self.homes[at]
        self.lent.swapped[homes[home] - self.batch] = self.blocks[homes[0]]
        homes[0], homes[home] = homes[home], homes[0]
        return homes[0]


@dataclass(frozen=True)
class Cells:
    """The states of a forward as flat lists, and the blocks to write to the map of positions to
    slots for them.

    Attributes:
        states: The states; `row`, `pool_row`, `home` and `prefix` have an entry for each.
        row: The state's row, by place among the rows that take part.
        pool_row: The state's row of the pool.
        home: The state's block, by place in `Room.blocks`.
        prefix: Number of tokens before the state that it attends to.
        written: Blocks to write to the map: row of the pool, position, and place in `Room.blocks`.
    """

    states: list[State]
    row: list[int]
    pool_row: list[int]
    home: list[int]
    prefix: list[int]
    written: list[tuple[int, int, int]]


def place_states(
    room: Room, packed: Packed, held: Sequence[int], block: int, parents: bool
) -> Cells:
    """Assign each state a row of the pool, and list the blocks to map in that row after the shared
    prefix.

    A row's first state uses the row's own slots while its block is the engine's current one.

    Args:
        room: The rows of the pool and the blocks that states may take.
        packed: The states of each row.
        held: Tokens of each row that have keys and values.
        block: Tokens of a block.
        parents: Whether states attend to their clean parents.
    """
    cells = Cells([], [], [], [], [], [])
    for at, (start, of_row) in enumerate(zip(room.own.starts, packed, strict=True)):
        further = held[at] > start  # the engine's current block is clean and committed
        for place, (state, looks_at) in enumerate(of_row):
            home = max(place, 1) if further else place
            behind = 0 if further else looks_at if parents else -1
            pool_row, own = room.rows[at][home], room.homes[at][home]
            prefix = start
            if home and behind >= 0:
                cells.written.append((pool_row, prefix, room.homes[at][behind]))
            prefix += block * (behind >= 0)
            if home:
                cells.written.append((pool_row, prefix, own))
            cells.states.append(state)
            cells.row.append(at)
            cells.pool_row.append(pool_row)
            cells.home.append(own)
            cells.prefix.append(prefix)
    return cells


def map_positions(written: Sequence[tuple[int, int, int]], block: int, stride: int) -> np.ndarray:
    """Return the indices [n * block] of blocks in the flattened map of positions to slots, whose
    rows have `stride` entries."""
    firsts = np.array([row * stride + position for row, position, _ in written], np.int64)
    return (firsts[:, None] + np.arange(block)).ravel()


def packed_batch(
    batch: Any,
    own: Own,
    cells: Cells,
    there: dict[str, Tensor],
    host: dict[str, Tensor],
    slots: Tensor,
) -> Any:
    """Make a `ForwardBatch` in which each state is a row, from the engine's batch of requests.

    Args:
        batch: The engine's batch.
        own: The rows of the batch that take part.
        cells: The states, with their rows of the pool and their blocks.
        there: The states' fields on the device.
        host: The same fields on the host.
        slots: [n, block], slots for the states' keys and values.
    """
    count, block = slots.shape
    of_rows = [own.places[row] for row in cells.row]
    nonpadded = batch.global_num_token_non_padded
    return replace(
        batch,
        batch_size=count,
        input_ids=there["ids"],
        positions=there["positions"],
        req_pool_indices=there["pool_row"],
        req_pool_indices_cpu=None,
        seq_lens=there["lengths"],
        seq_lens_cpu=host["lengths"],
        seq_lens_sum=sum(cells.prefix) + count * block,
        orig_seq_lens=there.get("orig_lengths"),
        out_cache_loc=slots.flatten(),
        extend_num_tokens=count * block,
        extend_seq_lens=there["sizes"],
        extend_prefix_lens=there["prefix"],
        extend_start_loc=there["begins"],
        extend_seq_lens_cpu=[block] * count,
        extend_prefix_lens_cpu=cells.prefix,
        extend_logprob_start_lens_cpu=[0] * count,
        rids=[batch.rids[row] for row in of_rows],
        lora_ids=None if batch.lora_ids is None else [batch.lora_ids[row] for row in of_rows],
        global_num_token_non_padded=None
        if nonpadded is None
        else torch.full_like(nonpadded, count * block),
        global_num_token_non_padded_cpu=count * block,
        num_token_non_padded=None,
        kv_loc_plan=None,
        kv_loc_cols=None,
        out_cache_loc_virtual=None,
        out_cache_loc_is_physical=False,
        forward_metadata_ready=False,
        residual_stream=None,
    )


class EngineNetworks(Networks):
    """The networks of one round of an engine batch: they run backbone and head, and pick tokens.

    The head's keys and values lie in the same slots as the backbone's, in layers of their own, and
    are written as soon as a block is committed: a request that shares a prefix through the engine's
    cache shares the head's part of it, too.

    Args:
        engine: The engine's `ModelRunner`.
        batch: The engine's `ForwardBatch` of the rows.
        own: The rows that take part.
        lent: Rows and slots borrowed for the round.
        with_head: Whether the head takes part.
        pickers: The pickers of tokens, for reveals and drafts.
        block: Tokens of a block.

    Attributes:
        graph_ran: Whether the backbone's last forward was a CUDA graph.
    """

    def __init__(
        self,
        engine: Any,
        batch: Any,
        own: Own,
        lent: Borrowed,
        with_head: bool,
        pickers: Pickers,
        block: int,
    ) -> None:
        self.engine, self.batch, self.own, self.lent = engine, batch, own, lent
        self.with_head, self.block = with_head, block
        # it has all members of `Picker` that `Networks` uses
        self.pickers, each = pickers, cast(Picker, pickers)
        self.picker = self.drafter = each
        self.device, self.graph_ran, self.shifted = batch.input_ids.device, False, False
        self.forwards = {"prefill": 0, "denoise": 0, "head": 0}
        slots = (
            batch.out_cache_loc
            if batch.out_cache_loc_virtual is None
            else batch.out_cache_loc_virtual
        )
        self.room = Room(slots.long().view(-1, block), own, lent)
        # the map's borrowed rows still lack the prefix
        self._shares = lent.width > 0 and max(own.starts) > 0
        self._scored: Tensor | None = None
        self._firsts: list[int] = []  # by row, the place of its first state in `_scored`
        # borrowed blocks that rows now keep, as `Cells.written`
        self._kept: list[tuple[int, int, int]] = []
        self._last: tuple[Tensor, np.ndarray, Tensor] | None = (
            None  # the last result; its free columns, on host and device
        )

    def _forward(
        self,
        packed: Packed,
        held: Sequence[int],
        hidden: Sequence[Hidden] = (),
        residual: bool = False,
    ) -> Tensor:
        """Run the backbone over packed states, or the head if `hidden` is given.

        Returns:
            [states, block, hidden_size]: the backbone's hidden states; the head's h_A + h_C, or h_C
            alone if `residual`.
        """
        block, table = self.block, self.engine.req_to_token_pool.req_to_token
        cells = place_states(self.room, packed, held, block, parents=not hidden)
        written, self._kept = [*self._kept, *cells.written], []
        parts = self._parts(cells) | self._to_write(written, cells.home)
        parts["sources"] = Part(places_of(hidden))
        if self._shares:
            parts["from"] = Part([row for row, *more in self.room.rows for _ in more])
            parts["to"] = Part([row for _, *more in self.room.rows for row in more])
        there, host = sent(parts, self.device)
        if self._shares:
            prefixes = table[:, : max(self.own.starts)]
            prefixes.index_copy_(0, there["to"], prefixes.index_select(0, there["from"]))
            self._shares = False
        blocks = self.room.blocks.index_select(0, there["homes"])
        if written:
            self._write(there, blocks[len(cells.home) :])
        batch = packed_batch(self.batch, self.own, cells, there, host, blocks[: len(cells.home)])
        translator = self.engine.kv_index_translator
        translator.own_plan(batch).bind(batch, translator)
        if not hidden:
            output = self.engine.forward(batch, pp_proxy_tensors=None)
            self.graph_ran = bool(output.can_run_graph)
            made = output.logits_output.hidden_states
            made = made.clone() if self.graph_ran else made  # the next replay overwrites the states
        else:
            made = self._read(
                batch, join_blocks(hidden).index_select(0, there["sources"]).flatten(0, 1), residual
            )
        made = made.unflatten(0, (-1, block))
        self._last = made, np.asarray(parts["free"].numbers), there["free"]
        return made

    def _to_write(
        self, written: Sequence[tuple[int, int, int]], homes: Sequence[int] = ()
    ) -> dict[str, Part]:
        """Lay out the map indices of the blocks to write, and the places in `Room.blocks` of these
        blocks, then `homes`."""
        stride = self.engine.req_to_token_pool.req_to_token.stride(0)
        places = [*homes, *(place for _, _, place in written)]
        return {"homes": Part(places), "written": Part(map_positions(written, self.block, stride))}

    def _write(self, there: dict[str, Tensor], slots: Tensor) -> None:
        """Write slots [n, block] to the map of positions to slots, at the indices
        `there["written"]`."""
        table = self.engine.req_to_token_pool.req_to_token
        table.view(-1).index_copy_(0, there["written"], slots.flatten().to(table.dtype))

    def _parts(self, cells: Cells) -> dict[str, Part]:
        """Lay out the fields of a `ForwardBatch` of states, and the indices of the states' free
        columns."""
        block, count, batch = self.block, len(cells.states), self.batch
        starts = np.array([state.start for state in cells.states], np.int64)
        prefix = np.array(cells.prefix, np.int64)
        parts = {
            "ids": Part(
                [token for state in cells.states for token in state.ids], batch.input_ids.dtype
            ),
            "positions": Part((starts[:, None] + np.arange(block)).ravel(), batch.positions.dtype),
            "pool_row": Part(cells.pool_row, batch.req_pool_indices.dtype),
            "lengths": Part(prefix + block, batch.seq_lens.dtype),
            "prefix": Part(prefix, batch.extend_prefix_lens.dtype),
            "sizes": Part(np.full(count, block), batch.extend_seq_lens.dtype),
            "begins": Part(np.arange(0, count * block, block), batch.extend_start_loc.dtype),
            "free": Part(
                [
                    at * block + column
                    for at, state in enumerate(cells.states)
                    for column in state.free
                ]
            ),
        }
        if batch.orig_seq_lens is not None:
            parts["orig_lengths"] = Part(prefix + block, batch.orig_seq_lens.dtype)
        return parts

    def _read(self, batch: Any, given: Tensor, residual: bool) -> Tensor:
        """Run the head on hidden states [tokens, hidden_size]; return h_A + h_C of the same shape,
        or h_C if `residual`."""
        made: Tensor = self.engine.model.run_head(self.engine, batch, given)
        return made if residual else given + made

    def _run_backbone(self, packed: Packed, held: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        """See `Networks`."""
        self._firsts = np.cumsum([0, *map(len, packed)])[:-1].tolist()
        return self._forward(packed, held), self._firsts

    def head(
        self,
        rows: Sequence[Row],
        asked: Sequence[Sequence[tuple[State, Hidden]]],
        residual: bool = False,
    ) -> list[list[Hidden]]:
        """See `Networks.head`; here the head has read every committed block already."""
        packed = [[(state, -1) for state, _ in states] for states in asked]
        made = self._forward(
            packed,
            [row.held for row in rows],
            [hidden for states in asked for _, hidden in states],
            residual,
        )
        self.forwards["head"] += 1
        for row, states in zip(rows, asked, strict=True):
            row.counts.head_forwards += bool(states)
        places = iter(range(len(made)))
        return [[(made, next(places)) for _ in states] for states in asked]

    def commit(self, rows: Sequence[Row], clean: Sequence[Sequence[int]]) -> None:
        """Keep the accepted clean state of each row, and let the head read it.

        A clean state that was drafted lies in borrowed slots: the row keeps those slots and gives
        back its own instead.
        """
        for at, (row, slots) in enumerate(zip(rows, clean, strict=True)):
            if slots and slots[0] > 0:
                self._kept.append((self.own.rows[at], row.held, self.room.keep(at, slots[0])))
        if self.with_head:
            assert self._scored is not None
            asked: list[list[tuple[State, Hidden]]] = [[] for _ in rows]
            for at, (row, slots) in enumerate(zip(rows, clean, strict=True)):
                if slots:
                    asked[at].append(
                        (row.opened(row.held), (self._scored, self._firsts[at] + slots[0]))
                    )
            self.head(rows, asked)
        elif self._kept:
            there, _ = sent(self._to_write(self._kept), self.device)
            self._write(there, self.room.blocks.index_select(0, there["homes"]))
        for row, slots in zip(rows, clean, strict=True):
            row.held += self.block * bool(slots)

    def pick(
        self,
        picker: Any,
        states: Sequence[tuple[Any, State]],
        hidden: Sequence[Hidden],
        parents: Sequence[State | None] = (),
        shortlists: Sequence[Hidden | None] = (),
    ) -> list[Scores]:
        """See `Networks.pick`; there is one pick, and one transfer to the host, for all rows with
        equal `Sampling`."""
        groups: dict[Sampling, list[int]] = {}
        for at, (row, _) in enumerate(states):
            groups.setdefault(row.sampling, []).append(at)
        if len(groups) == 1:
            return super().pick(
                self.pickers.of(next(iter(groups))), states, hidden, parents, shortlists
            )
        found: dict[int, Scores] = {}
        for sampling, places in groups.items():
            part: list[Any] = [
                [of[at] for at in places] if of else of
                for of in (states, hidden, parents, shortlists)
            ]
            found |= zip(places, super().pick(self.pickers.of(sampling), *part), strict=True)
        return [found[at] for at in range(len(states))]

    def _at_columns(self, columns: np.ndarray, *several: Sequence[Hidden]) -> list[Tensor]:
        """See `Networks`; indices of columns that the last forward copied to the device are not
        copied again."""
        made, free, there = self._last or (None, None, None)
        known = free is not None and np.array_equal(columns, free)
        parts = {} if known else {"columns": Part(columns)}
        for name, blocks in enumerate(several):
            if not (
                known and all(one is made and place == at for at, (one, place) in enumerate(blocks))
            ):
                places = (
                    np.array(places_of(blocks), np.int64)[columns // self.block] * self.block
                    + columns % self.block
                )
                parts[str(name)] = Part(places)
        numbers = sent(parts, self.device)[0] if parts else {}
        index = there if there is not None and known else numbers["columns"]
        gathered = (
            join_blocks(blocks).flatten(0, 1).index_select(0, numbers.get(str(name), index))
            for name, blocks in enumerate(several)
        )
        return [index, *gathered]


def join_blocks(blocks: Sequence[Hidden]) -> Tensor:
    """Concatenate the distinct tensors that hold the blocks along their first dimension."""
    first, *others = {id(tensor): tensor for tensor, _ in blocks}.values()
    return torch.cat([first, *others]) if others else first


def places_of(blocks: Sequence[Hidden]) -> list[int]:
    """Return each block's place in the result of `join_blocks`."""
    sizes = {id(tensor): len(tensor) for tensor, _ in blocks}
    begins = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    return [begins[id(tensor)] + place for tensor, place in blocks]
