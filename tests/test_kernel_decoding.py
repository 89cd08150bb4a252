"""`generate` with kernels forced on and off: the same tokens, but where a difference starts at a near-tie."""

from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import every_mode
from torch import Tensor

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import DECODINGS, REMASK_RULES
from modeling_mrp.generate.scoring import Reader
from modeling_mrp.kernels.dispatch import Dispatch, triton
from modeling_mrp.kernels.unembedding import Unembedding

pytestmark = [
    pytest.mark.skipif(triton is None, reason="needs triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of infinities, where a kernel is interpreted
    pytest.mark.usefixtures("few_candidates"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12], [0, 0, 13, 14, 15, 16]], device=DEVICE)
NEAR = 1e-3  # scores this close are a tie to float32 sums in another order
FORCED = Dispatch(True)


@pytest.fixture(scope="module")
def model() -> MRPForCausalLM:
    return make_model(3, vocab_size=99, draft_vocab_size=60).float().to(DEVICE)


@pytest.fixture(scope="module")
def half() -> MRPForCausalLM:
    return make_model(3, vocab_size=99, draft_vocab_size=60).bfloat16().to(DEVICE)


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 0, "seed": 5},
}
CASES = [(mode, rule) for mode in DECODINGS for rule in (REMASK_RULES if mode == "mrp_remask" else ("reread",))]


class Margins:
    """Watches the twins' choices: the least distance between the two best scores, of everything that was picked."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.least = float("inf")
        shown = Unembedding.shown

        def noted(unembedding: Unembedding, scores: Tensor, keys: Tensor | None) -> Tensor:
            result = shown(unembedding, scores, keys)
            if len(result):
                best = result.topk(2).values
                self.least = min(self.least, (best[:, 0] - best[:, 1]).min().item())
            return result

        patch.setattr(Unembedding, "shown", noted)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_same_tokens_in_every_mode(
    sampling: str, model: MRPForCausalLM, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """Ten modes; a row may differ only if two scores of that decode were within `NEAR` of each other. Reports the
    rate; seeds are fixed."""
    rows = differing = 0
    for mode, rule in CASES:
        options: dict[str, Any] = {"decoding": mode, "remask_rule": rule, "confidence_threshold": 0.05, "eos_token_id": [2]}
        options |= {"num_draft_states": 3, "max_new_tokens": 4, "min_new_tokens": 3, "return_dict_in_generate": True}
        inputs = {"input_ids": PROMPTS, "attention_mask": (PROMPTS > 0).long()} | options | SAMPLINGS[sampling]
        on = model.generate(**inputs, kernels=True)
        with monkeypatch.context() as patch:
            margins = Margins(patch)
            off = model.generate(**inputs, kernels=False)
        same = [torch.equal(a, b) for a, b in zip(on.sequences, off.sequences, strict=True)]
        rows, differing = rows + len(same), differing + same.count(False)
        assert all(same) or margins.least < NEAR, (mode, rule)
        if all(same):
            torch.testing.assert_close(on.token_logprobs, off.token_logprobs, rtol=1e-4, atol=1e-4)
            assert torch.equal(on.stats.row_forwards, off.stats.row_forwards)
    record_property("rows", rows)
    record_property("rows that differ at a near-tie", differing)
    print(f"{sampling}: {differing} of {rows} rows differ, each from a near-tie on")
    assert differing <= rows // 20


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernels that are asked for; all by force."""
    names: set[str] = set()
    run = Dispatch.run

    def noted(dispatch: Dispatch, name: str, *others: Any, **more: Any) -> Any:
        names.add(name)
        assert dispatch == FORCED
        return run(dispatch, name, *others, **more)

    monkeypatch.setattr(Dispatch, "run", noted)
    return names


@every_mode
def test_forced_kernels_run(mode: str, half: MRPForCausalLM, asked: set[str]) -> None:
    """The twins are not called in a mode that needs no logits, of 16-bit weights."""
    options: dict[str, Any] = {"decoding": mode, "max_new_tokens": 2, "remask_rule": "residual", "confidence_threshold": 0.05}
    out = half.generate(PROMPTS[:1], kernels=True, eos_token_id=None, return_dict_in_generate=True, **options)
    used = {"pick"} if mode != "entropy_bound" else set()
    rounds = out.stats.forwards["denoise"] + out.stats.forwards["verify"] + mode.startswith("mrp_")
    layers = {"fused_layers", "sum_and_norm", "rotated", "gated", "round_attention"}
    used |= layers if rounds else set()  # the prefill's own reveals may be all
    used |= {"grow"} if mode.endswith("_spec") else set()
    used |= {"settle"} if rounds and mode not in ("mrp_direct", "mrp_remask") else set()
    assert asked == used


def test_a_top_k_writes_no_float32_logits(half: MRPForCausalLM, asked: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a top-p behind it."""
    monkeypatch.setattr(Unembedding, "logits", lambda *_: 1 / 0)
    options: dict[str, Any] = {
        "do_sample": True,
        "top_k": 5,
        "top_p": 0.9,
        "seed": 1,
        "max_new_tokens": 6,
        "eos_token_id": None,
    }
    half.generate(PROMPTS[:2], kernels=True, decoding="mrp_spec", **options)
    assert asked >= {"pick_above", "round_attention"}
    assert "pick" not in asked


@pytest.mark.parametrize("mode", ["mrp_spec", "mrp_remask"])
def test_positions_that_need_no_pick(mode: str, model: MRPForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device every position goes in, and which of them are wanted is a mask."""
    options: dict[str, Any] = {"decoding": mode, "max_new_tokens": 4, "eos_token_id": None, "confidence_threshold": 0.05}
    usual = model.generate(PROMPTS[:2], kernels=False, **options, **SAMPLINGS["sampled"])
    monkeypatch.setattr(Reader, "_chosen", lambda _, where: torch.arange(where.numel(), device=where.device))
    assert torch.equal(model.generate(PROMPTS[:2], kernels=True, **options, **SAMPLINGS["sampled"]), usual)


def test_processors_and_truncation_need_logits(model: MRPForCausalLM) -> None:
    """Of float32 weights they are picked from in PyTorch, also under `kernels=True`."""
    options: dict[str, Any] = {"do_sample": True, "top_k": 5, "seed": 1, "max_new_tokens": 4, "eos_token_id": None}
    on, off = (model.generate(PROMPTS[:2], kernels=kernels, **options) for kernels in (True, False))
    assert torch.equal(on, off)


def test_float64_is_left_to_pytorch() -> None:
    model = make_model(3)
    with pytest.raises(ValueError, match=r"no kernels for torch.float64: load the model in bfloat16.*or kernels=False"):
        model.generate(PROMPTS[:1].cpu(), kernels=True, max_new_tokens=2)
    usual = model.generate(PROMPTS[:1].cpu(), max_new_tokens=2)
    assert torch.equal(model.generate(PROMPTS[:1].cpu(), kernels=False, max_new_tokens=2), usual)
