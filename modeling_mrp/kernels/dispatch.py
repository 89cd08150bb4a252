"""The choice between a Triton kernel and its plain PyTorch twin. The kernels themselves are defined
beside their twins, in other modules.

triton need not be installed: only this module imports it, and kernels are defined under `if triton
is not None`.
"""

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["tl", "triton"]

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Options of every launch; fused multiply-adds are asked for, as Triton 3.9 warns that 3.10 will not
# use them by default.
LAUNCH = {"num_warps": 4, "enable_fp_fusion": True}
_OLDEST = (8, 0)  # compute capability with bfloat16 in the matrix units and asynchronous copies
# Types of devices on which the first results of kernels and recordings are compared with those of
# the code they replace.
CHECKED_ON = {"cuda"}
# (kernel, device) that failed to compile or to launch in this process, or gave wrong results.
_failed: set[tuple[str, torch.device]] = set()
_checked: set[tuple[Any, ...]] = set()
_KERNELS_LOCK = threading.Lock()  # of both


@dataclass(eq=False)
class Kernel:
    """An operation that can be computed in two ways.

    Attributes:
        name: The name of the operation, for messages.
        launch: Computes the operation by launching Triton kernels.
        twin: A PyTorch function that computes the same from the same arguments.
    """

    name: str
    launch: Callable[..., Any]
    twin: Callable[..., Any]


@dataclass(frozen=True)
class Dispatch:
    """Decides whether operations run as kernels or as their PyTorch twins.

    Attributes:
        forced: None: use kernels where device and dtype permit, and the twin of a kernel that
            fails. True: use kernels, including interpreted ones on a CPU, or raise an error. False:
            use PyTorch only.
    """

    forced: bool | None = None

    def allows(self, subject: str, *tensors: Tensor, obstacle: str | None = None) -> bool:
        """Return whether kernels should run on the given tensors, judging by their devices and
        dtypes. Kernels never run where gradients are needed, under autocast, or if there is an
        obstacle.

        Args:
            subject: What the kernels are called in the error message.
            tensors: The tensors on which kernels would run.
            obstacle: A further reason why kernels cannot run, with its remedy; None if there is
                none.

        Raises:
            ValueError: if kernels are forced and cannot run.
        """
        if self.forced is False:
            return False
        obstacle = obstacle or _obstacle(tensors, interpreted=bool(self.forced))
        if self.forced and obstacle is not None:
            raise ValueError(
                f"kernels is True, but {subject} cannot be used: {obstacle}, or use kernels=None "
                "or kernels=False"
            )
        return obstacle is None

    def run(self, kernel: Kernel, *arguments: Any) -> Any:
        """Run a kernel or its twin on the arguments; return the result.

        If a kernel does not compile or launch, or if its first results on a GPU differ from those
        of its twin, the twin runs in its place. One warning per device reports this, and the kernel
        is not tried again on that device. If kernels are forced, `RuntimeError` is raised instead.
        """
        if self.forced is False:
            return kernel.twin(*arguments)
        tensors = list(_tensors(arguments))
        name = kernel.name
        device = tensors[0].device
        if not self.allows(f"the kernel {name!r}", *tensors) or (
            not self.forced and (name, device) in _failed
        ):
            return kernel.twin(*arguments)
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                result = kernel.launch(*arguments)
                if device.type in CHECKED_ON:
                    _check(kernel, arguments, result)
                return result
        except torch.OutOfMemoryError:
            raise  # says nothing about the kernel, and its twin needs more
        except Exception as error:
            reason = f"{type(error).__name__}: " + str(error).strip().rpartition("\n")[2]
            if self.forced:
                raise RuntimeError(
                    f"kernels is True, but the kernel {name!r} failed on {device} ({reason}): use "
                    "kernels=None or kernels=False"
                ) from error
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise  # most errors are the capture's then, and a twin would go into the graph
            with _KERNELS_LOCK:
                already_failed = (name, device) in _failed
                _failed.add((name, device))
            message = (
                f"the kernel {name!r} failed on {device} ({reason}): PyTorch stands in, slower, "
                "and kernels=False silences this"
            )
            if not already_failed:  # by another thread, meanwhile
                warnings.warn(message, RuntimeWarning, stacklevel=2)
        return kernel.twin(*arguments)


AUTOMATIC = Dispatch()
PYTORCH = Dispatch(False)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results, including those in lists, tuples and
    modules."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, nn.Module):
            yield from value.parameters()


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Compute norm(result - expected) / norm(expected) or, for integers, the share of elements that
    differ. The error is infinite if an element is NaN in only one of the two tensors."""
    if not expected.is_floating_point():
        return float((result != expected).double().mean())
    result = result.double()
    expected = expected.double()
    equal = (result == expected) | (result.isnan() & expected.isnan())
    difference = (result - expected).masked_fill(equal, 0).norm()
    size = expected.nan_to_num(0, 0, 0).norm()
    return float((difference / size.clamp(min=1e-30)).nan_to_num(nan=math.inf))


def check_close(claim: str, result: Tensor, expected: Tensor) -> None:
    """Raise `ArithmeticError` if two results differ by more than rounding can explain: by a
    relative error above 2 % in dtypes of 16 bits, or above 0.5 % in wider ones. `claim` begins the
    message."""
    error = relative_error(result, expected)
    allowed = 2e-2 if expected.dtype in (torch.float16, torch.bfloat16) else 5e-3
    if error > allowed:
        raise ArithmeticError(
            f"{claim} by {error:.3g} of their size, where rounding makes {allowed:g} at most"
        )


def _check(kernel: Kernel, arguments: tuple[Any, ...], result: Any) -> None:
    """Compare a kernel's result with its twin's, and raise `ArithmeticError` if they differ. This
    is done once for each combination of devices, dtypes and types of arguments."""
    kind = (
        kernel.name,
        *dict.fromkeys((tensor.device, tensor.dtype) for tensor in _tensors(arguments)),
        *map(type, arguments),
    )
    if kind in _checked:
        return
    results = [output.clone() for output in _tensors([result])]  # both may write to the same places
    with suppress(torch.OutOfMemoryError):  # twins need more
        for output, expected in zip(results, _tensors([kernel.twin(*arguments)]), strict=True):
            check_close("its results differ from PyTorch's", output, expected)
    with _KERNELS_LOCK:
        _checked.add(kind)


def failed_kernels() -> list[str]:
    """Return the kernels that have failed in this process and are now replaced by their PyTorch
    twins. Each is a string "NAME on DEVICE", with the device on which the kernel failed."""
    with _KERNELS_LOCK:
        return sorted(f"{name} on {device}" for name, device in _failed)


def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU. For any other device, where Triton interprets
    kernels, return the number of a large GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 132


def _obstacle(tensors: Sequence[Tensor], interpreted: bool) -> str | None:
    """Return the reason why kernels cannot run on these tensors, with its remedy; None if they can
    run. `interpreted` is as in `unusable`."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "it has no gradients: call it under torch.no_grad()"
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors if tensor.is_floating_point()))
    if len(dtypes) > 1:
        return f"dtypes {', '.join(str(dtype)[6:] for dtype in dtypes)} meet: load the model in one"
    device = tensors[0].device
    if (obstacle := unusable(device, dtypes[0], interpreted)) is None and torch.is_autocast_enabled(
        device.type
    ):
        return "autocast is on, whose casts it does not follow: leave autocast"
    return obstacle


def unusable(device: torch.device, dtype: torch.dtype, interpreted: bool = False) -> str | None:
    """Return the reason why kernels cannot run on a device in a dtype, with its remedy; None if
    they can run. `interpreted` says whether kernels may run in Triton's interpreter: if it is False
    and TRITON_INTERPRET is set, they cannot run."""
    if triton is None:
        return "triton cannot be imported: install it (pip install triton)"
    if dtype not in KERNEL_DTYPES:
        return f"there are no kernels for {dtype}: load the model in bfloat16, float16 or float32"
    if triton.knobs.runtime.interpret:
        return None if interpreted else "TRITON_INTERPRET is set, which is for tests: unset it"
    if device.type != "cuda" or torch.version.hip is not None:
        return f"the tensors are on {device.type}, not on an NVIDIA GPU: move the model to one"
    if (capability := torch.cuda.get_device_capability(device)) < _OLDEST:
        return (
            f"{device} has compute capability {capability[0]}.{capability[1]}, and the kernels "
            "need 8.0: use a newer GPU"
        )
    return None
