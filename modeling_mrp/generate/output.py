"""What `generate` gives: texts, streamed while they are decoded, and what they cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

from ..networks.cache import BlockCache
from ..networks.picker import Picker, Spots
from ..rules.state import Row, State
from .loop import Decoder
from .options import MRPGenerationConfig


@dataclass
class MRPGenerateStats(ModelOutput):
    """Costs of a `generate` call.

    Attributes:
        forwards: Forwards of the whole batch by role: of the backbone `prefill` (prompts), `verify` (rounds that scored drafts)
            and `denoise` (rounds without), and those of the `head`.
        row_forwards: [rows] long, backbone forwards in which each row took part.
        row_head_forwards: [rows] long, the same for the head.
        slot_forwards: Rows of all backbone forwards added up: those that had ended while the batch went on count until they
            leave it, which they do by halves.
        drafted: [rows] long, drafted states that were submitted.
        accepted: [rows] long, drafted states that were right.
        revoked: [rows] long, reveals that `mrp_remask` took back.
        accepted_lengths: [rows, n] long, how many rounds accepted 0, 1, 2, ... states (the first is never a draft; those that
            were scored in vain a round earlier count).
        offered_at_depth: [rows, n] long, by depth k = 1, 2, ...: rounds in which the backbone came by k - 1 drafts and there
            was a draft that could follow the last of them. No columns in modes without drafts.
        accepted_at_depth: [rows, n] long: of these, rounds in which it came by a k-th. Their ratio is the chance that draft k
            is accepted given that k - 1 were; the sum over k is `accepted`.
        revocations: [n, 3] long: row, column of the generated text (as in `reveal_step`) and token of each reveal that
            `mrp_remask` took back, in order. A column may lie behind the end of the text.
        rounds: [1 + rounds, rows] long by name: what each row had come to behind the prefill and behind each round.
            `row_forwards`, `drafted` and `accepted` as above; `steps`, so many denoising steps, which tell with `reveal_step`
            what each forward revealed; and `column`, where the row's block begins in the generated text (below 0 within the
            prompt).
    """

    forwards: dict[str, int] | None = None
    row_forwards: Tensor | None = None
    row_head_forwards: Tensor | None = None
    slot_forwards: int | None = None
    drafted: Tensor | None = None
    accepted: Tensor | None = None
    revoked: Tensor | None = None
    accepted_lengths: Tensor | None = None
    offered_at_depth: Tensor | None = None
    accepted_at_depth: Tensor | None = None
    revocations: Tensor | None = None
    rounds: dict[str, Tensor] | None = None


@dataclass
class MRPGenerateOutput(ModelOutput):
    """The output of `generate` with `return_dict_in_generate=True`.

    Attributes:
        sequences: [rows, prompt + generated] long, padded with `pad_token_id` behind each row's end.
        tokens_per_forward: [rows] float, generated tokens (not given ones) over the backbone forwards in which the row took
            part.
        reveal_step: [rows, generated] long, the denoising step of the row that committed each token; -1 in padding and at
            tokens given with `infill_ids`.
        token_logprobs: [rows, generated] float32, log-probability of each token when committed; 0 in padding and where given.
        scores: With `output_scores=True`, for each new token in the order of positions [rows, vocab] float: what it was drawn
            from, behind processors, temperature and truncation, -inf where it could not be. Padding and given tokens are
            certain: 0 at theirs, -inf elsewhere, so that `compute_transition_scores` gives 0 there.
        logits: With `output_logits=True`, the same before processors, temperature and truncation.
        stats: `MRPGenerateStats`.
        past_key_values: The `BlockCache` to go on from in the next call.
    """

    sequences: Tensor | None = None
    tokens_per_forward: Tensor | None = None
    reveal_step: Tensor | None = None
    token_logprobs: Tensor | None = None
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None
    stats: MRPGenerateStats | None = None
    past_key_values: BlockCache | None = None


def pad_id(config: MRPGenerationConfig) -> int:
    """Choose the id that stands behind the end of a text."""
    return config.pad_token_id if config.pad_token_id is not None else next(iter(config.eos_ids()), 0)


class Progress:
    """What each row of a call had come to behind the prefill and behind each round.

    Args:
        rows: All of the call.
        config: Whether the output is to have scores or logits: then the hidden states that tokens were drawn from are kept.
    """

    def __init__(self, rows: Sequence[Row], config: MRPGenerationConfig) -> None:
        self.rows = rows
        self.wanted = {"logits": config.output_logits, "scores": config.output_scores}
        self.rounds: list[list[tuple[int, ...]]] = []
        self.revocations: list[tuple[int, int, int]] = []
        self.drawn: dict[tuple[int, int], tuple[State, Tensor]] = {}  # by row and position
        for row in rows if any(self.wanted.values()) else ():
            row.written = []

    def note(self, rows: Sequence[Row]) -> None:
        """Note a round, in which `rows` took part."""
        for row in rows:
            columns, tokens = row.remasked
            self.revocations += [(row.place, row.state.start + column - row.prompt, tokens[column]) for column in columns]
            for frontier in row.written or ():
                said = frontier.state, frontier.scores.hidden
                for column in frontier.where:
                    state, (hidden, place) = (frontier.drawn or {}).get(column, said)
                    alone = State(state.key, (column,), state.end, state.masks, state.step)
                    self.drawn[row.place, state.start + column] = alone, hidden[place, column].clone()
            if row.written:
                row.written.clear()
        self.rounds.append(
            [
                (row.counts.forwards, row.steps, row.counts.drafted, row.counts.accepted, row.state.start - row.prompt)
                for row in self.rows
            ]
        )

    def distributions(self, picker: Picker, tokens: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """Compute the scores and logits that were asked for, those of each new token [rows, vocab].

        Args:
            picker: What drew the tokens.
            tokens: [rows, generated] long, the output without the prompt.
        """
        if not any(self.wanted.values()):
            return {}
        states, places, hidden = [], [], []
        before = cache(lambda place, start: self.rows[place].before(start))
        for (place, at), (state, at_state) in self.drawn.items():
            row = self.rows[place]
            if at < (row.stop or 0):
                states.append((before(place, state.start), state))
                places.append((at - row.prompt, place))
                hidden.append(at_state)
        found = {}
        wide = torch.stack(hidden) if hidden else picker.lm_head_weight[:0]  # all may be given
        given = picker.distributions(wide, Spots(states, tokens.device))
        index = torch.tensor(places, dtype=torch.long, device=tokens.device).view(-1, 2).unbind(1)
        for name, part in zip(self.wanted, given, strict=True):
            if self.wanted[name]:
                certain = part.new_full((*tokens.T.shape, part.shape[1]), -torch.inf).scatter_(2, tokens.T[..., None], 0.0)
                found[name] = certain.index_put_(index, part).unbind()
        return found

    def tables(self) -> dict[str, Tensor]:
        """[1 + rounds, rows] long by name."""
        names = ("row_forwards", "steps", "drafted", "accepted", "column")
        return dict(zip(names, torch.tensor(self.rounds).unbind(2), strict=True))


def output_of(
    input_ids: Tensor, rows: Sequence[Row], decoder: Decoder, progress: Progress | None, cache: BlockCache, pad: int
) -> Tensor | MRPGenerateOutput:
    """Make what `generate` returns of rows that have come to their ends.

    Args:
        input_ids: [rows, prompt] long, as given.
        rows: All of the call.
        decoder: Whose forwards are counted.
        progress: What was noted of each round; None: texts alone are wanted.
        cache: The keys and values.
        pad: The id behind the end of a text.
    """
    texts = [row.text[row.prompt : row.stop] for row in rows]
    width = max(map(len, texts))

    def table(parts: list[list[Any]], fill: Any, dtype: torch.dtype) -> Tensor:
        made = torch.tensor([part + [fill] * (width - len(part)) for part in parts], dtype=dtype)
        return made.to(input_ids.device)

    sequences = torch.cat([input_ids, table(texts, pad, torch.long)], 1)
    if progress is None:
        return sequences
    lengths = [len(text) for text in texts]
    reveal_step = table([row.step[:length] for row, length in zip(rows, lengths, strict=True)], -1, torch.long)
    logprobs = [row.logprob[:length] for row, length in zip(rows, lengths, strict=True)]
    networks, counts = decoder.networks, [row.counts for row in rows]

    def counted(name: str) -> Tensor:
        return torch.tensor([getattr(count, name) for count in counts], device=input_ids.device)

    forwards = {"verify": decoder.verified, **networks.forwards}
    forwards["denoise"] -= decoder.verified
    return MRPGenerateOutput(
        sequences=sequences,
        tokens_per_forward=(reveal_step >= 0).sum(1) / counted("forwards"),
        reveal_step=reveal_step,
        token_logprobs=table(logprobs, 0.0, torch.float32),
        **progress.distributions(networks.picker, sequences[:, input_ids.shape[1] :]),
        stats=MRPGenerateStats(
            forwards={name: forwards[name] for name in ("prefill", "denoise", "verify", "head")},
            row_forwards=counted("forwards"),
            row_head_forwards=counted("head_forwards"),
            slot_forwards=len(rows) * networks.forwards["prefill"] + decoder.slots,
            drafted=counted("drafted"),
            accepted=counted("accepted"),
            revoked=counted("revoked"),
            accepted_lengths=counted("lengths"),
            offered_at_depth=counted("offered_at_depth"),
            accepted_at_depth=counted("accepted_at_depth"),
            revocations=torch.tensor(progress.revocations, dtype=torch.long).view(-1, 3).to(input_ids.device),
            rounds={name: part.to(input_ids.device) for name, part in progress.tables().items()},
        ),
        past_key_values=cache,
    )


class Streams:
    """The feeding of streamers: the prompt, finished blocks in order, and drafts to a streamer that has `put_draft`.

    Args:
        streamers: One for each row.
        prompts: Of each row a 1-D long tensor of ids, without padding: what its streamer is put first, as [1, length].
    """

    def __init__(self, streamers: Sequence[BaseStreamer], prompts: list[Tensor]) -> None:
        self.open = dict(enumerate(streamers))
        self.sent = [len(prompt) for prompt in prompts]
        for streamer, prompt in zip(streamers, prompts, strict=True):
            streamer.put(prompt[None].cpu())

    def on_round(self, rows: Sequence[Row]) -> None:
        """Put what a round has finished, and end the streams of rows that have ended."""
        for row in rows:
            if (streamer := self.open.get(row.place)) is None:
                continue
            sent = self.sent[row.place]
            upto = row.stop if row.stop is not None else row.state.start
            if upto > sent:
                streamer.put(torch.tensor(row.text[sent:upto]))
                self.sent[row.place] = upto
            if row.stop is not None:
                self.open.pop(row.place).end()
            elif (put_draft := getattr(streamer, "put_draft", None)) is not None:
                start = row.state.start
                put_draft(torch.tensor([row.text[max(start, self.sent[row.place]) : min(start + row.block_size, row.limit)]]))


def listed_streamers(streamer: Any, rows: int) -> list[BaseStreamer]:
    """List the streamers of a call, one for each row.

    Raises:
        ValueError: for what is no streamer, another number of them, or one that is to take two rows.
    """
    streamers = list(streamer) if isinstance(streamer, list | tuple) else [streamer]
    for one in streamers:
        if not all(callable(getattr(one, name, None)) for name in ("put", "end")):
            raise ValueError(f"streamer is {one!r}: it must have put and end, as a transformers.TextStreamer has")
    different = len(set(map(id, streamers)))
    if not len(streamers) == different == rows:
        raise ValueError(
            f"a streamer takes one row, the batch has {rows}, and streamer holds {different}: pass a list of {rows} different "
            "ones, or stream one prompt at a time"
        )
    return streamers


__all__ = ["MRPGenerateOutput", "MRPGenerateStats", "Progress", "Streams", "listed_streamers", "output_of", "pad_id"]
