"""Stand-ins for devices, in a CPU's memory: two that refuse each other's tensors, over which a
model is spread, one that lacks what Apple's MPS lacks, and one that counts copies for which the
host waits."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torchgen
import yaml
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from modeling_mrp.networks import uploads
from tests.support.tape import waits

FIRST, SECOND = "lazy:0", "lazy:1"  # of a kind for which this build of torch has no kernels
SMALL = "lazy:0"
# Operations that may take tensors of several devices: copies, and indexing by tensors made on the
# host.
_ACROSS = (
    "aten::_to_copy",
    "aten::copy_",
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
)


class Placed(Tensor):
    """A tensor that claims to be on a device, around the tensor that holds its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> "Placed":
        like = {
            "strides": held.stride(),
            "storage_offset": held.storage_offset(),
            "dtype": held.dtype,
        }
        made: Placed = torch.Tensor._make_wrapper_subclass(cls, held.shape, **like, device=device)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.held.tolist()


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU; return its result on the device of its tensors, or on the device
    that it asks for."""
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    places = (
        {one.device for one in tensors if one.dim()}
        or {one.device for one in tensors}
        or {torch.device("cpu")}
    )
    if len(places) > 1 and func._schema.name not in _ACROSS:
        raise RuntimeError(
            f"{func._schema.name} was given tensors on {', '.join(sorted(map(str, places)))}"
        )
    first = next((one.device for one in tensors if one.dim()), next(iter(places)))
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else first
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    with _disable_current_modes():
        given = tree_map(lambda one: one.held if isinstance(one, Placed) else one, (args, kwargs))
        out = func(*given[0], **given[1])
    if func._schema.is_mutable and func._schema.name.endswith("_"):
        return args[0]
    return tree_map(
        lambda one: (
            Placed(one, device) if isinstance(one, Tensor) and device.type != "cpu" else one
        ),
        out,
    )


@cache
def _operations() -> dict[str, dict[str, Any]]:
    """Read torch's own list of its operations, by name with overload, as it comes with the
    package."""
    file = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    return {
        entry["func"].partition("(")[0]: entry
        for entry in yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
    }


def runs_on_mps(name: str) -> bool:
    """Tell if this release of torch has an operation of aten on MPS, given its name with
    overload."""
    entry = _operations()[name]
    if "structured_delegate" in entry:
        return runs_on_mps(entry["structured_delegate"])
    keys = ",".join(entry.get("dispatch", {"CompositeImplicitAutograd": ""}))
    return any(
        key.strip() == "MPS" or key.strip().startswith("Composite") for key in keys.split(",")
    )


_WIDE = (torch.float64, torch.complex128)
# Tensors of another layout end in wrong numbers in releases of torch (pytorch/pytorch#175191, on
# CUDA, too).
_SCATTER = (
    "aten::scatter",
    "aten::scatter_",
    "aten::scatter_add",
    "aten::scatter_add_",
    "aten::scatter_reduce",
)
_PUT = ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


def _refusal(func: Any, args: Any, kwargs: dict[str, Any]) -> str | None:
    """Say why `SMALL` cannot run an operation; None if it can, or if the operation is none of that
    device's."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    here = [tensor for tensor in tensors if isinstance(tensor, Placed)]
    device = kwargs.get("device")
    to_host = device is not None and torch.device(device).type == "cpu"
    if not here and (device is None or to_host):
        return (
            "it pins memory"
            if "pin_memory" in func._schema.name or kwargs.get("pin_memory")
            else None
        )
    name = func._schema.name
    if "pin_memory" in name or kwargs.get("pin_memory"):
        return "it pins memory"
    if kwargs.get("dtype") in _WIDE or any(tensor.dtype in _WIDE for tensor in here):
        return "it takes or makes float64"
    if name in _SCATTER and not all(tensor.is_contiguous() for tensor in here):
        return "it scatters tensors that are not contiguous"
    if name in _PUT and any(
        tensor.dtype == torch.int64 and not tensor.is_contiguous() for tensor in (here[0], here[-1])
    ):
        return "it writes int64 that is not contiguous"
    full = name.removeprefix("aten::") + (
        f".{func._overloadname}" if func._overloadname != "default" else ""
    )
    if name.startswith("aten::") and not to_host and not runs_on_mps(full):
        return "there is none on MPS"
    return None


class _SmallOperations(TorchDispatchMode):
    """A mode of `SMALL`, which lists the names of the operations that ran there."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (why := _refusal(func, args, kwargs or {})) is not None:
            raise RuntimeError(f"{func} does not run on {SMALL}: {why}")
        out = _run(func, args, kwargs or {})
        if any(isinstance(leaf, Placed) and leaf.dtype in _WIDE for leaf in tree_leaves(out)):
            raise RuntimeError(f"{func} does not run on {SMALL}: it makes float64")
        self.names.add(func._schema.name)
        return out


# What reads numbers on the host without dispatching a copy.
_READS = (Tensor.tolist, Tensor.numpy)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Literals(TorchFunctionMode):
    """A mode for `torch.tensor` and `new_tensor`, which fill memory without dispatching an
    operation, and for `tolist`, which reads it so."""

    def __init__(self, copies: "Copies | None" = None) -> None:
        super().__init__()
        self.copies = copies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and (device := kwargs.pop("device", None)) is not None:
            return func(*args, **kwargs).to(device)
        if self.copies is not None and func in _READS and isinstance(args[0], Placed):
            self.copies.reads += 1
        if func is Tensor.new_tensor and isinstance(args[0], Placed):
            return torch.tensor(args[1], dtype=args[0].dtype).to(args[0].device)
        return func(*args, **kwargs)


class Copies(TorchDispatchMode):
    """A mode that counts copies between the host and `SMALL`.

    Attributes:
        uploads: Copies to the device from pinned memory, for which nobody waits.
        reads: Copies to the host, each of which waits for all work before it.
        waits: Names of operations that make the host wait besides: copies to the device from other
            memory, and operations whose size depends on numbers.
        pinned: Memory that counts as pinned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uploads = 0
        self.reads = 0
        self.waits: list[str] = []
        self.pinned: dict[int, Tensor] = {}

    def pin(self, tensor: Tensor) -> Tensor:
        """Stand for `Tensor.pin_memory`."""
        copy = tensor.clone()
        self.pinned[copy.untyped_storage().data_ptr()] = copy
        return copy

    def reset(self) -> None:
        """Count from zero."""
        self.uploads = 0
        self.reads = 0
        self.waits = []

    def _count(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        name = func._schema.name.removeprefix("aten::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [tensor for tensor in tensors if isinstance(tensor, Placed)]
        source = tensors[-1] if tensors else None
        if name in ("_to_copy", "copy_") and source is not None:
            target = kwargs.get("device", tensors[0].device)
            goes_there = target is not None and torch.device(target).type != "cpu"
            if goes_there and not isinstance(source, Placed):
                place = source.untyped_storage().data_ptr()
                asynchronous = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2)
                if asynchronous and place in self.pinned:
                    self.uploads += 1
                else:
                    self.waits.append(name)
            elif not goes_there and isinstance(source, Placed):
                self.reads += 1
        elif here and (waits(name, args) or len(here) < len([t for t in tensors if t.dim()])):
            self.waits.append(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._count(func, args, kwargs or {})
        return _run(func, args, kwargs or {})


def _autocast_enabled(device_type: str | None = None) -> bool:
    """Stand for `torch.is_autocast_enabled`, which refuses devices that it does not know."""
    if device_type is not None and device_type == torch.device(SMALL).type:
        return False
    return _AUTOCAST(device_type) if device_type is not None else _AUTOCAST()


_AUTOCAST = torch.is_autocast_enabled
_KNOWN = mock.patch.object(torch, "is_autocast_enabled", _autocast_enabled)


@contextmanager
def counted_copies(patch: pytest.MonkeyPatch) -> Iterator[Copies]:
    """Let tensors be on `SMALL`, and count the copies there and back."""
    copies = Copies()
    patch.setattr(uploads, "pin", copies.pin)
    patch.setattr(uploads, "PINNED_ON", {torch.device(SMALL).type})
    with _KNOWN, copies, _Literals(copies), torch.no_grad():
        yield copies


@contextmanager
def two_devices() -> Iterator[None]:
    """Let tensors be on `FIRST` and `SECOND`."""
    with _Operations(), _Literals(), torch.no_grad():
        yield


@contextmanager
def small_device() -> Iterator[_SmallOperations]:
    """Let tensors be on `SMALL`, which has no float64, no pinned memory, no operation that torch
    lacks on MPS, and scatters only what is contiguous."""
    with _KNOWN, _SmallOperations() as operations, _Literals():
        yield operations


def place(module: nn.Module, device: str) -> None:
    """Put a module's parameters and buffers on a device."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    placed: Any = Placed(tensor.data, torch.device(device))
                    is_weight = tensors is part._parameters
                    tensors[name] = (
                        nn.Parameter(placed, requires_grad=tensor.requires_grad)
                        if is_weight
                        else placed
                    )


def spread(model: nn.Module, places: Mapping[str, str]) -> None:
    """Put modules on devices, each with a hook that fetches what it is given, as accelerate does
    for a `device_map`."""
    for name, device in places.items():
        module = model.get_submodule(name)
        place(module, device)

        def fetch(_: Any, args: Any, kwargs: Any, device: str = device) -> Any:
            return send_to_device((args, kwargs), torch.device(device))

        module.register_forward_pre_hook(fetch, with_kwargs=True)
