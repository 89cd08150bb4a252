"""Rounds of `modeling_mrp` on the batches of an engine, which owns requests, memory and
attention."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch

from modeling_mrp.generate.budget import Amount, Budget
from modeling_mrp.generate.loop import Decoder
from modeling_mrp.generate.refine import Refinement, refined
from modeling_mrp.rules.draft import Node, UnscoredError
from modeling_mrp.rules.reveal import RevealRule
from modeling_mrp.rules.state import Counts, Frontier, Key, Scores

from .networks import EngineNetworks, Own
from .options import Settings
from .pace import Share, pace_of
from .picker import Pickers
from .requests import EngineRow, Progress, end_of_text, interpreted, text_of_block
from .scratch import borrowed
from .usage import Report, totals

NEVER = 1 << 40  # a position beyond every text: the engine ends texts itself

UNSCORED = (
    "no token has a finite score at position {}: the model's weights, or logits after the "
    "request's options, are too large for its dtype. Lower the temperature, or serve the model in "
    "a wider dtype"
)


class Name(NamedTuple):
    """The name of a request's row: the row of the engine's pool, how often the pool has lent it,
    and where its block starts.

    A row of the pool gets a new name whenever it is lent, so a new request never finds the state of
    an ended one.
    """

    row: int
    turn: int
    start: int


class EngineDecoder(Decoder):
    """A `Decoder` of one round on the engine, in which each row has its request's mode.

    Args:
        sees_new: Whether attention sees keys and values that the same forward writes in another
            row. If not, no state attends to a clean block of its round.
        args: See `Decoder`.
    """

    def __init__(self, sees_new: bool, *args: Any) -> None:
        super().__init__(*args)
        self.sees_new = sees_new

    def rule_of(self, row: Any) -> RevealRule:
        """See `Decoder.rule_of`."""
        rule: RevealRule = row.asked.mode.rule
        return rule

    def draft(self, rows: Sequence[Any], amount: Amount) -> list[list[Node]]:
        """See `Decoder.draft`; no row has more states than its request allows."""
        drafts = super().draft(rows, amount)
        for at, (row, nodes) in enumerate(zip(rows, drafts, strict=True)):
            drafting = row.asked.mode.drafting
            # A request without drafts still has the next block's first state scored beside a clean
            # state.
            most = (
                drafting.states
                if drafting is not None
                else 1 + (not row.state.masks and not amount.narrow)
            )
            most = 1 if row.alone else most
            drafts[at] = [node for node in nodes[:most] if self.sees_new or node.parent < 0]
        return drafts

    def read(
        self,
        rows: Sequence[Any],
        drafts: Sequence[Sequence[Node]],
        estimates: Sequence[dict[Key, Scores]],
    ) -> None:
        """See `Decoder.read`; only for rows whose drafts use the head."""
        drafted = [row.asked.mode.drafting for row in rows]
        super().read(
            rows,
            [
                nodes if one and one.passes else []
                for one, nodes in zip(drafted, drafts, strict=True)
            ],
            estimates,
        )

    def write(self, rows: Sequence[Any], frontiers: Sequence[Frontier | None]) -> None:
        """See `Decoder.write`."""
        kept = list(frontiers)
        asked: list[Refinement | None] = [row.asked.mode.refine for row in rows]
        for refine in dict.fromkeys(one for one in asked if one is not None):
            some = [
                frontier if one == refine else None
                for one, frontier in zip(asked, frontiers, strict=True)
            ]
            made = refined(refine, self.networks, rows, some)
            kept = [old if new is None else new for old, new in zip(kept, made, strict=True)]
        super().write(rows, kept)


class Rounds:
    """Decodes the requests of one engine, one round per batch.

    Args:
        settings: The server's checked options.
        block: Tokens of a block.
        mask_id: The mask's id.
        abort: Ends a request with a message as soon as the engine looks at it.
        share: See `pace_of`.

    Attributes:
        rows: For each row of the engine's pool, the `Name` and the `EngineRow` of its request, kept
            between rounds.
        whole: By `Name`, the final ids of a block that was decoded before the engine asks for it.
        report: Counts for the metrics endpoint.
    """

    def __init__(
        self,
        settings: Settings,
        block: int,
        mask_id: int,
        abort: Callable[[Any, str], None],
        share: Share | None = None,
    ) -> None:
        self.settings, self.block, self.mask_id, self.abort, self.share = (
            settings,
            block,
            mask_id,
            abort,
            share,
        )
        self.budget: Budget | None = None
        self.rows: dict[int, tuple[Name, EngineRow]] = {}
        self.whole: dict[Name, list[int]] = {}
        self.report = Report()

    def __call__(
        self,
        engine: Any,
        batch: Any,
        requests: Sequence[Any],
        evict: Callable[[int], Any],
        sees_new: bool,
    ) -> tuple[list[list[int]], list[int], bool]:
        """Run one round.

        Args:
            engine: The engine's `ModelRunner`.
            batch: Its `ForwardBatch`: a block of each row.
            requests: The rows' requests.
            evict: Called to free slots of cached prefixes.
            sees_new: See `EngineDecoder`.

        Returns:
            Each row's block so far; the number of tokens by which its text, prompt included, has
            grown (a block, or 0); and whether a CUDA graph ran.
        """
        starts = list(batch.extend_prefix_lens_cpu)
        names = self._names(engine, requests, starts)
        ids = [self.whole.pop(name, []) for name in names]
        grown, graph_ran = [self.block] * len(names), False
        if places := [place for place, known in enumerate(ids) if not known]:
            some, names_of = (
                [requests[place] for place in places],
                [names[place] for place in places],
            )
            own = Own(places, [name.row for name in names_of], [name.start for name in names_of])
            rows = [self._row(engine, req, name) for req, name in zip(some, names_of, strict=True)]
            before = totals(rows)
            failed = -1
            try:
                graph_ran = self._round(engine, batch, own, rows, evict, sees_new)
            except UnscoredError as error:
                place = places[[row.place for row in rows].index(error.place)]
                if starts[place] + self.block > len(requests[place].origin_input_ids):
                    failed = place
                    self.abort(requests[place], UNSCORED.format(error.position))
                else:
                    requests[
                        place
                    ].mrp.alone = (
                        True  # the fault is in the next block, which will fail in a later round
                    )
                rows = self._begun_anew(engine, some, names_of)
            self.report.count(
                **{name: number - before[name] for name, number in totals(rows).items()}
            )
            for place, row, req in zip(places, rows, some, strict=True):
                ids[place], grown[place] = self._come_to(row, names[place], req)
                # the engine ends it after a whole block; no other request shares a block of masks
                if place == failed:
                    grown[place] = self.block
        for name, req, start, size in zip(names, requests, starts, grown, strict=True):
            self._finish(self.rows[name.row][1], req, start + size if size else 0)
        return ids, grown, graph_ran

    def _begun_anew(
        self, engine: Any, requests: Sequence[Any], names: Sequence[Name]
    ) -> list[EngineRow]:
        """Replace the rows of requests by new ones, each at the start of its block; return the new
        rows."""
        for name in names:
            self.rows.pop(name.row, None)
        return [self._row(engine, req, name) for req, name in zip(requests, names, strict=True)]

    def _come_to(self, row: EngineRow, name: Name, req: Any) -> tuple[list[int], int]:
        """Return a row's block after a round and the number of tokens by which its text has grown;
        keep the row.

        If the next block's first state was scored too, its reveal may already end the text: that
        block then takes no forward.
        """
        row.stop = None  # the engine ends texts itself
        here, behind = (
            row.text[at : at + self.block] for at in (name.start, name.start + self.block)
        )
        kept = row.held > name.start
        text = text_of_block(req, row.asked, here, name.start, self.mask_id)
        grown = self.block if kept or text else 0
        name = name._replace(start=name.start + grown)
        self.rows[name.row] = name, row
        if kept and (whole := text_of_block(req, row.asked, behind, name.start, self.mask_id)):
            self.whole[name] = whole
        return here if kept else text or here, grown

    def _finish(self, row: EngineRow, req: Any, end: int) -> None:
        """Record the finished tokens of a request, which lie before `end`, and the generated tokens
        of its current block."""
        progress: Progress = req.mrp
        if (new := progress.finish(row, end)) and req.return_logprob:
            req.logprob.output_token_logprobs_val += progress.logprob[-new:]
            req.logprob.output_token_logprobs_idx += row.text[end - new : end]
        self.report.count(tokens=new)
        start = row.state.start
        progress.block = row.text[
            max(start, row.prompt) : min(
                start + self.block, row.prompt + req.sampling_params.max_new_tokens
            )
        ]

    def _names(self, engine: Any, requests: Sequence[Any], starts: list[int]) -> list[Name]:
        pool = engine.req_to_token_pool
        turns, free = pool.req_generation.numpy(), set(pool.free_slots)  # both on the host

        def alive(name: Name) -> bool:
            return name.row not in free and int(turns[name.row]) == name.turn

        self.rows = {at: (name, row) for at, (name, row) in self.rows.items() if alive(name)}
        self.whole = {name: ids for name, ids in self.whole.items() if alive(name)}
        rows = [req.kv.req_pool_idx for req in requests]
        return [Name(row, int(turns[row]), start) for row, start in zip(rows, starts, strict=True)]

    def _row(self, engine: Any, req: Any, name: Name) -> EngineRow:
        """Return the kept row of a request, or make one at the engine's current block."""
        found = self.rows.get(name.row)
        if found is not None and found[0] == name:
            return found[1]
        if getattr(req, "mrp", None) is None:
            mode = self.settings.mode
            req.mrp = Progress(
                interpreted(req, self.settings), Counts(mode.width, mode.drafting is not None)
            )
        ids, end = (
            [*req.origin_input_ids, *req.output_ids],
            end_of_text(req, self.block, engine.model_config.context_len),
        )
        return fresh_row(
            ids,
            len(req.origin_input_ids),
            name.start,
            end,
            self.block,
            self.mask_id,
            name.row,
            req.mrp,
        )

    def _round(
        self,
        engine: Any,
        batch: Any,
        own: Own,
        rows: Sequence[EngineRow],
        evict: Callable[[int], Any],
        sees_new: bool,
    ) -> bool:
        """Draft as many states as pay and have room, verify, accept and commit; return whether a
        CUDA graph ran."""
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
            # The weight is neither packed (quantized) nor divided among devices.
            whole = type(weight) in (torch.Tensor, torch.nn.Parameter) and len(weight) >= vocab_size
            fixed = {
                "lm_head_weight": weight,
                "mask_token_id": self.mask_id,
                "dispatch": self.settings.dispatch,
            }
            unembed = partial(engine.model.unembed, batch)
            pickers = Pickers(
                weight,
                lambda one: one.picker(
                    unembed,
                    drafting.listed(vocab_size, one.sample)
                    if drafting is not None and whole
                    else 0,
                    **fixed,
                ),
            )
            networks = EngineNetworks(engine, batch, own, lent, mode.uses_head, pickers, self.block)
            begun = perf_counter()
            steps = EngineDecoder(sees_new, replace(mode, refine=None), networks, budget).round(
                rows, amount
            )
            budget.learn(amount, rows, steps, perf_counter() - begun)
        return networks.graph_ran


def fresh_row(
    ids: Sequence[int],
    prompt: int,
    start: int,
    end: int,
    block: int,
    mask_id: int,
    place: int,
    progress: Progress,
) -> EngineRow:
    """Make a request's row at the start of a block, before any of its states is scored.

    Args:
        ids: The text so far: the prompt and the generated tokens.
        prompt: Number of tokens of the prompt.
        start: Start of the current block; all tokens before it have keys and values.
        end: End of the request's last block; no state is drafted beyond.
        block: Tokens of a block.
        mask_id: The mask's id.
        place: The request's row of the engine's pool.
        progress: The progress of the request.
    """
    text = [*ids, *[mask_id] * (end - len(ids))]
    text += [0 if mask_id else 1] * (2 * block - len(text) % block)
    asked = progress.asked
    # The engine ends texts itself: no row has an end.
    ends = (prompt, prompt, len(text), NEVER, prompt + asked.least)
    row = EngineRow(place, text, block, mask_id, asked.eos, *ends, asked.seed)
    row.asked, row.alone, row.counts, row.steps = (
        asked,
        progress.alone,
        progress.counts,
        progress.steps,
    )
    row.state = row.opened(start)
    row.held = row.head_held = start
    return row
