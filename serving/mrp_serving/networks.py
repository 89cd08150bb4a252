"""The networks of a round on the engine. Their forwards use the engine's KV pools in place of this
package's own cache.

Every state of a round becomes a separate row of one engine batch. All states of a request share the
slots of the prefix, so attention needs no mask. If a state attends to another state of the same
round (its parent, such as a clean block before it), the slots of the parent's block are mapped
between the prefix and the state's own block. This works because every layer writes all keys and
values before it reads any.

The host assigns slots to states. A forward consists of one copy to the device, one gather of slots,
one indexed write to the map of positions to slots, the network, and one copy of the chosen tokens
to the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modeling_mrp.networks.networks import Packed
from modeling_mrp.networks.sampler import Hidden, Sampler
from modeling_mrp.rules.draft import Node
from modeling_mrp.rules.state import Row, Scores, State

from .picker import Pickers
from .scratch import BorrowedSlots
from .transfer import IntVector, send_to_device


@dataclass(frozen=True)
class RequestRows:
    """The rows of an engine batch that take part in a round.

    Attributes:
        indices: For each of these rows, its index in the engine batch.
        rows: For each of these rows, its row in the engine's `req_to_token_pool`, the table that
            maps the positions of texts to slots for keys and values.
        starts: For each of these rows, the absolute position of its current block.
    """

    indices: list[int]
    rows: list[int]
    starts: list[int]


class SlotPool:
    """The rows and the blocks of slots that the states of a round may use: rows of the engine's
    pool, which is the table that maps positions to slots, and slots for keys and values.

    Args:
        slots: int64 [batch, block], the slots of the current block of each row of the engine batch.
        request_rows: The rows of the engine batch that take part in the round.
        loan: The rows of the pool and the slots that the round has borrowed.

    Attributes:
        blocks: int64 [batch + borrowed, block], blocks of slots: first those in `slots`, then the
            borrowed ones.
        rows: For each row that takes part, a list: its own row of the pool, then its borrowed rows.
        slot_blocks: For each row that takes part, a list of indices in `blocks`: its own block,
            then its borrowed blocks.
    """

    def __init__(self, slots: Tensor, request_rows: RequestRows, loan: BorrowedSlots) -> None:
        self.request_rows = request_rows
        self.loan = loan
        self.batch = len(slots)
        self.blocks = torch.cat([slots, loan.slots]) if loan.width else slots
        self.rows = [
            [row, *borrowed] for row, borrowed in zip(request_rows.rows, loan.rows, strict=True)
        ]
        self.slot_blocks = []
        for row_index, batch_index in enumerate(request_rows.indices):
            begin = self.batch + row_index * loan.width
            self.slot_blocks.append([batch_index, *range(begin, begin + loan.width)])

    def keep(self, row_index: int, block_index: int) -> int:
        """Make a borrowed block of slots a row's own block. At the end of the round, the former own
        block goes back to the engine's pool in place of the borrowed one. In `slot_blocks`, the two
        blocks exchange their places.

        Args:
            row_index: The index of the row among the rows that take part.
            block_index: The index of the borrowed block in the row's list in `slot_blocks`, at
                least 1.

        Returns:
            The index in `blocks` of the row's new own block.
        """
        slot_blocks = self.slot_blocks[row_index]
        self.loan.swapped[slot_blocks[block_index] - self.batch] = self.blocks[slot_blocks[0]]
        slot_blocks[0], slot_blocks[block_index] = slot_blocks[block_index], slot_blocks[0]
        return slot_blocks[0]


@dataclass(frozen=True)
class PackedStates:
    """The states of a forward as flat lists, and the blocks of slots to write for them to the
    engine's pool (`req_to_token_pool`), the table that maps positions to slots.

    Attributes:
        states: The states. The next four lists have an entry for each state.
        row: The index, among the rows that take part, of the row to which the state belongs.
        pool_row: The row of the pool that the state uses.
        slot_block: The index in `SlotPool.blocks` of the block of slots that the state uses.
        prefix: The length of the state's prefix, the earlier tokens that the state attends to.
        map_entries: For each block to write to the pool: the row of the pool, the position of the
            block's first token, and the index of the block in `SlotPool.blocks`.
    """

    states: list[State]
    row: list[int]
    pool_row: list[int]
    slot_block: list[int]
    prefix: list[int]
    map_entries: list[tuple[int, int, int]]


def assign_states(
    slot_pool: SlotPool, packed: Packed, cached_lengths: Sequence[int], block: int, parents: bool
) -> PackedStates:
    """Choose, for each state, a row of the engine's pool, which is the table that maps positions to
    slots, and a block of slots for the state's keys and values. Nothing is written to the pool
    here: the result lists the blocks of slots to write (`map_entries`).

    Each row of the batch has a pool row and a block of slots of its own, and has borrowed more of
    both. The first state of a row uses the row's own, unless this block of slots already holds a
    committed block. All other states use borrowed ones.

    A borrowed pool row already lists the slots of the prefix. If the state attends to another block
    (its parent, or the committed block of the row), the slots of that block are to be written next.
    The slots of the state itself come last.

    Args:
        slot_pool: The rows of the pool and the blocks that states may use.
        packed: For each row that takes part, its states, each with the index of its parent among
            them, or -1.
        cached_lengths: For each row that takes part, the number of leading tokens that have keys
            and values.
        block: The number of tokens of a block.
        parents: Whether states attend to their parents.
    """
    packed_states = PackedStates([], [], [], [], [], [])
    for row_index, (start, row_states) in enumerate(
        zip(slot_pool.request_rows.starts, packed, strict=True)
    ):
        pool_rows = slot_pool.rows[row_index]
        slot_blocks = slot_pool.slot_blocks[row_index]
        # True if the engine's current block is clean and committed
        own_block_done = cached_lengths[row_index] > start
        for state_index, (state, parent) in enumerate(row_states):
            block_index = state_index
            parent_block = parent if parents else -1
            if own_block_done:
                block_index = max(state_index, 1)
                parent_block = 0
            pool_row = pool_rows[block_index]
            slot_block = slot_blocks[block_index]
            prefix = start
            if block_index and parent_block >= 0:
                packed_states.map_entries.append((pool_row, prefix, slot_blocks[parent_block]))
            prefix += block * (parent_block >= 0)
            if block_index:
                packed_states.map_entries.append((pool_row, prefix, slot_block))
            packed_states.states.append(state)
            packed_states.row.append(row_index)
            packed_states.pool_row.append(pool_row)
            packed_states.slot_block.append(slot_block)
            packed_states.prefix.append(prefix)
    return packed_states


def map_positions(
    map_entries: Sequence[tuple[int, int, int]], block: int, stride: int
) -> np.ndarray:
    """Return the indices, int64 [n * block], at which n blocks are written to the flattened map of
    positions to slots.

    Args:
        map_entries: For each block, the row of the map, the position of the block's first token,
            and a number that is not used (see `PackedStates`).
        block: The number of tokens of a block.
        stride: The number of entries in each row of the map.
    """
    firsts = np.array([row * stride + position for row, position, _ in map_entries], np.int64)
    return (firsts[:, None] + np.arange(block)).ravel()


def packed_batch(
    batch: Any,
    request_rows: RequestRows,
    packed_states: PackedStates,
    on_device: dict[str, Tensor],
    on_host: dict[str, Tensor],
    slots: Tensor,
) -> Any:
    """Make a `ForwardBatch` in which each state is a row, from the engine's batch of requests.

    Args:
        batch: The engine's `ForwardBatch`, in which each row is a request.
        request_rows: The rows of the batch that take part.
        packed_states: The states, with their rows of the pool and their blocks.
        on_device: Fields of the new batch as tensors on the device. By token: `ids` and
            `positions`, [n * block] each. By state, [n] each: `pool_row`, the row of the pool;
            `prefix`, the number of tokens before the state's block; `lengths`, that number plus the
            size of a block; `sizes`, the size of a block; `begins`, the index of the block's first
            token in `ids`; and `orig_lengths`, equal to `lengths`, if the engine's batch has
            `orig_seq_lens`.
        on_host: The same fields on the host.
        slots: [n, block], the slots for the keys and values of n states.
    """
    count, block = slots.shape
    batch_rows = [request_rows.indices[row] for row in packed_states.row]
    nonpadded = batch.global_num_token_non_padded
    return replace(
        batch,
        batch_size=count,
        input_ids=on_device["ids"],
        positions=on_device["positions"],
        req_pool_indices=on_device["pool_row"],
        req_pool_indices_cpu=None,
        seq_lens=on_device["lengths"],
        seq_lens_cpu=on_host["lengths"],
        seq_lens_sum=sum(packed_states.prefix) + count * block,
        orig_seq_lens=on_device.get("orig_lengths"),
        out_cache_loc=slots.flatten(),
        extend_num_tokens=count * block,
        extend_seq_lens=on_device["sizes"],
        extend_prefix_lens=on_device["prefix"],
        extend_start_loc=on_device["begins"],
        extend_seq_lens_cpu=[block] * count,
        extend_prefix_lens_cpu=packed_states.prefix,
        extend_logprob_start_lens_cpu=[0] * count,
        rids=[batch.rids[row] for row in batch_rows],
        lora_ids=None if batch.lora_ids is None else [batch.lora_ids[row] for row in batch_rows],
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


class EngineNetworks:
    """The networks of one round of an engine batch (a `Runner`): they run the backbone and the
    head, and pick tokens from the outputs of both.

    The head's keys and values lie in the same slots as the backbone's, but in layers of their own.
    They are written as soon as a block is committed. So a request that shares a prefix through the
    engine's cache also shares the head's keys and values of the prefix.

    Args:
        engine: The engine's `ModelRunner`.
        batch: The engine's `ForwardBatch` of the rows.
        request_rows: The rows that take part.
        with_head: Whether the head takes part.
        pickers: The pickers of the rows. They pick tokens for reveals and for drafts.
        block: The number of tokens of a block.

    Attributes:
        sampler: Picks tokens at the free columns of states, with the picker of each state's row.
        graph_ran: Whether the backbone's last forward ran as a CUDA graph.
    """

    def __init__(
        self,
        engine: Any,
        batch: Any,
        request_rows: RequestRows,
        with_head: bool,
        pickers: Pickers,
        block: int,
    ) -> None:
        self.engine = engine
        self.batch = batch
        self.request_rows = request_rows
        self.with_head = with_head
        self.block = block
        self.device = batch.input_ids.device
        self.sampler = Sampler(pickers.of_row, pickers.lm_head_weight, block, self._at_columns)
        self.graph_ran = False
        self._scored: Tensor | None = None
        self._first_states: list[int] = []  # by row, the index of its first state in `_scored`
        # borrowed blocks that rows now keep, in the form of `PackedStates.map_entries`
        self._kept_entries: list[tuple[int, int, int]] = []
        # the last result, and its free columns on host and device
        self._last_result: tuple[Tensor, np.ndarray, Tensor] | None = None

    def borrow(self, loan: BorrowedSlots) -> None:
        """Take over the rows and slots that the round has borrowed from the engine's pools
        (`loan`). Call this before the first forward."""
        slots = self.batch.out_cache_loc_virtual
        if slots is None:
            slots = self.batch.out_cache_loc
        self.slot_pool = SlotPool(slots.long().view(-1, self.block), self.request_rows, loan)
        # the map's borrowed rows still lack the prefix
        self._copies_prefix = loan.width > 0 and max(self.request_rows.starts) > 0

    def _forward(
        self,
        packed: Packed,
        cached_lengths: Sequence[int],
        hidden: Sequence[Hidden] = (),
        residual: bool = False,
    ) -> Tensor:
        """Run the backbone over packed states or, if `hidden` is given, the head.

        Args:
            packed: For each row that takes part, its states, each with the index of its parent
                among them, or -1.
            cached_lengths: For each row that takes part, the number of leading tokens that have
                keys and values.
            hidden: For each state, the hidden states h_A from which the head starts.
            residual: Whether the head's own output is returned without h_A.

        Returns:
            [states, block, hidden_size]: from the backbone, its hidden states; from the head, h_A +
            h_C (its input plus its output), or h_C alone if `residual`.
        """
        block = self.block
        table = self.engine.req_to_token_pool.req_to_token
        packed_states = assign_states(
            self.slot_pool, packed, cached_lengths, block, parents=not hidden
        )
        map_entries = [*self._kept_entries, *packed_states.map_entries]
        self._kept_entries = []
        vectors = self._state_vectors(packed_states) | self._map_vectors(
            map_entries, packed_states.slot_block
        )
        vectors["sources"] = IntVector(block_indices(hidden))
        if self._copies_prefix:
            sources: list[int] = []
            targets: list[int] = []
            for own_row, *borrowed_rows in self.slot_pool.rows:
                sources += [own_row] * len(borrowed_rows)
                targets += borrowed_rows
            vectors["from"] = IntVector(sources)
            vectors["to"] = IntVector(targets)
        on_device, on_host = send_to_device(vectors, self.device)
        if self._copies_prefix:
            prefixes = table[:, : max(self.request_rows.starts)]
            prefixes.index_copy_(0, on_device["to"], prefixes.index_select(0, on_device["from"]))
            self._copies_prefix = False
        blocks = self.slot_pool.blocks.index_select(0, on_device["blocks"])
        count = len(packed_states.states)
        if map_entries:
            self._write_map(on_device, blocks[count:])
        batch = packed_batch(
            self.batch, self.request_rows, packed_states, on_device, on_host, blocks[:count]
        )
        translator = self.engine.kv_index_translator
        translator.own_plan(batch).bind(batch, translator)
        if not hidden:
            result = self.engine.forward(batch, pp_proxy_tensors=None)
            self.graph_ran = bool(result.can_run_graph)
            output = result.logits_output.hidden_states
            if self.graph_ran:
                output = output.clone()  # the next replay overwrites the states
        else:
            inputs = join_blocks(hidden).index_select(0, on_device["sources"])
            output = self._apply_head(batch, inputs.flatten(0, 1), residual)
        output = output.unflatten(0, (-1, block))
        self._last_result = output, np.asarray(vectors["free"].numbers), on_device["free"]
        return output

    def _map_vectors(
        self, map_entries: Sequence[tuple[int, int, int]], slot_blocks: Sequence[int] = ()
    ) -> dict[str, IntVector]:
        """Return two vectors, by name. "blocks" holds indices in `SlotPool.blocks`: `slot_blocks`,
        then the blocks of `map_entries`. "map_indices" holds the indices in the flattened map of
        positions to slots at which the blocks of `map_entries` are written."""
        stride = self.engine.req_to_token_pool.req_to_token.stride(0)
        blocks = [*slot_blocks, *(block for _, _, block in map_entries)]
        return {
            "blocks": IntVector(blocks),
            "map_indices": IntVector(map_positions(map_entries, self.block, stride)),
        }

    def _write_map(self, on_device: dict[str, Tensor], slots: Tensor) -> None:
        """Write slots [n, block] to the map of positions to slots, at the indices
        `on_device["map_indices"]`."""
        table = self.engine.req_to_token_pool.req_to_token
        table.view(-1).index_copy_(0, on_device["map_indices"], slots.flatten().to(table.dtype))

    def _state_vectors(self, packed_states: PackedStates) -> dict[str, IntVector]:
        """Return the states' vectors of integers, by name: the fields of a `ForwardBatch` in which
        each state is a row and, under the name "free", the indices of the states' free columns. The
        index of a column is that of its state times the block size, plus the column."""
        block = self.block
        count = len(packed_states.states)
        batch = self.batch
        ids: list[int] = []
        starts = np.empty(count, np.int64)
        free_columns = []
        for state_index, state in enumerate(packed_states.states):
            ids += state.ids
            starts[state_index] = state.start
            for column in state.free:
                free_columns.append(state_index * block + column)
        prefix = np.array(packed_states.prefix, np.int64)
        vectors = {
            "ids": IntVector(ids, batch.input_ids.dtype),
            "positions": IntVector(
                (starts[:, None] + np.arange(block)).ravel(), batch.positions.dtype
            ),
            "pool_row": IntVector(packed_states.pool_row, batch.req_pool_indices.dtype),
            "lengths": IntVector(prefix + block, batch.seq_lens.dtype),
            "prefix": IntVector(prefix, batch.extend_prefix_lens.dtype),
            "sizes": IntVector(np.full(count, block), batch.extend_seq_lens.dtype),
            "begins": IntVector(np.arange(0, count * block, block), batch.extend_start_loc.dtype),
            "free": IntVector(free_columns),
        }
        if batch.orig_seq_lens is not None:
            vectors["orig_lengths"] = IntVector(prefix + block, batch.orig_seq_lens.dtype)
        return vectors

    def _apply_head(self, batch: Any, hidden: Tensor, residual: bool) -> Tensor:
        """Run the head on hidden states h_A [tokens, hidden_size] of the states in the engine batch
        `batch`. Return h_A + h_C, where h_C is the head's output, or h_C alone if `residual`; the
        result has the shape of h_A."""
        residual_output: Tensor = self.engine.model.run_head(self.engine, batch, hidden)
        return residual_output if residual else hidden + residual_output

    def score(self, rows: Sequence[Row], drafts: Sequence[Sequence[Node]]) -> list[list[Scores]]:
        """Score the nodes of all rows in one backbone forward; return the scores by row and node.
        Ended rows have no nodes.

        A node's state sees the committed text of its row before it, then the ids of its parent
        node's state, if it has a parent, and itself. Add 1 to `row.counts.forwards` of each row
        that has nodes.
        """
        packed = []
        for row, nodes in zip(rows, drafts, strict=True):
            row.counts.forwards += bool(nodes)
            packed.append([(node.state, node.parent) for node in nodes])
        self._first_states = np.cumsum([0, *map(len, packed)])[:-1].tolist()
        self._scored = self._forward(packed, [row.held for row in rows])
        return self.sampler.score(rows, drafts, self._scored, self._first_states)

    def head(
        self,
        rows: Sequence[Row],
        queries: Sequence[Sequence[tuple[State, Hidden]]],
        residual: bool = False,
    ) -> list[list[Hidden]]:
        """Run one head pass over states of each row; return its outputs by row and state.

        The output at a state is h_A + h_C, which estimates the backbone's hidden states there, or
        the head's own output h_C alone if `residual`. The head sees the committed text of the row,
        of which it has read every block before this call. Add 1 to `row.counts.head_forwards` of
        each row that has states.

        Args:
            rows: The rows that take part.
            queries: For each row, its states, each with h_A: the backbone's hidden states before
                the reveal that led to the state, or an estimate of them. Like an output, h_A is a
                pair: a tensor [n, block, hidden_size], and the index in it of the block that is
                meant.
            residual: Whether outputs leave out h_A.
        """
        packed = []
        hidden: list[Hidden] = []
        for states in queries:
            packed.append([(state, -1) for state, _ in states])
            hidden += [state_hidden for _, state_hidden in states]
        output = self._forward(packed, [row.held for row in rows], hidden, residual)
        results: list[list[Hidden]] = []
        first = 0
        for row, states in zip(rows, queries, strict=True):
            row.counts.head_forwards += bool(states)
            results.append([(output, first + index) for index in range(len(states))])
            first += len(states)
        return results

    def commit(self, rows: Sequence[Row], clean: Sequence[Sequence[int]]) -> None:
        """Keep the keys and values of the accepted clean state (a block without masks) of each row
        that has one, and add the block size to `row.held`. If the head takes part, it reads these
        blocks in one pass.

        A clean state that was drafted lies in borrowed slots. The row keeps these slots, and gives
        back its own in their place.

        Args:
            rows: The rows that take part.
            clean: For each row, a list: the index of its accepted clean state among the nodes of
                the row in the last `score`; empty if it has none.
        """
        for row_index, (row, slots) in enumerate(zip(rows, clean, strict=True)):
            if slots and slots[0] > 0:
                pool_row = self.request_rows.rows[row_index]
                new_block = self.slot_pool.keep(row_index, slots[0])
                self._kept_entries.append((pool_row, row.held, new_block))
        if self.with_head:
            assert self._scored is not None
            inputs: list[list[tuple[State, Hidden]]] = [[] for _ in rows]
            for row_index, (row, slots) in enumerate(zip(rows, clean, strict=True)):
                if slots:
                    hidden = (self._scored, self._first_states[row_index] + slots[0])
                    inputs[row_index].append((row.first_state(row.held), hidden))
            self.head(rows, inputs)
        elif self._kept_entries:
            on_device, _ = send_to_device(self._map_vectors(self._kept_entries), self.device)
            self._write_map(on_device, self.slot_pool.blocks.index_select(0, on_device["blocks"]))
        for row, slots in zip(rows, clean, strict=True):
            row.held += self.block * bool(slots)

    def _at_columns(self, columns: np.ndarray, *several: Sequence[Hidden]) -> list[Tensor]:
        """Copy column indices to the device, and gather the hidden states at these columns from
        each list of blocks in `several` (a `Gather`). The index of a column is that of its state
        times the block size, plus the column.

        Return the indices [n], then the hidden states [n, size] for each list. Indices that are
        still on the device from the last forward are not copied again.
        """
        last_output, last_columns, last_index = self._last_result or (None, None, None)
        is_last = last_columns is not None and np.array_equal(columns, last_columns)
        vectors = {}
        if not is_last:
            vectors["columns"] = IntVector(columns)
        for name, blocks in enumerate(several):
            in_order = all(
                tensor is last_output and block_index == state_index
                for state_index, (tensor, block_index) in enumerate(blocks)
            )
            if not (is_last and in_order):
                first_columns = np.array(block_indices(blocks), np.int64) * self.block
                positions = first_columns[columns // self.block] + columns % self.block
                vectors[str(name)] = IntVector(positions)
        numbers: dict[str, Tensor] = {}
        if vectors:
            numbers, _ = send_to_device(vectors, self.device)
        index = last_index
        if index is None or not is_last:
            index = numbers["columns"]
        gathered = [index]
        for name, blocks in enumerate(several):
            positions_on_device = numbers.get(str(name), index)
            gathered.append(join_blocks(blocks).flatten(0, 1).index_select(0, positions_on_device))
        return gathered


def join_blocks(blocks: Sequence[Hidden]) -> Tensor:
    """Concatenate the tensors that hold the given blocks; return one tensor [n, block, size].

    Each block is given as a pair: a tensor [m, block, size], and the index of the block in it.
    Several blocks may lie in the same tensor. Whole tensors are concatenated along their first
    dimension, each once, in the order in which they first occur. `block_indices` finds the blocks
    in the result.
    """
    first, *further = {id(tensor): tensor for tensor, _ in blocks}.values()
    return torch.cat([first, *further]) if further else first


def block_indices(blocks: Sequence[Hidden]) -> list[int]:
    """Return, for each block, its index along the first dimension of the tensor that
    `join_blocks(blocks)` returns."""
    sizes = {id(tensor): len(tensor) for tensor, _ in blocks}
    begins = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    return [begins[id(tensor)] + index for tensor, index in blocks]
