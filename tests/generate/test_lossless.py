"""Speculation on the embedded checkpoint gives exactly the tokens of its target: held-out prompts, float64."""

from typing import Any

import pytest
from helpers import texts
from mrp_trainer.data.problems import encode
from mrp_trainer.data.tasks import FAMILIES, problems

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import PUBLISHED, TARGETS

PROMPTS_PER_FAMILY = 15
NEW_TOKENS = 32
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}


@pytest.fixture(scope="module")
def prompts(tiny_tokenizer: Any) -> list[list[int]]:
    asked = [problem for family in FAMILIES for problem in problems(family, "heldout", PROMPTS_PER_FAMILY)]
    return [encode(problem, tiny_tokenizer)[0] for problem in asked]


@pytest.mark.parametrize(("target", "options"), [(target, ({}, SAMPLED)[place % 2]) for place, target in enumerate(TARGETS)])
def test_mrp_spec_equals_its_target(
    target: str, options: dict[str, Any], prompts: list[list[int]], tiny_model_float64: MRPForCausalLM
) -> None:
    """Of each target and sampling other prompts, in batches of 1 and 4; K from 2 to 6 takes its turn. Of the rules from papers
    two prompts each: the fuzz has more."""
    begin, read = 7 * (TARGETS.index(target) % 5), 0
    for width, size in ((4, 2),) if target in PUBLISHED else ((2, 1), (4, 4), (6, 1)):
        asked, seeds = prompts[begin : begin + size], list(range(begin, begin + size))
        begin += size
        given = {"seed": seeds, "max_new_tokens": NEW_TOKENS, **options}
        alone = texts(tiny_model_float64, asked, decoding=target, **given)
        assert texts(tiny_model_float64, asked, decoding="mrp_spec", target=target, num_draft_states=width, **given) == alone
        read += sum(map(len, alone))
    assert read > (30 if target in PUBLISHED else 100)  # the test has seen real text
