"""The one owner of a model's forwards and of their keys and values: `prefill`, `score`, `head_pass`, `commit`.

States lie side by side in one forward: each sees the committed text of its row, itself, and its parent if it has one. Their
keys and values go to the cache's scratch; `commit` copies those of accepted clean states to the text's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from ..kernels.dispatch import Dispatch
from ..kernels.round_attention import RoundMask
from ..model.diffusion import block_causal_mask
from ..rules.constants import constant, indices
from ..rules.states import PARENT, States
from .cache import BlockCache
from .protocol import BlockDiffusionModel
from .round_layers import under_round_masks

# Attention reads a multiple of so many committed slots, so that a compiled forward meets few shapes.
READ_BUCKET = 64
# Prompt tokens per prefill forward, at most, in whole blocks.
PREFILL_CHUNK = 2048


@dataclass
class Held:
    """The cache's holdings of each row, and its forwards so far: the part of a `DecodeState` that is the runner's.

    Attributes:
        committed, head_committed: [rows] long, so many tokens have keys and values of the backbone, of the head.
        late: [rows] bool, the head's share of a clean block is still to be computed:
        late_ids: [rows, block] long, the tokens of that block,
        late_hidden: [rows, block, hidden_size], and its hidden states.
        row_forwards, row_head_forwards: [rows] long, forwards of backbone and head in which each row took part.
    """

    committed: Tensor
    head_committed: Tensor
    late: Tensor
    late_ids: Tensor
    late_hidden: Tensor
    row_forwards: Tensor
    row_head_forwards: Tensor


register_dataclass(Held)


@dataclass(frozen=True)
class Scratch:
    """The scored states whose keys and values lie in the cache's scratch, until the next forward of the same layers.

    Attributes:
        states: [rows, n].
        hidden: [rows, n, block, hidden_size], final hidden states.
        layers: Whose keys and values those are.
        turn: The forward of these layers that this was.
    """

    states: States
    hidden: Tensor
    layers: range
    turn: int


class RoundRunner(Protocol):
    """The needs of a round: forwards over states, of whoever owns keys and values (`Runner`, or a serving engine's).

    Attributes:
        block: Tokens of a block.
        rests: Whether the head may rest (see `Runner`).
    """

    block: int
    rests: bool

    def score(self, states: States, held: Held, used: int | None, taking_part: Tensor) -> tuple[Scratch, Held]:
        """See `Runner.score`."""
        ...

    def head_pass(
        self, states: States, hidden: Tensor, held: Held, used: int | None, late: bool, blocked: Tensor | None = None
    ) -> tuple[Tensor, Held]:
        """See `Runner.head_pass`."""
        ...

    def commit_clean(self, scored: Scratch, slot: Tensor, held: Held, for_head: bool = True) -> Held:
        """See `Runner.commit_clean`."""
        ...


class Runner:
    """The runner of backbone and head for one decode.

    Args:
        model: Whose forwards these are.
        cache: Keys and values of backbone and head.
        with_head: Whether the head takes part.
        dispatch: Kernels or PyTorch.
        with_round_masks: Whether attention takes a `RoundMask`, not a dense mask.
        device: Where the rows are.
        recorded: Runs a forward from a recording (`Graphs.call`), where forwards are recorded one by one; or None.
        rests: Whether the head may rest: it then reads nothing of a text until `catch_up` has it read all.

    Attributes:
        forwards: Forwards of the whole batch by role, `prefill`, `denoise` (those over rounds' states) and `head`.
        reach: All committed slots of all rows are among the first so many. What runs rounds keeps it so.
    """

    def __init__(
        self,
        model: BlockDiffusionModel,
        cache: BlockCache,
        with_head: bool,
        dispatch: Dispatch,
        with_round_masks: bool,
        device: torch.device,
        recorded: Callable[..., Tensor] | None = None,
        rests: bool = False,
    ) -> None:
        self.model, self.cache, self.device, self.recorded = model, cache, device, recorded
        self.dispatch, self.with_round_masks = dispatch, with_round_masks
        self.rests = rests and with_head
        self._head_reads = not self.rests  # or has read
        self.reach = cache.capacity
        config = model.config
        depth = config.num_hidden_layers
        self.backbone_layers = range(depth)
        self.head_layers = range(depth, depth + (config.num_nextn_predict_layers if with_head else 0))
        self.block = config.block_size
        self.turns = {self.backbone_layers: 0, self.head_layers: 0}
        self.forwards = {"prefill": 0, "denoise": 0, "head": 0}
        self._narrowed: list[tuple[BlockCache, list[tuple[int, int]]]] = []

    def narrow(self, places: list[int]) -> None:
        """Go on with fewer rows: those that stand at `places` now, of which none but the displaced change their place."""
        swaps = [(to, of) for to, of in enumerate(places) if to != of]
        self._narrowed.append((self.cache, swaps))
        self._swap(swaps)
        self.cache = self.cache.first(len(places))

    def widen(self) -> None:
        """Have all rows back in their places."""
        while self._narrowed:
            self.cache, swaps = self._narrowed.pop()
            self._swap(swaps)

    def _swap(self, pairs: list[tuple[int, int]]) -> None:
        # Memory that nothing was written to was never touched, and need not be.
        layers = range(len(self.backbone_layers) + len(self.head_layers) * self._head_reads)
        for pair in pairs:
            self.cache.swap(*pair, layers, self.reach, self.rests)

    def start(self, committed: Tensor, read: Tensor | None = None) -> Held:
        """Describe what is held once `prefill` has stored `committed` [rows] tokens: nothing is late.

        `read` [rows] long: where the head rests, so many of them it has read; None: none.
        """
        rows, config = len(committed), self.model.config
        self._head_reads = not self.rests or (read is not None and bool(read.any()))
        committed = committed.clone(memory_format=torch.contiguous_format)  # strides of a column would be compiled for anew
        zero = torch.zeros_like(committed)
        return Held(
            committed=committed,
            head_committed=committed.clone()
            if not self.rests
            else torch.zeros_like(committed)
            if read is None
            else read.clone(),
            late=zero.bool(),
            late_ids=zero[:, None].repeat(1, self.block),
            late_hidden=torch.zeros(rows, self.block, config.hidden_size, dtype=self.model.dtype, device=self.device),
            row_forwards=zero.clone(),
            row_head_forwards=zero.clone(),
        )

    def prefill(self, tokens: Tensor, start: Tensor, reused: Tensor, held: Held) -> tuple[Tensor, Held]:
        """Compute the whole blocks before each row's first mask and, in the same forward, the row's first state.

        It starts where the first row's reused keys and values end. So, behind a cache and beyond one chunk, a row's forwards
        here may depend on its neighbours; its text does not. Nothing is compiled: each call would have another length.

        Args:
            tokens: [rows, at least the longest text] long, by absolute position.
            start: [rows] long, each row's first block with a mask.
            reused: [rows] long, so many first tokens have their keys and values already.
            held: What is held.

        Returns:
            Hidden states of the first states, [rows, block, hidden_size], and what is held.
        """
        self.reach = length = int(start.max()) + self.block
        positions = torch.arange(length, device=self.device).expand(len(start), length)
        valid = torch.ones_like(positions, dtype=torch.bool)
        offsets = indices(self.block, self.device)
        chunk = max(1, PREFILL_CHUNK // self.block) * self.block
        first = held.late_hidden
        for begin in range(int(reused.min()), length, chunk):
            end = min(length, begin + chunk)
            here, ids = positions[:, begin:end], tokens[:, begin:end]
            mask = block_causal_mask(here, positions[:, :end], valid[:, :end], self.block)
            self.cache.target_slots(begin, end - begin)
            hidden = self.model.backbone(ids, here, mask, self.cache, compiled=False).to(self.device)
            takes_part = (start >= begin) & (reused < end)
            self.forwards["prefill"] += 1
            held = replace(held, row_forwards=held.row_forwards + takes_part)
            if self.rests:
                everyone = torch.ones_like(takes_part)
                self.cache.keep_hidden(hidden, torch.full_like(start, begin), everyone)
            elif self.head_layers:
                self.model.residual(ids, hidden, here, mask, self.cache, compiled=False)
                self.forwards["head"] += 1
                held = replace(held, row_head_forwards=held.row_head_forwards + takes_part)
            inside = (start >= begin) & (start < end)
            at = (start - begin).clamp(0, end - begin - self.block)[:, None] + offsets
            block = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
            first = torch.where(inside[:, None, None], block, first)
        self.cache.clear(range(len(self.backbone_layers) + len(self.head_layers) * (not self.rests)), length)
        return first, held

    def catch_up(self, tokens: Tensor, held: Held) -> Held:
        """Have the head read all of the texts that it has not read while it rested.

        Args:
            tokens: [rows, at least the longest text] long, by absolute position.
            held: What is held.
        """
        begin, end = int(held.head_committed.min()), int(held.committed.max())
        self._head_reads = True
        positions = torch.arange(end, device=self.device).expand(len(tokens), end)
        chunk = max(1, PREFILL_CHUNK // self.block) * self.block
        for at in range(begin, end, chunk):
            upto = min(end, at + chunk)
            here = positions[:, at:upto]
            mask = block_causal_mask(here, positions[:, :upto], torch.ones_like(positions[:, :upto]).bool(), self.block)
            self.cache.target_slots(at, upto - at)
            theirs = (here < held.committed[:, None])[..., None].to(self.cache.layer_devices[-1])
            hidden = torch.where(theirs, self.cache.kept_hidden(at, upto - at), 0)
            self.model.residual(tokens[:, at:upto], hidden, here, mask, self.cache, compiled=False)
            self.forwards["head"] += 1
            takes_part = (held.committed > at) & (held.head_committed < upto)
            held = replace(held, row_head_forwards=held.row_head_forwards + takes_part)
        self.cache.clear(self.head_layers, end)
        return replace(held, head_committed=held.committed.clone(), late=torch.zeros_like(held.late))

    def score(self, states: States, held: Held, used: int | None, taking_part: Tensor) -> tuple[Scratch, Held]:
        """Score states [rows, n] side by side, in one forward of the backbone.

        Args:
            states: [rows, n].
            held: What is held.
            used: The longest committed text; None: all slots are read.
            taking_part: [rows] bool, rows whose forward this counts as.
        """
        hidden = self._network(states, held.committed, used)
        self.forwards["denoise"] += 1
        scratch = self._scratch(states, hidden, self.backbone_layers)
        return scratch, replace(held, row_forwards=held.row_forwards + taking_part)

    def head_pass(
        self, states: States, hidden: Tensor, held: Held, used: int | None, late: bool, blocked: Tensor | None = None
    ) -> tuple[Tensor, Held]:
        """Compute h_C at states [rows, n], given hidden states [rows, n, block, hidden_size], in one pass of the head.

        Rows that take part and have a clean block behind them whose head KV is late compute it on the way.

        Args:
            states: [rows, n]; a row takes part that has a valid one.
            hidden: h_A, or estimates of it.
            held: What is held.
            used: The longest committed text of the head; None: all slots are read.
            late: Whether some row's head KV may be late.
            blocked: [rows] bool, rows whose late block has to be computed now, whether they take part or not; None: none.
        """
        takes_part = states.valid.any(1)
        if blocked is not None:
            takes_part = takes_part | blocked
        self.forwards["head"] += 1
        held = replace(held, row_head_forwards=held.row_head_forwards + takes_part)
        if not late:
            return self._network(states, held.head_committed, used, hidden, parents=False), held
        behind = held.late & takes_part
        rest = constant((-1, 0, 0), behind.device).expand(len(behind), -1)  # parent, step, end
        clean = States(torch.cat([held.late_ids, held.head_committed[:, None], rest], 1), behind)
        packed = clean.map(lambda t: t[:, None]).cat(states)
        packed.table[:, 1:, PARENT] = (behind.long() - 1)[:, None]  # all states look at it
        residual = self._network(packed, held.head_committed, used, torch.cat([held.late_hidden[:, None], hidden], 1))
        scratch = self._scratch(packed, residual, self.head_layers)
        self.commit(scratch, torch.zeros_like(held.head_committed), held.head_committed, behind)
        held = replace(held, head_committed=held.head_committed + self.block * behind, late=held.late & ~behind)
        return residual[:, 1:], held

    def commit(self, scored: Scratch, slot: Tensor, start: Tensor, which: Tensor) -> None:
        """Keep the keys and values of one scored clean state per row.

        Args:
            scored: What was scored.
            slot: [rows] long, the place of the clean state in it.
            start: [rows] long, its absolute position.
            which: [rows] bool, the rows that commit.

        Raises:
            RuntimeError: if the same layers have scored something else since, so that it is gone.
        """
        if scored.turn != self.turns[scored.layers]:
            raise RuntimeError("what was scored has been overwritten by a later forward: commit before the next one")
        width = scored.states.start.shape[1] * self.block
        self.cache.commit(width, slot * self.block, start, which, self.block, scored.layers)

    def commit_clean(self, scored: Scratch, slot: Tensor, held: Held, for_head: bool = True) -> Held:
        """Commit the accepted clean state of each row, in `slot` [rows] long, -1 for none.

        The head's share of it is late; or left to `catch_up`, if not `for_head`.
        """
        row, slot = slot >= 0, slot.clamp(min=0)
        self.commit(scored, slot, held.committed, row)
        rows, before = indices(len(row), row.device), held.committed
        held = replace(held, committed=held.committed + self.block * row)
        if self.rests:
            self.cache.keep_hidden(scored.hidden[rows, slot], before, row)
        if not (self.head_layers and for_head):
            return held
        return replace(
            held,
            late=held.late | row,
            late_ids=torch.where(row[:, None], scored.states.ids[rows, slot], held.late_ids),
            late_hidden=torch.where(row[:, None, None], scored.hidden[rows, slot], held.late_hidden),
        )

    def _scratch(self, states: States, hidden: Tensor, layers: range) -> Scratch:
        self.turns[layers] += 1
        return Scratch(states, hidden, layers, self.turns[layers])

    def _network(
        self, states: States, committed: Tensor, used: int | None, hidden: Tensor | None = None, parents: bool = True
    ) -> Tensor:
        """Compute the backbone's hidden states, or with `hidden` the head's h_C, [rows, n, block, hidden_size]."""

        def forward(table: Tensor, committed: Tensor, *more: Tensor) -> Tensor:
            return self._packed(States(table, states.valid), committed, used, parents, *more)

        inputs = [states.table, committed, *([] if hidden is None else [hidden])]
        if self.recorded is None:
            return forward(*inputs)
        used = None  # a recording is there for texts of any length
        return self.recorded((hidden is None, parents, self.dispatch, self.with_round_masks), forward, *inputs)

    def _packed(
        self, states: States, committed: Tensor, used: int | None, parents: bool, hidden: Tensor | None = None
    ) -> Tensor:
        width = states.start.shape[1]
        capacity = self.cache.capacity
        used = capacity if used is None else min(-(-used // READ_BUCKET) * READ_BUCKET, capacity)
        self.cache.target_scratch(width * self.block, used)
        mask = RoundMask(committed, states.parent if parents and width > 1 else None, width, self.block, self.dispatch)
        ids = states.ids.flatten(1)
        positions = (states.start[..., None] + indices(self.block, self.device)).flatten(1)
        network: Callable[..., Tensor] = self.model.backbone
        if hidden is not None:
            network = partial(self._residual, hidden.flatten(1, 2))
        if self.with_round_masks:
            model: Any = self.model
            with under_round_masks(model, self.cache):
                scored = network(ids, positions, mask, self.cache)
        else:
            scored = network(ids, positions, mask.dense(used), self.cache)
        return scored.to(self.device).unflatten(1, (width, self.block))

    def _residual(self, hidden: Tensor, ids: Tensor, positions: Tensor, mask: Any, cache: BlockCache) -> Tensor:
        return self.model.residual(ids, hidden, positions, mask, cache)


__all__ = ["PREFILL_CHUNK", "READ_BUCKET", "Held", "RoundRunner", "Runner", "Scratch"]
