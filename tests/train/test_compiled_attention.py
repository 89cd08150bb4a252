"""Compiled attention of training passes: how often it is compiled in the runs that documents name,
counted on a CPU by Dynamo's own cache, with a compiler that hands the graph back."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import yaml
from mrp_trainer.data.samples import Sample
from mrp_trainer.train import attention
from mrp_trainer.train.collator import DiffusionCollator, widths_of
from mrp_trainer.train.settings import RECIPES
from torch.nn.attention import flex_attention as flex_module

from modeling_mrp.kernels.pick import logits_at_once
from tests.support.random_cases import make_model
from tests.support.training_runs import trainer_of

# torch's default, beyond which a function runs uncompiled
LIMIT = 8


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of graphs that were compiled, in a list of one; CPUs may compute gradients of
    flex attention, which torch forbids for its own compiler."""
    torch._dynamo.reset()
    count = [0]

    def hand_back(graph: Any, inputs: Any) -> Callable[..., Any]:
        count[0] += 1
        return graph.forward

    function = torch.compile(flex_module.flex_attention, backend=hand_back, dynamic=False)
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    monkeypatch.setattr(attention, "compiled_flex_attention", lambda: function)
    yield count
    torch._dynamo.reset()


def rows(first: int, count: int) -> list[list[Sample]]:
    """Rows of one sample or two, of other lengths and other parts to learn each."""
    made = []
    for number in range(first, first + count):
        draw = np.random.default_rng(number)
        row = []
        for part in range(1 + number % 2):
            length = 4 * int(draw.integers(2, 6))
            learned = np.arange(length) >= int(draw.integers(0, length - 4))
            row.append(Sample(2 * number + part, draw.integers(1, 50, length), learned))
        made.append(row)
    return made


def options_of(recipe: str) -> dict[str, Any]:
    """The options of a recipe that decide what passes there are."""
    fields = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text())
    names = (
        "noisy_copies",
        "noise_per",
        "inverse_level",
        "reveal_rule",
        "eager_share",
        "unroll",
        "order_weight",
        "reread_weight",
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
    )
    return {name: fields[name] for name in names if name in fields}


@pytest.mark.parametrize(
    "recipe", ["sdar-1.7b-mrp", "sdar-4b-mrp", "sdar-4b-mrp-ours", "sdar-8b-mrp"]
)
def test_a_run_compiles_each_pass_once(recipe: str, tmp_path: Path, compiled: list[int]) -> None:
    """All columns or the noisy ones as queries, with gradients or without: four, through training,
    evaluation in its middle and training again."""
    options = options_of(recipe)
    assert options["per_device_eval_batch_size"] == options["per_device_train_batch_size"] == 1
    trainer = trainer_of(
        tmp_path,
        make_model(num_hidden_layers=1, num_nextn_predict_layers=1).float(),
        rows(0, 12),
        rows(50, 6),
        objective="mrp",
        packed_attention="flex_attention",
        max_steps=8,
        gradient_accumulation_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        **options,
    )
    collator = trainer.data_collator
    trainer.train()
    assert trainer.data_collator is collator
    assert any("eval_loss" in line for line in trainer.state.log_history)
    expected = {"sdar-4b-mrp-ours": 4}.get(recipe, 3)
    assert compiled == [expected]
    assert expected <= LIMIT


def test_a_backbone_compiles_its_pass_once(tmp_path: Path, compiled: list[int]) -> None:
    """With gradients, and without for what is held out."""
    trainer = trainer_of(
        tmp_path,
        make_model(num_hidden_layers=1, num_nextn_predict_layers=0).float(),
        rows(0, 12),
        rows(50, 6),
        objective="block_diffusion",
        packed_attention="flex_attention",
        max_steps=8,
        gradient_accumulation_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
    )
    trainer.train()
    assert compiled == [2]


def test_the_loss_is_that_of_dense_attention(tmp_path: Path, compiled: list[int]) -> None:
    """Columns that only fill up change nothing."""
    losses = []
    for name in ("flex_attention", "sdpa"):
        trainer = trainer_of(
            tmp_path / name,
            make_model(num_hidden_layers=1, num_nextn_predict_layers=1).float(),
            rows(0, 8),
            objective="mrp",
            packed_attention=name,
            max_steps=3,
            per_device_train_batch_size=1,
            logging_steps=1,
        )
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    assert compiled[0] > 0


def test_widths_by_hand() -> None:
    """Two samples of 8 and 4 tokens that learn one block each, two copies: 16 noisy columns, 12
    clean ones."""
    learned = np.arange(8) >= 4
    row = [
        Sample(0, np.arange(8), learned),
        Sample(1, np.arange(4), np.ones(4, bool)),
    ]
    assert widths_of([row, row[:1]], 4, 2) == (16, 12)
    assert widths_of([], 4, 2) == (4, 4)
    fixed = DiffusionCollator(4, 60, 0, widths=(20, 16))
    batch, plain = fixed([row]), DiffusionCollator(4, 60, 0)([row])
    assert batch["input_ids"].shape == (1, 36)
    assert (batch["view"][0, 16:20] == -1).all()
    assert (batch["view"][0, 32:] == -1).all()
    assert torch.equal(batch["input_ids"][:, :16], plain["input_ids"][:, :16])
    assert torch.equal(batch["input_ids"][:, 20:32], plain["input_ids"][:, 16:])
    with pytest.raises(
        ValueError, match=r"16 noisy and 12 clean columns, and widths are \(8, 16\)"
    ):
        DiffusionCollator(4, 60, 0, widths=(8, 16))([row])


@pytest.mark.parametrize(
    ("free", "reserved", "expected"),
    [
        (128 << 20, 0, 1 << 24),  # never less than elsewhere
        (8 << 30, 0, 1 << 26),
        (4 << 30, 4 << 30, 1 << 26),  # what torch holds and does not use
        (130 << 30, 0, 1 << 29),  # 2 GiB of float32, whatever is free
    ],
)
def test_the_vocabulary_is_read_in_chunks_as_memory_allows(
    free: int, reserved: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 32nd of what is free, in float32."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 1 << 40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 0)
    assert logits_at_once(torch.device("cuda")) == expected
    assert logits_at_once(torch.device("cpu")) == 1 << 24
