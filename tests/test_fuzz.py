"""Random decodes: speculation gives what its target gives, and a row what it gives alone.

In float64 two tokens or positions whose scores agree to the last bits do not come up, so there is no false alarm: a
difference is a bug.
"""

import random
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import MASK, VOCAB
from test_decoding import batch_of, dampened

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import TARGETS

SEEDS, CASES = 24, 3
# What a decode cost each row.
COSTS = ("row_forwards", "row_head_forwards", "drafted", "accepted", "accepted_lengths")


def random_case_model(rng: random.Random) -> MRPForCausalLM:
    """Random weights, whose drafts are nearly always wrong, or often right where tokens look at each other but a little."""
    seed = rng.randrange(1 << 16)
    draft_vocab_size = rng.choice((0, 0, 1, 9, 40))
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    layers = {"num_hidden_layers": rng.choice((1, 2)), "num_nextn_predict_layers": rng.choice((1, 2))}
    block_size = rng.choice((4, 8, 16, 32))
    model = make_model(seed, block_size=block_size, draft_vocab_size=draft_vocab_size, **shape, **layers)
    assert model.mrp_head is not None
    if model.mrp_head.draft_token_ids is not None:
        ids = rng.sample([i for i in range(VOCAB) if i != MASK], draft_vocab_size)
        model.mrp_head.draft_token_ids.copy_(torch.tensor(ids))
    calm = rng.choice((1.0, 0.3, 0.05))
    torch.nn.init.normal_(model.mrp_head.norm.weight, std=0.3 * calm)
    return dampened(model, calm)


def random_options(rng: random.Random, block: int, sampled: bool) -> dict[str, Any]:
    """What changes the text."""
    options: dict[str, Any] = {
        "max_new_tokens": rng.randint(1, 2 * min(block, 16) + 3),
        "denoising_steps": rng.choice((None, None, 1, 2, 3, rng.randint(1, block))),
        "confidence_threshold": rng.choice((0.0, 0.02, 0.05, 0.2, 0.9)),
        "entropy_threshold": rng.choice((0.0, 2.0, 5.0, 12.0)),
        "eos_token_id": rng.choice((None, [3, 5], list(range(1, 12)), rng.sample(range(50), 25))),
    }
    if rng.random() < 0.3 and options["eos_token_id"]:
        options["min_new_tokens"] = rng.randint(1, options["max_new_tokens"])
    if sampled:
        options |= {
            "do_sample": True,
            "temperature": rng.choice((0.3, 0.7, 1.0, 1.7)),
            "top_k": rng.choice((0, 0, 1, 5, 50)),
            "top_p": rng.choice((1.0, 1.0, 0.5, 0.9)),
        }
    return options


def random_drafting(rng: random.Random, rows: int, block: int) -> dict[str, Any]:
    """What does not change the text."""
    width = rng.randint(1, 12)
    return {
        "num_draft_states": width,
        "draft_branches": rng.randint(1, 6),
        "draft_passes": rng.randint(1, width),
        "compute_bound_tokens": rng.choice((None, None, rng.randint(1, 2 * width * rows * block))),
    }


def random_infill(rng: random.Random, rows: int, most: int) -> torch.Tensor | None:
    """Given tokens and masks that continue each prompt, sometimes whole blocks of either."""
    if rng.random() < 0.6:
        return None
    count = rng.randint(1, most)
    pattern = []
    for _ in range(rows):
        share, ids = rng.random(), []
        while len(ids) < count:
            run = rng.randint(1, 9)
            ids += [MASK] * run if rng.random() < share else [rng.randrange(1, 50) for _ in range(run)]
        pattern.append(ids[:count])
    return torch.tensor(pattern)


def decode_rows(
    model: MRPForCausalLM, prompts: list[list[int]], side: str, infill: torch.Tensor | None, **options: Any
) -> tuple[list[dict[str, Any]], Any]:
    """What every row got (tokens, steps, log-probabilities) and cost, and the whole output."""
    inputs = batch_of(prompts, side)
    out = model.generate(**inputs, infill_ids=infill, return_dict_in_generate=True, **options)
    width = inputs["input_ids"].shape[1]
    rows = []
    for row in range(len(prompts)):
        got = {
            "tokens": out.sequences[row, width:].tolist(),
            "steps": out.reveal_step[row].tolist(),
            "logprobs": out.token_logprobs[row],
        }
        rows.append(got | {"costs": [getattr(out.stats, name)[row].tolist() for name in COSTS]})
    return rows, out


def assert_same_text(a: dict[str, Any], b: dict[str, Any], case: Any) -> None:
    """Alone a row is as long as its text, in a batch it may be padded."""
    count = min(len(a["steps"]), len(b["steps"]))
    assert a["tokens"][:count] == b["tokens"][:count], case
    assert a["steps"][:count] == b["steps"][:count], case
    assert all(step == -1 for step in a["steps"][count:] + b["steps"][count:]), case
    torch.testing.assert_close(a["logprobs"][:count], b["logprobs"][:count], rtol=0, atol=1e-5)


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
        drafting = random_drafting(rng, count, block)
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
            if drafting["compute_bound_tokens"] is None:
                assert alone["costs"] == drafted[row]["costs"], case
