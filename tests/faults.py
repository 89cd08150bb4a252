"""Kernels and recordings that are broken, for tests of what is checked before they are used."""

from collections.abc import Callable
from typing import Any

from tape import TapeRecorder
from torch import Tensor

from modeling_mrp.kernels.pick import PICK
from modeling_mrp.kernels.round_layers import ROTATED, ROUND_ATTENTION, SUM_AND_NORM

KERNELS = {kernel.name: kernel for kernel in (PICK, ROUND_ATTENTION, SUM_AND_NORM, ROTATED)}


def broken(result: Any) -> Any:
    """As of a kernel that leaves a tenth of a result out, or the last of several tokens."""
    if isinstance(result, tuple):
        return tuple(map(broken, result))
    wrong = result.flatten().clone()
    wrong[-max(1, len(wrong) // 10) :] = 0
    return wrong.view(result.shape)


class Stale(TapeRecorder):
    """Records what a step gave then, as a graph whose inputs lie somewhere else."""

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        output = step().clone()
        return lambda: output
