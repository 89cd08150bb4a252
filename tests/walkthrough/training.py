"""Parts 2 and 6: training from Python, with transformers' Trainer and `MRPTrainer`."""

from pathlib import Path
from typing import Any

import torch
from habits import CHATS, habit, new_model, tokenizer
from huggingface_hub import HfApi
from mrp_trainer import MRPTrainer, MRPTrainingArguments
from transformers import Trainer, TrainingArguments

QUIET: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 2, "logging_steps": 1}


TOKENS = [{"input_ids": torch.arange(5, 25), "labels": torch.arange(5, 25)}] * 4


@habit(2, "transformers' Trainer on labels")
def stock_trainer() -> None:
    model = new_model()
    before = model.lm_head.weight.clone()
    Trainer(model, TrainingArguments("stock", **QUIET), train_dataset=TOKENS).train()
    assert not torch.equal(model.lm_head.weight, before)
    assert model.lm_head.weight.isfinite().all()


def _trainer(folder: str, train: Any = CHATS, held_out: Any = None, model: Any = None, **rest: Any) -> MRPTrainer:
    of_trainer = {name: rest.pop(name) for name in ("callbacks", "model_init") if name in rest}
    args = MRPTrainingArguments(folder, **{"objective": "mrp", "max_length": 64, **QUIET, **rest})
    model = new_model() if model is None and "model_init" not in of_trainer else model
    return MRPTrainer(
        model=model, args=args, train_dataset=train, eval_dataset=held_out, processing_class=tokenizer(), **of_trainer
    )


@habit(2, "chats in TRL's format, fine-tuned by block diffusion")
def chats_by_block_diffusion() -> None:
    trainer = _trainer("fine-tuned", objective="block_diffusion")
    before = trainer.model.lm_head.weight.clone()
    trainer.train()
    assert not torch.equal(trainer.model.lm_head.weight, before)


@habit(6, "push_to_hub=True of the Trainer")
def pushed() -> None:
    trainer = _trainer("pushed", objective="block_diffusion", push_to_hub=True, hub_model_id="alice/pushed")
    trainer.train()
    trainer.push_to_hub()
    names = set(HfApi().list_repo_files("alice/pushed"))
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= names
    assert not [name for name in names if Path(name).suffix in (".bin", ".pt", ".pth")]
