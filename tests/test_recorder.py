"""What records CUDA graphs, on a stand-in for `torch.cuda`: threads, and errors of captures."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tape import TapeRecorder, tapes

from modeling_mrp.networks.graphs import CudaRecorder, Graphs

__all__ = ["tapes"]  # a fixture


class CudaStandIn:
    """What `CudaRecorder` asks of `torch.cuda`. A capture whose step failed fails to end, too."""

    Stream = CUDAGraph = staticmethod(lambda *_: StandIn())

    def __init__(self) -> None:
        self.capturing = self.most = 0

    @staticmethod
    def graph_pool_handle() -> int:
        return 1

    @staticmethod
    def current_stream(device: Any) -> "StandIn":
        return StandIn()

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    @contextmanager
    def graph(self, *_: Any, **__: Any) -> Iterator[None]:
        self.capturing += 1
        self.most = max(self.most, self.capturing)
        time.sleep(0.05)
        try:
            yield
        except Exception:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904  as torch does
        finally:
            self.capturing -= 1


class StandIn:
    """A stream, or a graph, that does nothing."""

    def wait_stream(self, other: Any) -> None: ...

    def replay(self) -> None: ...


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> CudaStandIn:
    there = CudaStandIn()
    for name in ("Stream", "CUDAGraph", "graph_pool_handle", "current_stream", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(there, name))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 2 << 30))
    return there


def test_the_error_that_came_first_is_named(stand_in: CudaStandIn) -> None:
    """Not that of ending the recording, nor what the caller was handling before."""

    def step() -> None:
        raise ValueError("operation not permitted when stream is capturing")

    graphs = Graphs(CudaRecorder(torch.device("cpu")))
    graphs.run("a", lambda: None)
    try:
        raise KeyError("of the caller")
    except KeyError:
        with (
            pytest.warns(UserWarning, match=r"CUDA graph \(operation not permitted when stream is capturing\)"),
            pytest.raises(ValueError, match="not permitted"),
        ):
            graphs.run("a", step)  # which fails as it is, too
    assert stand_in.capturing == 0
    assert graphs.recorder.failed


def test_one_thread_records_at_a_time(stand_in: CudaStandIn) -> None:
    recorders = [CudaRecorder(torch.device("cpu")) for _ in range(3)]
    threads = [threading.Thread(target=recorder.record, args=(lambda: None,)) for recorder in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(recorder.graphs) for recorder in recorders] == [0, 0, 0], "held by nobody, so gone"
    assert stand_in.most == 1


def test_another_thread_begins_with_an_ordinary_run(tapes: type[TapeRecorder]) -> None:
    """Its libraries have no handles yet, which a recording must not make; a replay needs none."""
    total, graphs = torch.zeros(1), Graphs(TapeRecorder(torch.device("cpu")))

    def step() -> None:
        total.add_(1)

    def elsewhere(key: str) -> int:
        thread = threading.Thread(target=graphs.run, args=(key, step))
        thread.start()
        thread.join()
        return len(tapes.tapes)

    graphs.run("a", step)
    assert [elsewhere("a"), elsewhere("a")] == [0, 0]
    graphs.run("a", step)
    assert [elsewhere("a"), tapes.replays, total.item()] == [1, 1, 5]
