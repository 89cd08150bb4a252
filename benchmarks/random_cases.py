"""Random models, prompts and options, what a decode of them gave, and whether two gave the same: for tests and the soak."""

import random
from typing import Any

import torch
from transformers import LogitsProcessor

from modeling_mrp import MRPConfig, MRPForCausalLM
from modeling_mrp.generate.option_table import REMASK_RULES

MASK, VOCAB = 60, 64
# What a decode cost each row.
COSTS = ("row_forwards", "row_head_forwards", "drafted", "accepted", "accepted_lengths")


def make_model(seed: int = 0, **overrides: Any) -> MRPForCausalLM:
    """A float64 model with random weights, wide enough to have opinions and a head that says something."""
    options: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "block_size": 4,
        "mask_token_id": 60,
        "num_nextn_predict_layers": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "pad_token_id": 0,
    }
    torch.manual_seed(seed)
    model = MRPForCausalLM(MRPConfig(**{**options, **overrides}))
    if model.mrp_head is not None:
        torch.nn.init.normal_(model.mrp_head.norm.weight, std=0.3)
    model = model.double().eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.num_draft_states = 4  # a number: counts are the same in every run
    return model


def batch_of(prompts: list[list[int]], side: str) -> dict[str, torch.Tensor]:
    """Ids and attention mask of prompts, padded on the `left` or `right`."""
    width = max(map(len, prompts))
    ids, mask = [], []
    for prompt in prompts:
        pad = [0] * (width - len(prompt))
        ids.append(pad + prompt if side == "left" else prompt + pad)
        ones = [1] * len(prompt)
        mask.append(pad + ones if side == "left" else ones + pad)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def dampened(model: MRPForCausalLM, factor: float) -> MRPForCausalLM:
    """Tokens look at each other less, so that a reveal changes little and drafts are often right."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= factor
    return model


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


class Sways(LogitsProcessor):
    """Favours tokens by all that stands before a position, masks too."""

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `LogitsProcessor`."""
        weights = torch.arange(1, input_ids.shape[1] + 1) % 7
        sums = (input_ids * weights).sum(1, keepdim=True)
        return scores + self.strength * ((sums + 5 * torch.arange(scores.shape[1])) % 11)


def random_processors(rng: random.Random) -> dict[str, Any]:
    """Mostly none; else some of transformers' and one of our own."""
    ids = rng.sample(range(1, 50), 6)
    kinds: dict[str, Any] = {
        "repetition_penalty": rng.choice((0.7, 1.3, 2.0)),
        "no_repeat_ngram_size": rng.choice((2, 3)),
        "bad_words_ids": [[ids[0]], ids[1:3], ids[3:6]],
        "suppress_tokens": ids,
        "logits_processor": [Sways(rng.choice((0.1, 1.0)))],
    }
    return {name: kinds[name] for name in rng.sample(list(kinds), rng.choice((0, 0, 0, 1, 2, 3)))}


def random_options(rng: random.Random, block: int, sampled: bool) -> dict[str, Any]:
    """What changes the text."""
    options: dict[str, Any] = {
        "mrp_steps": rng.randint(1, 3),
        "remask_rule": rng.choice(REMASK_RULES),
        "residual_delta": rng.choice((0.2, 1.0)),
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
            **rng.choice(({}, {}, {}, {"min_p": 0.05}, {"typical_p": 0.8})),
        }
    return options | random_processors(rng)


def random_drafting(rng: random.Random) -> dict[str, Any]:
    """What does not change the text."""
    width = rng.randint(1, 12)
    return {
        "num_draft_states": rng.choice((width, width, width, "auto")),
        "draft_branches": rng.randint(1, 6),
        "draft_passes": rng.randint(1, width),
    }


def random_infill(rng: random.Random, rows: int, most: int) -> torch.Tensor | None:
    """Given tokens and masks that continue each prompt, sometimes whole blocks of either."""
    if rng.random() < 0.6:
        return None
    count = rng.randint(1, most)
    pattern = []
    for _ in range(rows):
        share, ids = rng.random(), list[int]()
        while len(ids) < count:
            run = rng.randint(1, 9)
            ids += [MASK] * run if rng.random() < share else [rng.randrange(1, 50) for _ in range(run)]
        pattern.append(ids[:count])
    return torch.tensor(pattern)


def decode_rows(
    model: MRPForCausalLM, prompts: list[list[int]], side: str, infill: torch.Tensor | None, **options: Any
) -> tuple[list[dict[str, Any]], Any]:
    """What every row got (tokens, steps, log-probabilities) and cost, and the whole output."""
    inputs: dict[str, Any] = batch_of(prompts, side)
    out: Any = model.generate(**inputs, infill_ids=infill, return_dict_in_generate=True, **options)
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


__all__ = [
    "COSTS",
    "MASK",
    "VOCAB",
    "Sways",
    "assert_same_text",
    "batch_of",
    "dampened",
    "decode_rows",
    "make_model",
    "random_case_model",
    "random_drafting",
    "random_infill",
    "random_options",
    "random_processors",
]
