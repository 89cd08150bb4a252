"""Models that are divided among processes (tensor parallelism by gloo, on CPUs) against whole ones."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import make_model
from helpers import PROMPTS, left_padded
from packaging import version
from training_runs import start

from modeling_mrp import MRPForCausalLM

MODES: dict[str, dict[str, Any]] = {
    **{name: {"decoding": name} for name in ("static", "mrp_remask")},
    "mrp_spec": {"decoding": "mrp_spec", "num_draft_states": 6, "draft_passes": 2},
    "sampled": {"decoding": "sequential", "do_sample": True, "top_k": 0, "seed": 5},
    "sampled, drafted": {"decoding": "mrp_spec", "target": "sequential", "do_sample": True, "top_k": 0, "seed": 5},
}
TENSOR_PARALLEL = pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse("5.23"), reason="transformers 5.17 has no DistributedConfig"
)


def everything(model: MRPForCausalLM) -> dict[str, Any]:
    """Texts and counts of modes, those behind a cache, logits and scores."""
    inputs, found = left_padded(PROMPTS), dict[str, Any]()
    for name in MODES:
        common = {"max_new_tokens": 9, "return_dict_in_generate": True, **MODES[name]}
        out = model.generate(**inputs, **common)
        again = model.generate(out.sequences[:1], past_key_values=None, **common)
        on = model.generate(again.sequences, past_key_values=again.past_key_values, **common)
        found[name] = [[one.sequences.tolist(), one.stats.forwards] for one in (out, again, on)]
    with torch.no_grad():
        found["logits"] = model(**inputs).logits[:, -1].tolist()
    found["scores"] = model.score(**inputs).logprobs.tolist()
    return found


def refusal(call: Callable[[], Any]) -> str:
    """What is said to what cannot be done."""
    with pytest.raises(ValueError) as raised:  # noqa: PT011  each is compared with what it has to say
        call()
    return str(raised.value)


def divided(folder: Path, rank: int) -> None:
    """One of two processes: writes down what its part of the model gives."""
    from transformers.distributed import DistributedConfig

    def loaded(**plan: Any) -> MRPForCausalLM:
        return MRPForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2, **plan)).eval()

    model, ids = loaded(), torch.tensor(PROMPTS[:1])
    other = loaded(tp_plan={"lm_head": "colwise_gather_output"})
    parts = {name: list(p.to_local().shape) for name, p in model.named_parameters() if hasattr(p, "to_local")}
    said = [
        refusal(lambda: model.attach_head(str(folder))),
        refusal(lambda: model.generate(ids, do_sample=True, max_new_tokens=4)),
        refusal(lambda: other.generate(ids, max_new_tokens=4)),
    ]
    (folder / f"{rank}.json").write_text(json.dumps({**everything(model), "parts": parts, "refused": said}))


@TENSOR_PARALLEL
def test_tensor_parallel_texts_are_those_of_one_process(tmp_path: Path) -> None:
    """With counts of forwards, in both processes; what is computed differs by rounding, of norms in float32. Each holds half of
    every layer, the head's too, and all of what rows are read of."""
    model = make_model()
    model.save_pretrained(tmp_path)
    assert start(partial(divided, tmp_path), 2) == [0, 0]
    one: Any = json.loads(json.dumps(everything(model)))
    two: Any = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for name in MODES:
        assert two[0][name] == two[1][name] == one[name], name
    for name in ("logits", "scores"):
        assert two[0][name] == two[1][name]
        torch.testing.assert_close(torch.tensor(two[0][name]), torch.tensor(one[name]), rtol=0, atol=1e-5)
    parts = two[0]["parts"]
    assert {name.split(".layers.")[0] for name in parts} == {"model", "mrp_head"}
    assert {tuple(shape) for name, shape in parts.items() if name.endswith("k_proj.weight")} == {(8, 32)}
    assert {tuple(shape) for name, shape in parts.items() if name.endswith("down_proj.weight")} == {(32, 24)}
    attached, seedless, lm_head = two[0]["refused"]
    assert re.search("divided among 2 processes.*save_pretrained the whole model", attached)
    assert "seed is None" in seedless
    assert "leave it, and embed_tokens" in lm_head
