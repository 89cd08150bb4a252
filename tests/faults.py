"""Broken kernels and recordings, for tests of the checks before kernels and recordings are used."""

from collections.abc import Callable
from typing import Any

from tape import TapeRecorder
from torch import Tensor

from modeling_mrp.kernels.pick import PICK
from modeling_mrp.kernels.round_layers import ROTATED, ROUND_ATTENTION, SUM_AND_NORM

KERNELS = {kernel.name: kernel for kernel in (PICK, ROUND_ATTENTION, SUM_AND_NORM, ROTATED)}


def broken(result: Any) -> Any:
    """Set the last tenth of a result to zero, at least its last number, as a kernel does that
    leaves it out."""
    if isinstance(result, tuple):
        return tuple(map(broken, result))
    wrong = result.flatten().clone()
    wrong[-max(1, len(wrong) // 10) :] = 0
    return wrong.view(result.shape)


class Stale(TapeRecorder):
    """A recorder that always returns a step's first output, as a graph does whose inputs lie
    elsewhere."""

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        output = step().clone()
        return lambda: output
