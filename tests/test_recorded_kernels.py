"""The shipped combination without a GPU: forwards recorded with the interpreted kernels in them, replayed, and counted."""

from collections import Counter
from typing import Any

import pytest
import torch
from conftest import make_model
from tape import Tape, TapeRecorder, strangers, tapes
from test_graphs import generate, same

from benchmarks.random_cases import dampened
from modeling_mrp.kernels.dispatch import triton
from modeling_mrp.networks import graphs
from modeling_mrp.networks.graphs import recording_report

__all__ = ["tapes"]  # a fixture

pytestmark = [
    pytest.mark.skipif(triton is None or torch.cuda.is_available(), reason="needs triton's interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of infinities
    pytest.mark.usefixtures("few_candidates", "wide_programs"),
]
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 6}
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 0.7, "eos_token_id": [3, 9], "max_new_tokens": 6}
SPEC: dict[str, Any] = {"decoding": "mrp_spec", "num_draft_states": 3}
WAYS: dict[str, dict[str, Any]] = {
    "static bfloat16": {"decoding": "static", **GREEDY},
    "mrp_spec": {**SPEC, **GREEDY},
    "mrp_spec sampled": {**SPEC, **SAMPLED, "min_new_tokens": 5, "target": "dynamic", "confidence_threshold": 0.15},
    "mrp_remask": {"decoding": "mrp_remask", "remask_rule": "threshold", "confidence_threshold": 0.1, **SAMPLED},
}
# Operations of a layer: products, kernels, the gate. With one product for qkv and one for gate and up they are nine.
OF_LAYERS = {
    "mm": 4,
    "triton._sum_and_norm": 2,
    "triton._rotate": 1,
    "triton._attend": 1,
    "silu": 1,
    "mul": 1,
}
# What launches nothing: another look at the same numbers, or memory alone.
FREE = ("view", "_unsafe_view", "expand", "transpose", "t", "slice", "select", "unsqueeze", "squeeze", "detach", "alias")
FREE += ("permute", "as_strided", "split", "split_with_sizes", "unbind", "_reshape_alias", "lift_fresh", "empty", "new_empty")
FREE += ("empty_like",)


def launches(tape: Tape) -> Counter[str]:
    """The operations of a tape that compute, by name."""
    names = (
        func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func.__name__) for func, *_ in tape.operations
    )
    return Counter(name for name in names if name not in FREE)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_with_recorded_kernels(way: str, tapes: type[TapeRecorder]) -> None:
    """Every forward that comes back is recorded with its launches; one layer each, as the interpreter is slow."""
    model = dampened(make_model(4, num_hidden_layers=1, num_nextn_predict_layers=1), 0.3)
    model = model.to(torch.bfloat16 if "bfloat16" in way else torch.float32)
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8, 9]]
    same(*(generate(model, prompts, seed=1, kernels=True, graphs=graphs, **WAYS[way]) for graphs in (True, False)))
    assert all(launches(tape)["triton._attend"] == 1 for tape in tapes.tapes)
    assert tapes.replays > 0
    assert recording_report(model)["failed"] == 0
    assert strangers(model) == []


@pytest.mark.parametrize("states", [1, 4])
def test_a_forward_launches_little_beside_its_layers(
    states: int, tapes: type[TapeRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of SDAR's block size: embedding, rotary angles, the last norm, the kernel's counters, and unpacking."""
    monkeypatch.setattr(graphs, "LEAST_CAPACITY", 64)
    model = make_model(4, block_size=16, num_hidden_layers=1, num_nextn_predict_layers=1).bfloat16()
    options: dict[str, Any] = {**GREEDY, "decoding": "mrp_spec", "num_draft_states": states, "max_new_tokens": 10}
    for _ in range(2):
        model.generate(torch.tensor([[1, 2, 3, 4, 5, 6]]), graphs=True, kernels=True, **options)
    assert tapes.tapes
    for counted in map(launches, tapes.tapes):
        rest = counted - Counter(OF_LAYERS)
        assert not Counter(OF_LAYERS) - counted
        print(f"K = {states}: {rest.total()} launches beside {sum(OF_LAYERS.values())} of a layer: {dict(rest)}")
        assert rest.total() <= 40
