"""A request for one text in a batch that requests join and leave: the input of decoding, and the
results that are reported as the text grows."""

import copy
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import StoppingCriteria
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ..kernels.pick import odds_of
from ..networks.networks import Networks
from ..networks.picker import Picker, Spots
from ..rules.draft import UnscoredError
from ..rules.reveal import log_sigmoid
from ..rules.sources import DraftSource
from ..rules.state import Counts, PendingReveal, Row, State
from .loop import Mode
from .output import Stopping


@dataclass(frozen=True)
class Call:
    """The checked input of decoding: the prompts of a call of `generate`, and everything that is
    needed to decode them.

    Attributes:
        config: The checked options.
        mode: Rule, refinement and drafting.
        picker: Picks tokens, using the call's processors.
        rows: The `Row` of each text.
        prompts: For each row, the ids of its prompt, without padding.
        input_ids: int64 [rows, length], the prompts as given, which stopping criteria get.
        criteria: Stopping criteria, without those of length and eos, which each row follows by
            itself.
        sources: Draft sources that are used in addition to scores.
        model_key: Identifies the model's weights, by their memory, and its settings
            (`fingerprint`).
    """

    config: Any
    mode: Mode
    picker: Picker
    rows: list[Row]
    prompts: list[Tensor]
    input_ids: Tensor
    criteria: Sequence[StoppingCriteria]
    sources: Sequence[DraftSource]
    model_key: Hashable


def unscored(error: UnscoredError, row: Row, picker: Picker) -> str:
    """Make the message for the user about `error`, which says that the token picked at a position
    of `row` has no finite logit; include the remedy. `picker` is the picker of the row."""
    return (
        f"no token with a finite score at position {error.position}, "
        f"{error.position - row.prompt} behind its prompt: leave one that no logits processor, "
        "option or minimum length bars. If none is, weights or scores are not finite in "
        f"{picker.lm_head_weight.dtype}: load or train them again, or load a wider dtype"
    )


@dataclass
class RequestOutput(GenerationOutput):
    """The text of a request so far, in the form of transformers' `GenerationOutput`, and the costs
    of the text.

    Attributes:
        reveal_step: For each generated token, the denoising step that revealed it.
        top_logprobs: For each generated token, the likeliest ids at its state with their
            log-probabilities. Empty unless the request asks for them.
        finish_reason: "eos", "length" or "criterion" (also for a stop string) once the text is
            complete; None before.
        counts: How many forwards and drafts the row has taken (`Counts`).
    """

    reveal_step: list[int] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    counts: Counts = field(default_factory=lambda: Counts(1, False))


class Request:
    """A request for one text: its row, and its results so far.

    Args:
        name: The id of the request.
        call: The checked call to which the request belongs.
        index: The index of the request's row in the call.
        setting: The settings that the request shares with all other requests of its batch
            (`setting_of`).
        streaming: Whether the text is reported after every round, or only when it is complete.
        timestamps: Whether the time of each token is recorded.
        top_logprobs: Number of likeliest tokens that are reported for each position.

    Attributes:
        cancelled: Whether the request has been cancelled.
        output: The reported results.
    """

    def __init__(
        self,
        name: str,
        call: Call,
        index: int,
        setting: Hashable,
        streaming: bool,
        timestamps: bool,
        top_logprobs: int,
    ) -> None:
        self.call = call
        self.setting = setting
        self.streaming = streaming
        self.top_count = top_logprobs
        self.cancelled = False
        self._index = index
        self.output = RequestOutput(name, call.prompts[index].tolist())
        if timestamps:
            self.output.timestamps = []
        self.restart()

    @property
    def size(self) -> int:
        """The number of cache slots that the request's text takes."""
        return len(self.row.text)

    def restart(self) -> None:
        """Start the text again from the prompt, with a new row. It becomes the same text, so
        results that were already reported stay valid."""
        mode = self.call.mode
        self.row = self.call.rows[self._index].rewound(0)
        self.row.counts = Counts(mode.width, mode.drafting is not None)
        if self.top_count:
            self.row.written = []
        self._likeliest: dict[int, dict[int, float]] = {}
        self._stopping = None
        if self.call.criteria:
            ids = self.call.prompts[self._index][None]
            pad = self.call.config.pad_token_id
            self._stopping = Stopping(self.call.criteria, [self.row], ids, pad)

    def read(self, networks: Networks) -> bool:
        """Update `output` after a round: end the row if a stopping criterion of the request says
        so, and add the tokens that have become final. Return whether anything is new. `networks`
        compute the likeliest tokens of each position, if the request asks for them."""
        row = self.row
        if self.top_count:
            self._read_likeliest(networks)
        end = row.stop
        if self._stopping is not None:
            self._stopping([row])
        if row.stop is None:
            # reveals that the head may still re-mask are not final
            bound = row.limit if self.call.mode.refine is None else row.state.start
            return self._take(bound, None)
        reason = "length"
        if row.stop != end:
            reason = "criterion"
        elif row.text[row.stop - 1] in row.eos:
            reason = "eos"
        return self._take(row.stop, reason)

    def _take(self, bound: int, reason: str | None) -> bool:
        """Take tokens in order, up to a mask or to the position `bound`. `reason` is the reason why
        the text has ended, or None. Return whether anything is new."""
        row, output = self.row, self.output
        begin = row.prompt + len(output.generated_tokens)
        end = begin
        while end < bound and row.text[end] != row.mask_id:
            end += 1
        if end == begin and reason is None:
            return False
        output.generated_tokens += row.text[begin:end]
        output.logprobs += row.logprob[begin - row.prompt : end - row.prompt]
        output.reveal_step += row.step[begin - row.prompt : end - row.prompt]
        for position in range(begin, end if self.top_count else begin):
            output.top_logprobs.append(self._likeliest[position])
        if output.timestamps is not None:
            output.timestamps += [time.perf_counter()] * (end - begin)
        output.counts = row.counts
        output.status = RequestStatus.DECODING
        if reason is not None:
            output.finish_reason = reason
            self._end(RequestStatus.FINISHED)
        return True

    def begin(self) -> None:
        """Record that decoding of the text has begun."""
        self.output.status = RequestStatus.PREFILLING
        self.output.lifespan = (time.perf_counter(), -1)

    def fail(self, error: str) -> None:
        """Record that the request has failed, so that its text will not grow any more."""
        self.output.error = error
        self._end(RequestStatus.FAILED)

    def _end(self, status: RequestStatus) -> None:
        self.output.status = status
        self.output.lifespan = (self.output.lifespan[0], time.perf_counter())
        self.row.forget()

    def snapshot(self) -> RequestOutput:
        """Return a copy of the results so far, which does not change while they keep growing."""
        output = copy.copy(self.output)
        output.generated_tokens = list(output.generated_tokens)
        output.logprobs = list(output.logprobs)
        output.reveal_step = list(output.reveal_step)
        output.top_logprobs = list(output.top_logprobs)
        if output.timestamps is not None:
            output.timestamps = list(output.timestamps)
        return output

    def _read_likeliest(self, networks: Networks) -> None:
        """Compute the likeliest tokens at the positions that the last round revealed, for
        `RequestOutput.top_logprobs`."""
        positions = []
        states: list[tuple[Row, State]] = []
        hidden_states = []
        for pending in self.row.written or ():
            for column, (state, (hidden, index)) in picked_from(pending):
                positions.append(state.start + column)
                single = State(state.key, (column,), state.end, state.masks, state.step)
                states.append((self.row, single))
                hidden_states.append(hidden[index, column])
        self.row.written = []
        if not positions:
            return
        picker = replace(
            networks.picker,
            sample=False,
            truncation=None,
            entropy=False,
            candidates=self.top_count,
        )
        spots = Spots(states, networks.device)
        candidates = picker(torch.stack(hidden_states), spots).candidates
        assert candidates is not None
        ids = candidates[:, : candidates.shape[1] // 2][:, : self.top_count]
        scores = candidates[:, candidates.shape[1] // 2 :]
        odds = odds_of(scores, torch.arange(ids.shape[1], device=ids.device).expand_as(ids))
        for position, tokens, numbers in zip(positions, ids.tolist(), odds.tolist(), strict=True):
            pairs = zip(tokens, numbers, strict=True)
            self._likeliest[position] = {int(token): log_sigmoid(number) for token, number in pairs}


def picked_from(pending: PendingReveal) -> Iterator[tuple[int, tuple[State, Any]]]:
    """Yield each revealed column of a pending reveal. With it, yield the state and the hidden
    states (in the form of `Scores.hidden`) from which the column's token was picked."""
    of_backbone = (pending.state, pending.scores.hidden)
    for column in pending.columns:
        yield column, (pending.drawn or {}).get(column, of_backbone)
