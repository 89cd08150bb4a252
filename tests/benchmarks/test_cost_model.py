"""Bytes, FLOPs and times of a round, against numbers derived by hand and the parameter count of the
model itself.

`test_claims.py` compares the tables of predictions, with experts and without, to the digit.
"""

import pytest
import torch
from mrp_trainer.evaluate import cost
from mrp_trainer.evaluate.roofline import (
    BYTES,
    DEVICES,
    PUBLISHED,
    Shape,
    Work,
    decoder_layers,
)

from modeling_mrp import MRPConfig, MRPForCausalLM
from modeling_mrp.networks.predicted import GRAPH_FORWARD, GRAPH_LAYER, HOST
from modeling_mrp.rules.costs import RoundCosts
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


def test_tokens_per_unit_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of one state takes 10, of two 12 and of four 20; a pass over one state takes 2 and
    over three 4; the host takes 1 for a state."""
    table = RoundCosts((1, 2, 4), (9.0, 10.0, 16.0), (2.0, 3.0, 5.0), 1.0)
    monkeypatch.setattr(cost, "costs_of", lambda *_: table)
    line = {"tokens_per_forward": 2.0, "tokens_per_forward_95": [1.5, 2.5], "head_per_token": 0.5}
    # one pass a forward, over one state
    assert cost.units_per_forward(line) == pytest.approx(1.2)
    drafted = {**line, "num_draft_states": 4}
    # four states, where nothing else is known, and a pass over three
    assert cost.units_per_forward(drafted) == pytest.approx(2.0 + 0.4)
    # half of the forwards with four states, half with one
    counted = {**drafted, "states_per_forward": 2.5}
    assert cost.units_per_forward(counted) == pytest.approx(1.5 + 0.4)
    assert cost.charged(counted) == {
        **counted,
        "tokens_per_unit": pytest.approx(2 / 1.9),
        "tokens_per_unit_95": [pytest.approx(1.5 / 1.9), pytest.approx(2.5 / 1.9)],
    }
    # two passes, over two states and over three
    assert cost.pass_units({**drafted, "draft_passes": 2}) == pytest.approx(0.35)
    assert cost.pass_units({**line, "num_draft_states": "auto"}) > cost.pass_units(drafted)
    assert cost.charged({"tokens_per_forward": 2.0})["tokens_per_unit"] is None
    # in a batch, every row computes as many states as the one with the most
    wide = cost.units_per_forward({**counted, "head_per_token": 0.0}, cost.Deployment(batch=2))
    assert wide == pytest.approx((16.0 * 2 + 8) / (10.0 + 2))
    stale = {"tokens_per_forward": 1.25, "head_per_token": 0.0}
    # 0.8 units a token without a head; with it 0.75 apart from passes
    assert cost.break_even(counted, stale) == pytest.approx(0.1)
    assert cost.break_even(counted, {**stale, "tokens_per_forward": 1.0}) == pytest.approx(0.5)


def test_places_differ_in_shape_device_batch_blocks_and_lists() -> None:
    """Against the bytes of weights: at batch 1, a forward of one state reads them all; a pass with
    a shortlist reads less of lm_head."""
    line = {"tokens_per_forward": 3.0, "head_per_token": 0.3, "num_draft_states": 8}
    units = cost.units_per_forward
    assert units(line) == units(line, cost.Deployment("4B", "H200", 1))
    deployments = [
        cost.Deployment(),
        cost.Deployment("1.7B"),
        cost.Deployment(device="RTX4090"),
        cost.Deployment(batch=8),
    ]
    assert len({units(line, deployment) for deployment in deployments}) == len(deployments)
    assert units({**line, "draft_shortlist": 16}) < units(line)
    batch = cost.Deployment(batch=8)
    assert units({**line, "block_size": 4}, batch) < units(line, batch)
    assert units({**line, "states_per_forward": 5.0}) < units(line)
    for name, shape in PUBLISHED.items():
        costs = cost.costs_of(name, "H200", 16)
        read = (shape.backbone + shape.vocabulary) * BYTES / DEVICES["H200"].bandwidth
        launches = shape.num_hidden_layers * GRAPH_LAYER + GRAPH_FORWARD
        assert costs.backbone[0] == pytest.approx(read + launches, rel=0.01)
    assert str(cost.CHARGED) == "4B on one H200 at batch 1"


def test_a_drafted_round_is_charged_what_its_launches_and_bytes_predict() -> None:
    """Over a round of one state, as the page of GPUs has it by counted launches and copies. That
    page leaves out the host's decisions, and takes the maker's bandwidth in place of the measured
    one, at which products take longer than weights."""
    milliseconds = {}
    for row in (ROOT / "docs/gpu.md").read_text().splitlines():
        if row.startswith("| 1 | ") and "->" in row:  # rows, K, ..., on an H100, on an H200, ...
            cells = [cell.strip() for cell in row.split("|")]
            milliseconds[int(cells[2])] = float(cells[9].partition("-> ")[2].split()[0])
    drafted = {"num_draft_states": 8, "draft_shortlist": 16, "tokens_per_forward": 1.0}
    units = cost.units_per_forward({**drafted, "head_per_token": 1.0})
    host = 7 * HOST / cost.costs_of("4B", "H200", 16).of_round(1, 1, 0)
    assert units - host == pytest.approx(milliseconds[8] / milliseconds[1], rel=0.06)
    assert [cost.charged_as(size) for size in (2048, 2560, 4096, 128, None)] == [
        "1.7B",
        "4B",
        "8B",
        "4B",
        "4B",
    ]
