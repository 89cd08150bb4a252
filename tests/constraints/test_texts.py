"""Texts of a language, under every target: each is one, and drafts do not change it."""

import random
from typing import Any

import pytest
import torch

pytest.importorskip("outlines_core")
pytest.importorskip("llguidance")

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import TARGETS
from tests.support.languages import CASES, EOS, by_row, letters_tokenizer, random_languages, text_of
from tests.support.random_cases import batch_of, dampened, make_model

MODELS: dict[int, MRPForCausalLM] = {}


def model_of(block_size: int) -> MRPForCausalLM:
    if block_size not in MODELS:
        MODELS[block_size] = dampened(make_model(block_size, block_size=block_size), 0.3)
    return MODELS[block_size]


def decode(model: MRPForCausalLM, **options: Any) -> Any:
    return model.generate(**options, eos_token_id=EOS, return_dict_in_generate=True)


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("target", TARGETS)
def test_every_text_is_one_of_its_language(target: str, sample: bool) -> None:
    """In batches whose rows have languages of their own, padded on either side; drafted as not. For
    more texts: `python -m benchmarks.constrained valid`."""
    rng = random.Random(f"{target} {sample}")
    model = model_of(rng.choice((4, 8, 16, 32)))
    prompts = [[rng.randint(2, 59) for _ in range(rng.randint(1, 9))] for _ in range(4)]
    cases = random_languages(rng, len(prompts))
    inputs = batch_of(prompts, rng.choice(("left", "right")))
    options: dict[str, Any] = {**inputs, **by_row(cases), "max_new_tokens": rng.randint(20, 32)}
    if sample:
        options |= {"do_sample": True, "seed": rng.randrange(99), "temperature": 1.3, "top_k": 9}
    alone = decode(model, decoding=target, **options)
    width = inputs["input_ids"].shape[1]
    for case, ids in zip(cases, alone.sequences[:, width:].tolist(), strict=True):
        assert case is None or case.holds(text_of(ids)), (case.value, text_of(ids))
    for mode, states in (("self_spec", 4), ("mrp_spec", 5)):
        drafted = decode(model, decoding=mode, target=target, num_draft_states=states, **options)
        assert drafted.sequences.equal(alone.sequences)
        assert drafted.reveal_step.equal(alone.reveal_step)
        torch.testing.assert_close(drafted.token_logprobs, alone.token_logprobs)


@pytest.mark.parametrize("decoding", ["mrp_direct", "mrp_remask"])
def test_what_the_head_reveals_is_of_the_language(decoding: str) -> None:
    rng = random.Random(decoding)
    for block_size in (4, 16):
        prompts = [[5, 6, 7]] * 8
        cases = [rng.choice(CASES) for _ in prompts]
        inputs = {"input_ids": torch.tensor(prompts), **by_row(list(cases))}
        out = decode(model_of(block_size), decoding=decoding, max_new_tokens=30, **inputs)
        for case, ids in zip(cases, out.sequences[:, 3:].tolist(), strict=True):
            assert case.holds(text_of(ids)), (case.value, text_of(ids))


def test_a_text_ends_where_the_limit_is() -> None:
    """As long as the limit leaves room for one text; then this is the text."""
    model = model_of(8)
    for limit in range(5, 12):
        for decoding in ("static", "sequential", "dynamic"):
            out = decode(
                model,
                input_ids=torch.tensor([[3, 4]]),
                decoding=decoding,
                regex="[0-9]{5,}",
                tokenizer=letters_tokenizer(),
                max_new_tokens=limit,
            )
            assert len(text_of(out.sequences[0, 2:].tolist())) >= 5
            assert out.sequences.shape[1] <= 2 + limit


def test_what_a_language_leaves_no_choice_about_takes_no_forward() -> None:
    out = decode(
        model_of(8),
        input_ids=torch.tensor([[3, 4]]),
        decoding="static",
        choices=["abcabcabcabc 12121212"],
        tokenizer=letters_tokenizer(),
        max_new_tokens=30,
        output_scores=True,
    )
    assert text_of(out.sequences[0, 2:].tolist()) == "abcabcabcabc 12121212"
    # the prompt's, and one for the keys and values of each whole block behind it
    assert out.stats.row_forwards.item() <= 3
    assert out.token_logprobs.eq(0).all()
    assert out.stats.filled.item() == out.sequences.shape[1] - 2
    tokens = out.sequences[0, 2:]
    assert all(score[0, token] == 0 for score, token in zip(out.scores, tokens, strict=True))
