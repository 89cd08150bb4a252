"""The output of `generate`, and what watches its rounds: streamers, stopping criteria, and the progress of each row."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.utils import ModelOutput

from ..networks.cache import BlockCache
from ..networks.picker import Picker, Spots
from ..rules.state import Row, State
from .loop import Decoder


@dataclass
class MRPGenerateStats(ModelOutput):
    """Costs of a `generate` call; tensors are long.

    Attributes:
        forwards: Forwards of the whole batch by role: of the backbone `prefill` (prompts), `verify` (rounds that scored drafts)
            and `denoise` (rounds without), and those of the `head`.
        row_forwards, row_head_forwards: [rows], forwards of the backbone, and of the head, in which each row took part.
        slot_forwards: Rows of all backbone forwards added up, with those that had ended until they left the batch.
        drafted, accepted: [rows], drafted states that were submitted, and that were right.
        revoked: [rows], reveals that `mrp_remask` took back.
        accepted_lengths: [rows, n], how many rounds accepted 0, 1, 2, ... states (the first is never a draft; those that were
            scored in vain a round earlier count).
        offered_at_depth: [rows, n], by depth k = 1, 2, ...: rounds in which the backbone came by k - 1 drafts and there was a
            draft that could follow the last of them. No columns in modes without drafts.
        accepted_at_depth: [rows, n]: of these, rounds in which it came by a k-th. Their ratio is the chance that draft k is
            accepted given that k - 1 were; the sum over k is `accepted`.
        revocations: [n, 3]: row, column of the generated text (as in `reveal_step`) and token of each reveal that `mrp_remask`
            took back, in order. A column may lie behind the end of the text.
        rounds: [1 + rounds, rows] by name: what each row had come to behind the prefill and behind each round. `row_forwards`,
            `drafted`, `accepted`; `steps` of denoising, which tell with `reveal_step` what each forward revealed; and `column`,
            where the row's block begins in the generated text (below 0 within the prompt).
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


class Progress:
    """Records the counts of each row of a call after the prefill and after each round.

    Where the output is to have `logits` or `scores`, the hidden states that tokens were drawn from are kept.
    """

    def __init__(self, rows: Sequence[Row], logits: bool, scores: bool) -> None:
        self.rows, self.wanted = rows, {"logits": logits, "scores": scores}
        self.rounds: list[list[tuple[int, ...]]] = []
        self.revocations: list[tuple[int, int, int]] = []
        self.drawn: dict[tuple[int, int], tuple[State, Tensor]] = {}  # by row and position
        for row in rows:
            row.written = []

    def __call__(self, rows: Sequence[Row]) -> None:
        """Record the counts of `rows` after a round in which they took part."""
        for row in rows:
            for frontier in row.written or ():
                said = frontier.state, frontier.scores.hidden
                begin, tokens = frontier.state.start - row.prompt, frontier.scores.token
                self.revocations += [(row.place, begin + column, tokens[column]) for column in frontier.remasked]
                for column in frontier.where if any(self.wanted.values()) else ():
                    state, (hidden, place) = (frontier.drawn or {}).get(column, said)
                    alone = State(state.key, (column,), state.end, state.masks, state.step)
                    self.drawn[row.place, state.start + column] = alone, hidden[place, column].clone()
            if row.written:
                row.written.clear()
        counts = [(row.counts, row) for row in self.rows]
        self.rounds.append([(c.forwards, r.steps, c.drafted, c.accepted, r.state.start - r.prompt) for c, r in counts])

    def distributions(self, picker: Picker, tokens: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """Compute the scores and logits that were asked for, [rows, vocab] each of new `tokens` [rows, generated] long."""
        if not any(self.wanted.values()):
            return {}
        before = cache(lambda place, start: self.rows[place].rewound(start))
        drawn = [
            ((at - self.rows[place].prompt, place), (before(place, state.start), state), hidden)
            for (place, at), (state, hidden) in self.drawn.items()
            if at < (self.rows[place].stop or 0)
        ]
        wide = torch.stack([hidden for _, _, hidden in drawn]) if drawn else picker.lm_head_weight[:0]  # all may be given
        given = picker.distributions(wide, Spots([state for _, state, _ in drawn], tokens.device))
        index = torch.tensor([where for where, _, _ in drawn], dtype=torch.long, device=tokens.device).view(-1, 2).unbind(1)
        found = {}
        for name, part in zip(self.wanted, given, strict=True):
            if self.wanted[name]:
                certain = part.new_full((*tokens.T.shape, part.shape[1]), -torch.inf).scatter_(2, tokens.T[..., None], 0.0)
                found[name] = certain.index_put_(index, part).unbind()
        return found


class Streams:
    """The feeding of streamers, one for each row: the prompt, finished blocks in order, drafts where it has `put_draft`.

    Raises:
        ValueError: for what is no streamer, another number of them than `rows`, or one that is to take two rows.
    """

    def __init__(self, streamer: Any, rows: int) -> None:
        streamers = list(streamer) if isinstance(streamer, list | tuple) else [streamer]
        for one in streamers:
            if not all(callable(getattr(one, name, None)) for name in ("put", "end")):
                raise ValueError(f"streamer is {one!r}: it must have put and end, as a transformers.TextStreamer has")
        different = len(set(map(id, streamers)))
        if not len(streamers) == different == rows:
            raise ValueError(
                f"a streamer takes one row, the batch has {rows}, and streamer holds {different}: pass a list of {rows} "
                "different ones, or stream one prompt at a time"
            )
        self.open, self.sent = dict(enumerate(streamers)), [0] * rows

    def begin(self, prompts: Sequence[Tensor]) -> None:
        """Put each row's prompt, 1-D long without padding, as [1, length]."""
        self.sent = [len(prompt) for prompt in prompts]
        for streamer, prompt in zip(self.open.values(), prompts, strict=True):
            streamer.put(prompt[None].cpu())

    def __call__(self, rows: Sequence[Row]) -> None:
        """Put what a round has finished, and end the streams of rows that have ended."""
        for row in rows:
            if (streamer := self.open.get(row.place)) is None:
                continue
            start = row.state.start
            upto = start if row.stop is None else row.stop
            if upto > self.sent[row.place]:
                streamer.put(torch.tensor(row.text[self.sent[row.place] : upto]))
                self.sent[row.place] = upto
            if row.stop is not None:
                self.open.pop(row.place).end()
            elif (put_draft := getattr(streamer, "put_draft", None)) is not None:
                put_draft(torch.tensor([row.text[max(start, self.sent[row.place]) : min(start + row.block_size, row.limit)]]))


class Stopping:
    """The stopping criteria of one `generate` call, asked at every token of a row once it is final (no mask before it).

    A criterion sees what it would see in transformers' loop: [rows, prompt + n] ids, the prompts as they were given, padding
    included, and n tokens of every row behind them. Criteria that count columns or rows keep their meaning so. Here rows are
    not equally far: one with fewer final tokens shows the mask id in their place, one that has ended shows padding behind its
    end. The answer counts for rows whose n-th token is newly final.
    """

    def __init__(self, criteria: Sequence[StoppingCriteria], rows: Sequence[Row], input_ids: Tensor, pad_id: int) -> None:
        self.criteria, self.rows, self.prompt, self.pad_id = StoppingCriteriaList(criteria), rows, input_ids, pad_id
        self.asked = [0] * len(rows)  # how many tokens of each row have been shown

    def __call__(self, rows: Sequence[Row]) -> None:
        """Ask about all newly final tokens of the call's rows; where a criterion ends a text, its row has a `stop`."""
        known = [final_tokens(row) for row in self.rows]
        lengths = [(asked, len(tokens)) for asked, tokens in zip(self.asked, known, strict=True) if asked < len(tokens)]
        for column in range(min((asked for asked, _ in lengths), default=0), max((length for _, length in lengths), default=0)):
            asking = [at for at, tokens in enumerate(known) if self.asked[at] <= column < len(tokens)]
            if not asking:
                continue
            behind = [row.mask_id if row.stop is None else self.pad_id for row in self.rows]
            shown = [(one + [other] * (column + 1))[: column + 1] for one, other in zip(known, behind, strict=True)]
            stops = self._answers(torch.cat([self.prompt, self.prompt.new_tensor(shown)], 1))
            for at in asking:
                self.asked[at] = column + 1
                if stops[at]:
                    self.rows[at].stop = self.rows[at].prompt + column + 1
                    del known[at][column + 1 :]

    def _answers(self, ids: Tensor) -> list[bool]:
        """Ask the stopping criteria which rows end; a criterion's single answer counts for all rows."""
        try:
            answers: list[bool] = self.criteria(ids, None).tolist()
        except (AttributeError, TypeError) as error:
            if "None" not in str(error):
                raise
            names = ", ".join(type(criterion).__name__ for criterion in self.criteria)
            raise ValueError(
                f"a stopping criterion ({names}) failed ({error}): the scores that it is given are None here. Let it decide by "
                "input_ids, and return a bool for each row"
            ) from error
        return answers


def final_tokens(row: Row) -> list[int]:
    """The generated tokens of a row before its first mask, or its end."""
    end = row.limit if row.stop is None else row.stop
    return row.text[row.prompt : next((at for at in range(row.prompt, end) if row.text[at] == row.mask_id), end)]


def output_of(
    input_ids: Tensor, rows: Sequence[Row], decoder: Decoder, progress: Progress | None, cache: BlockCache, pad: int
) -> Tensor | MRPGenerateOutput:
    """Make what `generate` returns of rows that have come to their ends: `input_ids` [rows, prompt] long with the texts behind,
    padded with `pad`; with `progress` all else too.
    """
    device, texts = input_ids.device, [row.text[row.prompt : row.stop] for row in rows]
    width = max(map(len, texts))

    def table(parts: list[list[Any]], fill: Any) -> Tensor:
        padded = [(part[: len(text)] + [fill] * width)[:width] for part, text in zip(parts, texts, strict=True)]
        return torch.tensor(padded, dtype=torch.float32 if isinstance(fill, float) else torch.long, device=device)

    tokens = table(texts, pad)
    sequences = torch.cat([input_ids, tokens], 1)
    if progress is None:
        return sequences
    reveal_step, networks = table([row.step for row in rows], -1), decoder.networks

    def counted(*names: str) -> dict[str, Tensor]:
        return {name: torch.tensor([getattr(row.counts, name) for row in rows], device=device) for name in names}

    counts = counted("drafted", "accepted", "revoked", "offered_at_depth", "accepted_at_depth")
    others = counted("forwards", "head_forwards", "lengths")
    forwards = {"verify": decoder.verified, **networks.forwards, "denoise": networks.forwards["denoise"] - decoder.verified}
    rounds = torch.tensor(progress.rounds, device=device).unbind(2)
    return MRPGenerateOutput(
        sequences=sequences,
        tokens_per_forward=(reveal_step >= 0).sum(1) / others["forwards"],
        reveal_step=reveal_step,
        token_logprobs=table([row.logprob for row in rows], 0.0),
        **progress.distributions(networks.picker, tokens),
        stats=MRPGenerateStats(
            forwards={name: forwards[name] for name in ("prefill", "denoise", "verify", "head")},
            row_forwards=others["forwards"],
            row_head_forwards=others["head_forwards"],
            slot_forwards=len(rows) * forwards["prefill"] + decoder.slots,
            accepted_lengths=others["lengths"],
            revocations=torch.tensor(progress.revocations, dtype=torch.long, device=device).view(-1, 3),
            rounds=dict(zip(("row_forwards", "steps", "drafted", "accepted", "column"), rounds, strict=True)),
            **counts,
        ),
        past_key_values=cache,
    )
