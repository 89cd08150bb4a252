"""The time of a call on a device, and the device's ceilings."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.benchmark import Timer

from .roofline import Device

Call = Callable[[], Any]
# Copies of inputs take this many times what the device caches, so that none finds its own there; so many at most.
COLD, MOST_COPIES = 4, 256


def timed(calls: Sequence[Call], device: torch.device) -> dict[str, Any]:
    """Time the same call on one or several copies of its inputs, which take turns.

    Returns:
        `us`, `us_25` and `us_75`: microseconds of one call, the median and the quartiles; `launched`: `graph` where calls were
        replayed, so that the host's launches are not timed, else why they were not.
    """

    def lap() -> None:
        for call in calls:
            call()

    launched = "graph"
    if device.type == "cuda":
        from triton.testing import do_bench, do_bench_cudagraph  # a CPU does without triton

        try:
            milliseconds = do_bench_cudagraph(lap, rep=20, return_mode="all")
        except RuntimeError as error:
            torch.cuda.synchronize(device)
            launched, milliseconds = f"one by one: {reason(error)}", do_bench(lap, return_mode="all")
        times = np.array(milliseconds) / 1e3
    else:
        launched = "one by one: not a GPU"
        times = np.array(Timer("lap()", globals={"lap": lap}).blocked_autorange(min_run_time=0.01).times)
    low, median, high = (1e6 * np.quantile(times, (0.25, 0.5, 0.75)) / len(calls)).round(2).tolist()
    return {"us": median, "us_25": low, "us_75": high, "launched": launched}


def copies_for(size: float, device: torch.device) -> int:
    """Count the copies of so many bytes of inputs that the device's cache does not hold; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MOST_COPIES, math.ceil(COLD * cache / size)))


def ceilings(name: str, device: torch.device) -> Device:
    """Measure a device: bytes a second of a large copy, and FLOPs a second of a product of two large bfloat16 matrices."""
    size, side = (1 << 31, 8192) if device.type == "cuda" else (1 << 22, 128)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    copy, product = timed([lambda: target.copy_(source)], device), timed([lambda: a @ b], device)
    return Device(name, 2 * size / (1e-6 * copy["us"]), 2 * side**3 / (1e-6 * product["us"]), achievable=1.0)


def reason(error: BaseException) -> str:
    """Name an error by its kind and first line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
