"""Where no token has a finite score `generate` ends in an error that says where and why; never in a
loop, never in a text."""

from typing import Any

import pytest
import torch

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import REMASK_RULES
from tests.support.helpers import LIVELY, MASK, MODES, PROMPTS, VOCAB, generate, says_all, texts
from tests.support.random_cases import make_model

NAN, INF = float("nan"), float("inf")
REMASKS: list[dict[str, Any]] = [
    {"decoding": "mrp_remask", "remask_rule": rule} for rule in REMASK_RULES
]


def spoil(model: MRPForCausalLM, name: str, number: float) -> None:
    """Puts a number into the last column of one weight."""
    with torch.no_grad():
        model.get_parameter(name)[..., -1] = number


# Options, or a weight and what spoils it.
CAUSES: list[dict[str, Any] | tuple[str, float]] = [
    {"suppress_tokens": list(range(VOCAB))},
    {"eos_token_id": list(range(VOCAB)), "min_new_tokens": 3},
    says_all(NAN),
    says_all(-INF),
    ("lm_head.weight", NAN),
    ("model.norm.weight", INF),
    {"do_sample": True, "temperature": 1e-308},
]


@pytest.mark.parametrize("place", range(len(CAUSES)))
def test_no_finite_score(place: int) -> None:
    """Also if the mask's id is what an arg max over nothing gives."""
    cause = CAUSES[place]
    for mask_id in (0, MASK):
        model, options = (
            make_model(mask_token_id=mask_id),
            {"decoding": MODES[place], "max_new_tokens": 6},
        )
        if isinstance(cause, tuple):
            spoil(model, *cause)
        else:
            options |= cause
        if "eos_token_id" in options:
            options["eos_token_id"] = [id for id in range(VOCAB) if id != mask_id]
        with pytest.raises(
            ValueError,
            match=r"row [01] has no token with a finite score.*processor.*torch.float64: load or "
            r"train",
        ):
            generate(model, [[5, 6, 7, 8], [9, 10, 11, 12]], **options)


@pytest.mark.parametrize("mode", MODES)
def test_where_it_is_said_to_be(mode: str) -> None:
    """A processor that gives up behind the first block: at the row and position where that
    begins."""
    with pytest.raises(
        ValueError,
        match=r"row 2 has no token with a finite score at position 1[2-5], [2-5] behind its",
    ):
        generate(
            make_model(),
            PROMPTS,
            decoding=mode,
            max_new_tokens=9,
            seed=1,
            **LIVELY,
            **says_all(-INF, 12),
        )


@pytest.mark.parametrize("options", [{"decoding": "mrp_direct"}, *REMASKS], ids=str)
def test_a_broken_head(options: dict[str, Any]) -> None:
    """Where the head has a say in the text its NaN is an error; drafts are worth nothing then, and
    the text is the same."""
    model = make_model()
    options = {"max_new_tokens": 9, **LIVELY, "seed": 2, **options}
    plain = texts(model, PROMPTS, **{**options, "decoding": "static"})
    spoil(model, "mrp_head.layers.1.mlp.up_proj.weight", NAN)
    with pytest.raises(ValueError, match=r"row \d has no token with a finite score"):
        texts(model, PROMPTS, **options)
    assert texts(model, PROMPTS, **{**options, "decoding": "mrp_spec"}) == plain
