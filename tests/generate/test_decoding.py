"""What every mode does to a text, by hand and by arguments; `test_fuzz.py` holds all of them against the slow reference."""

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import MODES, text, texts
from reference import reference_decode
from transformers import NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor

from modeling_mrp import MRPForCausalLM
from tests.random_cases import dampened, random_prompts


@pytest.mark.parametrize("mode", ["mrp_spec", "self_spec"])
def test_exact_ties_may_swap_in_order_only(mode: str) -> None:
    """Where attention adds nothing all masks are equal, and a product's last bits order them, which depend on its shape: the
    limit of "lossless" (README). The tokens are the same."""
    for trial, block in enumerate((4, 16)):
        model, prompts = dampened(make_model(trial + 4, block_size=block), 0.0), random_prompts(random.Random(trial), 6, 23)
        options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": None, "num_draft_states": 5}
        assert texts(model, prompts, decoding=mode, **options) == texts(model, prompts, decoding="static", **options)


def test_a_perfect_drafter_accepts_everything() -> None:
    """With one layer of attention off and a head that adds nothing, stale logits are right wherever masks do not interact."""
    model = make_model()
    for layer in model.model.layers:  # positions no longer look at each other, so a reveal changes nothing
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    out = model.generate(
        torch.tensor([[1, 2, 3, 4]]),
        decoding="self_spec",
        num_draft_states=5,
        draft_branches=1,
        max_new_tokens=12,
        return_dict_in_generate=True,
    )
    # Block 4, K = 5: prefill sees all masks; then [1, 2, 3 masks gone, clean, next all-mask] in one forward per block;
    # the last block needs 3 states before its text is known.
    assert out.stats.forwards == {"prefill": 1, "denoise": 0, "verify": 3, "head": 0}
    assert out.stats.accepted_lengths[:, :6].tolist() == [[0, 0, 0, 1, 0, 2]]
    assert out.stats.drafted.tolist() == [3 + 3 + 2] == out.stats.accepted.tolist()
    assert out.tokens_per_forward.tolist() == [3.0]


def test_the_model_keeps_nothing_of_a_call(random_model: MRPForCausalLM) -> None:
    before = set(vars(random_model)) | set(vars(random_model.generation_config))
    config = random_model.generation_config.to_dict()
    random_model.generate(torch.tensor([[1, 2]]), decoding="mrp_spec", max_new_tokens=5, do_sample=True, temperature=0.5)
    assert set(vars(random_model)) | set(vars(random_model.generation_config)) == before
    assert random_model.generation_config.to_dict() == config


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (NoBadWordsLogitsProcessor, {"bad_words_ids": [[7, 7], [3], [9, 4, 9]]}),
        (NoRepeatNGramLogitsProcessor, {"no_repeat_ngram_size": 2}),
        (NoRepeatNGramLogitsProcessor, {"no_repeat_ngram_size": 3}),
    ],
    ids=str,
)
def test_bans_from_left_to_right_are_transformers_own(kind: Any, options: dict[str, Any]) -> None:
    """Under `sequential`, drafted or not: what its processors do to an autoregressive model."""
    given = {"max_new_tokens": 25, "do_sample": True, "top_k": 0, "temperature": 0.3, "seed": 5}
    acted = 0
    for trial in range(4):
        model, (prompt,) = dampened(make_model(trial, block_size=8), 0.5), random_prompts(random.Random(trial), 1, 23)
        processors = [kind(next(iter(options.values())))]
        theirs = reference_decode(model, prompt, decoding="sequential", logits_processor=processors, **given).tokens
        acted += theirs != reference_decode(model, prompt, decoding="sequential", **given).tokens
        for mode in ({"decoding": "sequential"}, {"decoding": "mrp_spec", "target": "sequential"}):
            assert text(model, prompt, **given, **mode, **options) == theirs
    assert acted > 0


@pytest.mark.parametrize(("mode", "size"), [(mode, 1 + place % 3) for place, mode in enumerate(MODES)])
def test_no_sequence_comes_twice(mode: str, size: int) -> None:
    """In no mode, and not together with the prompt, whatever a step reveals at once."""
    model, prompts = dampened(make_model(3, block_size=8), 0.3), [list(range(1, 9)), [7, 8, 9, 10]]
    options = {"confidence_threshold": 0.03, "entropy_threshold": 6.0, "mrp_steps": 2, "denoising_steps": 3}
    told = texts(model, prompts, decoding=mode, no_repeat_ngram_size=size, max_new_tokens=21, **options)
    for prompt, tokens in zip(prompts, told, strict=True):
        whole = prompt + tokens
        found = [tuple(whole[i : i + size]) for i in range(len(whole) - size + 1)]
        assert len(set(found)) == len(found)


@pytest.mark.parametrize("target", ["dynamic", "sequential"])
def test_no_pair_of_the_readme_that_is_forbidden_is_written(target: str, tiny_model_float64: Any, tiny_tokenizer: Any) -> None:
    """Each pair of the prompt and of its text in turn, and sequences that would come twice; drafted as undrafted."""
    chat = [{"role": "user", "content": "Ana has 3 pens. Ana buys 4 more. Bo gives Ana 2 more. How many pens does Ana have?"}]
    prompt = tiny_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]

    def written(**options: Any) -> list[int]:
        options |= {"max_new_tokens": 24, "confidence_threshold": 0.6}
        tokens = text(tiny_model_float64, prompt, decoding=target, **options)
        assert text(tiny_model_float64, prompt, decoding="mrp_spec", target=target, **options) == tokens
        return tokens

    for pair in dict.fromkeys([*pairwise(prompt), *pairwise([prompt[-1], *written()])][::2]):
        assert pair not in pairwise([prompt[-1], *written(bad_words_ids=[list(pair)])])
    for size in (2, 3):
        whole = [*prompt, *written(no_repeat_ngram_size=size)]
        grams = [tuple(whole[at : at + size]) for at in range(len(whole) - size + 1)]
        before = len(prompt) - size + 1
        assert all(gram not in grams[: before + at] for at, gram in enumerate(grams[before:]))
