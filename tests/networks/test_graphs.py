"""Recorded forwards, by a tape on the CPU: the same texts and counts, nothing read that may be
gone, nothing waited for."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling_mrp import MRPForCausalLM
from modeling_mrp.networks import graphs as graphs_file
from modeling_mrp.networks import sampler
from modeling_mrp.networks.graphs import obstacle, recording_report, release_graphs
from modeling_mrp.networks.inspection import fingerprint
from modeling_mrp.networks.networks import Networks
from tests.support.faults import Stale
from tests.support.helpers import LIVELY, MODES, generate, same_output
from tests.support.random_cases import dampened, make_model
from tests.support.tape import Seen, TapeRecorder, graphs_of_nothing, strangers, tapes

__all__ = ["tapes"]  # a fixture

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# on a CPU a recorded forward has a mask where others need none, which rounds otherwise
DTYPES = [torch.float64, torch.float32, *[torch.bfloat16] * (DEVICE == "cuda")]
RAGGED = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [9, 10, 11, 12, 13, 14]]
SAMPLED: dict[str, Any] = {**LIVELY, "max_new_tokens": 11, "eos_token_id": [3, 9]}
SPEC: dict[str, Any] = {"decoding": "mrp_spec", "num_draft_states": 5, **SAMPLED}
WAYS: dict[str, dict[str, Any]] = {
    "static": {"decoding": "static", **SAMPLED, "do_sample": False},
    "self_spec": {
        "decoding": "self_spec",
        "target": "dynamic",
        **SAMPLED,
        "repetition_penalty": 1.3,
    },
    "mrp_spec": {**SPEC, "draft_passes": 3, "top_k": 20, "min_new_tokens": 9},
    "mrp_remask": {"decoding": "mrp_remask", **SAMPLED},
}


def recorded_and_not(model: MRPForCausalLM, prompts: list[list[int]], **options: Any) -> int:
    """Compares both; how many forwards were replayed."""
    before = TapeRecorder.replays
    same_output(
        generate(model, prompts, graphs=True, **options),
        generate(model, prompts, graphs=False, **options),
    )
    return TapeRecorder.replays - before


def test_calls_that_need_more_room(tapes: type[TapeRecorder]) -> None:
    """For the head, for other rows, more states, longer texts; and from the cache of a mode with
    the head in one without. A recording meets no operation that would make the host wait (the tape
    refuses), and reads nothing that may be gone."""
    model = dampened(
        make_model(7, max_position_embeddings=2048, hidden_size=16, num_hidden_layers=1), 0.3
    )
    options = {**SPEC, "seed": 3, "max_new_tokens": 17}
    past = generate(model, RAGGED, graphs=False, **options)
    for way in WAYS:
        tapes.tapes.clear()
        recorded_and_not(model, RAGGED, seed=3, **WAYS[way])
        assert recorded_and_not(model, RAGGED[::-1], seed=2, **WAYS[way]) > 1
        assert strangers(model) == []
        recorded_and_not(model, RAGGED[1:2], seed=3, **WAYS[way])
    release_graphs(model)
    again = generate(
        model, RAGGED, graphs=True, past_key_values=past.past_key_values, seed=3, **WAYS["static"]
    )
    assert again.sequences.equal(generate(model, RAGGED, seed=3, **WAYS["static"]).sequences)
    recorded_and_not(model, [row * 60 for row in RAGGED], **options | {"num_draft_states": 9})
    kept = graphs_file._KEPT[model]
    recorded_and_not(model, [row * 20 for row in RAGGED], **options)
    assert graphs_file._KEPT[model] is kept, "up to 1,024 tokens one cache serves"
    recorded_and_not(model, [row * 150 for row in RAGGED], **options)
    assert graphs_file._KEPT[model].cache.capacity == 2048


@pytest.mark.usefixtures("tapes")
def test_results_are_the_callers() -> None:
    """What a call returned is not touched by the next one, in inference mode or not: neither
    numbers nor the cache, from which each can go on."""
    model = dampened(make_model(5), 0.3)
    options: dict[str, Any] = {**SPEC, "eos_token_id": None}
    prompt = [list(range(1, 20))]
    for before, after in ((True, True), (False, True), (True, False)):
        first = generate(model, prompt, seed=1, graphs=before, **options)
        kept = copy.deepcopy(first)
        with torch.inference_mode(after):
            other, seed = [prompt[0][::-1]], {"seed": 4}
            same_output(
                *(
                    generate(model, other, graphs=graphs, **seed, **options)
                    for graphs in (True, False)
                )
            )
        same_output(first, kept)
        longer = [[*first.sequences[0].tolist(), 3, 4, 5]]
        same = {"past_key_values": copy.deepcopy(kept.past_key_values)}
        plain = generate(model, longer, seed=2, graphs=False, **same, **options)
        for past in (kept.past_key_values, first.past_key_values):
            same_output(
                generate(model, longer, seed=2, graphs=after, past_key_values=past, **options),
                plain,
            )


@pytest.mark.usefixtures("tapes")
def test_weights_that_move_or_switch_are_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by an adapter that is switched, another attention of the same name, peft's
    `adapter_names`, or a hook."""
    model = dampened(make_model(5), 0.3)
    recorded_and_not(model, RAGGED, seed=4, **SPEC)
    with torch.no_grad():
        model.model.embed_tokens.weight = torch.nn.Parameter(
            model.model.embed_tokens.weight.flip(0).clone()
        )
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
    """It does without recordings, in a cache of its own."""
    model, results = dampened(make_model(5), 0.3), list[Any]()
    expected = [generate(model, RAGGED, graphs=False, **SPEC, seed=seed) for seed in range(2)]

    def inside(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if not results:
            results.append(generate(model, RAGGED, graphs=True, **SPEC, seed=1))
        return torch.zeros(len(ids), dtype=torch.bool)

    same_output(
        generate(model, RAGGED, graphs=True, **SPEC, seed=0, stopping_criteria=[inside]),
        expected[0],
    )
    same_output(results[0], expected[1])
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
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match="graphs is True, but autocast is on"),
    ):
        model.generate(torch.tensor([[1, 2]]), graphs=True, max_new_tokens=1)
    model.lm_head.to("meta")
    assert obstacle(model) == "the model lies on several devices (cpu, meta): load it on one"
    model.lm_head.weight = type("Quantised", (torch.nn.Parameter,), {})(torch.ones(64, 32))
    assert (
        obstacle(model)
        == "weights are of the kind Quantised, and where those lie is not known: load plain tensors"
    )


@pytest.mark.parametrize("compared", [0, 2])
def test_a_call_runs_once_and_returns_a_copy(
    compared: int, tapes: type[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five runs of a key are one as it is, one recorded and three replayed; on a GPU two are
    compared with ordinary runs. Another shape or dtype is another key. Another thread begins with
    an ordinary run, as its libraries have no handles yet."""
    monkeypatch.setattr(graphs_file, "CHECKED_ON", {"cpu"} if compared else set())
    total, graphs = torch.zeros(1), graphs_of_nothing()

    def step(x: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        return x * 2

    results = [graphs.call("twice", step, torch.full((2,), float(n))) for n in range(5)]
    assert [result.tolist() for result in results] == [[2.0 * n] * 2 for n in range(5)]
    assert (total.item(), graphs.replays, len(tapes.tapes), graphs.failed) == (
        5 + compared,
        4,
        1,
        False,
    )
    assert graphs.call("twice", step, torch.ones(3)).tolist() == [2.0] * 3
    assert graphs.call("twice", step, torch.ones(2, dtype=torch.long)).tolist() == [2] * 2
    assert graphs.call("other", step, torch.ones(2)).tolist() == [2.0] * 2
    assert (graphs.replays, total.item()) == (4, 8 + compared)
    thread = threading.Thread(target=graphs.call, args=("other", step, torch.ones(2)))
    thread.start()
    thread.join()
    assert len(tapes.tapes) == 1


class Fails(TapeRecorder):
    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        raise RuntimeError("operation not permitted")


@pytest.mark.parametrize("recorder", [Stale, Fails])
def test_a_broken_recording_is_told_and_not_used(
    recorder: type[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that repeats its first result is found by its second replay."""
    monkeypatch.setattr(graphs_file, "CHECKED_ON", {"cpu"})
    monkeypatch.setitem(graphs_file.RECORDERS, "cpu", recorder)
    graphs, failed = (
        graphs_of_nothing(),
        r"could not be recorded as a CUDA graph \(operation not permitted",
    )
    why = failed if recorder is Fails else "is wrong when it is replayed"
    with pytest.warns(
        UserWarning, match=f"^a round of decoding {why}.*goes on without graphs.*pass graphs=False"
    ) as caught:
        results = [
            graphs.call("key", torch.neg, torch.tensor(n)).item() for n in (1.0, 1.0, 2.0, 3.0)
        ]
    assert results == [-1, -1, -2, -3]
    assert (len(caught), graphs.failed, graphs.recorded) == (1, True, {})


@pytest.mark.parametrize("mode", MODES)
def test_the_host_waits_for_what_was_picked_alone(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind each network once; no operation of a round needs a result on the host, nor has a size
    that depends on one. Keys and values stay where they are, from the first round to the last.
    transformers' top-k and top-p do not wait either."""
    reads, places, score, seen = list[int](), list[list[int]](), Networks.score, Seen()

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: reads.append(1) or function(*args)  # type: ignore[func-returns-value]

    def watched(self: Networks, *args: Any) -> Any:
        places.append([buffer.data_ptr() for buffer in self.cache._buffers.values()])
        with seen:
            return score(self, *args)

    monkeypatch.setattr(sampler, "spread_columns", noted(sampler.spread_columns))
    monkeypatch.setattr(Networks, "score", watched)
    options = {
        **SPEC,
        "decoding": mode,
        "mrp_steps": 2,
        "draft_passes": 2,
        "min_new_tokens": 7,
        "seed": 4,
    }
    options |= {"max_new_tokens": 13, "top_k": 20, "top_p": 0.9, "temperature": 0.8}
    out = generate(dampened(make_model(4), 0.3), RAGGED, **options)
    assert seen.operations
    assert seen.waits == []
    assert 3 < len(reads) <= sum(out.stats.forwards.values())
    assert len(places) > 3
    assert places == places[:1] * len(places)


@pytest.mark.gpu
@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_where_forwards_are_recorded(way: str, dtype: torch.dtype) -> None:
    """As CUDA graphs on a GPU, in 16 and 32 bits with the kernels in them; as tapes on a CPU."""
    model = dampened(make_model(4), 0.3).to(DEVICE, dtype)
    seeds = range(3 if DEVICE == "cuda" else 1)
    for seed, prompts in product(seeds, (RAGGED, RAGGED[1:2])):
        same_output(
            *(
                generate(model, prompts, seed=seed, graphs=graphs, **WAYS[way])
                for graphs in (True, False)
            )
        )
    report = recording_report(model)
    assert report["replays"] > 0 == report["failed"]
    release_graphs(model)


def test_few_widths_are_recorded(tapes: type[TapeRecorder]) -> None:
    """Drafts of 3 and 5 to 7 states run as 4 and 8, so that calls of each K share recordings; what
    they give is the same."""
    model = dampened(make_model(4, num_hidden_layers=1, num_nextn_predict_layers=1), 0.3)
    prompts = [[1, 2, 3, 4, 5, 6]]
    options = {
        **LIVELY,
        "decoding": "mrp_spec",
        "max_new_tokens": 12,
        "eos_token_id": None,
        "seed": 1,
    }
    for states in (8, 7, 6, 5, 3, 8):
        recorded_and_not(model, prompts, num_draft_states=states, **options)
    kept = graphs_file._KEPT[model]
    widths = {key[0][1] for key in kept.recorded}
    assert widths <= {1, 2, 4, 8}
    assert recording_report(model)["failed"] == 0
