"""Speculation on the embedded checkpoint gives exactly the tokens of its target: held-out prompts, float64."""

from typing import Any

import pytest
from conftest import TINY
from mrp_trainer.data import encode
from mrp_trainer.tasks import FAMILIES, problems
from test_decoding import decode

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import TARGETS

pytestmark = pytest.mark.skipif(not TINY.exists(), reason="the embedded checkpoint is not here")

PROMPTS_PER_FAMILY = 15
NEW_TOKENS = 32


@pytest.fixture(scope="module")
def prompts(tiny_tokenizer: Any) -> list[list[int]]:
    asked = [problem for family in FAMILIES for problem in problems(family, "heldout", PROMPTS_PER_FAMILY)]
    return [encode(problem, tiny_tokenizer)[0] for problem in asked]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}], ids=len)
def test_mrp_spec_equals_its_target(
    target: str, options: dict[str, Any], prompts: list[list[int]], tiny_model_float64: MRPForCausalLM
) -> None:
    """Of each target and sampling other prompts, in batches of 1 and 4; every K from 2 to 6 takes its turn."""
    begin, read = 11 * TARGETS.index(target), 0
    for width, size in zip((2, 3, 4, 5, 6), (4, 1, 4, 1, 1), strict=True):
        asked, seeds = prompts[begin : begin + size], list(range(begin, begin + size))
        begin += size
        given = {"seed": seeds, "max_new_tokens": NEW_TOKENS, **options}
        alone = decode(tiny_model_float64, asked, decoding=target, **given)
        drafting = {"decoding": "mrp_spec", "target": target, "num_draft_states": width}
        drafted = decode(tiny_model_float64, asked, "right", **drafting, **given)
        assert [row[:2] for row in drafted] == [row[:2] for row in alone], (width, seeds)
        read += sum(len(tokens) for tokens, *_ in alone)
    assert read > 200  # the test has seen real text
