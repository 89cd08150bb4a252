"""Where `generate`'s options come from: the call, a configuration object, the model's own, or a file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import PROMPTS, generate, text
from transformers import GenerationConfig

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.generation import MRPGenerationConfig

FIELDS: dict[str, Any] = {"decoding": "mrp_spec", "num_draft_states": 6, "denoising_steps": 2, "seed": 11}


def same(a: Any, b: Any) -> bool:
    """Whether two calls gave the same text at the same cost."""
    return a.sequences.equal(b.sequences) and a.stats.forwards == b.stats.forwards and a.reveal_step.equal(b.reveal_step)


@pytest.mark.parametrize("config_class", [MRPGenerationConfig, GenerationConfig])
def test_a_generation_config_object(random_model: MRPForCausalLM, config_class: type[GenerationConfig]) -> None:
    options = {"max_new_tokens": 12, "do_sample": True, "top_k": 0, "return_dict_in_generate": True, **FIELDS}
    ids = torch.tensor([PROMPTS[0]])
    expected = random_model.generate(ids, **options)
    assert expected.stats.forwards["head"] > 0
    config = config_class(**options)
    before = config.to_dict()
    assert same(random_model.generate(ids, generation_config=config), expected)
    overridden = random_model.generate(ids, generation_config=config, denoising_steps=4, seed=12)
    assert same(overridden, random_model.generate(ids, **{**options, "denoising_steps": 4, "seed": 12}))
    assert not same(overridden, expected)
    assert config.to_dict() == before


@pytest.fixture
def configured_model(tmp_path: Path) -> MRPForCausalLM:
    """A model whose generation_config.json holds the fields, read as transformers reads it."""
    model = make_model()
    (tmp_path / "generation_config.json").write_text(json.dumps({**FIELDS, "pad_token_id": 0, "do_sample": True, "top_k": 0}))
    model.generation_config = GenerationConfig.from_pretrained(tmp_path)
    assert type(model.generation_config) is GenerationConfig
    return model


def test_fields_of_the_models_generation_config(random_model: MRPForCausalLM, configured_model: MRPForCausalLM) -> None:
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "top_k": 0, **FIELDS}
    expected = generate(random_model, PROMPTS, **options)
    assert same(generate(configured_model, PROMPTS, max_new_tokens=12), expected)
    changes = {"decoding": "static", "denoising_steps": 4, "seed": 12, "num_draft_states": 1, "do_sample": False}
    for name, value in changes.items():
        overridden = generate(configured_model, PROMPTS, max_new_tokens=12, **{name: value})
        assert same(overridden, generate(random_model, PROMPTS, **{**options, name: value}))
        assert not same(overridden, expected)


@pytest.mark.parametrize("config_class", [GenerationConfig, MRPGenerationConfig])
def test_what_an_object_leaves_open_comes_from_the_model(
    configured_model: MRPForCausalLM, config_class: type[GenerationConfig]
) -> None:
    ids = torch.tensor([PROMPTS[0]])
    expected = configured_model.generate(ids, max_new_tokens=12, return_dict_in_generate=True)
    config = config_class(max_new_tokens=12, return_dict_in_generate=True)
    assert same(configured_model.generate(ids, generation_config=config), expected)


def test_pad_and_eos_that_an_object_leaves_open_come_from_the_model() -> None:
    model = make_model()
    free = text(model, PROMPTS[0], max_new_tokens=12)
    model.generation_config.eos_token_id = free[4]
    config = MRPGenerationConfig(max_new_tokens=12, decoding="sequential")
    got = model.generate(torch.tensor([PROMPTS[0]]), generation_config=config)[0, 5:].tolist()
    assert got[-1] == free[4]
    assert len(got) < 12


def test_a_config_survives_saving(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "decoding": "mrp_remask",
        "denoising_steps": 3,
        "confidence_threshold": 0.04,
        "entropy_threshold": 0.5,
        "mrp_steps": 2,
        "num_draft_states": 7,
        "remask_rule": "residual",
        "residual_delta": 0.25,
        "kernels": True,
        "seed": [4, 5, 6],
        "max_new_tokens": 9,
        "do_sample": True,
        "top_k": 0,
        "pad_token_id": 0,
    }
    defaults = MRPGenerationConfig()
    saved = MRPGenerationConfig(**fields)
    saved.save_pretrained(tmp_path)
    loaded = MRPGenerationConfig.from_pretrained(tmp_path)
    assert type(loaded) is MRPGenerationConfig
    for name, value in fields.items():
        assert getattr(defaults, name) != value, "a default would survive without being saved"
        assert getattr(loaded, name) == value
    assert loaded == saved


@pytest.mark.parametrize("config_class", [GenerationConfig, MRPGenerationConfig])
def test_a_config_read_from_a_file(tmp_path: Path, random_model: MRPForCausalLM, config_class: type[GenerationConfig]) -> None:
    fields: dict[str, Any] = {**FIELDS, "max_new_tokens": 9, "do_sample": True, "top_k": 0, "return_dict_in_generate": True}
    config_class(**fields).save_pretrained(tmp_path)
    ids = torch.tensor([PROMPTS[0]])
    loaded = random_model.generate(ids, generation_config=config_class.from_pretrained(tmp_path))
    assert same(loaded, random_model.generate(ids, **fields))
