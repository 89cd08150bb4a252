"""The log-odds that `mrp doctor` compares: sound models pass in every dtype and family, broken ones
fail."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mrp_trainer.doctor import log_odds
from mrp_trainer.doctor.checks import Check
from mrp_trainer.doctor.log_odds import Comparison, check_log_odds, judge, scripts_of

from modeling_mrp import MRPForCausalLM
from modeling_mrp.kernels.dispatch import triton
from modeling_mrp.networks import graphs
from tests.support.families import FAMILIES
from tests.support.faults import BROKEN
from tests.support.random_cases import make_model
from tests.support.tape import TapeRecorder, tapes

__all__ = ["tapes"]  # a fixture

DTYPES = [torch.float32, torch.bfloat16]


def checks_of(model: MRPForCausalLM, length: int = 20) -> dict[str, Check]:
    return {check.name: check for check in check_log_odds(model, length)}


def small_model(dtype: torch.dtype) -> MRPForCausalLM:
    return make_model(3, num_hidden_layers=1, num_nextn_predict_layers=1).to(dtype)


def test_a_script_covers_what_rounds_do() -> None:
    """States of one path and beside it, clean ones with the next block behind them, rows of other
    lengths, rounds of one state; each state's tokens are those of the text."""
    scripts = scripts_of(small_model(torch.float32), 20, 0)
    assert [len(script.rounds) for script in scripts] == [5, 5, 5]
    assert len({script.row.prompt for script in scripts}) == 3
    assert {len(nodes) for script in scripts for nodes in script.rounds} >= {1, 4}
    for script in scripts:
        assert script.clean == [None, 1, None, 1, None]
        for nodes, clean in zip(script.rounds, script.clean, strict=True):
            for node in nodes:
                start, ids = node.state.key
                known = [column for column in range(4) if column not in node.state.free]
                assert [ids[column] for column in known] == [
                    script.text[start + column] for column in known
                ]
                assert (node.parent == -1) or (node.parent == clean)
            if clean is not None:
                assert nodes[clean].state.masks == 0


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("recorded", [False, True])
def test_a_sound_model_passes(
    dtype: torch.dtype, recorded: bool, tapes: type[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded, each forward is replayed for other tokens than it was recorded with."""
    if not recorded:
        monkeypatch.delitem(graphs.RECORDERS, "cpu")
    checks = checks_of(small_model(dtype))
    assert list(checks) == [f"log-odds of {group}" for group in ("prompts", "rounds", "the head")]
    assert all(check.ok for check in checks.values()), checks
    assert (tapes.replays > 0) is recorded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_model_fails(
    fault: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    BROKEN[fault](monkeypatch)
    checks = checks_of(small_model(dtype))
    graphs._KEPT.clear()
    assert checks["log-odds of rounds"].ok is False
    assert checks["log-odds of the head"].ok is False


@pytest.mark.skipif(triton is None or torch.cuda.is_available(), reason="needs the interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.usefixtures("wide_programs")
def test_kernels_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where they are chosen by themselves."""
    play: Callable[..., Any] = log_odds.play
    monkeypatch.setattr(
        log_odds, "play", lambda model, scripts, kernels, graphs: play(model, scripts, True, False)
    )
    checks = checks_of(small_model(torch.float32), 8)
    assert all(check.ok for check in checks.values()), checks


@pytest.mark.parametrize("name", sorted({*FAMILIES} - {"my_llama"}))  # known to a test alone
def test_every_family_passes(name: str, tmp_path: Path) -> None:
    """Their layers have no norms of queries and keys, biases, experts, a partial rotation, or a
    shift by one."""
    FAMILIES[name].made(tmp_path, FAMILIES[name].twin)
    model: Any = MRPForCausalLM.from_pretrained(tmp_path)
    checks = checks_of(model, 3 * model.config.block_size)
    assert len(checks) == 2
    assert all(check.ok for check in checks.values()), checks


def test_weights_that_are_no_plain_numbers_are_left_out() -> None:
    model = small_model(torch.float32)

    class Packed(torch.nn.Linear):
        pass

    layer: Any = model.model.layers[0].mlp
    layer.down_proj.__class__ = Packed
    checks = checks_of(model)
    assert {check.ok for check in checks.values()} == {None}
    assert {check.note for check in checks.values()} == {
        "model.layers.0.mlp.down_proj is a Packed, whose weights are not plain numbers"
    }


def test_an_error_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(log_odds, "play", fail)
    checks = checks_of(small_model(torch.float32))
    assert [(check.ok, check.note) for check in checks.values()] == [
        (False, "RuntimeError: no memory")
    ]


@pytest.mark.parametrize(
    ("errors", "ok", "note"),
    [
        ([1.0, 2.0, 2.0], True, "1.7 x rounding, 2 x at a state"),
        ([3.5, 3.5, 3.5], False, "3.5 x rounding, 3.5 x at a state"),
        ([*[0.1] * 40, 11.0], False, "1.7 x rounding, 11 x at a state"),
        ([1.0, float("nan"), 1.0], False, "nan x rounding, nan x at a state"),
    ],
)
def test_verdicts_by_hand(errors: list[float], ok: bool, note: str) -> None:
    """By the mean over all columns, and by the worst state."""
    check = judge("log-odds", [Comparison(error, 1.0, 2) for error in errors], 0.5)
    assert (check.ok, check.note) == (ok, note)
