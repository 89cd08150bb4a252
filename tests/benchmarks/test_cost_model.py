"""Bytes, FLOPs and times of a round, against numbers derived by hand and the parameter count of the
model itself.

`test_claims.py` compares the tables of predictions, with experts and without, to the digit.
"""

import pytest
import torch
from mrp_trainer.evaluate import cost
from mrp_trainer.evaluate.roofline import PUBLISHED, Shape, Work, decoder_layers

from modeling_mrp import MRPConfig, MRPForCausalLM
from tests.support.places import ROOT
from tests.support.random_cases import make_model

# One layer of everything, so that sums can be done in the head: q and o 8 x 4, k and v 4 x 4 each,
# an MLP of 3 x 4 x 6.
SMALL = Shape("small", 4, 6, 1, 2, 1, 4, 10, 2, 1)


@pytest.mark.parametrize("size", PUBLISHED)
def test_parameters_are_those_of_the_model(size: str) -> None:
    with torch.device("meta"):
        model = MRPForCausalLM(
            MRPConfig.from_pretrained(ROOT / "hub_configs" / f"sdar-{size.lower()}-mrp")
        )
    shape = Shape.of(size, model.config)
    assert shape == PUBLISHED[size]
    assert (
        shape.backbone
        == sum(p.numel() for p in model.model.parameters())
        - model.model.embed_tokens.weight.numel()
    )
    assert model.mrp_head is not None
    assert shape.head == sum(p.numel() for p in model.mrp_head.parameters())
    assert shape.vocabulary == model.lm_head.weight.numel()
    assert size != "4B" or sum(p.numel() for p in model.parameters()) == 4_727_331_584


def test_memory_is_that_of_the_model() -> None:
    """In bfloat16 that of its tensors and its cache; in fewer bits without the matrices that
    quantizing takes."""
    model = make_model().bfloat16()
    shape, plain = (
        Shape.of("", model.config),
        sum(parameter.nbytes for parameter in model.parameters()),
    )
    layers = [
        part
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Linear) and name != "lm_head"
    ]
    assert shape.weight_bytes(2) == plain
    assert shape.weight_bytes(0.5) == plain - 1.5 * sum(layer.weight.numel() for layer in layers)
    small, large = (
        model.block_cache(1, capacity, 4, with_head=True).nbytes for capacity in (400, 800)
    )
    assert 400 * shape.cache_bytes == large - small


def test_a_layer_by_hand() -> None:
    """Matrices 32 + 32 + 16 + 16 + 72 = 168, norms 4 + 4 + 4 + 4. Three rows of two states of two
    tokens, ten before them."""
    assert SMALL.layer_matrix == 168
    assert SMALL.layer == 184
    matrices, attention = decoder_layers(SMALL, 1, batch=3, states=2, prefix=10)
    assert matrices == Work(2 * 184, 2 * 168 * 12)
    # 14 keys a row are read and 4 written, 2 x 4 numbers each; 12 queries of size 8 meet 14 keys in
    # two products.
    assert attention == Work(3 * 18 * 8 * 2, 12 * 14 * 8 * 2 * 2)


def test_head_share_counts_the_rows_that_picks_read() -> None:
    """4 rows of the lm_head in place of 64: 60 * 32 numbers less over those of the layers and the
    lm_head; by a model's own."""
    model = make_model()
    assert model.mrp_head is not None
    layers, head = (
        sum(p.numel() for p in part.parameters()) for part in (model.model.layers, model.mrp_head)
    )
    shape = Shape.of("small", model.config)
    assert shape.head_share() == pytest.approx((head + 64 * 32) / (layers + 64 * 32))
    assert shape.head_share() - shape.head_share(4) == pytest.approx(60 * 32 / (layers + 64 * 32))
    assert (
        pytest.approx({name: one.head_share() for name, one in PUBLISHED.items()}, abs=1e-8)
        == cost.HEAD_SHARES
    )


def test_tokens_per_unit_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens a forward and half a head pass a token: one pass a forward, at a quarter of it."""
    monkeypatch.setitem(cost.HEAD_SHARES, "4B", 0.25)
    line = {"tokens_per_forward": 2.0, "tokens_per_forward_95": [1.5, 2.5], "head_per_token": 0.5}
    assert cost.charged(line) == {**line, "tokens_per_unit": 1.6, "tokens_per_unit_95": [1.2, 2.0]}
    assert cost.charged({"tokens_per_forward": 2.0})["tokens_per_unit"] is None
    stale = {"tokens_per_forward": 1.6, "head_per_token": 0.0}
    assert cost.break_even(line, stale) == pytest.approx(0.25)
    assert cost.charged(stale)["tokens_per_unit"] == 1.6
    listed = {**line, "num_draft_states": 4, "draft_shortlist": 16}
    rows = 3 * 8 * 16  # a state has eight masks, half of its block, on average
    assert (
        cost.head_share(listed) == PUBLISHED["4B"].head_share(rows) < cost.head_share(line, "1.7B")
    )
    assert cost.charged(listed)["tokens_per_unit"] == pytest.approx(
        2 / (1 + PUBLISHED["4B"].head_share(rows))
    )
    assert [cost.charged_as(size) for size in (2048, 2560, 4096, 128, None)] == [
        "1.7B",
        "4B",
        "8B",
        "4B",
        "4B",
    ]
