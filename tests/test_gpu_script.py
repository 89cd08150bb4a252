"""The script for a GPU, as far as a CPU can take it: interpreted kernels at a toy's size, the floor, and the plain round."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import ROOT, make_model

from benchmarks import gpu
from benchmarks.gpu_kernels import Case
from benchmarks.gpu_rounds import Conversation, PlainRound, Round, floor_seconds, floor_work
from benchmarks.roofline import Device, Shape, Work
from benchmarks.timing import Time, in_turns, taking_turns

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """The lines and the table of a run of all sections."""
    output = tmp_path_factory.mktemp("gpu") / "gpu.jsonl"
    settings = ["--batch", "2", "--states", "1", "4", "--prefix", "8", "--repeats", "1", "--count", "1"]
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--shape", "toy", *settings, "--output", str(output)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in output.read_text().splitlines()], done.stdout


def test_every_kernel_is_within_its_bounds(ran: tuple[list[dict[str, Any]], str]) -> None:
    checks = [line for line in ran[0] if "check" in line]
    assert all(line["ok"] for line in checks), checks
    kernels = {line["check"] for line in checks}
    assert kernels == {"pick", "pick sampled", "token_log_odds", "residual_magnitude", "head_input", "round_attention"}
    assert {line["dtype"] for line in checks} == {"bfloat16", "float16", "float32"}


def test_every_time_has_its_floor_beside_it(ran: tuple[list[dict[str, Any]], str]) -> None:
    timed = [line for line in ran[0] if "us" in line]
    assert {line["way"] for line in timed} >= {"kernel", "torch", "ours", "neither", "transformers"}
    assert all(line["floor_us"] > 0 and line["floor_bytes"] > 0 and line["floor_flops"] > 0 for line in timed)
    whole = [line for line in timed if line["floor_us"] > 0.1]  # others are rounded away
    assert all(line["over_floor"] == pytest.approx(line["us"] / line["floor_us"], rel=0.1) for line in whole)
    assert len(whole) > 5


def test_the_table_comes_last(ran: tuple[list[dict[str, Any]], str]) -> None:
    lines, printed = ran
    assert printed.startswith(f"{sum('check' in line for line in lines)} checks against float64, 0 out of bounds\n")
    assert printed.count("\n| mrp_spec K=4 | ") == 2
    assert {"torch", "triton", "date", "bandwidth"} <= lines[0].keys()
    assert [line for line in lines if "failed" in line] == []


def test_what_fails_is_told_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*_: Any) -> Iterator[dict[str, Any]]:
        yield {"memory": "pick"}
        raise ValueError("too small\nby far")

    monkeypatch.setitem(gpu.MEASURE, "generate", fails)
    gpu.main(["--device", "cpu", "--shape", "toy", "--section", "generate", "memory"])
    told = json.dumps({"failed": "generate", "error": "ValueError: too small"})
    assert capsys.readouterr().out.endswith(f"{told}\n\n{json.dumps({'memory': 'pick'})}\n")


def test_a_way_that_fails_is_left_out() -> None:
    case = Case("sum", {}, {"kernel": lambda: 1, "flex": lambda: 1 / 0}, lambda: 0.0, 0.0, Work(1, 1))
    first, *others = case.time(Device("any", 1.0, 1.0), CPU, 1)
    assert first == {"failed": "sum", "way": "flex", "error": "ZeroDivisionError: division by zero"}
    assert [line["way"] for line in others] == ["kernel"]


def test_an_error_out_of_bounds_is_shown() -> None:
    line = {"check": "pick", "ok": False, "error": 0.5}
    assert "1 checks against float64, 1 out of bounds\n\n" + json.dumps(line) in gpu.table([line])


def test_the_floor_of_a_round_at_batch_1_is_reading_the_weights_once() -> None:
    """4B, K = 1: 36 layers of 100,930,816 numbers and lm_head of 388,956,160, in bfloat16 at 4.3 TB/s, and little else."""
    shape = Shape.read(ROOT / "hub_configs" / "sdar-4b-mrp")
    weights = 2 * (36 * 100_930_816 + 388_956_160) / 4.3e12
    floor = floor_seconds(shape, Device("H200", 4.3e12, 989e12), Round(1, 1, 512))
    assert weights < floor < 1.02 * weights
    head = 2 * (3 * 100_930_816 + 2 * 2560**2 + 388_956_160) / 4.3e12
    with_drafts = floor_seconds(shape, Device("H200", 4.3e12, 989e12), Round(1, 4, 512))
    assert weights + head < with_drafts < 1.02 * (weights + head)
    for states, least in ((1, weights), (4, weights + head)):
        work = floor_work(shape, Round(1, states, 512))
        assert least * 4.3e12 < work.bytes < 1.02 * least * 4.3e12
        assert work.bytes / 4.3e12 > work.flops / 989e12, "bound by bytes at batch 1"


def test_a_conversation_begins_behind_its_prefix() -> None:
    """Times aside: a call makes one token a round and no prefill but that of its own first block."""
    model = make_model(head_layers=1).eval()
    model.generation_config.eos_token_id = None
    conversation = Conversation(model, Round(2, 1, 12))
    _, few = conversation._call(16, {})
    _, many = conversation._call(64, {})
    assert (few, many) == (15, 63)


def test_the_plain_round_picks_what_the_backbone_says() -> None:
    """Against one forward over prefix and block together."""
    model = make_model(head_layers=1).eval()
    plain = PlainRound(model, Round(1, 2, 8))
    with torch.no_grad():
        first, again = plain(), plain()
    assert torch.equal(first, again)  # its cache is as it was
    assert first.shape == (1, 2 * model.config.block_size)


def test_clocks_take_turns() -> None:
    order: list[str] = []

    def clock(name: str, seconds: float) -> float:
        order.append(name)
        return seconds

    times = taking_turns({"a": lambda: clock("a", 1.0 + len(order)), "b": lambda: clock("b", 2.0)}, 3)
    assert order == ["a", "b"] * 3
    assert times == {"a": Time(3.0, 2.0, 4.0), "b": Time(2.0, 2.0, 2.0)}
    assert times["b"].line() == {"us": 2e6, "us_25": 2e6, "us_75": 2e6}
    called: list[int] = []
    in_turns({"one": lambda: called.append(1)}, CPU, repeats=4)
    assert len(called) == 5, "once to warm up"
