"""`trace_logprobs` beside what `generate` returned, and its gradient beside finite differences."""

from typing import Any

import pytest
import torch
from mrp_trainer import trace_logprobs
from torch import Tensor
from transformers import AutoTokenizer

from modeling_mrp import MRPForCausalLM
from modeling_mrp.rules.reveal import RULES
from tests.support.helpers import MASK, PROMPTS, generate, left_padded
from tests.support.places import TINY
from tests.support.random_cases import make_model

pytestmark = pytest.mark.usefixtures("exact_norms")
# thresholds under which each rule reveals several tokens in some steps, and eos ids that end texts
LIVELY: dict[str, Any] = {
    "confidence_threshold": 0.04,
    "low_threshold": 0.03,
    "entropy_threshold": 5.0,
    "factor": 5.0,
    "max_new_tokens": 13,
    "eos_token_id": list(range(5, 9)),
}
SAMPLED: dict[str, Any] = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "seed": 3,
}


def traced(model: Any, out: Any, side: str = "left", **options: Any) -> Tensor:
    """Call `trace_logprobs` with an output of `generate` for `PROMPTS`."""
    return trace_logprobs(
        model,
        out.sequences,
        out.reveal_step,
        left_padded(PROMPTS, side)["attention_mask"],
        trailing_reveals=out.stats.trailing_reveals,
        **options,
    )


@pytest.mark.parametrize("drafting", [{}, {"decoding": "mrp_spec", "num_draft_states": 6}])
@pytest.mark.parametrize("sampling", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rule", RULES)
def test_equals_what_generate_returned(
    rule: str, sampling: dict[str, Any], drafting: dict[str, Any]
) -> None:
    """Under every rule, also where tokens beyond the end of a text were shown while it ended."""
    model = make_model(block_size=8)
    options = {"decoding": rule, **LIVELY, **sampling, **drafting}
    if drafting:
        options["target"] = rule
    out = generate(model, PROMPTS, **options)
    temperature = 0.7 if sampling["do_sample"] else 1.0
    logprobs = traced(model, out, temperature=temperature)
    assert logprobs.dtype == torch.float64
    assert logprobs.requires_grad
    torch.testing.assert_close(logprobs.float(), out.token_logprobs, rtol=1e-6, atol=1e-7)
    assert logprobs[out.reveal_step < 0].eq(0).all()


@pytest.mark.parametrize("family", ["sdar", "fast_dllm_v2", "sdar_moe"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_of_families_and_padding(family: str, side: str) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = make_model(family=family, **(experts if family == "sdar_moe" else {}))
    inputs = left_padded(PROMPTS, side)
    out: Any = model.generate(
        **inputs, decoding="static", return_dict_in_generate=True, **LIVELY, **SAMPLED
    )
    logprobs = traced(model, out, side, temperature=0.7)
    torch.testing.assert_close(logprobs.float(), out.token_logprobs, rtol=1e-6, atol=1e-7)
    # the mask of whole texts says the same
    real = torch.cat([inputs["attention_mask"].bool(), out.reveal_step >= 0], 1)
    whole = trace_logprobs(
        model, out.sequences, out.reveal_step, real, 0.7, out.stats.trailing_reveals
    )
    assert whole.equal(logprobs)


def test_tokens_beyond_the_end_are_listed() -> None:
    """Of some text here, and states without them are others."""
    model = make_model(block_size=8)
    out = generate(model, PROMPTS, decoding="static", **LIVELY, **SAMPLED)
    trailing = out.stats.trailing_reveals
    assert len(trailing) > 0
    for row, column, token, step in trailing.tolist():
        assert column >= int((out.reveal_step[row] >= 0).sum())
        assert 0 <= step <= int(out.reveal_step[row].max())
        assert token != MASK
    out.stats.trailing_reveals = None
    logprobs = traced(model, out, temperature=0.7)
    assert not torch.allclose(logprobs.float(), out.token_logprobs, atol=1e-3)


def weighed(model: MRPForCausalLM, out: Any, **options: Any) -> Tensor:
    """A scalar that weighs each token differently."""
    logprobs = traced(model, out, temperature=0.7, **options)
    return (logprobs * torch.arange(1, logprobs.numel() + 1).view_as(logprobs)).sum()


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "backbone"])
def test_gradient_is_that_of_finite_differences(frozen: bool) -> None:
    """In a random direction over all weights that train, of one pass and of several, with a trained
    `lm_head` and with a frozen one."""
    model = make_model()
    model.lm_head.requires_grad_(not frozen)
    out = generate(model, PROMPTS, decoding="dynamic", **LIVELY, **SAMPLED)
    weights = [
        p for name, p in model.named_parameters() if "mrp_head" not in name and p.requires_grad
    ]
    gradients = []
    for tokens in (2048, 30):
        value = weighed(model, out, tokens_per_forward=tokens)
        gradients.append(torch.autograd.grad(value, weights))
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.manual_seed(0)
    direction = [torch.randn_like(weight) for weight in weights]
    slope = sum((g * d).sum().item() for g, d in zip(gradients[0], direction, strict=True))
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for weight, change in zip(weights, direction, strict=True):
                weight += sign * 1e-6 * change
            values.append(weighed(model, out).item())
            for weight, change in zip(weights, direction, strict=True):
                weight -= sign * 1e-6 * change
    assert (values[0] - values[1]) / 2e-6 == pytest.approx(slope, rel=1e-6)


def test_no_pass_is_longer_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """And passes that are computed again in the backward pass attend alike."""
    model = make_model()
    out = generate(model, PROMPTS, decoding="static", max_new_tokens=16, eos_token_id=None)
    lengths = []
    backbone = MRPForCausalLM.backbone

    def counted(self: Any, input_ids: Tensor, *args: Any) -> Tensor:
        lengths.append((input_ids.shape[1], self.config._attn_implementation))
        return backbone(self, input_ids, *args)

    monkeypatch.setattr(MRPForCausalLM, "backbone", counted)
    whole = traced(model, out)
    assert len(lengths) == 1
    lengths.clear()
    attention = model.config._attn_implementation
    divided = traced(model, out, tokens_per_forward=60)
    forwards = len(lengths)
    divided.sum().backward()
    assert len(lengths) == 2 * forwards > 8
    assert max(lengths)[0] <= 60
    assert {name for _, name in lengths} == {"tiles"}
    assert model.config._attn_implementation == attention
    torch.testing.assert_close(divided, whole)
    with torch.no_grad():
        assert not traced(model, out).requires_grad


def test_of_nothing_revealed_there_is_a_gradient() -> None:
    """Of zeros: a step of which nothing is learned is a step."""
    model = make_model()
    model.lm_head.requires_grad_(False)
    out = generate(model, PROMPTS, decoding="static", max_new_tokens=8, eos_token_id=None)
    out.reveal_step.fill_(-1)
    logprobs = traced(model, out)
    assert logprobs.eq(0).all()
    logprobs.sum().backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert gradients
    assert not any(gradient.any() for gradient in gradients)


def test_embedded_checkpoint_and_rows_that_join() -> None:
    model = MRPForCausalLM.from_pretrained(TINY)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    chats = [
        [{"role": "user", "content": f"Bo has {n} pens. Bo loses 2. How many pens does Bo have?"}]
        for n in range(3, 8)
    ]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    out: Any = model.generate(
        **inputs,
        target="dynamic",
        decoding="mrp_spec",
        do_sample=True,
        top_k=0,
        seed=1,
        max_new_tokens=48,
        max_batch_size=2,
        return_dict_in_generate=True,
    )
    logprobs = trace_logprobs(
        model,
        out.sequences,
        out.reveal_step,
        inputs["attention_mask"],
        trailing_reveals=out.stats.trailing_reveals,
    )
    torch.testing.assert_close(logprobs, out.token_logprobs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"tokens_per_forward": 0}, "tokens_per_forward is 0"),
        ({"reveal_step": torch.zeros(3, 99)}, r"float32 \[3, 99\]"),
        ({"attention_mask": torch.ones(3, 4)}, r"attention_mask is \[3, 4\]"),
        ({"attention_mask": torch.zeros(3, 10)}, "row 0 has no token"),
        ({"trailing_reveals": torch.zeros(2, 3)}, r"trailing_reveals is torch.float32 \[2, 3\]"),
        ({"trailing_reveals": torch.tensor([[7, 1, 1, 1]])}, "names row 7 of 3"),
        ({"input_ids": torch.full((3, 18), MASK)}, f"the mask id {MASK}"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    model = make_model()
    out = generate(model, PROMPTS, decoding="static", max_new_tokens=8, eos_token_id=None)
    arguments = {
        "input_ids": out.sequences,
        "reveal_step": out.reveal_step,
        "attention_mask": left_padded(PROMPTS)["attention_mask"],
    }
    with pytest.raises(ValueError, match=message):
        trace_logprobs(model, **{**arguments, **change})
    hidden = torch.ones_like(out.sequences)
    hidden[1, -2] = 0
    with pytest.raises(ValueError, match="0 at tokens that reveal_step says"):
        trace_logprobs(model, out.sequences, out.reveal_step, hidden)
