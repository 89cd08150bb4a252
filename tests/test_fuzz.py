"""Random decodes: speculation gives what its target gives, and a row what it gives alone.

In float64 two tokens or positions whose scores agree to the last bits do not come up, so there is no false alarm: a
difference is a bug.
"""

import random

import pytest

from benchmarks.random_cases import (
    assert_same_text,
    decode_rows,
    random_case_model,
    random_drafting,
    random_infill,
    random_options,
)
from modeling_mrp.generate.option_table import TARGETS

SEEDS, CASES = 24, 3


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("mode", ["mrp_spec", "self_spec"])
def test_random_decodes(mode: str, seed: int) -> None:
    rng = random.Random(f"{mode}{seed}")
    model = random_case_model(rng)
    block = model.config.block_size
    for trial in range(CASES):
        count = rng.randint(1, 5)
        prompts = [[rng.randrange(1, 50) for _ in range(rng.randint(1, 2 * block + 3))] for _ in range(count)]
        options = random_options(rng, block, sampled=bool((seed // 4 + trial) % 2))
        infill = random_infill(rng, count, options["max_new_tokens"])
        seeds = [rng.randrange(1 << 62) for _ in range(count)]
        drafting = random_drafting(rng)
        target = TARGETS[(seed + trial) % len(TARGETS)]
        case = (trial, target, options, drafting, infill, count)
        plain, _ = decode_rows(model, prompts, rng.choice(("left", "right")), infill, decoding=target, seed=seeds, **options)
        options |= {"decoding": mode, "target": target, **drafting}
        drafted, _ = decode_rows(model, prompts, rng.choice(("left", "right")), infill, seed=seeds, **options)
        for a, b in zip(plain, drafted, strict=True):
            assert_same_text(a, b, case)
        for row in rng.sample(range(count), min(count, 2)):
            own = None if infill is None else infill[row : row + 1]
            (alone,), _ = decode_rows(model, [prompts[row]], "left", own, seed=[seeds[row]], **options)
            assert_same_text(alone, drafted[row], case)
            if drafting["num_draft_states"] != "auto":
                assert alone["costs"] == drafted[row]["costs"], case
