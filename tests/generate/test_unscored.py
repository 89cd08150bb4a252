"""Where no token has a finite score `generate` ends in an error that says where and why; never in a loop, never in a text."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import LIVELY, MASK, MODES, PROMPTS, VOCAB, generate, says_all, texts
from refusals import rejected

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import REMASK_RULES

NAN, INF = float("nan"), float("inf")
REMASKS: list[dict[str, Any]] = [{"decoding": "mrp_remask", "remask_rule": rule} for rule in REMASK_RULES]


def broken(name: str, number: float) -> Callable[[MRPForCausalLM], dict[str, Any]]:
    """Puts a number into the last column of one weight."""

    def change(model: MRPForCausalLM) -> dict[str, Any]:
        with torch.no_grad():
            model.get_parameter(name)[..., -1] = number
        return {}

    return change


CAUSES: dict[str, tuple[Callable[[MRPForCausalLM], dict[str, Any]], str]] = {
    "all suppressed": (lambda _: {"suppress_tokens": list(range(VOCAB))}, r"processors \(SuppressTokensLogitsProcessor\)"),
    "every id an eos": (lambda _: {"eos_token_id": [], "min_new_tokens": 3}, r"eos_token_id is barred before min_new"),
    "processor NaN": (lambda _: says_all(NAN), r"logits processors \(Says\).*a finite score"),
    "processor -inf": (lambda _: says_all(-INF), r"logits processors \(Says\).*a finite score"),
    "lm_head NaN": (broken("lm_head.weight", NAN), "weights are NaN or infinite: load or train"),
    "backbone inf": (broken("model.norm.weight", INF), "weights are NaN or infinite: load"),
    "temperature": (lambda _: {"do_sample": True, "temperature": 1e-308}, r"torch.float64 overflows.*temperature=1e-308"),
}


@pytest.mark.parametrize(("cause", "mode"), [(cause, MODES[place % len(MODES)]) for place, cause in enumerate(CAUSES)])
def test_no_finite_score(cause: str, mode: str) -> None:
    """Also if the mask's id is what an arg max over nothing gives."""
    for mask_id in (0, MASK):
        model = make_model(mask_token_id=mask_id)
        change, why = CAUSES[cause]
        options = {"decoding": mode, "max_new_tokens": 6, **change(model)}
        if "eos_token_id" in options:
            options["eos_token_id"] = [id for id in range(VOCAB) if id != mask_id]
        call = partial(generate, model, [[5, 6, 7, 8], [9, 10, 11, 12]], **options)
        rejected(call, r"row [01] has no token with a finite score at position", why)


@pytest.mark.parametrize("mode", MODES)
def test_where_it_is_said_to_be(mode: str) -> None:
    """A processor that gives up behind the first block: at the row and position where that begins."""
    call = partial(generate, make_model(), PROMPTS, decoding=mode, max_new_tokens=9, seed=1, **LIVELY, **says_all(-INF, 12))
    rejected(call, "row 2 has no token with a finite score at position 1[2-5], [2-5] behind its prompt", "Says")


@pytest.mark.parametrize("options", [{"decoding": "mrp_direct"}, *REMASKS], ids=str)
def test_a_broken_head(options: dict[str, Any]) -> None:
    """Where the head has a say in the text its NaN is an error; drafts are worth nothing then, and the text is the same."""
    model = make_model()
    options = {"max_new_tokens": 9, **LIVELY, "seed": 2, **options}
    plain = texts(model, PROMPTS, **{**options, "decoding": "static"})
    broken("mrp_head.layers.1.mlp.up_proj.weight", NAN)(model)
    rejected(lambda: texts(model, PROMPTS, **options), r"row \d has no token", "weights are NaN or infinite")
    assert texts(model, PROMPTS, **{**options, "decoding": "mrp_spec"}) == plain


@pytest.mark.parametrize("mode", ["entropy_bound", "mrp_spec", "mrp_remask"])
def test_one_token_that_is_left_is_certain(random_model: MRPForCausalLM, mode: str) -> None:
    """Its log-odds are infinite, and legitimately so."""
    only = {"decoding": mode, "max_new_tokens": 6, "suppress_tokens": [id for id in range(VOCAB) if id != 9]}
    out = generate(random_model, PROMPTS, **only)
    assert out.sequences[:, -6:].eq(9).all()
    assert out.token_logprobs.eq(0).all()


def test_a_shortlist_of_which_nothing_may_be_picked() -> None:
    """The one token that the head may draft is barred before the minimum length: no error, and the same text."""
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[9] *= 9
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "eos_token_id": 9}
    drafted = texts(model, PROMPTS, decoding="mrp_spec", draft_shortlist=1, **options)
    assert drafted == texts(model, PROMPTS, decoding="static", **options)


def test_a_cache_is_as_good_as_before() -> None:
    """What is not finite in it does not reach the next call: a masked slot enters attention with a weight of 0."""
    model = make_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[33] = NAN
    options = {"decoding": "mrp_spec", "max_new_tokens": 5, "suppress_tokens": [33]}
    first = generate(model, PROMPTS[:1], **options)
    cache = copy.deepcopy(first.past_key_values)
    rejected(lambda: generate(model, [[*PROMPTS[0], 33]], past_key_values=cache, **options), "row 0", "weights are NaN")
    again = generate(model, PROMPTS[:1], past_key_values=cache, **options)
    assert torch.equal(again.sequences, first.sequences)
