"""Part 10: `mrp serve`, asked by the `openai` client over HTTP."""

import atexit
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from habits import CHECKPOINT, QUESTION, asked, habit, model, tokenizer


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


@habit(10, "/v1/models lists the model")
def models() -> None:
    assert [one.id for one in _client().models.list()] == [CHECKPOINT]


@habit(10, "a chat at temperature 0")
def chat() -> None:
    assert _ask(QUESTION).choices[0].message.content == _expected(QUESTION)


@habit(10, "a chat that is streamed")
def streamed() -> None:
    assert _streamed(QUESTION) == _expected(QUESTION)


@habit(10, "--api-key")
def key() -> str:
    from openai import AuthenticationError

    assert _client("--api-key", "secret", key="secret").models.list().data
    try:
        _client("--api-key", "secret").models.list()
    except AuthenticationError as error:
        return error.message
    raise AssertionError("answered without the key")
