"""Configs, forwards and checkpoints that are refused, by errors that name the value and the remedy."""

import re
from typing import Any

import pytest
import torch
from refusals import EMBEDS, PROMPT, ForwardRan, headless, model, rejected

from modeling_mrp import MRPConfig, MRPForCausalLM

__all__ = ["headless", "model"]  # fixtures

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "mask_token_id": 60}
CONFIGS: dict[str, tuple[list[Any], str]] = {
    "block_size": ([0, -4, 2.5, "x"], "at least 1|an int"),
    "mask_token_id": ([64, 1000, -1, None], "the id of the tokenizer's mask token"),
    "num_nextn_predict_layers": ([-1, 1.5], "0: no head"),
    "num_mrp_heads": ([2], "at most 1: one head serves every draft depth"),
    "layer_types": ([["sliding_attention", "full_attention"]], "needs 'full_attention' in each of the 2 layers"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configuration(name: str) -> None:
    for value in CONFIGS[name][0]:
        said = f"{name} is {re.escape(repr(value))}"
        rejected(lambda value=value: MRPConfig(**{**SMALL, name: value}), said, CONFIGS[name][1])


# Forwards: arguments, and what is said of them.
LABELS = {"input_ids": PROMPT, "labels": PROMPT}
ALONE = "no effect with labels, whose pass packs .* of input_ids with a mask and positions of its own"
FORWARDS: list[tuple[dict[str, Any], str]] = [
    ({}, "neither input_ids nor inputs_embeds: pass one of them"),
    *(
        ({"input_ids": PROMPT, "attention_mask": torch.ones(shape)}, rf"has shape \[{shape[0]}, {shape[1]}\].*pass \[1, 5\]")
        for shape in ((1, 4), (1, 7), (2, 5))
    ),
    ({"labels": PROMPT, "inputs_embeds": EMBEDS}, ALONE),
    ({**LABELS, "attention_mask": torch.ones(1, 1, 5, 5)}, ALONE),
    ({**LABELS, "attention_mask": torch.tensor([[1, 0, 1, 1, 1]])}, "has holes.*contiguous, .* one side"),
    ({**LABELS, "attention_mask": torch.tensor([[0, 1, 0, 1, 1]])}, "has holes"),
    ({**LABELS, "attention_mask": torch.ones(1, 4)}, r"attention_mask.*\[1, 5\]"),
    *(
        ({**LABELS, name: value}, f"^{name}: no effect with labels.*Leave out either")
        for name, value in {
            "position_ids": torch.arange(5)[None],
            "inputs_embeds": EMBEDS,
            "logits_to_keep": torch.tensor([0]),
            "use_cache": True,
            "output_hidden_states": True,
            "output_attentions": True,
            "cache_position": torch.arange(5),
        }.items()
    ),
    ({**LABELS, "logits_to_keep": 1}, "^logits_to_keep: no effect with labels"),
    ({"input_ids": PROMPT, "noise_level": torch.ones(1)}, "^noise_level: no effect without labels.*Pass them too"),
    ({"input_ids": PROMPT, "noise_mask": PROMPT > 0}, "^noise_mask: no effect without labels"),
    ({"input_ids": PROMPT, "attention_masks": 5}, "no argument attention_masks: check the spelling"),
    ({**LABELS, "junk": 5}, "no argument junk"),
    ({**LABELS, "noise_level": torch.tensor([0.0])}, r"noise_level is \[0.0\]: levels are above 0 and at most 1"),
    ({**LABELS, "noise_level": torch.tensor([1.01])}, r"noise_level is \[1.0\d*\]: levels"),
    ({**LABELS, "noise_level": torch.tensor([float("nan")])}, r"noise_level is \[nan\]: levels"),
    ({**LABELS, "noise_level": torch.ones(2)}, r"noise_level has shape \[2\]: .* must be \[1\]"),
    ({**LABELS, "noise_mask": torch.ones(1, 4).bool()}, r"noise_mask has shape \[1, 4\]: .* must be \[1, 5\]"),
]


@pytest.mark.parametrize(("given", "said"), FORWARDS)
def test_forwards(model: MRPForCausalLM, given: dict[str, Any], said: str) -> None:
    rejected(lambda: model(**given), said, "")


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False, "output_attentions": None, "output_hidden_states": None, "return_dict": None},  # as peft calls
        {"num_items_in_batch": 3, "use_cache": None, "position_ids": None, "logits_to_keep": 0, "junk": None},
        {"return_dict": True, "output_attentions": False, "output_hidden_states": False},
        {"noise_level": torch.ones(1), "noise_mask": PROMPT > 0},
    ],
    ids=str,
)
def test_what_callers_pass_whatever_the_model(model: MRPForCausalLM, options: dict[str, Any]) -> None:
    calls = [{"labels": PROMPT}] if {"noise_level", "num_items_in_batch"} & options.keys() else [{}, {"labels": PROMPT}]
    for call in calls:
        with pytest.raises(ForwardRan):
            model(PROMPT, **call, **options)


def test_caches(model: MRPForCausalLM, headless: MRPForCausalLM) -> None:
    cache = model.block_cache(1, 8, 8, with_head=False)
    rejected(lambda: model(PROMPT, past_key_values=cache), "are a BlockCache, which only generate", "DynamicCache")
    rejected(lambda: model(**LABELS, past_key_values=cache), ALONE, "")
    rejected(lambda: model.block_cache(1, 10, 8, with_head=True), "capacity is 10", "a multiple of the block size, 4")
    rejected(lambda: headless.block_cache(1, 8, 8, with_head=True), "no MRP head", "pass with_head=False")


def test_residual_without_a_head(headless: MRPForCausalLM) -> None:
    positions, mask = torch.arange(5)[None], torch.ones(1, 1, 5, 5, dtype=torch.bool)
    call = (PROMPT, EMBEDS, positions, mask)
    rejected(lambda: headless.residual(*call), "num_nextn_predict_layers is 0", "load one .* or train a head")
