"""What a GPU is checked for at first use, with interpreted kernels and tapes: what is broken is found, told and not used."""

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import make_model
from faults import KERNELS, Stale, broken
from tape import TapeRecorder, tapes
from torch import Tensor

from modeling_mrp import MRPForCausalLM
from modeling_mrp.kernels import dispatch
from modeling_mrp.kernels.dispatch import relative_error, triton
from modeling_mrp.networks import graphs

__all__ = ["tapes"]  # a fixture

pytestmark = [
    pytest.mark.skipif(triton is None or torch.cuda.is_available(), reason="needs triton's interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of infinities
    pytest.mark.usefixtures("few_candidates", "wide_programs"),
]
IDS = torch.tensor([[1, 2, 3, 4, 5, 6]])
OPTIONS: dict[str, Any] = {"decoding": "mrp_spec", "num_draft_states": 3, "eos_token_id": None, "max_new_tokens": 4}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are chosen by themselves on a CPU, and compared as on a GPU; nothing has failed or been compared before."""
    usable = dispatch._unusable
    monkeypatch.setattr(dispatch, "_unusable", lambda device, dtype, interpreted: usable(device, dtype, True))
    monkeypatch.setattr(dispatch, "_failed", set())
    monkeypatch.setattr(dispatch, "_checked", set())
    dispatch.CHECKED_ON.add("cpu")
    yield
    dispatch.CHECKED_ON.discard("cpu")


def small() -> MRPForCausalLM:
    return make_model(3, num_hidden_layers=1, num_nextn_predict_layers=1, vocab_size=99).float()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_kernels_that_are_right_are_compared_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    for name, kernel in KERNELS.items():
        monkeypatch.setattr(kernel, "twin", lambda *given, n=name, twin=kernel.twin: compared.append(n) or twin(*given))
    model, generator = small(), torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*kernel.*")
        text = model.generate(IDS, **OPTIONS)
        model.generate(IDS, **OPTIONS)
    assert sorted(compared) == sorted([*KERNELS, "sum_and_norm"]), "with what is added, and without"
    assert dispatch.failed_kernels() == []
    assert text.equal(model.generate(IDS, kernels=False, **OPTIONS))
    assert generator.equal(torch.get_rng_state())


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", KERNELS)
def test_a_broken_kernel_is_told_and_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, whatever is decoded; the others go on. Where kernels are asked for it is an error."""
    real, calls = KERNELS[name].launch, list[int]()
    monkeypatch.setattr(KERNELS[name], "launch", lambda *given: calls.append(1) or broken(real(*given)))
    model = small()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts = [model.generate(IDS, **{**OPTIONS, "decoding": mode}) for mode in ("static", "mrp_spec")]
    told = [str(one.message) for one in caught if "Triton kernel" in str(one.message)]
    assert len(told) == 1
    assert f"{name!r} failed on cpu and PyTorch is used in its place" in told[0]
    assert "its results differ from PyTorch's by" in told[0]
    assert dispatch.failed_kernels() == [f"{name} on cpu"]
    assert len(calls) == 1
    assert texts[1].equal(model.generate(IDS, kernels=False, **OPTIONS))
    with pytest.raises(RuntimeError, match=f"{name!r} failed on cpu .*differ from PyTorch's.*kernels=False"):
        model.generate(IDS, kernels=True, **OPTIONS)


def test_nothing_is_compared_on_a_cpu(tapes: type[TapeRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither kernels, also where they are forced, nor recordings."""

    def refused(*_: Any) -> None:
        pytest.fail("compared")

    monkeypatch.setattr(dispatch, "check_close", refused)
    monkeypatch.setattr(graphs, "check_close", refused)
    model = small()
    for _ in range(2):
        model.generate(IDS, kernels=True, graphs=True, **OPTIONS)
    assert tapes.replays > 0


class Zeros(TapeRecorder):
    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        output = torch.zeros_like(step())
        return lambda: output


class Fails(TapeRecorder):
    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise RuntimeError("operation not permitted")


@pytest.mark.usefixtures("as_on_a_gpu", "tapes")
@pytest.mark.parametrize("recorder", [Stale, Zeros, Fails])
def test_a_broken_recording_is_told_and_not_used(recorder: type[TapeRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(graphs.RECORDERS, "cpu", recorder)
    model, options = small().double(), {**OPTIONS, "max_new_tokens": 30}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts = [model.generate(IDS, **options) for _ in range(2)]
    told = [str(one.message) for one in caught if "CUDA graph" in str(one.message)]
    failed = r"could not be recorded as a CUDA graph \(operation not permitted"
    why = failed if recorder is Fails else "is wrong when it is replayed"
    assert re.search(f"^a round of decoding {why}.*goes on without graphs.*pass graphs=False", *told)
    plain = model.generate(IDS, graphs=False, **options)
    assert all(text.equal(plain) for text in texts)
    assert graphs.recording_report(model)["failed"] == 1


def test_an_error_by_hand() -> None:
    nan, inf = torch.nan, torch.inf
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    assert relative_error(torch.tensor([nan, inf, 1.0]), torch.tensor([nan, inf, 1.0])) == 0
    assert relative_error(torch.tensor([nan, 1.0]), torch.tensor([0.0, 1.0])) == inf
    assert relative_error(torch.tensor([0.0, 1.0]), torch.tensor([nan, 1.0])) == inf
    assert relative_error(torch.tensor([150_000, 5]), torch.tensor([150_001, 5])) == 0.5
    with pytest.raises(ArithmeticError, match=r"they differ by 0\.1 of their size, where rounding makes 0\.005 at most"):
        dispatch.check_close("they differ", torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
