"""Models that are divided among processes (tensor parallelism by gloo, on CPUs) or spread over
devices, against whole ones."""

import json
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import infer_auto_device_map

from modeling_mrp import MRPForCausalLM
from tests.support.devices import FIRST, SECOND, spread, two_devices
from tests.support.helpers import PROMPTS, left_padded, older_than
from tests.support.random_cases import make_model
from tests.support.training_runs import start

MODES: dict[str, dict[str, Any]] = {
    **{name: {"decoding": name} for name in ("static", "mrp_remask")},
    "mrp_spec": {"decoding": "mrp_spec", "num_draft_states": 6, "draft_passes": 2},
    "sampled": {"decoding": "sequential", "do_sample": True, "top_k": 0, "seed": 5},
    "sampled, drafted": {
        "decoding": "mrp_spec",
        "target": "sequential",
        "do_sample": True,
        "top_k": 0,
        "seed": 5,
    },
}
TENSOR_PARALLEL = pytest.mark.skipif(
    older_than("5.23"),
    reason="transformers 5.17 has no DistributedConfig",
)


# 5.17 and 5.18 ask torch for the autocast of a device that it does not know.
AUTOCAST = pytest.mark.skipif(older_than("5.20"), reason="transformers asks for its autocast")


def everything(
    model: MRPForCausalLM, modes: Iterable[str] = MODES, new_tokens: int = 9
) -> dict[str, Any]:
    """Texts and counts of modes, those behind a cache, logits and scores."""
    inputs, found = left_padded(PROMPTS), dict[str, Any]()
    for name in modes:
        common = {"max_new_tokens": new_tokens, "return_dict_in_generate": True, **MODES[name]}
        out = model.generate(**inputs, **common)
        again = model.generate(out.sequences[:1], past_key_values=None, **common)
        on = model.generate(again.sequences, past_key_values=again.past_key_values, **common)
        found[name] = [[one.sequences.tolist(), one.stats.forwards] for one in (out, again, on)]
    with torch.no_grad():
        found["logits"] = model(**inputs).logits[:, -1].tolist()
    found["scores"] = model.score(**inputs).logprobs.tolist()
    return found


def refused(model: MRPForCausalLM, folder: Path) -> dict[str, str]:
    """What a divided model says to what it cannot do."""
    ids, said = torch.tensor(PROMPTS[:1]), {}
    calls: dict[str, Any] = {
        "attached": lambda: model.attach_head(str(folder)),
        "seedless": lambda: model.generate(ids, do_sample=True, max_new_tokens=4),
    }
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=2, tp_plan={"lm_head": "colwise_gather_output"})
    other = MRPForCausalLM.from_pretrained(folder, distributed_config=config)
    calls["lm_head"] = lambda: other.generate(ids, max_new_tokens=4)
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            said[name] = str(error)
    return said


def divided(folder: Path, rank: int) -> None:
    """One of two processes: writes down what its part of the model gives."""
    from transformers.distributed import DistributedConfig

    model = MRPForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=2)
    ).eval()
    parts = {
        name: list(p.to_local().shape)
        for name, p in model.named_parameters()
        if hasattr(p, "to_local")
    }
    found = {**everything(model), "parts": parts, "refused": refused(model, folder)}
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Any]]:
    """What one process gives, and what each of two."""
    folder, model = tmp_path_factory.mktemp("divided"), make_model()
    model.save_pretrained(folder)
    assert start(partial(divided, folder), 2) == [0, 0]
    return json.loads(json.dumps(everything(model))), [
        json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)
    ]


@TENSOR_PARALLEL
def test_tensor_parallel_texts_are_those_of_one_process(
    both: tuple[dict[str, Any], list[Any]],
) -> None:
    """With counts of forwards, in both processes; what is computed differs by rounding, of norms in
    float32."""
    one, two = both
    for name in MODES:
        assert two[0][name] == two[1][name] == one[name], name
    for name in ("logits", "scores"):
        assert torch.tensor(two[0][name]).equal(torch.tensor(two[1][name]))
        torch.testing.assert_close(
            torch.tensor(two[0][name]), torch.tensor(one[name]), rtol=0, atol=1e-5
        )


@TENSOR_PARALLEL
def test_what_a_process_holds_and_refuses(both: tuple[dict[str, Any], list[Any]]) -> None:
    """Half of each layer, the head's too; all of what rows are read of."""
    parts, said = both[1][0]["parts"], both[1][0]["refused"]
    assert {name.split(".layers.")[0] for name in parts} == {"model", "mrp_head"}
    assert {tuple(shape) for name, shape in parts.items() if name.endswith("k_proj.weight")} == {
        (8, 32)
    }
    assert {tuple(shape) for name, shape in parts.items() if name.endswith("down_proj.weight")} == {
        (32, 24)
    }
    assert re.search("divided among 2 processes.*save_pretrained the whole model", said["attached"])
    assert "seed is None" in said["seedless"]
    assert "leave it, and embed_tokens" in said["lm_head"]


# Over two devices


@AUTOCAST
@pytest.mark.parametrize("auto", [True, False])
def test_texts_over_two_devices(auto: bool) -> None:
    """With counts of forwards, caches that go on, logits and scores: where accelerate finds places
    on two devices that each have room for four fifths of the model, and with the head beside the
    first layers."""
    model, over_two, few = make_model(), make_model(), ("mrp_remask", "sampled, drafted")
    places = dict.fromkeys(
        ("model.embed_tokens", "model.rotary_emb", "model.norm", "model.layers.1", "lm_head"), FIRST
    )
    places |= {"model.layers.0": SECOND, "mrp_head": SECOND}
    if auto:
        room = sum(p.numel() * p.element_size() for p in model.parameters()) * 8 // 10
        found = infer_auto_device_map(
            model, {0: room, 1: room}, no_split_module_classes=model._no_split_modules
        )
        places = {part: (FIRST, SECOND)[place] for part, place in found.items()}
    assert set(places.values()) == {FIRST, SECOND}
    with two_devices():
        spread(over_two, places)
        found = everything(over_two, few, 4)
    assert found == everything(model, few, 4)
