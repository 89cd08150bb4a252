"""The recipes of published sizes against their shapes, and what a dry run says of them."""

import pytest
from conftest import ROOT
from mrp_trainer.train.objectives import HeadObjective
from mrp_trainer.train.reveals import Reveals
from mrp_trainer.train.runs import dry_run, meta_model
from mrp_trainer.train.settings import read_settings, recipe_names

# By hand: hidden, intermediate, query width; key width 1024 and heads of 128 at every size.
SHAPES = {"1.7b": (2048, 6144, 2048, 28), "4b": (2560, 9728, 4096, 36), "8b": (4096, 12288, 4096, 36)}
VOCABULARY = 151936


def layer_parameters(hidden: int, intermediate: int, queries: int) -> int:
    """q, k, v, o; gate, up, down; two norms, and those of queries and keys."""
    return 2 * hidden * queries + 2 * hidden * 1024 + 3 * hidden * intermediate + 2 * hidden + 2 * 128


@pytest.mark.parametrize("size", SHAPES)
def test_published_recipes(size: str) -> None:
    """The parameters that train are those of the published heads, and the options those of the published recipe."""
    flags = {"model": str(ROOT / "hub_configs" / f"sdar-{size}-mrp"), "output_dir": "unused"}
    settings = read_settings("mrp", f"sdar-{size}-mrp", flags)
    model, said = meta_model(settings), dry_run(settings)
    hidden, intermediate, queries, depth = SHAPES[size]
    layer = layer_parameters(hidden, intermediate, queries)
    head = 2 * hidden * hidden + 3 * hidden + 3 * layer
    frozen = 2 * VOCABULARY * hidden + depth * layer + hidden
    assert model.num_parameters(only_trainable=True) == head
    assert model.num_parameters() == head + frozen
    if size == "1.7b":
        assert round(head / 1e6) == 159  # published: about 159M
    assert f"\nweights: {(2 * frozen + 6 * head) / 2**30:.4g} GiB\n" in said
    assert f"\nin all: {(2 * frozen + 18 * head) / 2**30:.4g} GiB\n" in said
    assert said.endswith("\nrows per step: 16")
    arguments = settings.arguments(bf16=False, use_cpu=True)
    assert arguments.head_objective() == HeadObjective(Reveals("random", 0.5), 1, order_weight=0, reread_weight=0)
    assert (arguments.noisy_copies, arguments.inverse_level, arguments.noise_per) == (1, True, "sample")
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 16


def test_our_recipe() -> None:
    assert recipe_names() == ["packages", "packages-head", "sdar-1.7b-mrp", "sdar-4b-mrp", "sdar-4b-mrp-ours", "sdar-8b-mrp"]
    flags = {"model": str(ROOT / "hub_configs" / "sdar-4b-mrp"), "output_dir": "unused"}
    for recipe in ("sdar-4b-mrp-ours", "sdar-4b-mrp"):
        assert meta_model(read_settings("mrp", recipe, flags)).num_parameters(only_trainable=True) == 315_907_328
    objective = read_settings("mrp", "sdar-4b-mrp-ours", flags).arguments(bf16=False, use_cpu=True).head_objective()
    assert objective == HeadObjective(Reveals("on_policy", 0.5), 2, order_weight=0.5, reread_weight=1.0)
