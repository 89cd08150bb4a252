"""The script for a GPU, as far as a CPU can take it: interpreted kernels at a toy's size, the floor, and the plain round."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, make_model
from tape import TapeRecorder

from benchmarks import gpu, gpu_rounds, timing
from benchmarks.agreement import agreement
from benchmarks.gpu_kernels import Case
from benchmarks.gpu_rounds import Conversation, PlainRound, Round, floor_seconds, floor_work
from benchmarks.roofline import Device, Shape, Work
from benchmarks.timing import Budget, Time, copies_for, in_turns, taking_turns
from modeling_mrp.generate.generation import MRPGenerateOutput
from modeling_mrp.runner import graphs
from modeling_mrp.runner.graphs import RecordingFailedError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str]:
    """The lines and the table of a run of all sections."""
    output = tmp_path_factory.mktemp("gpu") / "gpu.jsonl"
    settings = ["--batch", "1", "--states", "4", "--prefix", "8", "--repeats", "1", "--count", "1"]
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--shape", "toy", *settings, "--output", str(output)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in output.read_text().splitlines()], done.stdout


def test_every_kernel_is_within_its_bounds(ran: tuple[list[dict[str, Any]], str]) -> None:
    checks = [line for line in ran[0] if "check" in line]
    assert all(line["ok"] for line in checks), checks
    kernels = {line["check"] for line in checks}
    vocabulary, layers = {"pick", "pick sampled", "token_log_odds"}, {"sum_and_norm", "rotated", "gated"}
    assert kernels == vocabulary | layers | {"round_attention"}
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
    assert printed.count("\n| mrp_spec K=4 | ") == 2 + 1
    same = [line for line in lines if "same_tokens" in line]
    assert [(line["same_tokens"], line["way"], line["as"]) for line in same] == [
        ("round", "ours", "neither"),
        ("static", "ours", "neither"),
        ("mrp_spec K=4", "ours", "neither"),
    ]
    assert all(line["texts_equal"] == line["tokens_equal"] == 1.0 for line in same), "on a CPU both are the same"
    assert {line["way"] for line in lines if line.get("time") == "pick" and line["dtype"] == "float32"} == {"kernel", "torch"}
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


def test_help_tells_every_flag_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--help"])
    flags = capsys.readouterr().out.partition("options:")[2].split("\n  --")[1:]
    assert len(flags) == 14
    assert all("(default: " in " ".join(flag.split()) for flag in flags)
    assert not any(" " in way for way in gpu.WAYS)
    assert gpu.WAYS["no-graphs"] | gpu.WAYS["no-kernels"] == gpu.WAYS["neither"]
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--way", "graphs"])
    assert "invalid choice: 'graphs'" in capsys.readouterr().err


def test_without_time_everything_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock stands at the end: (2 vocabularies, 1 attention) x 3 dtypes of kernels, 1 shape of rounds, 2 ways."""
    monkeypatch.setattr(Budget, "of", classmethod(lambda cls, seconds: Budget(-math.inf)))
    gpu.main(["--device", "cpu", "--shape", "toy"])
    printed = capsys.readouterr()
    left = "left out: 9 x kernels (no time is left), 1 x rounds (no time is left), 2 x generate (no time is left)\n"
    assert printed.out == "0 checks against float64, 0 out of bounds\n\n" + left
    named = [json.loads(line) for line in printed.err.splitlines() if "left_out" in line]
    assert {"left_out": "kernels", "shape": "toy", "rows": 5, "dtype": "bfloat16", "why": "no time is left"} in named


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, None], ids=str)
def test_the_table_comes_when_it_is_stopped(
    end: signal.Signals | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def waits(*_: Any) -> Iterator[dict[str, Any]]:
        yield {"memory": "pick"}
        assert gpu.GRACE - 30 < signal.getitimer(signal.ITIMER_REAL)[0] <= 9 + gpu.GRACE
        if end is None:  # earlier than that
            signal.setitimer(signal.ITIMER_REAL, 0.01)
        else:
            os.kill(os.getpid(), end)
        time.sleep(30)

    monkeypatch.setitem(gpu.MEASURE, "memory", waits)
    began, handlers = time.monotonic(), [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)]
    with pytest.raises(SystemExit, match="1"):
        gpu.main(["--device", "cpu", "--shape", "toy", "--section", "memory", "--seconds", "9"])
    stopped = json.dumps({"stopped": f"Stopped: {'SIGALRM' if end is None else end.name}"})
    assert capsys.readouterr().out.endswith(f"{stopped}\n\n{json.dumps({'memory': 'pick'})}\n")
    assert time.monotonic() - began < 30
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert handlers == [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)]


def test_the_bars_are_first_and_all_is_the_grid_of_them() -> None:
    few, everything = gpu.read_options([]), gpu.read_options(["--all", "--batch", "8"])
    assert (few.shape, few.batch, few.states, few.prefix, few.rows[0]) == (["4b"], [1], [4, 1], [512], 64)
    assert few.seconds + gpu.GRACE < 9 * 60
    first = next(iter(gpu.groups("4b", few, CPU)))[0]
    assert first == {"rows": 64, "dtype": "bfloat16"}
    assert (sorted(everything.shape), everything.batch, everything.seconds) == (["1.7b", "4b", "8b"], [8], None)
    assert (sorted(everything.states), sorted(everything.prefix)) == ([1, 4, 8], [512, 4096, 16384])
    assert sum(1 for _ in gpu.groups("4b", everything, CPU)) == (5 + 3 * 3) + 2 * (2 + 1)
    for name in few.__dict__.keys() & gpu.FEW.keys():
        assert set(gpu.FEW[name] if name != "seconds" else []) <= set(gpu.ALL[name] or [])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--seconds", "0"], "'0' is not a number from 1 on"),
        (["--rows", "-1"], "'-1' is not a number from 1 on"),
        (["--way", "without graphs"], "invalid choice: 'without graphs'"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.read_options(arguments)
    assert told in capsys.readouterr().err


def test_a_lost_device_ends_it_with_its_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(device: torch.device) -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def fails(*_: Any) -> Iterator[dict[str, Any]]:
        yield {"memory": "pick"}
        monkeypatch.setattr(timing, "now", broken)
        raise ValueError("wrong")

    monkeypatch.setitem(gpu.MEASURE, "memory", fails)
    with pytest.raises(SystemExit, match="1"):
        gpu.main(["--device", "cpu", "--shape", "toy", "--section", "memory", "rounds"])
    out = capsys.readouterr().out
    assert "cpu takes no more work after ValueError: wrong: RuntimeError: CUDA error: an illegal memory access" in out
    assert out.endswith(json.dumps({"memory": "pick"}) + "\n")


def recorded_on_cpu(monkeypatch: pytest.MonkeyPatch, recorder: type) -> None:
    monkeypatch.setitem(graphs.RECORDERS, "cpu", recorder)


def test_the_time_of_a_recorded_loop_is_divided_by_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by 5 ms with each call that the host makes, and by 2 ms with each that a recording repeats. 3 copies
    take 15 ms, so 6 laps of them fit 0.1 s; repeated they take 36 ms, so a turn repeats them twice."""
    clock, launched, replays = [0.0], [0], [0]

    class Recorder:
        def __init__(self, device: torch.device) -> None: ...

        def first(self, step: Callable[[], None]) -> None:
            step()

        def record(self, step: Callable[[], None]) -> Callable[[], None]:
            before = launched[0]
            step()
            calls = launched[0] - before

            def replay() -> None:
                replays[0] += 1
                clock[0] += 0.002 * calls

            return replay

    def call() -> None:
        launched[0] += 1
        clock[0] += 0.005

    recorded_on_cpu(monkeypatch, Recorder)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    (taken,) = in_turns({"one": [call, call, call]}, CPU, repeats=4, seconds=0.1).values()
    assert taken.median == pytest.approx(0.002)
    assert taken.unrecorded is None
    assert "launched_by_host" not in taken.line()
    assert launched[0] == 3 + 2 * 3 + 3 + 6 * 3, "to warm up, to see how long it takes, before recording, recorded"
    assert replays[0] == 2 + 4 * 2


def test_what_cannot_be_recorded_is_launched_by_the_host_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(TapeRecorder):
        def record(self, step: Callable[[], None]) -> Callable[[], None]:
            raise RecordingFailedError from RuntimeError("not permitted")

    recorded_on_cpu(monkeypatch, Fails)
    case = Case("sum", {"dtype": "bfloat16", "rows": 1}, lambda seed: (), {"kernel": lambda: 1}, lambda: 0.0, 0.0, Work(1, 1))
    (line,) = case.time(Device("any", 1.0, 1.0), CPU, 1)
    assert line["launched_by_host"] == "RuntimeError: not permitted"
    assert "| one by one |" in gpu.table([{"shape": "toy", **line}])
    assert line["us"] > 0


def test_copies_of_inputs_outgrow_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """50 MB of it: one of 200 MB, four of 50 MB, and of tiny ones as many as allowed."""
    properties = SimpleNamespace(L2_cache_size=50_000_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    cuda = torch.device("cuda", 1)
    assert [copies_for(size, cuda) for size in (8e8, 2e8, 1.9e8, 5e7, 1e3)] == [1, 1, 2, 4, timing.MOST_COPIES]
    assert copies_for(1e3, CPU) == 1


def test_copies_take_turns() -> None:
    order: list[int] = []
    calls = [partial(order.append, number) for number in range(3)]
    in_turns({"one": calls}, CPU, repeats=2)
    assert order == [0, 1, 2] * 3


def outputs(tokens: list[list[int]], logprobs: list[list[float]]) -> MRPGenerateOutput:
    ids = torch.tensor(tokens)
    steps = torch.where(ids == 0, -1, 0)
    return MRPGenerateOutput(
        sequences=torch.cat([torch.full((len(ids), 2), 9), ids], 1), reveal_step=steps, token_logprobs=torch.tensor(logprobs)
    )


def test_agreement_by_hand() -> None:
    """Two batches; in the second, a text of two tokens ends after one in the other's, which has three."""
    same = outputs([[1, 2]], [[-0.1, -0.2]])
    assert agreement([same], [same]) == {"texts_equal": 1.0, "tokens_equal": 1.0}
    ours = outputs([[3, 4, 0], [5, 6, 0]], [[-0.5] * 3, [-0.25, -0.75, 0.0]])
    theirs = outputs([[3, 4, 0], [5, 7, 8]], [[-0.5] * 3, [-0.25, -0.7, -1.0]])
    told = agreement([same, ours], [same, theirs])
    assert told == {
        "texts_equal": 0.6667,
        "tokens_equal": round(5 / 7, 4),
        "first_difference": [1, 1, 1],
        "logprobs_there": [-0.75, -0.7],
    }
    told = agreement([outputs([[3]], [[-0.5]])], [outputs([[3, 4]], [[-0.5, -0.25]])])
    assert (told["first_difference"], told["logprobs_there"]) == ([0, 0, 1], [None, -0.25])
    assert "| [0, 0, 1]: [None, -0.25] |" in gpu.table([{"same_tokens": "static", "way": "ours", "as": "neither", **told}])


def test_a_way_that_fails_is_left_out() -> None:
    case = Case("sum", {}, lambda seed: (), {"kernel": lambda: 1, "flex": lambda: 1 / 0}, lambda: 0.0, 0.0, Work(1, 1))
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


def test_a_conversation_begins_behind_its_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times aside: a call makes one token a round and no prefill but that of its own first block."""
    monkeypatch.setattr(gpu_rounds, "SHORT", 4)
    monkeypatch.setattr(gpu_rounds, "LONG", 16)
    model = make_model(head_layers=1).eval()
    model.generation_config.eos_token_id = None
    conversation = Conversation(model, Round(2, 1, 12))
    _, few, _ = conversation._call(4, {})
    _, many, out = conversation._call(16, {})
    assert (few, many) == (3, 15)
    conversation.seconds_of_round("ours", {})
    assert torch.equal(conversation.said["ours"].sequences, out.sequences)
    assert conversation.said["ours"].past_key_values is None


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
    in_turns({"one": [lambda: called.append(1)]}, CPU, repeats=4)
    assert len(called) == 5, "once to warm up"
