"""The engine in a process of one's own: the documented rollouts, with weights that change between two calls."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from asking import ENVIRONMENT, STATES, Report, target_of
from safetensors.torch import load_file, save_file

from benchmarks.common import ROOT, TINY
from benchmarks.server import Server

pytest.importorskip("sglang", reason="the engine is installed by make test-serving")
OPTIONS = {"decoding": "mrp_spec", "num_draft_states": STATES, **target_of(0.9)}


def changed(folder: Path) -> Path:
    """The embedded checkpoint after a step of a trainer: other weights in backbone and head."""
    folder.mkdir()
    for path in TINY.iterdir():
        if path.suffix in (".json", ".jinja"):
            (folder / path.name).write_bytes(path.read_bytes())
    draws = torch.Generator().manual_seed(0)
    weights = load_file(TINY / "model.safetensors")
    for name, weight in weights.items():
        weights[name] = weight + 0.05 * weight.std() * torch.randn(weight.shape, generator=draws).to(weight)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_rollouts_follow_the_weights(tiny_tokenizer: Any, tmp_path: Path, report: Report) -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    (code,) = (
        block for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "import sglang" in block
    )
    (tmp_path / "rollouts.py").write_text(code)
    (tmp_path / "hub_configs").symlink_to(ROOT / "hub_configs")
    (tmp_path / "mrp.yaml").write_text(yaml.safe_dump(OPTIONS))
    trained = changed(tmp_path / "trained")
    run = subprocess.run(
        [sys.executable, "rollouts.py"],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    questions = [f"Bo has {n} pens. Ana gives Bo 2 more. How many pens does Bo have?" for n in range(128)]
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = [tiny_tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    before, after = json.loads((tmp_path / "rollouts.json").read_text())
    told = {"temperature": 1.0, "max_new_tokens": 64, "custom_params": {"return_reveal_step": True}}
    body = {"text": prompts, "sampling_params": [{**told, "sampling_seed": n} for n in range(128)], "return_logprob": True}
    with (
        Server(trained, tmp_path / "fresh", "MRP", OPTIONS, environment=ENVIRONMENT) as fresh,
        fresh.open("/generate", body) as got,
    ):
        expected = json.load(got)
    differ = 0
    for ours, theirs in zip(after, expected, strict=True):
        assert len(ours["ids"]) == len(ours["logprobs"]) == len(ours["steps"])
        if ours["ids"] != theirs["output_ids"]:
            differ += 1
            continue
        assert ours["steps"] == theirs["meta_info"]["mrp"]["reveal_step"]
        logprobs = [logprob for logprob, *_ in theirs["meta_info"]["output_token_logprobs"]]
        assert ours["logprobs"] == pytest.approx(logprobs, rel=1e-3, abs=1e-4)
    report(f"rollouts: {differ} of 128 texts differ from those of an engine that was started with the new weights")
    assert differ <= 2, "float32 may decide a near tie otherwise"
    assert sum(old["ids"] != new["ids"] for old, new in zip(before, after, strict=True)) > 64
