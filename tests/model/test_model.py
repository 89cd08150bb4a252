"""Forward, head and config against slow twins: one row, one block, no cache, no attention kernel."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_model
from helpers import BLOCK, MASK, close, naive_norm, random_ids
from published import published_config
from torch import Tensor, nn
from transformers import DynamicCache

from modeling_mrp import MRPConfig, MRPForCausalLM, MRPHead

# ------------------------------------------------------------------------------------------------ naive twins


def naive_rotary(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotates the pairs (i, i + d/2) of x [d] by position * theta^(-2i/d); angles in float32, as transformers does."""
    half = len(x) // 2
    angle = position * (1.0 / theta ** (torch.arange(0, len(x), 2, dtype=torch.float) / len(x)))
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin])


def naive_layer(layer: Any, x: Tensor, positions: list[int], sees: Callable[[int, int], bool], config: MRPConfig) -> Tensor:
    """A Qwen3 decoder layer on x [length, hidden], one query and one attention head at a time."""
    attention, width = layer.self_attn, config.head_dim
    normed = naive_norm(layer.input_layernorm, x)
    query, key, value = (
        proj(normed).unflatten(1, (-1, width)) for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    theta = config.rope_parameters["rope_theta"]
    rows = []
    for q, query_position in enumerate(positions):
        visible = [k for k in range(len(positions)) if sees(q, k)]
        heads = []
        for head in range(config.num_attention_heads):
            group = head // (config.num_attention_heads // config.num_key_value_heads)
            asked = naive_rotary(naive_norm(attention.q_norm, query[q, head]), query_position, theta)
            keys = [naive_rotary(naive_norm(attention.k_norm, key[k, group]), positions[k], theta) for k in visible]
            weights = torch.stack([asked @ k / width**0.5 for k in keys]).softmax(0)
            heads.append(sum(w * value[k, group] for w, k in zip(weights, visible, strict=True)))
        rows.append(torch.cat(heads))
    x = x + attention.o_proj(torch.stack(rows))
    normed = naive_norm(layer.post_attention_layernorm, x)
    return x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(normed)) * layer.mlp.up_proj(normed))


def same_or_earlier_block(positions: list[int]) -> Callable[[int, int], bool]:
    return lambda q, k: positions[k] // BLOCK <= positions[q] // BLOCK


def naive_logits(model: MRPForCausalLM, ids: list[int], positions: list[int] | None = None) -> Tensor:
    positions = positions or list(range(len(ids)))
    x = model.model.embed_tokens.weight[ids]
    for layer in model.model.layers:
        x = naive_layer(layer, x, positions, same_or_earlier_block(positions), model.config)
    return model.lm_head(naive_norm(model.model.norm, x))


# ------------------------------------------------------------------------------------------------ forward


@pytest.mark.usefixtures("exact_norms")
@torch.no_grad()
def test_forward_equals_a_transformer_written_out(random_model: MRPForCausalLM) -> None:
    """10 tokens: the last block is cut short."""
    ids = random_ids(0, 10)
    ids[[5, 8]] = MASK
    close(random_model(ids[None]).logits[0], naive_logits(random_model, ids.tolist()))


@torch.no_grad()
def test_forward_is_block_causal(random_model: MRPForCausalLM) -> None:
    ids = random_ids(1, 1, 3 * BLOCK)
    before = random_model(ids).logits[0]
    for changed in range(3 * BLOCK):
        other = ids.clone()
        other[0, changed] = 55
        after = random_model(other).logits[0]
        start = changed // BLOCK * BLOCK
        assert torch.equal(after[:start], before[:start])
        for position in range(start, 3 * BLOCK):  # its own block on both sides, and all later ones
            assert (after[position] - before[position]).abs().max() > 1e-6, (changed, position)


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("side", ["both"])
@torch.no_grad()
def test_padding_changes_nothing(random_model: MRPForCausalLM, side: str) -> None:
    lengths, width = (5, 11, 8), 13
    ids, mask, at = torch.full((3, width), 49), torch.zeros(3, width, dtype=torch.long), []
    for row, length in enumerate(lengths):
        begin = {"left": width - length, "right": 0, "both": 1}[side]
        at.append(slice(begin, begin + length))
        ids[row, at[row]] = random_ids(row, length)
        mask[row, at[row]] = 1
    logits = random_model(ids, attention_mask=mask).logits
    assert logits.isfinite().all()
    for row in range(3):
        close(logits[row, at[row]], random_model(ids[row, at[row]][None]).logits[0])


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("kind", ["boolean", "additive"])
@torch.no_grad()
def test_a_4d_mask_replaces_the_2d_one(random_model: MRPForCausalLM, kind: str) -> None:
    lengths, width = (10, 7), 10
    ids = random_ids(2, 2, width)
    valid = torch.tensor([[1] * length + [0] * (width - length) for length in lengths])
    sees = torch.zeros(2, 1, width, width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        for q in range(width):
            for k in range(width):
                sees[row, 0, q, k] = (k // BLOCK <= q // BLOCK and k < length) or k == q
    mask = sees if kind == "boolean" else torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, -torch.inf)
    full, flat = random_model(ids, attention_mask=mask).logits, random_model(ids, attention_mask=valid).logits
    for row, length in enumerate(lengths):
        close(full[row, :length], flat[row, :length])
    causal = sees & torch.ones(width, width, dtype=torch.bool).tril()  # another mask is another model
    assert (random_model(ids, attention_mask=causal).logits - full)[0, 0].abs().max() > 1e-6


@pytest.mark.usefixtures("exact_norms")
@torch.no_grad()
def test_position_ids_decide_the_blocks(random_model: MRPForCausalLM) -> None:
    """Positions 2..9 are the blocks {2, 3}, {4..7}, {8, 9}; one row of positions serves the batch."""
    ids, positions = random_ids(3, 2, 8), list(range(2, 10))
    logits = random_model(ids, position_ids=torch.tensor([positions])).logits
    for row in range(2):
        close(logits[row], naive_logits(random_model, ids[row].tolist(), positions))
    default = random_model(ids).logits
    close(random_model(ids, position_ids=torch.arange(8)).logits, default, atol=0)
    assert (logits - default).abs().max() > 1e-3


@pytest.mark.usefixtures("exact_norms")
@torch.no_grad()
@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("blocks", [(2, 1, 1)], ids=str)
@torch.no_grad()
def test_block_by_block_with_a_dynamic_cache(random_model: MRPForCausalLM, blocks: tuple[int, ...]) -> None:
    """Row 1 has a block of left padding, so that the rows' blocks still end in the same columns."""
    ids = random_ids(5, 2, 4 * BLOCK)
    mask = torch.ones_like(ids)
    mask[1, :BLOCK] = 0
    whole = random_model(ids, attention_mask=mask).logits
    cache, parts, end = DynamicCache(config=random_model.config), [], 0
    for count in blocks:
        begin, end = end, end + count * BLOCK
        out = random_model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        assert out.past_key_values is cache
        parts.append(out.logits)
    close(torch.cat(parts, 1)[mask.bool()], whole[mask.bool()])
    assert cache.get_seq_length() == 4 * BLOCK


@torch.no_grad()
def test_eager_attention_equals_sdpa() -> None:
    """transformers' eager attention takes its softmax in float32, hence 1e-5."""
    sdpa, eager = make_model(), make_model()
    eager.set_attn_implementation("eager")
    assert (sdpa.config._attn_implementation, eager.config._attn_implementation) == ("sdpa", "eager")
    ids, labels = random_ids(6, 2, 11), random_ids(6, 2, 11)
    labels[:, :5] = -100
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    noise = {"noise_level": torch.tensor([0.5, 0.25]), "noise_mask": random_ids(7, 2, 11) > 20}
    close(eager(ids, attention_mask=mask).logits[mask.bool()], sdpa(ids, attention_mask=mask).logits[mask.bool()], atol=1e-5)
    losses = [model(ids, attention_mask=mask, labels=labels, **noise).loss for model in (eager, sdpa)]
    close(*losses, atol=1e-5)
    sees = torch.ones(1, 1, 11, 11, dtype=torch.bool).tril()
    close(eager(ids[:1], attention_mask=sees).logits, sdpa(ids[:1], attention_mask=sees).logits, atol=1e-5)
    positions, hidden = torch.arange(11)[None], torch.randn(1, 11, 32, dtype=torch.float64)
    close(eager.residual(ids[:1], hidden, positions, sees), sdpa.residual(ids[:1], hidden, positions, sees), atol=1e-5)


@torch.no_grad()
def test_logits_to_keep(random_model: MRPForCausalLM) -> None:
    ids = random_ids(8, 2, 9)
    logits = random_model(ids).logits
    close(random_model(ids, logits_to_keep=0).logits, logits, atol=0)
    close(random_model(ids, logits_to_keep=3).logits, logits[:, 6:])
    close(random_model(ids, logits_to_keep=torch.tensor([7, 1])).logits, logits[:, [7, 1]])


@torch.no_grad()
def test_the_last_hidden_states_are_h_a(random_model: MRPForCausalLM) -> None:
    ids = random_ids(9, 2, 8)
    out = random_model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == 3  # embeddings, after layer 0, h_A
    close(out.hidden_states[0], random_model.model.embed_tokens(ids), atol=0)
    close(random_model.lm_head(out.hidden_states[-1]), out.logits, atol=0)
    positions = torch.arange(8).expand(2, 8)
    mask = (positions[:, None] // BLOCK <= positions[:, :, None] // BLOCK)[:, None]
    close(out.hidden_states[-1], random_model.backbone(ids, positions, mask))
    assert random_model(ids).hidden_states is None


@torch.no_grad()
def test_embeddings_in_place_of_ids(random_model: MRPForCausalLM) -> None:
    ids = random_ids(10, 2, 6)
    embeds = random_model.model.embed_tokens(ids)
    close(random_model(inputs_embeds=embeds).logits, random_model(ids).logits, atol=0)
    close(random_model(inputs_embeds=embeds.flip(1)).logits, random_model(ids.flip(1)).logits, atol=0)


# ------------------------------------------------------------------------------------------------ head


def head_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, hidden states, positions and mask of 6 tokens from position 3 on: blocks {3}, {4..7}, {8}."""
    positions = torch.arange(3, 9)[None]
    mask = (positions[:, None] // BLOCK <= positions[:, :, None] // BLOCK)[:, None]
    generator = torch.Generator().manual_seed(3)
    return random_ids(15, 1, 6), torch.randn(1, 6, 32, dtype=torch.float64, generator=generator), positions, mask


@torch.no_grad()
def test_the_head_of_a_new_model_adds_nothing() -> None:
    ids, hidden, positions, mask = head_inputs()
    config = make_model().config
    torch.manual_seed(0)
    fresh = MRPForCausalLM(config).double()
    assert fresh.residual(ids, hidden, positions, mask).eq(0).all()
    torch.nn.init.ones_(fresh.mrp_head.norm.weight)
    assert fresh.residual(ids, hidden, positions, mask).ne(0).all()
    assert MRPHead(config).norm.weight.eq(0).all()


@pytest.mark.usefixtures("exact_norms")
@torch.no_grad()
def test_the_head_equals_its_formula(random_model: MRPForCausalLM) -> None:
    """norm(layers(eh_proj([enorm(embed(x')) ; hnorm(h)]))), with norms that are told apart by their weights."""
    model = make_model()
    head, norms = model.mrp_head, (model.mrp_head.enorm, model.mrp_head.hnorm)
    for norm in norms:
        nn.init.normal_(norm.weight)
    ids, hidden, positions, mask = head_inputs()
    e, h = naive_norm(head.enorm, model.model.embed_tokens.weight[ids[0]]), naive_norm(head.hnorm, hidden[0])
    x = e @ head.eh_proj.weight[:, :32].T + h @ head.eh_proj.weight[:, 32:].T  # the embedding half first (method.md, 3)
    at = positions[0].tolist()
    for layer in head.layers:
        x = naive_layer(layer, x, at, same_or_earlier_block(at), model.config)
    close(model.residual(ids, hidden, positions, mask)[0], naive_norm(head.norm, x))


# ------------------------------------------------------------------------------------------------ config


def test_published_config_fields_load() -> None:
    """With the fields that transformers 4.52 wrote, at the values of heavyball/sdar-1_7b-mrp-3lyr."""
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 151936, "mask_token_id": 151669, "head_dim": 128}
    published = published_config(**sizes, block_size=16, num_nextn_predict_layers=3, torch_dtype="bfloat16")
    config = MRPConfig.from_dict(published)
    renamed = {"rope_theta", "rope_scaling", "torch_dtype", "model_type", "transformers_version"}
    renamed |= {"fuse_cross_entropy", "debug", "auto_map"}  # these mean nothing here
    for name in published.keys() - renamed:
        assert getattr(config, name) == published[name], name
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1000000}
    assert config.dtype == torch.bfloat16
    assert config.to_dict()["model_type"] == "sdar_mrp"
    assert "fuse_cross_entropy" not in config.to_dict()
    assert config.has_head
    assert not MRPConfig.from_dict({**published, "num_nextn_predict_layers": 0}).has_head
    again = MRPConfig.from_dict(config.to_dict())
    assert (again.block_size, again.mask_token_id, again.rope_parameters) == (16, 151669, config.rope_parameters)


def test_a_model_whose_weights_are_nowhere() -> None:
    """Its forward gives shapes; decoding says what is wrong."""
    model = make_model().to("meta")
    assert model(torch.tensor([[1, 2, 3]], device="meta")).logits.shape == (1, 3, 64)
    with pytest.raises(ValueError, match=r"is on the meta device.*load the model with from_pretrained"):
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4)
