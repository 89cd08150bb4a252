"""Integers that are laid out on the host and sent to a device in one copy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_WORD = 8  # bytes: vectors are aligned to this, for both dtypes


@dataclass(frozen=True)
class IntVector:
    """A vector of integers to send to a device.

    Attributes:
        numbers: The n integers.
        dtype: The dtype of the resulting tensor: int32 or int64.
    """

    numbers: Sequence[int] | np.ndarray
    dtype: torch.dtype = torch.long


def send_to_device(
    vectors: Mapping[str, IntVector], device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Send vectors of integers to a device in one copy.

    Args:
        vectors: The vectors, by name.
        device: The device that receives them.

    Returns:
        Two dicts of tensors by name. The first holds views of one tensor on the device, the second
        views of the tensor on the host from which it was copied.
    """
    begins = dict[str, int]()
    words = 0
    for name, vector in vectors.items():
        begins[name] = words
        words += -(-len(vector.numbers) * vector.dtype.itemsize // _WORD)
    buffer = np.empty(words, np.int64)
    for name, vector in vectors.items():
        kind = np.int32 if vector.dtype == torch.int32 else np.int64
        buffer[begins[name] :].view(kind)[: len(vector.numbers)] = vector.numbers
    host = torch.from_numpy(buffer)

    def views(tensor: Tensor) -> dict[str, Tensor]:
        named_views = {}
        for name, vector in vectors.items():
            named_views[name] = tensor[begins[name] :].view(vector.dtype)[: len(vector.numbers)]
        return named_views

    return views(host.to(device, non_blocking=True)), views(host)
