"""A repository as `custom_generate` of stock SDAR models: the same text as the MRP model's own, on the same memory."""

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, make_model
from helpers import random_ids
from safetensors.torch import load_file, save_file
from stock import SDARForCausalLM, stock_of
from transformers import AutoModelForCausalLM, PretrainedConfig

from modeling_mrp import MRPForCausalLM


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[MRPForCausalLM, str]:
    """A model, and the folder it was saved to."""
    model = make_model()
    folder = tmp_path_factory.mktemp("saved") / "some-model.v1"
    model.save_pretrained(folder)
    return model, str(folder)


@pytest.mark.parametrize("mode", ["static", "mrp_spec", "mrp_remask"])
def test_a_stock_model_says_what_the_mrp_model_says(saved: tuple[MRPForCausalLM, str], mode: str) -> None:
    model, folder = saved
    options: dict[str, Any] = {"max_new_tokens": 21, "decoding": mode, "do_sample": True, "top_k": 0, "seed": [5, 9]}
    options["num_draft_states"] = 4
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    inputs = {"input_ids": random_ids(1, 2, 7) * mask, "attention_mask": mask}
    expected = model.generate(**inputs, **options, return_dict_in_generate=True)
    out = stock_of(model).generate(
        **inputs, **options, return_dict_in_generate=True, custom_generate=folder, trust_remote_code=True
    )
    assert torch.equal(out.sequences, expected.sequences)
    assert torch.equal(out.token_logprobs, expected.token_logprobs)
    assert out.stats.forwards == expected.stats.forwards
    if mode == "mrp_spec":
        assert int(out.stats.accepted.sum()) > 0


def test_the_parameters_are_shared_and_nothing_else_is_kept(saved: tuple[MRPForCausalLM, str]) -> None:
    model, folder = saved
    stock = stock_of(model)
    options: dict[str, Any] = {"custom_generate": folder, "trust_remote_code": True, "decoding": "mrp_spec"}
    names = set(stock.__dict__)
    out = stock.generate(random_ids(2, 1, 9), **options, max_new_tokens=8, return_dict_in_generate=True)
    around = out.past_key_values.owner()
    ours, theirs = dict(around.named_parameters()), dict(stock.named_parameters())
    assert {name for name in ours if name not in theirs} == {name for name in ours if name.startswith("mrp_head.")}
    assert all(ours[name].data_ptr() == tensor.data_ptr() for name, tensor in theirs.items())
    assert all(tensor.requires_grad for tensor in theirs.values())
    assert set(stock.__dict__) == names
    longer = torch.cat([out.sequences, random_ids(3, 1, 2)], 1)
    again = stock.generate(
        longer, **options, max_new_tokens=8, past_key_values=out.past_key_values, return_dict_in_generate=True
    )
    assert again.past_key_values.owner() is around, "made once"
    assert torch.equal(again.sequences, model.generate(longer, decoding="mrp_spec", max_new_tokens=8))
    gone = weakref.ref(around)
    del out, again, around, ours, theirs, stock
    gc.collect()
    assert gone() is None, "it goes with the stock model"


def test_it_follows_the_stock_model_to_another_dtype(saved: tuple[MRPForCausalLM, str]) -> None:
    model, folder = saved
    stock = stock_of(model)
    options: dict[str, Any] = {"decoding": "mrp_spec", "max_new_tokens": 12}
    for dtype in (torch.float64, torch.float32):
        out = stock.to(dtype).generate(random_ids(4, 1, 6), **options, custom_generate=folder, trust_remote_code=True)
        assert torch.equal(out, MRPForCausalLM.from_pretrained(folder).to(dtype).generate(random_ids(4, 1, 6), **options))


def test_the_embedded_checkpoint_serves_too(tiny_model: MRPForCausalLM) -> None:
    """Its generation config decodes with `mrp_spec`, so that nothing has to be asked for."""
    ids = torch.arange(5, 40)[None]
    out = stock_of(tiny_model).generate(
        ids, max_new_tokens=20, return_dict_in_generate=True, custom_generate=str(TINY), trust_remote_code=True
    )
    expected = tiny_model.generate(ids, max_new_tokens=20, return_dict_in_generate=True)
    assert torch.equal(out.sequences, expected.sequences)
    assert out.stats.offered_at_depth.shape[1] > 0, "a mode that drafts"


def test_a_head_of_sharded_weights_alone(saved: tuple[MRPForCausalLM, str], tmp_path: Path) -> None:
    """Only the shard with the head is needed."""
    model, folder = saved
    shutil.copytree(folder, tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    (tmp_path / "head" / "model.safetensors").unlink()
    names = {name: f"model-0000{1 + name.startswith('mrp_head.')}-of-00002.safetensors" for name in tensors}
    (tmp_path / "head" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    head = {name: tensor for name, tensor in tensors.items() if name.startswith("mrp_head.")}
    save_file(head, tmp_path / "head" / "model-00002-of-00002.safetensors")
    options: dict[str, Any] = {"decoding": "mrp_spec", "max_new_tokens": 12}
    out = stock_of(model).generate(
        random_ids(5, 1, 6), **options, custom_generate=str(tmp_path / "head"), trust_remote_code=True
    )
    assert torch.equal(out, model.generate(random_ids(5, 1, 6), **options))


def test_an_mrp_model_keeps_its_own_generate(saved: tuple[MRPForCausalLM, str]) -> None:
    """Loading with remote code does not replace `generate`, and the repository's function decodes with the model's own head."""
    model, folder = saved
    ids = random_ids(6, 1, 5)
    loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert "generate" not in vars(loaded)
    expected = model.generate(ids, decoding="mrp_spec", max_new_tokens=9)
    assert torch.equal(loaded.generate(ids, decoding="mrp_spec", max_new_tokens=9), expected)
    other = str(TINY)  # whose head would not even fit
    out = loaded.generate(ids, custom_generate=other, trust_remote_code=True, decoding="mrp_spec", max_new_tokens=9)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"block_size": 8}, "its block_size is 4, the backbone's 8"),
        ({"mask_token_id": 61}, "its mask_token_id is 60, the backbone's 61"),
        ({"rms_norm_eps": 1e-5}, "its rms_norm_eps is 1e-06, the backbone's 1e-05"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            r"its rope_parameters is {.*10000.0.*}, the backbone's {.*500.0",
        ),
    ],
)
def test_a_model_that_the_head_was_not_made_for_is_refused(
    saved: tuple[MRPForCausalLM, str], overrides: dict[str, Any], message: str
) -> None:
    model, folder = saved
    with pytest.raises(ValueError, match=message):
        stock_of(model, **overrides).generate(random_ids(7, 1, 5), custom_generate=folder, trust_remote_code=True)


def test_a_model_of_another_size_is_refused_with_both_numbers(saved: tuple[MRPForCausalLM, str]) -> None:
    _, folder = saved
    wider = stock_of(make_model(hidden_size=40, vocab_size=70, num_nextn_predict_layers=0))
    with pytest.raises(ValueError, match="its hidden_size is 32, the backbone's 40; its vocab_size is 64, the backbone's 70"):
        wider.generate(random_ids(8, 1, 5), custom_generate=folder, trust_remote_code=True, max_new_tokens=3)


def biased(stock: SDARForCausalLM) -> None:
    projection = stock.model.layers[0].self_attn.q_proj
    projection.bias = torch.nn.Parameter(torch.zeros(projection.out_features))


def shortened(stock: SDARForCausalLM) -> None:
    stock.lm_head = torch.nn.Linear(32, 10, bias=False)


def packed(stock: SDARForCausalLM) -> None:
    """As quantization leaves a matrix."""
    projection = stock.model.layers[1].mlp.up_proj
    projection.weight = torch.nn.Parameter(projection.weight.detach().to(torch.uint8), requires_grad=False)


def elsewhere(stock: SDARForCausalLM) -> None:
    stock.model.layers[1].to("meta")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (biased, "unexpected: model.layers.0.self_attn.q_proj.bias"),
        (shortened, r"wrong shape: lm_head.weight is \[10, 32\], needs \[64, 32\]"),
        (packed, "wrong type: model.layers.1.mlp.up_proj.weight holds torch.uint8"),
        (elsewhere, "it lies on cpu, meta: it must be loaded, on one device"),
        (lambda stock: delattr(stock.model.layers[0].self_attn, "k_norm"), "missing: model.layers.0.self_attn.k_norm.weight"),
    ],
    ids=["biased", "shortened", "packed", "elsewhere", "lacking"],
)
def test_a_model_that_is_no_plain_qwen3_decoder_is_refused(
    saved: tuple[MRPForCausalLM, str], change: Callable[[SDARForCausalLM], None], message: str
) -> None:
    model, folder = saved
    stock = stock_of(model)
    change(stock)
    with pytest.raises(ValueError, match=f"(?s)this SDARForCausalLM is no Qwen3 decoder .*{message}.*from_backbone"):
        stock.generate(random_ids(8, 1, 5), custom_generate=folder, trust_remote_code=True, max_new_tokens=3)


def test_a_config_of_transformers_4_is_understood(saved: tuple[MRPForCausalLM, str]) -> None:
    """SDAR's own configs hold `rope_theta` and `rope_scaling` instead of `rope_parameters`."""
    model, folder = saved
    old = {name: value for name, value in stock_of(model).config.to_dict().items() if name != "rope_parameters"}
    for theta, message in ((10000.0, None), (7.0, r"its rope_parameters is {.*10000.0.*}, the backbone's {.*7.0")):
        stock = stock_of(model)
        stock.config = PretrainedConfig()
        stock.config.__dict__ |= {**old, "rope_theta": theta, "rope_scaling": None}
        options: dict[str, Any] = {"decoding": "mrp_spec", "max_new_tokens": 9}
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            out = stock.generate(random_ids(9, 1, 5), **options, custom_generate=folder, trust_remote_code=True)
            assert torch.equal(out, model.generate(random_ids(9, 1, 5), **options))


def test_options_are_checked_as_always(saved: tuple[MRPForCausalLM, str]) -> None:
    model, folder = saved
    stock = stock_of(model)
    options: dict[str, Any] = {"custom_generate": folder, "trust_remote_code": True, "max_new_tokens": 3}
    with pytest.raises(ValueError, match="decoding is 'fast': choose one of"):
        stock.generate(random_ids(1, 1, 4), **options, decoding="fast")
    with pytest.raises(ValueError, match=r"num_drafts \(did you mean num_draft_states\?\): not used or not supported"):
        stock.generate(random_ids(1, 1, 4), **options, num_drafts=3)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        stock.generate(random_ids(1, 1, 4), custom_generate=folder, trust_remote_code=False)


def test_a_repository_without_a_head_is_refused(tmp_path: Path) -> None:
    model = make_model(num_nextn_predict_layers=0)
    model.save_pretrained(tmp_path / "backbone")
    with pytest.raises(ValueError, match=r"backbone has no MRP head .*name a checkpoint that has one"):
        stock_of(model).generate(random_ids(1, 1, 4), custom_generate=str(tmp_path / "backbone"), trust_remote_code=True)


def test_the_function_does_not_guess_its_repository(saved: tuple[MRPForCausalLM, str]) -> None:
    model, folder = saved
    stock = stock_of(model)
    function = stock.load_custom_generate(folder, trust_remote_code=True)
    with pytest.raises(ValueError, match=r"call model\.generate\(custom_generate='org/name'"):
        function(random_ids(1, 1, 4), model=stock, max_new_tokens=3)
