"""Fast-dLLM v2: transformers' own Qwen2 over the whole text, its logits shifted by one, is what it is compared to."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import make_model
from families import (
    PROMPTS,
    Shape,
    assert_decodes,
    assert_drafts_are_lossless,
    assert_has_published_tensors,
    assert_saved_and_loaded,
    assert_trains,
    block_causal,
    loaded,
)
from helpers import close
from mrp_trainer.train.packed import PackedBatch
from published import write
from torch import Tensor
from transformers import Qwen2ForCausalLM

from modeling_mrp import MRPConfig
from modeling_mrp.generate import generation
from modeling_mrp.generate.budget import Amount
from tests.random_cases import dampened

# The config of Efficient-Large-Model/Fast_dLLM_v2_7B; the 1.5B is smaller and tied.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Fast_dLLM_QwenForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling.Fast_dLLM_QwenForCausalLM"},
    "bd_size": 32,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "layer_types": ["full_attention"] * 28,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "Fast_dLLM_Qwen",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
SMALL = {**PUBLISHED, "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
SMALL |= {"tie_word_embeddings": True, "vocab_size": 151936}

TWIN = {**PUBLISHED, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TWIN |= {"num_key_value_heads": 2, "vocab_size": 101, "max_position_embeddings": 512, "torch_dtype": "float32"}
TWIN |= {"layer_types": ["full_attention"] * 2, "mask_token_id": 97, "eos_token_id": 1, "bos_token_id": 1}


def shapes_of(config: dict[str, Any]) -> dict[str, Shape]:
    """The published tensors of a config."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv_heads = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in (f"model.layers.{at}" for at in range(config["num_hidden_layers"])):
        shapes |= {f"{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        for name, size in (("q", hidden), ("k", kv_heads), ("v", kv_heads)):
            shapes |= {f"{layer}.self_attn.{name}_proj.weight": (size, hidden), f"{layer}.self_attn.{name}_proj.bias": (size,)}
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, hidden)
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
    return shapes


@pytest.fixture(scope="module", params=[4, 32])
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = {**TWIN, "bd_size": request.param}
    folder = tmp_path_factory.mktemp("fast_dllm") / "twin"
    model, tensors = loaded(folder, config, shapes_of(config), head_layers=2)
    write(folder / "as_qwen2", {**config, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, tensors)
    return model, Qwen2ForCausalLM.from_pretrained(folder / "as_qwen2", dtype=torch.float64, attn_implementation="sdpa")


@torch.no_grad()
def shifted_logits(reference: Any, ids: list[int], block: int) -> Tensor:
    """Of every position those of the one before it, which for a block's first is clean and sees no more than its own block."""
    scores = reference(torch.tensor([ids]), attention_mask=block_causal(len(ids), block)).logits[0]
    return torch.cat([torch.zeros_like(scores[:1]), scores[:-1]])


def test_undrafted_text_is_that_of_transformers_own_model_shifted(twin: Any) -> None:
    model, reference = twin
    block = model.config.block_size
    assert_decodes(model, lambda ids: shifted_logits(reference, ids, block), 14 if block == 4 else 30)


def test_drafts_are_lossless(twin: Any) -> None:
    """Over several blocks: what predicts a block's first token is a parent of the same round, or kept with the text."""
    assert_drafts_are_lossless(twin[0], 14 if twin[0].config.block_size == 4 else 36)


def test_forward_gives_the_shifted_logits(twin: Any) -> None:
    model, reference = twin
    ids = [*PROMPTS[0], 97, 97]
    with torch.no_grad():
        close(model(torch.tensor([ids])).logits[0, 1:], shifted_logits(reference, ids, model.config.block_size)[1:], 1e-4)
        cache = model(torch.tensor([ids[:4]]), use_cache=True).past_key_values
        with pytest.raises(ValueError, match="the logits of a position come from the one before it"):
            model(torch.tensor([ids[4:]]), past_key_values=cache)


@pytest.mark.parametrize("kept", [8, 12, 14])
def test_a_text_goes_on_from_its_cache(kept: int, twin: Any) -> None:
    """Also at the beginning of a block, whose first token is predicted from what a copy of the cache has kept."""
    model, ids = twin[0], torch.tensor(PROMPTS[:1])
    options = {"decoding": "mrp_spec", "target": "sequential", "eos_token_id": None, "num_draft_states": 4}
    before = model.generate(ids, max_new_tokens=10, return_dict_in_generate=True, **options)
    prompt = torch.cat([before.sequences[:, :kept], torch.tensor([[7]])[:, : kept % 4]], 1)
    expected = model.generate(prompt, max_new_tokens=9, **options)
    assert model.generate(prompt, max_new_tokens=9, past_key_values=before.past_key_values, **options).equal(expected)


def test_a_loss_is_that_of_the_shifted_logits(twin: Any) -> None:
    """Every masked position of the noisy copy is predicted from the column before: within a block the noisy one, else the
    clean one."""
    model, reference = twin
    block, length = model.config.block_size, 10
    ids = torch.randint(6, 90, (1, length), generator=torch.Generator().manual_seed(3))
    hidden = torch.zeros(1, length, dtype=torch.bool)
    hidden[0, [3, 4, 5, 8]] = True
    level = torch.tensor([0.5])
    with torch.no_grad():
        loss = model(ids, labels=ids, noise_mask=hidden, noise_level=level).loss
    total = 0.0
    for at in (3, 4, 5, 8):
        start = at // block * block
        noisy = torch.where(hidden, 97, ids)[0]
        state = torch.cat([ids[0, :start], noisy[start : start + block]]).tolist()
        total -= shifted_logits(reference, state, block)[at].log_softmax(-1)[ids[0, at]].item() / 0.5
    assert loss.item() == pytest.approx(total / length, abs=1e-4)


def test_the_column_before_each() -> None:
    """A sample of 6 tokens in blocks of 4, a noisy copy of it before the clean one, and padding."""
    position = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0]])
    view = torch.tensor([[1] * 6 + [0] * 6 + [-1]])
    zeros = torch.zeros_like(position)
    batch = PackedBatch(zeros, zeros, position, view, zeros, zeros.float(), torch.tensor(6))
    assert batch.before(4).tolist() == [[-1, 0, 1, 2, 9, 4, -1, 6, 7, 8, 9, 10, -1]]


def test_it_is_trained_saved_and_loaded_again(tmp_path: Path) -> None:
    config = {**TWIN, "bd_size": 4}
    model, _ = loaded(tmp_path / "twin", config, shapes_of(config), head_layers=1)
    assert_trains(model, tmp_path / "run")
    assert_saved_and_loaded(model.double(), tmp_path)


@pytest.mark.parametrize(("config", "billions"), [(PUBLISHED, 7.62), (SMALL, 1.54)])
def test_the_published_sizes_have_the_published_tensors(config: dict[str, Any], billions: float) -> None:
    count = assert_has_published_tensors(config, shapes_of(config))
    assert round(count / 1e9, 2) == billions
    ours = MRPConfig.from_dict(config)
    assert (ours.block_size, ours.mask_token_id, ours.head_dim) == (32, 151665, 128)


def test_rounds_of_unequal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `auto`: a head pass may ask for all that the round before scored, in order."""
    numbers = random.Random(0)
    paced = SimpleNamespace(choose=lambda rows: Amount(numbers.choice((2, 3)), 1), learn=lambda *_: None)
    monkeypatch.setattr(generation, "budget_of", lambda *_: paced)
    model = dampened(make_model(69, family="fast_dllm_v2", block_size=8, initializer_range=0.6), 0.3)
    ids, options = torch.tensor([[35]]), {"max_new_tokens": 31, "eos_token_id": None}
    drafted = model.generate(ids, decoding="mrp_spec", target="fast_dllm", num_draft_states="auto", **options)
    assert drafted.equal(model.generate(ids, decoding="fast_dllm", **options))
