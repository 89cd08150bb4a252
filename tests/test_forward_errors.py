"""Configs, forwards and checkpoints that are refused, by errors that name the value and the remedy."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from refusals import EMBEDS, PROMPT, ForwardRan, headless, model, rejected
from safetensors.torch import load_file, save_file
from torch import Tensor

from modeling_mrp import MRPConfig, MRPForCausalLM

__all__ = ["headless", "model"]  # fixtures


def config(**overrides: Any) -> MRPConfig:
    return MRPConfig(**{"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "mask_token_id": 60, **overrides})


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("block_size", 0, r"at least 1"),
        ("block_size", -4, r"at least 1"),
        ("block_size", 2.5, r"at least 1|an int"),
        ("block_size", "x", r"at least 1|an int"),
        ("mask_token_id", 64, r"at most 63: the id of the tokenizer's mask token"),
        ("mask_token_id", None, r"the id of the tokenizer's mask token"),
        ("num_nextn_predict_layers", 1.5, r"0: no head"),
        ("num_mrp_heads", 2, r"at most 1: one head serves every draft depth"),
        ("layer_types", ["sliding_attention", "full_attention"], r"needs 'full_attention' in each of the 2 layers"),
    ],
)
def test_configuration(name: str, value: Any, remedy: str) -> None:
    rejected(lambda: config(**{name: value}), rf"{name} is {re.escape(repr(value))}", remedy)


def test_layers_that_qwen_would_make_sliding() -> None:
    """Without layer_types, Qwen3 derives them: here a window from layer 1 on."""
    rejected(
        lambda: config(use_sliding_window=True, sliding_window=4, max_window_layers=1),
        r"layer_types is \['full_attention', 'sliding_attention'\]",
        r"needs 'full_attention' in each of the 2 layers",
    )


# Forwards


def test_forward_without_inputs(model: MRPForCausalLM) -> None:
    rejected(lambda: model(), r"neither input_ids nor inputs_embeds", r"pass one of them")


@pytest.mark.parametrize("shape", [(1, 4), (1, 7), (2, 5)])
def test_forward_with_a_mask_of_wrong_shape(model: MRPForCausalLM, shape: tuple[int, int]) -> None:
    rejected(
        lambda: model(PROMPT, attention_mask=torch.ones(shape)),
        rf"attention_mask has shape \[{shape[0]}, {shape[1]}\]",
        r"pass \[1, 5\]",
    )


@pytest.mark.parametrize("given", ["cache", "embeds", "4-D mask"])
def test_labels_with_what_does_not_go_with_them(model: MRPForCausalLM, given: str) -> None:
    inputs: dict[str, Any] = {
        "cache": {"input_ids": PROMPT, "past_key_values": model.block_cache(1, 8, 8, with_head=False)},
        "embeds": {"inputs_embeds": EMBEDS},
        "4-D mask": {"input_ids": PROMPT, "attention_mask": torch.ones(1, 1, 5, 5)},
    }[given]
    rejected(
        lambda: model(labels=PROMPT, **inputs), r"labels need", r"input_ids with a 2-D attention_mask and no past_key_values"
    )


@pytest.mark.parametrize("mask", [[1, 0, 1, 1, 1], [0, 1, 0, 1, 1]], ids=str)
def test_labels_with_holes_between_tokens(model: MRPForCausalLM, mask: list[int]) -> None:
    rejected(
        lambda: model(PROMPT, labels=PROMPT, attention_mask=torch.tensor([mask])), r"has holes", r"contiguous, .* one side"
    )


def test_labels_with_a_mask_of_wrong_length(model: MRPForCausalLM) -> None:
    rejected(lambda: model(PROMPT, labels=PROMPT, attention_mask=torch.ones(1, 4)), r"attention_mask", r"\[1, 5\]")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_ids", torch.arange(5)[None]),
        ("inputs_embeds", EMBEDS),
        ("logits_to_keep", 1),
        ("logits_to_keep", torch.tensor([0])),
        ("use_cache", True),
        ("output_hidden_states", True),
        ("output_attentions", True),
        ("cache_position", torch.arange(5)),
    ],
    ids=str,
)
def test_arguments_without_effect_beside_labels(model: MRPForCausalLM, name: str, value: Any) -> None:
    rejected(lambda: model(PROMPT, labels=PROMPT, **{name: value}), rf"^{name}: no effect with labels", "Leave out either")


@pytest.mark.parametrize(("name", "value"), [("noise_level", torch.ones(1)), ("noise_mask", PROMPT > 0)])
def test_noise_without_labels(model: MRPForCausalLM, name: str, value: Tensor) -> None:
    rejected(lambda: model(PROMPT, **{name: value}), rf"^{name}: no effect without labels", "Pass labels too")


@pytest.mark.parametrize("labels", [None, PROMPT], ids=["logits", "loss"])
@pytest.mark.parametrize("name", ["junk", "attention_masks"])
def test_arguments_that_are_unknown(model: MRPForCausalLM, labels: Tensor | None, name: str) -> None:
    rejected(lambda: model(PROMPT, labels=labels, **{name: 5}), rf"no argument {name}", "check the spelling")


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


@pytest.mark.parametrize(
    ("noise", "value"),
    [
        ({"noise_level": torch.tensor([0.0])}, r"noise_level is \[0.0\]: levels are above 0 and at most 1"),
        ({"noise_level": torch.tensor([float("nan")])}, r"noise_level is \[nan\]: levels"),
        ({"noise_level": torch.ones(2)}, r"noise_level has shape \[2\]: .* must be \[1\]"),
        ({"noise_mask": torch.ones(1, 4).bool()}, r"noise_mask has shape \[1, 4\]: .* must be \[1, 5\]"),
    ],
)
def test_noise(model: MRPForCausalLM, noise: dict[str, Tensor], value: str) -> None:
    rejected(lambda: model(PROMPT, labels=PROMPT, **noise), value, "must be|levels")


def test_the_cache_of_a_generate(model: MRPForCausalLM) -> None:
    cache = model.block_cache(1, 8, 8, with_head=False)
    rejected(lambda: model(PROMPT, past_key_values=cache), "are a BlockCache, which only generate", "DynamicCache")


@pytest.mark.parametrize(
    ("sizes", "value", "remedy"),
    [
        ((0, 8, 8), "batch_size is 0", "an int of 1 or more"),
        ((1 << 63, 8, 8), "batch_size is 9223372036854775808", r"below 2\*\*31"),
        ((1, -5, 7), "capacity is -5", "an int of 1 or more"),
        ((1, 8, 0), "scratch is 0", "an int of 1 or more"),
        ((1, 8.0, 8), "capacity is 8.0", "an int of 1 or more"),
        ((True, 8, 8), "batch_size is True", "an int of 1 or more"),
        ((1, 10, 8), "capacity is 10", "a multiple of the block size, 4"),
    ],
)
def test_a_cache_of_no_size(model: MRPForCausalLM, sizes: tuple[Any, Any, Any], value: str, remedy: str) -> None:
    rejected(lambda: model.block_cache(*sizes, with_head=True), value, remedy)


def test_residual_without_a_head(headless: MRPForCausalLM) -> None:
    positions, mask = torch.arange(5)[None], torch.ones(1, 1, 5, 5, dtype=torch.bool)
    rejected(
        lambda: headless.residual(PROMPT, EMBEDS, positions, mask),
        r"num_nextn_predict_layers is 0",
        r"load one .* or train a head",
    )


# Checkpoints


@pytest.mark.parametrize("options", [{}, {"num_nextn_predict_layers": 0}, {"tie_word_embeddings": True}], ids=str)
def test_an_intact_checkpoint_loads(options: dict[str, Any], tmp_path: Path) -> None:
    saved = make_model(**options)
    saved.save_pretrained(tmp_path)
    loaded = MRPForCausalLM.from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == saved.state_dict().keys()
    assert all(torch.equal(loaded[name].double(), tensor) for name, tensor in saved.state_dict().items())


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def holding(name: str, *shape: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, name: torch.zeros(shape)}


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (without("model.layers.1.mlp.up_proj.weight"), r"missing.*model\.layers\.1\.mlp\.up_proj\.weight"),
        (without("mrp_head.norm.weight"), r"missing.*mrp_head\.norm\.weight"),
        (without("lm_head.weight"), r"missing.*lm_head\.weight"),
        (holding("model.layers.2.mlp.up_proj.weight", 3), r"unexpected.*model\.layers\.2\.mlp\.up_proj\.weight"),
        (holding("mrp_head.layers.2.input_layernorm.weight", 32), r"unexpected.*mrp_head\.layers\.2\.input_layernorm\.weight"),
        (holding("mrp_head.eh_proj.weight", 3, 5), r"shape.*mrp_head\.eh_proj\.weight.*\[3, 5\]"),
        (holding("model.embed_tokens.weight", 65, 32), r"shape.*model\.embed_tokens\.weight.*\[65, 32\]"),
    ],
    ids=["no backbone", "no head", "no lm_head", "more backbone", "more head", "other head shape", "other vocabulary"],
)
def test_a_checkpoint_that_does_not_fit(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], value: str, tmp_path: Path
) -> None:
    make_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    message = rejected(
        lambda: MRPForCausalLM.from_pretrained(tmp_path), value, r"Check num_nextn_predict_layers .*config\.json"
    )
    assert len(re.findall(r"\.weight", message)) == 1, "names the tensors that are wrong and no others"


def test_a_cache_for_a_head_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no MRP head: pass with_head=False"):
        make_model(num_nextn_predict_layers=0).block_cache(1, 8, 8, with_head=True)
