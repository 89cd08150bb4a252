"""What a head's checkpoints hold: the head, and the name of a backbone that has one; and what is taken up from them."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_runs import rows_trainer, small_model

from modeling_mrp import MRPForCausalLM


@pytest.fixture
def loaded(tmp_path: Path) -> MRPForCausalLM:
    """A model that came from a folder, with a head that says something."""
    small_model().save_pretrained(tmp_path / "base")
    return MRPForCausalLM.from_pretrained(tmp_path / "base")


def test_a_checkpoint_is_a_head_repository(
    loaded: MRPForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the size of its head; it loads with its backbone, and training goes on from it, bit for bit, without a word of
    missing weights. An explicit `save_model` writes both."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    trainer = rows_trainer(tmp_path / "run", loaded, objective="mrp")
    trainer.train()
    trained = loaded.state_dict()
    stored = load_file(tmp_path / "run" / "checkpoint-3" / "model.safetensors")
    assert stored.keys() == {name for name in trained if name.startswith("mrp_head.")}
    other = MRPForCausalLM.from_pretrained(tmp_path / "base")
    rows_trainer(tmp_path / "run", other, objective="mrp").train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1"))
    for again in (MRPForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-3"), other):
        assert all(torch.equal(again.state_dict()[name], value) for name, value in trained.items())
    assert "missing" not in caplog.text
    trainer.save_model(str(tmp_path / "final"))
    assert load_file(tmp_path / "final" / "model.safetensors").keys() == trained.keys()


def test_a_checkpoint_without_a_part_of_the_head(loaded: MRPForCausalLM, tmp_path: Path) -> None:
    rows_trainer(tmp_path, loaded, objective="mrp", max_steps=1).train()
    weights = tmp_path / "checkpoint-1" / "model.safetensors"
    stored = load_file(weights)
    del stored["mrp_head.eh_proj.weight"]
    save_file(stored, weights, {"format": "pt"})
    with pytest.raises(ValueError, match=r"the checkpoint lacks mrp_head\.eh_proj\.weight and 0 more: resume from another"):
        rows_trainer(tmp_path, loaded, objective="mrp").train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_backbone_that_trains_is_saved_and_loses_its_name(loaded: MRPForCausalLM, tmp_path: Path) -> None:
    rows_trainer(tmp_path, loaded, max_steps=1).train()
    assert load_file(tmp_path / "checkpoint-1" / "model.safetensors").keys() == loaded.state_dict().keys()
    with pytest.raises(ValueError, match="base_model_name_or_path"):
        loaded.save_pretrained(tmp_path / "head", head_only=True)
