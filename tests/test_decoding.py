"""What every mode does to a text, by hand and by arguments; `test_fuzz.py` holds all of them against the slow reference."""

import itertools
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import embedded, make_model
from helpers import every_mode, text, texts
from reference import reference_decode
from transformers import NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor

from benchmarks.random_cases import dampened, random_prompts
from modeling_mrp import MRPForCausalLM


@pytest.mark.parametrize("mode", ["mrp_spec", "self_spec"])
def test_exact_ties_may_swap_in_order_only(mode: str) -> None:
    """Where attention adds nothing all masks are equal, and a product's last bits order them, which depend on its shape: the
    limit of "lossless" (README). The tokens are the same."""
    for trial, block in enumerate((4, 16)):
        model, prompts = dampened(make_model(trial + 4, block_size=block), 0.0), random_prompts(random.Random(trial), 6, 23)
        options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": None, "num_draft_states": 5}
        assert texts(model, prompts, decoding=mode, **options) == texts(model, prompts, decoding="static", **options)


def test_static_costs_one_forward_a_token(random_model: MRPForCausalLM) -> None:
    """Prefill scores the first state, a clean block's KV rides with the next block's first state: no forward is extra."""
    ids = torch.arange(1, 9)[None]
    out = random_model.generate(ids, decoding="static", max_new_tokens=12, return_dict_in_generate=True)
    assert out.stats.forwards == {"prefill": 1, "denoise": 11, "verify": 0, "head": 0}
    assert out.tokens_per_forward.tolist() == [1.0]
    assert sorted(out.reveal_step[0].tolist()) == list(range(12))


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


@every_mode
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 5, "top_p": 0.8}], ids=len)
def test_the_mask_id_is_never_emitted(mode: str, sampling: dict[str, Any]) -> None:
    model = make_model()
    with torch.no_grad():  # make the mask id the favourite everywhere
        model.lm_head.weight[60] = 50 * model.lm_head.weight.abs().mean(0)
    assert 60 not in text(model, [1, 2, 3], decoding=mode, max_new_tokens=9, **sampling)


def test_the_model_keeps_nothing_of_a_call(random_model: MRPForCausalLM) -> None:
    before = set(vars(random_model)) | set(vars(random_model.generation_config))
    config = random_model.generation_config.to_dict()
    random_model.generate(torch.tensor([[1, 2]]), decoding="mrp_spec", max_new_tokens=5, do_sample=True, temperature=0.5)
    assert set(vars(random_model)) | set(vars(random_model.generation_config)) == before
    assert random_model.generation_config.to_dict() == config


# Bans


def test_banned_pairs_of_the_readmes_prompt(tiny_model_float64: MRPForCausalLM, tiny_tokenizer: Any) -> None:
    """Pairs of the text are forbidden in turn: none appears, in whichever order its tokens come, and the drafted text is the
    target's."""
    chat = [{"role": "user", "content": "Ana has 3 pens. Ana buys 4 more. Bo gives Ana 2 more. How many pens does Ana have?"}]
    prompt = tiny_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    for target, every in (("static", 2), ("dynamic", 4), ("entropy_bound", 4), ("sequential", 4)):
        options: dict[str, Any] = {"max_new_tokens": 24, "confidence_threshold": 0.6}
        plain = text(tiny_model_float64, prompt, decoding=target, **options)
        pairs = list(dict.fromkeys(itertools.pairwise(plain)))[::every]
        assert len(pairs) > 3
        for pair in pairs:
            options["bad_words_ids"] = [list(pair)]
            tokens = text(tiny_model_float64, prompt, decoding=target, **options)
            assert pair not in itertools.pairwise([*prompt[-1:], *tokens])
            assert text(tiny_model_float64, prompt, decoding="mrp_spec", target=target, **options) == tokens


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


@every_mode
@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_sequence_comes_twice(mode: str, size: int) -> None:
    """In no mode, and not together with the prompt, whatever a step reveals at once."""
    model, prompts = dampened(make_model(3, block_size=8), 0.3), [list(range(1, 9)), [7, 8, 9, 10]]
    options = {"confidence_threshold": 0.03, "entropy_threshold": 6.0, "mrp_steps": 2, "denoising_steps": 3}
    told = texts(model, prompts, decoding=mode, no_repeat_ngram_size=size, max_new_tokens=21, **options)
    for prompt, tokens in zip(prompts, told, strict=True):
        whole = prompt + tokens
        found = [tuple(whole[i : i + size]) for i in range(len(whole) - size + 1)]
        assert len(set(found)) == len(found)


@pytest.mark.parametrize("target", ["static", "dynamic", "sequential", "entropy_bound"])
def test_no_pair_of_the_readme_that_is_forbidden_is_written(target: str, tiny_tokenizer: Any) -> None:
    """Each pair of the prompt and of its text in turn, and sequences that would come twice; drafted as undrafted."""
    model = embedded().double()
    chat = [{"role": "user", "content": "Sum the numbers of a list that are even, each plus 5."}]
    prompt = tiny_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]

    def written(**options: Any) -> list[int]:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=24, confidence_threshold=0.6, **options)
        return ids[0, len(prompt) :].tolist()

    pairs = dict.fromkeys([*pairwise(prompt), *pairwise([prompt[-1], *written(decoding=target)])])
    for pair in pairs:
        banned = {"bad_words_ids": [list(pair)]}
        tokens = written(decoding=target, **banned)
        assert pair not in pairwise([prompt[-1], *tokens])
        assert written(decoding="mrp_spec", target=target, **banned) == tokens
    for size in (2, 3):
        tokens = written(decoding=target, no_repeat_ngram_size=size)
        whole = [*prompt, *tokens]
        grams = [tuple(whole[at : at + size]) for at in range(len(whole) - size + 1)]
        before = len(prompt) - size + 1
        assert all(gram not in grams[: before + at] for at, gram in enumerate(grams[before:]))
        assert written(decoding="mrp_spec", target=target, no_repeat_ngram_size=size) == tokens
