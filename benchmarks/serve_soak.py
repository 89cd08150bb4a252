"""Ask `mrp serve` at random, many clients at a time, and compare every text with what `generate` gives alone.

    python -m benchmarks.serve_soak --requests 5000 --output benchmarks/results/serve_soak.jsonl

The embedded checkpoint in float64, where no tie comes up, on loopback. Whole answers, streams, completions of several prompts,
long ones, malformed requests, and clients that leave in the middle of an answer or before it. With `--requests 0` a server as
it comes is timed instead: sixteen chats one after another and then at once, four times. The last line has the counts:
`lost` requests got no answer though their client waited for one, `wrong` ones a status that they should not, `differ` counts
texts. `resident_mb` is the server's memory after each tenth of the requests. Exit status 1 if any of the three is not 0, the
memory of the last tenth is more than a tenth above that of the second, or the server is not idle at the end.
"""

import http.client
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mrp_trainer import TINY
from mrp_trainer.data.tasks import problems
from mrp_trainer.loading import load_model, load_tokenizer

from .common import emit, header, parser_of

PATIENCE = 600  # seconds that a client waits for an answer
SERVED = ("--dtype", "float64", "--decoding", "mrp_spec", "--target", "sequential", "--set", "num_draft_states=4")
KINDS = {"chat": 35, "stream": 25, "completion": 10, "long": 5, "cut": 10, "left": 5, "malformed": 10}
_UNENDING = {"0": -100, "2": -100}  # biases against the ids that end a text
# Fields of a request, and the options of `generate` that say the same.
OPTIONS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {"decoding": "sequential"}),
    ({"generation_config": '{"decoding": "dynamic"}'}, {"decoding": "dynamic"}),
    ({"generation_config": '{"target": "static", "num_draft_states": 3}'}, {"decoding": "static"}),
    ({"generation_config": '{"decoding": "self_spec", "target": "dynamic"}'}, {"decoding": "dynamic"}),
    ({"stop": ["sum", "plus"]}, {"decoding": "sequential", "stop_strings": ["sum", "plus"]}),
    ({"repetition_penalty": 1.3}, {"decoding": "sequential", "repetition_penalty": 1.3}),
    ({"temperature": 0.8, "seed": 5}, {"decoding": "sequential", "do_sample": True, "temperature": 0.8, "seed": 5}),
    ({"logit_bias": _UNENDING}, {"decoding": "sequential", "sequence_bias": [[[0], -100.0], [[2], -100.0]]}),
)
_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"
_HI = [{"role": "user", "content": "hi"}]
MALFORMED: tuple[tuple[str, bytes, int], ...] = (
    (_CHAT, b'{"messages": ', 400),
    (_CHAT, b"[]", 400),
    (_CHAT, b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}", 400),
    (_CHAT, b'{"messages":' + b"[" * 99_999, 400),
    (_CHAT, b'{"messages": "hi"}', 400),
    (_CHAT, b'{"messages": [{"role": "user", "content": "<|MASK|>"}]}', 400),
    (_CHAT, b'{"messages": [{"role": "user", "content": "\\ud83d"}]}', 400),
    (_CHAT, json.dumps({"messages": _HI, "n": 17}).encode(), 400),
    (_CHAT, json.dumps({"messages": _HI, "tools": [{}]}).encode(), 400),
    (_CHAT, json.dumps({"messages": _HI, "model": "org/other"}).encode(), 404),
    (_CHAT, json.dumps({"messages": [{"role": "user", "content": "long " * 20_000}]}).encode(), 400),
    (_CHAT, b"x" * (5 << 20), 413),
    (_COMPLETION, b'{"prompt": ""}', 400),
    (_COMPLETION, b'{"prompt": [99999]}', 400),
    ("/v1/nothing", b"{}", 404),
)


@dataclass(frozen=True)
class Text:
    """A text that is asked for: a prompt, `OPTIONS` by their place, a limit of tokens, and the row of its request."""

    prompt: str
    chat: bool
    options: int
    max_tokens: int
    row: int = 0


@dataclass
class Case:
    """A request, and what came of it.

    Attributes:
        kind: One of `KINDS`.
        path, body: What is sent.
        expected: The status that it should have.
        asked: The texts that should come; none of requests that are malformed or left.
        cut: Bytes of the answer that are read before the client leaves; None for all.
        status: What it had; None if it was lost.
        texts: What came.
        error: Why it was lost.
    """

    kind: str
    path: str
    body: bytes
    expected: int = 200
    asked: list[Text] = field(default_factory=list)
    cut: int | None = None
    status: int | None = None
    texts: list[str] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0


def case_of(number: int, seed: int, prompts: list[str]) -> Case:
    """Make a request, a function of the seed and its number."""
    draw = random.Random(f"{seed}/{number}")
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    if kind == "malformed":
        path, body, status = draw.choice(MALFORMED)
        return Case(kind, path, body, status)
    chat, options = kind != "completion", draw.randrange(len(OPTIONS))
    max_tokens = 64 if kind == "long" else 16  # requests with equal options can be decoded together
    asked = [draw.choice(prompts) for _ in range(1 if chat else draw.choice((1, 2, 3)))]
    if kind == "long":
        asked = [" ".join([asked[0], *prompts[:12]])]
    copies = draw.choice((1, 1, 2)) if kind == "chat" else 1
    sent: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens, "n": copies, **OPTIONS[options][0]}
    sent |= {"stream": kind in ("stream", "cut"), "model": "sdar-tiny-mrp"}
    sent |= {"messages": [{"role": "user", "content": asked[0]}]} if chat else {"prompt": asked}
    rows = [one for one in asked for _ in range(copies)]
    case = Case(kind, _CHAT if chat else _COMPLETION, json.dumps(sent).encode())
    if kind in ("cut", "left"):
        case.cut = draw.randrange(600) if kind == "cut" else 0
    else:
        case.asked = [Text(prompt, chat, options, max_tokens, row) for row, prompt in enumerate(rows)]
    return case


def ask(case: Case, port: int) -> None:
    """Send a request, and fill in what comes of it; where the server is full it is asked again, as it says."""
    begun = time.monotonic()
    try:
        while case.status in (None, 429):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            try:
                connection.request("POST", case.path, case.body, {"Content-Type": "application/json"})
                if case.kind == "left":
                    time.sleep(len(case.body) % 7 / 20)
                    case.status = case.expected
                    return
                reply = connection.getresponse()
                case.status = reply.status
                told = reply.read(case.cut)
                if case.status == 429:
                    time.sleep(float(reply.headers["Retry-After"]))
            finally:
                connection.close()
        if case.asked and case.status == 200:
            case.texts = _streamed(told) if case.kind == "stream" else _whole(told, case.path)
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        case.status, case.error = None, f"{type(error).__name__}: {error}"[:300]
    case.seconds = time.monotonic() - begun


def _whole(reply: bytes, path: str) -> list[str]:
    choices = sorted(json.loads(reply)["choices"], key=lambda choice: choice["index"])
    return [choice["message"]["content"] if path == _CHAT else choice["text"] for choice in choices]


def _streamed(reply: bytes) -> list[str]:
    events = reply.decode().split("\n\n")
    if events[-2:] != ["data: [DONE]", ""]:
        raise ValueError(f"a stream without its end: {events[-2:]}")
    parts = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"].get("content", "") for event in events[:-2]]
    return ["".join(parts)]


class Alone:
    """What `generate` gives for a text by itself, without drafts, each made once."""

    def __init__(self) -> None:
        self.model: Any = load_model(TINY, "float64")
        self.tokenizer: Any = load_tokenizer(TINY)
        self._known: dict[Text, str] = {}

    def __call__(self, text: Text) -> str:
        """Decode a text, or look it up."""
        options = dict(OPTIONS[text.options][1])
        row = text.row if "seed" in options else 0
        text = Text(text.prompt, text.chat, text.options, text.max_tokens, row)
        if text not in self._known:
            options |= {"seed": options["seed"] + row} if "seed" in options else {}
            if text.chat:
                chat = [{"role": "user", "content": text.prompt}]
                inputs = self.tokenizer.apply_chat_template(
                    chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
                )
            else:
                inputs = self.tokenizer(text.prompt, return_tensors="pt")
            with torch.inference_mode():
                out = self.model.generate(**inputs, tokenizer=self.tokenizer, max_new_tokens=text.max_tokens, **options)
            self._known[text] = self.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return self._known[text]


class Served:
    """`mrp serve` in a process of its own."""

    def __init__(self, log: Path, *flags: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "mrp_trainer.cli", "serve", "sdar-tiny-mrp", "--port", "0", *flags]
        with log.open("w") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        if not said.startswith("serving "):
            raise RuntimeError(f"the server did not start:\n{log.read_text()[-4000:]}")
        self.port = int(said.rstrip().removesuffix("/v1").rpartition(":")[2])

    def resident_mb(self) -> int:
        """Read its memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * 4096 >> 20

    def metrics(self) -> dict[str, float]:
        """Read its counters and gauges."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def sixteen_chats(served: Served) -> dict[str, float]:
    """Time chats that no other request stands between: one after another, and at once."""
    prompts = [one.prompt for one in problems("code", "tune", 16)]
    bodies = [
        json.dumps({"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 64}).encode()
        for prompt in prompts
    ]
    seconds = {}
    for name, clients in (("one_after_another", 1), ("at_once", len(bodies))):
        begun = time.monotonic()
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(lambda body: ask(Case("chat", _CHAT, body), served.port), bodies))
        seconds[name] = round(time.monotonic() - begun, 2)
    return seconds


def soak(served: Served, requests: int, clients: int, seed: int) -> Iterator[dict[str, Any]]:
    """Ask, then compare; give what each tenth came to, and the counts at last."""
    texts = [one.prompt for family in ("math", "code") for one in problems(family, "heldout", 12)]
    cases = [case_of(number, seed, texts) for number in range(requests)]
    resident, begun = [], time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        for begin in range(0, requests, max(1, requests // 10)):
            list(pool.map(lambda case: ask(case, served.port), cases[begin : begin + max(1, requests // 10)]))
            resident.append(served.resident_mb())
            yield {"so_far": begin, "resident_mb": resident[-1], "seconds": round(time.monotonic() - begun, 1)}
    seconds = time.monotonic() - begun
    alone, waits = Alone(), sorted(case.seconds for case in cases if case.texts)
    until = time.monotonic() + 30
    while (counts := served.metrics())["mrp_requests_running"] + counts["mrp_requests_waiting"] and time.monotonic() < until:
        time.sleep(0.2)  # whoever left last is noticed at the next token
    pairs = [(case, text, alone(want)) for case in cases for text, want in zip(case.texts, case.asked, strict=True)]
    wrong = [case for case in cases if case.status not in (None, case.expected)]
    lost, differ = [case for case in cases if case.status is None], [one for one in pairs if one[1] != one[2]]
    for case in lost + wrong:
        yield {"case": case.kind, "body": case.body[:200].decode(errors="replace"), "status": case.status, "error": case.error}
    for case, got, want in differ:
        yield {"case": case.kind, "body": case.body[:300].decode(errors="replace"), "got": got, "want": want}
    yield {
        "requests": len(cases),
        "by_kind": dict(Counter(case.kind for case in cases)),
        "by_status": dict(sorted(Counter(str(case.status) for case in cases if case.kind != "left").items())),
        "lost": len(lost),
        "wrong": len(wrong),
        "texts": len(pairs),
        "differ": len(differ),
        "tokens": int(counts["mrp_tokens_total"]),
        "tokens_per_forward": round(counts["mrp_tokens_per_forward"], 2),
        "requests_to_a_batch": round(counts['mrp_requests_total{status="200"}'] / counts["mrp_batches_total"], 2),
        "still_at_work": int(counts["mrp_requests_running"] + counts["mrp_requests_waiting"]),
        "tracebacks": len(re.findall("Traceback", served.log.read_text())),
        "seconds_to_an_answer": {"median": round(waits[len(waits) // 2], 2), "most": round(waits[-1], 2)},
        "resident_mb": resident,
        "seconds": round(seconds, 1),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns 1 if something is not as it should be."""
    parser = parser_of("serve_soak", __doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--clients", type=int, default=32, help="requests at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines: a header, what went wrong, the counts at last")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    line: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, options.output.open("w") as file:
        served = Served(Path(folder) / "log", *(SERVED if options.requests else ()))
        try:
            emit(header("serve_soak", options), file)
            if not options.requests:
                emit({"sixteen_chats": [sixteen_chats(served) for _ in range(4)]}, file)
                return 0
            for line in soak(served, options.requests, options.clients, options.seed):
                emit(line, None if "so_far" in line else file)
        finally:
            served.process.terminate()
            served.process.wait()
    grown = line["resident_mb"][-1] > 1.1 * line["resident_mb"][min(1, len(line["resident_mb"]) - 1)]
    return int(grown or any(line[name] for name in ("lost", "wrong", "differ", "still_at_work", "tracebacks")))


if __name__ == "__main__":
    raise SystemExit(main())
