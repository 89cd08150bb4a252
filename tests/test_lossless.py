"""Speculation on the embedded checkpoint gives exactly the tokens of its target: 90 held-out prompts, float64."""

import itertools
from typing import Any

import pytest
from conftest import TINY
from mrp_trainer.data import encode
from mrp_trainer.tasks import FAMILIES, problems
from test_decoding import decode

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import TARGETS

pytestmark = pytest.mark.skipif(not TINY.exists(), reason="the embedded checkpoint is not here")

PROMPTS_PER_FAMILY = 30
NEW_TOKENS = 32
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "T0.7": {"do_sample": True, "temperature": 0.7, "top_k": 0, "seed": 11},
    "T0.7 top-k top-p": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 12},
    "T1": {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 13},
    "T1, other seed": {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 1 << 40},
    "T1 top-k top-p": {"do_sample": True, "temperature": 1.0, "top_k": 50, "top_p": 0.95, "seed": 14},
}


@pytest.fixture(scope="module")
def prompts(tiny_tokenizer: Any) -> list[list[int]]:
    asked = [problem for family in FAMILIES for problem in problems(family, "heldout", PROMPTS_PER_FAMILY)]
    return [encode(problem, tiny_tokenizer)[0] for problem in asked]


def in_batches(
    model: MRPForCausalLM, prompts: list[list[int]], seeds: list[int], size: int, side: str, **options: Any
) -> list[tuple[list[int], list[int]]]:
    rows = []
    for begin in range(0, len(prompts), size):
        part = slice(begin, begin + size)
        rows += decode(model, prompts[part], side, max_new_tokens=NEW_TOKENS, seed=seeds[part], **options)
    return [(tokens, steps) for tokens, steps, *_ in rows]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=list(SAMPLINGS))
def test_mrp_spec_equals_its_target(sampling: str, prompts: list[list[int]], tiny_model_float64: MRPForCausalLM) -> None:
    """Every batch size, padding side and K from 2 to 6 sees every sampling; each prompt is decoded speculatively once. The
    targets take turns."""
    options = dict(SAMPLINGS[sampling])
    first_seed = options.pop("seed", 0)
    seeds = [first_seed + i for i in range(len(prompts))]
    targets, read = itertools.cycle(TARGETS), 0
    # 40 prompts over 20 variants, a batch each: 30 and 10 of them.
    begin = 0
    for size, side, width in itertools.product((3, 1), ("left", "right"), (2, 3, 4, 5, 6)):
        chosen = list(range(begin, begin + size))
        begin += size
        target = next(targets)
        asked, their_seeds = prompts[chosen[0] : begin], seeds[chosen[0] : begin]
        alone = in_batches(tiny_model_float64, asked, their_seeds, size, "left", decoding=target, **options)
        drafting = {"decoding": "mrp_spec", "target": target, "num_draft_states": width}
        drafted = in_batches(tiny_model_float64, asked, their_seeds, size, side, **drafting, **options)
        for i, row, expected in zip(chosen, drafted, alone, strict=True):
            assert row == expected, f"prompt {i}, {target}, batch {size}, {side} padding, K = {width}"
        read += sum(len(tokens) for tokens, _ in alone)
    assert begin == 40
    assert read > 20 * begin  # the test has seen real text


def test_row_results_do_not_depend_on_the_batch(prompts: list[list[int]], tiny_model_float64: MRPForCausalLM) -> None:
    """Every mode on the trained weights: alone, among seven others, and in another order."""
    chosen = prompts[::11][:8]
    seeds = list(range(len(chosen)))
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    for mode in ("static", "dynamic", "sequential", "entropy_bound", "self_spec", "mrp_direct", "mrp_spec", "mrp_remask"):
        options = {"decoding": mode, "confidence_threshold": 0.5, "do_sample": mode != "static", "top_k": 0}
        together = in_batches(tiny_model_float64, chosen, seeds, 8, "left", **options)
        alone = in_batches(tiny_model_float64, chosen, seeds, 1, "left", **options)
        assert together == alone, mode
        shuffled = in_batches(tiny_model_float64, [chosen[i] for i in order], [seeds[i] for i in order], 8, "right", **options)
        assert shuffled == [together[i] for i in order], mode
