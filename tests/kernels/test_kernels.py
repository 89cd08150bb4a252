"""Which path a call takes: kernels where they can run, PyTorch with a warning where they fail, errors where forced."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from conftest import ROOT
from torch import Tensor

from modeling_mrp.kernels import dispatch
from modeling_mrp.kernels.dispatch import Dispatch, kernels_usable, triton


class Paths:
    """A kernel and its twin that note their calls; the kernel fails as often as it is asked to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[str] = []

    def kernel(self) -> str:
        self.calls.append("kernel")
        if self.error is not None:
            raise self.error
        return "from the kernel"

    def twin(self) -> str:
        self.calls.append("twin")
        return "from PyTorch"


@pytest.fixture(autouse=True)
def _nothing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_failed", set())


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels can be used on any tensors."""
    monkeypatch.setattr(dispatch, "_obstacle", lambda *_, **__: None)


def automatic(paths: Paths, name: str = "k", device: str = "cpu") -> str:
    return Dispatch().run(name, paths.kernel, paths.twin, torch.ones(2, device=device))


@pytest.mark.parametrize(("forced", "path"), [(False, "twin"), (None, "twin"), (True, "kernel")])
def test_what_runs_on_a_cpu(forced: bool | None, path: str) -> None:
    """Kernels where they are forced, interpreted; of a parameter, too, where no gradient is wanted."""
    paths = Paths()
    with torch.no_grad():
        Dispatch(forced).run("k", paths.kernel, paths.twin, torch.ones(2, requires_grad=True))
    assert paths.calls == [path]
    assert not kernels_usable(torch.device("cpu"), torch.float32)
    assert not kernels_usable(torch.device("mps"), torch.float16)


@pytest.mark.usefixtures("usable")
def test_a_failing_kernel_is_reported_once_and_not_tried_again() -> None:
    paths = Paths(NotImplementedError("at 3:4:\nno such instruction"))
    with pytest.warns(RuntimeWarning, match=r"'k' failed on cpu.*NotImplementedError: no such instruction") as caught:
        assert automatic(paths) == "from PyTorch"
    assert len(caught) == 1
    assert dispatch.failed_kernels() == ["k on cpu"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert automatic(paths) == "from PyTorch"
    assert paths.calls == ["kernel", "twin", "twin"]
    # Neither another kernel nor another device is given up.
    assert automatic(Paths(), "other") == automatic(Paths(), device="meta") == "from the kernel"


@pytest.mark.usefixtures("usable")
def test_running_out_of_memory_is_no_failure_of_the_kernel() -> None:
    paths = Paths(torch.OutOfMemoryError("full"))
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            automatic(paths)
    assert paths.calls == ["kernel", "kernel"]


def test_a_failing_kernel_that_is_forced_raises() -> None:
    paths = Paths(ZeroDivisionError("in the kernel"))
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"'k' failed on cpu \(ZeroDivisionError: in the kernel\): use kernels=None"
        ) as raised:
            Dispatch(True).run("k", paths.kernel, paths.twin, torch.ones(2))
        assert raised.value.__cause__ is paths.error
    assert paths.calls == ["kernel", "kernel"]


@pytest.mark.usefixtures("usable")
def test_an_error_while_a_graph_is_captured_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing about the kernel, which runs again afterwards."""
    paths = Paths(RuntimeError("operation not permitted when stream is capturing"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="not permitted") as raised:
        automatic(paths)
    assert raised.value is paths.error
    assert dispatch.failed_kernels() == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.warns(RuntimeWarning, match="'k' failed"):
        assert automatic(paths) == "from PyTorch"
    assert paths.calls == ["kernel", "kernel", "twin"]


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ((torch.ones(2).double(),), "no kernels for torch.float64: load the model in bfloat16"),
        ((torch.ones(2), torch.ones(2).half()), "dtypes float16, float32 meet: load the model in one"),
        ((torch.ones(2), torch.ones(2, device="meta")), "lie on cpu and meta: keep them on one device"),
        ((torch.ones(2, requires_grad=True),), "no gradients: call it under torch.no_grad"),
    ],
)
def test_what_kernels_cannot_take(tensors: tuple[Tensor, ...], reason: str) -> None:
    paths = Paths()
    assert Dispatch().run("k", paths.kernel, paths.twin, *tensors) == "from PyTorch"
    with pytest.raises(ValueError, match=reason + r".*kernels=False"):
        Dispatch(True).run("k", paths.kernel, paths.twin, *tensors)
    assert paths.calls == ["twin"]


def test_autocast_and_compilers_take_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(reason: str) -> None:
        paths = Paths()
        assert automatic(paths) == "from PyTorch"
        with pytest.raises(ValueError, match=reason):
            Dispatch(True).run("k", paths.kernel, paths.twin, torch.ones(2))

    with torch.autocast("cpu", torch.bfloat16):
        refused("leave autocast")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    refused("call it uncompiled")


@pytest.mark.parametrize(("capability", "recent"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_the_oldest_gpu(capability: tuple[int, int], recent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if triton is not None:
        monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
        assert kernels_usable(torch.device("cuda", 0), torch.float32) is recent


# ------------------------------------------------------------------------------------------------ in other processes

WITHOUT_TRITON = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ImportError("triton is hidden")

sys.meta_path.insert(0, Missing())
import torch
from modeling_mrp.kernels import dispatch
from modeling_mrp.kernels.dispatch import Dispatch, kernels_usable

assert dispatch.triton is None and "triton" not in sys.modules
assert not kernels_usable(torch.device("cuda", 0), torch.bfloat16)
assert Dispatch().run("k", lambda: 1 / 0, lambda: "twin", torch.ones(2)) == "twin"
try:
    Dispatch(True).run("k", lambda: 1 / 0, lambda: "twin", torch.ones(2))
except ValueError as error:
    print(error)
"""


def test_without_triton() -> None:
    """The package imports, the twin runs, and forcing says what to install."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", WITHOUT_TRITON]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "triton cannot be imported: install it (pip install triton), or use kernels=None" in done.stdout
