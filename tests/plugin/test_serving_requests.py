"""Requests with settings of their own: the text of `generate` with the same seed and options, whoever shares the round."""

from typing import Any

import pytest
import torch
from conftest import TINY
from fake_engine import FakeEngine, FakeRequest, FakeScheduler, rounds_of, serve
from mrp_serving.usage import shown_of
from mrp_trainer.data.tasks import make_problem
from request_kinds import KINDS, as_engine, as_options
from transformers import PreTrainedTokenizerFast

from modeling_mrp import MRPForCausalLM

EOS = (2, 0)
SERVER = {"decoding": "mrp_spec", "target": "dynamic", "confidence_threshold": 0.8, "num_draft_states": 4, "draft_shortlist": 8}
NEW = 20


@pytest.fixture(scope="module")
def model() -> Any:
    return MRPForCausalLM.from_pretrained(TINY, dtype=torch.float64)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
    chat = make_problem("code", "heldout", 1).messages()
    return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])


def generated(model: Any, prompt: list[int], **options: Any) -> Any:
    given = {"decoding": "mrp_spec", "max_new_tokens": NEW, "eos_token_id": list(EOS), "return_dict_in_generate": True}
    return model.generate(
        torch.tensor([prompt]), **{**given, **{n: v for n, v in SERVER.items() if n != "decoding"}, **options}
    )


def sampled(seed: int | None, **more: Any) -> dict[str, Any]:
    """Fields of `SamplingParams` of a request that samples."""
    return as_engine({"temperature": 1.0, "sampling_seed": seed, **more})


@torch.inference_mode()
def test_requests_of_all_kinds_share_rounds(model: Any, prompt: list[int]) -> None:
    """Each has its text, log-probabilities and steps of `generate`, drafted or not, whoever else is in the batch."""
    told = {"return_reveal_step": True}
    kinds = [{**one, "sampling_seed": seed} for one, seed in zip(KINDS, (2**61 + 5, *range(len(KINDS))), strict=False)]
    asked = [as_engine({**one, "custom_params": {**one.get("custom_params", {}), **told}}) for one in kinds]
    requests = [FakeRequest(prompt[place:], NEW, EOS, str(place), asked=one) for place, one in enumerate(asked)]
    engine = serve(model, requests, SERVER)
    assert max(engine.widths) > len(requests), "nothing was drafted"
    for req, one in zip(requests, kinds, strict=True):
        ids = req.origin_input_ids
        out = generated(model, ids, **as_options(one, len(ids)))
        text, shown = out.sequences[0, len(ids) :].tolist(), shown_of(req)
        assert req.text() == text, one
        assert shown is not None
        assert shown["reveal_step"] == out.reveal_step[0].tolist(), one
        logprobs = req.logprob.output_token_logprobs_val[: len(text)]
        assert torch.allclose(torch.tensor(logprobs), out.token_logprobs[0]), one
        assert req.logprob.output_token_logprobs_idx[: len(text)] == text


@torch.inference_mode()
def test_a_request_that_loses_its_rows_goes_on_with_its_noise(model: Any, prompt: list[int]) -> None:
    """Where none gives a seed, that of its name counts, and steps go on from those of finished blocks."""

    def request(rid: str) -> FakeRequest:
        return FakeRequest(prompt, 30, (), rid, asked=sampled(None, custom_params=told))

    told, mask = {"return_reveal_step": True}, model.config.mask_token_id
    whole, other, broken = request("one"), request("other"), request("one")
    serve(model, [whole, other], SERVER)
    engine = FakeEngine(model, 64, 128)
    scheduler = FakeScheduler(engine, rounds_of(model, SERVER))
    scheduler.add(broken)
    lost: set[int] = set()

    def on_step() -> None:
        """Take its rows away in the middle of every block, once."""
        at, block = len(broken.output_ids), broken.mrp.block  # type: ignore[attr-defined]
        if scheduler.running and block and at not in lost and mask not in block[:2]:
            lost.add(at)
            scheduler.release(broken)
            scheduler.fresh[broken] = False
            scheduler.add(broken)

    scheduler.run(on_step)
    assert len(lost) > 1
    assert broken.text() == whole.text() != other.text()
    once, again = shown_of(whole), shown_of(broken)
    assert once is not None
    assert again is not None
    assert again["reveal_step"] == once["reveal_step"]
    assert again["forwards"] > once["forwards"]
    assert broken.logprob.output_token_logprobs_val == pytest.approx(whole.logprob.output_token_logprobs_val)


@torch.inference_mode()
@pytest.mark.parametrize("length", [9, 16, 23])
def test_a_request_without_a_finite_score_is_aborted_alone(model: Any, prompt: list[int], length: int) -> None:
    """No such request passes the checks; weights may overflow at some text all the same."""
    asked, barred = sampled(1), {str(token): -torch.inf for token in range(model.config.vocab_size)}
    whole, other = (FakeRequest(prompt, NEW, EOS, rid, asked=asked) for rid in ("whole", "other"))
    broken = FakeRequest(prompt[:length], NEW, EOS, "broken", asked={**asked, "logit_bias": barred})
    serve(model, [whole], SERVER)
    serve(model, [broken, other], SERVER)
    assert broken.to_finish is not None
    assert broken.to_finish.startswith("no token has a finite score at position ")
    assert broken.ended
    assert set(broken.output_ids) == {model.config.mask_token_id}
    assert other.text() == whole.text()
