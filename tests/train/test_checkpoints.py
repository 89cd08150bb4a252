"""What a head's checkpoints hold: the head, and the name of a backbone that has one; and which are taken up."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.checkpoints import last_whole_checkpoint
from mrp_trainer.train.trainer import MRPTrainer
from safetensors.torch import load_file, save_file
from training_runs import OPTIONS, Rows, small_model

from modeling_mrp import MRPForCausalLM


@pytest.fixture
def loaded(tmp_path: Path) -> MRPForCausalLM:
    """A model that came from a folder, with a head that says something."""
    small_model().save_pretrained(tmp_path / "base")
    return MRPForCausalLM.from_pretrained(tmp_path / "base")


def trainer_of(model: MRPForCausalLM, folder: Path, **options: Any) -> MRPTrainer:
    chosen = {**OPTIONS, "objective": "mrp", "save_strategy": "steps", "save_steps": 1, **options}
    return MRPTrainer(model, MRPTrainingArguments(str(folder), **chosen), Rows(12), Rows(4))


def head_of(model: MRPForCausalLM) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if name.startswith("mrp_head.")}


def test_a_checkpoint_is_a_head_repository(loaded: MRPForCausalLM, tmp_path: Path) -> None:
    """Of the size of its head, and it loads with its backbone; an explicit `save_model` writes both."""
    trainer = trainer_of(loaded, tmp_path / "run")
    trainer.train()
    stored = load_file(tmp_path / "run" / "checkpoint-3" / "model.safetensors")
    trained = head_of(loaded)
    assert stored.keys() == trained.keys()
    again = MRPForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-3").state_dict()
    assert all(torch.equal(again[name], value) for name, value in loaded.state_dict().items())
    trainer.save_model(str(tmp_path / "final"))
    assert load_file(tmp_path / "final" / "model.safetensors").keys() == loaded.state_dict().keys()


def test_resumed_from_the_head_alone(
    loaded: MRPForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bit for bit, and nobody is told that weights are missing."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    trainer_of(loaded, tmp_path / "run").train()
    expected = head_of(loaded)
    other = MRPForCausalLM.from_pretrained(tmp_path / "base")
    trainer_of(other, tmp_path / "run").train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    assert all(torch.equal(value, expected[name]) for name, value in head_of(other).items())
    assert "missing" not in caplog.text


def test_a_checkpoint_without_a_part_of_the_head(loaded: MRPForCausalLM, tmp_path: Path) -> None:
    trainer_of(loaded, tmp_path).train()
    weights = tmp_path / "checkpoint-2" / "model.safetensors"
    stored = load_file(weights)
    del stored["mrp_head.eh_proj.weight"]
    save_file(stored, weights, {"format": "pt"})
    with pytest.raises(ValueError, match=r"the checkpoint lacks mrp_head\.eh_proj\.weight and 0 more: resume from another"):
        trainer_of(loaded, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_backbone_that_trains_is_saved_and_loses_its_name(loaded: MRPForCausalLM, tmp_path: Path) -> None:
    trainer_of(loaded, tmp_path, objective="block_diffusion", max_steps=1).train()
    assert load_file(tmp_path / "checkpoint-1" / "model.safetensors").keys() == loaded.state_dict().keys()
    with pytest.raises(ValueError, match="base_model_name_or_path"):
        loaded.save_pretrained(tmp_path / "head", head_only=True)


def test_the_newest_checkpoint_is_that_of_the_greatest_step(tmp_path: Path) -> None:
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    assert last_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
