"""Two thousand requests, mixed, cut, aborted, malformed: slots and memory are whole afterwards, and
texts as before."""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError

import pytest
from asking import CONCURRENCY, Asked, Measure, Report, sse

from benchmarks.server import Server
from tests.support.request_kinds import KINDS

pytest.importorskip("sglang", reason="the engine is installed by make test-serving")
REQUESTS, CLIENTS = 2000, 24
GROWTH = 32 << 20  # bytes
# Of each what the engine has to refuse, as it stands in the body of a request.
MALFORMED: tuple[dict[str, Any], ...] = (
    {"sampling_params": {"temperature": -1}},
    {"sampling_params": {"n": "many"}},
    {"sampling_params": {"json_schema": "{}"}},
    {"sampling_params": {"no_such_option": 1}},
    {"input_ids": [5, 100_000]},
    {"sampling_params": {"custom_params": {"num_draft_state": 2}}},
    {"input_ids": [[5], ["text"]]},
    {"input_ids": [5] * 5000},
    {"text": 5},
)


def ask(server: Server, asked: Asked, number: int) -> str:
    """One request that ends by itself, is refused, is left by its client, or is aborted."""
    rng = random.Random(number)
    way = rng.choice(("whole", "whole", "long", "malformed", "leaves", "aborted"))
    if way == "malformed":
        with pytest.raises(HTTPError) as caught:
            server.ask(
                "/generate", {"input_ids": [5, 6], "sampling_params": {}, **rng.choice(MALFORMED)}
            )
        assert caught.value.code in (400, 422), caught.value.read()
        return way
    prompt = rng.choice(asked.prompts)
    if way == "long":
        prompt = [*prompt, *rng.choices(range(10, 500), k=rng.randrange(100, 400))]
    limit = rng.choice((8, 24, 40)) if way in ("whole", "long") else 200
    sampling = {
        **rng.choice(KINDS),
        "max_new_tokens": limit,
        "min_new_tokens": 0,
        "ignore_eos": True,
    }
    body: dict[str, Any] = {
        "input_ids": prompt,
        "sampling_params": sampling,
        "rid": f"leak-{number}",
    }
    body["return_logprob"] = rng.random() < 0.2
    if way in ("whole", "long"):
        assert len(server.ask("/generate", body)["output_ids"]) == limit
        return way
    with server.open("/generate", {**body, "stream": True}) as got:
        blocks = sse(got)
        for _ in range(rng.choice((0, 1, 2))):
            next(blocks)
        if way == "aborted":
            server.open("/abort_request", {"rid": f"leak-{number}"}).close()
            ends = [json.loads(data)["meta_info"]["finish_reason"] for data in blocks]
            return {"abort": "aborted", "length": "aborted too late"}[ends[-1]["type"]]
    return way


def idle(server: Server) -> None:
    """Waits until nothing runs; then the engine counts its rows and slots, and ends itself where
    one is missing."""
    until = time.monotonic() + 60
    while server.load()["num_running_reqs"] and time.monotonic() < until:
        time.sleep(0.2)
    time.sleep(3)
    server.open("/flush_cache?timeout=30", {}).close()


def test_nothing_leaks(server: Server, asked: Asked, measured: Measure, report: Report) -> None:
    with ThreadPoolExecutor(CLIENTS) as clients:
        ways = list(clients.map(lambda number: ask(server, asked, number), range(REQUESTS // 4)))
        idle(server)
        before = server.resident_bytes()
        ways += clients.map(
            lambda number: ask(server, asked, number), range(REQUESTS // 4, REQUESTS)
        )
    idle(server)
    grown = server.resident_bytes() - before
    expected = measured("MRP", 0.9)
    with ThreadPoolExecutor(CONCURRENCY) as clients:
        again = list(clients.map(server.generate, asked.prompts[:32], asked.budgets[:32]))
    assert [reply["output_ids"] for reply in again] == expected.ids[:32]
    time.sleep(1)
    pool = server.metrics()
    free, slots = (
        pool["kv_available_tokens"] + pool["kv_evictable_tokens"],
        pool["max_total_num_tokens"],
    )
    shares = ", ".join(f"{ways.count(way)} {way}" for way in sorted(set(ways)))
    report(
        f"{REQUESTS} requests ({shares}): {free:.0f} slots free of {slots:.0f}; over the last "
        f"three quarters memory grew by {grown / 2**20:.1f} MiB"
    )
    assert (pool["kv_used_tokens"], free) == (0, slots)
    assert "leak" not in server.log.read_text().replace("leak-", "")
    assert grown < GROWTH
