"""The choice between a Triton kernel and its plain PyTorch twin. The kernels themselves lie beside their twins.

This is the one place that imports triton, which need not be there: kernels are defined under `if triton is not None`.
"""

import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

T = TypeVar("T")

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Of every launch; products and sums in one instruction, which Triton 3.10 will not do by itself, as 3.9 warns.
LAUNCH = {"num_warps": 4, "enable_fp_fusion": True}
_OLDEST = (8, 0)  # compute capability with bfloat16 in the matrix units and asynchronous copies
# (kernel, device) that failed to compile or to launch in this process, or gave wrong results on its samples.
_failed: set[tuple[str, torch.device]] = set()
# Kinds of devices on which kernels and recordings are compared with what they stand for before they are relied on.
CHECKED_ON = {"cuda"}
# By kernel: computes, for tensors like those of its call, small results of the kernel and of its twin, pair by pair.
SAMPLES: dict[str, Callable[..., Iterable[tuple[Tensor, Tensor]]]] = {}
_checked: set[tuple[str, torch.device, torch.dtype]] = set()
# Whose hooks only note what a model was asked to hand out: hidden states of its own forward.
_NOTES_ONLY = "transformers.utils.output_capturing"
# Where the classes are defined that kernels stand for.
_OWN = ("torch.nn.", "transformers.", __name__.partition(".kernels.")[0])


@dataclass(frozen=True)
class Dispatch:
    """A decision between a kernel and its PyTorch twin.

    Attributes:
        forced: None: kernels where they can be used, by device and dtype, and the twin where one fails; True: kernels or an
            error, also interpreted on a CPU; False: PyTorch only.
    """

    forced: bool | None = None

    def check(self, weight: Tensor) -> None:
        """Raise `ValueError` if kernels are forced and cannot be used with weights like these."""
        if self.forced and (obstacle := _obstacle((weight,), interpreted=True)) is not None:
            raise ValueError(f"kernels is True, but they cannot be used: {obstacle}, or use kernels=None or kernels=False")

    def run(
        self, name: str, kernel: Callable[[], T], twin: Callable[[], T], *tensors: Tensor, obstacle: str | None = None
    ) -> T:
        """Run one of both.

        A kernel that does not compile or launch, or that gives other results than its twin on a small sample (compared once in
        a process, on a GPU), is reported in one warning per device and not tried again. Where gradients are wanted (kernels
        have none), under autocast and inside `torch.compile`, the twin runs.

        Args:
            name: Of the kernel, for messages.
            kernel: Launches it; `twin` computes the same with PyTorch.
            *tensors: What goes in; their devices and floating dtypes decide.
            obstacle: What else keeps the kernel from them, and the remedy; None: nothing.

        Raises:
            ValueError: if kernels are forced and cannot be used here.
            RuntimeError: if kernels are forced and this one fails.
        """
        if self.forced is False:
            return twin()
        device = tensors[0].device
        obstacle = obstacle or _obstacle(tensors, interpreted=bool(self.forced))
        if self.forced and obstacle is not None:
            raise ValueError(
                f"kernels is True, but the kernel {name!r} cannot be used: {obstacle}, or use kernels=None or kernels=False"
            )
        if obstacle is not None or (not self.forced and (name, device) in _failed):
            return twin()
        try:
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                _check_samples(name, tensors)
                return kernel()
        except torch.OutOfMemoryError:
            raise  # says nothing about the kernel, and its twin needs more
        except Exception as error:
            if self.forced:
                raise RuntimeError(
                    f"kernels is True, but the kernel {name!r} failed on {device} ({_summary(error)}): use kernels=None, which "
                    "falls back to PyTorch, or kernels=False"
                ) from error
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise  # most errors are the capture's then, and a twin would go into the graph
            _failed.add((name, device))
            warnings.warn(
                f"the Triton kernel {name!r} failed on {device} and PyTorch is used in its place, which is slower "
                f"({_summary(error)}); kernels=False silences this",
                RuntimeWarning,
                stacklevel=2,
            )
        return twin()


def sample_of(name: str) -> Callable[[T], T]:
    """Register a function as the one that computes a kernel's samples."""

    def register(function: Any) -> Any:
        SAMPLES[name] = function
        return function

    return register


def relative_error(ours: Tensor, right: Tensor) -> float:
    """Divide the norm of the difference by that of what is right; infinite where only one of both is a number."""
    ours, right = ours.double(), right.double()
    same = (ours == right) | (ours.isnan() & right.isnan())
    difference, size = (ours - right).masked_fill(same, 0).norm(), right.nan_to_num(0, 0, 0).norm()
    return float((difference / size.clamp(min=1e-30)).nan_to_num(nan=math.inf))


def check_close(what: str, ours: Tensor, right: Tensor) -> None:
    """Raise `ArithmeticError` where two results differ by more than rounding, which is 2 % with 16 bits and 0.5 % with more."""
    error, allowed = relative_error(ours, right), 2e-2 if right.dtype in (torch.float16, torch.bfloat16) else 5e-3
    if error > allowed:
        raise ArithmeticError(f"{what} by {error:.3g} of their size, where rounding makes {allowed:g} at most")


@torch.no_grad()
def _check_samples(name: str, tensors: tuple[Tensor, ...]) -> None:
    """Compare a kernel with its twin before its first use on a device and in a dtype; `ArithmeticError` if they differ."""
    device, dtype = tensors[0].device, next(tensor.dtype for tensor in tensors if tensor.is_floating_point())
    known = name not in SAMPLES or (name, device, dtype) in _checked
    if known or device.type not in CHECKED_ON or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return  # a capture runs nothing that could be compared
    for ours, right in SAMPLES[name](*tensors):
        check_close("its results on a small sample differ from PyTorch's", ours, right)
    _checked.add((name, device, dtype))


AUTOMATIC = Dispatch()
PYTORCH = Dispatch(False)


def failed_kernels() -> list[str]:
    """Name the kernels, with their devices, that failed in this process: their PyTorch twins are used in their place."""
    return sorted(f"{name} on {device}" for name, device in _failed)


def kernels_usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Tell if kernels can run compiled on tensors like these: triton, a GPU of the last generations, a dtype they know."""
    return _unusable(device, dtype, interpreted=False) is None


def more_than(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Find what a module does beside its class, `kind`, of torch, transformers or this package: no kernel stands for that.

    Hooks of all modules (`torch.nn.modules.module.register_module_forward_hook`) are not looked for.

    Returns:
        What is in the way, and the remedy; None: calling the module is what the class does.
    """
    found = type(module)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        if hooks and any(getattr(hook, "__module__", None) != _NOTES_ONLY for hook in hooks.values()):
            return f"a {found.__name__} carries hooks: remove them"
    if "forward" in module.__dict__ or found.forward is not kind.forward or not issubclass(found, kind):
        return f"a {found.__name__} is wrapped or no {kind.__name__}: use plain modules"
    # Others may have put classes or methods of their own in these places (Liger does).
    if not found.forward.__module__.startswith(_OWN):
        return f"the forward of a {found.__name__} was replaced by one of {found.forward.__module__}: leave it as it was"
    return None


def processors(device: torch.device) -> int:
    """Count the multiprocessors of a GPU; those of an H200 for a device that only stands in for one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _obstacle(tensors: tuple[Tensor, ...], interpreted: bool) -> str | None:
    """Say why kernels cannot run on these tensors, with the remedy; None if they can."""
    device = tensors[0].device
    if others := {str(t.device) for t in tensors} - {str(device)}:
        return f"its tensors lie on {device} and {', '.join(sorted(others))}: keep them on one device"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "it has no gradients: call it under torch.no_grad()"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on, whose casts it does not follow: leave autocast"
    if torch.compiler.is_compiling():
        return "torch.compile traces this call and makes its own kernels: call it uncompiled"
    dtypes = sorted({str(t.dtype)[6:] for t in tensors if t.is_floating_point()})
    if len(dtypes) > 1:
        return f"dtypes {', '.join(dtypes)} meet: load the model in one"
    return _unusable(device, getattr(torch, dtypes[0]), interpreted)


def _unusable(device: torch.device, dtype: torch.dtype, interpreted: bool) -> str | None:
    if triton is None:
        return "triton cannot be imported: install it (pip install triton)"
    if dtype not in KERNEL_DTYPES:
        return f"there are no kernels for {dtype}: load the model in bfloat16, float16 or float32"
    if triton.knobs.runtime.interpret:
        return None if interpreted else "TRITON_INTERPRET is set, which is for tests: unset it"
    if device.type != "cuda" or torch.version.hip is not None:
        return (
            f"the tensors are on {device.type}, not on an NVIDIA GPU: move the model to one, or set TRITON_INTERPRET=1 before "
            "Python starts, for tests"
        )
    if (capability := torch.cuda.get_device_capability(device)) < _OLDEST:
        return f"{device} has compute capability {capability[0]}.{capability[1]}, and the kernels need 8.0: use a newer GPU"
    return None


def _summary(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__


__all__ = [
    "LAUNCH",
    "SAMPLES",
    "Dispatch",
    "check_close",
    "failed_kernels",
    "kernels_usable",
    "more_than",
    "processors",
    "relative_error",
    "sample_of",
    "tl",
    "triton",
]
