"""`mrp serve` under attack, over HTTP: clients that leave, more than it can queue, bodies that are too large or too deep."""

import http.client
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai_server import ASKED, ENDLESS, FEW, Server, answers, server, started

from benchmarks import serve_soak

__all__ = ["answers", "server"]  # fixtures

WAITING, RUNNING = "mrp_requests_waiting", "mrp_requests_running"


def wait_for(what: Callable[[], bool], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.05)


def is_idle(server: Server) -> bool:
    counts = server.metrics()
    return counts[WAITING] == counts[RUNNING] == 0


@contextmanager
def sent(server: Server, *requests: bytes) -> Iterator[list[socket.socket]]:
    """Connections with a request each; leaving closes them all, and waits until the server has noticed."""
    with ExitStack() as opened:
        found = [opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=120)) for _ in requests]
        for one, request in zip(found, requests, strict=True):
            one.sendall(request)
        yield found
    wait_for(lambda: is_idle(server))


def asked(server: Server, body: bytes, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, str, Any]:
    """The status, the message and the headers of the answer to a body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        connection.request("POST", path, body, headers)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read()).get("error", {}).get("message", ""), reply.headers
    finally:
        connection.close()


@pytest.mark.parametrize("stream", [True])
def test_requests_whose_clients_are_gone_are_not_decoded(server: Server, answers: Any, stream: bool) -> None:
    """Ten that would take 9,000 tokens: one is decoded when they leave, or none."""
    before = server.metrics()["mrp_tokens_total"]
    long = server.raw(stream=stream, max_tokens=900, logit_bias=ENDLESS)
    with sent(server, *10 * [long]):
        wait_for(lambda: server.metrics()[RUNNING] > 0)
    assert server.text(max_tokens=FEW) == answers(ASKED[0]["content"])
    assert server.metrics()["mrp_tokens_total"] - before < 4000


def test_the_queue_has_an_end(server: Server) -> None:
    """Whoever comes behind 64 that wait is told when to come again."""
    long = server.raw(stream=True, max_tokens=900, logit_bias=ENDLESS)
    with sent(server, long):
        wait_for(lambda: server.metrics()[RUNNING] == 1)
        with sent(server, *64 * [long]):
            wait_for(lambda: server.metrics()[WAITING] == 64)
            status, message, headers = asked(server, json.dumps({"messages": ASKED}).encode())
            assert (status, headers["Retry-After"]) == (429, "2")
            assert message == "64 requests wait already: ask again later"
    assert asked(server, json.dumps({"messages": ASKED, "max_tokens": 1}).encode())[0] == 200


def test_what_waits_together_is_decoded_together(server: Server, answers: Any) -> None:
    """Sixteen chats behind one that takes its time; a text does not depend on its neighbours."""
    chats = [[{"role": "user", "content": f"Add {number} to each number of a list."}] for number in range(16)]
    with ThreadPoolExecutor(16) as clients, sent(server, server.raw(max_tokens=200, logit_bias=ENDLESS)):
        wait_for(lambda: server.metrics()[RUNNING] == 1)
        before = server.metrics()["mrp_batches_total"]
        texts = list(clients.map(lambda chat: server.text(messages=chat, max_tokens=FEW), chats))
    assert texts == [answers(chat[0]["content"]) for chat in chats]
    assert server.metrics()["mrp_batches_total"] - before < 8


def test_a_large_body_keeps_nobody_waiting(server: Server) -> None:
    """It is refused by its bytes; others are answered while it comes."""
    half = b'{"messages": [{"role": "user", "content": "' + b"long " * 800_000
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2 * len(half)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=120) as slow:
        slow.sendall(head + half)
        assert server.text(max_tokens=1)
        slow.sendall(half)
        assert b" 413 " in slow.recv(1 << 16).splitlines()[0]
    fits = {"messages": [{"role": "user", "content": "long " * 700_000}]}
    status, message, _ = asked(server, json.dumps(fits).encode())
    assert status == 400
    assert "3500" in message
    assert "more than max_position_embeddings=1024 tokens: shorten it" in message


def test_a_deep_body_is_refused_in_a_line(server: Server) -> None:
    logged = len(server.log.read_text())
    deep = "[" * 100_000 + "]" * 100_000
    for body in (
        f'{{"messages": {deep}}}',
        json.dumps({"messages": ASKED, "generation_config": f'{{"eos_token_id": {deep}}}'}),
    ):
        status, message, _ = asked(server, body.encode())
        assert status == 400
        assert 0 < len(message) < 1100
    assert "Traceback" not in server.log.read_text()[logged:]


def test_names_of_this_machine_alone_are_answered(server: Server) -> None:
    """A page elsewhere may have its own name lead here. Nothing listens at another address."""
    hosts = {"LOCALHOST:8000": 200, "[::1]:8000": 200, "evil.example:8000": 403, "127.0.0.1.evil.example": 403, "": 403}
    for host, status in hosts.items():
        with sent(server, server.raw(host=host, max_tokens=1)) as (connection,):
            assert f" {status} ".encode() in connection.recv(1 << 16).splitlines()[0], host
    with socket.socket() as other:
        assert other.connect_ex(("127.0.0.2", server.port)) != 0


def test_what_is_counted(server: Server) -> None:
    before = server.metrics()
    server.text(max_tokens=FEW)
    wait_for(lambda: is_idle(server))
    after = {name: value - before.get(name, 0) for name, value in server.metrics().items()}
    assert after['mrp_requests_total{status="200"}'] >= 1
    assert after["mrp_batches_total"] == 1
    assert 0 < after["mrp_forwards_total"] <= after["mrp_tokens_total"] <= FEW
    assert after["mrp_head_forwards_total"] > 0
    assert 0 < after['mrp_drafts_accepted_total{depth="1"}'] <= after['mrp_drafts_offered_total{depth="1"}']


def test_who_reads_one_line_of_it_and_no_more_is_served(server: Server) -> None:
    """A full pipe makes its writer wait: what is logged of each request goes to stderr."""
    for _ in range(1500):  # of some 60 bytes in 64 KB
        server.metrics()


@pytest.mark.usefixtures("server")
def test_the_soak_asks_for_every_kind(tmp_path: Path) -> None:
    texts = [f"Add {number} to each number of a list." for number in range(12)]
    cases = [serve_soak.case_of(number, 0, texts) for number in range(200)]
    assert {case.kind for case in cases} == serve_soak.KINDS.keys()
    output = tmp_path / "soak.jsonl"
    assert serve_soak.main(["--requests", "12", "--clients", "8", "--output", str(output)]) == 0
    counts = json.loads(output.read_text().splitlines()[-1])
    assert (counts["requests"], counts["lost"], counts["wrong"], counts["differ"]) == (12, 0, 0, 0)
    assert counts["texts"] >= 6


def test_a_server_that_is_told_to_end_tells_its_clients(tmp_path: Path) -> None:
    """A stream at work and six requests that wait; a key is asked for, too."""
    with started(tmp_path, "--api-key", "secret") as one:
        body = json.dumps({"messages": ASKED, "max_tokens": 900, "logit_bias": ENDLESS, "stream": True}).encode()
        assert asked(one, body)[:2] == (401, "the API key is missing or wrong")
        assert asked(one, body, Authorization="Bearer wrong")[0] == 401
        request = one.raw(max_tokens=900, logit_bias=ENDLESS, stream=True)
        request = request.replace(b"Host:", b"Authorization: Bearer secret\r\nHost:", 1)
        with ExitStack() as opened:
            clients = [opened.enter_context(socket.create_connection(("127.0.0.1", one.port), timeout=120)) for _ in range(7)]
            for client in clients:
                client.sendall(request)
            assert b" 200 " in clients[0].recv(1 << 12).splitlines()[0]
            one.process.send_signal(signal.SIGTERM)
            told = [b"".join(iter(lambda client=client: client.recv(1 << 16), b"")) for client in clients]
        assert one.process.wait(60) in (0, -signal.SIGTERM)
        assert all(b"the server is shutting down: ask again later" in one for one in told)
        assert "Traceback" not in one.log.read_text()
