"""Copies of a few integers from the host to a device. The host does not wait for them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# Types of devices that copy from pinned memory alone without making the host wait.
PINNED_ON = {"cuda"}

# Integers, all of int64 on the device.
Integers = Sequence[int] | np.ndarray


def pin(tensor: Tensor) -> Tensor:
    """Copy a tensor to pinned memory of its own. torch gives that memory to another tensor only
    once all copies from it have ended."""
    return tensor.pin_memory()


def host_copy(numbers: Integers, device: torch.device) -> Tensor:
    """Make an int64 tensor [n] on the host, such that the host need not wait when it is copied to
    `device`."""
    tensor = torch.from_numpy(np.array(numbers, np.int64))
    return pin(tensor) if device.type in PINNED_ON and len(tensor) else tensor


def upload(numbers: Integers, device: torch.device) -> Tensor:
    """Copy integers to a device; return them there as an int64 tensor [n]."""
    return host_copy(numbers, device).to(device, non_blocking=True)


def upload_all(vectors: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Copy several vectors of integers to a device in one copy; return each of them there as an
    int64 tensor."""
    if len(vectors) == 1:
        return [upload(vectors[0], device)]
    sizes = [len(vector) for vector in vectors]
    return list(upload(np.concatenate(vectors), device).split(sizes))
