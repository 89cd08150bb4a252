"""Rounds of `modeling_mrp` on the batches of an engine, which owns requests, memory and attention."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import torch

from modeling_mrp.generate.decode_state import DecodeState, Request, RoundPlan, summary
from modeling_mrp.generate.loop import Task, decode_round
from modeling_mrp.generate.modes import Amount
from modeling_mrp.generate.pace import pace_of
from modeling_mrp.generate.scoring import Reader

from .options import Settings
from .packing import Own
from .requests import block_is_text, committed_ids, end_of_text
from .rows import NEVER, Name, RowStates, fresh_state
from .runner import EngineRunner
from .sampler import EngineSampler
from .scratch import affordable, borrowed
from .usage import Report, Usage


class Rounds:
    """Decodes the requests of one engine, a round a batch.

    Args:
        settings: What is asked of the server.
        block: Tokens of a block.
        mask_id: The mask's id.

    Attributes:
        report: Notes what it costs.
    """

    def __init__(self, settings: Settings, block: int, mask_id: int) -> None:
        self.settings, self.block, self.mask_id = settings, block, mask_id
        self.rows, self.report = RowStates(), Report()
        self.whole: dict[Name, list[int]] = {}  # blocks that are text before the engine asks for them

    def __call__(
        self, engine: Any, batch: Any, requests: Sequence[Any], evict: Callable[[int], Any], sees_new: bool
    ) -> tuple[list[list[int]], list[int], bool]:
        """Run one round.

        Args:
            engine: The engine's `ModelRunner`.
            batch: Its `ForwardBatch`: a block of each row.
            requests: The rows' requests.
            evict: Asked to free slots of cached prefixes.
            sees_new: As for `EngineRunner`.

        Returns:
            Each row's block so far; by how many tokens, prompt included, its text has grown: the block, or none; and whether a
            CUDA graph ran.
        """
        starts = list(batch.extend_prefix_lens_cpu)
        names = self._names(engine, batch, starts)
        ids = [self.whole.pop(name, []) for name in names]
        grown, graph_ran = [self.block] * len(names), False
        if places := [place for place, known in enumerate(ids) if not known]:
            some, own = [requests[place] for place in places], self._own(batch, places)
            names = [names[place] for place in places]
            state = self.rows.take(names, lambda at: self._fresh(engine, some[at], own.starts[at]))
            state, graph_ran = self._round(engine, batch, own, state, evict, sees_new)
            for place, block, size in zip(places, *self._come_to(state, names, some), strict=True):
                ids[place], grown[place] = block, size
        self.report.count_tokens(requests, starts, grown)
        return ids, grown, graph_ran

    def _come_to(self, state: DecodeState, names: list[Name], requests: list[Any]) -> tuple[list[list[int]], list[int]]:
        """Find what a round came to, [rows]: each row's block so far, and by how much its text has grown; and keep the rest.

        Where the next block's first state rode along, the text may end with what it reveals: that block takes no forward.
        """
        starts = [name.start for name in names]
        ids, behind, kept, usages = self._read(state, starts)
        for req, usage in zip(requests, usages, strict=True):
            self.report.note(req, usage)
        over = block_is_text(requests, torch.tensor(ids), starts, self.mask_id).tolist()
        grown = [self.block if clean or end else 0 for clean, end in zip(kept, over, strict=True)]
        names = [name._replace(start=name.start + size) for name, size in zip(names, grown, strict=True)]
        self.rows.keep(names, state)
        ended = block_is_text(requests, torch.tensor(behind), [start + self.block for start in starts], self.mask_id).tolist()
        self.whole |= {name: row for name, row, clean, end in zip(names, behind, kept, ended, strict=True) if clean and end}
        return ids, grown

    def _own(self, batch: Any, places: list[int]) -> Own:
        slots = batch.out_cache_loc if batch.out_cache_loc_virtual is None else batch.out_cache_loc_virtual
        at = torch.tensor(places, device=slots.device)
        starts = [batch.extend_prefix_lens_cpu[place] for place in places]
        return Own(places, batch.req_pool_indices[at].long(), slots.view(-1, self.block)[at].long(), starts)

    def _names(self, engine: Any, batch: Any, starts: list[int]) -> list[Name]:
        pool = engine.req_to_token_pool
        rows, turns, free = batch.req_pool_indices.tolist(), pool.req_generation, set(pool.free_slots)

        def alive(row: int, turn: int) -> bool:
            return row not in free and int(turns[row]) == turn

        self.rows.drop(alive)
        self.whole = {name: ids for name, ids in self.whole.items() if alive(name.row, name.turn)}
        return [Name(row, int(turns[row]), start) for row, start in zip(rows, starts, strict=True)]

    def _fresh(self, engine: Any, req: Any, start: int) -> DecodeState:
        self.report.begin(req)
        block, length = self.block, engine.model_config.context_len
        return fresh_state(
            ids=committed_ids(req),
            start=start,
            end=end_of_text(req, block, length),
            capacity=-(-length // block) * block + 2 * block,
            block=block,
            mask_id=self.mask_id,
            width=self.settings.mode.width,
            drafts=self.settings.mode.drafting is not None,
            hidden=engine.model.empty_hidden(),
        )

    def _round(
        self, engine: Any, batch: Any, own: Own, state: DecodeState, evict: Callable[[int], Any], sees_new: bool
    ) -> tuple[DecodeState, bool]:
        """Draft as much as pays and finds room, verify, accept, commit."""
        mode, count = self.settings.mode, len(own.starts)
        pool, allocator = engine.req_to_token_pool, engine.token_to_kv_pool_allocator
        pace, rows = pace_of(engine.model, mode), 1 << (count - 1).bit_length()
        plan = RoundPlan.read(summary(state, self.mask_id).tolist(), count)
        amount = pace.choose(plan, rows, mode.drafting.branches if mode.drafting else 1, behind=False)
        room = 1 + affordable(max(amount.states, 2) - 1, count, pool.available_size())
        plan = self._within(plan, amount, room)
        with borrowed(pool, allocator, evict, count, plan.room - 1, self.block) as lent:
            plan = self._within(plan, amount, 1 + lent.width)
            runner = EngineRunner(engine, batch, own, lent, mode.uses_head, sees_new)
            begun = perf_counter()
            state, accepted = decode_round(self._task(engine, batch, count), runner, state, plan)
            if mode.drafting and mode.drafting.paced:
                numbers = accepted.tolist()  # waits for the device
                pace.learn(plan, numbers, rows, perf_counter() - begun)
        return state, runner.graph_ran

    def _within(self, plan: RoundPlan, amount: Amount, room: int) -> RoundPlan:
        """Plan as much of an amount as there is room for, in states of a row; with room for one nothing is drafted."""
        drafting = self.settings.mode.drafting
        states = min(amount.states, room)
        plan = plan.with_slots(Amount(states, min(amount.passes, states - 1)), drafting.branches if drafting else 1)
        return replace(plan, room=min(plan.room, room))

    def _task(self, engine: Any, batch: Any, count: int) -> Task:
        settings, device = self.settings, batch.input_ids.device
        zero = torch.zeros(count, dtype=torch.long, device=device)
        # The engine reveals behind an eos too, and ends texts itself: no row has an eos or an end.
        row = torch.arange(count, device=device)
        request = Request(row, zero, zero, zero + NEVER, zero + NEVER, zero, zero, settings.schedule.to(device), zero[:0])
        sampler = EngineSampler(
            engine.model.lm_head.weight,
            self.mask_id,
            entropy=settings.mode.rule.needs_entropy,
            dispatch=settings.dispatch,
            unembed=partial(engine.model.unembed, batch),
        )
        reader = Reader(settings.judge, sampler, sampler, request, self.mask_id, seeks=True, bars_eos=False)
        return Task(settings.mode, reader, self.block, self.mask_id)

    def _read(self, state: DecodeState, starts: list[int]) -> tuple[list[list[int]], list[list[int]], list[bool], list[Usage]]:
        """Read from the device, at once, by row: its block, the one behind it, whether the first is kept, and its costs."""
        start = torch.tensor(starts, device=state.current.start.device)
        held, counts, block = state.held, state.counts, self.block
        costs = [held.row_forwards, held.row_head_forwards, counts.drafted, counts.accepted]
        numbers = torch.stack([held.committed - start, *costs], 1)
        rows = torch.cat([state.text.block(start, 2 * block), numbers], 1).tolist()
        kept, usages = [row[2 * block] > 0 for row in rows], [Usage(*row[2 * block + 1 :]) for row in rows]
        return [row[:block] for row in rows], [row[block : 2 * block] for row in rows], kept, usages


__all__ = ["Rounds"]
