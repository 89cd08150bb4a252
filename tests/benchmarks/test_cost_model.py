"""Bytes, FLOPs and times of a round, against numbers derived by hand and the parameter count of the model itself."""

import pytest
import torch
from conftest import ROOT, make_model
from mrp_trainer.doctor.roofline import (
    PUBLISHED,
    Counts,
    Device,
    Shape,
    Work,
    backbone_forward,
    decoder_layers,
    head_forward,
    masks_per_state,
    vocabulary_step,
)
from mrp_trainer.evaluate import cost

from benchmarks import cost_model
from benchmarks.cost_model import counts_at
from modeling_mrp import MRPConfig, MRPForCausalLM

# One layer of everything, so that sums can be done in the head: q and o 8 x 4, k and v 4 x 4 each, an MLP of 3 x 4 x 6.
SMALL = Shape("small", 4, 6, 1, 2, 1, 4, 10, 2, 1)
UNIT = Device("unit", bandwidth=1.0, peak=2.0, achievable=0.5)  # a byte and a FLOP take a second each


@pytest.mark.parametrize(("size", "parameters"), [("1.7b", None), ("4b", 4_727_331_584), ("8b", None)])
def test_parameters_are_those_of_the_model(size: str, parameters: int | None) -> None:
    folder = ROOT / "hub_configs" / f"sdar-{size}-mrp"
    with torch.device("meta"):
        model = MRPForCausalLM(MRPConfig.from_pretrained(folder))
    shape = Shape.of(size.upper(), model.config)
    assert shape.name == size.upper()
    assert shape.backbone == sum(p.numel() for p in model.model.parameters()) - model.model.embed_tokens.weight.numel()
    assert model.mrp_head is not None
    assert shape.head == sum(p.numel() for p in model.mrp_head.parameters())
    assert shape.vocabulary == model.lm_head.weight.numel()
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert parameters is None or shape.parameters == parameters


def test_a_layer_by_hand() -> None:
    """Matrices 32 + 32 + 16 + 16 + 72 = 168, norms 4 + 4 + 4 + 4. Three rows of two states of two tokens, ten before them."""
    assert SMALL.layer_matrix == 168
    assert SMALL.layer == 184
    matrices, attention = decoder_layers(SMALL, 1, batch=3, states=2, prefix=10)
    assert matrices == Work(2 * 184, 2 * 168 * 12)
    # 14 keys a row are read and 4 written, 2 x 4 numbers each; 12 queries of size 8 meet 14 keys in two products.
    assert attention == Work(3 * 18 * 8 * 2, 12 * 14 * 8 * 2 * 2)


def test_forwards_by_hand() -> None:
    ends, *layers = backbone_forward(SMALL, 1, 1, 0)
    assert ends == Work(2 * (2 * 2 * 4 + 4), 0)
    assert layers == list(decoder_layers(SMALL, 1, 1, 1, 0))
    ends, projection, *layers = head_forward(SMALL, 1, 1, 0)
    assert ends == Work(2 * (3 * 2 * 4 + 3 * 4), 0)
    assert projection == Work(2 * 32, 2 * 32 * 2)
    assert vocabulary_step(SMALL, 5) == Work(2 * (40 + 20), 2 * 5 * 40)


def test_experts_by_hand() -> None:
    """Four, two a token, of 3 x 4 x 5 numbers in place of an MLP of 72: one token reads two of them, two tokens
    4 (1 - 1/4) = 3, and each computes with two. The head's layers are dense."""
    sparse = Shape("sparse", 4, 6, 1, 2, 1, 4, 10, 2, 1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=5)
    assert [sparse.experts_read(tokens) for tokens in (0, 1, 2)] == [0, 2, 3]
    assert sparse.backbone == 184 - 72 + 16 + 4 * 60 + 4
    matrices = backbone_forward(sparse, 1, 1, 0)[1]
    assert matrices == Work(2 * (184 - 72 + 16 + 3 * 60), 2 * 2 * (168 - 72 + 16 + 2 * 60))
    assert head_forward(sparse, 1, 1, 0) == head_forward(SMALL, 1, 1, 0)
    assert SMALL.experts_read(7) == SMALL.with_experts(3) == 0


def test_the_shape_with_experts_is_that_of_the_model() -> None:
    shape = cost_model.EXPERTS
    named = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    named += ("vocab_size", "block_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    config = MRPConfig(family="sdar_moe", num_nextn_predict_layers=3, **{name: getattr(shape, name) for name in named})
    with torch.device("meta"):
        model = MRPForCausalLM(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert round((shape.backbone + 2 * shape.vocabulary) / 1e9, 1) == 30.5


def test_a_device_takes_the_longer_of_bytes_and_flops() -> None:
    assert UNIT.seconds(Work(3, 2)) == 3
    assert UNIT.seconds(Work(3, 5)) == 5
    assert UNIT.ridge == 1
    assert cost_model.DEVICES["H200"].ridge == pytest.approx(138, abs=0.1)


def test_where_speculation_pays() -> None:
    """Twice the tokens for the same weights pay while weights are what costs; where FLOPs do, twice the states cost twice."""
    shape = PUBLISHED["8B"]
    device, prefix = cost_model.DEVICES["H200"], 0
    static = Counts(1.0, 17 / 16)
    assert static.states_per_forward * masks_per_state(16) == sum(range(17)) / 16
    double = Counts(2.0, 4.0)
    assert cost_model.speedup(shape, device, static, static, 8, prefix) == 1
    assert cost_model.speedup(shape, device, double, static, 1, prefix) == pytest.approx(2, abs=0.02)
    assert cost_model.speedup(shape, device, double, static, 512, prefix) == pytest.approx(2 * (17 / 16) / 4, abs=0.01)
    limit = cost_model.stops_paying_at(shape, device, double, static, prefix)
    assert limit is not None
    assert cost_model.speedup(shape, device, double, static, limit, prefix) < 1
    assert cost_model.speedup(shape, device, double, static, limit - 1, prefix) >= 1
    assert cost_model.stops_paying_at(shape, device, Counts(5.0, 4.0), static, prefix) is None


def test_counts_are_taken_from_results() -> None:
    old = {"family": "math", "batch_size": 1, "mode": "mrp_spec", "states": 4, "tokens_per_forward": 2.5, "head_per_token": 0.8}
    new = {**old, "batch_size": 8, "states_per_forward": 3.9, "head_passes_per_round": 1.5, "states_per_head_pass": 2.0}
    static = {"family": "math", "batch_size": 1, "mode": "static", "tokens_per_forward": 0.95, "head_per_token": 0.0}
    lines = [old, new, static, {**static, "batch_size": 8, "tokens_per_forward": 0.9}, {**new, "batch_size": 64}]
    lines += [{**new, "axis": "prompt", "batch_size": 16}, {**new, "family": "code"}, {**old, "mode": "self_spec"}]
    assert counts_at(lines, "math", "mrp_spec", 4, 1, 16) == Counts(2.5, 4.0, 2.0, 1.0)
    assert counts_at(lines, "math", "mrp_spec", 4, 32, 16) == Counts(2.5, 3.9, 1.5, 2.0)
    assert counts_at(lines, "math", "self_spec", 4, 1, 16) == Counts(2.5, 4.0, 0.0, 1.0)
    assert counts_at(lines, "math", "static", 4, 32, 16) == Counts(0.95, 17 / 16)


def test_head_share_counts_the_rows_that_picks_read() -> None:
    """4 rows of the lm_head in place of 64: 60 * 32 numbers less over those of the layers and the lm_head; by a model's own."""
    model = make_model()
    assert model.mrp_head is not None
    layers, head = (sum(p.numel() for p in part.parameters()) for part in (model.model.layers, model.mrp_head))
    shape = Shape.of("small", model.config)
    assert shape.head_share() == pytest.approx((head + 64 * 32) / (layers + 64 * 32))
    assert shape.head_share() - shape.head_share(4) == pytest.approx(60 * 32 / (layers + 64 * 32))


def test_tokens_per_unit_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens a forward and half a head pass a token: one pass a forward, at a quarter of it."""
    monkeypatch.setitem(cost.HEAD_SHARES, "4B", 0.25)
    line = {"tokens_per_forward": 2.0, "tokens_per_forward_95": [1.5, 2.5], "head_per_token": 0.5}
    assert cost.charged(line) == {**line, "tokens_per_unit": 1.6, "tokens_per_unit_95": [1.2, 2.0]}
    assert cost.charged({"tokens_per_forward": 2.0})["tokens_per_unit"] is None
    stale = {"tokens_per_forward": 1.6, "head_per_token": 0.0}
    assert cost.break_even(line, stale) == pytest.approx(0.25)
    assert cost.charged(stale)["tokens_per_unit"] == 1.6
    assert [cost.charged_as(size) for size in (2048, 2560, 4096, 128, None)] == ["1.7B", "4B", "8B", "4B", "4B"]
