"""A thousand requests, of which many are aborted: the pool is whole at the end, and texts are what they were."""

import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from asking import CONCURRENCY, Asked, sse

from benchmarks.server import Measured, Server

pytest.importorskip("sglang", reason="the engine is installed by make test-serving")
REQUESTS = 1000


def ask(server: Server, asked: Asked, number: int) -> str:
    """One request that ends by itself, by its client's going away, or by being aborted."""
    rng = random.Random(number)
    way = rng.choice(("whole", "whole", "leaves", "aborted"))
    sampling = {"max_new_tokens": rng.choice((8, 24, 40)) if way == "whole" else 200, "temperature": 0, "ignore_eos": True}
    body: dict[str, Any] = {"input_ids": rng.choice(asked.prompts), "sampling_params": sampling, "rid": f"leak-{number}"}
    if way == "whole":
        assert len(server.ask("/generate", body)["output_ids"]) == sampling["max_new_tokens"]
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


def test_aborts_leak_nothing(
    server: Server, asked: Asked, measured: Callable[[str, float], Measured], report: Callable[[str], None]
) -> None:
    with ThreadPoolExecutor(24) as clients:
        ways = list(clients.map(lambda number: ask(server, asked, number), range(REQUESTS)))
    until = time.monotonic() + 60
    while server.load()["num_running_reqs"] and time.monotonic() < until:
        time.sleep(0.2)
    time.sleep(3)  # idle: the engine counts its rows and slots, and ends itself where one is missing or free twice
    before = measured("MRP", 0.9)
    with ThreadPoolExecutor(CONCURRENCY) as clients:
        again = list(clients.map(server.generate, asked.prompts[:32], asked.budgets[:32]))
    assert [reply["output_ids"] for reply in again] == before.ids[:32]
    time.sleep(1)
    pool = server.metrics()
    assert pool["kv_used_tokens"] == 0
    assert pool["kv_available_tokens"] + pool["kv_evictable_tokens"] == pool["max_total_num_tokens"]
    assert "leak" not in server.log.read_text().replace("leak-", "")
    shares = ", ".join(f"{ways.count(way)} {way}" for way in sorted(set(ways)))
    report(
        f"{REQUESTS} requests ({shares}): {pool['kv_available_tokens'] + pool['kv_evictable_tokens']:.0f} slots free of "
        f"{pool['max_total_num_tokens']:.0f}"
    )
