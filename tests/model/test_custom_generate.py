"""A Hub repository as `custom_generate` of stock SDAR models: the same text as the MRP model's own,
on the same memory."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig, Qwen3Config, Qwen3ForCausalLM

from modeling_mrp import MRPForCausalLM
from tests.support.helpers import in_hub_cache, random_ids
from tests.support.places import TINY
from tests.support.random_cases import make_model

Saved = tuple[MRPForCausalLM, dict[str, Any]]
SHAPE = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads head_dim rms_norm_eps rope_parameters max_position_embeddings "
    "tie_word_embeddings pad_token_id block_size mask_token_id"
)


def stock_of(model: Any, **overrides: Any) -> Qwen3ForCausalLM:
    """A model of transformers' own class with an MRP model's backbone. Its forward knows nothing of
    blocks."""
    options = {name: getattr(model.config, name) for name in SHAPE.split()}
    stock = Qwen3ForCausalLM(Qwen3Config(**{**options, **overrides})).to(model.dtype).eval()
    stock.load_state_dict(
        {
            name: tensor
            for name, tensor in model.state_dict().items()
            if not name.startswith("mrp_head.")
        }
    )
    return stock


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A model, and the options by which stock models decode with it from the Hub's cache."""
    model, folder = make_model(), tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder / "full", max_shard_size="20KB")
    in_hub_cache(folder / "full", folder / "cache", "some-one/some-model.v1_x")
    return model, {
        "custom_generate": "some-one/some-model.v1_x",
        "trust_remote_code": True,
        "cache_dir": str(folder / "cache"),
    }


def test_a_stock_model_says_what_the_mrp_model_says(saved: Saved) -> None:
    model, repository = saved
    options: dict[str, Any] = {
        "max_new_tokens": 21,
        "decoding": "mrp_spec",
        "do_sample": True,
        "top_k": 0,
        "seed": [5, 9],
    }
    options |= {"num_draft_states": 4, "return_dict_in_generate": True}
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    inputs = {"input_ids": random_ids(1, 2, 7) * mask, "attention_mask": mask}
    expected, out = (
        model.generate(**inputs, **options),
        stock_of(model).generate(**inputs, **options, **repository),
    )
    assert torch.equal(out.sequences, expected.sequences)
    assert torch.equal(out.token_logprobs, expected.token_logprobs)
    assert out.stats.forwards == expected.stats.forwards
    assert int(out.stats.accepted.sum()) > 0


def test_a_tied_stock_model_says_what_the_mrp_model_says(tmp_path: Path) -> None:
    """Its `lm_head` is another name of its embeddings."""
    model = make_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "full")
    in_hub_cache(tmp_path / "full", tmp_path / "cache", "some-one/tied")
    inputs = {"input_ids": random_ids(1, 1, 7), "max_new_tokens": 9, "decoding": "mrp_spec"}
    repository: dict[str, Any] = {
        "custom_generate": "some-one/tied",
        "trust_remote_code": True,
        "cache_dir": str(tmp_path / "cache"),
    }
    assert torch.equal(stock_of(model).generate(**inputs, **repository), model.generate(**inputs))


def test_the_parameters_are_shared_and_nothing_else_is_kept(saved: Saved) -> None:
    """What is made once goes with the stock model; what replaces a parameter is used."""
    stock, ids = stock_of(saved[0]), random_ids(2, 1, 9)
    options: dict[str, Any] = {
        "decoding": "mrp_spec",
        "max_new_tokens": 8,
        "return_dict_in_generate": True,
        **saved[1],
    }
    names = set(stock.__dict__)
    out = stock.generate(ids, **options)
    made = out.past_key_values.owner()
    ours, theirs = dict(made.named_parameters()), dict(stock.named_parameters())
    assert {name for name in ours if name not in theirs} == {
        name for name in ours if name.startswith("mrp_head.")
    }
    assert all(ours[name] is tensor and tensor.requires_grad for name, tensor in theirs.items())
    assert set(stock.__dict__) == names
    again = stock.generate(ids, **options)
    assert again.past_key_values.owner() is made
    stock.lm_head.weight = torch.nn.Parameter(-stock.lm_head.weight.detach())
    changed = stock.generate(ids, **options)
    assert not torch.equal(changed.sequences, again.sequences)
    gone = weakref.ref(made), weakref.ref(changed.past_key_values.owner())
    del out, again, changed, made, ours, theirs, stock
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_an_mrp_model_decodes_with_its_own_head(saved: Saved) -> None:
    """Also where it is asked to take the function of a repository whose head would not even fit."""
    ids, options = random_ids(6, 1, 5), {"decoding": "mrp_spec", "max_new_tokens": 9}
    found = saved[0].generate(ids, custom_generate=str(TINY), trust_remote_code=True, **options)
    assert torch.equal(found, saved[0].generate(ids, **options))


def test_a_config_of_transformers_4_is_understood(saved: Saved) -> None:
    """SDAR's own configs hold `rope_theta` and `rope_scaling` for `rope_parameters`. The head
    follows to another dtype."""
    model, repository = saved
    stock = stock_of(model).float()
    old = {
        name: value for name, value in stock.config.to_dict().items() if name != "rope_parameters"
    }
    stock.config = PretrainedConfig()
    stock.config.__dict__ |= {**old, "rope_theta": 10000.0, "rope_scaling": None}
    options: dict[str, Any] = {"decoding": "mrp_spec", "max_new_tokens": 9}
    out = stock.generate(random_ids(9, 1, 5), **options, **repository)
    assert torch.equal(out, make_model().float().generate(random_ids(9, 1, 5), **options))


def test_what_is_refused(saved: Saved, tmp_path: Path) -> None:
    """A model that the head was not made for, or no plain decoder; code that is not trusted; a
    folder, whose place its code cannot know; a repository without a head."""
    model, repository = saved
    biased, projected = stock_of(model), model.model.layers[0].self_attn.q_proj.out_features
    biased.model.layers[0].self_attn.q_proj.bias = torch.nn.Parameter(torch.zeros(projected))
    make_model(num_nextn_predict_layers=0).save_pretrained(tmp_path / "backbone")
    in_hub_cache(tmp_path / "backbone", tmp_path / "cache", "org/backbone")
    headless = {"custom_generate": "org/backbone", "cache_dir": str(tmp_path / "cache")}
    others = stock_of(model, block_size=8, mask_token_id=61)
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (others, {}, r"its block_size is 4, the backbone's 8; its mask_token_id is 60, .* 61"),
        (biased, {}, r"(?s)Unexpected key.*q_proj\.bias"),
        (stock_of(model), {"trust_remote_code": False}, "trust_remote_code=True"),
        (
            stock_of(model),
            {"custom_generate": str(TINY)},
            r"a local folder.*from_backbone\(backbone, head=folder\)",
        ),
        (
            stock_of(model),
            headless,
            r"org/backbone has no MRP head .*name a checkpoint that has one",
        ),
    ]
    for stock, changed, message in refused:
        with pytest.raises((ValueError, RuntimeError), match=message):
            stock.generate(random_ids(7, 1, 5), max_new_tokens=3, **{**repository, **changed})
