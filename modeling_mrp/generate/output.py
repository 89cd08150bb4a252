"""The output of `generate`, and observers of its rounds: streamers, stopping criteria, records of
progress."""

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
    """The costs of a `generate` call. All tensors are int64.

    Attributes:
        forwards: Number of forwards of the whole batch, by role. The roles of the backbone are
            `prefill` (prompts), `verify` (rounds that scored drafts) and `denoise` (rounds without
            drafts); the role of the head is `head`.
        row_forwards, row_head_forwards: [rows], the number of forwards in which each row took part,
            of the backbone and of the head.
        row_states: [rows], the number of states that these forwards of the backbone scored; a
            forward over a prompt counts as one.
        slot_forwards: The number of rows in the batch, summed over backbone forwards. It includes
            rows that had ended but not left the batch.
        drafted, accepted: [rows], the number of drafted states that were submitted, and the number
            of drafted states that were accepted.
        revoked: [rows], the number of reveals that `mrp_remask` masked again.
        filled: [rows], the number of tokens that no forward picked, because a `regex`, `choices`,
            `json_schema` or `grammar` left no choice.
        accepted_lengths: [rows, n], the number of rounds that accepted 0, 1, 2, ... states. The
            first state of a round counts, although it is not a draft. States that the previous
            round had scored count, too.
        offered_at_depth: [rows, n], for each depth k = 1, 2, ..., the number of rounds that
            accepted at least k - 1 drafts and offered a k-th one, which is a draft that could
            follow the (k - 1)-th. In modes without drafts, n is 0.
        accepted_at_depth: [rows, n], for each depth k, the number of the rounds in
            `offered_at_depth` that accepted the k-th draft. The sum over depths is `accepted`.
        revocations: [n, 3], the row, column and token of each reveal that `mrp_remask` masked
            again, in order. Columns are those of the generated text (as in `reveal_step`), but may
            lie beyond its end.
        trailing_reveals: [n, 4], the row, column, token and step of each token that was revealed
            beyond the end of its text. Columns and steps are as in `reveal_step`.
        rounds: Maps each name to a tensor [1 + rounds, rows]: the counts of each row after the
            prefill and after each round. The names are `row_forwards`, `drafted`, `accepted`,
            `steps` (denoising steps) and `column` (the column of the generated text where the row's
            block begins, below 0 in the prompt). None if rows had to wait for others
            (`max_batch_size`).
    """

    forwards: dict[str, int] | None = None
    row_forwards: Tensor | None = None
    row_head_forwards: Tensor | None = None
    row_states: Tensor | None = None
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
        sequences: int64 [rows, prompt + generated], padded with `pad_token_id` after the end of
            each row.
        tokens_per_forward: float [rows], the number of generated tokens (without given ones)
            divided by `row_forwards`.
        reveal_step: int64 [rows, generated], for each token, the denoising step of its row that
            revealed it. -1 in padding and at tokens given with `infill_ids`.
        token_logprobs: float32 [rows, generated], the log-probability of each token when it was
            revealed; 0 at padding and at given tokens.
        scores: With `output_scores=True`, a float tensor [rows, vocab] for each new position in
            order: the scores from which its token was drawn, after processors, temperature and
            truncation. Excluded tokens have -inf. At padding and given tokens, their own id has 0
            and all others have -inf, so that `compute_transition_scores` gives 0 for them.
        logits: With `output_logits=True`, the same scores before processors, temperature and
            truncation.
        stats: The costs of the call, an `MRPGenerateStats`.
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
    """Records what the output reports about the course of decoding.

    These are the counts of each row after the prefill and after each round, the reveals that were
    masked again, and, if `logits` or `scores` are requested, the hidden states from which they are
    computed. If rows wait for others, no counts are recorded. The object is called with the rows of
    the batch after the prefill and after each round.

    Args:
        rows: All rows of the call.
        logits, scores: Whether the output is to have `logits` and `scores`.
        waiting: Whether some rows of the call wait for others.
    """

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
        """Record a round: the tokens that `rows`, the rows that took part in it, picked and masked
        again, and the counts of all rows of the call."""
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
        """Compute those of the output's `scores` and `logits` that are requested. Return them by
        these names, each a tuple of tensors [rows, vocab], one for each column of `tokens`.

        Args:
            picker: The picker of the call.
            tokens: int64 [rows, generated], the generated tokens, padded after each row's end.
        """
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
    """Feeds one streamer per row: first with the prompt [1, length], then with finished blocks. If
    a streamer has a method `put_draft`, that method gets unfinished blocks.

    The object is called with the rows of the batch after the prefill and after each round.

    Args:
        streamer: A streamer, or a list of one streamer per row.
        prompts: For each row, the ids of its prompt, without padding.

    Raises:
        ValueError: unless there is one streamer for each row, with methods `put` and `end`.
    """

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
        """Send the text that the last round has finished, and end the streams of ended rows."""
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
    """A streamer that advances a progress bar by one when its row ends.

    Args:
        bar: A progress bar with the method `update`, such as one of tqdm.
    """

    def __init__(self, bar: Any) -> None:
        self.bar = bar

    def put(self, value: Tensor) -> None:
        """Do nothing: the tokens of the row are not needed."""

    def end(self) -> None:
        """Advance the progress bar by one, because the row has ended."""
        self.bar.update()


class Stopping:
    """Checks the stopping criteria of one `generate` call at every token of a row once the token is
    final, which means that no mask is before it.

    As in transformers' loop, a criterion gets ids [rows, prompt + n]: the prompts as given, with
    padding, and then n tokens of every row. A row with fewer than n final tokens is filled up with
    the mask id, and an ended row with padding. The answer of the criterion applies to the rows
    whose n-th token has just become final.

    Args:
        criteria: The stopping criteria.
        rows: All rows of the call.
        input_ids: int64 [rows, prompt], the prompts as given.
        pad_id: The id that pads ended rows.
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
        """Check the criteria at all tokens of the call that have just become final. Set `stop` of
        each row whose text a criterion ends."""
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
    """Call a stopping criterion on ids [rows, length]; return its answer for each row. Raise
    `ValueError` if the answer is neither a bool nor a bool tensor [rows] (or with no dimension)."""
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
    """Make the output of `generate` after all rows have ended.

    Args:
        input_ids: int64 [rows, prompt], the prompts as given; the generated tokens follow them.
        rows: All rows of the call.
        decoder: The decoder of the call, which has counts of forwards.
        progress: What was recorded during the call; None if only the ids are to be returned.
        cache: The cache that the output returns for the next call, or None.
        pad: The id that pads rows after their end.

    Returns:
        int64 [rows, prompt + generated] if `progress` is None, else an `MRPGenerateOutput`.
    """
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
        row_states=counts("states") + row_forwards - counts("lengths").sum(1),
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
    """Map the name of each text of a call to its output, as transformers' `generate_batch` does.

    The names are "req_0", "req_1" and so on, one for each prompt. The names of a prompt's further
    texts also end in "__child#1" and so on.
    """
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
