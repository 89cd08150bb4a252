"""Copies of a few integers from the host to a device, for which the host does not wait."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# Types of devices that copy from pinned memory alone without making the host wait.
PINNED_ON = {"cuda"}

# Integers, all of int64 on the device.
Integers = Sequence[int] | np.ndarray


def pin(tensor: Tensor) -> Tensor:
    """Copy a tensor to pinned memory of its own; torch gives that to another tensor only once the
    copies from it have ended."""
    return tensor.pin_memory()


def host_copy(numbers: Integers, device: torch.device) -> Tensor:
    """Make a tensor [n] long on the host, from which a copy to `device` makes nobody wait."""
    tensor = torch.from_numpy(np.array(numbers, np.int64))
    return pin(tensor) if device.type in PINNED_ON and len(tensor) else tensor


def upload(numbers: Integers, device: torch.device) -> Tensor:
    """Copy integers to a device; return them, [n] long."""
    return host_copy(numbers, device).to(device, non_blocking=True)


def upload_all(vectors: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy vectors of integers to a device in one copy; return each, [n] long."""
    sizes = [len(vector) for vector in vectors]
    return list(upload(np.concatenate(vectors), device).split(sizes))
