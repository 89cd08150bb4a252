"""A head trained by the published recipe beside the embedded one, in both loops: the recipe, the command, the table."""

from pathlib import Path
from typing import Any

import pytest
from conftest import TINY
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.tiny import TinyOptions
from test_result_weights import write

from benchmarks import published_head, tables

pytestmark = pytest.mark.skipif(not TINY.exists(), reason="the embedded checkpoint is not here")


def test_the_recipe_is_the_published_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states, loss and start; steps, batches and rates are those of the embedded head."""
    called: list[Any] = []
    monkeypatch.setattr(published_head, "train_head", lambda *given, **loss: called.extend((*given, loss)))
    published_head.train_published(tmp_path, 5)
    options, dataset, loss = called
    usual = vars(TinyOptions())
    changed = {name: value for name, value in vars(options).items() if value != usual[name]}
    assert changed == {"work": tmp_path, "head_name": "published", "head_steps": 5, "head_init": "published"}
    arguments = MRPTrainingArguments(str(tmp_path), objective="mrp", use_cpu=True, **loss)
    assert (arguments.noisy_copies, arguments.noise_per, arguments.inverse_level) == (1, "sample", True)
    objective = arguments.head_objective(16)
    assert (objective.reveals.rule, objective.loss, objective.unroll) == ("random", "kl", 1)
    assert (objective.order_weight, objective.reread_weight) == (0, 0)
    assert len(dataset) == 5 * options.head_batch_size
    assert dataset.split == "train"
    assert all(sample.reveal_step is None for sample in dataset)


def test_the_table(tmp_path: Path) -> None:
    """A line that was measured again counts; two processes write their families in any order."""
    cells = [("published", "released", 2.0), ("published", "mrp_spec", 3.0), ("embedded", "released", 2.5)]
    lines = [
        {
            "family": family,
            "num_draft_states": 4,
            "head": head,
            "decoding": loop,
            "tokens_per_forward": speed,
            "tokens_per_forward_95": [speed - 0.1, speed + 0.1],
            "over_published": speed / 2,
            "over_published_95": [speed / 2 - 0.1, speed / 2 + 0.1],
            "texts_that_differ": 1,
        }
        for family in ("code", "math")
        for head, loop, speed in [*cells, ("embedded", "mrp_spec", 5.0), ("embedded", "mrp_spec", 4.0)]
    ]
    write(tmp_path / "tiny_published_head.jsonl", lines)
    head, _, row, code = tables.published_head(tmp_path).splitlines()
    columns = "released, published head | released, embedded head | mrp_spec, published head | mrp_spec, embedded head"
    assert head == f"| family | K | {columns} | texts that differ |"
    assert code == row.replace("math", "code")
    assert row == (
        "| math | 4 | 2.00 (1.90-2.10) | 2.50 (1.25x, 1.15-1.35) | 3.00 (1.50x, 1.40-1.60) | 4.00 (2.00x, 1.90-2.10) | 4 |"
    )
