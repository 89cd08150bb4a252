"""Forward, head and config: arguments and ways to one answer. What a model computes is compared to slow twins, written from
method.md alone, in `test_layouts.py` and `test_families.py`."""

import pytest
import torch
from conftest import make_model
from helpers import BLOCK, close, random_ids
from published import published_config
from torch import Tensor
from transformers import DynamicCache

from modeling_mrp import MRPConfig, MRPForCausalLM

pytestmark = pytest.mark.usefixtures("exact_norms")


def seen(positions: Tensor) -> Tensor:
    """Who sees whom, [rows, 1, length, length] bool: a token its own block and earlier ones."""
    return (positions[:, None] // BLOCK <= positions[:, :, None] // BLOCK)[:, None]


@torch.no_grad()
def test_padding_changes_nothing(random_model: MRPForCausalLM) -> None:
    """On both sides of a row."""
    lengths, width = (5, 11, 8), 13
    ids, mask = torch.full((3, width), 49), torch.zeros(3, width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, 1 : 1 + length], mask[row, 1 : 1 + length] = random_ids(row, length), 1
    logits = random_model(ids, attention_mask=mask).logits
    assert logits.isfinite().all()
    for row, length in enumerate(lengths):
        at = slice(1, 1 + length)
        close(logits[row, at], random_model(ids[row, at][None]).logits[0])


@torch.no_grad()
def test_a_4d_mask_replaces_the_2d_one(random_model: MRPForCausalLM) -> None:
    """Boolean or additive."""
    ids, positions = random_ids(2, 2, 10), torch.arange(10).expand(2, -1)
    valid = positions < torch.tensor([[10], [7]])
    sees = (seen(positions) & valid[:, None, None]) | torch.eye(10, dtype=torch.bool)
    flat, additive = random_model(ids, attention_mask=valid.long()).logits, torch.zeros(sees.shape, dtype=torch.float64)
    for mask in (sees, additive.masked_fill(~sees, -torch.inf)):
        close(random_model(ids, attention_mask=mask).logits[valid], flat[valid])
    causal = random_model(ids, attention_mask=sees & sees.new_ones(10, 10).tril()).logits  # another mask is another model
    assert (causal - flat)[0, 0].abs().max() > 1e-6


@torch.no_grad()
def test_position_ids_decide_the_blocks(random_model: MRPForCausalLM) -> None:
    """Positions 2..9 are the blocks {2, 3}, {4..7}, {8, 9}; one row of positions serves the batch. Rotation knows distances
    alone, so that it is what such a mask gives at 0..7, but for angles in float32."""
    ids, positions = random_ids(3, 2, 8), torch.arange(2, 10)[None]
    logits, default = random_model(ids, position_ids=positions).logits, random_model(ids).logits
    close(logits, random_model(ids, attention_mask=seen(positions).expand(2, -1, -1, -1)).logits, 1e-5)
    close(random_model(ids, position_ids=torch.arange(8)).logits, default, atol=0)
    assert (logits - default).abs().max() > 1e-3


@torch.no_grad()
def test_block_by_block_with_a_dynamic_cache(random_model: MRPForCausalLM) -> None:
    """Row 1 has a block of left padding, so that the rows' blocks still end in the same columns."""
    ids = random_ids(5, 2, 4 * BLOCK)
    mask = torch.ones_like(ids)
    mask[1, :BLOCK] = 0
    whole = random_model(ids, attention_mask=mask).logits
    cache, parts = DynamicCache(config=random_model.config), []
    for begin, end in ((0, 2), (2, 3), (3, 4)):
        given = ids[:, begin * BLOCK : end * BLOCK]
        out = random_model(given, attention_mask=mask[:, : end * BLOCK], past_key_values=cache, use_cache=True)
        assert out.past_key_values is cache
        parts.append(out.logits)
    close(torch.cat(parts, 1)[mask.bool()], whole[mask.bool()])
    assert cache.get_seq_length() == 4 * BLOCK


@torch.no_grad()
def test_eager_attention_equals_sdpa() -> None:
    """transformers' eager attention takes its softmax in float32, hence 1e-5."""
    sdpa, eager = make_model(), make_model()
    eager.set_attn_implementation("eager")
    ids, labels, mask = random_ids(6, 2, 11), random_ids(6, 2, 11), torch.ones(2, 11, dtype=torch.long)
    labels[:, :5], mask[1, 8:] = -100, 0
    noise = {"noise_level": torch.tensor([0.5, 0.25]), "noise_mask": random_ids(7, 2, 11) > 20}
    close(eager(ids, attention_mask=mask).logits[mask.bool()], sdpa(ids, attention_mask=mask).logits[mask.bool()], atol=1e-5)
    close(*(model(ids, attention_mask=mask, labels=labels, **noise).loss for model in (eager, sdpa)), atol=1e-5)
    hidden, positions = torch.randn(1, 11, 32, dtype=torch.float64), torch.arange(11)[None]
    close(*(model.residual(ids[:1], hidden, positions, seen(positions)) for model in (eager, sdpa)), atol=1e-5)


@torch.no_grad()
def test_what_a_forward_takes_and_gives(random_model: MRPForCausalLM) -> None:
    """Logits of some positions, hidden states of which the last are h_A, and embeddings in place of ids."""
    ids, model = random_ids(9, 2, 9), random_model
    out = model(ids, output_hidden_states=True)
    close(model(ids, logits_to_keep=0).logits, out.logits, atol=0)
    close(model(ids, logits_to_keep=3).logits, out.logits[:, 6:])
    close(model(ids, logits_to_keep=torch.tensor([7, 1])).logits, out.logits[:, [7, 1]])
    assert len(out.hidden_states) == 3  # embeddings, after layer 0, h_A
    close(out.hidden_states[0], model.model.embed_tokens(ids), atol=0)
    close(model.lm_head(out.hidden_states[-1]), out.logits, atol=0)
    positions = torch.arange(9).expand(2, 9)
    close(out.hidden_states[-1], model.backbone(ids, positions, seen(positions)))
    close(model(inputs_embeds=out.hidden_states[0]).logits, out.logits, atol=0)


def test_published_config_fields_load() -> None:
    """With the fields that transformers 4.52 wrote, at the values of heavyball/sdar-1_7b-mrp-3lyr."""
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 151936, "mask_token_id": 151669, "head_dim": 128}
    published = published_config(**sizes, block_size=16, num_nextn_predict_layers=3, torch_dtype="bfloat16")
    config = MRPConfig.from_dict(published)
    renamed = {"rope_theta", "rope_scaling", "torch_dtype", "model_type", "transformers_version"}
    renamed |= {"fuse_cross_entropy", "debug", "auto_map", "num_mrp_heads"}  # these mean nothing here
    assert {name: getattr(config, name) for name in published.keys() - renamed} == {
        name: published[name] for name in published.keys() - renamed
    }
    assert (config.rope_parameters, config.dtype) == ({"rope_type": "default", "rope_theta": 1000000}, torch.bfloat16)
    saved = config.to_diff_dict()
    assert saved["model_type"] == "sdar_mrp"
    assert not saved.keys() & {"family", "fuse_cross_entropy"}
    assert MRPConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_a_model_whose_weights_are_nowhere() -> None:
    """Its forward gives shapes; decoding says what is wrong."""
    model = make_model().to("meta")
    assert model(torch.tensor([[1, 2, 3]], device="meta")).logits.shape == (1, 3, 64)
    with pytest.raises(ValueError, match=r"is on the meta device.*load the model with from_pretrained"):
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4)
