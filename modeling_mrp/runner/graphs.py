"""CUDA graphs: steps that run again and again on fixed buffers are recorded once and then replayed with one launch.

What is recorded is a *step*: code that takes nothing and gives nothing, but reads buffers that stay where they are (weights,
the KV cache, registers) and writes such buffers. So no tensor of a graph's own memory is seen outside of it, and all graphs of
a recorded cache share that memory: what one leaves there, the next may overwrite.

A key names everything but the buffers' contents that a step depends on. Its first run is an ordinary one, on the side
stream that will record: it does the work, and warms up what a recording must not meet for the first time (libraries,
compilers). The second run records and replays; a key that is met once costs no recording. Libraries keep a handle for each
thread, so a thread that ran none of the steps so far begins with an ordinary run too, unless there is something to replay.
"""

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

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


class Registers:
    """Fixed buffers for the tensors of a pytree, what is recorded on them, and numbers for the host.

    Args:
        tree: Whose leaves, all of them tensors, are copied here.
        recorder: For `graphs`.

    Attributes:
        tree: The same with the buffers for leaves.
        graphs: What is recorded on them.
        host: By key of a recording, what its step does on the host.
    """

    def __init__(self, tree: Any, recorder: Recorder) -> None:
        leaves, spec = tree_flatten(tree)
        self.tensors: list[Tensor] = [fixed_copy(leaf) for leaf in leaves]
        self.tree = tree_unflatten(self.tensors, spec)
        self.places = {tensor.untyped_storage().data_ptr() for tensor in self.tensors}
        self.graphs = Graphs(recorder)
        self.numbers: Tensor | None = None
        self.host: dict[Hashable, dict[str, int]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of buffers and recordings."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors) + self.graphs.nbytes

    def write(self, tree: Any) -> None:
        """Copy the leaves of another pytree of the same shape into the buffers. They may share memory with the buffers."""
        new = tree_flatten(tree)[0]
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

    def numbers_for(self, count: int) -> Tensor:
        """Reserve [count] long, where a step leaves what the host reads."""
        if self.numbers is None:
            self.numbers = fixed_copy(torch.zeros(count, dtype=torch.long, device=self.tensors[0].device))
        return self.numbers


__all__ = [
    "RECORDERS",
    "CudaRecorder",
    "Graphs",
    "Recorder",
    "RecordingFailedError",
    "Registers",
    "first_of",
    "fixed_copy",
    "shapes_of",
]
