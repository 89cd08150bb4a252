"""The server over HTTP: native and OpenAI endpoints, streams, many clients at once, clients that go away, refusals."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any
from urllib.error import HTTPError

import pytest
from asking import Asked, Measure, sse, up_to_eos

from benchmarks.server import Server

pytest.importorskip("sglang", reason="the engine is installed by make test-serving")
LONG = {"max_new_tokens": 800, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def texts(measured: Measure, tiny_tokenizer: Any) -> list[str]:
    """What each prompt was answered."""
    return [tiny_tokenizer.decode(up_to_eos(ids, [2, 0]), skip_special_tokens=True) for ids in measured("MRP", 0.9).ids]


def native(server: Server, asked: Asked, place: int) -> str:
    return str(server.generate(asked.prompts[place], asked.budgets[place])["text"])


def native_stream(server: Server, asked: Asked, place: int) -> str:
    body = {"input_ids": asked.prompts[place], "stream": True}
    with server.open(
        "/generate", {**body, "sampling_params": {"max_new_tokens": asked.budgets[place], "temperature": 0}}
    ) as got:
        seen = [json.loads(data)["text"] for data in sse(got)]
    assert all(after.startswith(before) for before, after in pairwise(seen))
    return str(seen[-1])


def chat_body(asked: Asked, place: int) -> dict[str, Any]:
    messages = asked.problems[place].messages()
    return {"model": "default", "messages": messages, "max_tokens": asked.budgets[place], "temperature": 0}


def chat(server: Server, asked: Asked, place: int) -> str:
    return str(server.ask("/v1/chat/completions", chat_body(asked, place))["choices"][0]["message"]["content"])


def chat_stream(server: Server, asked: Asked, place: int) -> str:
    with server.open("/v1/chat/completions", {**chat_body(asked, place), "stream": True}) as got:
        events = [json.loads(data) for data in sse(got)]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def completion(server: Server, asked: Asked, place: int) -> str:
    body = {"model": "default", "prompt": asked.prompts[place], "max_tokens": asked.budgets[place], "temperature": 0}
    return str(server.ask("/v1/completions", body)["choices"][0]["text"])


WAYS = (native, native_stream, chat, chat_stream, completion)


def test_a_stream_comes_by_blocks(server: Server, asked: Asked) -> None:
    body = {"input_ids": asked.prompts[0], "stream": True, "sampling_params": {**LONG, "max_new_tokens": 64}}
    with server.open("/generate", body) as got:
        lengths = [len(json.loads(data)["output_ids"]) for data in sse(got)]
    # A prompt of 33 tokens leaves 15 of its third block, and a stream begins before the first of them is there.
    assert len(asked.prompts[0]) == 33
    assert sorted({*lengths} - {0}) == [15, 31, 47, 63, 64]


def test_twenty_clients_of_mixed_length(server: Server, asked: Asked, texts: list[str]) -> None:
    rng = random.Random(0)
    jobs = [(rng.choice(WAYS), place) for place in rng.sample(range(160), 60)]
    with ThreadPoolExecutor(20) as clients:
        answers = list(clients.map(lambda job: job[0](server, asked, job[1]), jobs))
    assert answers == [texts[place] for _, place in jobs]


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


def test_requests_are_not_taken_back(server: Server, asked: Asked, texts: list[str]) -> None:
    """Pausing that would is refused, and pausing that goes on goes on."""
    refuses(server, "/pause_generation", {"mode": "retract"}, "mode 'retract' is not served with MRP")
    with ThreadPoolExecutor(4) as clients:
        running = [clients.submit(native, server, asked, place) for place in range(4)]
        server.ask("/pause_generation", {"mode": "in_place"})
        server.ask("/continue_generation", {})
        assert [each.result() for each in running] == texts[:4]


def test_the_endpoint_of_metrics_counts(server: Server, asked: Asked) -> None:
    before = server.metrics()
    reply = server.generate(asked.prompts[1], asked.budgets[1])
    time.sleep(0.5)
    after = server.metrics()
    for name in ("forwards", "head_forwards", "drafted", "accepted"):
        assert after[f"mrp_{name}_total"] - before[f"mrp_{name}_total"] == reply["meta_info"]["mrp"][name]
