"""Parts 7, 8, 9 and 12: commands, what is pushed, and pictures."""

import json
import subprocess
import sys
from pathlib import Path

import torch
from habits import CHATS, CHECKPOINT, habit, mrp, new_model, refused, tokenizer
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


@habit(7, "an error comes before what is heavy is imported")
def quick_errors() -> str:
    arguments = ["-X", "importtime", "-m", "mrp_trainer.cli", "evaluate", "--model", "./nowhere"]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert done.returncode != 0
    assert "typer" in imported
    assert "torch" not in imported, "torch was imported"
    return _failed("evaluate", "--model", "./nowhere")


@habit(7, "a model that is missing is named, not its tokenizer")
def missing_model() -> str:
    message = _failed("evaluate", "--model", "org/nowhere")
    assert "org/nowhere" in message
    assert "tokenizer" not in message, message
    return message


@habit(7, "a tracker that is not installed, in one line")
def tracker() -> str:
    message = _failed(*_head_run("tracked", "--report-to", "clearml"))
    assert "clearml" in message
    assert "pip install" in message
    return message


@habit(7, "a run that was stopped says from where it goes on; a finished one, how to train its head further")
def resumed() -> None:
    first = mrp(*_head_run("run", "--set", "save_steps=1"))
    assert first.returncode == 0, first.stderr[-300:]
    again = mrp(*_head_run("run", "--set", "save_steps=1"))
    said = again.stdout + again.stderr
    assert "resuming from checkpoint-2" in said, said[-300:]
    assert "--head run" in said, said[-300:]


@habit(7, "mrp evaluate prints a table; JSON lines with --json")
def table() -> None:
    command = f"evaluate --model {CHECKPOINT} --family math --count 2 --decoding static --decoding mrp_spec --max-new-tokens 16"
    shown, lines = mrp(*command.split()), mrp(*command.split(), "--json")
    assert shown.returncode == lines.returncode == 0, (shown.stderr + lines.stderr)[-300:]
    assert "mrp_spec" in shown.stdout
    assert not shown.stdout.lstrip().startswith("{")
    assert len([json.loads(line) for line in lines.stdout.splitlines()]) == 2


@habit(7, "the card of a head tells the recipe of its run")
def recipe() -> None:
    done = mrp(*_head_run("told", "--set", "learning_rate=0.00123"))
    assert done.returncode == 0, done.stderr[-300:]
    card = mrp("card", "told")
    assert card.returncode == 0, card.stderr[-300:]
    assert "0.00123" in card.stdout


@habit(8, "push_to_hub('name') goes to the user's namespace")
def own_namespace() -> None:
    new_model().push_to_hub("tiny", tokenizer=tokenizer())
    assert HfApi().repo_exists("alice/tiny")


@habit(8, "save_pretrained(..., push_to_hub=True)")
def saved_and_pushed() -> None:
    new_model().save_pretrained("saved", push_to_hub=True, repo_id="saved")
    assert HfApi().repo_exists("alice/saved")
    assert Path("saved/model.safetensors").is_file()


@habit(8, "mrp push FOLDER name")
def pushed_by_command() -> None:
    new_model().save_pretrained("folder")
    done = mrp("push", "folder", "by-command")
    assert done.returncode == 0, done.stderr[-300:]
    assert HfApi().repo_exists("alice/by-command")


@habit(8, "a head alone, of a backbone into which an adapter was merged")
def merged_backbone() -> str:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(new_model(), LoraConfig(target_modules=r"model\.layers.*up_proj"))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    merged = adapted.merge_and_unload()
    return refused(lambda: merged.save_pretrained("merged-head", head_only=True), "base_model_name_or_path")


@habit(9, "a head's config says what vLLM's speculators expect")
def speculators() -> None:
    new_model().save_pretrained("head", head_only=True)
    config = json.loads(Path("head/config.json").read_text())["speculators_config"]
    assert config["algorithm"]
    assert config["verifier"]["name_or_path"].endswith(CHECKPOINT)
    assert MRPForCausalLM.from_pretrained("head").config.has_head


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


@habit(12, "mrp show draws a decode")
def shown() -> None:
    done = mrp("show", "--model", CHECKPOINT, "--animated", "--output", "shown.svg")
    assert done.returncode == 0, done.stderr[-300:]
    assert Path("shown.svg").read_text().startswith("<svg")
