"""`mrp serve` in a thread of this process, and OpenAI's client of it: real HTTP on loopback."""

import copy
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import uvicorn
from mrp_trainer.serve.server import Server, application

MODEL = "sdar-tiny-mrp"
CHAT = [{"role": "user", "content": "Sum the numbers of a list that are even, each plus 5."}]
PROMPT = "def change(value):\n"
OPTIONS = {"decoding": "mrp_spec", "target": "sequential", "num_draft_states": 8}
ENDLESS = {"ignore_eos": True, "max_tokens": 900}


class Served:
    """A server and its client.

    Attributes:
        client: OpenAI's.
        url: Of the server, without a path.
        service: The server's `Service`.
    """

    def __init__(self, app: Any, port: int, api_key: str = "none") -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.port = port
        self.service = app.state.service
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=120
        )

    def chat(self, **options: Any) -> Any:
        return self.client.chat.completions.create(**{"model": MODEL, "messages": CHAT, **options})

    def complete(self, **options: Any) -> Any:
        return self.client.completions.create(**{"model": MODEL, "prompt": PROMPT, **options})

    def metrics(self) -> dict[str, float]:
        """What /metrics says."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as page:
            lines = page.read().decode().splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def post(
        self, path: str, body: bytes, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, Any]:
        """Status, content and headers of the answer to a body."""
        headers = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return reply.status, reply.read(), reply.headers
        except urllib.error.HTTPError as error:
            content = error.read()
            if error.headers.get_content_type() == "application/json":
                return error.code, json.loads(content), error.headers
            return error.code, content, error.headers

    def raw(self, **fields: Any) -> bytes:
        """A chat as it goes over the wire."""
        body = json.dumps({"messages": CHAT, **fields}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
        )
        return f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + body

    def wait_until_idle(self, seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while self.service.manager.running or self.service.manager.waiting or self.service.reading:
            assert time.monotonic() < until, "texts are still decoded"
            time.sleep(0.02)


@contextmanager
def served(model: Any, tokenizer: Any, **options: Any) -> Iterator[Served]:
    """Serve a model, with drafts for another target than the checkpoint's."""
    drafted = copy.copy(model)
    drafted.generation_config = copy.deepcopy(model.generation_config)
    drafted.generation_config.update(**OPTIONS)
    app = application(MODEL, drafted, tokenizer, **options)
    server = Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=2))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield Served(app, listener.getsockname()[1], options.get("api_key") or "none")
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
        assert not app.state.service.manager.is_running()
