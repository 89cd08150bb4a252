"""Parts 7, 8, 9 and 12: commands, what is pushed, and pictures."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from habits import CHATS, CHECKPOINT, QUESTION, asked, habit, mrp, new_model, tokenizer
from huggingface_hub import HfApi, ModelCard

from modeling_mrp import MRPForCausalLM


def _data() -> str:
    path = Path("chats.jsonl")
    path.write_text("".join(f"{json.dumps(chat)}\n" for chat in CHATS))
    return str(path)


def _head_run(folder: str, *more: str) -> list[str]:
    command = f"train head --model {CHECKPOINT} --data {_data()} --output-dir {folder} --steps 2 --max-length 64"
    return [*command.split(), *more]


def _failed(*arguments: str) -> str:
    done = mrp(*arguments)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr
    message = " ".join((done.stdout + done.stderr).split())
    assert "Error" in message, message[-300:]
    return message[message.index("Error") :]


@habit(7, "mrp --version")
def version() -> None:
    done = mrp("--version")
    assert done.returncode == 0, done.stderr
    assert "0." in done.stdout


@habit(7, "a model that is missing is named, not its tokenizer")
def missing_model() -> str:
    message = _failed("evaluate", "--model", "org/nowhere")
    assert "org/nowhere" in message
    assert "tokenizer" not in message, message
    return message


@habit(7, "a run that was stopped says from where it goes on; a finished one, how to train its head further")
def resumed() -> None:
    first = mrp(*_head_run("run", "--set", "save_steps=1"))
    assert first.returncode == 0, first.stderr[-300:]
    again = mrp(*_head_run("run", "--set", "save_steps=1"))
    said = again.stdout + again.stderr
    assert "resuming from checkpoint-2" in said, said[-300:]
    assert "--head run" in said, said[-300:]


@habit(7, "the checkpoint of the wheel is found in an empty folder, and shadows no folder")
def from_the_wheel() -> None:
    here = Path.cwd()
    Path("nothing").mkdir()
    try:
        os.chdir("nothing")
        for line in ("show --max-new-tokens 16", "evaluate --model sdar-tiny-mrp --family math --count 1 --max-new-tokens 16"):
            done = mrp(*line.split())
            assert done.returncode == 0, done.stderr[-300:]
        assert Path("decode.svg").is_file()
    finally:
        os.chdir(here)


@habit(8, "push_to_hub('name') goes to the user's namespace")
def own_namespace() -> None:
    new_model().push_to_hub("tiny", tokenizer=tokenizer())
    assert HfApi().repo_exists("alice/tiny")


@habit(8, "mrp push FOLDER name")
def pushed_by_command() -> None:
    new_model().save_pretrained("folder")
    done = mrp("push", "folder", "by-command")
    assert done.returncode == 0, done.stderr[-300:]
    assert HfApi().repo_exists("alice/by-command")


@habit(9, "a head's card names its base model, and has the tags by which it is found")
def card() -> None:
    MRPForCausalLM.from_pretrained(CHECKPOINT).push_to_hub("org/whole", tokenizer=tokenizer())
    MRPForCausalLM.from_pretrained("org/whole").push_to_hub("org/head", head_only=True, tokenizer=tokenizer())
    assert {"block-diffusion", "speculative-decoding"} <= set(ModelCard.load("org/head").data.tags)
    done = mrp("push", "org/head", "org/head")
    assert done.returncode == 0, done.stderr[-300:]
    data = ModelCard.load("org/head").data
    assert data.base_model in ("org/whole", ["org/whole"])
    assert {"block-diffusion", "speculative-decoding"} <= set(data.tags)


@habit(9, "a LoRA from mrp train, by AutoPeftModelForCausalLM")
def auto_peft() -> None:
    from peft import AutoPeftModelForCausalLM

    command = f"train head --head {CHECKPOINT} --lora-rank 2 --data {_data()} --output-dir lora --steps 2 --max-length 64"
    done = mrp(*command.split())
    assert done.returncode == 0, done.stderr[-300:]
    model = AutoPeftModelForCausalLM.from_pretrained("lora", trust_remote_code=True).eval()
    options: dict[str, Any] = {**asked(QUESTION), "decoding": "mrp_spec", "target": "static", "max_new_tokens": 16}
    assert torch.equal(model.generate(**options), new_model().generate(**{**options, "decoding": "static"}))


@habit(12, "mrp show draws a decode")
def shown() -> None:
    done = mrp("show", "--model", CHECKPOINT, "--animated", "--output", "shown.svg")
    assert done.returncode == 0, done.stderr[-300:]
    assert Path("shown.svg").read_text().startswith("<svg")
