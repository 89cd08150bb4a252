"""The walk itself, in a process that knows nothing of this checkout but this file: what users do, and how it is tried."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard
from mrp_trainer import MRPTrainer, MRPTrainingArguments
from openai import OpenAI
from peft import AutoPeftModelForCausalLM
from transformers import AutoModel, AutoTokenizer, pipeline
from transformers.utils import logging

import modeling_mrp

CHECKPOINT = "sdar-tiny-mrp"
QUESTION = "Sum the numbers of a list that are even, each plus 5."
CHAT = [{"role": "user", "content": QUESTION}]
RECORDS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"What is {n} + 4?"}, {"role": "assistant", "content": f"{n} + 4 = {n + 4}"}]}
    for n in range(8)
]
HABITS: list[tuple[str, Callable[[], None]]] = []


def habit(what: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a function as something a user does."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        HABITS.append((what, function))
        return function

    return register


def mrp(*arguments: str) -> str:
    """What the installed command prints."""
    command = str(Path(sys.executable).with_name("mrp"))
    done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-300:]
    return done.stdout + done.stderr


def train_head(folder: str, *more: str) -> str:
    Path("chats.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in RECORDS))
    words = f"train head --data chats.jsonl --output-dir {folder} --steps 2 --max-length 64"
    return mrp(*words.split(), *more)


def loaded(name: str = CHECKPOINT) -> tuple[Any, Any]:
    """A model and its tokenizer, by remote code."""
    model = AutoModel.from_pretrained(name, trust_remote_code=True).eval()
    return model, AutoTokenizer.from_pretrained(CHECKPOINT, trust_remote_code=True)


def answer(model: Any, tokenizer: Any, **options: Any) -> str:
    inputs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**inputs, max_new_tokens=32, **options)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)


@habit("the package is the one from the wheel, its version too")
def installed() -> None:
    for name in ("modeling_mrp", "mrp_trainer"):
        where = Path(sys.modules[name].__file__ or "").resolve()
        assert Path(sys.prefix).resolve() in where.parents, f"{name} comes from {where}"
    assert modeling_mrp.__version__ == installed_version("modeling-mrp")
    assert modeling_mrp.__version__ in mrp("--version")


@habit("the checkpoint of the wheel is found in an empty folder")
def from_the_wheel() -> None:
    here = Path.cwd()
    Path("nothing").mkdir()
    try:
        os.chdir("nothing")
        mrp("show", "--max-new-tokens", "16")
        mrp(*["evaluate", "--model", "sdar-tiny-mrp", "--family", "math", "--count", "1", "--max-new-tokens", "16"])
        assert Path("decode.svg").read_text().startswith("<svg")
    finally:
        os.chdir(here)


@habit("a text-generation pipeline takes temperature=0.0")
def pipeline_at_temperature_0() -> None:
    model, tokenizer = loaded()
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    cold, plain = (pipe(CHAT, max_new_tokens=16, do_sample=False, **more) for more in ({"temperature": 0.0}, {}))
    assert cold == plain


@habit("AutoTokenizer runs no code, and asks for none where trust_remote_code is False")
def untrusted_tokenizer() -> None:
    code = f"""
import builtins, sys
from transformers import AutoTokenizer
builtins.input = lambda question: sys.exit("asked")
print(len(AutoTokenizer.from_pretrained({CHECKPOINT!r}, trust_remote_code=False)))
print([name for name in sys.modules if name.endswith("configuration_mrp")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == f"{len(loaded()[1])}\n[]\n", done.stderr[-300:]


@habit("a run that was stopped says from where it goes on; a finished one, how to train its head further")
def resumed() -> None:
    asked = ("run", "--model", CHECKPOINT, "--set", "save_steps=1")
    train_head(*asked)
    said = train_head(*asked)
    assert "resuming from checkpoint-2" in said, said[-300:]
    assert "--head run" in said, said[-300:]


@habit("a LoRA from mrp train, by AutoPeftModelForCausalLM")
def auto_peft() -> None:
    train_head("lora", "--head", CHECKPOINT, "--lora-rank", "2")
    model = AutoPeftModelForCausalLM.from_pretrained("lora", trust_remote_code=True).eval()
    plain, tokenizer = loaded()
    drafted = answer(model, tokenizer, decoding="mrp_spec", target="static")
    assert drafted == answer(plain, tokenizer, decoding="static")


@habit("chats fine-tuned by block diffusion, and pushed by the Trainer")
def pushed_by_the_trainer() -> None:
    model, tokenizer = loaded()
    quiet: dict[str, Any] = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "max_steps": 2, "max_length": 64}
    args = MRPTrainingArguments("pushed", objective="block_diffusion", hub_model_id="alice/pushed", push_to_hub=True, **quiet)
    before = model.lm_head.weight.clone()
    trainer = MRPTrainer(model=model, args=args, train_dataset=RECORDS, processing_class=tokenizer)
    trainer.train()
    assert not torch.equal(model.lm_head.weight, before)
    trainer.push_to_hub()
    names = set(HfApi().list_repo_files("alice/pushed"))
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= names
    assert not [name for name in names if Path(name).suffix in (".bin", ".pt", ".pth")]


@habit("a head is pushed; its card names its base model, and has the tags by which it is found")
def card() -> None:
    model, tokenizer = loaded()
    model.push_to_hub("org/whole")
    tokenizer.push_to_hub("org/whole")
    whole, _ = loaded("org/whole")
    whole.save_pretrained("head", head_only=True)
    mrp("push", "head", "by-command")
    data = ModelCard.load("alice/by-command").data
    assert data.base_model in ("org/whole", ["org/whole"])
    assert {"block-diffusion", "speculative-decoding"} <= set(data.tags)


@habit("a chat with mrp serve, streamed")
def served() -> None:
    command = [str(Path(sys.executable).with_name("mrp")), "serve", CHECKPOINT, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            address = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+", line)))
            client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)
            asked: Any = {"model": CHECKPOINT, "messages": CHAT, "max_tokens": 32, "temperature": 0, "stream": True}
            chunks = client.chat.completions.create(**asked)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert said == answer(*loaded())
        finally:
            server.kill()


def go() -> int:
    """Try all habits; return the exit status."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    begin, failed = time.monotonic(), 0
    for what, function in HABITS:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                function()
        except Exception as error:
            failed += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            print(
                f"FAILED   {what}: {type(error).__name__}: {' '.join(str(error).split())[:300]} (line {last.lineno})",
                flush=True,
            )
        else:
            print(f"ok       {what}", flush=True)
    print(f"{len(HABITS)} habits in {time.monotonic() - begin:.0f} s, {failed} of them not as they should be")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(go())
