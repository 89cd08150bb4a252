"""CUDA graphs: a network that runs repeatedly on the same cache is recorded once, and then replayed
with one launch.

Each network has one recording for each combination of number of rows, number of states per row and
length of the texts (rounded up by `bucket`). Recordings are costly. So they outlive the call of
`generate` that made them, together with the cache to which they write. A model has one such cache,
until its weights move, `release_graphs` is called, or a call needs another size.

The first run of a forward is an ordinary run on the side stream that will record; it warms up
libraries and compilers. The second run is recorded. On a GPU the first replays are compared with
ordinary runs. If they differ, no more graphs are recorded.
"""

import copy
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.dispatch import CHECKED_ON, check_close
from .cache import BlockCache
from .inspection import decide

# PyTorch allows one capture at a time in a process, and begins a capture with a wait that is
# illegal while another capture runs.
_RECORDING = threading.Lock()
# Number of compared replays of a recording: the first with the inputs that it was made from, the
# next with others.
_COMPARED = 2
# Tokens of the smallest cache that is kept. Larger ones double that, repeatedly, so that growing
# prompts seldom need another.
LEAST_CAPACITY = 1024


class CudaRecorder:
    """Records functions as CUDA graphs. All graphs of a recorder share one memory pool, so the next
    graph that runs may overwrite the output of an earlier one.

    Args:
        device: The GPU on which the functions run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def first(self, step: Callable[[], Tensor]) -> Tensor:
        """Run the function `step` on the recording stream, as a warm-up before it is recorded;
        return its output."""
        main = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            output = step()
        main.wait_stream(self.stream)
        return output

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Record the operations of the function `step` without running them. Return a function that
        replays them and returns the output of `step`, which lies in the graph's memory."""
        graph = torch.cuda.CUDAGraph()
        first_error = None
        recording = torch.cuda.graph(
            graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
        )
        try:
            # The stream's context restores the caller's stream also if a recording fails to end.
            with _RECORDING, torch.cuda.stream(self.stream), recording:
                try:
                    output = step()
                except Exception as error:
                    first_error = error
                    raise
        # this error may come from the end of the recording, and hide the first one
        except Exception as error:
            raise first_error or error from None

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


# By type of device, the class of its recorder.
RECORDERS: dict[str, Callable[[torch.device], Any]] = {"cuda": CudaRecorder}


class Graphs:
    """The recorded forwards of one model on one cache, which is never moved.

    Args:
        cache: The cache.
        weights: The model's `fingerprint`, on which the recordings depend.

    Attributes:
        inputs, recorded, compared: Dicts by recording: the tensors that the recording reads
            (`inputs`), the function that replays it (`recorded`), and how many of its replays were
            compared with ordinary forwards (`compared`). A key of these dicts is a pair: the `key`
            given to `call`, and the shapes and dtypes of the inputs.
        failed: Whether a forward could not be recorded or gave wrong results. If so, no more
            recordings are made.
        busy: Whether a call is using the recordings.
        borrower: A weak reference to the cache that `lend` returned last. That cache shares the
            memory of the recordings.
    """

    def __init__(self, cache: BlockCache, weights: Hashable) -> None:
        self.cache = cache
        self.weights = weights
        self.device = cache.layer_devices[0]
        self.recorder = RECORDERS[self.device.type](self.device)
        self.inputs: dict[Hashable, list[Tensor]] = {}
        self.recorded: dict[Hashable, Callable[[], Tensor]] = {}
        self.compared: dict[Hashable, int] = {}
        self.replays = 0
        self.failed = False
        self.busy = False
        # libraries keep a handle for each thread: a thread that has run nothing yet must not record
        self._thread = threading.local()
        self.borrower: Callable[[], BlockCache | None] = lambda: None

    def lend(self, past: BlockCache | None) -> BlockCache:
        """Return a cache that shares the memory of the recordings, so that these can be replayed on
        it.

        If `past`, the cache of an earlier call, shares this memory already, it is returned itself.
        Otherwise, the result is a new cache, with the content of `past` if that is given. In this
        case, the cache that `lend` returned last, if it is still in use, first gets a copy of the
        memory for itself, so that it keeps its content.
        """
        cache = past
        if cache is None or cache.hidden is not self.cache.hidden:
            if (holder := self.borrower()) is not None:
                holder.detach()
            cache = copy.copy(self.cache)
            if past is not None:
                cache.fill_from(past)
        self.borrower = weakref.ref(cache)
        return cache

    def call(self, key: Hashable, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return `function(*inputs)`, computed by a recording where possible. No later replay
        overwrites the result.

        A recording belongs to a key and to inputs of certain shapes and dtypes. The first call with
        these runs the function as usual, a later one records it, and all further ones replay the
        recording. After a failure of any recording, the function always runs as usual.

        Args:
            key: A value that identifies the computation: calls with equal keys, inputs and cache
                content must have equal results.
            function: The function.
            inputs: Its arguments, which may be on the host.
        """
        key = key, tuple((tensor.shape, tensor.dtype) for tensor in inputs)
        static_inputs = self.inputs.get(key)
        replay = self.recorded.get(key)
        if (
            static_inputs is None
            or self.failed
            or (replay is None and not hasattr(self._thread, "warm"))
        ):
            device_inputs = [tensor.to(self.device, non_blocking=True) for tensor in inputs]
            if self.failed:
                return function(*device_inputs)
            # these tensors are written to both in and outside of inference mode
            with torch.inference_mode(False), torch.no_grad():
                self.inputs[key] = static_inputs or [
                    torch.empty_like(tensor) for tensor in device_inputs
                ]
            self._thread.warm = True
            return self.recorder.first(lambda: function(*device_inputs))
        for static_input, tensor in zip(static_inputs, inputs, strict=True):
            static_input.copy_(tensor, non_blocking=True)
        try:
            if replay is None:
                replay = self.recorded[key] = self.recorder.record(lambda: function(*static_inputs))
            output = replay()
            if self.device.type in CHECKED_ON and self.compared.get(key, 0) < _COMPARED:
                # the step writes the same slots as the replay
                expected = self.recorder.first(lambda: function(*static_inputs))
                check_close("a replay and the forward that it stands for differ", output, expected)
                self.compared[key] = self.compared.get(key, 0) + 1
        except Exception as error:
            self.failed = True
            self.recorded.clear()
            failure = "could not be recorded"
            if isinstance(error, ArithmeticError):
                failure = "is wrong when it is replayed"
            warnings.warn(
                f"a round of decoding {failure} as a CUDA graph ({error}): decoding goes on "
                "without graphs. That may disturb other work of this process: restart it, and pass "
                "graphs=False to generate",
                stacklevel=2,
            )
            return function(*static_inputs)
        self.replays += 1
        return output.clone()


_KEPT: "weakref.WeakKeyDictionary[nn.Module, Graphs]" = weakref.WeakKeyDictionary()
# caches that callers passed to calls that are still running
_IN_USE: "weakref.WeakSet[BlockCache]" = weakref.WeakSet()
_LOCK = threading.Lock()  # guards `_KEPT` and `_IN_USE`


def release_graphs(model: nn.Module) -> None:
    """Free the CUDA graphs that are kept for a model between calls of `generate`, and the KV cache
    to which they write."""
    with _LOCK:
        _KEPT.pop(model, None)


def recording_report(model: nn.Module) -> dict[str, int]:
    """Report what is kept for a model between calls of `generate`, as a dict: the number of CUDA
    graphs (`recordings`), the number of their `replays` so far, the size of their KV cache in
    `bytes`, and whether recording has `failed` (0 or 1)."""
    recordings = _KEPT.get(model)
    if recordings is None:
        return {"recordings": 0, "replays": 0, "bytes": 0, "failed": 0}
    return {
        "recordings": len(recordings.recorded),
        "replays": recordings.replays,
        "bytes": recordings.cache.nbytes,
        "failed": int(recordings.failed),
    }


@contextmanager
def cache_for(
    model: Any,
    weights: Hashable,
    graphs: bool | None,
    past: BlockCache | None,
    rows: int,
    capacity: int,
    scratch: int,
    with_head: bool,
) -> Iterator[tuple[BlockCache, Graphs | None]]:
    """Context manager: yield a pair for a call of `generate`: its cache, and the `Graphs` that
    record its forwards as CUDA graphs, or None if forwards are not recorded. Both may be kept from
    earlier calls.

    The cache has the content of `past`. It is empty if `past` is None, or if the head takes part
    and `past` lacks the head's layers.

    Args:
        model: The model.
        weights: The model's `fingerprint`.
        graphs: False: never record forwards. None: record them if forwards of this model can be
            recorded. True: the same, but raise an error if they cannot. With None and True,
            forwards are not recorded while another call is using the model's recordings.
        past: The cache of an earlier call, or None.
        rows: The number of rows of the cache.
        capacity, scratch: The least number of slots per row for committed tokens (`capacity`) and
            for tokens that are being scored (`scratch`).
        with_head: Whether the head takes part in the call.

    Raises:
        ValueError: if `graphs` is True and forwards of this model cannot be recorded, or if another
            call is using `past`.
    """
    if past is not None and with_head and not past.head_layers:
        past = None
    reason = "graphs is False" if graphs is False else obstacle(model, weights)
    if graphs and reason is not None:
        raise ValueError(f"graphs is True, but {reason}, or leave graphs unset")
    # a Cache of transformers is false where it is empty
    keeps_head = with_head or (past is not None and past.head_layers > 0)
    with _in_use(past):
        loan = None
        if reason is None:
            loan = _lend(model, weights, past, rows, capacity, scratch, keeps_head)
        if loan is not None:
            cache, recordings = loan
            try:
                yield cache, recordings
            finally:
                recordings.busy = False
        elif past is None:
            yield BlockCache(model, rows, capacity, scratch, with_head), None
        else:
            _separate(model, past)
            if past.fits(rows, capacity, scratch, with_head):
                yield past, None
            else:
                cache = BlockCache(
                    model,
                    rows,
                    max(capacity, past.capacity),
                    max(scratch, past.scratch),
                    keeps_head,
                )
                cache.fill_from(past)
                yield cache, None


@contextmanager
def _in_use(past: BlockCache | None) -> Iterator[None]:
    """Mark a caller's cache as in use while the context is open. Raise `ValueError` if another call
    is using it, in this thread or another."""
    if past is None:
        yield
        return
    with _LOCK:
        if past in _IN_USE:
            raise ValueError(
                "past_key_values are in use by another call, which overwrites them: wait until it "
                "returns, or give each call a copy.deepcopy of them"
            )
        _IN_USE.add(past)
    try:
        yield
    finally:
        with _LOCK:
            _IN_USE.discard(past)


def _lend(
    model: Any,
    weights: Hashable,
    past: BlockCache | None,
    rows: int,
    capacity: int,
    scratch: int,
    with_head: bool,
) -> tuple[BlockCache, Graphs] | None:
    """Find or make the `Graphs` that are kept for a model and are large enough for a call, and mark
    them as busy.

    Return a cache filled with the content of `past`, and the `Graphs`. Return None if another call
    uses the `Graphs`. The arguments are as for `cache_for`.
    """
    with _LOCK:
        recordings = _KEPT.get(model)
        if recordings is not None and recordings.busy:
            return None
        if (
            recordings is None
            or recordings.weights != weights
            or not recordings.cache.fits(rows, capacity, scratch, with_head)
        ):
            recordings = None
            _KEPT.pop(model, None)  # free its memory before another cache is allocated
            block = model.config.block_size
            rounded = max(LEAST_CAPACITY, 1 << (capacity - 1).bit_length()) // block * block
            with torch.inference_mode(False), torch.no_grad():
                cache = BlockCache(
                    model, rows, max(rounded, capacity), scratch, with_head, fixed=True
                )
            recordings = _KEPT[model] = Graphs(cache, weights)
        cache = recordings.lend(past)
        recordings.busy = True
    return cache, recordings


def _separate(model: Any, past: BlockCache) -> None:
    """Give the cache `past` memory of its own if it shares that of the model's `Graphs`, which may
    be lent to another call in the meantime."""
    with _LOCK:
        recordings = _KEPT.get(model)
        if recordings is not None and not recordings.busy and recordings.borrower() is past:
            past.detach()
            recordings.borrower = lambda: None


def obstacle(model: Any, weights: Hashable = None) -> str | None:
    """Explain why forwards of this model cannot be recorded as CUDA graphs, with the remedy; return
    None if they can.

    If the model's `fingerprint` is given as `weights`, the model's tensors are examined only if the
    fingerprint has changed since the last call.
    """
    # checked first: the rest reads all weights, which calls on other devices need not do
    device = model.device
    if device.type not in RECORDERS:
        return f"the model is on {device}: move it to a CUDA device"
    look = partial(_obstacle_of_tensors, model)
    reason = look() if weights is None else decide(model, weights, "recordable", look)
    if reason is None and torch.is_autocast_enabled(device.type):
        return (
            "autocast is on, and what it casts does not stay in place: load the model in that "
            "dtype instead"
        )
    return reason


def _obstacle_of_tensors(model: Any) -> str | None:
    """Explain why a model's tensors prevent the recording of its forwards, with the remedy; return
    None if they do not."""
    tensors = (*model.parameters(), *model.buffers())
    if kinds := {type(tensor).__name__ for tensor in tensors} - {"Tensor", "Parameter", "Buffer"}:
        return (
            f"weights are of the kind {', '.join(sorted(kinds))}, and where those lie is not "
            "known: load plain tensors"
        )
    if len(devices := {tensor.device for tensor in tensors}) > 1:
        return (
            f"the model lies on several devices ({', '.join(sorted(map(str, devices)))}): load it "
            "on one"
        )
    return None
