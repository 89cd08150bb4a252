"""Where `generate`'s options come from: the call, a configuration object, the model's own, or a file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import PROMPTS, generate, text
from transformers import GenerationConfig

from modeling_mrp import MRPForCausalLM, MRPGenerationConfig

FIELDS: dict[str, Any] = {"decoding": "mrp_spec", "num_draft_states": 6, "denoising_steps": 2, "seed": 11}
SAMPLED: dict[str, Any] = {**FIELDS, "max_new_tokens": 12, "do_sample": True, "top_k": 0}
CLASSES = pytest.mark.parametrize("config_class", [MRPGenerationConfig, GenerationConfig])


def same(a: Any, b: Any) -> bool:
    """Whether two calls gave the same text at the same cost."""
    return a.sequences.equal(b.sequences) and a.stats.forwards == b.stats.forwards and a.reveal_step.equal(b.reveal_step)


@CLASSES
def test_a_generation_config_object(random_model: MRPForCausalLM, config_class: type[GenerationConfig], tmp_path: Path) -> None:
    """As it was made and as it was saved; arguments go before it."""
    options, ids = {**SAMPLED, "return_dict_in_generate": True}, torch.tensor([PROMPTS[0]])
    expected = random_model.generate(ids, **options)
    assert expected.stats.forwards["head"] > 0
    config = config_class(**options)
    before = config.to_dict()
    config.save_pretrained(tmp_path)
    loaded = config_class.from_pretrained(tmp_path)
    assert loaded == config
    for given in (config, loaded):
        assert same(random_model.generate(ids, generation_config=given), expected)
        overridden = random_model.generate(ids, generation_config=given, denoising_steps=4, seed=12)
        assert same(overridden, random_model.generate(ids, **{**options, "denoising_steps": 4, "seed": 12}))
        assert not same(overridden, expected)
    assert config.to_dict() == before


@CLASSES
def test_fields_of_the_models_generation_config(
    random_model: MRPForCausalLM, config_class: type[GenerationConfig], tmp_path: Path
) -> None:
    """From a file of whichever class; a call, or an object, goes before them, and leaves to them what it leaves open."""
    model = make_model()
    (tmp_path / "generation_config.json").write_text(json.dumps({**SAMPLED, "max_new_tokens": 3, "pad_token_id": 0}))
    model.generation_config = config_class.from_pretrained(tmp_path)
    expected = generate(random_model, PROMPTS, **SAMPLED)
    assert same(generate(model, PROMPTS, max_new_tokens=12), expected)
    assert same(generate(model, PROMPTS, generation_config=config_class(max_new_tokens=12)), expected)
    changes = {"decoding": "static", "denoising_steps": 4, "seed": 12, "num_draft_states": 1, "do_sample": False}
    for name, value in changes.items():
        overridden = generate(model, PROMPTS, max_new_tokens=12, **{name: value})
        assert same(overridden, generate(random_model, PROMPTS, **{**SAMPLED, name: value}))
        assert not same(overridden, expected)


def test_pad_and_eos_that_an_object_leaves_open_come_from_the_model() -> None:
    model = make_model()
    free = text(model, PROMPTS[0], max_new_tokens=12)
    model.generation_config.eos_token_id = free[4]
    config = MRPGenerationConfig(max_new_tokens=12, decoding="sequential")
    got = model.generate(torch.tensor([PROMPTS[0]]), generation_config=config)[0, 5:].tolist()
    assert got[-1] == free[4]
    assert len(got) < 12
