"""Rounds of `modeling_mrp` on the batches of an engine, which owns requests, memory and attention."""

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch

from modeling_mrp.generate.budget import Amount, Budget
from modeling_mrp.generate.loop import Decoder
from modeling_mrp.rules.draft import Node
from modeling_mrp.rules.state import Counts, Row

from .networks import EngineNetworks, Own
from .options import Settings
from .pace import Share, pace_of
from .picker import EnginePicker
from .requests import block_is_text, committed_ids, end_of_text
from .scratch import borrowed
from .usage import Report, Usage

NEVER = 1 << 40  # a position behind every text: the engine ends texts itself


class Name(NamedTuple):
    """The name of a request's row: its row of the engine's pool, how often that was lent, and where its block starts.

    A row that is lent anew has another name, so what a request leaves behind is never found again.
    """

    row: int
    turn: int
    start: int


class EngineDecoder(Decoder):
    """A `Decoder` of one round on the engine.

    Args:
        sees_new: Whether attention sees keys and values that the same forward writes in another row. Else no state looks at a
            clean block of its round.
        args: As of `Decoder`.
    """

    def __init__(self, sees_new: bool, *args: Any) -> None:
        super().__init__(*args)
        self.sees_new = sees_new

    def draft(self, rows: Sequence[Row], amount: Amount) -> list[list[Node]]:
        """See `Decoder.draft`."""
        drafts = super().draft(rows, amount)
        return drafts if self.sees_new else [[node for node in nodes if node.parent < 0] for nodes in drafts]


class Rounds:
    """Decodes the requests of one engine, a round a batch.

    Args:
        settings: What is asked of the server.
        block: Tokens of a block.
        mask_id: The mask's id.
        share: As of `pace_of`.

    Attributes:
        rows: The rows of requests between rounds, each with its name, by their rows of the engine's pool.
        whole: Blocks that are text before the engine asks for them.
        report: Notes what it costs.
    """

    def __init__(self, settings: Settings, block: int, mask_id: int, share: Share | None = None) -> None:
        self.settings, self.block, self.mask_id, self.share = settings, block, mask_id, share
        self.budget: Budget | None = None
        self.rows: dict[int, tuple[Name, Row]] = {}
        self.whole: dict[Name, list[int]] = {}
        self.report = Report()

    def __call__(
        self, engine: Any, batch: Any, requests: Sequence[Any], evict: Callable[[int], Any], sees_new: bool
    ) -> tuple[list[list[int]], list[int], bool]:
        """Run one round.

        Args:
            engine: The engine's `ModelRunner`.
            batch: Its `ForwardBatch`: a block of each row.
            requests: The rows' requests.
            evict: Asked to free slots of cached prefixes.
            sees_new: As for `EngineDecoder`.

        Returns:
            Each row's block so far; by how many tokens, prompt included, its text has grown: the block, or none; and whether a
            CUDA graph ran.
        """
        starts = list(batch.extend_prefix_lens_cpu)
        names = self._names(engine, requests, starts)
        ids = [self.whole.pop(name, []) for name in names]
        grown, graph_ran = [self.block] * len(names), False
        if places := [place for place, known in enumerate(ids) if not known]:
            some, names = [requests[place] for place in places], [names[place] for place in places]
            own = Own(places, [name.row for name in names], [name.start for name in names])
            rows = [self._row(engine, req, name) for req, name in zip(some, names, strict=True)]
            graph_ran = self._round(engine, batch, own, rows, evict, sees_new)
            for place, block, size in zip(places, *self._come_to(rows, names, some), strict=True):
                ids[place], grown[place] = block, size
        self.report.count_tokens(requests, starts, grown)
        return ids, grown, graph_ran

    def _come_to(self, rows: list[Row], names: list[Name], requests: list[Any]) -> tuple[list[list[int]], list[int]]:
        """Find what a round came to, [rows]: each row's block so far, and by how much its text has grown; and keep the rest.

        Where the next block's first state rode along, the text may end with what it reveals: that block takes no forward.
        """
        ids, grown = [], []
        for row, name, req in zip(rows, names, requests, strict=True):
            counts = row.counts
            self.report.note(req, Usage(counts.forwards, counts.head_forwards, counts.drafted, counts.accepted))
            here, behind = (row.text[at : at + self.block] for at in (name.start, name.start + self.block))
            kept = row.held > name.start
            over = block_is_text(req, here, name.start, self.mask_id)
            ids.append(here)
            grown.append(self.block if kept or over else 0)
            name = name._replace(start=name.start + grown[-1])
            self.rows[name.row] = name, row
            if kept and block_is_text(req, behind, name.start, self.mask_id):
                self.whole[name] = behind
        return ids, grown

    def _names(self, engine: Any, requests: Sequence[Any], starts: list[int]) -> list[Name]:
        pool = engine.req_to_token_pool
        turns, free = pool.req_generation.numpy(), set(pool.free_slots)  # both on the host

        def alive(name: Name) -> bool:
            return name.row not in free and int(turns[name.row]) == name.turn

        self.rows = {at: (name, row) for at, (name, row) in self.rows.items() if alive(name)}
        self.whole = {name: ids for name, ids in self.whole.items() if alive(name)}
        rows = [req.kv.req_pool_idx for req in requests]
        return [Name(row, int(turns[row]), start) for row, start in zip(rows, starts, strict=True)]

    def _row(self, engine: Any, req: Any, name: Name) -> Row:
        """Find the row of a request, or make one that stands where the engine is."""
        found = self.rows.get(name.row)
        if found is not None and found[0] == name:
            return found[1]
        self.report.begin(req)
        ids, end = committed_ids(req), end_of_text(req, self.block, engine.model_config.context_len)
        mode = self.settings.mode
        return fresh_row(ids, name.start, end, self.block, self.mask_id, Counts(mode.width, mode.drafting is not None))

    def _round(self, engine: Any, batch: Any, own: Own, rows: list[Row], evict: Callable[[int], Any], sees_new: bool) -> bool:
        """Draft as much as pays and finds room, verify, accept, commit; tells whether a CUDA graph ran."""
        mode, drafting = self.settings.mode, self.settings.mode.drafting
        budget = self.budget = self.budget or pace_of(engine.model, mode, self.share)
        amount = budget.choose(rows)
        pool, allocator = engine.req_to_token_pool, engine.token_to_kv_pool_allocator
        clean = any(not row.state.masks for row in rows)
        width = amount.states - 1 or int(clean and not amount.narrow)
        with borrowed(pool, allocator, evict, len(rows), width, self.block) as lent:
            states = min(amount.states, 1 + lent.width)
            amount = Amount(states, min(amount.passes, states - 1), narrow=not lent.width)
            weight, vocab_size = engine.model.lm_head.weight, engine.model_config.vocab_size
            # Neither packed nor divided.
            whole = type(weight) in (torch.Tensor, torch.nn.Parameter) and len(weight) >= vocab_size
            picker = EnginePicker(
                weight,
                self.mask_id,
                entropy=mode.rule.needs_entropy,
                dispatch=self.settings.dispatch,
                unembed=partial(engine.model.unembed, batch),
                rounded=mode.refine is None,
                shortlist=drafting.listed(vocab_size, False) if drafting is not None and whole else 0,
            )
            networks = EngineNetworks(engine, batch, own, lent, mode.uses_head, picker, self.block)
            begun = perf_counter()
            steps = EngineDecoder(sees_new, mode, networks, budget).round(rows, amount)
            budget.learn(amount, rows, steps, perf_counter() - begun)
        return networks.graph_ran


def fresh_row(ids: Sequence[int], start: int, end: int, block: int, mask_id: int, counts: Counts) -> Row:
    """Make the row of a request of which nothing was scored.

    Args:
        ids: The text so far: the prompt, and what was generated.
        start: Where its block starts; what comes before has keys and values.
        end: Where its last block ends; no state is drafted behind it.
        block: Tokens of a block.
        mask_id: The mask's id.
        counts: Its counts.
    """
    text = [*ids, *[mask_id] * (end - len(ids))]
    text += [0 if mask_id else 1] * (2 * block - len(text) % block)
    # The engine reveals behind an eos too, and ends texts itself: no row has an eos or an end.
    row = Row(0, text, block, mask_id, frozenset(), 0, 0, len(text), NEVER, 0, 0)
    row.state, row.counts = row.opened(start), counts
    row.held = row.head_held = start
    return row


__all__ = ["EngineDecoder", "Name", "Rounds", "fresh_row"]
