"""A stand-in for CUDA graphs on a CPU: a step's operations are recorded once and then repeated,
without its Python.

Triton's launches, which the interpreter runs here, are operations like any other.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from modeling_mrp.networks import graphs
from tests.support.random_cases import make_model

try:
    from triton.runtime.interpreter import GridExecutor
except ImportError:
    GridExecutor = None

# Operations whose result's size or values the host needs, so that CUDA cannot record them.
WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique",
    "unique",
    "is_nonzero",
    "equal",
    "repeat_interleave.Tensor",
)


def waits(name: str, args: tuple[Any, ...]) -> bool:
    """Tell if the host waits for the result of an operation of aten, given its name and
    arguments."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else []
    masks = [
        index
        for index in indices
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)
    ]
    return name.startswith(WAITS) or (name.startswith("index") and bool(masks))


class Seen(TorchDispatchMode):
    """A mode that lists all operations, and the names of operations for whose results the host
    waits."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []
        self.waits: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = str(func).removeprefix("aten.")
        self.operations.append(func)
        self.waits += [name] if waits(name, args) else []
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Made:
    """The result of an earlier operation."""

    place: int


class Tape(TorchDispatchMode):
    """A mode that records operations. A tensor that none of them made is read from its own memory,
    as by a CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[int | None]]] = []
        self.places: dict[int, int] = {}
        self.seen: list[Tensor] = []  # alive, so that no two have the same id
        self.outside: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = str(func).removeprefix("aten.")
        # A number that `index_put` writes is a tensor on the host, and the host waits for its copy
        # to the device.
        by_number = (
            name.startswith("index_put") and args[2].dim() == 0 and id(args[2]) not in self.places
        )
        if by_number or waits(name, args):
            raise RuntimeError(f"{name} makes the host wait: it cannot be recorded")
        arguments = tree_map(self._named, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.operations.append(
            (
                func,
                *arguments,
                [
                    self._place(out)
                    for out in (result if isinstance(result, list | tuple) else [result])
                ],
            )
        )
        return result

    def _named(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in self.places:
            return Made(self.places[id(value)])
        self.outside[id(value)] = value
        return value

    def _place(self, value: Any) -> int | None:
        if not isinstance(value, Tensor) or id(value) in self.outside:
            return None
        if id(value) not in self.places:
            self.places[id(value)] = len(self.seen)
            self.seen.append(value)
        return self.places[id(value)]

    def closed(self, output: Tensor) -> Callable[[], Tensor]:
        """Return a function that repeats the recorded operations; its first call returns the output
        of the recording."""
        operations, count, result = self.operations, len(self.seen), self.places[id(output)]
        self.places, self.seen, first = {}, [], [output]

        def repeat() -> Tensor:
            if first:
                return first.pop()
            made: list[Any] = [None] * count

            def now(value: Any) -> Any:
                if type(value) is Made:
                    return made[value.place]
                return [now(part) for part in value] if isinstance(value, list | tuple) else value

            for func, args, kwargs, places in operations:
                outs = func(*now(args), **{name: now(value) for name, value in kwargs.items()})
                for place, out in zip(
                    places, outs if isinstance(outs, list | tuple) else [outs], strict=True
                ):
                    if place is not None:
                        made[place] = out
            found: Tensor = made[result]
            return found

        return repeat


# What launches nothing: another look at the same numbers, or memory alone.
FREE: tuple[str, ...] = (
    "view",
    "_unsafe_view",
    "expand",
    "transpose",
    "t",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "detach",
    "alias",
    "permute",
    "as_strided",
    "split",
    "split_with_sizes",
    "unbind",
    "_reshape_alias",
    "lift_fresh",
    "empty",
    "new_empty",
    "empty_like",
)


def launches(operations: Iterable[Any]) -> Counter[str]:
    """The operations that compute, by name."""
    names = (getattr(func, "overloadpacket", func).__name__ for func in operations)
    return Counter(name for name in names if name not in FREE)


def of_tape(tape: Tape) -> Counter[str]:
    """The operations of a tape that compute, by name."""
    return launches(func for func, *_ in tape.operations)


class TapeRecorder:
    """A stand-in for `CudaRecorder`. All tapes of a test go to `tapes`."""

    tapes: list[Tape] = []
    replays = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def first(self, step: Callable[[], Tensor]) -> Tensor:
        return step()

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        with Tape() as tape, launches_on(tape), quiet():
            output = step()
        TapeRecorder.tapes.append(tape)
        repeat = tape.closed(output)

        def replay() -> Tensor:
            TapeRecorder.replays += 1
            made = repeat()
            with torch.inference_mode():  # a recording always leaves its output in the same place
                return output.copy_(made)

        return replay


@contextmanager
def launches_on(tape: Tape) -> Iterator[None]:
    """Record each interpreted launch as one operation; operations that its Python runs are not
    recorded."""
    if GridExecutor is None:
        yield
        return
    launch = GridExecutor.__call__

    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        def run(*given: Any, **named: Any) -> list[Any]:
            with _disable_current_modes():
                launch(self, *given, **named)
            return []

        run.__name__ = f"triton.{self.fn.__name__}"
        tape.operations.append((run, *tree_map(tape._named, (args, kwargs)), []))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GridExecutor, "__call__", launch)
            for owner, name, real in HOST:  # the interpreter may use them
                patch.setattr(owner, name, real)
            run(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launched)
        yield


# Functions that move numbers to the host or back without a dispatched operation.
HOST = [
    (owner, name, getattr(owner, name))
    for owner, name in (
        *((Tensor, name) for name in ("tolist", "item", "numpy")),
        *((torch, name) for name in ("tensor", "as_tensor")),
    )
]


@contextmanager
def quiet() -> Iterator[None]:
    """Raise a `RuntimeError` if a recording moves numbers between host and device by an
    undispatched function; let other threads do so, meanwhile."""
    recording = threading.get_ident()

    def guarded(real: Any) -> Any:
        def refused(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == recording:
                raise RuntimeError("numbers move between host and device: this cannot be recorded")
            return real(*args, **kwargs)

        return refused

    with pytest.MonkeyPatch.context() as patch:
        for owner, name, real in HOST:
            patch.setattr(owner, name, guarded(real))
        yield


def strangers(model: nn.Module) -> list[Tensor]:
    """List tensors that recordings use and that may be gone at a replay: neither weights, nor the
    cache, nor inputs."""
    kept = graphs._KEPT[model]
    fixed = [*model.parameters(), *model.buffers(), *kept.cache._buffers.values()]
    fixed += [tensor for inputs in kept.inputs.values() for tensor in inputs]
    places = {tensor.untyped_storage().data_ptr() for tensor in fixed}
    found = [tensor for tape in TapeRecorder.tapes for tensor in tape.outside.values()]
    # A number that is written into a tensor becomes a tensor of its own.
    return [
        t for t in found if t.untyped_storage().data_ptr() not in places and t.numel() and t.dim()
    ]


def graphs_of_nothing() -> graphs.Graphs:
    """Make `Graphs` for functions that use no cache, on the CPU."""
    return graphs.Graphs(make_model().block_cache(1, 4, 4, with_head=False), ())


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[TapeRecorder]]:
    """Let the CPU record graphs, as tapes."""
    monkeypatch.setitem(graphs.RECORDERS, "cpu", TapeRecorder)
    TapeRecorder.tapes, TapeRecorder.replays = [], 0
    yield TapeRecorder
    graphs._KEPT.clear()
    TapeRecorder.tapes = []
