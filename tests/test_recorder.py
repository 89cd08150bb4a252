"""The recorder of CUDA graphs, on a stand-in for `torch.cuda`: threads, and errors of captures."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tape import graphs_of_nothing

from modeling_mrp.networks import graphs as graphs_file
from modeling_mrp.networks.graphs import CudaRecorder


class CudaStandIn:
    """What `CudaRecorder` asks of `torch.cuda`. A capture whose step failed fails to end, too."""

    Stream = CUDAGraph = current_stream = staticmethod(lambda *_: StandIn())
    graph_pool_handle = staticmethod(lambda: 1)

    def __init__(self) -> None:
        self.capturing = self.most = 0

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
    monkeypatch.setitem(graphs_file.RECORDERS, "cpu", CudaRecorder)
    return there


def test_the_error_that_came_first_is_named(stand_in: CudaStandIn) -> None:
    """Not that of ending the recording, nor what the caller was handling before."""

    def step(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("operation not permitted when stream is capturing")

    graphs, x = graphs_of_nothing(), torch.ones(1)
    graphs.call("a", torch.neg, x)
    try:
        raise KeyError("of the caller")
    except KeyError:
        with (
            pytest.warns(UserWarning, match=r"CUDA graph \(operation not permitted when stream is capturing\)"),
            pytest.raises(ValueError, match="not permitted"),
        ):
            graphs.call("a", step, x)  # which fails as it is, too
    assert stand_in.capturing == 0
    assert graphs.failed
    assert graphs.call("a", torch.neg, x).tolist() == [-1]


def test_one_thread_records_at_a_time(stand_in: CudaStandIn) -> None:
    recorders = [CudaRecorder(torch.device("cpu")) for _ in range(3)]
    threads = [threading.Thread(target=recorder.record, args=(lambda: torch.ones(1),)) for recorder in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stand_in.most == 1
