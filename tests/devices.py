"""Devices that refuse each other's tensors, in a CPU's memory: stand-ins for two GPUs over which a model is spread."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

FIRST, SECOND = "lazy:0", "lazy:1"  # of a kind for which this build of torch has no kernels
# Operations that may take tensors of several devices: copies, and indexing by tensors made on the host.
_ACROSS = ("aten::_to_copy", "aten::copy_", "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class Placed(Tensor):
    """A tensor that claims to be on a device, around the tensor that holds its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> "Placed":
        like = {"strides": held.stride(), "storage_offset": held.storage_offset(), "dtype": held.dtype}
        made: Placed = torch.Tensor._make_wrapper_subclass(cls, held.shape, **like, device=device)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.held.tolist()


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU; return its result on the device of its tensors, or on the device that it asks for."""
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    places = {one.device for one in tensors if one.dim()} or {one.device for one in tensors} or {torch.device("cpu")}
    if len(places) > 1 and func._schema.name not in _ACROSS:
        raise RuntimeError(f"{func._schema.name} was given tensors on {', '.join(sorted(map(str, places)))}")
    first = next((one.device for one in tensors if one.dim()), next(iter(places)))
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else first
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    with _disable_current_modes():
        given = tree_map(lambda one: one.held if isinstance(one, Placed) else one, (args, kwargs))
        out = func(*given[0], **given[1])
    if func._schema.is_mutable and func._schema.name.endswith("_"):
        return args[0]
    return tree_map(lambda one: Placed(one, device) if isinstance(one, Tensor) and device.type != "cpu" else one, out)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Literals(TorchFunctionMode):
    """A mode for `torch.tensor`, which fills memory without dispatching an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and (device := kwargs.pop("device", None)) is not None:
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


@contextmanager
def two_devices() -> Iterator[None]:
    """Let tensors be on `FIRST` and `SECOND`."""
    with _Operations(), _Literals(), torch.no_grad():
        yield


def spread(model: nn.Module, places: Mapping[str, str]) -> None:
    """Put modules on devices, each with a hook that fetches what it is given, as accelerate does for a `device_map`."""
    for name, place in places.items():
        module = model.get_submodule(name)
        for part in module.modules():
            for kind in (part._parameters, part._buffers):
                for key, value in kind.items():
                    if value is not None:
                        placed: Any = Placed(value.data, torch.device(place))
                        kind[key] = nn.Parameter(placed, requires_grad=False) if kind is part._parameters else placed

        def fetch(_: Any, args: Any, kwargs: Any, place: str = place) -> Any:
            return send_to_device((args, kwargs), torch.device(place))

        module.register_forward_pre_hook(fetch, with_kwargs=True)
