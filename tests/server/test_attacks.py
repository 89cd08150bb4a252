"""`mrp serve` under attack, over HTTP: clients that leave, more than it can queue, bodies that are
too large, too deep, or not what they should be; and text made of ids one by one."""

import random
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

pytest.importorskip("openai", reason="the tests' client")
pytest.importorskip("fastapi", reason="the server")

from mrp_trainer.serve.answers import TextOfIds

from tests.support.malformed import bodies
from tests.support.openai_server import ENDLESS, Served, served


@pytest.fixture(scope="module")
def server(tiny_model: Any, tiny_tokenizer: Any) -> Iterator[Served]:
    with served(tiny_model, tiny_tokenizer, max_batch_size=2, max_queue_size=6) as running:
        yield running


@contextmanager
def sent(server: Served, *requests: bytes) -> Iterator[list[socket.socket]]:
    """Connections with a request each; leaving closes them all, and waits until the server has
    noticed."""
    with ExitStack() as opened:
        sockets = []
        for request in requests:
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            sockets.append(opened.enter_context(connection))
            connection.sendall(request)
        yield sockets


def wait_until(condition: Any, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_texts_for_which_nobody_waits_are_not_decoded(server: Served, stream: bool) -> None:
    """Of six that would take thousands of tokens, two run when their clients leave."""
    before = server.metrics()["mrp_tokens_total"]
    manager = server.service.manager
    with ExitStack() as clients:
        with manager.pause():  # else the first may have ended before the last has come
            clients.enter_context(sent(server, *6 * [server.raw(stream=stream, **ENDLESS)]))
            wait_until(lambda: manager.waiting == 6)
        wait_until(lambda: manager.running == 2)
    server.wait_until_idle()
    assert server.metrics()["mrp_tokens_total"] - before < 2000


def test_the_queue_has_an_end(server: Served) -> None:
    """Who comes behind six that wait is asked to come again, and then served."""
    manager = server.service.manager
    with manager.pause(), sent(server, *6 * [server.raw(max_tokens=1)]):
        wait_until(lambda: manager.waiting == 6)
        status, content, headers = server.post("/v1/completions", b'{"prompt": "hi"}')
        assert (status, headers["Retry-After"]) == (429, "2")
        assert content["error"]["message"] == "6 texts wait already: ask again later"
    server.wait_until_idle()
    assert server.chat(max_tokens=1).choices


def test_a_request_counts_once(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is read or while it waits: counted as both, it would take the last place of
    another."""
    service, counted = server.service, list[int]()
    add = service.manager.add_request

    def noted(*args: Any, **options: Any) -> str:
        name = add(*args, **options)
        counted.append(len(service.reading))
        return name

    monkeypatch.setattr(service.manager, "add_request", noted)
    assert server.chat(max_tokens=1).choices
    assert counted == [0]


def test_a_large_body_keeps_nobody_waiting(server: Served) -> None:
    """It is refused by its bytes, declared or not; others are answered while it comes."""
    length = 8 << 20
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    with sent(server, head.encode() + b"x" * 1000) as (connection,):
        begun = time.monotonic()
        assert b" 413 " in connection.recv(1 << 16).splitlines()[0]
        assert time.monotonic() - begun < 1
    chunked = head.replace(f"Content-Length: {length}", "Transfer-Encoding: chunked").encode()
    with sent(server, chunked) as (connection,):
        piece = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
        connection.sendall(3 * piece)
        assert server.chat(max_tokens=1).choices
        connection.sendall(2 * piece)
        assert b" 413 " in connection.recv(1 << 16).splitlines()[0]


def test_no_malformed_body_is_more_than_refused(server: Served) -> None:
    """With a 4xx and OpenAI's error object, in a second at most, and nothing is decoded."""
    texts = server.metrics()["mrp_texts_total"]
    listed = bodies()
    assert len(listed) >= 95
    for path, body in listed:
        begun = time.monotonic()
        try:
            status, content, _ = server.post(path, body)
        except OSError:  # the connection was closed while a body was sent that is too large
            assert len(body) > 4 << 20
            continue
        assert 400 <= status < 500, (path, body[:200], status)
        error = content["error"]
        assert (error["type"], bool(error["message"])) == ("invalid_request_error", True)
        assert len(error["message"]) < 1100
        assert time.monotonic() - begun < 5, body[:200]
    assert server.metrics()["mrp_texts_total"] == texts
    assert not any(name.startswith('mrp_requests_total{status="5') for name in server.metrics())


def test_long_stop_lists_hold_nobody_up(server: Served) -> None:
    stops = [letter * 100 for letter in "abcdefghijklmnop"]
    begun = time.monotonic()
    done = server.chat(stop=stops, max_tokens=64)
    assert done.choices[0].finish_reason == "stop"
    assert time.monotonic() - begun < 10


def test_names_of_this_machine_alone_are_answered(server: Served) -> None:
    for host, status in {"localhost": 200, "127.0.0.1:80": 200, "evil.example": 400}.items():
        assert (
            server.post("/v1/completions", b'{"prompt": "a", "max_tokens": 1}', {"Host": host})[0]
            == status
        ), host


@pytest.mark.parametrize("seed", range(3))
def test_text_of_ids_one_by_one_is_that_of_all(tiny_tokenizer: Any, seed: int) -> None:
    """Half characters, special tokens and spaces too, and nothing that was given changes."""
    rng = random.Random(seed)

    def decode(ids: Any) -> str:
        return str(tiny_tokenizer.decode(ids, skip_special_tokens=True))

    for _ in range(20):
        known = tiny_tokenizer("naïve 東京 😀 é\n\t", add_special_tokens=False)["input_ids"]
        ids = [rng.choice((rng.randrange(1280), rng.choice(known))) for _ in range(40)] + known
        decoder = TextOfIds(decode)
        text = "".join(map(decoder.add, ids)) + decoder.end()
        assert text == decode(ids)


def test_chats_are_refused_while_the_server_ends(tiny_model: Any, tiny_tokenizer: Any) -> None:
    with served(tiny_model, tiny_tokenizer) as ending:
        ending.service.stop()
        status, content, _ = ending.post(
            "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "hi"}]}'
        )
        assert (status, content["error"]["type"]) == (503, "server_error")
