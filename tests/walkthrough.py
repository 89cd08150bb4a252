"""A user's first steps, in an environment with the package installed from its wheel: `make
walkthrough`.

It starts in an empty folder and knows nothing of the checkout; an assertion fails if a step has
another result.
"""

import json
import re
import subprocess
import sys
import time
from importlib.metadata import metadata, version
from pathlib import Path
from typing import Any

import mrp_trainer
from openai import OpenAI
from transformers import AutoModel, AutoTokenizer

import modeling_mrp

MRP = str(Path(sys.executable).with_name("mrp"))
CHAT: Any = [{"role": "user", "content": "Sum the numbers of a list that are even, each plus 5."}]


def mrp(*arguments: str) -> str:
    """Run the installed command; return what it prints."""
    done = subprocess.run([MRP, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-300:]
    return done.stdout + done.stderr


def answer(model: Any, tokenizer: Any, **options: Any) -> str:
    inputs = tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.eval().generate(**inputs, max_new_tokens=32, **options)[
        0, inputs["input_ids"].shape[1] :
    ]
    return tokenizer.decode(ids, skip_special_tokens=True)


def readme_python() -> None:
    """Run README's Python, which the wheel's metadata hold; it prints what README says."""
    readme = metadata("modeling-mrp").get_payload() or metadata("modeling-mrp")["Description"]
    (code,) = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (expected,) = re.findall(r"^```text\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-c", code]
    assert (
        subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
        == expected
    )


def walk() -> None:
    assert not any(Path().iterdir()), "start in an empty folder"
    for package in (modeling_mrp, mrp_trainer):
        assert Path(sys.prefix).resolve() in Path(package.__file__ or "").resolve().parents
    assert modeling_mrp.__version__ == version("modeling-mrp") == mrp("--version").strip()
    mrp("show", "--max-new-tokens", "16")
    assert Path("decode.svg").read_text().startswith("<svg")
    mrp(*["evaluate", "--family", "math", "--count", "1", "--max-new-tokens", "16"])
    readme_python()

    mrp(*["tasks", "--family", "math", "--count", "8", "--output", "math.jsonl"])
    train = [
        "train",
        "head",
        "--data",
        "math.jsonl",
        "--steps",
        "2",
        "--max-length",
        "64",
        "--model",
        "sdar-tiny-mrp",
    ]
    mrp(*train, "--output-dir", "run", "--set", "save_steps=1")
    said = mrp(*train, "--output-dir", "run", "--set", "save_steps=1")
    assert "resuming from checkpoint-2" in said
    assert "--head run" in said, "how to train it further"
    model = AutoModel.from_pretrained(mrp_trainer.embedded_checkpoint(), trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(
        mrp_trainer.embedded_checkpoint(), trust_remote_code=True
    )
    expected = answer(model, tokenizer, decoding="static")
    mrp("push", "run", "org/head", "--base-model", "org/backbone", "--dry-run")

    command = [MRP, "serve", "sdar-tiny-mrp", "--decoding", "static", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            address = next(
                found[0] for line in server.stderr if (found := re.search(r"http://\S+", line))
            )
            client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)
            asked: Any = {
                "model": "sdar-tiny-mrp",
                "messages": CHAT,
                "max_tokens": 32,
                "temperature": 0,
                "stream": True,
            }
            chunks = client.chat.completions.create(**asked)
            assert (
                "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
                == expected
            )
        finally:
            server.kill()


if __name__ == "__main__":
    begin = time.monotonic()
    walk()
    print(json.dumps({"walked": True, "seconds": round(time.monotonic() - begin)}))
