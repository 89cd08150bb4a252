"""What every mode does to a text, by hand and by arguments; `test_fuzz.py` holds all of them against the slow reference."""

import itertools
import random
from typing import Any

import pytest
import torch
from conftest import make_model
from reference import reference_decode
from transformers import NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor

from benchmarks.random_cases import batch_of, dampened
from modeling_mrp import MRPForCausalLM

BACKBONE_MODES = ("static", "dynamic", "sequential", "entropy_bound")
ALL_MODES = (*BACKBONE_MODES, "self_spec", "mrp_direct", "mrp_spec", "mrp_remask")
COSTS = ("row_forwards", "row_head_forwards", "drafted", "accepted", "revoked", "accepted_lengths")
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.7, "top_k": 0},
    {"do_sample": True, "temperature": 1.0, "top_k": 5},
    {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 0.8},
)


def decode(
    model: MRPForCausalLM, prompts: list[list[int]], side: str = "left", **options: Any
) -> list[tuple[list[int], list[int], list[float], list[Any]]]:
    """(tokens, reveal steps, log-probabilities, what it cost) of every row."""
    inputs = batch_of(prompts, side)
    out = model.generate(**inputs, return_dict_in_generate=True, **options)
    generated = out.sequences[:, inputs["input_ids"].shape[1] :]
    rows = []
    costs = zip(*(getattr(out.stats, name).tolist() for name in COSTS), strict=True)
    for tokens, steps, logprobs, cost in zip(generated, out.reveal_step, out.token_logprobs, costs, strict=True):
        n = int((steps >= 0).sum())
        rows.append((tokens[:n].tolist(), steps[:n].tolist(), logprobs[:n].tolist(), list(cost)))
    return rows


def random_prompts(rng: random.Random, count: int, longest: int = 23) -> list[list[int]]:
    return [[rng.randrange(1, 50) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("mode", ["mrp_spec", "self_spec"])
def test_exact_ties_may_swap_in_order_only(mode: str) -> None:
    """Where attention adds nothing all masks are equal, and a product's last bits order them, which depend on its shape: the
    limit of "lossless" (README). The tokens are the same, and so are their log-probabilities."""
    for trial, block in enumerate((4, 8, 16)):
        model = dampened(make_model(trial + 4, block_size=block), 0.0)
        prompts = random_prompts(random.Random(trial), 6)
        static, drafted = (
            decode(model, prompts, decoding=decoding, max_new_tokens=30, eos_token_id=None, num_draft_states=5)
            for decoding in ("static", mode)
        )
        for a, b in zip(static, drafted, strict=True):
            assert a[0] == b[0]
            assert a[2] == pytest.approx(b[2], abs=1e-12)


def test_shorter_limits_give_prefixes(random_model: MRPForCausalLM) -> None:
    prompts = random_prompts(random.Random(0), 4)
    longest = decode(random_model, prompts, decoding="static", max_new_tokens=21)
    for limit in (1, 2, 5, 8, 13):
        for shorter, longer in zip(
            decode(random_model, prompts, decoding="mrp_spec", max_new_tokens=limit), longest, strict=True
        ):
            assert shorter[0] == longer[0][:limit]


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


def test_the_mask_id_is_never_emitted() -> None:
    model = make_model()
    with torch.no_grad():  # make the mask id the favourite everywhere
        model.lm_head.weight[60] = 50 * model.lm_head.weight.abs().mean(0)
    for mode in ALL_MODES:
        for sampling in SAMPLINGS:
            tokens = model.generate(torch.tensor([[1, 2, 3]]), decoding=mode, max_new_tokens=9, **sampling)
            assert 60 not in tokens[0].tolist()


def test_the_model_keeps_nothing_of_a_call(random_model: MRPForCausalLM) -> None:
    before = set(vars(random_model)) | set(vars(random_model.generation_config))
    config = random_model.generation_config.to_dict()
    random_model.generate(torch.tensor([[1, 2]]), decoding="mrp_spec", max_new_tokens=5, do_sample=True, temperature=0.5)
    assert set(vars(random_model)) | set(vars(random_model.generation_config)) == before
    assert random_model.generation_config.to_dict() == config


# Bans

WAYS: tuple[dict[str, Any], ...] = (
    {"bad_words_ids": [[7, 7], [3], [9, 4, 9]]},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
)


def test_banned_pairs_of_the_readmes_prompt(tiny_model_float64: MRPForCausalLM, tiny_tokenizer: Any) -> None:
    """Each pair of the text is forbidden in turn: it does not appear, in whichever order its tokens come, and the drafted text
    is the target's. Some targets take each third pair."""
    chat = [{"role": "user", "content": "Ana has 3 pens. Ana buys 4 more. Bo gives Ana 2 more. How many pens does Ana have?"}]
    prompt = tiny_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    for target, every in (("static", 1), ("dynamic", 3), ("entropy_bound", 3), ("sequential", 3)):
        options: dict[str, Any] = {"max_new_tokens": 24, "confidence_threshold": 0.6}
        ((plain, *_),) = decode(tiny_model_float64, [prompt], decoding=target, **options)
        pairs = list(dict.fromkeys(itertools.pairwise(plain)))[::every]
        assert len(pairs) > 3
        for pair in pairs:
            options["bad_words_ids"] = [list(pair)]
            ((tokens, *_),) = decode(tiny_model_float64, [prompt], decoding=target, **options)
            assert pair not in itertools.pairwise(tokens)
            assert pair not in itertools.pairwise([*prompt[-1:], *tokens])
            ((drafted, *_),) = decode(tiny_model_float64, [prompt], decoding="mrp_spec", target=target, **options)
            assert drafted == tokens


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("sampled", [False, True])
def test_bans_from_left_to_right_are_transformers_own(options: dict[str, Any], sampled: bool) -> None:
    """Under `sequential`, drafted or not: what its processors do to an autoregressive model."""
    (name, value), rng, acted = next(iter(options.items())), random.Random(1), 0
    kinds: dict[str, Any] = {"bad_words_ids": NoBadWordsLogitsProcessor, "no_repeat_ngram_size": NoRepeatNGramLogitsProcessor}
    for trial in range(6):
        model = dampened(make_model(trial, block_size=rng.choice((4, 8))), 0.5)
        (prompt,) = random_prompts(rng, 1)
        given = {
            "decoding": "sequential",
            "max_new_tokens": 25,
            "do_sample": sampled,
            "top_k": 0,
            "temperature": 0.3,
            "seed": 5,
        }
        theirs = reference_decode(model, prompt, logits_processor=[kinds[name](value)], **given).tokens
        acted += theirs != reference_decode(model, prompt, **given).tokens
        for changed in (
            {},
            {"decoding": "mrp_spec", "target": "sequential"},
            {"decoding": "self_spec", "target": "sequential"},
        ):
            ((tokens, *_),) = decode(model, [prompt], **{**given, **changed, **options})
            assert tokens == theirs
    assert acted > 0


@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_sequence_comes_twice(mode: str, size: int) -> None:
    """In no mode, and not together with the prompt, whatever a step reveals at once."""
    model = dampened(make_model(3, block_size=8), 0.3)
    options = {"confidence_threshold": 0.03, "entropy_threshold": 6.0, "mrp_steps": 2, "max_new_tokens": 21}
    prompts = [list(range(1, 9)), [7, 8, 9, 10]]
    for steps in (None, 3):
        for prompt, (tokens, *_) in zip(
            prompts,
            decode(model, prompts, decoding=mode, no_repeat_ngram_size=size, denoising_steps=steps, **options),
            strict=True,
        ):
            text = prompt + tokens
            found = [tuple(text[i : i + size]) for i in range(len(text) - size + 1)]
            assert len(set(found)) == len(found)
