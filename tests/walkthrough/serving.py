"""Part 10: `mrp serve`, asked by the `openai` client over HTTP."""

import atexit
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from habits import CHECKPOINT, QUESTION, QUESTIONS, asked, habit, model, tokenizer

CHAT: Any = [{"role": "user", "content": QUESTION}]


@cache
def _address(*flags: str) -> str:
    """Start a server and wait until it says where it is."""
    command = [str(Path(sys.executable).with_name("mrp")), "serve", CHECKPOINT, "--port", "0", *flags]
    log = Path(f"server{len(flags)}.log")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log.open("w"), text=True)
    atexit.register(server.kill)
    assert server.stdout is not None
    for line in server.stdout:
        if (found := re.search(r"http://\S+", line)) is not None:
            return found[0]
    raise AssertionError(f"mrp serve ended: {log.read_text()[-300:]}")


@cache
def _client(*flags: str, key: str = "none") -> Any:
    from openai import OpenAI

    return OpenAI(base_url=_address(*flags), api_key=key, max_retries=0, timeout=120)


def _metrics() -> dict[str, float]:
    with urllib.request.urlopen(_address().removesuffix("/v1") + "/metrics", timeout=60) as answer:
        lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def _expected(question: str) -> str:
    """The text that `generate` gives."""
    inputs = asked(question)
    ids = model().generate(**inputs, do_sample=False, max_new_tokens=32)[0, inputs["input_ids"].shape[1] :]
    return tokenizer().decode(ids, skip_special_tokens=True)


def _ask(question: str, **options: Any) -> Any:
    chat: Any = [{"role": "user", "content": question}]
    return _client().chat.completions.create(model=CHECKPOINT, messages=chat, max_tokens=32, temperature=0, **options)


def _streamed(question: str) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in _ask(question, stream=True) if chunk.choices)


@habit(10, "mrp serve listens on loopback alone")
def loopback() -> None:
    host, port = re.fullmatch(r"http://([^:]+):(\d+).*", _address()).groups()  # type: ignore[union-attr]
    assert host == "127.0.0.1"
    with socket.socket() as other:  # taken for all addresses only if the server has them all
        other.bind(("127.0.0.2", int(port)))


@habit(10, "/v1/models lists the model")
def models() -> None:
    assert [one.id for one in _client().models.list()] == [CHECKPOINT]


@habit(10, "a chat at temperature 0")
def chat() -> None:
    assert _ask(QUESTION).choices[0].message.content == _expected(QUESTION)


@habit(10, "a chat that is streamed")
def streamed() -> None:
    assert _streamed(QUESTION) == _expected(QUESTION)


@habit(10, "three streams at once")
def concurrent() -> None:
    questions = [*QUESTIONS, QUESTION]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(_streamed, questions)) == [_expected(question) for question in questions]


@habit(10, "sixteen chats at once, decoded together; /metrics counts them")
def together() -> None:
    questions = [f"Add {number} to each number of a list." for number in range(16)]
    begun = _ask(QUESTION, stream=True, extra_body={"max_tokens": 512, "min_tokens": 512})  # behind which they wait
    next(iter(begun))
    before = _metrics()
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda one: _ask(one).choices[0].message.content, questions)) == [
            _expected(one) for one in questions
        ]
    counted = {name: value - before.get(name, 0) for name, value in _metrics().items()}
    assert counted['mrp_requests_total{status="200"}'] >= 16
    assert counted["mrp_batches_total"] < 16
    assert counted["mrp_forwards_total"] > 0


@habit(10, "n, logprobs and a list of prompts")
def several() -> None:
    assert len({one.message.content for one in _ask(QUESTION, n=2).choices}) == 1
    assert all(one.logprob <= 0 for one in _ask(QUESTION, logprobs=True).choices[0].logprobs.content)
    assert len(_client().completions.create(model=CHECKPOINT, prompt=["a", "b", "c"], max_tokens=2).choices) == 3


@habit(10, "--api-key")
def key() -> str:
    from openai import AuthenticationError

    assert _client("--api-key", "secret", key="secret").models.list().data
    try:
        _client("--api-key", "secret").models.list()
    except AuthenticationError as error:
        return error.message
    raise AssertionError("answered without the key")


@habit(10, "a name that is not loopback's, and a body that is too large")
def limits() -> None:
    for headers, body, status in (({"Host": "evil.example"}, b"{}", 403), ({}, b"x" * (5 << 20), 413)):
        request = urllib.request.Request(f"{_address()}/chat/completions", body, headers)
        try:
            answered = urllib.request.urlopen(request, timeout=60).status
        except urllib.error.HTTPError as error:
            answered = error.code
        assert answered == status


@habit(10, "a completion, and `stop`")
def completion_and_stop() -> None:
    text = (
        _client().completions.create(model=CHECKPOINT, prompt="def double(x):\n", max_tokens=16, temperature=0).choices[0].text
    )
    assert text
    whole = _expected(QUESTION)
    word = whole[len(whole) // 2 :].split()[0]
    answer = _ask(QUESTION, stop=[word]).choices[0].message.content
    assert word not in answer.removesuffix(word)
    assert len(answer) < len(whole)


@habit(10, "a client that leaves in the middle")
def left() -> None:
    stream = _ask(QUESTION, stream=True)
    next(iter(stream))
    stream.close()
    assert _ask(QUESTION).choices[0].message.content == _expected(QUESTION)


@habit(10, "bad requests have a status of 400 to 499 and a reason")
def bad_requests() -> str:
    from openai import APIStatusError

    requests: list[dict[str, Any]] = [
        {"model": "another", "messages": CHAT},
        {"model": CHECKPOINT, "messages": []},
        {"model": CHECKPOINT, "messages": [{"role": "user"}]},
        {"model": CHECKPOINT, "messages": CHAT, "max_tokens": -1},
        {"model": CHECKPOINT, "messages": CHAT, "temperature": -3},
        {"model": CHECKPOINT, "messages": CHAT, "max_tokens": 1_000_000},
        {"model": CHECKPOINT, "messages": CHAT, "n": 17},
        {"model": CHECKPOINT, "messages": CHAT, "stop": ["a", "b", "c", "d", "e"]},
        {"model": CHECKPOINT, "messages": CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"model": CHECKPOINT, "messages": CHAT, "extra_body": {"generation_config": '{"num_draft_states": 256}'}},
    ]
    reason = ""
    for request in requests:
        try:
            _client().chat.completions.create(**request)
        except APIStatusError as error:
            status, reason = error.status_code, error.message
        else:
            raise AssertionError(f"answered: {request}")
        assert 400 <= status < 500, f"{status} for {request}"
        assert reason
    return reason
