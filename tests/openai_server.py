"""`mrp serve` in a process of its own, with OpenAI's client for it; fixtures `server` and `answers`."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hub_server import HubServer

MODEL = "sdar-tiny-mrp"
ASKED = [{"role": "user", "content": "Sum the numbers of a list that are even, each plus 5."}]
PROMPT = "def change(value):\n"
FEW = 16  # tokens of most answers
ENDLESS = {"0": -100, "2": -100}  # the ids that end a text
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'trainer'}", "HF_HUB_OFFLINE": "0"}


@dataclass
class Server:
    url: str
    hub: HubServer
    process: "subprocess.Popen[str]"
    log: Path

    @property
    def client(self) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=self.url, api_key="none", max_retries=0, timeout=60)

    @property
    def port(self) -> int:
        return int(self.url.split(":")[-1].split("/")[0])

    def chat(self, **options: Any) -> Any:
        return self.client.chat.completions.create(**{"model": MODEL, "messages": ASKED, "temperature": 0, **options})

    def text(self, **options: Any) -> str:
        return str(self.chat(**options).choices[0].message.content)

    def complete(self, **options: Any) -> Any:
        return self.client.completions.create(**{"model": MODEL, "prompt": PROMPT, "temperature": 0, **options})

    def streamed(self, **options: Any) -> str:
        return "".join(chunk.choices[0].delta.content or "" for chunk in self.chat(stream=True, **options))

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self.url.removesuffix("/v1") + "/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    def raw(self, path: str = "/v1/chat/completions", host: str = "localhost", **body: Any) -> bytes:
        """Write down a chat as it goes over the wire."""
        sent = json.dumps({"messages": ASKED, "temperature": 0, **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
        return head.encode() + sent


@contextmanager
def started(folder: Path, *flags: str) -> Iterator[Server]:
    """Start a server, and kill it at the end; skips where what it stands on is missing."""
    for name in ("starlette", "uvicorn", "openai"):
        pytest.importorskip(name, reason="the server and its tests' client stand on it")
    command = [sys.executable, "-m", "mrp_trainer.cli", "serve", MODEL, "--port", "0", *flags]
    log = folder / "log"
    with HubServer() as hub, log.open("w") as errors:
        environment = {**ENVIRONMENT, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder)}
        running = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert running.stdout is not None
            said = running.stdout.readline().split()
            assert said[:2] == ["serving", MODEL], log.read_text()
            yield Server(said[-1], hub, running, log)
        finally:
            running.kill()
            running.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Drafts for another target than the checkpoint's; Ctrl-C ends it."""
    flags = "--decoding", "mrp_spec", "--target", "sequential", "--set", "num_draft_states=8"
    with started(tmp_path_factory.mktemp("serve"), *flags) as one:
        yield one
        one.process.send_signal(signal.SIGINT)
        assert one.process.wait(30) == 0
        assert "Traceback" not in one.log.read_text()


@pytest.fixture(scope="module")
def answers(tiny_model: Any, tiny_tokenizer: Any) -> Any:
    """What the model itself answers, with the options that the server was given."""

    def answer(text: str, chat: bool = True, **options: Any) -> str:
        if chat:
            messages = [{"role": "user", "content": text}]
            inputs = tiny_tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            inputs = tiny_tokenizer(text, return_tensors="pt")
        options = {"decoding": "sequential", "max_new_tokens": FEW, **options}
        ids = tiny_model.generate(**inputs, tokenizer=tiny_tokenizer, **options)
        return str(tiny_tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    return answer


__all__ = ["ASKED", "ENDLESS", "ENVIRONMENT", "FEW", "MODEL", "PROMPT", "Server", "started"]
