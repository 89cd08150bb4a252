"""What a forward launches beside its layers, counted on a tape of the shipped combination: graphs and kernels."""

from collections import Counter
from typing import Any

import pytest
import torch
from conftest import make_model
from tape import TapeRecorder, tapes

from modeling_mrp.networks import graphs as recorded

__all__ = ["tapes"]  # a fixture

LAYERS = 1
# Operations of layers: products, and the kernels between them.
OF_LAYERS = {
    "mm.default",
    "addmm.default",
    "triton._sum_and_norm",
    "triton._rotate",
    "triton._attend",
    "silu.default",
    "mul.Tensor",
}
# What launches nothing: another look at the same numbers, or memory alone.
FREE = ("view", "_unsafe_view", "expand", "transpose", "t.", "slice.", "select.int", "unsqueeze", "squeeze", "detach", "alias")
FREE += ("permute", "as_strided", "split", "unbind", "_reshape_alias", "lift_fresh", "empty", "new_empty", "empty_like")


def launches(states: int) -> list[Counter[str]]:
    """Launches of each recorded forward of a drafting decode of SDAR's block size, by operation."""
    model = make_model(4, block_size=16, num_hidden_layers=LAYERS, num_nextn_predict_layers=1).bfloat16()
    options: dict[str, Any] = {"decoding": "mrp_spec", "num_draft_states": states, "max_new_tokens": 10, "eos_token_id": None}
    options |= {"do_sample": False}
    options |= {"graphs": True, "kernels": True}
    for _ in range(2):
        model.generate(torch.tensor([[1, 2, 3, 4, 5, 6]]), **options)
    counted = []
    for tape in TapeRecorder.tapes:
        names = [
            getattr(func, "__name__", str(func)) if not hasattr(func, "overloadpacket") else str(func)
            for func, *_ in tape.operations
        ]
        names = [name.removeprefix("aten.") for name in names]
        counted.append(Counter(name for name in names if not name.startswith(FREE)))
    return [each for each in counted if each["triton._attend"]]


@pytest.mark.usefixtures("tapes", "few_candidates", "wide_programs")
@pytest.mark.parametrize("states", [1, 4, 8])
def test_a_forward_launches_little_beside_its_layers(states: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in a recording of the backbone or the head: embedding, rotary angles, the last norm, and unpacking."""
    monkeypatch.setattr(recorded, "LEAST_CAPACITY", 64)
    for counted in launches(states):
        depth = counted["triton._attend"]
        layers = sum(counted[name] for name in OF_LAYERS)
        assert layers >= 9 * depth
        rest = {name: count for name, count in counted.items() if name not in OF_LAYERS}
        print(f"K = {states}: {sum(rest.values())} launches beside {layers} of {depth} layers")
        assert sum(rest.values()) <= 40, rest
