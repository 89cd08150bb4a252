"""Kernels and recordings that are broken, for tests of what is checked before they are used."""

from collections.abc import Callable
from typing import Any

from tape import TapeRecorder
from torch import Tensor

from modeling_mrp.kernels import fused_layers, pick, round_attention

# By kernel: the module and name of what launches it.
LAUNCHES = {
    "pick": (pick, "_pick_kernel"),
    "shortlist": (pick, "_some_kernel"),
    "round_attention": (round_attention, "round_attention"),
    "sum_and_norm": (fused_layers, "_sum_and_norm_kernel"),
    "rotated": (fused_layers, "_rotated_kernel"),
}


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
