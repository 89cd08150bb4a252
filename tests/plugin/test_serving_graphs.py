"""What the plugin does about the engine's CUDA graphs, by stand-ins: attention backends that record
them, processes that agree, and the buffer for logits."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mrp_serving import agreement
from mrp_serving.agreement import COMPARED, CheckedReplays, agree_in, alone
from mrp_serving.backends import SUPPORTED, WRITES_FIRST, backend_obstacle
from mrp_serving.rounds import unembed_in_place
from torch import Tensor

from tests.support.fake_engine import FakeBatch, FakeEngine, SharedLogits
from tests.support.random_cases import make_model


def resolved(chosen: str, records: bool, supported: tuple[str, ...]) -> str:
    """The engine's rule: it keeps what an algorithm lists, and takes flashinfer where it
    records."""
    return "flashinfer" if records and chosen not in supported else chosen


@pytest.mark.parametrize("chosen", ["fa3", "fa4", "triton", "flashinfer", "torch_native", "trtllm"])
def test_recorded_steps_run_under_a_backend_that_records_them(chosen: str) -> None:
    """fa3 is the engine's choice on Hopper: its metadata raise for recorded diffusion steps. The
    engine's own algorithms list no backend, and go by the same rule."""
    recorded = resolved(chosen, True, SUPPORTED)
    assert recorded not in ("fa3", "fa4", "trtllm")
    assert recorded == resolved(chosen, True, ()) or chosen in SUPPORTED
    assert resolved(chosen, False, SUPPORTED) == chosen, "without graphs it stays"
    assert {"fa3", "fa4"} < {*WRITES_FIRST}


@pytest.mark.parametrize(
    ("backends", "records", "named"),
    [
        ({"attention_backend": "flashinfer"}, True, None),
        ({"attention_backend": "fa3"}, False, None),
        ({"attention_backend": "triton", "prefill_attention_backend": None}, True, None),
        (
            {"attention_backend": "flashinfer", "prefill_attention_backend": "fa3"},
            True,
            "--prefill-attention-backend is fa3, which records no CUDA graphs of diffusion steps: "
            "leave it out, choose triton or flashinfer, or add --disable-cuda-graph",
        ),
        ({"decode_attention_backend": "fa4"}, True, "--decode-attention-backend is fa4"),
    ],
)
def test_a_backend_of_one_kind_of_step_is_refused(
    backends: Mapping[str, str | None], records: bool, named: str | None
) -> None:
    """The engine replaces the common choice alone."""
    obstacle = backend_obstacle(backends, records)
    if named is None:
        assert obstacle is None
    else:
        assert obstacle is not None
        assert obstacle.startswith(named)


class Processes:
    """Processes of tensor parallelism, as threads: each agreement waits for all."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.answers = [True] * count
        self.barrier = threading.Barrier(count, timeout=20)

    def agreement_of(self, rank: int) -> Callable[[bool], bool]:
        def agree(answer: bool) -> bool:
            self.answers[rank] = answer
            self.barrier.wait()
            result = all(self.answers)
            self.barrier.wait()
            return result

        return agree

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.count

        def worker(rank: int) -> None:
            results[rank] = work(rank)

        threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        return results


@pytest.fixture
def _compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(agreement, "CHECKED_ON", {"cpu"})


@pytest.mark.usefixtures("_compared")
@pytest.mark.parametrize("wrong_from", [0, 1, None])
def test_all_processes_replay_or_none_does(wrong_from: int | None) -> None:
    """One of two has a graph that is wrong from a replay on: from there both run the step as it is,
    also where the other's replay was right."""
    processes, right = Processes(2), torch.ones(3)
    failures: list[list[str]] = [[], []]

    def work(rank: int) -> list[str]:
        steps: list[str] = []
        replays = iter(range(10))

        def replay() -> tuple[int, Tensor]:
            steps.append("replay")
            broken = rank == 1 and wrong_from is not None and next(replays) >= wrong_from
            return 8, right * (2 if broken else 1)

        def eagerly() -> Tensor:
            steps.append("step")
            return right.clone()

        checked = CheckedReplays(
            processes.agreement_of(rank), lambda text, error: failures[rank].append(str(error))
        )
        for _ in range(4):
            assert torch.equal(checked.run(replay, eagerly), right)
        return steps

    first, second = processes.run(work)
    assert first == second, "each process does what the other does"
    if wrong_from is None:
        assert first == ["replay", "step"] * COMPARED + ["replay"] * 2
        assert failures == [[], []]
    else:
        assert first == ["replay", "step"] * (wrong_from + 1) + ["step"] * (3 - wrong_from)
        assert failures[0] == ["so another process found"]
        assert failures[1][0].startswith("a replay of the head and the head differ by")


@pytest.mark.usefixtures("_compared")
def test_a_replay_that_fails() -> None:
    """A process alone goes on without graphs; one among others must not, as they wait for it."""

    def fail() -> tuple[int, Tensor]:
        raise RuntimeError("no kernel image")

    failures: list[str] = []
    checked = CheckedReplays(alone, lambda text, error: failures.append(f"{text}: {error}"))
    for _ in range(2):
        assert checked.run(fail, lambda: torch.ones(1)) == 1
    assert failures == ["does not run rightly: no kernel image"]
    among = CheckedReplays(Processes(2).agreement_of(0), lambda *_: None)
    with pytest.raises(RuntimeError, match="no kernel image"):
        among.run(fail, lambda: torch.ones(1))


def test_each_graph_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is, where results need not be checked."""
    steps = []

    def eagerly() -> Tensor:
        steps.append(1)
        return torch.ones(1)

    for checked_on, expected in (({"cpu"}, 2 * COMPARED), (set[str](), 0)):
        monkeypatch.setattr(agreement, "CHECKED_ON", checked_on)
        steps.clear()
        checked = CheckedReplays(alone, lambda *_: None)
        for rows in (1, 2, 1, 2, 1, 2):
            checked.run(lambda rows=rows: (rows, torch.ones(1)), eagerly)  # type: ignore[misc]
        assert len(steps) == expected


def test_the_agreement_is_the_least_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    group, theirs = object(), [0]

    def reduced(answers: Tensor, op: Any, group: Any) -> None:
        assert op == dist.ReduceOp.MIN
        answers.clamp_(max=theirs[0])

    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(dist, "all_reduce", reduced)
    agree = agree_in(group)
    assert [agree(True), agree(False)] == [False, False]
    theirs[0] = 1
    assert [agree(True), agree(False)] == [True, False]
    monkeypatch.setattr(dist, "get_world_size", lambda _: 1)
    assert agree_in(group) is alone


@torch.inference_mode()
def test_logits_go_to_the_engines_buffer() -> None:
    """Where they fit, and the engine has one."""
    engine = FakeEngine(make_model(), 2, 4)
    batch = FakeBatch(*[None] * 14)
    hidden = torch.randn(5, 32, dtype=torch.double)
    plain = unembed_in_place(engine, batch, hidden)
    engine.graph_shared_output = shared = SharedLogits(6)
    logits = unembed_in_place(engine, batch, hidden)
    assert torch.equal(logits, plain)
    assert logits.data_ptr() == shared.buffer.data_ptr()
    wide = unembed_in_place(engine, batch, hidden.repeat(2, 1))
    torch.testing.assert_close(wide, plain.repeat(2, 1))
    assert shared.used == [5]
    assert batch.next_token_logits_buffer is None
