"""Continuous batching: requests that come one by one join and leave batches between rounds.

Requests share a batch if all that its rounds have in common is equal (`setting_of`): sampling,
processors, drafting, refinement. Prompt, target, seed, limits of length and stopping criteria are
each request's own. Batches of different settings take turns, a round each. Requests start in the
order in which they came: one that finds no room waits, and so do those behind it, until texts end.

A text depends on nothing but its own request. So where one request has no token to choose, the
others of its batch begin again from their prompts, and come to the texts that they had.
"""

import copy
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import StoppingCriteria
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from ..model.loading import weights_on_device
from ..networks.graphs import LEAST_CAPACITY, release_graphs
from ..networks.networks import Networks, networks_for
from ..networks.picker import Picker, Spots
from ..rules.draft import UnscoredError
from ..rules.reveal import RevealRule, log_sigmoid
from ..rules.sources import DraftSource
from ..rules.state import Counts, Frontier, Row, State
from .loop import Decoder, Mode, draft_amount
from .option_table import OPTIONS
from .output import Stopping

TOP_LOGPROBS = 20  # tokens of a position whose log-probabilities a request may ask for, at most
_AT_ONCE = 16  # texts decoded at once, if nobody says how many
_USUAL_TEXT = 4096  # tokens of a text for which memory is planned, if nobody says how many
_QUEUE_SECONDS = 10.0  # that `add_request` waits for a place in a full queue, as transformers does
# Arguments that `generate` alone has.
_OF_GENERATE = (
    "infill_ids",
    "past_key_values",
    "cache",
    "streamer",
    "custom_generate",
    "attention_mask",
    "output_scores",
    "output_logits",
)
# Options of a request that others of its batch need not share: those behind its `Mode`, which is
# compared itself, and those that its row heeds.
_OF_REQUEST = {option.name for option in OPTIONS} - {"kernels", "graphs"} | {
    "max_new_tokens",
    "max_length",
    "min_new_tokens",
    "min_length",
    "max_time",
    "stop_strings",
    "num_return_sequences",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
}


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


@dataclass(frozen=True)
class Limits:
    """What a manager takes on at once.

    Attributes:
        texts: Texts that are decoded at once.
        waiting: Requests that may wait; 0: any number.
        tokens: Tokens of texts that all caches together have room for, beside those being scored.
    """

    texts: int
    waiting: int
    tokens: int

    @classmethod
    def of(cls, given: Any, max_batch_size: int | None, config: Any) -> "Limits":
        """Read transformers' `ContinuousBatchingConfig`, or None; `ValueError` for a field that is
        set and not followed."""
        fields = {} if given is None else dict(vars(given))
        defaults = {} if given is None else vars(type(given)())
        page = fields.pop("page_size", 256)
        pages = fields.pop("num_blocks", None)
        texts = fields.pop("max_requests_per_batch", None) or max_batch_size or _AT_ONCE
        waiting = fields.pop("max_queue_size", 0)
        fields.pop("return_logprobs", None)  # they are there in any case
        for name, value in fields.items():
            if value != defaults.get(name):
                raise ValueError(
                    f"continuous_batching_config has {name}={value!r}, which is not followed here: "
                    "keys and values lie in a BlockCache. Leave it unset"
                )
        longest = config.max_position_embeddings
        tokens = max(longest, texts * min(longest, _USUAL_TEXT))
        if pages is not None:
            tokens = pages * page
        return cls(texts, waiting, tokens)


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
        places = []
        states: list[tuple[Row, State]] = []
        hidden_states = []
        for frontier in self.row.written or ():
            for column, (state, (hidden, index)) in picked_from(frontier):
                places.append(state.start + column)
                single = State(state.key, (column,), state.end, state.masks, state.step)
                states.append((self.row, single))
                hidden_states.append(hidden[index, column])
        self.row.written = []
        if not places:
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
        for position, numbers in zip(places, likeliest.tolist(), strict=True):
            pairs = zip(numbers[:count], numbers[count:], strict=True)
            best = sorted(pairs, key=lambda pair: -pair[1])[: self.top_count]
            self._likeliest[position] = {int(token): log_sigmoid(odds) for token, odds in best}


def picked_from(frontier: Frontier) -> Iterator[tuple[int, tuple[State, Any]]]:
    """Yield each revealed column of a frontier, with the state and the hidden states (as
    `Scores.hidden`) from which its token was picked."""
    of_backbone = (frontier.state, frontier.scores.hidden)
    for column in frontier.where:
        yield column, (frontier.drawn or {}).get(column, of_backbone)


class Batch:
    """Requests of one setting, decoded side by side.

    Args:
        model: An `MRPForCausalLM`.
        first: A request of the setting.
        places: Rows that decode at once, at most.
        capacity: Slots of each.
        tell: Called with each request of which a round has made something.

    Attributes:
        requests: Those that are decoded, by the `place` of their rows, and those that join next.
        rounds: Runs a round each time it is advanced, until there is no request.
    """

    def __init__(
        self,
        model: Any,
        first: Request,
        places: int,
        capacity: int,
        tell: Callable[[Request], None],
    ) -> None:
        self.model = model
        self.call = first.call
        self.setting = first.setting
        self.places = places
        self.capacity = capacity
        self.tell = tell
        self.requests: dict[int, Request] = {}
        self.joining: list[Row] = []
        self.rounds = self._rounds()

    @property
    def slots(self) -> int:
        """The number of tokens of texts that its cache has room for."""
        return self.places * self.capacity

    def takes(self, request: Request) -> bool:
        """Return whether a request can join."""
        fits = request.setting == self.setting and request.size <= self.capacity
        return fits and len(self.requests) < self.places

    def add(self, request: Request, place: int) -> None:
        """Let a request join before the next round."""
        request.begin()
        request.row.place = place
        self.requests[place] = request
        self.joining.append(request.row)

    def _rounds(self) -> Iterator[None]:
        call, block = self.call, self.model.config.block_size
        size = (self.places, self.capacity, call.mode.width * block, call.mode.uses_head)
        with weights_on_device(self.model.lm_head):
            picker = replace(call.picker, lm_head_weight=self.model.lm_head.weight)
            with networks_for(self.model, picker, call.config.graphs, None, *size) as networks:
                yield from JoinedRows(self, networks).rounds([], iter(()))

    def report(self, networks: Networks, rows: Sequence[Row]) -> None:
        """Tell what a round has made of requests."""
        for row in rows:
            request = self.requests.get(row.place)
            if request is None:
                continue
            try:
                news = request.read(networks)
            except Exception as error:  # of the request's own criterion
                row.stop = row.prompt
                request.fail(f"{type(error).__name__}: {error}")
                news = True
            if row.stop is not None:
                del self.requests[row.place]
            if news:
                self.tell(request)

    def drop_cancelled(self) -> None:
        """End the rows of requests for which nobody waits any more."""
        for place, request in list(self.requests.items()):
            if request.cancelled:
                del self.requests[place]
                request.row.stop = request.row.prompt
                request.fail("it was cancelled")
                self.tell(request)
        self.joining = [row for row in self.joining if row.stop is None]


class JoinedRows(Decoder):
    """The decoder of a `Batch`: rows join it as requests come, and it grows for them."""

    def __init__(self, batch: Batch, networks: Networks) -> None:
        call = batch.call
        super().__init__(
            call.mode,
            networks,
            draft_amount(call.mode, call.picker, batch.model.config, call.config.round_costs),
            [lambda rows: batch.report(networks, rows)],
            1 if networks.recorded is None else 4,
            call.sources,
        )
        self.requests = batch

    def rule_of(self, row: Row) -> RevealRule:
        """See `Decoder.rule_of`: the rule of the row's request."""
        return self.requests.requests[row.place].call.mode.rule

    def join(self, batch: list[Row], waiting: Iterator[Row]) -> bool:
        """See `Decoder.join`: those that wait are the requests that came since the last round."""
        self.requests.drop_cancelled()
        joining, self.requests.joining = self.requests.joining, []
        ended = sum(row.stop is not None for row in batch)
        if (needed := len(batch) - ended + len(joining)) > len(batch):
            size = needed
            if self.networks.recorded is not None:  # few sizes, each of which has its recordings
                size = min(self.requests.places, max(4, 1 << (needed - 1).bit_length()))
            while len(batch) < size:
                batch.append(vacant(joining[0]))
            self.networks.extend(size)
        return super().join(batch, iter(joining))


def vacant(row: Row) -> Row:
    """Make a row that has ended, for a place that another one may take."""
    place = row.rewound(0)
    place.place, place.stop = -1, place.prompt
    return place


def setting_of(call: Call, options: dict[str, Any]) -> Hashable:
    """Return what the requests of a batch have in common; `options` are the arguments given."""
    shared = []
    for name, value in vars(call.config).items():
        if name not in _OF_REQUEST and value is not None and not name.startswith("_"):
            shared.append((name, repr(value)))
    objects = []
    for name in ("logits_processor", "draft_sources"):
        objects += [id(part) for part in options.get(name) or ()]
    mode = call.mode
    refine = (mode.refine, mode.drafting, mode.rule.needs_entropy)
    return refine, tuple(sorted(shared)), tuple(objects)


class ContinuousBatchingManager:
    """Decodes requests as they come, in a thread of its own; `init_continuous_batching` makes it.

    Methods have the names and the meaning of transformers' manager. A request may have any option
    of `generate` that one text can have.

    Args:
        model: An `MRPForCausalLM`.
        prepare: Makes a `Call` of the arguments of `generate`.
        generation_config: Options of all requests, which override it.
        limits: What is taken on at once.

    Attributes:
        fatal_error: What ended the thread, if it was an error.
    """

    warmed_up = True  # there is nothing to record before the first request

    def __init__(
        self,
        model: Any,
        prepare: Callable[..., Call],
        generation_config: Any,
        limits: Limits,
    ) -> None:
        self.model = model
        self.limits = limits
        self.generation_config = generation_config
        self.fatal_error: BaseException | None = None
        self._prepare = prepare
        self._waiting: deque[Request] = deque()
        self._batches: list[Batch] = []
        self._requests: dict[str, Request] = {}  # those that have not ended, by name
        self._handlers: dict[str, Callable[[RequestOutput], None]] = {}
        self._results: deque[RequestOutput] = deque()
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping: str | None = None  # "flush" or "hard"
        self._pauses = 0
        self._in_round = False
        self._names = 0
        self._places = 0

    # Requests

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        top_logprobs: int = 0,
        **options: Any,
    ) -> str:
        """Ask for a text.

        Args:
            input_ids: The prompt's ids.
            request_id: Its id; "req_0" and so on, unless it is given.
            max_new_tokens, eos_token_id: As for `generate`.
            streaming: Whether there is a result after each round that makes the text longer, not
                only when it is whole.
            record_timestamps: Whether results have the time of each token.
            top_logprobs: Likeliest tokens of each position in results, at most 20.
            **options: Further options and arguments of `generate`. With `num_return_sequences`
                further texts are named "ID__child#1" and so on.

        Returns:
            The id.

        Raises:
            ValueError: as `generate`, for a prompt that has no room in memory, and for an id that
                is in use.
            RuntimeError: if the manager has stopped.
            queue.Full: if the queue has no place for ten seconds.
        """
        if not 0 <= top_logprobs <= TOP_LOGPROBS:
            raise ValueError(
                f"top_logprobs is {top_logprobs}: it must be an int from 0 to {TOP_LOGPROBS}"
            )
        given: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        options |= {name: value for name, value in given.items() if value is not None}
        options["max_batch_size"] = self.limits.texts
        call = self._call(input_ids, options)
        setting = setting_of(call, options)
        with self._change:
            name = request_id
            if name is None:
                name = f"req_{self._names}"
                self._names += 1
            requests = []
            for index in range(len(call.rows)):
                child = f"{name}__child#{index}" if index else name
                requests.append(
                    Request(child, call, index, setting, streaming, record_timestamps, top_logprobs)
                )
            self._enqueue(requests)
        return name

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **options: Any,
    ) -> list[str]:
        """Ask for a text of each prompt, as by `add_request`; return the ids."""
        common = (max_new_tokens, streaming, record_timestamps)
        return [self.add_request(ids, None, *common, **options) for ids in inputs]

    def cancel_request(self, request_id: str) -> None:
        """End a request: at once if it waits, else before its next round. Its last result has an
        error."""
        with self._change:
            if (request := self._requests.get(request_id)) is not None:
                request.cancelled = True
                self._change.notify_all()

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> RequestOutput | None:
        """Wait for a result, of any request unless one is named; None if `timeout` seconds pass
        without one, or the thread has ended."""
        with self._change:
            self._change.wait_for(
                lambda: self._find(request_id) is not None or not self.is_running(), timeout
            )
            output = self._find(request_id)
            if output is not None:
                del self._results[self._results.index(output)]
            return output

    def __iter__(self) -> Iterator[RequestOutput]:
        while self.is_running() or self._results:
            if (output := self.get_result(timeout=0.1)) is not None:
                yield output

    def request_id_iter(self, request_id: str) -> Iterator[RequestOutput]:
        """Iterate over the results of one request, to its last."""
        while self.is_running() or self._find(request_id) is not None:
            if (output := self.get_result(request_id, timeout=0.1)) is not None:
                yield output
                if output.is_finished():
                    return

    def register_result_handler(
        self, request_id: str, callback: Callable[[RequestOutput], None]
    ) -> None:
        """Let results of a request be given to `callback`, in the thread that decodes, in place of
        `get_result`; call it before `add_request`. For an event loop pass a function that calls
        `loop.call_soon_threadsafe`. An error of the callback cancels the request."""
        with self._change:
            self._handlers[request_id] = callback

    # The thread

    @property
    def waiting(self) -> int:
        """The number of texts that wait for a place."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """The number of texts that are being decoded."""
        return sum(len(batch.requests) for batch in self._batches)

    def is_running(self) -> bool:
        """Return whether the thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        if self.is_running():
            return
        self._stopping = None
        self._thread = threading.Thread(target=self._run, name="continuous batching", daemon=True)
        self._thread.start()

    def warmup(self) -> None:
        """Do nothing: forwards are recorded as they come."""

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Take no more requests, and end the thread: once all texts are whole, or with `hard_stop`
        after the round that runs, when the others fail.

        Args:
            block: Whether to wait for that, `timeout` seconds at most.
            keep_for_next_session: Not needed: `start` starts another thread at any time.
        """
        with self._change:
            self._stopping = "hard" if hard_stop else "flush"
            self._change.notify_all()
        if block:
            self.join(time.perf_counter(), timeout)

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait for the thread to end, `timeout` seconds at most."""
        if self._thread is not None:
            self._thread.join(timeout)

    def destroy(self) -> None:
        """Stop, once all texts are whole."""
        if self.is_running():
            self.stop()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Hold back the next round while the context is open, for instance to use the model."""
        with self._change:
            self._pauses += 1
            self._change.wait_for(lambda: not self._in_round)
        try:
            yield
        finally:
            with self._change:
                self._pauses -= 1
                self._change.notify_all()

    def _call(self, input_ids: Sequence[int], options: dict[str, Any]) -> Call:
        """Check the arguments of a request."""
        for name in _OF_GENERATE:
            if options.get(name):
                raise ValueError(f"{name}: a request cannot have it, pass it to generate")
        with torch.no_grad(), weights_on_device(self.model.lm_head):
            ids = torch.tensor([list(input_ids)], dtype=torch.long, device=self.model.device)
            call = self._prepare(ids, self.generation_config, **options)
        mode = call.config.mode(self.model.config.block_size, self.limits.texts)
        call = replace(call, mode=mode)
        needed = len(call.rows[0].text)
        if needed > self.limits.tokens:
            raise ValueError(
                f"a prompt of {len(input_ids)} tokens and its text take {needed} slots, and all "
                f"caches have {self.limits.tokens}: lower max_new_tokens, or raise num_blocks of "
                "the continuous_batching_config"
            )
        return call

    def _enqueue(self, requests: Sequence[Request]) -> None:
        """Add requests to the queue."""
        for request in requests:
            if request.output.request_id in self._requests:
                raise ValueError(
                    f"request_id {request.output.request_id!r} is in use: give another"
                )
        limit = self.limits.waiting
        if limit and not self._change.wait_for(
            lambda: len(self._waiting) < limit or self._stopping is not None, _QUEUE_SECONDS
        ):
            raise queue.Full(f"{limit} requests wait already: ask again later")
        if self._stopping is not None:
            raise RuntimeError("the manager has stopped, and takes no more requests")
        for request in requests:
            self._requests[request.output.request_id] = request
            self._waiting.append(request)
        self._change.notify_all()

    def _find(self, request_id: str | None) -> RequestOutput | None:
        """Return the first result, of a request if it is named; None if there is none."""
        for output in self._results:
            if request_id in (None, output.request_id):
                return output
        return None

    def _run(self) -> None:
        """Decode until the manager is stopped."""
        error = "the manager has stopped"
        try:
            if self.model.device.type == "cuda":
                torch.cuda.set_device(self.model.device)
            with torch.no_grad():
                while self._step():
                    pass
        except BaseException as fatal:
            self.fatal_error = fatal
            self._stopping = "hard"
            error = f"{type(fatal).__name__}: {fatal}"
            raise
        finally:
            with self._change:
                for batch in self._batches:
                    batch.rounds.close()  # type: ignore[attr-defined]
                self._batches = []
                self._waiting.clear()
                for request in list(self._requests.values()):
                    request.fail(error)
                    self._tell(request)
                self._change.notify_all()

    def _step(self) -> bool:
        """Run a round of each batch, or wait for something to do; return False at the end."""
        with self._change:
            self._change.wait_for(
                lambda: (
                    not self._pauses
                    and (self._batches or self._waiting or self._stopping is not None)
                )
            )
            if self._stopping == "hard" or not (self._batches or self._waiting):
                return False
            self._admit()
            self._in_round = True
        try:
            for batch in list(self._batches):
                self._advance(batch)
        finally:
            with self._change:
                self._in_round = False
                self._change.notify_all()
        return True

    def _admit(self) -> None:
        """Give waiting requests places, in their order, as far as there is room."""
        for _ in range(len(self._waiting)):
            request = self._waiting.popleft()
            if request.cancelled:
                request.fail("it was cancelled")
                self._tell(request)
            else:
                self._waiting.append(request)
        while self._waiting and (batch := self._batch_for(self._waiting[0])) is not None:
            batch.add(self._waiting.popleft(), self._places)
            self._places += 1
        self._change.notify_all()

    def _batch_for(self, request: Request) -> Batch | None:
        """Return a batch with a place for a request, a new one if need be; None if there is no
        room."""
        if self.running >= self.limits.texts:
            return None
        for batch in self._batches:
            if batch.takes(request):
                return batch
        free_tokens = self.limits.tokens - sum(batch.slots for batch in self._batches)
        block = self.model.config.block_size
        longest = -(-self.model.config.max_position_embeddings // block) * block
        usual = max(LEAST_CAPACITY, 1 << (request.size - 1).bit_length()) // block * block
        for capacity in (max(request.size, min(usual, longest)), request.size):
            places = min(self.limits.texts, free_tokens // capacity)
            if places:
                self._batches.append(Batch(self.model, request, places, capacity, self._told))
                return self._batches[-1]
        return None

    def _advance(self, batch: Batch) -> None:
        """Run a round of a batch, and see to those that it fails."""
        try:
            next(batch.rounds)
            return
        except StopIteration:
            pass
        except UnscoredError as error:
            request = batch.requests.pop(error.place)
            request.fail(f"it has {unscored(error, request.row, batch.call.picker)}")
            self._told(request)
            release_graphs(self.model)  # its cache may hold what is not finite
        except Exception as error:
            for request in batch.requests.values():
                request.fail(f"{type(error).__name__}: {error}")
                self._told(request)
            batch.requests.clear()
        with self._change:
            self._batches = [other for other in self._batches if other is not batch]
            for request in reversed(batch.requests.values()):
                request.restart()
                self._waiting.appendleft(request)

    def _told(self, request: Request) -> None:
        with self._change:
            self._tell(request)

    def _tell(self, request: Request) -> None:
        """Hand out what is new of a request."""
        output = request.output
        if output.is_finished():
            self._requests.pop(output.request_id, None)
        elif not request.streaming:
            return
        handler = self._handlers.get(output.request_id)
        if output.is_finished():
            self._handlers.pop(output.request_id, None)
        else:
            output = request.snapshot()
        if handler is not None:
            try:
                handler(output)
            except Exception:  # whoever listened is gone
                request.cancelled = True
        else:
            self._results.append(output)
            self._change.notify_all()
