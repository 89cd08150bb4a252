"""Running means of a training run's measurements."""

from collections.abc import Mapping

import torch
from accelerate import Accelerator
from torch import Tensor

from .packed import widest


class Measures:
    """Running sums and counts by name, kept on the device until `take` returns them."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, measured: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add measurements, by name a sum and a count (scalars)."""
        for name, (total, count) in measured.items():
            dtype = widest(total.device)
            sum_and_count = torch.stack([total.detach().to(dtype), count.to(total.device, dtype)])
            self._sums[name] = self._sums.get(name, 0) + sum_and_count

    def take(self, accelerator: Accelerator) -> dict[str, tuple[float, float]]:
        """Return sums and counts over all processes since the last call; every process has to call
        this, with equal names."""
        if not self._sums:
            return {}
        names = sorted(self._sums)
        totals = torch.stack([self._sums[name] for name in names])
        self._sums = {}
        reduced = accelerator.reduce(totals, reduction="sum").tolist()
        measured = {}
        for name, (total, count) in zip(names, reduced, strict=True):
            measured[name] = (total, count)
        return measured
