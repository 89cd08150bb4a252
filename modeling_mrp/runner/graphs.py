"""CUDA graphs: steps that run again and again on fixed buffers are recorded once and then replayed with one launch.

What is recorded is a *step*: code that takes nothing and gives nothing, but reads buffers that stay where they are (weights,
the KV cache, registers) and writes such buffers. So no tensor of a graph's own memory is seen outside of it, and all graphs of
a recorded cache share that memory: what one leaves there, the next may overwrite.

A key names everything but the buffers' contents that a step depends on. Its first run is an ordinary one, on the side
stream that will record: it does the work, and warms up what a recording must not meet for the first time (libraries,
compilers). The second run records and replays; a key that is met once costs no recording. Libraries keep a handle for each
thread, so a thread that ran none of the steps so far begins with an ordinary run too, unless there is something to replay.
"""

import copy
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

# Recordings of one set of registers; beyond, the one that was not used for longest goes. The driver keeps some 10 MB for a
# round of a few thousand kernels.
RECORDINGS = 24

# PyTorch allows one capture at a time in a process, and begins it with a wait that is illegal while another one goes on.
_RECORDING = threading.Lock()


class RecordingFailedError(Exception):
    """A step could not be recorded; nothing of it has been done."""


class Recorder(Protocol):
    """Runs and records steps on one device.

    Attributes:
        failed: Whether a step could not be recorded; none is tried any more.
    """

    failed: bool

    def first(self, step: Callable[[], None]) -> None:
        """Runs a step so that it can be recorded later."""
        ...

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """Runs a step once more and returns what repeats it.

        Raises:
            RecordingFailedError: if it cannot be recorded. Its cause is the error that came first.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs, all in one pool of memory.

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

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder.record`. Other threads that record wait; what they replay goes on."""
        with _RECORDING:
            graph = self._recorded(step)
            graph.replay()
        return graph.replay

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
    """What an error began with: where ending a failed capture fails too, that hides the error of the step.

    Args:
        error: The last one.
        handled: What was being handled before, which did not lead to it.
    """
    while (before := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) not in (None, handled):
        error = before
    return error


def leaves(thing: Any) -> list[Tensor]:
    """The tensors in a tensor, in a tuple or list, or in an object's attributes, in order."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, tuple | list):
        return [leaf for part in thing for leaf in leaves(part)]
    return [leaf for part in getattr(thing, "__dict__", {}).values() for leaf in leaves(part)]


def refilled(thing: T, tensors: Iterator[Tensor]) -> T:
    """The same with other tensors, in the order of `leaves`."""
    made: Any = thing
    if isinstance(thing, Tensor):
        made = next(tensors)
    elif isinstance(thing, tuple | list):
        made = type(thing)([refilled(part, tensors) for part in thing])
    elif hasattr(thing, "__dict__"):
        made = copy.copy(thing)
        for name, part in vars(thing).items():
            object.__setattr__(made, name, refilled(part, tensors))  # frozen dataclasses too
    return made


def described(thing: Any) -> Hashable:
    """What a recording depends on in plain values, containers, and objects of them; of a tensor its shape and dtype."""
    if isinstance(thing, Tensor):
        return tuple(thing.shape), thing.dtype, thing.device
    if isinstance(thing, dict):
        return tuple((described(name), described(part)) for name, part in thing.items())
    if isinstance(thing, tuple | list | set | frozenset | range):
        return type(thing), tuple(described(part) for part in thing)
    if hasattr(thing, "__dict__") and not isinstance(thing, type) and not callable(thing):
        return type(thing), described(vars(thing))
    if hasattr(thing, "__dict__") and not isinstance(thing, type):  # a logits processor
        return type(thing), id(thing) if not vars(thing) else described(vars(thing))
    return type(thing), thing


def fixed_copy(tensor: Tensor) -> Tensor:
    """A buffer with the same numbers that can be written to in and outside of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@dataclass
class _Kept:
    """What is known of a key: how to repeat it, None before it is recorded, and the buffers that came with it."""

    replay: Callable[[], None] | None = None
    inputs: Sequence[Tensor] = ()
    output: Tensor | None = None


class Graphs:
    """Steps by key, recorded when they are met again.

    Args:
        recorder: What records.
        limit: Recordings kept at most.
    """

    def __init__(self, recorder: Recorder, limit: int = RECORDINGS) -> None:
        self.recorder, self.limit = recorder, limit
        self.kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self.replays = 0
        self.thread = threading.local()  # whether the current one ran a step as it is

    def run(self, key: Hashable, step: Callable[[], None]) -> None:
        """Has a step's effect, once.

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
                known.replay = self.recorder.record(step)
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
        self.kept.move_to_end(key)
        if len(self.kept) > self.limit:  # not before recording: the pool lives as long as a graph in it
            self.kept.popitem(last=False)

    def call(self, key: Hashable, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """`function(*inputs)`, which depends on nothing else but what the key and fixed buffers tell. The result is the
        caller's: a copy of what the next call with this key overwrites."""
        if self.recorder.failed:
            return function(*inputs)
        key = key, described(inputs)
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


class Registers:
    """Fixed buffers in the shape of some objects' tensors, and what was recorded on them.

    Args:
        parts: Objects whose `leaves` are copied here.
        recorder: For `graphs`.
    """

    def __init__(self, parts: Sequence[Any], recorder: Recorder) -> None:
        self.tensors = [fixed_copy(leaf) for leaf in leaves(tuple(parts))]
        self.places = {tensor.untyped_storage().data_ptr() for tensor in self.tensors}
        self.graphs = Graphs(recorder)
        self.numbers: Tensor | None = None
        self.host: dict[Hashable, Any] = {}  # what a key's steps do on the host

    def write(self, parts: Sequence[Any]) -> None:
        """Copies other objects of the same shape into the buffers. They may share memory with the buffers."""
        new = leaves(tuple(parts))
        for own, tensor in zip(self.tensors, new, strict=True):
            assert (own.shape, own.dtype) == (tensor.shape, tensor.dtype), (own, tensor)
        changed: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for own, tensor in zip(self.tensors, new, strict=True):
            if tensor is not own:
                # What looks at another buffer would change while they are written.
                looks = tensor.untyped_storage().data_ptr() in self.places
                kept = tensor.clone(memory_format=torch.contiguous_format) if looks else tensor.contiguous()
                targets, sources = changed.setdefault(own.dtype, ([], []))
                targets.append(own)
                sources.append(kept)
        for targets, sources in changed.values():  # a launch for each dtype
            torch._foreach_copy_(targets, sources)

    def read(self, parts: Sequence[T]) -> list[T]:
        """The objects with the buffers for tensors."""
        tensors = iter(self.tensors)
        return [refilled(part, tensors) for part in parts]


__all__ = [
    "RECORDERS",
    "CudaRecorder",
    "Graphs",
    "Recorder",
    "RecordingFailedError",
    "Registers",
    "described",
    "first_of",
    "fixed_copy",
    "leaves",
    "refilled",
]
