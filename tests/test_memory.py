"""Estimates of memory against what passes save, and the recipes against their shapes."""

from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, make_model
from mrp_trainer.data.collator import DiffusionCollator
from mrp_trainer.data.packed import PackedBatch
from mrp_trainer.data.samples import make_sample
from mrp_trainer.train import memory
from mrp_trainer.train.losses import _LOGITS_AT_ONCE as CHUNK
from mrp_trainer.train.memory import Load, MemoryEstimate, estimate
from mrp_trainer.train.objectives import HeadObjective, block_diffusion
from mrp_trainer.train.reveals import Reveals
from mrp_trainer.train.runs import dry_run
from mrp_trainer.train.settings import read_settings, recipe_names

WITHIN = 1.25
# By hand: hidden, intermediate, query width; key width 1024 and heads of 128 at every size.
SHAPES = {"1.7b": (2048, 6144, 2048, 28), "4b": (2560, 9728, 4096, 36), "8b": (4096, 12288, 4096, 36)}
VOCABULARY = 151936


def layer_parameters(hidden: int, intermediate: int, queries: int) -> int:
    """q, k, v, o; gate, up, down; two norms, and those of queries and keys."""
    return 2 * hidden * queries + 2 * hidden * 1024 + 3 * hidden * intermediate + 2 * hidden + 2 * 128


def saved_bytes(run: Any, model: torch.nn.Module) -> int:
    """Bytes of the storages that a forward pass keeps for its backward pass, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in own)


@pytest.mark.parametrize(
    ("objective", "unroll", "copies", "length"),
    [("mrp", 1, 2, 64), ("mrp", 2, 2, 128), ("mrp", 3, 1, 64), ("block_diffusion", 1, 1, 64), ("block_diffusion", 1, 2, 64)],
)
def test_activations_are_as_estimated(objective: str, unroll: int, copies: int, length: int) -> None:
    """Within a factor of 1.25 of what autograd keeps, at two rows in which every token is a response."""
    model = make_model(vocab_size=128, mask_token_id=120, hidden_size=64, intermediate_size=192, head_dim=16).float()
    if objective == "mrp":
        model.requires_grad_(False).mrp_head.requires_grad_(True)
    else:
        model.detach_head()
    random = np.random.default_rng(0)
    samples = [make_sample(i, random.integers(1, 100, length).tolist(), [True] * length, 4, 0) for i in range(2)]
    batch = PackedBatch(**DiffusionCollator(4, 120, 0, copies)(samples))
    loss = HeadObjective(Reveals("on_policy", 0.5, 4), unroll=unroll) if objective == "mrp" else block_diffusion
    measured = saved_bytes(lambda: loss(model, batch), model)
    guessed = estimate(model, Load(2, length, copies, objective, unroll)).activations
    assert guessed / WITHIN < measured < guessed * WITHIN


def test_the_parts_of_an_estimate_by_hand() -> None:
    """make_model's backbone: 64 x 32 embeddings, twice; two layers of 32 x (2 x 32 + 2 x 16) + 3 x 32 x 48 matrices with norms
    of 2 x 32 + 2 x 8; a norm of 32. Its head: two such layers, 2 x 32 x 32 and three norms."""
    layer = 32 * (2 * 32 + 2 * 16) + 3 * 32 * 48 + 2 * 32 + 2 * 8
    backbone, head = 2 * 64 * 32 + 2 * layer + 32, 2 * layer + 2 * 32 * 32 + 3 * 32
    model = make_model().requires_grad_(False)
    model.mrp_head.requires_grad_(True)
    found = estimate(model, Load(rows=1, max_length=8, copies=1, bf16=True))
    assert (found.parameters, found.trained) == (backbone + head, head)
    assert found.weights == 2 * backbone + (4 + 2) * head
    assert (found.gradients, found.optimizer) == (4 * head, 8 * head)
    assert found.loss == 8 * 4 * 8 * 64  # eight matrices of float32 logits, all 8 tokens in one chunk
    keys = 2 * 16 * 2 * 8 * 2  # keys and values of width 16 in bfloat16, of the 8 clean columns, in 2 layers
    states = 16 * 32 * 2 + 8 * 32 * 2 * 2  # h_A of all columns, h_B twice of the noisy ones
    slopes = 2 * 8 * 32 * 4
    assert found.kept == keys + states + slopes + 16 * 16
    muon = estimate(model, Load(1, 8, 1, bf16=True, optimizer_bytes=4))
    matrices = 2 * (layer - 2 * 32 - 2 * 8)
    assert muon.optimizer == 4 * matrices + 8 * (head - matrices)
    assert memory._LOGITS_AT_ONCE == CHUNK


def test_totals_of_several_processes() -> None:
    found = MemoryEstimate(10, 4, 800, 400, 240, 1, 2, 3, 4, 50)
    assert found.total() == found.total(1, sharded=True) == 1440 + 10
    assert found.total(4) == 1440 + 400 + 10
    assert found.total(4, sharded=True) == 1440 // 4 + 50 + 10


@pytest.mark.parametrize("size", SHAPES)
def test_published_recipes(size: str) -> None:
    """The parameters that train are those of the published heads, and the options those of the published recipe."""
    flags = {"model": str(ROOT / "hub_configs" / f"sdar-{size}-mrp"), "output_dir": "unused"}
    settings = read_settings("mrp", f"sdar-{size}-mrp", flags)
    plan = dry_run(settings, processes=8)
    hidden, intermediate, queries, depth = SHAPES[size]
    layer = layer_parameters(hidden, intermediate, queries)
    head = 2 * hidden * hidden + 3 * hidden + 3 * layer
    assert plan.memory.trained == head
    assert plan.memory.parameters == head + 2 * VOCABULARY * hidden + depth * layer + hidden
    if size == "1.7b":
        assert round(head / 1e6) == 159  # published: about 159M
    assert plan.memory.weights == 2 * (plan.memory.parameters - head) + 6 * head
    arguments = settings.arguments(bf16=False, use_cpu=True)
    objective = arguments.head_objective(16)
    assert (objective.reveals.rule, objective.loss, objective.unroll) == ("random", "kl", 1)
    assert (objective.order_weight, objective.reread_weight) == (0, 0)
    assert (arguments.noisy_copies, arguments.inverse_level, arguments.noise_per) == (1, True, "sample")
    assert (arguments.learning_rate, arguments.lr_scheduler_type, arguments.num_train_epochs) == (1e-3, "cosine_with_min_lr", 1)
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 16
    assert [dry_run(settings, processes).rows_per_step for processes in (1, 8)] == [16, 16]
    with pytest.raises(ValueError, match="rows_per_step is 16: 3 processes with per_device_train_batch_size 1 take 3 rows"):
        dry_run(settings, processes=3)
    assert arguments.muon_learning_rate is None
    assert settings.training["bf16"] is True
    assert (settings.training["max_length"], settings.options.head_init, settings.options.head_layers) == (4096, "published", 3)


def test_our_recipe() -> None:
    assert recipe_names() == ["sdar-1.7b-mrp", "sdar-4b-mrp", "sdar-4b-mrp-ours", "sdar-8b-mrp"]
    flags = {"model": str(ROOT / "hub_configs" / "sdar-4b-mrp"), "output_dir": "unused"}
    ours = dry_run(read_settings("mrp", "sdar-4b-mrp-ours", flags))
    published = dry_run(read_settings("mrp", "sdar-4b-mrp", flags))
    assert ours.memory.trained == published.memory.trained == 315_907_328
    objective = ours.settings.arguments(bf16=False, use_cpu=True).head_objective(16)
    assert (objective.reveals.rule, objective.reveals.eager_share) == ("on_policy", 0.5)
    assert (objective.unroll, objective.order_weight, objective.reread_weight) == (2, 0.5, 1.0)
    # Two copies and two steps: 3 + 2 columns go through the head for each token, not 2.
    assert ours.memory.activations > 2.5 * published.memory.activations
