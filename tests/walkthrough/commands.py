"""Parts 7, 8, 9 and 12: commands, what is pushed, and pictures."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from habits import CHATS, CHECKPOINT, QUESTION, asked, habit, mrp, new_model, refused, tokenizer
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

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


@habit(7, "a folder that is missing is named")
def missing_folder() -> str:
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


def _checkpoint(folder: str) -> Path:
    """A copy of the checkpoint, to be spoilt."""
    return Path(shutil.copytree(CHECKPOINT, folder))


@habit(7, "a run that meets a NaN ends, names the weight, and saves nothing")
def not_finite() -> str:
    weights = _checkpoint("of-nan") / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, weights, {"format": "pt"})
    message = _failed(*_head_run("nan-run"), "--model", "of-nan", "--set", "save_steps=1")
    assert "model.layers.1.mlp.up_proj.weight" in message
    assert not list(Path("nan-run").rglob("*.safetensors"))
    return message


@habit(7, "a tokenizer that is another model's")
def other_tokenizer() -> str:
    other = AutoTokenizer.from_pretrained(CHECKPOINT, trust_remote_code=False)
    other.mask_token = "<|im_start|>"
    other.save_pretrained("other-tokenizer")
    message = _failed(*_head_run("misfit"), "--tokenizer", "other-tokenizer")
    assert "mask" in message
    return message


@habit(7, "samples that --max-length cuts are counted; where it leaves nothing to learn, that is refused")
def cut_samples() -> str:
    long = {"prompt": "def double(x):\n", "completion": "    x = x + 1\n" * 40}
    Path("long.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in (long, *CHATS)))
    command = f"train head --model {CHECKPOINT} --data long.jsonl --output-dir cut --steps 2 --max-length 64"
    done = mrp(*command.split())
    assert done.returncode == 0, done.stderr[-300:]
    assert "1 of 9 records are cut to max_length 64" in " ".join((done.stdout + done.stderr).split())
    Path("long.jsonl").write_text(f"{json.dumps(long)}\n")
    return _failed(*command.split(), "--restart")


@habit(7, "a run ends early where the held-out loss falls no more, and says the next command")
def early() -> None:
    more = "--early-stopping-patience 1 --set eval_steps=1 --set save_steps=1 --set learning_rate=1e-30 --steps 9"
    done = mrp(*_head_run("early"), "--eval-data", _data(), *more.split())
    assert done.returncode == 0, done.stderr[-300:]
    assert json.loads(Path("early/checkpoint-2/trainer_state.json").read_text())["global_step"] == 2
    assert not Path("early/checkpoint-3").exists()
    command = done.stdout.splitlines()[-1]
    assert command == "next: mrp show --model early"
    again = mrp(*command.split()[2:])
    assert again.returncode == 0, again.stderr[-300:]


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


@habit(8, "push_to_hub('name', tags=[...])")
def tags() -> None:
    new_model().push_to_hub("tagged", tokenizer=tokenizer(), tags=["mine"])
    assert "mine" in ModelCard.load("alice/tagged").data.tags


def _foreign(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": {"AutoTokenizer": ["org/other--t.T", None]}}))


def _misfit(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_size": -1}))


def _renamed(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["renamed"] = tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


SPOILT: dict[str, tuple[Any, str]] = {
    "takes code from elsewhere": (_foreign, "org/other"),
    "has an empty tokenizer": (lambda folder: (folder / "tokenizer.json").write_text(""), "tokenizer"),
    "has a config that fits nothing": (_misfit, "hidden_size is -1"),
    "has a weight by another name": (_renamed, "model.norm.weight"),
}


def _not_pushed(what: str) -> Any:
    spoil, said = SPOILT[what]

    def push() -> str:
        name = f"spoilt-{list(SPOILT).index(what)}"
        spoil(_checkpoint(name))
        message = _failed("push", name, f"org/{name}")
        assert said in message
        assert not HfApi().repo_exists(f"org/{name}")
        return message

    return push


for _what in SPOILT:
    habit(8, f"mrp push of a folder that {_what}")(_not_pushed(_what))


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
