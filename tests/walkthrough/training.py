"""Parts 2 and 6: training from Python, with TRL, transformers' Trainer and `MRPTrainer`."""

import json
from pathlib import Path
from typing import Any

import torch
from habits import CHATS, CHECKPOINT, habit, mrp, new_model, refused, tokenizer, tried
from huggingface_hub import HfApi
from mrp_trainer import MRPTrainer, MRPTrainingArguments
from mrp_trainer.heads import with_new_head
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from modeling_mrp import MRPForCausalLM

QUIET: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 2, "logging_steps": 1}


def _of_trl(name: str, config: dict[str, Any], records: list[Any], **rewards: Any) -> str:
    import datasets
    import trl

    model = new_model()
    before = model.lm_head.weight.clone()

    def train() -> None:
        getattr(trl, f"{name}Trainer")(
            model=model,
            args=getattr(trl, f"{name}Config")(f"trl-{name}", bf16=False, per_device_train_batch_size=2, **QUIET, **config),
            train_dataset=datasets.Dataset.from_list(records),
            processing_class=tokenizer(),
            **rewards,
        ).train()

    message = refused(train, "MRPTrainer")
    assert torch.equal(model.lm_head.weight, before), "the model was changed"
    return message


@habit(2, "TRL's SFTTrainer")
def sft() -> str:
    return _of_trl("SFT", {"assistant_only_loss": True}, CHATS)


@habit(2, "TRL's GRPOTrainer")
def grpo() -> str:
    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(number) for number, _ in enumerate(completions)]

    records = [{"prompt": chat["messages"][:1]} for chat in CHATS]
    return _of_trl("GRPO", {"num_generations": 2, "max_completion_length": 4}, records, reward_funcs=reward)


TOKENS = [{"input_ids": torch.arange(5, 25), "labels": torch.arange(5, 25)}] * 4


@habit(2, "transformers' Trainer on labels")
def stock_trainer() -> None:
    model = new_model()
    before = model.lm_head.weight.clone()
    Trainer(model, TrainingArguments("stock", **QUIET), train_dataset=TOKENS).train()
    assert not torch.equal(model.lm_head.weight, before)
    assert model.lm_head.weight.isfinite().all()


@habit(2, "the chat template marks what the assistant says")
def assistant_masks() -> None:
    encoded = tokenizer().apply_chat_template(CHATS[0]["messages"], return_dict=True, return_assistant_tokens_mask=True)
    marked = [one for one, mark in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mark]
    assert tokenizer().decode(marked).startswith("0 + 4 = 4")
    assert len(marked) < len(encoded["input_ids"])


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


@habit(5, "model_init of the Trainer")
def model_init() -> str | None:
    def make() -> MRPForCausalLM:
        return with_new_head(MRPForCausalLM.from_pretrained(CHECKPOINT), 1)

    return tried(lambda: _trainer("made", model_init=make).train(), "model_init")[1]


RECORDS = {
    "messages": CHATS,
    "prompt and completion": [{"prompt": "def double(x):\n", "completion": "    return 2 * x\n"}] * 4,
    "text": [{"text": "Everything in this line is learned."}] * 4,
    "ShareGPT": [{"conversations": [{"from": "human", "value": "What is 1 + 4?"}, {"from": "gpt", "value": "5"}]}] * 4,
    "Alpaca": [{"instruction": "Add the numbers.", "input": "1, 4", "output": "5"}] * 4,
}


@habit(6, "MRPTrainer takes lists of messages, of prompts with completions, of texts, and ShareGPT's and Alpaca's fields")
def lists() -> None:
    for name, records in RECORDS.items():
        assert _trainer(f"list of {name}", records).train().training_loss > 0


@habit(6, "MRPTrainer takes a datasets.Dataset")
def dataset() -> None:
    import datasets

    assert _trainer("dataset", datasets.Dataset.from_list(CHATS)).train().training_loss > 0


@habit(6, "a record that cannot be learned")
def bad_record() -> str:
    bad = [*CHATS, {"messages": [{"role": "user", "content": "Hi."}]}]
    return refused(lambda: _trainer("bad", bad), "train_dataset", "assistant")


class _Seen(TrainerCallback):
    def __init__(self) -> None:
        self.steps, self.losses = 0, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.losses += "eval_loss" in logs


@habit(6, "eval_dataset, load_best_model_at_end, callbacks, resume_from_checkpoint=True")
def best_and_resumed() -> None:
    asked: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    seen = _Seen()
    trainer = _trainer("best", CHATS, CHATS, callbacks=[seen, EarlyStoppingCallback(5)], **asked)
    trainer.train()
    assert (seen.steps, seen.losses) == (2, 2)
    best = MRPForCausalLM.from_pretrained(str(trainer.state.best_model_checkpoint)).state_dict()
    assert all(torch.equal(value, best[name]) for name, value in trainer.model.state_dict().items())
    further = _trainer("best", CHATS, CHATS, **{**asked, "max_steps": 3})
    further.train(resume_from_checkpoint=True)
    assert [line["step"] for line in further.state.log_history if "loss" in line] == [1, 2, 3]


@habit(6, "evaluate() gives one loss, however often it is asked")
def evaluated_again() -> None:
    for trainer in (
        _trainer("again", CHATS, CHATS),
        Trainer(new_model(), TrainingArguments("stock-again", **QUIET), eval_dataset=TOKENS),
    ):
        assert len({trainer.evaluate()["eval_loss"] for _ in range(3)}) == 1


@habit(6, "report_to='tensorboard', of the Trainer and of mrp train")
def tracked() -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _trainer("tracked", **{"report_to": "tensorboard"}).train()
    Path("tracked.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in CHATS))
    command = f"train head --model {CHECKPOINT} --data tracked.jsonl --output-dir tracked-too --steps 2 --max-length 64"
    done = mrp(*command.split(), "--report-to", "tensorboard", "--set", "logging_steps=1")
    assert done.returncode == 0, done.stderr[-300:]
    for folder in ("tracked", "tracked-too"):
        (place,) = Path(folder, "runs").iterdir()
        told = EventAccumulator(str(place)).Reload().Scalars("train/loss")
        assert [event.step for event in told] == [1, 2], folder


@habit(6, "push_to_hub=True of the Trainer")
def pushed() -> None:
    trainer = _trainer("pushed", objective="block_diffusion", push_to_hub=True, hub_model_id="alice/pushed")
    trainer.train()
    trainer.push_to_hub()
    names = set(HfApi().list_repo_files("alice/pushed"))
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= names
    assert not [name for name in names if Path(name).suffix in (".bin", ".pt", ".pth")]


@habit(6, "MRPTrainingArguments without an objective")
def no_objective() -> str:
    model = new_model()

    def train() -> None:
        MRPTrainer(model=model, args=MRPTrainingArguments("none", **QUIET), train_dataset=CHATS, processing_class=tokenizer())

    return refused(train, "objective", "mrp", "block_diffusion")
