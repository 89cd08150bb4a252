"""`generate` with kernels forced on: they run in every mode, and the texts are those without."""

from typing import Any

import pytest
import torch
from conftest import make_model

from modeling_mrp import MRPForCausalLM
from modeling_mrp.kernels.dispatch import Dispatch, Kernel, triton

pytestmark = [
    pytest.mark.skipif(triton is None, reason="needs triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of infinities, where a kernel is interpreted
    pytest.mark.usefixtures("few_candidates", "wide_programs"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], [0, 0, 13, 14, 15, 16]], device=DEVICE)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 0, "seed": 5},
}
CASES: list[dict[str, Any]] = [
    {"decoding": "static"},
    {"decoding": "mrp_spec", "target": "dynamic"},
    {"decoding": "self_spec", "target": "entropy_bound"},
    {"decoding": "mrp_spec", "target": "entropy_bound"},
    {"decoding": "mrp_direct"},
    *({"decoding": "mrp_remask", "remask_rule": rule} for rule in ("threshold", "residual")),
]


@pytest.fixture(scope="module")
def model() -> MRPForCausalLM:
    return make_model(3, vocab_size=99, num_hidden_layers=1, num_nextn_predict_layers=1).float().to(DEVICE)


@pytest.mark.parametrize(
    ("case", "sampling"), [(case, ("sampled", "greedy")[place % 3 == 0]) for place, case in enumerate(CASES)], ids=str
)
def test_texts_end_as_without_kernels(
    case: dict[str, Any], sampling: str, model: MRPForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model in float32 whose weights are far from ties; seeds are fixed. Every kernel is asked for, by force."""
    asked, run = set[tuple[str, bool | None]](), Dispatch.run

    def noted(dispatch: Dispatch, kernel: Kernel, *given: Any) -> Any:
        asked.add((kernel.name, dispatch.forced))
        return run(dispatch, kernel, *given)

    monkeypatch.setattr(Dispatch, "run", noted)
    options = {**case, **SAMPLINGS[sampling], "confidence_threshold": 0.05, "entropy_threshold": 5.0, "eos_token_id": [2]}
    options |= {"num_draft_states": 3, "max_new_tokens": 4, "min_new_tokens": 3, "return_dict_in_generate": True}
    inputs = {"input_ids": PROMPTS, "attention_mask": (PROMPTS > 0).long()}
    on, off = (model.generate(**inputs, **options, kernels=kernels) for kernels in (True, False))
    assert torch.equal(on.sequences, off.sequences)
    assert torch.equal(on.stats.row_forwards, off.stats.row_forwards)
    torch.testing.assert_close(on.token_logprobs, off.token_logprobs, rtol=1e-4, atol=1e-4)
    names = ("pick", "sum_and_norm", "rotated", "round_attention")
    assert asked == {(name, forced) for name in names for forced in (True, False)}
