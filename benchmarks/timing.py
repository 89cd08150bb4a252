"""Times of things that compute the same, taken in turns in one process, and the ceilings of the device they run on."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from modeling_mrp.runner.graphs import RECORDERS, RecordingFailedError

# Calls in one recording at most, and copies of inputs among them.
MOST_CALLS = 1000
MOST_COPIES = 256
# Copies of inputs take this many times what the device caches, so that none finds its own there.
_COLD = 4
Call = Callable[[], Any]


@dataclass(frozen=True)
class Time:
    """Seconds of one call: the median over repeats, and the quartiles around it.

    Attributes:
        unrecorded: Why the calls were launched by the host, one by one, where that was not wanted; their time may be that of
            launches.
    """

    median: float
    low: float
    high: float
    unrecorded: str | None = None

    def line(self) -> dict[str, Any]:
        """In microseconds."""
        line: dict[str, Any] = {"us": round(1e6 * self.median, 2), "us_25": round(1e6 * self.low, 2)}
        line["us_75"] = round(1e6 * self.high, 2)
        return line if self.unrecorded is None else {**line, "launched_by_host": self.unrecorded}


class DeviceLostError(Exception):
    """An earlier error left the device's context unusable in this process."""


@dataclass(frozen=True)
class Budget:
    """Until when something new may be begun, on `time.monotonic`."""

    until: float = math.inf

    @classmethod
    def of(cls, seconds: float | None) -> "Budget":
        """From now on; None: no limit."""
        return cls(math.inf if seconds is None else time.monotonic() + seconds)

    @property
    def over(self) -> bool:
        """Nothing new is begun."""
        return time.monotonic() >= self.until

    def share(self, part: float) -> "Budget":
        """That part of what is left."""
        now = time.monotonic()
        return Budget(now + part * (self.until - now))


NO_LIMIT = Budget()


def in_turns(
    calls: Mapping[str, Sequence[Call]], device: torch.device, repeats: int = 20, seconds: float = 0.02
) -> dict[str, Time]:
    """Times several ways to do something, one after the other in each of `repeats` turns.

    On CUDA, a way's calls are recorded as one graph, again and again up to `seconds` of them, so that it is not the host's
    launches that are timed; a turn is the time between two events around its replays. On a CPU a turn is every call once, and
    a host clock is read.

    Args:
        calls: By way, the same call on one or several copies of its inputs, which take turns, too.
        device: Where.
        repeats: Turns.
        seconds: How long a turn takes, about.
    """
    loops = {way: _Loop.over(each, device, seconds) for way, each in calls.items()}
    times = taking_turns({way: loop.seconds for way, loop in loops.items()}, repeats)
    return {way: replace(times[way], unrecorded=loop.unrecorded) for way, loop in loops.items()}


@dataclass(frozen=True)
class _Loop:
    """So many calls by one function, which is called so many times in a turn."""

    run: Callable[[], None]
    calls: int
    times: int
    device: torch.device
    unrecorded: str | None = None

    @classmethod
    def over(cls, calls: Sequence[Call], device: torch.device, seconds: float) -> "_Loop":
        def laps(count: int) -> None:
            for _ in range(count):
                for call in calls:
                    call()

        lap = partial(laps, 1)
        lap()  # compiles, and fills caches
        if device.type not in RECORDERS:
            return cls(lap, len(calls), 1, device)
        count = min(max(1, MOST_CALLS // len(calls)), _often(lap, device, seconds))
        recorder, step = RECORDERS[device.type](device), partial(laps, count)
        try:
            recorder.first(lap)
            replay = recorder.record(step)
        except RecordingFailedError as error:
            return cls(step, count * len(calls), 1, device, reason(error.__cause__ or error))
        return cls(replay, count * len(calls), _often(replay, device, seconds), device)

    def seconds(self) -> float:
        """Of one call."""
        return _seconds(self.run, self.device, self.times) / self.calls


def taking_turns(clocks: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, Time]:
    """Several clocks, each of which does its own work and returns its seconds, read one after the other in every turn."""
    taken: dict[str, list[float]] = {name: [] for name in clocks}
    for _ in range(repeats):
        for name, clock in clocks.items():
            taken[name].append(clock())
    return {name: _summary(times) for name, times in taken.items()}


def copies_for(size: float, device: torch.device) -> int:
    """How many copies of so many bytes of inputs the device's cache does not hold; 1 on a CPU."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MOST_COPIES, math.ceil(_COLD * cache / size)))


def copy_bandwidth(device: torch.device, size: int = 1 << 31) -> float:
    """Bytes a second of copying `size` bytes, read and written."""
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    return 2 * size / in_turns({"copy": [lambda: target.copy_(source)]}, device, repeats=5)["copy"].median


def matrix_flops(device: torch.device, dtype: torch.dtype, side: int = 8192) -> float:
    """FLOPs a second of the product of two square matrices."""
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / in_turns({"product": [lambda: a @ b]}, device, repeats=5)["product"].median


def _often(call: Callable[[], Any], device: torch.device, seconds: float) -> int:
    return max(1, int(seconds / max(_seconds(call, device, 2), 1e-7)))


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


def still_there(device: torch.device, error: BaseException) -> None:
    """After an error: whether the device takes more work.

    Raises:
        DeviceLostError: if it does not; an illegal access spoils all that follows in the process.
    """
    try:
        now(device)
    except Exception as lost:
        raise DeviceLostError(f"{device} takes no more work after {reason(error)}: {reason(lost)}") from error


def reason(error: BaseException) -> str:
    """Its kind and its first line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def _summary(times: list[float]) -> Time:
    low, median, high = torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
    return Time(median, low, high)
