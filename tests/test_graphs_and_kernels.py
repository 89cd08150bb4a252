"""The shipped combination without a GPU: rounds recorded with the interpreted kernels in them, replayed from a tape."""

from typing import Any

import pytest
import torch
from conftest import make_model
from tape import Tape, TapeRecorder, strangers, tapes
from test_graphs import generate, same

from benchmarks.random_cases import dampened
from modeling_mrp.kernels.dispatch import triton
from modeling_mrp.networks.graphs import recording_report

__all__ = ["tapes"]  # a fixture

pytestmark = [
    pytest.mark.skipif(triton is None or torch.cuda.is_available(), reason="needs triton's interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of infinities
]
PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8, 9]]
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 6}
SAMPLED: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 0.7, "eos_token_id": [3, 9], "max_new_tokens": 6}
SPEC: dict[str, Any] = {"decoding": "mrp_spec", "num_draft_states": 3}
WAYS: dict[str, dict[str, Any]] = {
    "static": {"decoding": "static", **GREEDY},
    "static bfloat16": {"decoding": "static", **GREEDY},  # picks have kernels for 16 bits alone
    "mrp_spec": {**SPEC, **GREEDY},
    "mrp_spec sampled": {**SPEC, **SAMPLED, "min_new_tokens": 5, "target": "dynamic", "confidence_threshold": 0.15},
    "mrp_remask": {"decoding": "mrp_remask", "remask_rule": "threshold", "confidence_threshold": 0.1, **SAMPLED},
}
LAYERS = {"_attend", "_rotate", "_sum_and_norm"}


def launches(tape: Tape) -> list[str]:
    """The kernels that a tape launches, in order."""
    names = (getattr(func, "__name__", "") for func, *_ in tape.operations)
    return [name.removeprefix("triton.") for name in names if name.startswith("triton.")]


@pytest.mark.usefixtures("few_candidates", "wide_programs")
@pytest.mark.parametrize("way", WAYS)
def test_the_same_with_recorded_kernels(way: str, tapes: type[TapeRecorder]) -> None:
    """Every forward that comes back is recorded with its launches; one layer each, as the interpreter is slow."""
    model = dampened(make_model(4, num_hidden_layers=1, num_nextn_predict_layers=1), 0.3)
    model = model.to(torch.bfloat16 if way == "static bfloat16" else torch.float32)
    same(*(generate(model, PROMPTS, seed=1, kernels=True, graphs=graphs, **WAYS[way]) for graphs in (True, False)))
    launched = [launches(tape) for tape in tapes.tapes]
    assert all(set(names) >= LAYERS for names in launched)
    assert tapes.replays > 0
    assert recording_report(model)["failed"] == 0
    assert strangers(model) == []
