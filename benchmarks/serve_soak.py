"""Ask `mrp serve` at random, many clients at a time, and compare every text with `generate` alone.

    python -m benchmarks.serve_soak --requests 5000 --clients 64
    python -m benchmarks.serve_soak --requests 0

The embedded checkpoint in float64, on loopback: whole answers, streams, completions of several
prompts, malformed bodies, clients that leave in the middle of an answer or before it, that read
slowly, and that never send what they announce. The last line has the counts: `lost` requests got no
answer though their client waited, `wrong` ones a status that they should not have, `differ` counts
texts, `resident_mb` is the server's memory after each twentieth of the requests. The exit status is
1 if one of them is not 0, or memory has grown by a tenth since the first fifth. After `--minutes`
no more are sent, and those that were are looked at.

With `--requests 0` a server as it comes is timed: sixteen chats at once over one after another, the
next client behind ten that have left, a body of 8 MB, and SIGTERM with requests at work.
"""

import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mrp_trainer.data.tasks import problems

from tests.support.malformed import bodies

from .common import TINY, emit, load, parser_of

PATIENCE = 600  # seconds that a client waits for an answer
SERVED = ["--dtype", "float64", "--decoding", "mrp_spec", "--target", "sequential"]
SERVED += ["--set", "num_draft_states=4", "--max-queue-size", "128"]
KINDS = {"chat": 25, "stream": 25, "completion": 5, "cut": 15, "left": 10, "malformed": 12}
KINDS |= {"slow": 5, "half_open": 3}
# Fields of a request, and the options of `generate` of the same meaning.
OPTIONS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {"decoding": "sequential"}),
    ({"decoding": "dynamic"}, {"decoding": "dynamic"}),
    ({"target": "static", "num_draft_states": 3}, {"decoding": "static"}),
    ({"decoding": "self_spec", "target": "dynamic"}, {"decoding": "dynamic"}),
    ({"stop": ["sum", "plus"]}, {"decoding": "sequential"}),
    ({"repetition_penalty": 1.3}, {"decoding": "sequential", "repetition_penalty": 1.3}),
    (
        {"temperature": 0.8, "seed": 5},
        {"decoding": "sequential", "do_sample": True, "temperature": 0.8, "seed": 5},
    ),
)
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_MALFORMED = bodies()


@dataclass
class Case:
    """A request, and what came of it.

    Attributes:
        kind: One of `KINDS`.
        path, body: What is sent.
        prompts, options: What is asked for, the options as an index of `OPTIONS`.
        cut: Bytes of the answer that are read before the client leaves; None for all.
        status: What it had; None if it was lost.
        texts: What came.
    """

    kind: str
    path: str
    body: bytes
    prompts: list[str] = field(default_factory=list)
    options: int = 0
    cut: int | None = None
    status: int | None = None
    texts: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def expected(self) -> bool:
        """Whether the status is one that the request should have."""
        if self.kind in ("left", "half_open"):
            return True
        if self.kind == "malformed":
            return 400 <= (self.status or 0) < 500
        return self.status == 200


def case_of(number: int, seed: int, prompts: list[str], tokens: int) -> Case:
    """Make a request for texts of `tokens` at most, a function of the seed and its number."""
    draw = random.Random(f"{seed}/{number}")
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    if kind == "malformed":
        path, body = draw.choice(_MALFORMED)
        return Case(kind, path, body)
    options = draw.randrange(len(OPTIONS))
    chat = kind != "completion"
    requests = [draw.choice(prompts) for _ in range(1 if chat else draw.choice((1, 2, 3)))]
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": tokens, **OPTIONS[options][0]}
    fields["stream"] = kind in ("stream", "cut", "slow")
    if chat:
        fields["messages"] = [{"role": "user", "content": requests[0]}]
    else:
        fields["prompt"] = requests
    case = Case(kind, CHAT if chat else COMPLETION, json.dumps(fields).encode())
    if kind in ("cut", "left"):
        case.cut = draw.randrange(600) if kind == "cut" else 0
    elif kind != "half_open":
        case.prompts, case.options = requests, options
    return case


def ask(case: Case, port: int) -> None:
    """Send a request, and fill in what comes of it; a full server is asked again."""
    try:
        while case.status in (None, 429):
            if case.kind == "half_open":
                with socket.create_connection(("127.0.0.1", port), PATIENCE) as half:
                    half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
                    half.sendall(b"Content-Length: 1000\r\n\r\n{")
                    time.sleep(0.2)
                case.status = 0
                return
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            try:
                connection.request("POST", case.path, case.body)
                if case.kind == "left":
                    time.sleep(len(case.body) % 7 / 20)
                    case.status = 0
                    return
                reply = connection.getresponse()
                case.status = reply.status
                content = b""
                while case.kind == "slow" and (chunk := reply.read(64)):
                    content += chunk
                    time.sleep(0.02)
                content += reply.read(case.cut)
                if case.status == 429:
                    time.sleep(float(reply.headers["Retry-After"]))
            finally:
                connection.close()
        if case.prompts and case.status == 200:
            streamed = case.kind in ("stream", "slow")
            case.texts = _streamed(content) if streamed else _whole(content, case.path)
    except BrokenPipeError:
        case.status = 413  # a body that is too large is not read to its end
    except ConnectionResetError as error:
        case.status = 413 if case.kind == "malformed" else None
        case.error = str(error)
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        case.status, case.error = None, f"{type(error).__name__}: {error}"[:300]


def _whole(reply: bytes, path: str) -> list[str]:
    choices = sorted(json.loads(reply)["choices"], key=lambda choice: choice["index"])
    if path == CHAT:
        return [choice["message"]["content"] for choice in choices]
    return [choice["text"] for choice in choices]


def _streamed(reply: bytes) -> list[str]:
    events = reply.decode().split("\n\n")
    if events[-2:] != ["data: [DONE]", ""]:
        raise ValueError(f"a stream without its end: {events[-2:]}")
    text = ""
    for event in events[:-2]:
        text += json.loads(event.removeprefix("data: "))["choices"][0]["delta"]["content"]
    return [text]


class Alone:
    """What `generate` gives for a text of `tokens` at most by itself, without drafts, each made
    once."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        model, tokenizer = load(TINY)
        self.model: Any = model.double()
        self.tokenizer: Any = tokenizer
        self._known: dict[tuple[str, bool, int, int], str] = {}

    def __call__(self, prompt: str, chat: bool, options: int, index: int) -> str:
        """Decode the text of a prompt, the `index`-th of its request, or look it up."""
        fields, arguments = OPTIONS[options]
        seed = arguments.get("seed")
        key = (prompt, chat, options, 0 if seed is None else index)
        if key not in self._known:
            if chat:
                messages = [{"role": "user", "content": prompt}]
                prompt = self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False
                )
            inputs = self.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
            if seed is not None:
                arguments = {**arguments, "seed": seed + index}
            out = self.model.generate(**inputs, max_new_tokens=self.tokens, **arguments)
            new = out[0, inputs["input_ids"].shape[1] :]
            text = self.tokenizer.decode(new, skip_special_tokens=True)
            for stop in fields.get("stop", ()):
                text = text.partition(stop)[0]
            self._known[key] = text
        return self._known[key]


class Served:
    """`mrp serve` in a process of its own, and its log in `folder`."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.log = folder / "log"
        command = [sys.executable, "-m", "mrp_trainer.cli", "serve", str(TINY), "--port", "0"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen([*command, *flags], stdout=log, stderr=log)
        until = time.monotonic() + PATIENCE
        while not (matches := re.search(r"running on http://\S+:(\d+)", self.log.read_text())):
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.2)
        self.port = int(matches[1])

    def resident_mb(self) -> int:
        """Read its memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") >> 20

    def metrics(self) -> dict[str, float]:
        """Read its counters and gauges."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def wait_until_idle(self) -> None:
        """Wait until nothing is decoded, half a minute at most."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            counts = self.metrics()
            if not counts["mrp_requests_running"] + counts["mrp_requests_waiting"]:
                return
            time.sleep(0.05)


def chat_of(prompt: str, **fields: Any) -> Case:
    """Make a chat."""
    messages = [{"role": "user", "content": prompt}]
    fields = {"messages": messages, "temperature": 0, "max_tokens": 64, **fields}
    return Case("chat", CHAT, json.dumps(fields).encode(), [prompt])


def figures(served: Served, turns: int) -> dict[str, Any]:
    """Time what a server promises; it has ended then."""
    prompts = [problem.prompt for problem in problems("code", "tune", 16)]
    ratios = []
    for _ in range(turns):
        seconds = []
        for clients in (1, len(prompts)):
            started = time.monotonic()
            with ThreadPoolExecutor(clients) as pool:
                list(pool.map(lambda prompt: ask(chat_of(prompt), served.port), prompts))
            seconds.append(time.monotonic() - started)
        ratios.append(round(seconds[1] / seconds[0], 2))
    endless = chat_of(prompts[0], max_tokens=900, ignore_eos=True, stream=True)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(endless.body)}\r\n\r\n"

    def opened(count: int) -> list[socket.socket]:
        clients = [
            socket.create_connection(("127.0.0.1", served.port), PATIENCE) for _ in range(count)
        ]
        for client in clients:
            client.sendall(head.encode() + endless.body)
        while served.metrics()["mrp_requests_running"] < 1:
            time.sleep(0.01)
        return clients

    for client in opened(10):
        client.close()
    started = time.monotonic()
    ask(chat_of(prompts[1], max_tokens=1), served.port)
    following = time.monotonic() - started
    served.wait_until_idle()
    started = time.monotonic()
    large = Case("malformed", CHAT, b"x" * (8 << 20))
    ask(large, served.port)
    refused = time.monotonic() - started
    waiting = opened(6)
    started = time.monotonic()
    served.process.send_signal(signal.SIGTERM)
    served.process.wait()
    ended = time.monotonic() - started
    for client in waiting:
        with suppress(OSError):
            client.close()
    return {
        "sixteen_at_once_over_one_after_another": ratios,
        "seconds_next_client_behind_ten_that_left": round(following, 2),
        "seconds_8_mb_refused": round(refused, 2),
        "status_8_mb": large.status,
        "seconds_sigterm": round(ended, 2),
    }


def soak(served: Served, options: Any) -> Iterator[dict[str, Any]]:
    """Ask, then compare; yield the memory after each twentieth, and the counts at last. `options`
    are those of the command."""
    prompts = []
    for family in ("math", "code"):
        prompts += [problem.prompt for problem in problems(family, "heldout", 12)]
    cases: list[Case] = []
    resident = []
    started = time.monotonic()
    component = max(1, options.requests // 20)
    with ThreadPoolExecutor(options.clients) as pool:
        while len(cases) < options.requests and time.monotonic() - started < 60 * options.minutes:
            numbers = range(len(cases), min(len(cases) + component, options.requests))
            requests = [
                case_of(number, options.seed, prompts, options.tokens) for number in numbers
            ]
            list(pool.map(lambda case: ask(case, served.port), requests))
            cases += requests
            resident.append(served.resident_mb())
            yield {"so_far": len(cases), "resident_mb": resident[-1]}
    seconds = time.monotonic() - started
    served.wait_until_idle()
    counts = served.metrics()
    undrafted = Alone(options.tokens)
    lost = [case for case in cases if case.status is None]
    mismatches = [case for case in cases if case.status is not None and not case.expected]
    texts = differ = 0
    for case in cases:
        for index, text in enumerate(case.texts):
            texts += 1
            expected = undrafted(case.prompts[index], case.path == CHAT, case.options, index)
            if text != expected:
                differ += 1
                yield {"body": case.body[:300].decode(), "got": text, "expected": expected}
    for case in lost + mismatches:
        body = case.body[:200].decode(errors="replace")
        yield {"case": case.kind, "body": body, "status": case.status, "error": case.error}
    yield {
        "requests": len(cases),
        "by_kind": dict(Counter(case.kind for case in cases)),
        "by_status": dict(sorted(Counter(str(case.status) for case in cases).items())),
        "lost": len(lost),
        "wrong": len(mismatches),
        "texts": texts,
        "differ": differ,
        "still_at_work": int(counts["mrp_requests_running"] + counts["mrp_requests_waiting"]),
        "tracebacks": served.log.read_text().count("Traceback"),
        "tokens_per_forward": round(counts["mrp_tokens_per_forward"], 2),
        "resident_mb": resident,
        "seconds": round(seconds),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 1 if something is not as it should be."""
    parser = parser_of("serve_soak", __doc__ or "")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=64, help="requests at a time")
    parser.add_argument("--minutes", type=float, default=600, help="how long to ask")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a text, at most")
    parser.add_argument("--turns", type=int, default=4, help="of the sixteen chats")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    line: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        served = Served(Path(folder), *(SERVED if options.requests else ()))
        try:
            if not options.requests:
                emit(figures(served, options.turns))
                return 0
            for line in soak(served, options):
                emit(line)
        finally:
            served.process.terminate()
            served.process.wait()
    resident = line["resident_mb"]
    grown = resident[-1] > 1.1 * resident[len(resident) // 5]
    faults = ("lost", "wrong", "differ", "still_at_work", "tracebacks")
    return int(grown or any(line[name] for name in faults))


if __name__ == "__main__":
    raise SystemExit(main())
