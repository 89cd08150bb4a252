"""What a round launches beside the layers of its networks, counted on a tape of the shipped combination: graphs and kernels."""

from collections import Counter
from typing import Any

import pytest
import torch
from conftest import make_model
from tape import TapeRecorder, tapes

from modeling_mrp.runner import recorded

__all__ = ["tapes"]  # a fixture

LAYERS = 1
# Operations of layers: products, and the kernels between them.
OF_LAYERS = {
    "mm.default",
    "addmm.default",
    "triton._sum_and_norm",
    "triton._rotate",
    "triton._attend",
    "triton._merge",
    "triton._gate",
}
# What launches nothing: another look at the same numbers, or memory alone.
FREE = ("view", "_unsafe_view", "expand", "transpose", "t.", "slice.", "select.int", "unsqueeze", "squeeze", "detach", "alias")
FREE += ("permute", "as_strided", "split", "unbind", "_reshape_alias", "lift_fresh", "empty", "new_empty", "empty_like")


def launches(states: int, sampled: bool) -> Counter[str]:
    """Launches of a drafting round of SDAR's block size, by operation."""
    model = make_model(4, block_size=16, num_hidden_layers=LAYERS, num_nextn_predict_layers=1).bfloat16()
    options: dict[str, Any] = {"decoding": "mrp_spec", "num_draft_states": states, "max_new_tokens": 10, "eos_token_id": None}
    options |= {"do_sample": sampled, "top_k": 0, "seed": 1, "graphs": True, "kernels": True}
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
    return max(counted, key=lambda each: each["triton._grow"] + each["sort.stable"])


@pytest.mark.usefixtures("tapes", "few_candidates")
@pytest.mark.parametrize(("states", "sampled", "most"), [(4, False, 199), (8, False, 219), (4, True, 309)])
def test_bookkeeping_of_a_drafting_round(states: int, sampled: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "LEAST_CAPACITY", 64)
    counted = launches(states, sampled)
    layers = sum(counted[name] for name in OF_LAYERS)
    assert counted["triton._grow"] == 2
    assert counted["triton._attend"] == LAYERS + 1
    assert layers >= 12 * (LAYERS + 1)
    rest = {name: count for name, count in counted.items() if name not in OF_LAYERS}
    print(f"K = {states}{', sampled' * sampled}: {sum(rest.values())} launches beside {layers} of {LAYERS + 1} layers")
    assert sum(rest.values()) <= most, rest
