"""`mrp decode` under any target, drawn, and from a server with OpenAI's API, with a data card."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import DatasetCard
from mrp_trainer import trace_logprobs
from mrp_trainer.data.records import Chat, parse
from mrp_trainer.data.tasks import training_lines

from modeling_mrp import MRPForCausalLM
from tests.support.commands import mrp
from tests.support.places import TINY

COUNT = 3
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(training_lines("math", "train", COUNT)))
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_text_that_cannot_be_decoded_ends_the_command(prompts: Path, tmp_path: Path) -> None:
    """With what was made before kept, and the file not written."""
    arguments = ["decode", "--model", str(TINY), "--data", str(prompts), "--device", "cpu"]
    arguments += ["--set", f"suppress_tokens={list(range(1280))}", "--max-new-tokens", "16"]
    told = mrp(*arguments, "--output", str(tmp_path / "o.jsonl"), fails=True)
    assert "the text of prompt 0: it has no token with a finite score" in " ".join(told.split())
    assert not (tmp_path / "o.jsonl").exists()


def test_any_target_drawn_and_published(prompts: Path, tmp_path: Path) -> None:
    """A batch has the same texts whatever the batches before it; the card names what made them, and
    no folder."""
    how = ["--target", "dynamic", "--set", "do_sample=true", "--set", "confidence_threshold=0.5"]
    arguments = ["decode", "--model", str(TINY), "--data", str(prompts), *how]
    arguments += ["--max-new-tokens", "48", "--device", "cpu"]
    card_file = tmp_path / "README.md"
    whole, single = tmp_path / "whole.jsonl", tmp_path / "single.jsonl"
    told = mrp(*arguments, "--output", str(whole), "--card", str(card_file))
    assert told.endswith(f"wrote their card to {card_file}\n")
    mrp(*arguments, "--output", str(single), "--batch-size", "1")
    lines = records(whole)
    assert [line["ids"] for line in lines] == [line["ids"] for line in records(single)]
    assert lines[0]["decoded_by"]["target"] == "dynamic"
    chosen = {"do_sample": True, "confidence_threshold": 0.5}
    assert lines[0]["decoded_by"]["options"] == chosen
    # several tokens in some step, each likely there, as tau demands where a step has two
    model = MRPForCausalLM.from_pretrained(TINY)
    line = lines[0]
    steps = torch.tensor([line["reveal_step"]])
    assert max(line["reveal_step"]) + 1 < len(line["reveal_step"])
    logprobs = trace_logprobs(model, torch.tensor([line["ids"]]), steps)
    together = [step for step in line["reveal_step"] if line["reveal_step"].count(step) > 1]
    assert logprobs[0, torch.isin(steps[0], torch.tensor(together))].exp().min() > 0.45
    card = DatasetCard.load(card_file)
    assert card.data.configs == [{"config_name": "default", "data_files": "whole.jsonl"}]
    assert str(tmp_path) not in str(card)
    assert "3 texts that `sdar-tiny-mrp` wrote" in str(card)
    settings = yaml.safe_load(card.text.split("```yaml\n")[1].split("```")[0])
    assert settings["options"] == chosen
    assert "mrp train head --model sdar-tiny-mrp --data whole.jsonl" in card.text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "confidense_threshold=1"], "generate has no such option"),
        (["--set", "target=dynamic"], "use --target"),
        (["--target", "dynamic", "--set", "confidence_threshold=2"], "confidence_threshold"),
    ],
)
def test_options_that_generate_refuses(
    prompts: Path, tmp_path: Path, flags: list[str], message: str
) -> None:
    arguments = ["decode", "--model", str(TINY), "--data", str(prompts), "--device", "cpu"]
    told = mrp(*arguments, "--output", str(tmp_path / "o.jsonl"), *flags, fails=True)
    assert message in " ".join(told.split())
    assert not list(tmp_path.glob("o.jsonl*"))


class Server(ThreadingHTTPServer):
    """Answers each chat by the length of its last turn, or as its last turn says."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.requests: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Any = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.requests.append({**body, "path": self.path})
        server.keys.add(self.headers["Authorization"])
        asked = body["messages"][-1]["content"]
        message: dict[str, Any] = {"role": "assistant", "content": f"{len(asked)} letters"}
        if asked == "call":
            function = {"name": "look", "arguments": '{"at": "sky"}'}
            call = {"id": "1", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        reason = "length" if asked == "go on" else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        content: dict[str, Any] = {"id": "x", "created": 0, "model": "m", "choices": [choice]}
        if asked == "no":
            content = {"error": {"message": "top_k is odd", "type": "bad", "code": 400}}
        answer = json.dumps(content).encode()
        self.send_response(400 if asked == "no" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the tests' own `HF_HUB_OFFLINE`, under which the client asks no server at all."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def server(online: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with Server() as answers:
        thread = threading.Thread(target=answers.serve_forever)
        thread.start()
        yield answers
        answers.shutdown()
        thread.join()


def chats(path: Path, *questions: str) -> Path:
    lines = []
    for question in questions:
        line: dict[str, Any] = {"messages": [{"role": "user", "content": question}]}
        if question == "call":
            line |= {"tools": [TOOL], "chat_template_kwargs": {"thinking": False}}
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines))
    return path


def test_answers_of_a_server_are_chats_to_train_on(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were cut are left out; no key of the Hub is sent to it."""
    data = chats(tmp_path / "chats.jsonl", "a", "call", "go on", "four")
    output = tmp_path / "answers.jsonl"
    arguments = ["decode", "--endpoint", server.url, "--model", "org/served", "--data", str(data)]
    arguments += ["--output", str(output), "--card", str(tmp_path / "README.md")]
    how = ["--target", "dynamic", "--set", "temperature=0.7", "--set", "top_k=20"]
    told = mrp(*arguments, *how, "--batch-size", "3")
    assert f"wrote 3 texts to {output}; 1 that max_new_tokens cut are left out\n" in told
    answered = records(output)
    turns = [record["messages"][-1]["content"] for record in answered]
    assert turns == ["1 letters", "", "4 letters"]
    for record in answered:
        assert isinstance(parse(record), Chat)
    called: Any = parse(answered[1])
    arguments_of_call = called.messages[-1]["tool_calls"][0]["function"]["arguments"]
    assert arguments_of_call == {"at": "sky"}
    assert called.tools == [TOOL]
    assert called.variables == {"thinking": False}
    assert answered[0]["decoded_by"] == {
        "model": "org/served",
        "max_new_tokens": 256,
        "options": {"temperature": 0.7, "top_k": 20, "decoding": "dynamic"},
    }
    request = next(body for body in server.requests if body["messages"][-1]["content"] == "a")
    assert request["path"] == "/v1/chat/completions"
    wanted = {"temperature": 0.7, "top_k": 20, "decoding": "dynamic", "max_tokens": 256}
    assert {name: request[name] for name in wanted} == wanted
    assert request["model"] == "org/served"
    assert server.keys == {"Bearer none"}
    card = DatasetCard.load(tmp_path / "README.md")
    assert "A line is a chat" in card.text
    assert "3 texts that `org/served` wrote: training" in card.text.replace("\n", " ")
    server.keys.clear()
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    more = ["--data", str(data), "--limit", "1", "--output", str(tmp_path / "more.jsonl")]
    mrp("decode", "--endpoint", server.url, "--model", "m", *more)
    assert server.keys == {"Bearer mine"}
    assert server.requests[-1]["temperature"] == 0


def test_what_a_server_refuses_leaves_what_is_there(server: Server, tmp_path: Path) -> None:
    """And a repeated call asks for the batches that are missing alone."""
    data = chats(tmp_path / "chats.jsonl", "a", "no")
    output = tmp_path / "answers.jsonl"
    arguments = ["decode", "--endpoint", server.url, "--model", "m", "--data", str(data)]
    arguments += ["--output", str(output), "--batch-size", "1"]
    assert "top_k is odd" in mrp(*arguments, fails=True)
    assert not output.exists()
    asked = len(server.requests)
    mrp(*arguments, fails=True)
    repeated = [body["messages"][-1]["content"] for body in server.requests[asked:]]
    assert set(repeated) == {"no"}
    text = tmp_path / "texts.jsonl"
    text.write_text(json.dumps({"prompt": "def f", "completion": "(): ..."}))
    arguments[arguments.index(str(data))] = str(text)
    told = mrp(*arguments, fails=True)
    assert "an endpoint answers chats: give 'messages'" in " ".join(told.split())


@pytest.mark.usefixtures("online")
def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    data = chats(tmp_path / "chats.jsonl", "a")
    arguments = ["--model", "m", "--data", str(data), "--output", str(tmp_path / "o.jsonl")]
    told = mrp("decode", "--endpoint", "http://127.0.0.1:9/v1", *arguments, fails=True)
    assert "the server at http://127.0.0.1:9/v1 cannot be reached" in " ".join(told.split())
