"""Times of things that compute the same, taken in turns in one process, and the ceilings of the device they run on."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch


@dataclass(frozen=True)
class Time:
    """Seconds of one call: the median over repeats, and the quartiles around it."""

    median: float
    low: float
    high: float

    def line(self) -> dict[str, float]:
        """In microseconds."""
        return {"us": round(1e6 * self.median, 2), "us_25": round(1e6 * self.low, 2), "us_75": round(1e6 * self.high, 2)}


def in_turns(
    calls: Mapping[str, Callable[[], Any]], device: torch.device, repeats: int = 20, seconds: float = 0.02
) -> dict[str, Time]:
    """Times several calls, one after the other in each of `repeats` turns.

    On CUDA a turn enqueues a call often enough to fill `seconds` and divides the time between two events, so that launches
    overlap with work as they do in a program that does not wait; on a CPU it is called once and a host clock is read.
    """
    often = {name: _often(call, device, seconds) for name, call in calls.items()}
    return taking_turns({name: partial(_seconds, call, device, often[name]) for name, call in calls.items()}, repeats)


def taking_turns(clocks: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, Time]:
    """Several clocks, each of which does its own work and returns its seconds, read one after the other in every turn."""
    taken: dict[str, list[float]] = {name: [] for name in clocks}
    for _ in range(repeats):
        for name, clock in clocks.items():
            taken[name].append(clock())
    return {name: _summary(times) for name, times in taken.items()}


def ceilings(device: torch.device, size: int = 1 << 31) -> tuple[float, float]:
    """Bytes a second of a large copy (read and written), and bf16 FLOPs a second of a large matrix product.

    Args:
        device: Where.
        size: Bytes copied; the matrices have a hundredth of that.
    """
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    side = max(64, int((size / 200) ** 0.5) // 64 * 64)
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    times = in_turns({"copy": lambda: target.copy_(source), "product": lambda: a @ b}, device, repeats=5)
    return 2 * size / times["copy"].median, 2 * side**3 / times["product"].median


def _often(call: Callable[[], Any], device: torch.device, seconds: float) -> int:
    call()  # compiles, and fills caches
    if device.type != "cuda":
        return 1
    return max(1, min(1000, int(seconds / max(_seconds(call, device, 3), 1e-7))))


def _seconds(call: Callable[[], Any], device: torch.device, often: int) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(often):
            call()
        return (time.perf_counter() - began) / often
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(often):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3 / often


def now(device: torch.device) -> float:
    """A host clock, read when the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def reason(error: Exception) -> str:
    """Its kind and its first line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def _summary(times: list[float]) -> Time:
    low, median, high = torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
    return Time(median, low, high)
