"""The shipped combination: forwards recorded with the kernels in them and replayed, by CUDA graphs
on a GPU; without one by tapes, with interpreted kernels, counted, and checked at first use."""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch

from modeling_mrp.kernels import dispatch
from modeling_mrp.kernels.dispatch import triton
from modeling_mrp.kernels.pick import PICK
from modeling_mrp.networks import graphs
from modeling_mrp.networks.graphs import recording_report
from modeling_mrp.networks.networks import Networks
from modeling_mrp.networks.sampler import Sampler
from tests.support.faults import KERNELS, broken
from tests.support.helpers import generate, same_output
from tests.support.random_cases import dampened, make_model
from tests.support.tape import GridExecutor, Seen, TapeRecorder, launches, of_tape, strangers, tapes

__all__ = ["tapes"]  # a fixture

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="needs triton's interpreter")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton is None, reason="needs triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of infinities
    pytest.mark.usefixtures("few_candidates", "wide_programs"),
]
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 6}
SAMPLED: dict[str, Any] = {
    "do_sample": True,
    "top_k": 0,
    "temperature": 0.7,
    "eos_token_id": [3, 9],
    "max_new_tokens": 6,
}
SPEC: dict[str, Any] = {"decoding": "mrp_spec", "num_draft_states": 3}
WAYS: dict[str, dict[str, Any]] = {
    "static bfloat16": {"decoding": "static", **GREEDY},
    "mrp_spec sampled": {
        **SPEC,
        **SAMPLED,
        "min_new_tokens": 5,
        "target": "dynamic",
        "confidence_threshold": 0.15,
    },
    "self_spec": {
        "decoding": "self_spec",
        "target": "entropy_bound",
        "entropy_threshold": 5.0,
        **GREEDY,
    },
    "mrp_direct": {"decoding": "mrp_direct", **GREEDY},
    "mrp_remask": {"decoding": "mrp_remask", "confidence_threshold": 0.05, **SAMPLED},
}
# Kernels of a decoder layer: products of qkv, o, gate and up, down; kernels of our own.
LAYER = {
    "mm": 4,
    "triton._sum_and_norm": 2,
    "triton._rotate": 1,
    "triton._attend": 1,
    "triton._gate": 1,
}
BACKBONE = 15  # beside its layers: unpacking, embedding, rotary angles, the last norm
HEAD = 33  # likewise, with the two norms and the product that it begins with
PICKED = 8  # logits, the row kernel's two, and spreading the results over blocks
COMMIT = 4  # of clean states: keys and values, and hidden states


@pytest.mark.parametrize("way", WAYS)
def test_the_same_with_recorded_kernels(way: str, tapes: type[TapeRecorder]) -> None:
    """Every forward that comes back is recorded with its launches; one layer each, as the
    interpreter is slow. In float32, with weights that are far from ties, the text is that without
    kernels."""
    model = dampened(make_model(4, num_hidden_layers=1, num_nextn_predict_layers=1), 0.3)
    model = model.to(DEVICE, torch.bfloat16 if "bfloat16" in way else torch.float32)
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8, 9]]
    recorded, plain = (
        generate(model, prompts, seed=1, kernels=True, graphs=graphs, **WAYS[way])
        for graphs in (True, False)
    )
    same_output(recorded, plain)
    if model.dtype == torch.float32:
        assert recorded.sequences.equal(
            generate(model, prompts, seed=1, kernels=False, graphs=False, **WAYS[way]).sequences
        )
    report = recording_report(model)
    assert report["replays"] > 0 == report["failed"]
    assert dispatch.failed_kernels() == []
    if DEVICE == "cpu":
        assert all(of_tape(tape)["triton._attend"] == 1 for tape in tapes.tapes)
        assert tapes.replays > 0
        assert strangers(model) == []
    model.release_graphs()


@interpreted
def test_what_a_round_launches(tapes: type[TapeRecorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in recordings of SDAR's block size, and around them: few, since each takes longer to
    start than to run."""
    monkeypatch.setattr(graphs, "LEAST_CAPACITY", 64)
    # what is picked is the same in any case
    monkeypatch.setattr(GridExecutor, "__call__", lambda *_, **__: None)
    monkeypatch.setattr(
        PICK,
        "launch",
        lambda _, logits, *others: (torch.full((len(logits),), 3), logits.new_ones(len(logits))),
    )
    model = make_model(4, block_size=16, num_hidden_layers=2, num_nextn_predict_layers=1).bfloat16()
    counted: dict[str, list[int]] = {"_pick": [], "commit": []}

    def watched(owner: type, name: str) -> Any:
        method = getattr(owner, name)

        def run(*args: Any, **more: Any) -> Any:
            with Seen() as seen:
                out = method(*args, **more)
            counted[name].append(launches(seen.operations).total())
            return out

        return run

    owners: dict[str, type] = {"_pick": Sampler, "commit": Networks}
    for name, owner in owners.items():
        monkeypatch.setattr(owner, name, watched(owner, name))
    options: dict[str, Any] = {
        **GREEDY,
        "decoding": "mrp_spec",
        "num_draft_states": 2,
        "max_new_tokens": 20,
    }
    model.generate(torch.tensor([[1, 2, 3, 4, 5, 6]]), graphs=True, kernels=True, **options)
    found = {}
    for launched in map(of_tape, tapes.tapes):
        depth = launched["triton._attend"]
        of_a_layer = {**LAYER, "_to_copy": 3}  # interpreted, attention takes no bfloat16
        layers = Counter({name: depth * count for name, count in of_a_layer.items()})
        assert not layers - launched
        found[depth] = (launched - layers).total()
    assert found == {2: BACKBONE, 1: HEAD}
    assert max(counted["_pick"]) == PICKED  # where the stand-in makes two tensors for two launches
    assert {*counted["commit"]} <= {0, COMMIT}
    assert COMMIT in counted["commit"]


IDS = torch.tensor([[1, 2, 3, 4, 5, 6]])


@interpreted
def test_kernels_are_compared_once_each_at_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where they are chosen by themselves. Those that are right change nothing; one
    that is broken is told and not used."""
    compared, unusable = list[str](), dispatch.unusable
    monkeypatch.setattr(
        dispatch, "unusable", lambda device, dtype, interpreted: unusable(device, dtype, True)
    )
    monkeypatch.setattr(dispatch, "CHECKED_ON", {"cpu"})
    for register in ("_failed", "_checked"):
        monkeypatch.setattr(dispatch, register, set())
    for name, kernel in KERNELS.items():
        monkeypatch.setattr(
            kernel,
            "twin",
            lambda *given, n=name, twin=kernel.twin: compared.append(n) or twin(*given),
        )
    model = make_model(3, num_hidden_layers=1, num_nextn_predict_layers=1, vocab_size=99).float()
    options: dict[str, Any] = {**GREEDY, **SPEC, "max_new_tokens": 4}
    generator, plain = torch.get_rng_state(), model.generate(IDS, kernels=False, **options)
    compared.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*kernel.*")
        assert all(model.generate(IDS, **options).equal(plain) for _ in range(2))
        listed = model.generate(IDS, draft_shortlist=16, **options)  # picks with a list
        assert listed.equal(plain)
    assert sorted(compared) == sorted([*KERNELS, "sum_and_norm"]), "with what is added, and without"
    assert dispatch.failed_kernels() == []
    assert generator.equal(torch.get_rng_state())
    dispatch._checked.clear()
    kernel = KERNELS["rotated"]
    monkeypatch.setattr(
        kernel, "launch", lambda *given, launch=kernel.launch: broken(launch(*given))
    )
    with pytest.warns(
        RuntimeWarning, match="'rotated' failed on cpu .*its results differ from PyTorch's by"
    ):
        assert model.generate(IDS, **options).equal(plain)
    assert dispatch.failed_kernels() == ["rotated on cpu"]
