"""Which path a call takes: kernels where they can run, PyTorch with a warning where they fail,
errors where forced."""

import warnings
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from modeling_mrp.kernels import dispatch
from modeling_mrp.kernels.dispatch import Dispatch, Kernel, relative_error, triton, unusable


class Paths(Kernel):
    """A kernel and its twin that note their calls; the kernel fails if it is given an error."""

    def __init__(self, error: Exception | None = None, name: str = "k") -> None:
        kernel, twin = Mock(side_effect=error, return_value="kernel"), Mock(return_value="twin")
        super().__init__(name, kernel, twin)

    @property
    def calls(self) -> tuple[int, int]:
        """Of the kernel, and of its twin."""
        return self.launch.call_count, self.twin.call_count


@pytest.fixture(autouse=True)
def _nothing_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_failed", set())


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels can be used on any tensors."""
    monkeypatch.setattr(dispatch, "_obstacle", lambda *_, **__: None)


def run(paths: Paths, forced: bool | None = None, device: str = "cpu") -> Any:
    return Dispatch(forced).run(paths, torch.ones(2, device=device))


@torch.no_grad()
def test_what_runs_on_a_cpu() -> None:
    """Kernels where they are forced, interpreted; of a parameter, too, where no gradient is
    wanted."""
    for forced, path in ((False, "twin"), (None, "twin"), (True, "kernel")):
        assert Dispatch(forced).run(Paths(), torch.ones(2, requires_grad=True)) == path
    assert unusable(torch.device("cpu"), torch.float32) is not None


@pytest.mark.skipif(triton is None, reason="needs triton")
def test_which_gpus_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """From compute capability 8.0 on, which is Ampere."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    for capability in ((7, 5), (8, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert (unusable(torch.device("cuda", 0), torch.float32) is None) is (capability >= (8, 0))
    assert unusable(torch.device("mps"), torch.float16) is not None


@pytest.mark.usefixtures("usable")
def test_a_failing_kernel_is_reported_once_and_not_tried_again() -> None:
    """Where it is forced, it is tried, and raises."""
    paths = Paths(NotImplementedError("at 3:4:\nno such instruction"))
    with pytest.warns(
        RuntimeWarning, match=r"'k' failed on cpu.*NotImplementedError: no such instruction"
    ) as caught:
        assert run(paths) == "twin"
    assert len(caught) == 1
    assert dispatch.failed_kernels() == ["k on cpu"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(paths) == "twin"
    with pytest.raises(
        RuntimeError, match=r"'k' failed on cpu \(NotImplementedError.*\): use kernels="
    ):
        run(paths, forced=True)
    assert paths.calls == (2, 2)
    # Neither another kernel nor another device is given up.
    assert run(Paths(name="other")) == run(Paths(), device="meta") == "kernel"


@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("full"), RuntimeError("not permitted when stream is capturing")],
)
def test_errors_that_say_nothing_about_a_kernel(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running out of memory, and what goes wrong while a graph is captured: raised, and the kernel
    is tried again."""
    paths, capturing = Paths(error), isinstance(error, torch.OutOfMemoryError) is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            run(paths)
        assert raised.value is error
    assert paths.calls == (2, 0)
    assert dispatch.failed_kernels() == []


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ([torch.ones(2).double()], "no kernels for torch.float64: load the model in bfloat16"),
        (
            [torch.ones(2), (torch.ones(2).half(),)],
            "dtypes float32, float16 meet: load the model in one",
        ),
        (
            [torch.ones(2), torch.nn.Linear(1, 1).bfloat16().requires_grad_(False)],
            "dtypes float32, bfloat16 meet",
        ),
        ([torch.ones(2, requires_grad=True)], "no gradients: call it under torch.no_grad"),
        ([torch.ones(2), "autocast"], "leave autocast"),
    ],
)
def test_what_kernels_cannot_take(tensors: list[Tensor], reason: str) -> None:
    """Tensors of lists and modules count, too."""
    paths = Paths()
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in map(str, tensors)):
        assert Dispatch().run(paths, *tensors) == "twin"
        with pytest.raises(ValueError, match=reason + r".*kernels=False"):
            Dispatch(True).run(paths, *tensors)
    assert paths.calls == (0, 1)


@pytest.mark.usefixtures("usable")
def test_what_both_write_to_one_place_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, once for each kind of arguments; not where the twin has no room."""
    monkeypatch.setattr(dispatch, "_checked", set())
    seen = []

    def full(*_: Any) -> None:
        seen.append(len(seen))
        raise torch.OutOfMemoryError("full")

    wrong = Kernel("k", lambda into, _: into.fill_(1), lambda into, _: into.fill_(2))
    assert Dispatch(True).run(wrong, torch.zeros(1), None) == 1
    monkeypatch.setattr(dispatch, "CHECKED_ON", {"cpu"})
    with pytest.raises(
        RuntimeError, match=r"its results differ from PyTorch's by 0\.5 of their size"
    ):
        Dispatch(True).run(wrong, torch.zeros(1), None)
    roomy = Kernel("other", lambda into, _: into, full)
    for second in (None, None, 2, torch.ones(1), 3):
        Dispatch(True).run(roomy, torch.zeros(1), second)
    assert len(seen) == 3


def test_an_error_by_hand() -> None:
    nan, inf = torch.nan, torch.inf
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.tensor([nan, inf, 1.0]), torch.tensor([nan, inf, 1.0])) == 0
    assert relative_error(torch.tensor([nan, 1.0]), torch.tensor([0.0, 1.0])) == inf
    assert relative_error(torch.tensor([0.0, 1.0]), torch.tensor([nan, 1.0])) == inf
    assert relative_error(torch.tensor([150_000, 5]), torch.tensor([150_001, 5])) == 0.5
    with pytest.raises(
        ArithmeticError,
        match=r"they differ by 0\.1 of their size, where rounding makes 0\.005 at most",
    ):
        dispatch.check_close("they differ", torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin runs, and forcing says what to install; `tests/model/test_remote_code.py` imports
    the code without it."""
    monkeypatch.setattr(dispatch, "triton", None)
    assert unusable(torch.device("cuda", 0), torch.bfloat16) is not None
    assert run(Paths()) == "twin"
    with pytest.raises(
        ValueError,
        match=r"triton cannot be imported: install it \(pip install triton\), or use kernels=None",
    ):
        run(Paths(), forced=True)
