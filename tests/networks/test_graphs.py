"""Recorded forwards, by a tape on the CPU: the same texts and counts, nothing read that may be gone, nothing left behind."""

import copy
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers import LIVELY, generate, same_output
from tape import TapeRecorder, graphs_of_nothing, strangers, tapes
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_mrp import MRPForCausalLM
from modeling_mrp.networks import graphs as graphs_file
from modeling_mrp.networks.cache import BlockCache
from modeling_mrp.networks.graphs import CudaRecorder, fingerprint, obstacle, recording_report, release_graphs
from tests.random_cases import dampened, make_model

__all__ = ["tapes"]  # a fixture

RAGGED = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [9, 10, 11, 12, 13, 14]]
SAMPLED: dict[str, Any] = {**LIVELY, "max_new_tokens": 11, "eos_token_id": [3, 9]}
SPEC: dict[str, Any] = {"decoding": "mrp_spec", "num_draft_states": 5, **SAMPLED}
WAYS: dict[str, dict[str, Any]] = {
    "static": {"decoding": "static", **SAMPLED, "do_sample": False},
    "self_spec": {"decoding": "self_spec", "target": "dynamic", **SAMPLED, "repetition_penalty": 1.3},
    "mrp_spec": {**SPEC, "draft_passes": 3, "top_k": 20, "min_new_tokens": 9},
    "mrp_remask": {"decoding": "mrp_remask", **SAMPLED},
}


def recorded_and_not(model: MRPForCausalLM, prompts: list[list[int]], **options: Any) -> int:
    """Compares both; how many forwards were replayed."""
    before = TapeRecorder.replays
    same_output(generate(model, prompts, graphs=True, **options), generate(model, prompts, graphs=False, **options))
    return TapeRecorder.replays - before


@pytest.mark.parametrize("way", WAYS)
def test_the_same_with_recordings(way: str, tapes: type[TapeRecorder]) -> None:
    """Batches of 3 and 1, in several calls; the second of a kind finds what the first recorded. A recording meets no
    operation that would make the host wait (the tape refuses), and reads nothing that may be gone."""
    model, options = dampened(make_model(4), 0.3), WAYS[way]
    recorded_and_not(model, RAGGED, seed=1, **options)
    assert recorded_and_not(model, RAGGED[::-1], seed=2, **options) > 1
    made = len(tapes.tapes)
    assert recorded_and_not(model, RAGGED[::-1], seed=2, **options) > 1
    assert len(tapes.tapes) - made <= 1, "what is met rarely is recorded late"
    assert strangers(model) == []
    assert recording_report(model)["recordings"] == len(tapes.tapes)
    assert sum(recorded_and_not(model, RAGGED[1:2], seed=3, **options) for _ in range(3)) > 0
    kept = graphs_file._KEPT[model]
    assert (kept.cache.rows, kept.busy) == (1, False)


@pytest.mark.usefixtures("tapes")
def test_calls_that_need_more_room() -> None:
    """For the head, for more states, for longer texts; and from the cache of a mode with the head in one without."""
    model = dampened(make_model(7, max_position_embeddings=2048, hidden_size=16, num_hidden_layers=1), 0.3)
    options = {**SPEC, "seed": 3, "max_new_tokens": 17}
    past = generate(model, RAGGED, graphs=False, **options)
    for way in ("static", "mrp_remask"):
        recorded_and_not(model, RAGGED, seed=3, **WAYS[way])
    release_graphs(model)
    again = generate(model, RAGGED, graphs=True, past_key_values=past.past_key_values, seed=3, **WAYS["static"])
    assert again.sequences.equal(generate(model, RAGGED, seed=3, **WAYS["static"]).sequences)
    recorded_and_not(model, [row * 60 for row in RAGGED], **options | {"num_draft_states": 9})
    kept = graphs_file._KEPT[model]
    recorded_and_not(model, [row * 20 for row in RAGGED], **options)
    assert graphs_file._KEPT[model] is kept, "up to 1,024 tokens one cache serves"
    recorded_and_not(model, [row * 150 for row in RAGGED], **options)
    assert graphs_file._KEPT[model].cache.capacity == 2048


@pytest.mark.usefixtures("tapes")
def test_results_are_the_callers() -> None:
    """What a call returned is not touched by the next one, in inference mode or not: neither numbers nor the cache, from which
    each can go on."""
    model = dampened(make_model(5), 0.3)
    options: dict[str, Any] = {**SPEC, "eos_token_id": None}
    prompt = [list(range(1, 20))]
    for before, after in ((True, True), (False, True), (True, False)):
        first = generate(model, prompt, seed=1, graphs=before, **options)
        kept = copy.deepcopy(first)
        with torch.inference_mode(after):
            other, seed = [prompt[0][::-1]], {"seed": 4}
            same_output(*(generate(model, other, graphs=graphs, **seed, **options) for graphs in (True, False)))
        same_output(first, kept)
        longer = [[*first.sequences[0].tolist(), 3, 4, 5]]
        plain = generate(model, longer, seed=2, graphs=False, **options)
        for past in (kept.past_key_values, first.past_key_values):
            out = generate(model, longer, seed=2, graphs=after, past_key_values=past, **options)
            assert torch.equal(out.sequences, plain.sequences)


@pytest.mark.usefixtures("tapes")
def test_what_was_held_is_held_on() -> None:
    kept, past = graphs_of_nothing(), BlockCache(1, 1, 2, [torch.device("cpu")], 4, 4, torch.float32)
    past.target(0, 4)
    past.update(torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2), 0)
    past.hold([[1, 2, 3, 4]], [4], [0], [0])
    lent = kept.lend(past)
    lent.target(0, 4)
    assert lent.shares(kept.cache)
    assert (lent.held, kept.lend(None).held) == ([4], [0])
    assert lent.read[0][0].eq(1).all()


@pytest.mark.usefixtures("tapes")
def test_weights_that_move_or_switch_are_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by an adapter that is switched, another attention of the same name, peft's `adapter_names`, or a hook."""
    model = dampened(make_model(5), 0.3)
    recorded_and_not(model, RAGGED, seed=4, **SPEC)
    with torch.no_grad():
        model.model.embed_tokens.weight = torch.nn.Parameter(model.model.embed_tokens.weight.flip(0).clone())
    recorded_and_not(model, RAGGED, seed=4, **SPEC)
    seen = [known := fingerprint(model)]
    assert known == fingerprint(model)
    model.lm_head._active_adapter = ["b"]
    seen.append(fingerprint(model))
    del model.lm_head._active_adapter
    with monkeypatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *_, **__: None)
        seen.append(fingerprint(model))
    for name in "ab":
        hook = partial(lambda *_, adapter_names: None, adapter_names=[name])
        handle = model.lm_head.register_forward_pre_hook(hook)
        seen.append(fingerprint(model))
        handle.remove()
    model.model.layers[0].register_forward_hook(lambda *_: None)
    assert len({*seen, fingerprint(model)}) == 6


@pytest.mark.usefixtures("tapes")
def test_a_call_while_another_one_goes_on() -> None:
    """It does without recordings, in a cache of its own; and from another thread, too."""
    model = dampened(make_model(5), 0.3)
    expected = [generate(model, RAGGED, graphs=False, **SPEC, seed=seed) for seed in range(3)]
    results: list[Any] = []

    def call(seed: int) -> None:
        results.append(generate(model, RAGGED, graphs=True, **SPEC, seed=seed))

    def inside(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if not results:
            call(1)
        return torch.zeros(len(ids), dtype=torch.bool)

    same_output(generate(model, RAGGED, graphs=True, **SPEC, seed=0, stopping_criteria=[inside]), expected[0])
    for _ in range(2):
        thread = threading.Thread(target=call, args=(2,))
        thread.start()
        thread.join()
    for result, right in zip(results, (expected[1], expected[2], expected[2]), strict=True):
        same_output(result, right)
    assert not graphs_file._KEPT[model].busy


def test_what_is_kept_goes_with_the_model_or_when_it_is_told_to(tapes: type[TapeRecorder]) -> None:
    model, other = make_model(1), make_model(2)
    for each in (model, other):
        generate(each, RAGGED, graphs=True, **WAYS["static"])
    release_graphs(model)
    assert list(graphs_file._KEPT) == [other]
    assert recording_report(model)["bytes"] == 0 < recording_report(other)["bytes"]
    other.release_graphs()
    assert not graphs_file._KEPT
    generate(model, RAGGED, graphs=True, **WAYS["static"])
    gone = weakref.ref(graphs_file._KEPT[model])
    tapes.tapes.clear()
    del model, each
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("tapes")
def test_what_stands_in_the_way() -> None:
    model = make_model(1)
    assert obstacle(model) is None
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="graphs is True, but autocast is on"):
        model.generate(torch.tensor([[1, 2]]), graphs=True, max_new_tokens=1)
    model.lm_head.to("meta")
    assert obstacle(model) == "the model lies on several devices (cpu, meta): load it on one"
    model.lm_head.weight = type("Quantised", (torch.nn.Parameter,), {})(torch.ones(64, 32))
    assert obstacle(model) == "weights are of the kind Quantised, and where those lie is not known: load plain tensors"


@pytest.mark.parametrize("compared", [0, 2])
def test_a_call_runs_once_and_returns_a_copy(compared: int, tapes: type[TapeRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Five runs of a key are one as it is, one recorded and three replayed; on a GPU two are compared with ordinary runs.
    Another shape or dtype is another key."""
    monkeypatch.setattr(graphs_file, "CHECKED_ON", {"cpu"} if compared else set())
    total, graphs = torch.zeros(1), graphs_of_nothing()

    def step(x: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        return x * 2

    results = [graphs.call("twice", step, torch.full((2,), float(n))) for n in range(5)]
    assert [result.tolist() for result in results] == [[2.0 * n] * 2 for n in range(5)]
    assert (total.item(), graphs.replays, len(tapes.tapes), graphs.failed) == (5 + compared, 4, 1, False)
    assert graphs.call("twice", step, torch.ones(3)).tolist() == [2.0] * 3
    assert graphs.call("twice", step, torch.ones(2, dtype=torch.long)).tolist() == [2] * 2
    assert graphs.call("other", step, torch.ones(2)).tolist() == [2.0] * 2
    assert (graphs.replays, total.item()) == (4, 8 + compared)


def test_another_thread_begins_with_an_ordinary_run(tapes: type[TapeRecorder]) -> None:
    """Its libraries have no handles yet, which a recording must not make; a replay needs none."""
    graphs, x = graphs_of_nothing(), torch.ones(1)

    def elsewhere(key: str) -> int:
        thread = threading.Thread(target=graphs.call, args=(key, torch.neg, x))
        thread.start()
        thread.join()
        return len(tapes.tapes)

    graphs.call("a", torch.neg, x)
    assert [elsewhere("a"), elsewhere("a")] == [0, 0]
    graphs.call("a", torch.neg, x)
    assert [elsewhere("a"), graphs.replays] == [1, 2]


class CudaStandIn:
    """What `CudaRecorder` asks of `torch.cuda`. A capture whose step failed fails to end, too."""

    Stream = CUDAGraph = current_stream = staticmethod(lambda *_: Mock())
    graph_pool_handle, stream = staticmethod(lambda: 1), staticmethod(lambda _: nullcontext())

    def __init__(self) -> None:
        self.capturing = self.most = 0

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


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> CudaStandIn:
    there = CudaStandIn()
    for name in ("Stream", "CUDAGraph", "graph_pool_handle", "current_stream", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(there, name))
    monkeypatch.setitem(graphs_file.RECORDERS, "cpu", CudaRecorder)
    return there


def test_the_error_that_came_first_is_named(stand_in: CudaStandIn) -> None:
    """Not that of ending the recording, nor what the caller was handling before."""
    step, graphs, x = Mock(side_effect=ValueError("not permitted in capture")), graphs_of_nothing(), torch.ones(1)
    graphs.call("a", torch.neg, x)
    try:
        raise KeyError("of the caller")
    except KeyError:
        with pytest.warns(UserWarning, match=r"graph \(not permitted in capture\)"), pytest.raises(ValueError, match="not"):
            graphs.call("a", step, x)  # which fails as it is, too
    assert (stand_in.capturing, graphs.failed) == (0, True)
    assert graphs.call("a", torch.neg, x).tolist() == [-1]


def test_one_thread_records_at_a_time(stand_in: CudaStandIn) -> None:
    recorders = [CudaRecorder(torch.device("cpu")) for _ in range(3)]
    threads = [threading.Thread(target=recorder.record, args=(lambda: torch.ones(1),)) for recorder in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stand_in.most == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("error")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", WAYS)
def test_the_same_with_cuda_graphs(way: str) -> None:
    model = dampened(make_model(4), 0.3).cuda()
    for seed, prompts in product(range(3), (RAGGED, RAGGED[1:2])):
        same_output(*(generate(model, prompts, seed=seed, graphs=graphs, **WAYS[way]) for graphs in (True, False)))
    release_graphs(model)
