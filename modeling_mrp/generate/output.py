"""The output of `generate`, and the observers of its rounds: streamers, stopping criteria, records
of progress."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.generation import StoppingCriteria
from transformers.utils import ModelOutput

from ..model.compat import CacheOutput
from ..networks.cache import BlockCache
from ..networks.picker import Picker, Spots
from ..rules.state import Row, State
from .loop import Decoder


@dataclass
class MRPGenerateStats(ModelOutput):
    """Costs of a `generate` call; tensors are long.

    Attributes:
        forwards: Forwards of the whole batch by role: of the backbone `prefill` (prompts), `verify`
            (rounds that scored drafts) and `denoise` (rounds without drafts), and those of the
            `head`.
        row_forwards, row_head_forwards: [rows], forwards of the backbone, and of the head, in which
            each row took part.
        slot_forwards: Rows of the batch summed over backbone forwards, including rows that had
            ended but not left the batch.
        drafted, accepted: [rows], drafted states that were submitted, and that were accepted.
        revoked: [rows], reveals that `mrp_remask` took back.
        accepted_lengths: [rows, n], numbers of rounds that accepted 0, 1, 2, ... states, including
            the first, which is no draft, and states that the round before had scored.
        offered_at_depth: [rows, n], by depth k = 1, 2, ...: rounds that accepted at least k - 1
            drafts and offered a k-th, a draft that could follow the (k - 1)-th. No columns in modes
            without drafts.
        accepted_at_depth: [rows, n], by depth: rounds of `offered_at_depth` that accepted that
            draft; their sum is `accepted`.
        revocations: [n, 3]: row, column of the generated text (as in `reveal_step`; it may lie
            beyond the end) and token of each reveal that `mrp_remask` took back, in order.
        rounds: [1 + rounds, rows] by name, each row's counts after the prefill and each round:
            `row_forwards`, `drafted`, `accepted`, `steps` of denoising and `column`, its block's
            start in the generated text (below 0 in the prompt).
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
class MRPGenerateOutput(CacheOutput):
    """The output of `generate` with `return_dict_in_generate=True`.

    Attributes:
        sequences: [rows, prompt + generated] long, padded with `pad_token_id` behind each row's
            end.
        tokens_per_forward: [rows] float, generated tokens (not given ones) over `row_forwards`.
        reveal_step: [rows, generated] long, the denoising step of the row that committed each
            token; -1 in padding and at tokens given with `infill_ids`.
        token_logprobs: [rows, generated] float32, log-probability of each token when committed; 0
            in padding and where given.
        scores: With `output_scores=True`, [rows, vocab] float for each new position in order: the
            scores from which its token was drawn, after processors, temperature and truncation,
            -inf at excluded tokens. Padding and given tokens have 0 at their own id and -inf
            elsewhere, so that `compute_transition_scores` gives 0 for them.
        logits: With `output_logits=True`, the same before processors, temperature and truncation.
        stats: `MRPGenerateStats`.
        cache: The `BlockCache` to go on from in the next call; `past_key_values` is another name of
            it.
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
    """Records each row's counts after the prefill and after each round, and hidden states for
    `logits` and `scores`."""

    def __init__(self, rows: Sequence[Row], logits: bool, scores: bool) -> None:
        self.rows, self.wanted = rows, {"logits": logits, "scores": scores}
        self.rounds: list[list[tuple[int, ...]]] = []
        self.revocations: list[tuple[int, int, int]] = []
        self.drawn: dict[tuple[int, int], tuple[State, Tensor]] = {}  # by row and position
        for row in rows:
            row.written = []

    def __call__(self, rows: Sequence[Row]) -> None:
        """Record all rows' counts after a round, and what was drawn and remasked in `rows`, which
        took part in it."""
        for row in rows:
            for frontier in row.written or ():
                said = frontier.state, frontier.scores.hidden
                begin, tokens = frontier.state.start - row.prompt, frontier.scores.token
                self.revocations += [
                    (row.place, begin + column, tokens[column]) for column in frontier.remasked
                ]
                for column in frontier.where if any(self.wanted.values()) else ():
                    state, (hidden, place) = (frontier.drawn or {}).get(column, said)
                    alone = State(state.key, (column,), state.end, state.masks, state.step)
                    self.drawn[row.place, state.start + column] = (
                        alone,
                        hidden[place, column].clone(),
                    )
            row.written = []
        counts = [(row.counts, row) for row in self.rows]
        self.rounds.append(
            [
                (c.forwards, r.steps, c.drafted, c.accepted, r.state.start - r.prompt)
                for c, r in counts
            ]
        )

    def distributions(self, picker: Picker, tokens: Tensor) -> dict[str, tuple[Tensor, ...]]:
        """Compute the output's `scores` and `logits`, if wanted: [rows, vocab] by column of
        `tokens` [rows, generated]."""
        if not any(self.wanted.values()):
            return {}
        before = cache(lambda place, start: self.rows[place].rewound(start))
        drawn = [
            ((at - self.rows[place].prompt, place), (before(place, state.start), state), hidden)
            for (place, at), (state, hidden) in self.drawn.items()
            if at < (self.rows[place].stop or 0)
        ]
        # all may be given
        wide = (
            torch.stack([hidden for _, _, hidden in drawn]) if drawn else picker.lm_head_weight[:0]
        )
        given = picker.distributions(wide, Spots([state for _, state, _ in drawn], tokens.device))
        index = (
            torch.tensor([where for where, _, _ in drawn], dtype=torch.long, device=tokens.device)
            .view(-1, 2)
            .unbind(1)
        )
        found = {}
        for name, part in zip(self.wanted, given, strict=True):
            if self.wanted[name]:
                columns = tokens.T.contiguous()[..., None]  # `scatter_` needs that on GPUs
                certain = part.new_full((*tokens.T.shape, part.shape[1]), -torch.inf).scatter_(
                    2, columns, 0.0
                )
                found[name] = certain.index_put_(index, part).unbind()
        return found


class Streams:
    """Feeds one streamer per row: the prompt [1, length] and finished blocks; `put_draft`, if any,
    gets unfinished ones."""

    def __init__(self, streamer: Any, prompts: Sequence[Tensor]) -> None:
        streamers = list(streamer) if isinstance(streamer, list | tuple) else [streamer]
        different, rows = len(set(map(id, streamers))), len(prompts)
        if not len(streamers) == different == rows:
            raise ValueError(
                f"streamer holds {different} for {rows} rows: pass a list of {rows}, or one prompt "
                "at a time"
            )
        if wrong := [one for one in streamers if not (hasattr(one, "put") and hasattr(one, "end"))]:
            raise ValueError(
                f"streamer is {wrong[0]!r}, without put and end: pass transformers' streamers, or "
                "such objects"
            )
        self.open, self.sent = dict(enumerate(streamers)), [len(prompt) for prompt in prompts]
        for one, prompt in zip(streamers, prompts, strict=True):
            one.put(prompt[None].cpu())

    def __call__(self, rows: Sequence[Row]) -> None:
        """Send the text that a round has finished, and end the streams of rows that have ended."""
        for row in rows:
            if (streamer := self.open.get(row.place)) is None:
                continue
            upto = row.stop or row.state.start
            if upto > self.sent[row.place]:
                streamer.put(torch.tensor(row.text[self.sent[row.place] : upto]))
                self.sent[row.place] = upto
            if row.stop is not None:
                self.open.pop(row.place).end()
            elif (put_draft := getattr(streamer, "put_draft", None)) is not None:
                end = min(row.state.start + row.block_size, row.limit)
                put_draft(torch.tensor([row.text[self.sent[row.place] : end]]))


class Stopping:
    """The stopping criteria of one `generate` call, asked at every token of a row once it is final
    (no mask before it).

    A criterion gets ids as in transformers' loop, [rows, prompt + n]: the prompts as given, with
    padding, then n tokens of every row. A row with fewer final tokens is filled up with the mask
    id, a row that has ended with padding. The answer counts for rows whose n-th token is newly
    final.
    """

    def __init__(
        self,
        criteria: Sequence[StoppingCriteria],
        rows: Sequence[Row],
        input_ids: Tensor,
        pad_id: int,
    ) -> None:
        self.criteria, self.rows, self.prompt, self.pad_id = criteria, rows, input_ids, pad_id
        self.asked = [0] * len(rows)  # how many tokens of each row have been shown

    def __call__(self, rows: Sequence[Row]) -> None:
        """Ask the criteria about all newly final tokens of the call; set `stop` of each row whose
        text they end."""
        known = []
        for row in self.rows:
            end = row.limit if row.stop is None else row.stop
            known.append(
                row.text[
                    row.prompt : next(
                        (at for at in range(row.prompt, end) if row.text[at] == row.mask_id), end
                    )
                ]
            )
        new = {
            column
            for asked, tokens in zip(self.asked, known, strict=True)
            for column in range(asked, len(tokens))
        }
        for column in sorted(new):
            asking = [
                at for at, tokens in enumerate(known) if self.asked[at] <= column < len(tokens)
            ]
            if not asking:  # all that had this token end before it
                continue
            behind = [row.mask_id if row.stop is None else self.pad_id for row in self.rows]
            shown = [
                (one + [other] * (column + 1))[: column + 1]
                for one, other in zip(known, behind, strict=True)
            ]
            ids = torch.cat([self.prompt, self.prompt.new_tensor(shown)], 1)
            answers = [_stops(criterion, ids) for criterion in self.criteria]
            stops = [any(answer) for answer in zip(*answers, strict=True)]
            for at in asking:
                self.asked[at] = column + 1
                if stops[at]:
                    self.rows[at].stop = self.rows[at].prompt + column + 1
                    del known[at][column + 1 :]


def _stops(criterion: Any, ids: Tensor) -> list[bool]:
    """Ask a stopping criterion about ids [rows, length]; return its answer by row, or raise
    `ValueError` for another kind."""
    answer = criterion(ids, None)
    if isinstance(answer, bool):
        return [answer] * len(ids)
    if (
        not isinstance(answer, Tensor)
        or answer.dtype != torch.bool
        or answer.shape not in ((), (len(ids),))
    ):
        kind = (
            f"{answer.dtype} of {list(answer.shape)}"
            if isinstance(answer, Tensor)
            else f"a {type(answer).__name__}"
        )
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
    cache: BlockCache,
    pad: int,
) -> Tensor | MRPGenerateOutput:
    """Make the output of `generate` from ended rows: their texts, padded with `pad`, behind
    `input_ids` [rows, prompt]."""
    device, texts = input_ids.device, [row.text[row.prompt : row.stop] for row in rows]
    width = max(map(len, texts))

    def table(parts: list[list[Any]], fill: Any) -> Tensor:
        padded = [
            (part[: len(text)] + [fill] * width)[:width]
            for part, text in zip(parts, texts, strict=True)
        ]
        return torch.tensor(
            padded, dtype=torch.float32 if isinstance(fill, float) else torch.long, device=device
        )

    tokens = table(texts, pad)
    sequences = torch.cat([input_ids, tokens], 1)
    if progress is None:
        return sequences
    reveal_step, networks = table([row.step for row in rows], -1), decoder.networks

    def counted(name: str) -> Tensor:
        return torch.tensor([getattr(row.counts, name) for row in rows], device=device)

    forwards = {
        "verify": decoder.verified,
        **networks.forwards,
        "denoise": networks.forwards["denoise"] - decoder.verified,
    }
    rounds = torch.tensor(progress.rounds, device=device).unbind(2)
    return MRPGenerateOutput(
        sequences=sequences,
        tokens_per_forward=(reveal_step >= 0).sum(1) / counted("forwards"),
        reveal_step=reveal_step,
        token_logprobs=table([row.logprob for row in rows], 0.0),
        **progress.distributions(networks.picker, tokens),
        stats=MRPGenerateStats(
            forwards={name: forwards[name] for name in ("prefill", "denoise", "verify", "head")},
            row_forwards=counted("forwards"),
            row_head_forwards=counted("head_forwards"),
            slot_forwards=len(rows) * forwards["prefill"] + decoder.slots,
            accepted_lengths=counted("lengths"),
            revocations=torch.tensor(progress.revocations, dtype=torch.long, device=device).view(
                -1, 3
            ),
            rounds=dict(
                zip(("row_forwards", "steps", "drafted", "accepted", "column"), rounds, strict=True)
            ),
            **{
                name: counted(name)
                for name in (
                    "drafted",
                    "accepted",
                    "revoked",
                    "offered_at_depth",
                    "accepted_at_depth",
                )
            },
        ),
        cache=cache,
    )
