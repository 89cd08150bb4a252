"""Trainers that would put a loss of their own in place of block diffusion are refused, and transformers' own is not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from modeling_mrp import MRPForCausalLM

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 3 + 4?"},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "And 5 + 1?"},
    {"role": "assistant", "content": "6"},
]
QUIET: dict[str, Any] = {"use_cpu": True, "report_to": "none", "max_steps": 1, "disable_tqdm": True, "save_strategy": "no"}
REFUSED = r"TRL's trainers do so for a next-token loss, .* train with mrp_trainer\.MRPTrainer, which takes the same records"


def test_a_backbone_is_not_called_with_a_mask_of_its_own() -> None:
    """So trainers call it that compute a loss themselves; a call of the model is not touched."""
    model = MRPForCausalLM.from_pretrained(TINY)
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match=REFUSED):
        model.base_model(ids, attention_mask=torch.ones(1, 1, 3, 3))
    assert model(ids, output_hidden_states=True).hidden_states[-1].shape == (1, 3, model.config.hidden_size)


def test_a_trainer_of_trl_is_refused(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """At the first step, with all weights as they were; chats are prepared for the assistant's turns alone."""
    trl = pytest.importorskip("trl", reason="its trainers are refused")
    datasets = pytest.importorskip("datasets", reason="trl takes nothing else")
    model = MRPForCausalLM.from_pretrained(TINY)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    args = trl.SFTConfig(str(tmp_path), bf16=False, per_device_train_batch_size=2, assistant_only_loss=True, **QUIET)
    data = datasets.Dataset.from_list([{"messages": CHAT}] * 2)
    trainer = trl.SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tiny_tokenizer)
    with pytest.raises(ValueError, match=REFUSED):
        trainer.train()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "of_trainer"),
    [({"label_smoothing_factor": 0.1}, {}), ({}, {"compute_loss_func": lambda outputs, labels, **_: outputs.logits.sum()})],
    ids=["label_smoothing_factor", "compute_loss_func"],
)
def test_the_stock_trainer_keeps_no_labels_for_itself(
    arguments: dict[str, Any], of_trainer: dict[str, Any], tmp_path: Path
) -> None:
    """Either would score clean text, of which every position sees what it predicts. Without them it trains."""
    rows = [{"input_ids": torch.arange(5, 25), "labels": torch.arange(5, 25)}] * 2
    model = MRPForCausalLM.from_pretrained(TINY)
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **QUIET, **arguments), train_dataset=rows, **of_trainer)
    with pytest.raises(ValueError, match=r"A Trainer keeps them for a loss of its own .*: leave that option out"):
        trainer.train()
    before = model.lm_head.weight.clone()
    Trainer(model, TrainingArguments(str(tmp_path), **QUIET), train_dataset=rows).train()
    assert not torch.equal(model.lm_head.weight, before)
