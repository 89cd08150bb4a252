"""Numbers that are made once and stay where they are, so that a recorded round launches nothing for them."""

import torch
from torch import Tensor

_INDICES: dict[tuple[int, torch.device], Tensor] = {}
_CONSTANTS: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def indices(count: int, device: torch.device) -> Tensor:
    """[count] long: 0, 1, ..., not to be written to."""
    if (count, device) not in _INDICES:
        with torch.inference_mode(False):
            _INDICES[count, device] = torch.arange(count, device=device)
    return _INDICES[count, device]


def constant(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """[n] long, not to be written to."""
    if (numbers, device) not in _CONSTANTS:
        with torch.inference_mode(False):
            _CONSTANTS[numbers, device] = torch.tensor(numbers, device=device)
    return _CONSTANTS[numbers, device]


__all__ = ["constant", "indices"]
