"""The output of `generate`, and the observers of its rounds: streamers, stopping criteria, records
of progress."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.generation import StoppingCriteria
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from ..model.compat import CacheOutput
from ..networks.cache import BlockCache
from ..networks.picker import Picker, Spots
from ..rules.state import PendingReveal, Row, State
from .loop import Decoder


@dataclass
class MRPGenerateStats(ModelOutput):
    """Costs of a `generate` call; tensors are long.

    Attributes:
        forwards: Forwards of the whole batch by role: `prefill` (prompts), `verify` (rounds that
            scored drafts) and `denoise` (rounds without drafts) of the backbone, and `head`.
        row_forwards, row_head_forwards: [rows], forwards of the backbone, and of the head, in which
            each row took part.
        slot_forwards: Rows of the batch summed over backbone forwards, including rows that had
            ended but not left the batch.
        drafted, accepted: [rows], the number of drafted states that were submitted, and of those
            that were accepted.
        revoked: [rows], reveals that `mrp_remask` re-masked.
        filled: [rows], tokens that no forward picked, as a `regex`, `choices`, `json_schema` or
            `grammar` left no choice.
        accepted_lengths: [rows, n], the numbers of rounds that accepted 0, 1, 2, ... states. The
            first state, which is no draft, counts too, and so do states that the round before had
            scored.
        offered_at_depth: [rows, n], by depth k = 1, 2, ...: rounds that accepted at least k - 1
            drafts and offered a k-th, a draft that could follow the (k - 1)-th. No columns in modes
            without drafts.
        accepted_at_depth: [rows, n], by depth: rounds of `offered_at_depth` that accepted that
            draft; their sum is `accepted`.
        revocations: [n, 3]: row, column of the generated text (as in `reveal_step`; it may lie
            beyond the end) and token of each reveal that `mrp_remask` re-masked, in order.
        trailing_reveals: [n, 4]: row, column of the generated text, token and step (as in
            `reveal_step`) of each token that was revealed beyond the end of its text.
        rounds: [1 + rounds, rows] by name, each row's counts after the prefill and each round:
            `row_forwards`, `drafted`, `accepted`, `steps` of denoising and `column`, its block's
            start in the generated text (below 0 in the prompt). None if rows had to wait for others
            (`max_batch_size`).
    """

    forwards: dict[str, int] | None = None
    row_forwards: Tensor | None = None
    row_head_forwards: Tensor | None = None
    slot_forwards: int | None = None
    drafted: Tensor | None = None
    accepted: Tensor | None = None
    revoked: Tensor | None = None
    filled: Tensor | None = None
    accepted_lengths: Tensor | None = None
    offered_at_depth: Tensor | None = None
    accepted_at_depth: Tensor | None = None
    revocations: Tensor | None = None
    trailing_reveals: Tensor | None = None
    rounds: dict[str, Tensor] | None = None


@dataclass
class MRPGenerateOutput(CacheOutput):
    """The output of `generate` with `return_dict_in_generate=True`.

    Attributes:
        sequences: [rows, prompt + generated] long, padded with `pad_token_id` after each row's end.
        tokens_per_forward: [rows] float, generated tokens (not given ones) over `row_forwards`.
        reveal_step: [rows, generated] long, the denoising step of the row that committed each
            token; -1 in padding and at tokens given with `infill_ids`.
        token_logprobs: [rows, generated] float32, log-probability of each token when it was
            committed; 0 at padding and given tokens.
        scores: With `output_scores=True`, [rows, vocab] float for each new position in order: the
            scores from which its token was drawn, after processors, temperature and truncation,
            -inf at excluded tokens. Padding and given tokens have 0 at their own id and -inf
            elsewhere, so that `compute_transition_scores` gives 0 for them.
        logits: With `output_logits=True`, the same scores before processors, temperature and
            truncation.
        stats: `MRPGenerateStats`.
        cache: The `BlockCache` with which the next call can continue; `past_key_values` is another
            name of it. None if rows had to wait for others (`max_batch_size`).
    """

    sequences: Tensor | None = None
    tokens_per_forward: Tensor | None = None
    reveal_step: Tensor | None = None
    token_logprobs: Tensor | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    stats: MRPGenerateStats | None = None
    cache: BlockCache | None = None


class Progress:
    """Records each row's counts after the prefill and each round, unless rows wait for others, and
    the hidden states from which `logits` and `scores` are computed."""

    def __init__(self, rows: Sequence[Row], logits: bool, scores: bool, waiting: bool) -> None:
        self.rows = rows
        self.waiting = waiting
        self.requested = {"logits": logits, "scores": scores}
        self.rounds: list[list[tuple[int, ...]]] = []
        self.revocations: list[tuple[int, int, int]] = []
        self.picks: dict[tuple[int, int], tuple[State, Tensor]] = {}  # by row and position
        for row in rows:
            row.written = []

    def __call__(self, rows: Sequence[Row]) -> None:
        """Record all rows' counts after a round, and the tokens that `rows`, the rows that took
        part in it, picked and re-masked."""
        for row in rows:
            for pending in row.written or ():
                self._record(row, pending)
            row.written = []
        # otherwise each round would record the counts of all rows, waiting ones included
        if self.waiting:
            return
        table: list[tuple[int, ...]] = []
        for row in self.rows:
            counts = row.counts
            column = row.state.start - row.prompt
            table.append((counts.forwards, row.steps, counts.drafted, counts.accepted, column))
        self.rounds.append(table)

    def _record(self, row: Row, pending: PendingReveal) -> None:
        begin = pending.state.start - row.prompt
        tokens = pending.scores.token
        for column in pending.remasked:
            self.revocations.append((row.place, begin + column, tokens[column]))
        if not any(self.requested.values()):
            return
        backbone_pick = (pending.state, pending.scores.hidden)
        for column in pending.columns:
            state, (hidden, index) = (pending.drawn or {}).get(column, backbone_pick)
            single = State(state.key, (column,), state.end, state.masks, state.step)
            self.picks[row.place, state.start + column] = (single, hidden[index, column].clone())

    def distributions(self, picker: Picker, tokens: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """Compute the output's `scores` and `logits`, if requested: [rows, vocab] by column of
        `tokens` [rows, generated]."""
        if not any(self.requested.values()):
            return {}
        rewound = cache(lambda row_index, start: self.rows[row_index].rewound(start))
        indices: list[tuple[int, int]] = []
        states: list[tuple[Row, State]] = []
        hidden_states: list[Tensor] = []
        for (row_index, position), (state, hidden) in self.picks.items():
            row = self.rows[row_index]
            if position < (row.stop or 0):
                indices.append((position - row.prompt, row_index))
                states.append((rewound(row_index, state.start), state))
                hidden_states.append(hidden)
        # there are none if all tokens are given
        inputs = torch.stack(hidden_states) if hidden_states else picker.lm_head_weight[:0]
        distributions = picker.distributions(inputs, Spots(states, tokens.device))
        index = torch.tensor(indices, dtype=torch.long, device=tokens.device).view(-1, 2).unbind(1)
        outputs = {}
        for name, values in zip(self.requested, distributions, strict=True):
            if self.requested[name]:
                columns = tokens.T.contiguous()[..., None]  # `scatter_` needs that on GPUs
                table = values.new_full((*tokens.T.shape, values.shape[1]), -torch.inf)
                table.scatter_(2, columns, 0.0)
                outputs[name] = table.index_put_(index, values).unbind()
        return outputs


class Streams:
    """Feeds one streamer per row with the prompt [1, length] and finished blocks; the method
    `put_draft`, if a streamer has it, gets unfinished blocks."""

    def __init__(self, streamer: Any, prompts: Sequence[Tensor]) -> None:
        streamers = list(streamer) if isinstance(streamer, list | tuple) else [streamer]
        different = len(set(map(id, streamers)))
        rows = len(prompts)
        if not len(streamers) == different == rows:
            raise ValueError(
                f"streamer holds {different} for {rows} rows: pass a list of {rows}, or one prompt "
                "at a time"
            )
        for stream in streamers:
            if not (hasattr(stream, "put") and hasattr(stream, "end")):
                raise ValueError(
                    f"streamer is {stream!r}, without put and end: pass transformers' streamers, "
                    "or such objects"
                )
        self.streams = dict(enumerate(streamers))  # the streamers of rows that have not ended
        self.sent_lengths = [len(prompt) for prompt in prompts]
        for stream, prompt in zip(streamers, prompts, strict=True):
            stream.put(prompt[None].cpu())

    def __call__(self, rows: Sequence[Row]) -> None:
        """Send the text that a round has finished, and end the streams of ended rows."""
        for row in rows:
            if (stream := self.streams.get(row.place)) is None:
                continue
            end = row.stop or row.state.start
            if end > self.sent_lengths[row.place]:
                stream.put(torch.tensor(row.text[self.sent_lengths[row.place] : end]))
                self.sent_lengths[row.place] = end
            if row.stop is not None:
                self.streams.pop(row.place).end()
            elif (put_draft := getattr(stream, "put_draft", None)) is not None:
                draft_end = min(row.state.start + row.block_size, row.limit)
                draft = row.text[self.sent_lengths[row.place] : draft_end]
                put_draft(torch.tensor([draft]))


class CountsEnd(BaseStreamer):
    """A streamer that advances a progress bar when its row ends."""

    def __init__(self, bar: Any) -> None:
        self.bar = bar

    def put(self, value: Tensor) -> None:
        """See `BaseStreamer`."""

    def end(self) -> None:
        """See `BaseStreamer`."""
        self.bar.update()


class Stopping:
    """The stopping criteria of one `generate` call, checked at every token of a row once it is
    final (no mask before it).

    A criterion gets ids as in transformers' loop, [rows, prompt + n]: the prompts as given, with
    padding, then n tokens of every row. A row with fewer final tokens is filled up with the mask
    id, and an ended row with padding. The answer applies to rows whose n-th token has just become
    final.
    """

    def __init__(
        self,
        criteria: Sequence[StoppingCriteria],
        rows: Sequence[Row],
        input_ids: Tensor,
        pad_id: int,
    ) -> None:
        self.criteria = criteria
        self.rows = rows
        self.prompt = input_ids
        self.pad_id = pad_id
        self.checked = [0] * len(rows)  # number of tokens of each row that criteria have seen

    def __call__(self, rows: Sequence[Row]) -> None:
        """Check the criteria at all tokens of the call that have just become final; set `stop` of
        each row whose text they end."""
        final_tokens = []
        columns: set[int] = set()
        for row, checked in zip(self.rows, self.checked, strict=True):
            end = row.limit if row.stop is None else row.stop
            tokens = row.text[row.prompt : end]
            if row.mask_id in tokens:
                tokens = tokens[: tokens.index(row.mask_id)]
            final_tokens.append(tokens)
            columns.update(range(checked, len(tokens)))
        for column in sorted(columns):
            newly_final = [
                index
                for index, tokens in enumerate(final_tokens)
                if self.checked[index] <= column < len(tokens)
            ]
            if not newly_final:  # all rows with this token end before it
                continue
            table = []
            for row, tokens in zip(self.rows, final_tokens, strict=True):
                fill = row.mask_id if row.stop is None else self.pad_id
                table.append((tokens + [fill] * (column + 1))[: column + 1])
            ids = torch.cat([self.prompt, self.prompt.new_tensor(table)], 1)
            answers = [_stops(criterion, ids) for criterion in self.criteria]
            stops = [any(answer) for answer in zip(*answers, strict=True)]
            for index in newly_final:
                self.checked[index] = column + 1
                if stops[index]:
                    self.rows[index].stop = self.rows[index].prompt + column + 1
                    del final_tokens[index][column + 1 :]


def _stops(criterion: Any, ids: Tensor) -> list[bool]:
    """Call a stopping criterion on ids [rows, length]; return its answer by row, or raise
    `ValueError` for an answer of another type."""
    answer = criterion(ids, None)
    if isinstance(answer, bool):
        return [answer] * len(ids)
    if (
        not isinstance(answer, Tensor)
        or answer.dtype != torch.bool
        or answer.shape not in ((), (len(ids),))
    ):
        kind = f"a {type(answer).__name__}"
        if isinstance(answer, Tensor):
            kind = f"{answer.dtype} of {list(answer.shape)}"
        raise ValueError(
            f"the stopping criterion {type(criterion).__name__} returned {kind}: it must return a "
            f"bool tensor of [{len(ids)}], one for each row"
        )
    stops: list[bool] = answer.expand(len(ids)).tolist()
    return stops


def output_of(
    input_ids: Tensor,
    rows: Sequence[Row],
    decoder: Decoder,
    progress: Progress | None,
    cache: BlockCache | None,
    pad: int,
) -> Tensor | MRPGenerateOutput:
    """Make the output of `generate` from ended rows: their texts after `input_ids` [rows, prompt],
    padded with `pad`."""
    device = input_ids.device
    texts = [row.text[row.prompt : row.stop] for row in rows]
    width = max(map(len, texts))

    def padded(values: list[list[Any]], fill: Any) -> Tensor:
        table = []
        for row_values, text in zip(values, texts, strict=True):
            table.append((row_values[: len(text)] + [fill] * width)[:width])
        dtype = torch.float32 if isinstance(fill, float) else torch.long
        return torch.tensor(table, dtype=dtype, device=device)

    tokens = padded(texts, pad)
    sequences = torch.cat([input_ids, tokens], 1)
    if progress is None:
        return sequences
    reveal_step = padded([row.step for row in rows], -1)
    networks = decoder.networks

    def counts(name: str) -> Tensor:
        return torch.tensor([getattr(row.counts, name) for row in rows], device=device)

    forwards = {
        "prefill": networks.forwards["prefill"],
        "denoise": networks.forwards["denoise"] - decoder.verified,
        "verify": decoder.verified,
        "head": networks.forwards["head"],
    }
    row_forwards = counts("forwards")
    rounds = None
    round_names = ("row_forwards", "steps", "drafted", "accepted", "column")
    if progress.rounds:
        counted = torch.tensor(progress.rounds, device=device).unbind(2)
        rounds = dict(zip(round_names, counted, strict=True))
    revocations = torch.tensor(progress.revocations, dtype=torch.long, device=device)
    trailing = []
    for row, text in zip(rows, texts, strict=True):
        for column in range(len(text), len(row.step)):
            if row.step[column] >= 0:
                token = row.text[row.prompt + column]
                trailing.append((row.place, column, token, row.step[column]))
    trailing_reveals = torch.tensor(trailing, dtype=torch.long, device=device)
    stats = MRPGenerateStats(
        forwards=forwards,
        row_forwards=row_forwards,
        row_head_forwards=counts("head_forwards"),
        slot_forwards=networks.slots,
        drafted=counts("drafted"),
        accepted=counts("accepted"),
        revoked=counts("revoked"),
        filled=torch.tensor(
            [sum(position < (row.stop or 0) for position in row.filled_in) for row in rows],
            device=device,
        ),
        accepted_lengths=counts("lengths"),
        offered_at_depth=counts("offered_at_depth"),
        accepted_at_depth=counts("accepted_at_depth"),
        revocations=revocations.view(-1, 3),
        trailing_reveals=trailing_reveals.view(-1, 4),
        rounds=rounds,
    )
    return MRPGenerateOutput(
        sequences=sequences,
        tokens_per_forward=(reveal_step >= 0).sum(1) / row_forwards,
        reveal_step=reveal_step,
        token_logprobs=padded([row.logprob for row in rows], 0.0),
        **progress.distributions(networks.picker, tokens),
        stats=stats,
        cache=cache,
    )


def by_request(
    prompts: Sequence[Sequence[int]], output: MRPGenerateOutput
) -> dict[str, GenerationOutput]:
    """Name each text of a call as transformers' `generate_batch` does: "req_0" and so on for each
    prompt; the names of a prompt's further texts also end in "__child#1" and so on."""
    rows: Any = (output.sequences, output.reveal_step, output.token_logprobs)
    copies = len(rows[0]) // len(prompts)
    results = {}
    for row, (ids, steps, logprobs) in enumerate(
        zip(*(values.tolist() for values in rows), strict=True)
    ):
        prompt, child = divmod(row, copies)
        name = f"req_{prompt}" + (f"__child#{child}" if child else "")
        length = sum(step >= 0 for step in steps)
        results[name] = GenerationOutput(
            name,
            list(prompts[prompt]),
            ids[len(ids) - len(steps) :][:length],
            logprobs[:length],
            status=RequestStatus.FINISHED,
        )
    return results
