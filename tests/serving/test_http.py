"""The server over HTTP: streams, refusals, pausing, metrics."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any
from urllib.error import HTTPError

import pytest
from asking import Asked, Measure, sse

from benchmarks.server import Server

pytest.importorskip("sglang", reason="the engine is installed by make test-serving")


def test_a_stream_comes_by_blocks(server: Server, asked: Asked) -> None:
    sampling = {"max_new_tokens": 64, "temperature": 0, "ignore_eos": True}
    with server.open("/generate", {"input_ids": asked.prompts[0], "stream": True, "sampling_params": sampling}) as got:
        events = [json.loads(data) for data in sse(got)]
    # A prompt of 33 tokens leaves 15 of its third block, and a stream begins before the first of them is there.
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
    refuses(server, "/generate", {**native, **options}, "num_draft_states is 9: this server has 4 at most")
    pattern = {"sampling_params": {"stop_regex": ["a", "("]}}
    refuses(server, "/generate", {**native, **pattern}, "stop_regex has '(', which is no regular expression")
    body = {"model": "default", "prompt": asked.prompts[0], "max_tokens": 8, "echo": True, "logprobs": 1}
    refuses(server, "/v1/completions", body, "logprob_start_len is 0, and MRP has no log-probabilities of the prompt")
    reply = server.ask("/generate", {**native, "return_logprob": True, "logprob_start_len": len(asked.prompts[0])})
    assert len(reply["meta_info"]["output_token_logprobs"]) == len(reply["output_ids"])


def test_requests_are_not_taken_back(server: Server, asked: Asked, measured: Measure) -> None:
    """Pausing that would is refused, and pausing that goes on goes on."""
    refuses(server, "/pause_generation", {"mode": "retract"}, "mode 'retract' is not served with MRP")
    expected = measured("MRP", 0.9).ids[:4]
    with ThreadPoolExecutor(4) as clients:
        running = [clients.submit(server.generate, *one) for one in zip(asked.prompts[:4], asked.budgets[:4], strict=True)]
        server.ask("/pause_generation", {"mode": "in_place"})
        server.ask("/continue_generation", {})
        assert [each.result()["output_ids"] for each in running] == expected


def test_the_endpoint_of_metrics_counts(server: Server, asked: Asked) -> None:
    before = server.metrics()
    reply = server.generate(asked.prompts[1], asked.budgets[1])
    time.sleep(0.5)
    after = server.metrics()
    for name in ("forwards", "head_forwards", "drafted", "accepted"):
        assert after[f"mrp_{name}_total"] - before[f"mrp_{name}_total"] == reply["meta_info"]["mrp"][name]
