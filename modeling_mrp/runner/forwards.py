"""What a decode asks of the networks: states side by side in one forward, and which of their keys and values are kept."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..generate.rows import Counts, Outlook
from ..generate.sampling import Sampler
from ..generate.states import States
from ..generate.strategies import Static
from ..generate.texts import Texts
from ..kernels.round_attention import RoundMask
from .cache import BlockCache
from .graphs import Recorder
from .recorded import RecordedCache, recorded_cache_for
from .round_layers import under_round_masks

if TYPE_CHECKING:
    from ..modeling import MRPForCausalLM

# Attention reads a multiple of so many committed slots, so that a compiled forward meets few shapes.
READ_BUCKET = 64


class Forwards(Texts):
    """The part of a `Decoder` that runs backbone and head, and keeps their keys and values.

    Attributes:
        model: Whose forwards these are.
        strategy: It says whether the head is used, and whether anything is drafted.
        picker: Its `dispatch` says which kernels run.
        device: Where the rows are.
        width: The cache has scratch for so many states a row.
        with_round_masks: The model's attention takes a `RoundMask`, not a dense mask.
        counts: What it all costs.
        outlook: What the host knows of the round.
        cache: Keys and values of backbone and head.
        recorded: Where forwards or rounds are recorded; None: nowhere.
        replays: Whole rounds are recorded, not forwards.
        reused: [rows] long, so many leading tokens have their keys and values from an earlier call.
        backbone_layers, head_layers: Which layers of the cache are whose.
        committed, head_committed: [rows] long, so many tokens have keys and values of the backbone, of the head.
        pending: [rows] bool, a clean block's keys and values of the head are still to be computed.
        blocked: [rows] bool, the same where the row is about to commit another block.
        pending_ids: [rows, block] long, the tokens of that block.
        pending_hidden: [rows, block, hidden], its hidden states.
    """

    model: "MRPForCausalLM"
    strategy: Static
    picker: Sampler
    device: torch.device
    width: int
    with_round_masks: bool
    counts: Counts
    outlook: Outlook
    cache: BlockCache
    recorded: RecordedCache | None
    replays: bool
    reused: Tensor
    backbone_layers: range
    head_layers: range
    committed: Tensor
    head_committed: Tensor
    pending: Tensor
    blocked: Tensor
    pending_ids: Tensor
    pending_hidden: Tensor

    def _start_cache(self, past: BlockCache | None, recorder: Callable[[], Recorder] | None) -> None:
        """Makes the cache or takes over `past`, from where it holds the rows' texts; nothing is pending."""
        config, rows = self.model.config, len(self.rows.start)
        depth = config.num_hidden_layers
        head_depth = config.num_nextn_predict_layers if self.strategy.uses_head else 0
        self.backbone_layers, self.head_layers = range(depth), range(depth, depth + head_depth)
        self.recorded = None
        self.cache = self._cache(past, recorder)
        self.reused = self.cache.reusable(self.rows.tokens, self.rows.start, self.block, self.strategy.uses_head)
        # From here on the slots behind are overwritten, also by a call that does not come to its end.
        self.cache.hold(self.rows.tokens, self.reused, self.reused.minimum(self.cache.head_held.to(self.device)))
        self.committed = self.rows.start.clone()
        self.head_committed = self.rows.start.clone()
        self.pending = torch.zeros_like(self.rows.active)
        self.blocked = torch.zeros_like(self.rows.active)
        self.pending_ids = torch.zeros(rows, self.block, dtype=torch.long, device=self.device)
        hidden_size, dtype = config.hidden_size, self.model.dtype
        self.pending_hidden = torch.zeros(rows, self.block, hidden_size, dtype=dtype, device=self.device)

    def _cache(self, past: BlockCache | None, recorder: Callable[[], Recorder] | None) -> BlockCache:
        """Where keys and values go; what is recorded is found again by the cache that it writes to."""
        rows, capacity = len(self.rows.start), self.rows.capacity
        scratch, with_head = self.width * self.block, self.strategy.uses_head
        if past is not None and with_head and not past.head_layers:
            past = None
        if recorder is None:
            past = self.model.block_cache(rows, capacity, scratch, with_head=with_head) if past is None else past
            return past.with_room(rows, capacity, scratch)
        self.recorded, cache = recorded_cache_for(self.model, recorder, past, rows, capacity, scratch, with_head)
        self.rows = self.rows.with_room(cache.capacity)
        return cache

    def head_hidden(self, states: States, hidden: Tensor) -> Tensor:
        """h_C at [rows] states, given hidden states [rows, block, hidden]."""
        return self.head_pass(states.map(lambda t: t[:, None]), hidden[:, None])[:, 0]

    def head_pass(self, states: States, hidden: Tensor) -> Tensor:
        """h_C at [rows, n] states, given hidden states [rows, n, block, hidden].

        Rows that take part and have a clean block behind them whose head KV is not there yet compute it on the way.
        """
        takes_part = states.valid.any(1) | self.blocked
        self._count_head(takes_part)
        if not self.outlook.pending:
            return self._head_packed(states, hidden, None)
        behind = self.pending & takes_part
        clean = States(self.pending_ids, self.head_committed, torch.zeros_like(self.rows.step), self.all_rows, behind)
        packed = clean.map(lambda t: t[:, None]).beside(states)
        parent = torch.where(behind, 0, -1)[:, None].repeat(1, packed.start.shape[1])
        parent[:, 0] = -1
        residual = self._head_packed(packed, torch.cat([self.pending_hidden[:, None], hidden], 1), parent)[:, 1:]
        self.cache.commit(torch.zeros_like(self.committed), self.head_committed, behind, self.block, self.head_layers)
        self.head_committed = self.head_committed + self.block * behind
        self.outlook.head_used += self.block
        self.outlook.pending = False
        self.pending, self.blocked = self.pending & ~behind, torch.zeros_like(behind)
        return residual

    def _head_packed(self, states: States, hidden: Tensor, parent: Tensor | None) -> Tensor:
        return self._network(states, parent, self.head_committed, self.outlook.head_used, hidden)

    def _network(
        self, states: States, parent: Tensor | None, committed: Tensor, used: int, hidden: Tensor | None = None
    ) -> Tensor:
        """`_packed_forward` of the backbone, or with `hidden` of the head; a recording of its own where rounds are none."""

        def forward(ids: Tensor, start: Tensor, committed: Tensor, *more: Tensor) -> Tensor:
            given = iter(more)
            behind = None if parent is None else next(given)
            network = self.model.backbone if hidden is None else partial(self._reading, next(given))
            return self._packed_forward(replace(states, ids=ids, start=start), behind, committed, used, network)

        inputs = [states.ids, states.start, committed, *(t for t in (parent, hidden) if t is not None)]
        if self.recorded is None or self.replays:
            return forward(*inputs)
        key = hidden is None, parent is None, used, self.picker.dispatch, self.with_round_masks
        scored = self.recorded.parts.call(key, forward, *inputs)
        self.cache.target_scratch(states.start.shape[1] * self.block, used)  # what is committed next, also from a replay
        return scored

    def _reading(self, hidden: Tensor, ids: Tensor, positions: Tensor, mask: Tensor | RoundMask, cache: BlockCache) -> Tensor:
        return self.model.residual(ids, hidden.flatten(1, 2), positions, mask, cache)

    def _count_head(self, rows: Tensor) -> None:
        self.counts.forwards["head"] += 1
        self.counts.row_head_forwards += rows

    def _packed_forward(
        self,
        states: States,
        parent: Tensor | None,
        committed: Tensor,
        used: int,
        forward: Callable[[Tensor, Tensor, Tensor | RoundMask, BlockCache], Tensor],
    ) -> Tensor:
        """Scores [rows, width] states side by side: each sees its prefix, itself and the state in slot `parent`, if any.

        `used` is the longest prefix, `committed` [rows] each row's own.
        """
        width = states.start.shape[1]
        used = min(-(-used // READ_BUCKET) * READ_BUCKET, self.cache.capacity)
        self.cache.target_scratch(width * self.block, used)
        mask = RoundMask(committed, parent, width, self.block, self.picker.dispatch)
        ids = states.ids.flatten(1)
        positions = (states.start[..., None] + torch.arange(self.block, device=self.device)).flatten(1)
        if self.with_round_masks:
            with under_round_masks(self.model, self.cache):
                hidden = forward(ids, positions, mask, self.cache)
        else:
            hidden = forward(ids, positions, mask.dense(used), self.cache)
        return hidden.to(self.device).unflatten(1, (width, self.block))

    def _commit_clean(self, states: States, hidden: Tensor, which: Tensor) -> None:
        """Keeps the KV that the round just computed for accepted clean states, and leaves the head's share pending.

        `which` [rows, width] marks at most one state a row.
        """
        if not (self.strategy.drafts or self.outlook.clean):
            return  # no clean state was scored
        row, slot = which.any(-1), which.int().argmax(-1)
        self.cache.commit(slot * self.block, self.rows.start, row, self.block, self.backbone_layers)
        self.committed = torch.where(row, self.rows.start + self.block, self.committed)
        if self.head_layers:
            self.pending = self.pending | row
            self.pending_ids = torch.where(row[:, None], states.ids[self.all_rows, slot], self.pending_ids)
            self.pending_hidden = torch.where(row[:, None, None], hidden[self.all_rows, slot], self.pending_hidden)
            self.outlook.pending |= self.outlook.clean > 0  # where nothing is drafted; else the next look ahead tells


__all__ = ["READ_BUCKET", "Forwards"]
