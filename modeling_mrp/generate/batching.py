"""Continuous batching: requests that arrive one by one join and leave batches between rounds.

Batches of different settings (`setting_of`) take turns of one round each. Requests start in the
order of their arrival: a request for which there is no room waits until texts end, and so do all
requests after it.

A text depends only on its own request. If a forward leaves one request without any token to choose,
that request fails. The other requests of its batch then start again from their prompts, and produce
the same texts.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..model.compat import PAGE_SIZE_NAME
from ..model.loading import weights_on_device
from ..networks.graphs import LEAST_CAPACITY, release_graphs
from ..rules.draft import UnscoredError
from .joining import Batch, setting_of
from .processors import CONTRACT
from .request import Call, Request, RequestOutput, unscored

TOP_LOGPROBS = 20  # the most tokens per position whose log-probabilities a request may ask for
_AT_ONCE = 16  # default number of texts decoded at the same time
_USUAL_TEXT = 4096  # default number of tokens of a text for which memory is planned
# Default number of prompt tokens between two rounds: on accelerators, a forward over more tokens
# takes longer the more there are.
_PROMPT_TOKENS = 512
# the longest wait of `add_request` for a place in a full queue, as in transformers
_QUEUE_SECONDS = 10.0
# Arguments of `generate` that requests do not support.
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


@dataclass(frozen=True)
class Limits:
    """Limits of the work that a manager does at the same time.

    Attributes:
        texts: The largest number of texts that are decoded at the same time.
        waiting: The largest number of requests that may wait; 0 for no limit.
        tokens: The number of tokens of texts that fit into all caches together, not counting the
            states being scored.
        prompt_tokens: The largest number of prompt tokens that are computed between two rounds of a
            batch.
    """

    texts: int
    waiting: int
    tokens: int
    prompt_tokens: int

    @classmethod
    def of(cls, given: Any, max_batch_size: int | None, config: Any) -> "Limits":
        """Make limits from `given`, transformers' `ContinuousBatchingConfig` or None.
        `max_batch_size` is the generation option of this name, or None, and `config` is the model's
        config. Raise `ValueError` for a field of `given` that is set but not supported."""
        fields = {} if given is None else dict(vars(given))
        defaults = {} if given is None else vars(type(given)())
        page = fields.pop(PAGE_SIZE_NAME, 256)
        pages = fields.pop("num_blocks", None)
        texts = fields.pop("max_requests_per_batch", None) or max_batch_size or _AT_ONCE
        waiting = fields.pop("max_queue_size", 0)
        prompt_tokens = fields.pop("max_batch_tokens", None) or _PROMPT_TOKENS
        fields.pop("return_logprobs", None)  # log-probabilities are always returned
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
        return cls(texts, waiting, tokens, prompt_tokens)


class ContinuousBatchingManager:
    """Decodes requests as they arrive, in a separate thread; `init_continuous_batching` creates it.

    The methods have the names and the meanings of those of transformers' manager. A request may set
    any option of `generate` that applies to a single text.

    Args:
        model: An `MRPForCausalLM`.
        prepare: Makes a `Call` from the arguments of `generate`.
        generation_config: Default options, which each request may override.
        limits: Limits of concurrent work.

    Attributes:
        fatal_error: The error that ended the decoding thread; None if there was none.
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
        self._requests: dict[str, Request] = {}  # the requests that have not ended, by name
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
        """Submit a request for one text.

        Args:
            input_ids: The prompt's ids.
            request_id: Id of the request; by default "req_0" and so on.
            max_new_tokens, eos_token_id: As for `generate`.
            streaming: If True, each round that extends the text yields a result; otherwise, only
                the complete text does, at the end.
            record_timestamps: Whether results contain the time of each token.
            top_logprobs: Number of likeliest tokens that results contain for each position, at most
                20.
            **options: Further options and arguments of `generate`. With `num_return_sequences`, the
                further texts are requests named "ID__child#1" and so on.

        Returns:
            The id of the request.

        Raises:
            ValueError: as from `generate`; also for a prompt that does not fit into memory, and for
                an id that is in use.
            RuntimeError: if the manager has stopped.
            queue.Full: if the queue stays full for ten seconds.
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
        """Submit a request for each prompt, a sequence of ids, as `add_request` does; return the
        ids of the requests in this order. The other arguments apply to every request."""
        common = (max_new_tokens, streaming, record_timestamps)
        return [self.add_request(ids, None, *common, **options) for ids in inputs]

    def cancel_request(self, request_id: str) -> None:
        """Cancel a request: at once if it is waiting, otherwise before its next round. The last
        result of the request contains an error."""
        with self._change:
            if (request := self._requests.get(request_id)) is not None:
                request.cancelled = True
                self._change.notify_all()

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> RequestOutput | None:
        """Wait for a result of any request, or of the request `request_id` if it is given. Remove
        the result from the manager, and return it. Return None if no result arrives within
        `timeout` seconds, or if the decoding thread has ended and no result is left."""
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
        """Iterate over the results of one request, until its last result."""
        while self.is_running() or self._find(request_id) is not None:
            if (output := self.get_result(request_id, timeout=0.1)) is not None:
                yield output
                if output.is_finished():
                    return

    def register_result_handler(
        self, request_id: str, callback: Callable[[RequestOutput], None]
    ) -> None:
        """Pass the results of a request to `callback`, in the decoding thread, instead of returning
        them from `get_result`.

        Call this before `add_request`. For an event loop, pass a function that calls
        `loop.call_soon_threadsafe`. An error in the callback cancels the request.
        """
        with self._change:
            self._handlers[request_id] = callback

    # The thread

    @property
    def waiting(self) -> int:
        """The number of texts that wait for a free row."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """The number of texts that are being decoded."""
        return sum(len(batch.requests) for batch in self._batches)

    def is_running(self) -> bool:
        """Return whether the decoding thread is alive."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the decoding thread."""
        if self.is_running():
            return
        self._stopping = None
        self._thread = threading.Thread(target=self._run, name="continuous batching", daemon=True)
        self._thread.start()

    def warmup(self) -> None:
        """Do nothing: CUDA graphs are recorded while requests are decoded."""

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Accept no more requests, and end the decoding thread.

        The thread ends once all texts are complete. With `hard_stop`, it ends after the current
        round, and the remaining requests fail.

        Args:
            block: Whether to wait for the end of the thread, for at most `timeout` seconds.
            timeout: None to wait without a limit.
            keep_for_next_session: Has no effect: `start` can start another thread at any time.
            hard_stop: Whether the thread ends without completing all texts.
        """
        with self._change:
            self._stopping = "hard" if hard_stop else "flush"
            self._change.notify_all()
        if block:
            self.join(time.perf_counter(), timeout)

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        """Wait for the decoding thread to end, for at most `timeout` seconds. `stop_trigger_time`
        has no effect."""
        if self._thread is not None:
            self._thread.join(timeout)

    def destroy(self) -> None:
        """Accept no more requests, and wait until all texts are complete and the decoding thread
        has ended."""
        if self.is_running():
            self.stop()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager: wait for the end of the current round. No other round starts while the
        context is open, so that the caller can use the model."""
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
        """Check the prompt and the options of a request, and make the `Call` by which it is
        decoded."""
        for name in _OF_GENERATE:
            if options.get(name):
                raise ValueError(f"{name}: a request cannot have it, pass it to generate")
        with torch.no_grad(), weights_on_device(self.model.lm_head):
            ids = torch.tensor([list(input_ids)], dtype=torch.long, device=self.model.device)
            call = self._prepare(ids, self.generation_config, **options)
        if call.picker.in_order is not None:
            raise ValueError(
                "a logits_processor of the request goes by earlier calls or by the row of a batch, "
                f"which requests join and leave: {CONTRACT}"
            )
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
        """Add requests to the queue. Raise `ValueError` for an id that is in use, `queue.Full` if
        the queue stays full, and `RuntimeError` if the manager has stopped."""
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
        """Return the oldest result that was not fetched yet, of the request `request_id`, or of any
        request if that is None. Return None if there is no such result."""
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
        """Wait for work, assign waiting requests to batches, and run one round of each batch.
        Return whether to go on: False once the manager has stopped."""
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
        """Remove cancelled requests from the queue. Assign the other waiting requests to batches in
        the order of their arrival, as long as there is room."""
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
        """Return a batch that has room for a request; make a new one if necessary. Return None if
        the limits leave no room."""
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
            row_count = min(self.limits.texts, free_tokens // capacity)
            if row_count:
                size = (row_count, capacity, self.limits.prompt_tokens)
                self._batches.append(Batch(self.model, request, *size, self._told))
                return self._batches[-1]
        return None

    def _advance(self, batch: Batch) -> None:
        """Run one round of a batch. If no token has a finite score at a position of a request, that
        request fails, and the other requests of the batch go back to the front of the queue to
        start again. After any other error, all requests of the batch fail."""
        try:
            next(batch.rounds)
            return
        except StopIteration:
            pass
        except UnscoredError as error:
            request = batch.requests.pop(error.place)
            request.fail(f"it has {unscored(error, request.row, batch.call.picker)}")
            self._told(request)
            release_graphs(self.model)  # its cache may hold numbers that are not finite
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
        """Pass the new results of a request to its handler, or keep them for `get_result` if it has
        none."""
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
            except Exception:  # the listener is gone
                request.cancelled = True
        else:
            self._results.append(output)
            self._change.notify_all()
