"""Rounds of `modeling_mrp` on the batches of an engine. The engine owns requests, memory and
attention."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modeling_mrp.generate.loop import RoundDecoder, draft_amount
from modeling_mrp.generate.refine import Refinement, refined
from modeling_mrp.networks.picker import Picker
from modeling_mrp.rules.draft import Node, UnscoredError
from modeling_mrp.rules.gain import DraftAmount
from modeling_mrp.rules.reveal import RevealRule
from modeling_mrp.rules.state import Counts, Key, PendingReveal, Scores

from .networks import EngineNetworks, RequestRows
from .options import Settings
from .picker import Pickers, Sampling
from .requests import EngineRow, Progress, end_of_text, parse_options, text_of_block
from .scratch import borrow_slots
from .usage import Report, totals

NEVER = 1 << 40  # a position beyond every text: the engine ends texts itself

UNSCORED = (
    "no token has a finite score at position {}: the model's weights, or logits after the "
    "request's options, are too large for its dtype. Lower the temperature, or serve the model in "
    "a wider dtype"
)


class Name(NamedTuple):
    """The name of the block at which a request's row stands. A row of the engine's pool gets new
    names whenever it is lent, so a new request never finds the state of an ended request.

    Attributes:
        row: The request's row of the engine's pool.
        generation: The number of times that the pool has lent this row.
        start: The position at which the block starts.
    """

    row: int
    generation: int
    start: int


class EngineDecoder(RoundDecoder):
    """A `RoundDecoder` for one round on the engine, in which each row has the mode of its request.

    Args:
        sees_new: Whether the attention of a row sees keys and values that the same forward writes
            for another row. If not, states that attend to another state of the round are not
            drafted.
        args: The arguments of `RoundDecoder`: a mode, the networks and a `DraftAmount`. Reveal
            rules and refinements are those of the requests' modes.
    """

    def __init__(self, sees_new: bool, *args: Any) -> None:
        super().__init__(*args)
        self.sees_new = sees_new

    def rule_of(self, row: Any) -> RevealRule:
        """Return the reveal rule of a row, which is that of its request's mode."""
        rule: RevealRule = row.options.mode.rule
        return rule

    def grown(
        self,
        rows: Sequence[Any],
        size: int,
        estimates: Sequence[Mapping[Key, Scores]] | None = None,
    ) -> list[list[Node]]:
        """Build a draft of at most `size` states for each row that has not ended; an ended row gets
        no nodes.

        A row whose own state has no masks also gets the first state of the next block, even if
        `size` is 1. The draft is then cut to the number of states that the row's request allows or,
        if `row.single_state`, to one state. Unless `sees_new`, states that attend to another state
        of the round are left out as well.

        `estimates` has, for each row, the head's estimates of scores, by `State.key`. It is None if
        the head has not read any state.
        """
        drafts = super().grown(rows, size, estimates)
        for row_index, (row, nodes) in enumerate(zip(rows, drafts, strict=True)):
            drafting = row.options.mode.drafting
            # A request without drafts still has the next block's first state scored beside a clean
            # state.
            if row.single_state:
                limit = 1
            elif drafting is not None:
                limit = drafting.states
            else:
                limit = 1 + (not row.state.masks)
            drafts[row_index] = [node for node in nodes[:limit] if self.sees_new or node.parent < 0]
        return drafts

    def read(
        self,
        rows: Sequence[Any],
        drafts: Sequence[Sequence[Node]],
        estimates: Sequence[dict[Key, Scores]],
    ) -> None:
        """Run the head once over the drafted states of those rows whose drafts use the head. Store
        its estimates of the backbone's scores at these states in `estimates`, which has, for each
        row, a dict from `State.key` to scores. States without masks and first states of blocks are
        left out."""
        head_drafts: list[Sequence[Node]] = []
        for row, nodes in zip(rows, drafts, strict=True):
            drafting = row.options.mode.drafting
            head_drafts.append(nodes if drafting and drafting.passes else [])
        super().read(rows, head_drafts, estimates)

    def write(self, rows: Sequence[Any], pending_reveals: Sequence[PendingReveal | None]) -> None:
        """Refine the pending reveals, each by the mode of its request, and write them into the
        texts of the rows. Set `stop` of the rows whose text is complete."""
        results = list(pending_reveals)
        row_indices: dict[Refinement, list[int]] = {}
        for index, row in enumerate(rows):
            if row.options.mode.refine is not None:
                row_indices.setdefault(row.options.mode.refine, []).append(index)
        for refine, indices in row_indices.items():
            matching: list[PendingReveal | None] = [None] * len(rows)
            for index in indices:
                matching[index] = pending_reveals[index]
            for index, update in enumerate(refined(refine, self.networks, rows, matching)):
                if update is not None:
                    results[index] = update
        super().write(rows, results)


class Rounds:
    """Decodes the requests of one engine, one round per call.

    A call takes the engine, a batch and the requests of its rows. It returns, for each row, the
    block so far and the number of tokens by which the text has grown, and whether a CUDA graph ran.

    Args:
        settings: The server's checked options.
        block: The number of tokens of a block.
        mask_id: The mask's id.
        abort: Ends a request with a message as soon as the engine looks at the request.

    Attributes:
        amount: Decides how much each round drafts; None before the first round.
        rows: Maps rows of the engine's pool to the `Name` and the `EngineRow` of the request there.
            They are kept between rounds.
        finished_blocks: Maps the `Name` of a block to the final ids of the block, if it was decoded
            before the engine asked for it.
        report: Counts for the metrics endpoint.
    """

    def __init__(
        self,
        settings: Settings,
        block: int,
        mask_id: int,
        abort: Callable[[Any, str], None],
    ) -> None:
        self.settings = settings
        self.block = block
        self.mask_id = mask_id
        self.abort = abort
        self.amount: DraftAmount | None = None
        self.rows: dict[int, tuple[Name, EngineRow]] = {}
        self.finished_blocks: dict[Name, list[int]] = {}
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
            batch: The engine's `ForwardBatch`, which has one block of each row.
            requests: The requests of the rows.
            evict: Called to free slots of cached prefixes.
            sees_new: Whether the attention of a row sees keys and values that the same forward
                writes for another row.

        Returns:
            Three results: for each row, its block so far; for each row, the number of tokens by
            which its text, prompt included, has grown (a block, or 0); and whether a CUDA graph
            ran.
        """
        starts = list(batch.extend_prefix_lens_cpu)
        names = self._row_names(engine, requests, starts)
        ids = [self.finished_blocks.pop(name, []) for name in names]
        grown = [self.block] * len(names)
        graph_ran = False
        if pending := [index for index, block_ids in enumerate(ids) if not block_ids]:
            pending_requests = [requests[index] for index in pending]
            pending_names = [names[index] for index in pending]
            request_rows = RequestRows(
                pending,
                [name.row for name in pending_names],
                [name.start for name in pending_names],
            )
            rows = self._rows(engine, pending_requests, pending_names)
            counts_before = totals(rows)
            failed = -1
            try:
                graph_ran = self._round(engine, batch, request_rows, rows, evict, sees_new)
            except UnscoredError as error:
                index = pending[[row.place for row in rows].index(error.place)]
                if starts[index] + self.block > len(requests[index].origin_input_ids):
                    failed = index
                    self.abort(requests[index], UNSCORED.format(error.position))
                else:
                    # the fault is in the next block, which will fail in a later round
                    requests[index].mrp.single_state = True
                rows = self._restart_rows(engine, pending_requests, pending_names)
            counts = totals(rows)
            for counter, previous in counts_before.items():
                counts[counter] -= previous
            self.report.count(**counts)
            for index, row, req in zip(pending, rows, pending_requests, strict=True):
                ids[index], grown[index] = self._finish_round(row, names[index], req)
                # the engine ends it after a whole block; no other request shares a block of masks
                if index == failed:
                    grown[index] = self.block
        for name, req, start, size in zip(names, requests, starts, grown, strict=True):
            end = start + size if size else 0
            self._finish(self.rows[name.row][1], req, end)
        return ids, grown, graph_ran

    def _restart_rows(
        self, engine: Any, requests: Sequence[Any], names: Sequence[Name]
    ) -> list[EngineRow]:
        """Replace the rows of requests by new rows, each at the start of its block. Return the new
        rows."""
        for name in names:
            self.rows.pop(name.row, None)
        return self._rows(engine, requests, names)

    def _rows(self, engine: Any, requests: Sequence[Any], names: Sequence[Name]) -> list[EngineRow]:
        """Return the row of each request, as `_row` does, in the order of the requests."""
        return [self._row(engine, req, name) for req, name in zip(requests, names, strict=True)]

    def _finish_round(self, row: EngineRow, name: Name, req: Any) -> tuple[list[int], int]:
        """Keep a row after a round. Return the row's block, and the number of tokens by which the
        row's text has grown.

        If the first state of the next block was scored in the same round, its reveal may already
        end the text. Then the next block is kept in `finished_blocks`, and needs no forward.
        """
        row.stop = None  # the engine ends texts itself
        end = name.start + self.block
        current = row.text[name.start : end]
        following = row.text[end : end + self.block]
        final_ids = text_of_block(req, row.options, current, name.start, self.mask_id)
        if row.held <= name.start:  # the block is not committed
            grown = self.block if final_ids else 0
            name = name._replace(start=name.start + grown)
            self.rows[name.row] = name, row
            return final_ids or current, grown
        name = name._replace(start=end)
        self.rows[name.row] = name, row
        next_ids = text_of_block(req, row.options, following, end, self.mask_id)
        if next_ids:
            self.finished_blocks[name] = next_ids
        return current, self.block

    def _finish(self, row: EngineRow, req: Any, end: int) -> None:
        """Record two things in the progress of a request: its finished tokens, which lie before the
        position `end`, and the generated tokens of its current block."""
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

    def _row_names(self, engine: Any, requests: Sequence[Any], starts: list[int]) -> list[Name]:
        pool = engine.req_to_token_pool
        # both are on the host
        generations = pool.req_generation.numpy()
        free = set(pool.free_slots)

        def alive(name: Name) -> bool:
            return name.row not in free and int(generations[name.row]) == name.generation

        self.rows = {
            pool_row: (name, row) for pool_row, (name, row) in self.rows.items() if alive(name)
        }
        self.finished_blocks = {
            name: ids for name, ids in self.finished_blocks.items() if alive(name)
        }
        names = []
        for req, start in zip(requests, starts, strict=True):
            pool_row = req.kv.req_pool_idx
            names.append(Name(pool_row, int(generations[pool_row]), start))
        return names

    def _row(self, engine: Any, req: Any, name: Name) -> EngineRow:
        """Return the row that is kept for a request. If there is none, or if it is at another block
        than the engine, make a new row."""
        stored = self.rows.get(name.row)
        if stored is not None and stored[0] == name:
            return stored[1]
        if getattr(req, "mrp", None) is None:
            mode = self.settings.mode
            req.mrp = Progress(
                parse_options(req, self.settings), Counts(mode.width, mode.drafting is not None)
            )
        ids = [*req.origin_input_ids, *req.output_ids]
        end = end_of_text(req, self.block, engine.model_config.context_len)
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
        request_rows: RequestRows,
        rows: Sequence[EngineRow],
        evict: Callable[[int], Any],
        sees_new: bool,
    ) -> bool:
        """Run one round: draft those states that are worth their cost and for which there is room,
        score them, and accept and commit states. Return whether a CUDA graph ran."""
        mode = self.settings.mode
        drafting = self.settings.mode.drafting
        weight = engine.model.lm_head.weight
        vocab_size = engine.model_config.vocab_size
        # The weight is neither packed (quantized) nor divided among devices.
        weight_is_complete = (
            type(weight) in (torch.Tensor, torch.nn.Parameter) and len(weight) >= vocab_size
        )
        shared_arguments = {
            "lm_head_weight": weight,
            "mask_token_id": self.mask_id,
            "dispatch": self.settings.dispatch,
        }
        unembed = partial(unembed_in_place, engine, batch)

        def shortlist_of(sampling: Sampling) -> int:
            if drafting is None or not weight_is_complete:
                return 0
            return drafting.listed(vocab_size, sampling.sample)

        def make_picker(sampling: Sampling) -> Picker:
            return sampling.picker(unembed, shortlist_of(sampling), **shared_arguments)

        if self.amount is None:
            config = engine.model_config.hf_config
            table = self.settings.options.get("round_costs")
            self.amount = draft_amount(mode, make_picker(rows[0].sampling), config, table)
        pickers = Pickers(weight, make_picker)
        networks = EngineNetworks(engine, batch, request_rows, mode.uses_head, pickers, self.block)
        decoder = EngineDecoder(sees_new, replace(mode, refine=None), networks, self.amount)
        plan = decoder.plan(rows)
        pool = engine.req_to_token_pool
        allocator = engine.token_to_kv_pool_allocator
        width = plan.amount.states - 1
        with borrow_slots(pool, allocator, evict, len(rows), width, self.block) as loan:
            networks.borrow(loan)
            decoder.round(rows, plan.within(1 + loan.width))
        return networks.graph_ran


def unembed_in_place(engine: Any, batch: Any, hidden: Tensor) -> Tensor:
    """Compute the logits [n, vocab] of hidden states [n, hidden_size]. The next call of this
    function may overwrite the returned tensor.

    The logits are written to the buffer that the engine keeps for logits beside its CUDA graphs, if
    there is one with room for n rows, and otherwise to new memory. No graph of this plugin writes
    to this buffer.

    Args:
        engine: The engine's `ModelRunner`.
        batch: The engine's `ForwardBatch`; it is not changed.
        hidden: The final hidden states.
    """
    shared = engine.graph_shared_output
    if shared is not None and len(hidden) <= shared.max_rows:
        vocab_size = engine.model_config.vocab_size
        buffer = shared.get_logits_buffer(vocab_size, rows=len(hidden))
        batch = replace(batch, next_token_logits_buffer=buffer)
    logits: Tensor = engine.model.unembed(batch, hidden)
    return logits


def fresh_row(
    ids: Sequence[int],
    prompt: int,
    start: int,
    end: int,
    block: int,
    mask_id: int,
    pool_row: int,
    progress: Progress,
) -> EngineRow:
    """Make the row of a request at the start of a block, before any state of the block is scored.

    Args:
        ids: The text so far: the prompt and the generated tokens.
        prompt: The number of tokens of the prompt.
        start: The start of the current block; all tokens before it have keys and values.
        end: The end of the request's last block, beyond which no state is drafted.
        block: The number of tokens of a block.
        mask_id: The mask's id.
        pool_row: The request's row of the engine's pool.
        progress: The progress of the request.
    """
    text = [*ids, *[mask_id] * (end - len(ids))]
    text += [0 if mask_id else 1] * (2 * block - len(text) % block)
    options = progress.options
    # The engine ends texts itself: no row has an end.
    ends = (prompt, prompt, len(text), NEVER, prompt + options.min_new_tokens)
    row = EngineRow(pool_row, text, block, mask_id, options.eos, *ends, options.seed)
    row.options = options
    row.single_state = progress.single_state
    row.counts = progress.counts
    row.steps = progress.steps
    row.state = row.first_state(start)
    row.held = row.head_held = start
    return row
