"""What stands for CUDA graphs on a CPU: a step's operations are written down once and then repeated, without its Python."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from modeling_mrp.runner import graphs, recorded

# Their results' sizes or values are needed on the host, so that CUDA cannot record them.
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
    """Whether the host waits for the result of an operation of aten, by its name and arguments."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else []
    masks = [index for index in indices if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)]
    return name.startswith(WAITS) or (name.startswith("index") and bool(masks))


@dataclass(frozen=True)
class Made:
    """The result of an earlier operation."""

    place: int


class Tape(TorchDispatchMode):
    """Writes down what runs under it. What it did not see being made is read where it lies, as a CUDA graph does."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[int | None]]] = []
        self.places: dict[int, int] = {}
        self.seen: list[Tensor] = []  # alive, so that no two have the same id
        self.outside: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = str(func).removeprefix("aten.")
        # A number written to places that a tensor names is a tensor on the host: its copy to a device waits.
        by_number = name.startswith("index_put") and args[2].dim() == 0 and id(args[2]) not in self.places
        if by_number or waits(name, args):
            raise RuntimeError(f"{name} makes the host wait: it cannot be recorded")
        arguments = tree_map(self._named, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.operations.append(
            (func, *arguments, [self._place(out) for out in (result if isinstance(result, list | tuple) else [result])])
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

    def closed(self) -> Callable[[], None]:
        """What repeats it all."""
        operations, count = self.operations, len(self.seen)
        self.places, self.seen = {}, []

        def repeat() -> None:
            made: list[Any] = [None] * count

            def now(value: Any) -> Any:
                if type(value) is Made:
                    return made[value.place]
                return [now(part) for part in value] if isinstance(value, list | tuple) else value

            for func, args, kwargs, places in operations:
                result = func(*now(args), **{name: now(value) for name, value in kwargs.items()})
                for place, out in zip(places, result if isinstance(result, list | tuple) else [result], strict=True):
                    if place is not None:
                        made[place] = out

        return repeat


class TapeRecorder:
    """A `Recorder`. All tapes of a test go to `tapes`."""

    tapes: list[Tape] = []
    replays = 0

    def __init__(self, device: torch.device) -> None:
        self.device, self.failed = device, False

    def first(self, step: Callable[[], None]) -> None:
        step()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        with Tape() as tape, quiet():
            step()
        TapeRecorder.tapes.append(tape)
        repeat = tape.closed()

        def replay() -> None:
            TapeRecorder.replays += 1
            repeat()

        return replay


@contextmanager
def quiet() -> Iterator[None]:
    """Numbers go to the host, and from it, in ways that are not dispatched; a recording must not."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("numbers between host and device: they cannot be recorded")

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Tensor, "tolist"), (Tensor, "item"), (Tensor, "numpy"), (torch, "tensor"), (torch, "as_tensor")):
            patch.setattr(owner, name, refused)
        yield


def strangers(model: nn.Module) -> list[Tensor]:
    """What recordings read or write that may be gone when they are replayed: neither weights, nor the cache, nor registers."""
    fixed = [*model.parameters(), *model.buffers()]
    for place in recorded._KEPT.get(model, []):
        fixed += place.cache._buffers.values()
        fixed += [t for kept in place.parts.kept.values() for t in (*kept.inputs, kept.output) if t is not None]
        for registers in place.registers.values():
            fixed += [*registers.tensors, registers.numbers]
    known = {tensor.untyped_storage().data_ptr() for tensor in fixed}
    found = [tensor for tape in TapeRecorder.tapes for tensor in tape.outside.values()]
    # A number that is written into a tensor becomes a tensor of its own.
    return [t for t in found if t.untyped_storage().data_ptr() not in known and t.numel() and t.dim()]


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[TapeRecorder]]:
    """The CPU records."""
    monkeypatch.setitem(graphs.RECORDERS, "cpu", TapeRecorder)
    TapeRecorder.tapes, TapeRecorder.replays = [], 0
    yield TapeRecorder
    recorded.release_graphs()
    TapeRecorder.tapes = []
