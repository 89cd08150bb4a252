"""CUDA graphs: forwards that run again and again on fixed buffers are recorded once and then replayed with one launch.

What is recorded is a *step*: code that takes nothing and gives nothing, but reads buffers that stay where they are (weights,
the KV cache, its inputs) and writes such buffers. So no tensor of a graph's own memory is seen outside of it, and all graphs of
a recorded cache share that memory: what one leaves there, the next may overwrite. Recordings are dear, so they outlive the call
of `generate` that made them, together with the cache that they write to: one for a model, until its weights lie elsewhere,
`release_graphs` is called, or a call needs another size.

A key names everything but the buffers' contents that a step depends on. Its first run is an ordinary one, on the side
stream that will record: it does the work, and warms up what a recording must not meet for the first time (libraries,
compilers). The second run records and replays; a key that is met once costs no recording. Libraries keep a handle for each
thread, so a thread that ran none of the steps so far begins with an ordinary run too, unless there is something to replay.
"""

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .attention import REPLACED, ROUND_ATTENTION
from .cache import BlockCache

# Bytes that a recording of a round keeps at least, however little of it shows in the device's free memory.
_LEAST_KEPT = 1 << 20

# PyTorch allows one capture at a time in a process, and begins it with a wait that is illegal while another one goes on.
_RECORDING = threading.Lock()


class RecordingFailedError(Exception):
    """A step could not be recorded; nothing of it has been done."""


class Recorder(Protocol):
    """The protocol of what runs and records steps on one device.

    Attributes:
        failed: Whether a step could not be recorded; none is tried any more.
    """

    failed: bool

    def first(self, step: Callable[[], None]) -> None:
        """Run a step so that it can be recorded later."""
        ...

    def record(self, step: Callable[[], None]) -> tuple[Callable[[], None], int]:
        """Record a step while it runs once more; return what repeats it, and the bytes that this keeps.

        Raises:
            RecordingFailedError: if it cannot be recorded. Its cause is the error that came first.
        """
        ...


class CudaRecorder:
    """A `Recorder` of CUDA graphs, all in one pool of memory.

    Args:
        device: Where everything lies.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.failed = device, False
        self.stream = torch.cuda.Stream(device)
        self.graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def first(self, step: Callable[[], None]) -> None:
        """See `Recorder.first`."""
        main = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            step()
        main.wait_stream(self.stream)

    def record(self, step: Callable[[], None]) -> tuple[Callable[[], None], int]:
        """See `Recorder.record`. Other threads that record wait; what they replay goes on."""
        with _RECORDING:
            free, _ = torch.cuda.mem_get_info(self.device)
            graph = self._recorded(step)
            graph.replay()
            left, _ = torch.cuda.mem_get_info(self.device)
        return graph.replay, max(free - left, _LEAST_KEPT)

    def _recorded(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if not self.graphs:  # a pool cannot be used again when the last graph in it is gone
            self.pool = torch.cuda.graph_pool_handle()
        graph, handled = torch.cuda.CUDAGraph(), sys.exception()
        try:
            # The outer context leads back to the caller's stream also where the inner one fails to end its recording.
            with (
                torch.cuda.stream(self.stream),
                torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
            ):
                step()
        except Exception as error:
            raise RecordingFailedError from first_of(error, handled)
        self.graphs.add(graph)
        return graph


# What records on which kind of device.
RECORDERS: dict[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}


def first_of(error: BaseException, handled: BaseException | None = None) -> BaseException:
    """Find what an error began with: where ending a failed capture fails too, that hides the error of the step.

    Args:
        error: The last one.
        handled: What was being handled before, which did not lead to it.
    """
    while (before := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) not in (None, handled):
        error = before
    return error


def fixed_copy(tensor: Tensor) -> Tensor:
    """Make a buffer with the same numbers that can be written to in and outside of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@dataclass
class _Kept:
    """The state of a key: how to repeat it, None before it is recorded; the buffers that came with it; its size."""

    replay: Callable[[], None] | None = None
    inputs: Sequence[Tensor] = ()
    output: Tensor | None = None
    nbytes: int = 0


class Graphs:
    """Steps by key, recorded when they are met again.

    Args:
        recorder: What records.

    Attributes:
        replays: Steps that were replayed.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.replays = recorder, 0
        self.kept: dict[Hashable, _Kept] = {}
        self.thread = threading.local()  # whether the current one ran a step as it is

    @property
    def nbytes(self) -> int:
        """Bytes of all recordings."""
        return sum(kept.nbytes for kept in self.kept.values())

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Have a step's effect, once.

        Where recording fails there is one warning, and steps run as they are from then on.
        """
        if self.recorder.failed:
            return step()
        known = self.kept.get(key)
        if known is not None and known.replay is not None:
            known.replay()
            self.replays += 1
        elif known is None or not hasattr(self.thread, "warm"):
            self.recorder.first(step)
            self.thread.warm = True
            self.kept.setdefault(key, _Kept())
        else:
            try:
                known.replay, known.nbytes = self.recorder.record(step)
            except RecordingFailedError as error:
                self.recorder.failed = True
                self.kept.clear()
                warnings.warn(
                    f"a round of decoding could not be recorded as a CUDA graph ({error.__cause__}): decoding goes on without "
                    "graphs. What a failed recording leaves behind may disturb other work of this process: restart it, and "
                    "pass graphs=False to generate to do without from the start",
                    stacklevel=2,
                )
                return step()

    def call(self, key: Hashable, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Call `function(*inputs)`, which depends on nothing else but what the key and fixed buffers tell. The result is the
        caller's: a copy of what the next call with this key overwrites."""
        if self.recorder.failed:
            return function(*inputs)
        key = key, shapes_of(inputs)
        known = self.kept.get(key) or _Kept(None, [fixed_copy(tensor) for tensor in inputs])
        for register, tensor in zip(known.inputs, inputs, strict=True):
            register.copy_(tensor)

        def step() -> None:
            result = function(*known.inputs)
            if known.output is None:
                known.output = fixed_copy(result)
            else:
                known.output.copy_(result)

        self.run(key, step)
        if key in self.kept:
            self.kept[key].inputs, self.kept[key].output = known.inputs, known.output
        assert known.output is not None
        return known.output.clone()


def shapes_of(tensors: Sequence[Tensor]) -> Hashable:
    """List what a recording depends on in tensors that it reads: shapes, dtypes and devices."""
    return tuple((tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors)


class RecordedCache:
    """The KV cache of a model that stays where it is, and the forwards that were recorded on it.

    Args:
        cache: Whose buffers these are.
        recorder: What records.
        weights: The model's `fingerprint`.

    Attributes:
        graphs: What was recorded.
        busy: A call is using it.
    """

    def __init__(self, cache: BlockCache, recorder: Recorder, weights: Hashable) -> None:
        self.cache, self.weights, self.graphs, self.busy = cache.alias(), weights, Graphs(recorder), False
        self._lent: weakref.ref[BlockCache] | None = None

    def lend(self, past: BlockCache | None) -> BlockCache:
        """Lend the cache, with what `past` holds. Whoever holds what was lent before keeps it, in memory of its own."""
        if past is not None and past.shares(self.cache):
            cache = past
        else:
            holder = None if self._lent is None else self._lent()
            if holder is not None and holder.shares(self.cache):
                holder.detach()
            cache = self.cache.alias()
            cache.empty()
            if past is not None:
                cache.fill_from(past)
        self._lent = weakref.ref(cache)
        return cache


_KEPT: "weakref.WeakKeyDictionary[nn.Module, RecordedCache]" = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()
# Tokens of the smallest cache that is kept. Others have twice as many, four times, ..., so that growing prompts find the same.
LEAST_CAPACITY = 1024


def release_graphs(model: nn.Module) -> None:
    """Drop what is kept for a model."""
    with _LOCK:
        _KEPT.pop(model, None)


def recording_report(model: nn.Module) -> dict[str, int]:
    """Count what is kept for a model: `recordings`, their `replays` so far, `bytes`, and whether recording `failed`."""
    with _LOCK:
        kept = _KEPT.get(model)
    if kept is None:
        return dict.fromkeys(("recordings", "replays", "bytes", "failed"), 0)
    return {
        "recordings": sum(known.replay is not None for known in kept.graphs.kept.values()),
        "replays": kept.graphs.replays,
        "bytes": kept.cache.nbytes + kept.graphs.nbytes,
        "failed": int(kept.graphs.recorder.failed),
    }


@contextmanager
def cache_for(
    model: Any, graphs: bool | None, past: BlockCache | None, rows: int, capacity: int, scratch: int, with_head: bool
) -> Iterator[tuple[BlockCache, Graphs | None]]:
    """Choose the cache of a call and what records its forwards: what was kept from earlier calls, or new ones.

    Args:
        model: The model.
        graphs: The option: None where possible, True or an error, False never.
        past: A cache to go on from, which is taken over; or None.
        rows, capacity, scratch: See `BlockCache`.
        with_head: Whether the head's layers are needed.

    Raises:
        ValueError: if `graphs` is True and it is impossible.
    """
    past = None if past is not None and with_head and not past.head_layers else past
    why = "graphs is False" if graphs is False else obstacle(model)
    if graphs and why is not None:
        raise ValueError(f"graphs is True, but {why}, or leave graphs unset")
    kept = None if why is not None else _kept_for(model, rows, capacity, scratch, with_head or bool(past and past.head_layers))
    if kept is None:
        cache = model.block_cache(rows, capacity, scratch, with_head) if past is None else past
        yield cache.with_room(rows, capacity, scratch), None
        return
    try:
        yield kept.lend(past), kept.graphs
    finally:
        kept.busy = False


def _kept_for(model: Any, rows: int, capacity: int, scratch: int, with_head: bool) -> RecordedCache | None:
    """What is kept for a model, with room for a call, and now busy; None where another thread's call is using it."""
    weights = fingerprint(model)
    with _LOCK:
        kept = _KEPT.get(model)
        if kept is not None and kept.busy:
            return None
        cache = None if kept is None else kept.cache
        if (
            kept is None
            or cache is None
            or kept.weights != weights
            or cache.rows != rows
            or cache.scratch < scratch
            or cache.capacity < capacity
            or (with_head and not cache.head_layers)
        ):
            _KEPT.pop(model, None)
            roomy = max(LEAST_CAPACITY, 1 << (capacity - 1).bit_length()) // model.config.block_size * model.config.block_size
            device = model.lm_head.weight.device
            with torch.inference_mode(False), torch.no_grad():
                cache = model.block_cache(rows, max(roomy, capacity), scratch, with_head, fixed=True)
            kept = _KEPT[model] = RecordedCache(cache, RECORDERS[device.type](device), weights)
        kept.busy = True
    return kept


_PLAIN = frozenset({bool, int, float, str, type(None)})


def fingerprint(model: nn.Module) -> Hashable:
    """Collect where a model's weights lie, how its modules are set and hooked, and which attention it uses."""
    tensors = (*model.parameters(), *model.buffers())
    places = tuple((tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in tensors if not tensor.is_meta)
    settings = tuple(
        (type(module), len(module._forward_hooks), len(module._forward_pre_hooks), _settings(module))
        for module in model.modules()
    )
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return places, settings, REPLACED if attention == ROUND_ATTENTION else attention  # which another thread may be inside of


def _settings(module: nn.Module) -> Hashable:
    """Collect plain attributes, and lists of such: adapters are switched by them."""
    found: list[tuple[str, Any]] = []
    for name, value in vars(module).items():
        kind = type(value)
        if kind in _PLAIN:
            found.append((name, value))
        elif kind is list or kind is tuple or (kind is dict and name[0] != "_"):
            found.append((name, repr(value)))
    return tuple(found)


def obstacle(model: Any) -> str | None:
    """Say why forwards of this model cannot be recorded here, with what to do; None if they can."""
    tensors = (*model.parameters(), *model.buffers())
    others = {type(tensor).__name__ for tensor in tensors} - {"Tensor", "Parameter", "Buffer"}
    if others:
        return f"weights are of the kind {', '.join(sorted(others))}, and where those lie is not known: load plain tensors"
    devices = {tensor.device for tensor in tensors}
    names = ", ".join(sorted(map(str, devices)))
    if len(devices) > 1:
        return f"the model lies on several devices ({names}): load it on one"
    (device,) = devices
    if device.type not in RECORDERS:
        return f"the model is on {device}: move it to a CUDA device"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on, and what it casts does not stay in place: load the model in that dtype instead"
    if torch.compiler.is_compiling():
        return "generate is being compiled: compile the model instead"
    return None


__all__ = [
    "RECORDERS",
    "CudaRecorder",
    "Graphs",
    "RecordedCache",
    "Recorder",
    "RecordingFailedError",
    "cache_for",
    "first_of",
    "fixed_copy",
    "obstacle",
    "recording_report",
    "release_graphs",
    "shapes_of",
]
