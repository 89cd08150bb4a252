"""The one owner of a model's forwards and of their keys and values: `prefill`, `score`, `head`,
`commit`.

States lie side by side in one forward. Each state sees the committed text of its row, itself, and
its *parent*, if it has one: an uncommitted state of the block before it (see `Node.parent`). Ids go
to the device in one copy, and picks come back in one copy. Until the next forward, the keys and
values of scored states lie in slots after the texts. `commit` copies the keys and values of
accepted clean states to the slots of the texts.
"""

from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.dispatch import unusable
from ..kernels.round_layers import Pair, Plans, RoundMask, run_fused
from ..model.diffusion import block_causal_mask
from ..rules.draft import Node
from ..rules.state import Row, Scores, State
from .cache import BlockCache
from .graphs import cache_for
from .inspection import decide, fingerprint
from .layers import pack, plan_layers
from .picker import Picker
from .sampler import Hidden, Sampler, gather_blocks
from .uploads import host_copy, upload, upload_all

# Prompt tokens per prefill forward, at most, in whole blocks.
PREFILL_CHUNK = 2048
# Numbers of states of a row that are recorded.
RECORDED_WIDTHS = (1, 2, 4, 8)
# Blocks beyond the last one whose rotary angles are computed with those of a round.
ANGLES_AHEAD = 16

# By row, its states, each with the index of its parent among them, or -1.
Packed = Sequence[Sequence[tuple[State, int]]]
# The inputs of a forward over a part of the texts: its begin and end, ids, positions and mask.
Chunk = tuple[int, int, Tensor, Tensor, Tensor]


class Networks:
    """Runs the backbone and the head on the rows of one call, and picks tokens from their outputs
    (a `Runner`).

    Args:
        model: An `MRPForCausalLM`. Without `plans`, any object that has its `config`, `backbone`
            and `residual`.
        cache: Keys and values of backbone and head.
        with_head: Whether the head takes part.
        picker: Picks tokens at single positions, given their hidden states. Its `lm_head_weight`
            determines the device, and its `dispatch` the kernels.
        plans: The fused layers (`plan_layers`). If None, layers run as modules, under a dense mask.
        recorded: A function that runs a forward from a recording (`Graphs.call`); None if forwards
            are not recorded.

    Attributes:
        sampler: Applies the picker to the free columns of states, and makes the scores of the
            states.
        forwards: The number of forwards so far, by role: `prefill` and `denoise` (forwards of the
            backbone over prompts and over states of rounds), and `head`. A forward counts once,
            however many rows it has.
        slots: The number of rows in a forward of the backbone, summed over these forwards. It
            includes rows that had ended but not left the batch.
    """

    def __init__(
        self,
        model: Any,
        cache: BlockCache,
        with_head: bool,
        picker: Picker,
        plans: Plans | None = None,
        recorded: Callable[..., Tensor] | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.plans = plans
        self.recorded = recorded
        self.picker = picker
        self.device = picker.lm_head_weight.device
        config = model.config
        self.block = config.block_size
        self.sampler = Sampler(lambda row: picker, picker.lm_head_weight, self.block)
        self.mask_id = config.mask_token_id
        self.with_head = with_head
        self.backbone_layers = range(config.num_hidden_layers)
        self.head_layers = range(
            len(self.backbone_layers), len(self.backbone_layers) + config.num_nextn_predict_layers
        )
        self.forwards = {"prefill": 0, "denoise": 0, "head": 0}
        self.slots = 0
        self._rows_join = False
        self._swaps: list[list[tuple[int, int]]] = []
        # rotary angles of consecutive positions: the first, the number, and cos and sin
        self._angles_from = 0
        self._angles_count = 0
        self._angles: Pair | None = None
        # whether the backbone's hidden state at a position is for the next token
        self.shifted = cache.shifted
        # hidden states of the last `score`, [n, block (+ 1 if shifted), hidden_size]
        self._scored: Tensor | None = None
        cache.active = cache.rows

    def prefill(self, rows: Sequence[Row], reused: Sequence[int], first: int = 0) -> list[Scores]:
        """Run the backbone over the text of each row, up to the end of the block with the row's
        first mask. Return the scores of that block's state for each row.

        Args:
            rows: Rows that lie side by side in the batch.
            reused: For each row, the number of leading tokens whose keys and values are cached. The
                forwards start at the least of these numbers.
            first: The index in the batch of the first of these rows.
        """
        self._let_join(range(first, first + len(rows)), reused)
        with self.cache.of_rows(first, len(rows)):
            return self._prefill(rows, reused, first)

    def read_ahead(self, row: Row, index: int, begin: int, end: int) -> None:
        """Compute keys and values of a part of a prompt, in whole blocks from position `begin` to
        position `end`, before its row joins the batch. The later `prefill` of the row reuses them.
        Set `row.held` to `end` and, if the head takes part, `row.head_held` as well.

        Until the row joins, the caller must keep another row in its place in the batch: an ended
        row at `index` that has the same text, `held` and `head_held` as `row` (see `Row`).

        Args:
            row: The row that will join.
            index: The index in the batch at which it will join.
            begin, end: The part of the prompt. The tokens before `begin` must have been read
                already.
        """
        self._let_join(range(index, index + 1), [begin])
        with self.cache.of_rows(index, 1):
            for _ in self._read_prompts([row], [begin], end, index):
                row.held = end
        if self.with_head:
            self._read_texts([row], index, [row])

    def _let_join(self, indices: range, reused: Sequence[int]) -> None:
        """Prepare the cache for the rows at `indices` if they join a batch whose other rows are
        already there. In these rows, zero all slots after the first tokens that are reused, because
        earlier rows may have left NaN in them.

        `reused` has, for each of `indices`, the number of tokens that are reused.
        """
        if len(indices) == self.cache.active:
            return
        self._rows_join = True
        for index, tokens in zip(indices, reused, strict=True):
            self.cache.blank(range(len(self.cache.layer_devices)), index, tokens)

    def read(
        self,
        texts: Sequence[Sequence[int]],
        begin: int,
        length: int,
        first: int = 0,
        chunk: int | None = None,
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Compute keys and values of texts from position `begin` to position `length`, in whole
        blocks, by one forward or several. After each forward, yield its begin, its end and its
        hidden states [texts, end - begin, hidden_size]. At the column of a token is the hidden
        state that predicts that token.

        Args:
            texts: The token ids of rows that lie side by side. A shorter text is filled up with
                masks.
            begin, length: Begin and end of the part that is read. The tokens before `begin` must
                have been read already.
            first: The index in the batch of the first of these rows.
            chunk: The largest number of tokens of a row in a forward, but at least a block. None:
                `PREFILL_CHUNK`, 2048.
        """
        cached_hidden = self.cache.hidden[first : first + len(texts)]
        for start, end, *inputs in self._chunks(texts, begin, length, chunk):
            hidden = self.model.backbone(*inputs, self.cache).to(self.device)
            self.forwards["prefill"] += 1
            self.slots += len(texts)
            if self.with_head or self.shifted:
                cached_hidden[:, start + self.shifted : end + self.shifted] = hidden
            if self.shifted:
                hidden = cached_hidden[:, start:end].to(self.device, copy=True)
            yield start, end, hidden

    def _read_prompts(
        self, rows: Sequence[Row], reused: Sequence[int], length: int, first: int
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Run the backbone over the texts of rows up to the position `length`, from the least
        number in `reused` on; yield what `read` yields.

        For each row, add to `row.counts` the forwards that compute tokens of the row that were not
        reused and come no later than its first state. `first` is the index in the batch of the
        first of `rows`.
        """
        texts = [row.text for row in rows]
        for begin, end, hidden in self.read(texts, min(reused), length, first):
            for row, tokens in zip(rows, reused, strict=True):
                row.counts.forwards += row.state.start >= begin and tokens < end
            yield begin, end, hidden

    def _prefill(self, rows: Sequence[Row], reused: Sequence[int], first: int) -> list[Scores]:
        length = max(row.state.start for row in rows) + self.block
        head_length = max(row.head_held for row in rows)
        for index, row in enumerate(rows, first):
            if row.head_held < head_length:  # possible only if an earlier call filled the cache
                self.cache.blank(self.head_layers, index, row.head_held, head_length)
        first_blocks: dict[int, Hidden] = {}
        for begin, end, hidden in self._read_prompts(rows, reused, length, first):
            blocks = hidden.unflatten(1, (-1, self.block)).flatten(0, 1)
            for index, row in enumerate(rows):
                if begin <= row.state.start < end:
                    position = index * (end - begin) + row.state.start - begin
                    first_blocks[index] = blocks, position // self.block
        states = []
        for row in rows:
            row.held = row.state.start
            states.append((row, row.state))
        return self.sampler.pick(states, [first_blocks[index] for index in range(len(rows))])

    def _catch_up(self, rows: Sequence[Row], indices: Sequence[int]) -> None:
        """Run the head over committed text that it has not read yet, for the rows at `indices`,
        which lag.

        The pass is over all rows of the batch; for rows that do not lag, the head reads some text
        again, with the same keys and values as the result. But where rows join one by one, the
        passes are over parts of the batch in which at least half of the rows lag.
        """
        spans: list[list[int]] = []
        for index in indices if self._rows_join else ():
            if spans and index - spans[-1][0] < 2 * (len(spans[-1]) + 1):
                spans[-1].append(index)
            else:
                spans.append([index])
        for span in spans:
            first = span[0]
            self._read_texts(rows[first : span[-1] + 1], first, [rows[index] for index in span])
        if not spans:
            self._read_texts(rows, 0, [rows[index] for index in indices])

    def _read_texts(self, rows: Sequence[Row], first: int, lagging: Sequence[Row]) -> None:
        """Run the head over committed text of `rows`, which lie side by side in the batch from the
        index `first` on. Afterwards, the head has read all committed text of the rows `lagging`."""
        start = min(row.head_held for row in lagging)
        last = max(row.held for row in lagging)
        with self.cache.of_rows(first, len(rows)):
            texts = [row.text for row in rows]
            for begin, end, ids, positions, mask in self._chunks(texts, start, last):
                hidden = self.cache.hidden[first : first + len(rows), begin:end]
                cached_lengths = upload([row.held for row in rows], hidden.device)
                is_cached = torch.arange(begin, end, device=hidden.device) < cached_lengths[:, None]
                self.model.residual(
                    ids, torch.where(is_cached[..., None], hidden, 0), positions, mask, self.cache
                )
                self.forwards["head"] += 1
                for row in lagging:
                    row.counts.head_forwards += row.held > begin and row.head_held < end
        for row in lagging:
            row.head_held = row.held

    def _chunks(
        self,
        texts: Sequence[Sequence[int]],
        begin: int,
        length: int,
        chunk: int | None = None,
    ) -> Iterator[Chunk]:
        """Yield the inputs of each block-causal forward over `texts` from position `begin` to
        position `length`, in whole blocks. Before each forward, set the target of the cache to the
        slots of the forward's tokens. `chunk` is as in `read`."""
        rows = [[*text, *[self.mask_id] * length][:length] for text in texts]
        ids = upload(np.array(rows, np.int64).ravel(), self.device).view(len(rows), length)
        positions = torch.arange(length, device=self.device).expand_as(ids)
        step = max(1, (chunk or PREFILL_CHUNK) // self.block) * self.block
        for start in range(begin, length, step):
            end = min(length, start + step)
            visible = positions[:, :end]
            self.cache.target(start, end - start, prefill=True)
            mask = block_causal_mask(
                positions[:, start:end],
                visible,
                torch.ones_like(visible, dtype=torch.bool),
                self.block,
            )
            yield start, end, ids[:, start:end], positions[:, start:end], mask

    def score(self, rows: Sequence[Row], drafts: Sequence[Sequence[Node]]) -> list[list[Scores]]:
        """Score the nodes of all rows in one backbone forward; return the scores by row and node.
        Ended rows have no nodes."""
        packed = []
        for nodes in drafts:
            packed.append([(node.state, node.parent) for node in nodes])
        width = self._width(packed)
        self._scored = self._network(packed, width, [row.held for row in rows])
        self.forwards["denoise"] += 1
        self.slots += len(rows)
        for row, nodes in zip(rows, drafts, strict=True):
            row.counts.forwards += bool(nodes)
        hidden = self._scored[:, :-1] if self.shifted else self._scored
        first_states = range(0, len(hidden), width)
        return self.sampler.score(rows, drafts, hidden, first_states)

    def hidden(self, states: Sequence[Sequence[State]], read: int) -> Tensor:
        """Run the backbone over states of each row, wherever in the row's text they lie.

        Args:
            states: For each row, its states. A state sees itself, and the blocks before its own as
                far as these lie within the first `read` tokens of the row.
            read: The number of leading tokens of each row whose keys and values the method `read`
                has computed.

        Returns:
            [rows, width, block, hidden_size], where width is at least the largest number of states
            of a row; what lies beyond a row's states is arbitrary. At the column of a token is the
            hidden state that predicts that token.
        """
        packed = [[(state, -1) for state in of_row] for of_row in states]
        width = self._width(packed)
        hidden = self._network(packed, width, [read] * len(states))
        self.forwards["denoise"] += 1
        self.slots += len(states)
        return hidden[:, : self.block].unflatten(0, (len(states), width))

    def head(
        self,
        rows: Sequence[Row],
        queries: Sequence[Sequence[tuple[State, Hidden]]],
        residual: bool = False,
    ) -> list[list[Hidden]]:
        """Run one head pass over states of each row; return its outputs by row and state.

        The output at a state is h_A + h_C, which estimates the backbone's hidden states there, or
        the head's own output h_C alone if `residual`. If a row with states has one committed block
        that the head has not read yet, the pass also reads that block. If it has several, passes of
        their own read them first.

        Args:
            rows: All rows of the batch.
            queries: For each row, its states, each with h_A: the backbone's hidden states before
                the reveal that led to the state, or an estimate of them. At least one row has
                states. Like an output, h_A is a pair: a tensor [n, block, hidden_size], and the
                index in it of the block that is meant.
            residual: Whether outputs leave out h_A.
        """
        lagging = [
            index
            for index, (row, states) in enumerate(zip(rows, queries, strict=True))
            if states and row.held - row.head_held > self.block
        ]
        if lagging:
            self._catch_up(rows, lagging)
        committed_blocks = self.cache.hidden.unflatten(1, (-1, self.block)).flatten(0, 1)
        packed: list[list[tuple[State, int]]] = []
        row_inputs: list[list[Hidden]] = []
        # indices of rows with a committed block that the head has not read, put before their states
        leading_rows: list[int] = []
        for index, (row, states) in enumerate(zip(rows, queries, strict=True)):
            row.counts.head_forwards += bool(states)
            entries: list[tuple[State, int]] = []
            blocks: list[Hidden] = []
            parent = -1
            if states and row.held > row.head_held:
                leading_rows.append(index)
                position = index * self.cache.hidden.shape[1] + row.head_held
                entries.append((row.first_state(row.head_held), -1))
                blocks.append((committed_blocks, position // self.block))
                parent = 0
            for state, hidden in states:
                entries.append((state, parent))
                blocks.append(hidden)
            packed.append(entries)
            row_inputs.append(blocks)
        width = self._width(packed)
        filler = next(blocks[0] for blocks in row_inputs if blocks)
        padded: list[Hidden] = []
        for blocks in row_inputs:
            padded += blocks
            padded += [filler] * (width - len(blocks))
        head_inputs = gather_blocks(padded)
        output = self._network(packed, width, [row.head_held for row in rows], head_inputs)
        self.forwards["head"] += 1
        if leading_rows:
            moves = [(index, self.cache.begin, rows[index].head_held) for index in leading_rows]
            self.cache.move(self.head_layers, moves, self.block)
        for index in leading_rows:
            rows[index].head_held += self.block
        if not residual:
            output = head_inputs.to(output.device) + output
        results = []
        for index, (entries, states) in enumerate(zip(packed, queries, strict=True)):
            end = index * width + len(entries)
            results.append([(output, slot) for slot in range(end - len(states), end)])
        return results

    def commit(self, rows: Sequence[Row], clean: Sequence[Sequence[int]]) -> None:
        """Copy keys, values and (for the head) hidden states of accepted clean states (those
        without masks) to the slots of their rows' texts, and add the block size to `row.held` for
        each of these states.

        For each row, `clean` has the indices of its accepted clean states among the nodes of the
        row in the last `score`, in order. There is at least one such state.
        """
        moves = []
        for index, (row, slots) in enumerate(zip(rows, clean, strict=True)):
            for slot in slots:
                moves.append((index, self.cache.begin + slot * self.block, row.held))
                row.held += self.block
        self.cache.move(self.backbone_layers, moves, self.block)
        if self.with_head or self.shifted:
            assert self._scored is not None
            cached_hidden = self.cache.hidden
            width = len(self._scored) // len(rows)
            row, source, target = np.array(moves, np.int64).T
            scored = self._scored.flatten(0, 1)
            columns = np.arange(self._scored.shape[1])
            first = (row * width + (source - self.cache.begin) // self.block) * len(columns)
            sources = (first[:, None] + columns).ravel()
            targets = ((row * cached_hidden.shape[1] + target)[:, None] + columns).ravel()
            indices = upload_all([sources, targets], self.device)
            values = scored[indices[0]].to(cached_hidden.device)
            cached_hidden.flatten(0, 1)[indices[1].to(cached_hidden.device)] = values

    def _width(self, packed: Packed) -> int:
        """Return the number of states of each row that a forward computes: the largest number that
        a row has.

        If forwards are recorded, return instead the smallest number of `RECORDED_WIDTHS` that is
        large enough, if the cache has room for so many states, because each width has its own
        recording.
        """
        most = max(map(len, packed))
        if self.recorded is None:
            return most
        room = self.cache.scratch // self.block
        return next((width for width in RECORDED_WIDTHS if most <= width <= room), most)

    def _network(
        self,
        packed: Packed,
        width: int,
        cached_lengths: Sequence[int],
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Run the backbone over `width` states of each row or, if `hidden` is given, the head.

        Keys and values of the states are written to slots after the longest text of all rows, so
        that no text is overwritten.

        Args:
            packed: For each row, its states. Rows with fewer than `width` states are filled up.
            width: The number of states of each row in the forward.
            cached_lengths: For each row, the number of leading tokens whose keys and values are
                cached. A state sees those of them that lie before its block.
            hidden: [rows * width, block, hidden_size], the input of the head.

        Returns:
            Hidden states of the backbone, or h_C of the head, [rows * width, block, hidden_size].
            If hidden states are shifted, those of the backbone have block + 1 columns: the first is
            for the first token of the block, the last for the first token of the next block.
        """
        rows = len(packed)
        longest = max(cached_lengths)
        self.cache.target(longest, width * self.block)
        no_ids = (self.mask_id,) * self.block
        numbers = array("q")
        starts = []
        parents = []
        limits = []
        for states, cached in zip(packed, cached_lengths, strict=True):
            for state, parent in states:
                numbers.extend(state.ids)
                starts.append(state.start)
                parents.append(parent)
                limits.append(min(state.start, cached))
            for _ in range(width - len(states)):
                numbers.extend(no_ids)
                starts.append(longest)
                parents.append(-1)
                limits.append(cached)
        for of_states in (starts, parents, limits):
            numbers.extend(of_states)
        table = host_copy(np.frombuffer(numbers, np.int64), self.device)
        begin = self.cache.begin
        sees_all = width == 1 and min(limits) == begin and self.recorded is None
        if self.plans is not None and self.recorded is None:
            self._keep_angles(min(starts), max(starts))
        forward = partial(self._packed, rows, width, begin, sees_all)
        inputs = [] if hidden is None else [hidden.reshape(rows, width * self.block, -1)]
        if self.recorded is None:
            output = forward(table.to(self.device, non_blocking=True), *inputs)
        else:
            key = (rows, width, begin, self.picker.dispatch, self.plans is not None)
            output = self.recorded(key, forward, table, *inputs)
        return output.view(rows * width, -1, output.shape[-1])

    def _packed(
        self,
        rows: int,
        width: int,
        begin: int,
        sees_all: bool,
        table: Tensor,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Unpack `table` and run the network, using only tensor operations that a graph can record.

        Args:
            rows, width: The number of rows, and the number of states of each row.
            begin: The first of the slots to which the keys and values of the states are written.
            sees_all: Whether every state sees all slots before `begin` (see `RoundMask`).
            table: The ids, the start and the parent of each state, and the number of cached tokens
                that each state sees.
            hidden: The input of the head; None to run the backbone.
        """
        states = rows * width
        ids, starts, parents, limits = table.split([states * self.block, states, states, states])
        ids = ids.view(rows, -1)
        parent = parents.view(rows, width)
        committed = limits.view(rows, width)
        positions = (starts[:, None] + torch.arange(self.block, device=self.device)).view(rows, -1)
        mask = RoundMask(committed, parent, self.block, self.picker.dispatch, sees_all)
        if self.plans is not None:
            output = self._fused(self.plans, ids, positions, mask, hidden)
        elif hidden is None:
            output = self.model.backbone(ids, positions, mask.dense(begin), self.cache).to(
                self.device
            )
        else:
            output = self.model.residual(ids, hidden, positions, mask.dense(begin), self.cache).to(
                self.device
            )
        if self.shifted and hidden is None:
            return self._shifted_states(output, committed, parent)
        return output

    def _fused(
        self,
        plans: Plans,
        ids: Tensor,
        positions: Tensor,
        mask: RoundMask,
        hidden: Tensor | None,
    ) -> Tensor:
        """Run the fused layers over states: those of the head if its input `hidden` is given,
        otherwise those of the backbone."""
        backbone = self.model.model
        head = self.model.mrp_head
        embeds = backbone.embed_tokens(ids)
        if hidden is None:
            network = backbone
            inputs = embeds
        else:
            network = head
            inputs = head.project_inputs(embeds, hidden)
        return run_fused(
            plans[network],
            inputs,
            self._rotation(embeds, positions),
            mask,
            self.cache,
        )

    def _keep_angles(self, first: int, last: int) -> None:
        """Keep the rotary angles of the blocks that start at positions from `first` to `last`, and
        of some blocks after them, for this forward and the next ones. Angles that also depend on
        the length of the text are not kept."""
        rotary = self.model.model.rotary_emb
        kept_to = self._angles_from + self._angles_count
        if self._angles_from <= first and last + self.block <= kept_to:
            return
        if rotary.rope_type in ("dynamic", "longrope"):
            return
        self._angles_from = first
        self._angles_count = last - first + ANGLES_AHEAD * self.block
        positions = torch.arange(first, first + self._angles_count, device=self.device)
        weight = self.model.model.embed_tokens.weight
        cos, sin = _with_signs(*rotary(weight, positions[None]))
        self._angles = cos[0], sin[0]

    def _rotation(self, embeds: Tensor, positions: Tensor) -> Pair:
        """Return cos and sin of the rotary embedding at positions [rows, tokens], two tensors
        [rows, tokens, head_dim] in the dtype of `embeds`. The first half of sin has its sign
        changed. They are taken from the angles that are kept, if any are (recorded forwards keep
        none, because recordings outlive this object)."""
        if self._angles is None:
            return _with_signs(*self.model.model.rotary_emb(embeds, positions))
        index = positions - self._angles_from
        cos, sin = self._angles
        return F.embedding(index, cos), F.embedding(index, sin)

    def _shifted_states(self, hidden: Tensor, committed: Tensor, parent: Tensor) -> Tensor:
        """Prepend to the hidden states of each state the one that predicts the state's first token:
        the last hidden state of its parent or, without a parent, of the text that it sees.

        `hidden` is [rows, width * block, hidden_size]; the result is [rows, width, block + 1,
        hidden_size]. For each state, `committed` [rows, width] is the number of cached tokens that
        it sees, and `parent` [rows, width] is the index of its parent, or -1.
        """
        states = hidden.unflatten(1, (-1, self.block))
        cached_hidden = self.cache.hidden
        previous = cached_hidden[
            torch.arange(len(hidden), device=cached_hidden.device)[:, None],
            committed.to(cached_hidden.device),
        ].to(self.device)
        parent_lasts = states[:, :, -1].gather(
            1, parent.clamp(min=0)[..., None].expand(-1, -1, hidden.shape[-1])
        )
        previous = torch.where(parent[..., None] >= 0, parent_lasts, previous)
        return torch.cat([previous[:, :, None], states], 2)

    def shrink_batch(self, rows: list[Row], size: int) -> list[Row]:
        """Shrink the batch to `size` rows. Before that, move all unfinished rows, with their part
        of the cache, to the first `size` places, into which they must fit. Return the rows that are
        left, in their new order; `rows` itself is not changed."""
        free_indices = []
        row_indices = []
        for target, row in enumerate(rows):
            if target < size and row.stop is not None:
                free_indices.append(target)
            elif target >= size and row.stop is None:
                row_indices.append(target)
        pairs = list(
            zip(free_indices, row_indices, strict=False)
        )  # there may be more room than rows
        rows = list(rows)
        for target, source in pairs:
            rows[target], rows[source] = rows[source], rows[target]
        if pairs:
            with self.cache.exchanging():
                self._swaps.append(pairs)
                self.cache.swap(pairs, max(row.held for row in rows))
        self.cache.active = size
        return rows[:size]

    def extend(self, size: int) -> None:
        """Make the batch the first `size` rows of the cache, more than before. Rows that
        `shrink_batch` has moved stay where they are; `restore_batch` no longer moves them back."""
        self._swaps.clear()
        self.cache.active = size

    def restore_batch(self, slots: int) -> None:
        """Undo all calls of `shrink_batch`: move the rows, with the content of their first `slots`
        slots, back to their former indices."""
        with self.cache.exchanging():
            while self._swaps:
                self.cache.swap(self._swaps.pop(), slots)
        self.cache.active = self.cache.rows


def _with_signs(cos: Tensor, sin: Tensor) -> Pair:
    """Change the sign of the first half of `sin` in place; return both."""
    sin[..., : sin.shape[-1] // 2].neg_()
    return cos, sin


@contextmanager
def networks_for(
    model: Any,
    picker: Picker,
    graphs: bool | None,
    past: BlockCache | None,
    rows: int,
    capacity: int,
    scratch: int,
    with_head: bool,
    model_key: Hashable = None,
) -> Iterator[Networks]:
    """Context manager: yield the networks of a call. They use kernels and CUDA graphs where these
    can be used.

    Args:
        model: An `MRPForCausalLM`.
        picker: Picks tokens; its `dispatch` decides between kernels and PyTorch.
        graphs: Whether forwards are recorded as CUDA graphs; None to record them where possible.
        past: The cache of an earlier call, whose content the call can reuse; or None.
        rows: The number of rows of the batch.
        capacity, scratch: The least number of slots per row for committed tokens (`capacity`) and
            for tokens that are being scored (`scratch`).
        with_head: Whether the head takes part.
        model_key: The model's `fingerprint` if the caller has computed it, or None.

    Raises:
        ValueError: if kernels or CUDA graphs are demanded and cannot be used, or if another call is
            using `past`.
    """
    model_key = fingerprint(model) if model_key is None else model_key
    # Also with kernels=False: packing in a later call would move the weights, and so invalidate
    # caches of earlier calls.
    if picker.dispatch.forced or unusable(model.device, model.dtype) is None:
        moved = decide(model, model_key, "packed", partial(pack, model))
        model_key = fingerprint(model) if moved else model_key
    size = (rows, capacity, scratch, with_head)
    with cache_for(model, model_key, graphs, past, *size) as (cache, recordings):
        plans = plan_layers(model, with_head, picker.dispatch, model_key)
        call = None if recordings is None else recordings.call
        yield Networks(model, cache, with_head, picker, plans, call)
