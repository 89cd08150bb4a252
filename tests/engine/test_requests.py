"""Requests of the engine: with settings of their own, in streams, refused, counted; and rollouts
with weights that change."""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import torch
import yaml
from asking import CONCURRENCY, ENVIRONMENT, STATES, Asked, Report, sse, target_of
from safetensors.torch import load_file, save_file

from benchmarks.common import ROOT, TINY
from benchmarks.server import Server
from modeling_mrp import MRPForCausalLM
from tests.support.request_kinds import KINDS, as_options

pytest.importorskip("sglang", reason="the engine is installed by make test-serving")
COUNT, NEW = 5 * len(KINDS), 40
# What the session's server decodes where a request says nothing, but for drafts.
USUAL = {
    "decoding": "dynamic",
    "target": "dynamic",
    "confidence_threshold": 0.9,
    "max_new_tokens": NEW,
}


def test_requests_of_all_kinds_have_the_text_of_generate(
    server: Server, asked: Asked, tiny_model_float64: MRPForCausalLM, report: Report
) -> None:
    """With log-probabilities, steps and counts. Sixteen at a time; the model is float32 on the
    engine, and float64 here."""
    prompts = asked.prompts[-COUNT:]
    sampling = [
        {**KINDS[at % len(KINDS)], "max_new_tokens": NEW, "sampling_seed": at}
        for at in range(COUNT)
    ]

    def answer(place: int) -> Any:
        custom = {**sampling[place].get("custom_params", {}), "return_reveal_step": True}
        body = {
            "input_ids": prompts[place],
            "sampling_params": {**sampling[place], "custom_params": custom},
        }
        return server.ask("/generate", {**body, "return_logprob": True})

    with ThreadPoolExecutor(CONCURRENCY) as clients:
        replies = list(clients.map(answer, range(COUNT)))
    other = []
    for place, (prompt, reply, given) in enumerate(zip(prompts, replies, sampling, strict=True)):
        options = {
            **USUAL,
            "decoding": "mrp_spec",
            "num_draft_states": STATES,
            **as_options(given, len(prompt)),
        }
        out: Any = tiny_model_float64.generate(
            torch.tensor([prompt]), return_dict_in_generate=True, **options
        )
        meta, ids = reply["meta_info"], reply["output_ids"]
        assert [token for _, token, _ in meta["output_token_logprobs"]] == ids
        assert sum(meta["mrp"]["accepted_at_depth"]) == meta["mrp"]["accepted"]
        if (
            ids != out.sequences[0, len(prompt) :].tolist()
            or meta["mrp"]["reveal_step"] != out.reveal_step[0].tolist()
        ):
            other.append(str(place))
            continue
        values = [value for value, *_ in meta["output_token_logprobs"]]
        assert values == pytest.approx(out.token_logprobs[0].tolist(), rel=1e-3, abs=1e-4)
    report(
        f"requests of {len(KINDS)} kinds: {len(other)} of {COUNT} texts differ from those of "
        f"generate {', '.join(other)}"
    )
    assert len(other) <= COUNT // 20, "float32 may decide a near tie otherwise"


def test_a_chat_tells_log_probabilities(server: Server, asked: Asked) -> None:
    """As the native endpoint, in a stream and as a whole."""
    body = {
        "model": "default",
        "messages": asked.problems[0].messages(),
        "max_tokens": 24,
        "temperature": 0.8,
        "seed": 4,
    }
    whole = server.ask("/v1/chat/completions", {**body, "logprobs": True})["choices"][0][
        "logprobs"
    ]["content"]
    with server.open("/v1/chat/completions", {**body, "logprobs": True, "stream": True}) as got:
        events = [choice for data in sse(got) for choice in json.loads(data)["choices"]]
    streamed = [
        one for event in events if event.get("logprobs") for one in event["logprobs"]["content"]
    ]
    sampling = {"temperature": 0.8, "sampling_seed": 4, "max_new_tokens": 24}
    native = server.ask(
        "/generate",
        {"input_ids": asked.prompts[0], "sampling_params": sampling, "return_logprob": True},
    )
    values = [value for value, _, _ in native["meta_info"]["output_token_logprobs"]]
    assert [one["logprob"] for one in whole] == [one["logprob"] for one in streamed] == values
    assert len(values) == len(native["output_ids"])


def test_a_stream_shows_what_is_provisional(
    server: Server, asked: Asked, tiny_tokenizer: Any
) -> None:
    """Behind each round the block so far, whose known tokens the text has then."""
    mask = tiny_tokenizer.convert_tokens_to_ids("<|MASK|>")
    sampling = {
        "temperature": 1.0,
        "sampling_seed": 2,
        "max_new_tokens": NEW,
        "custom_params": {"return_provisional": True},
    }
    with server.open(
        "/generate", {"input_ids": asked.prompts[1], "sampling_params": sampling, "stream": True}
    ) as got:
        events = [json.loads(data) for data in sse(got)]
    text, part = events[-1]["output_ids"], 0
    for event in events:
        told = event["meta_info"]["mrp"]
        ids, begin = told["provisional_ids"], len(event["output_ids"])
        assert all(one in (token, mask) for one, token in zip(ids, text[begin:], strict=False))
        assert told["provisional_text"] == tiny_tokenizer.decode(ids)
        part += any(one != mask for one in ids)
    assert part > 2
    assert events[-1]["meta_info"]["mrp"]["provisional_ids"] == []


def test_a_stream_comes_by_blocks(server: Server, asked: Asked) -> None:
    sampling = {"max_new_tokens": 64, "temperature": 0, "ignore_eos": True}
    with server.open(
        "/generate", {"input_ids": asked.prompts[0], "stream": True, "sampling_params": sampling}
    ) as got:
        events = [json.loads(data) for data in sse(got)]
    # A prompt of 33 tokens leaves 15 of its third block, and a stream begins before the first of
    # them is there.
    assert len(asked.prompts[0]) == 33
    assert sorted({len(event["output_ids"]) for event in events} - {0}) == [15, 31, 47, 63, 64]
    assert all(after["text"].startswith(before["text"]) for before, after in pairwise(events))


def refuses(server: Server, path: str, body: dict[str, Any], reason: str) -> None:
    """Has a request answered with a 400 and the reason."""
    with pytest.raises(HTTPError) as caught:
        server.ask(path, body)
    assert caught.value.code == 400
    assert reason in caught.value.read().decode()


def test_what_cannot_be_served_is_refused(server: Server, asked: Asked) -> None:
    """By the algorithm, by what stands before it, and of another endpoint."""
    native = {"input_ids": asked.prompts[0], "sampling_params": {"max_new_tokens": 8}}
    options = {"sampling_params": {"custom_params": {"num_draft_states": 9}}}
    refuses(
        server,
        "/generate",
        {**native, **options},
        "num_draft_states is 9: this server has 4 at most",
    )
    pattern = {"sampling_params": {"stop_regex": ["a", "("]}}
    refuses(
        server,
        "/generate",
        {**native, **pattern},
        "stop_regex has '(', which is no regular expression",
    )
    body = {
        "model": "default",
        "prompt": asked.prompts[0],
        "max_tokens": 8,
        "echo": True,
        "logprobs": 1,
    }
    refuses(
        server,
        "/v1/completions",
        body,
        "logprob_start_len is 0, and MRP has no log-probabilities of the prompt",
    )
    refuses(
        server, "/pause_generation", {"mode": "retract"}, "mode 'retract' is not served with MRP"
    )
    reply = server.ask(
        "/generate", {**native, "return_logprob": True, "logprob_start_len": len(asked.prompts[0])}
    )
    assert len(reply["meta_info"]["output_token_logprobs"]) == len(reply["output_ids"])


def test_the_endpoint_of_metrics_counts(server: Server, asked: Asked) -> None:
    before = server.metrics()
    reply = server.generate(asked.prompts[1], asked.budgets[1])
    time.sleep(0.5)
    after = server.metrics()
    for name in ("forwards", "head_forwards", "drafted", "accepted"):
        assert (
            after[f"mrp_{name}_total"] - before[f"mrp_{name}_total"]
            == reply["meta_info"]["mrp"][name]
        )


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
        weights[name] = weight + 0.05 * weight.std() * torch.randn(
            weight.shape, generator=draws
        ).to(weight)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_rollouts_follow_the_weights(tiny_tokenizer: Any, tmp_path: Path, report: Report) -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    (code,) = (
        block
        for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        if "import sglang" in block
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
    questions = [
        f"Bo has {n} pens. Ana gives Bo 2 more. How many pens does Bo have?" for n in range(128)
    ]
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = [
        tiny_tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        for chat in chats
    ]
    before, after = json.loads((tmp_path / "rollouts.json").read_text())
    told = {"temperature": 1.0, "max_new_tokens": 64, "custom_params": {"return_reveal_step": True}}
    body = {
        "text": prompts,
        "sampling_params": [{**told, "sampling_seed": n} for n in range(128)],
        "return_logprob": True,
    }
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
    report(
        f"rollouts: {differ} of 128 texts differ from those of an engine that was started with the "
        "new weights"
    )
    assert differ <= 2, "float32 may decide a near tie otherwise"
    assert sum(old["ids"] != new["ids"] for old, new in zip(before, after, strict=True)) > 64
