"""A request for one text of a batch that requests join and leave: what decoding takes, and what is
told of the text as it grows."""

import copy
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import StoppingCriteria
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ..networks.networks import Networks
from ..networks.picker import Picker, Spots
from ..rules.draft import UnscoredError
from ..rules.reveal import log_sigmoid
from ..rules.sources import DraftSource
from ..rules.state import Counts, Frontier, Row, State
from .loop import Mode
from .output import Stopping


@dataclass(frozen=True)
class Call:
    """What decoding the prompts of a call of `generate` takes, its arguments checked.

    Attributes:
        config: The options.
        mode: Rule, refinement and drafting.
        picker: Picks tokens by the call's processors.
        rows: A row for each text.
        prompts: By row, the prompt's ids without padding.
        input_ids: [rows, length] long, the prompts as given, which criteria see.
        criteria: Stopping criteria, without those that each row decides by itself.
        sources: Sources of drafts beside scores.
        model_key: The model's `fingerprint`.
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
    """Explain that a row has no token to choose, and what to do about it."""
    return (
        f"no token with a finite score at position {error.position}, "
        f"{error.position - row.prompt} behind its prompt: leave one that no logits processor, "
        "option or minimum length bars. If none is, weights or scores are not finite in "
        f"{picker.lm_head_weight.dtype}: load or train them again, or load a wider dtype"
    )


@dataclass
class RequestOutput(GenerationOutput):
    """The text of a request so far, as transformers' `GenerationOutput` has it, and what it cost.

    Attributes:
        reveal_step: By generated token, the denoising step that revealed it.
        top_logprobs: By generated token, the likeliest ids at its state, each with its
            log-probability, if the request asks for them.
        finish_reason: "eos", "length" or "criterion" (a stop string, too) once the text is whole.
        counts: What the row has cost (`MRPGenerateStats` explains each number).
    """

    reveal_step: list[int] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    counts: Counts = field(default_factory=lambda: Counts(1, False))


class Request:
    """One text that is asked for: its row, and what became of it so far.

    Args:
        name: Its id.
        call: The checked call it belongs to.
        index: The index of its row in the call.
        setting: What it shares with all others of its batch.
        streaming: Whether the text is told after every round, not only when it is whole.
        timestamps: Whether the time of each token is kept.
        top_logprobs: Likeliest tokens that are told of each position.

    Attributes:
        cancelled: Whether nobody waits for it any more.
        output: What is told of it.
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
        """The number of slots that its text takes in a cache."""
        return len(self.row.text)

    def restart(self) -> None:
        """Begin again from the prompt; what was told of the text stays true."""
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
        """Look at the row after a round: end it where a criterion does, and take what is final of
        its text; return whether anything is new."""
        row = self.row
        if self.top_count:
            self._read_likeliest(networks)
        end = row.stop
        if self._stopping is not None:
            self._stopping([row])
        if row.stop is None:
            # what the head may still put back is not final
            bound = row.limit if self.call.mode.refine is None else row.state.start
            return self._take(bound, None)
        reason = "length"
        if row.stop != end:
            reason = "criterion"
        elif row.text[row.stop - 1] in row.eos:
            reason = "eos"
        return self._take(row.stop, reason)

    def _take(self, bound: int, reason: str | None) -> bool:
        """Take tokens in order up to a mask or the position `bound`, and why the text ends, if it
        does; return whether anything is new."""
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
        """Note that the text is being decoded."""
        self.output.status = RequestStatus.PREFILLING
        self.output.lifespan = (time.perf_counter(), -1)

    def fail(self, error: str) -> None:
        """Note that there will be no more of the text."""
        self.output.error = error
        self._end(RequestStatus.FAILED)

    def _end(self, status: RequestStatus) -> None:
        self.output.status = status
        self.output.lifespan = (self.output.lifespan[0], time.perf_counter())
        self.row.forget()

    def snapshot(self) -> RequestOutput:
        """Copy what is told of it, which goes on growing."""
        output = copy.copy(self.output)
        output.generated_tokens = list(output.generated_tokens)
        output.logprobs = list(output.logprobs)
        output.reveal_step = list(output.reveal_step)
        output.top_logprobs = list(output.top_logprobs)
        if output.timestamps is not None:
            output.timestamps = list(output.timestamps)
        return output

    def _read_likeliest(self, networks: Networks) -> None:
        """Compute the likeliest tokens at the positions that the last round revealed."""
        positions = []
        states: list[tuple[Row, State]] = []
        hidden_states = []
        for frontier in self.row.written or ():
            for column, (state, (hidden, index)) in picked_from(frontier):
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
            likeliest=True,
            shortlist=0,
        )
        spots = Spots(states, networks.device)
        likeliest = picker(torch.stack(hidden_states), spots).likeliest
        assert likeliest is not None
        count = likeliest.shape[1] // 2
        for position, numbers in zip(positions, likeliest.tolist(), strict=True):
            pairs = zip(numbers[:count], numbers[count:], strict=True)
            best = sorted(pairs, key=lambda pair: -pair[1])[: self.top_count]
            self._likeliest[position] = {int(token): log_sigmoid(odds) for token, odds in best}


def picked_from(frontier: Frontier) -> Iterator[tuple[int, tuple[State, Any]]]:
    """Yield each revealed column of a frontier, with the state and the hidden states (as
    `Scores.hidden`) from which its token was picked."""
    of_backbone = (frontier.state, frontier.scores.hidden)
    for column in frontier.where:
        yield column, (frontier.drawn or {}).get(column, of_backbone)
