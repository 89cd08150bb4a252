"""A Hub on loopback for tests: real HTTP, real files, users with tokens, and failures on request.

    with HubServer(folder) as hub:
        hub.add_user("alice", token="hf_alice", organizations=["org"])
        environment = hub.environment(tmp_path, "hf_alice")
        run_python("from huggingface_hub import create_repo; create_repo('org/name')", tmp_path, environment)
        hub.files("org/name")       # what is stored, by path
        hub.requests                # what was asked for

`hub.fail("POST .*/commit/", status=503)` fails the next request whose "METHOD /path?query" matches; see `Fault`.
"""

import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hub_api import HubApi, Repository, Request, Response, Store, User


@dataclass
class Fault:
    """What goes wrong with requests whose "METHOD /path?query" the regular expression `pattern` is found in.

    Args:
        pattern: Searched from the start of "METHOD /path?query".
        status: Answer with this status, and do nothing.
        headers: Headers of that answer, or added to the ordinary one.
        change: The body to answer with instead of the ordinary one, with a fitting Content-Length.
        silent: Read the request, and never answer; nothing is done.
        skip: How many such requests pass first.
        times: How many fail then. A request that an earlier fault strikes is not counted by the later ones.
    """

    pattern: str
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    change: Callable[[bytes], bytes] | None = None
    silent: bool = False
    skip: int = 0
    times: int = 1

    def strikes(self, line: str) -> bool:
        """Whether this request fails; counts it."""
        if not re.match(self.pattern, line) or self.times < 1:
            return False
        self.skip -= 1
        if self.skip >= 0:
            return False
        self.times -= 1
        return True


@dataclass(frozen=True)
class Logged:
    """A request that was answered (status None: its connection was cut instead). `server` is "hub" or "storage"."""

    server: str
    method: str
    path: str
    query: str
    status: int | None
    user: str | None
    headers: dict[str, str]


class HubServer:
    """Serves a store on two ports of loopback, the Hub's and the storage's; a context manager.

    Args:
        folder: Where bytes are kept.

    Attributes:
        url: The Hub's address, for `HF_ENDPOINT`.
        users: The users by token; `add_user` adds one.
        requests: What was asked for, in order.
        store: The repositories.
    """

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self.users: dict[str, User] = {}
        self.requests: list[Logged] = []
        self.faults: list[Fault] = []
        self._lock = threading.Lock()
        self._hub = self._listen("hub")
        self._storage = self._listen("storage")
        # Two names, so that every version of the client sees in the storage another host than the Hub's.
        self.url = f"http://127.0.0.1:{self._hub.server_address[1]}"
        self.storage_url = f"http://localhost:{self._storage.server_address[1]}"
        self.api = HubApi(self.store, self.users, self.url, self.storage_url)

    def _listen(self, name: str) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self, "name": name}))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    def __enter__(self) -> "HubServer":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stops listening; what is stored stays."""
        for server in (self._hub, self._storage):
            server.shutdown()
            server.server_close()

    def add_user(self, name: str, token: str, organizations: Sequence[str] = (), can_write: bool = True) -> None:
        self.users[token] = User(name, tuple(organizations), can_write)

    def fail(self, pattern: str, **how: Any) -> Fault:
        """Adds a `Fault`."""
        self.faults.append(Fault(pattern, **how))
        return self.faults[-1]

    def repository(self, repo_id: str) -> Repository:
        return self.store.repositories[repo_id]

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """What a revision holds."""
        repo = self.repository(repo_id)
        return {path: repo.content(entry.sha256) for path, entry in repo.read(revision).files.items()}

    def commit(self, repo_id: str, files: dict[str, bytes], revision: str = "main", private: bool = False) -> str:
        """Writes a commit with these files beside the ones before it, as if somebody else had pushed them; returns its id."""
        repo = self.store.find(repo_id) or self.store.create(repo_id, private, "test")
        base = repo.read(revision)
        entries = {path: repo.add(content, lfs=path.endswith(".safetensors")) for path, content in files.items()}
        return repo.commit(repo.find_ref(revision) or revision, "by the test", "test", base.files | entries, base.oid).oid

    def asked(self, pattern: str) -> list[Logged]:
        """The logged requests whose "METHOD /path?query" the pattern matches from the start."""
        return [logged for logged in self.requests if re.match(pattern, f"{logged.method} {logged.path}?{logged.query}")]

    def environment(self, home: Path, token: str | None = None, **more: str) -> dict[str, str]:
        """The environment of a process that uses this Hub: own caches under `home`, no credentials but the token."""
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_")) and k != "PYTHONPATH"
        }
        kept = {k: v for k, v in kept.items() if not k.lower().endswith("_proxy")}
        kept |= {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home / "hf"),
            "HF_MODULES_CACHE": str(home / "modules"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        return kept | ({} if token is None else {"HF_TOKEN": token}) | more


class _Handler(BaseHTTPRequestHandler):
    """Reads a request, lets faults strike, has it answered and logs it."""

    hub: HubServer
    name: str
    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # the client went away
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are logged in `HubServer.requests`."""

    def _serve(self) -> None:
        where = urlsplit(self.path)
        with self.hub._lock:
            fault = next((f for f in self.hub.faults if f.strikes(f"{self.command} {self.path}")), None)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:
            return self._cut()
        if fault is not None and fault.silent:
            self._log(where.path, where.query, None, None)
            self.rfile.read(1)  # until the client goes away
            return self._cut()
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, where.path, parse_qs(where.query), headers, body)
        response = self._answer(request, fault)
        self._log(where.path, where.query, response.status, request.user)
        self._send(response)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def _answer(self, request: Request, fault: Fault | None) -> Response:
        if fault is not None and fault.status is not None:
            return Response({"error": "a failure of the test's"}, fault.status, dict(fault.headers))
        answer = self.hub.api.answer if self.name == "hub" else self.hub.api.answer_storage
        response = answer(request)
        if fault is not None:
            response.headers |= fault.headers
            response.body = fault.change(response.encoded()) if fault.change is not None else response.body
        return response

    def _log(self, path: str, query: str, status: int | None, user: User | None) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        name = None if user is None else user.name
        with self.hub._lock:
            self.hub.requests.append(Logged(self.name, self.command, path, query, status, name, headers))

    def _send(self, response: Response) -> None:
        """One write for head and body, so that no packet waits for another."""
        body = response.encoded()
        head = [f"HTTP/1.1 {response.status} {self.responses.get(response.status, ('',))[0]}", f"Content-Length: {len(body)}"]
        head += [f"{name}: {value}" for name, value in response.headers.items()]
        sent = b"" if self.command == "HEAD" else body
        self.wfile.write("\r\n".join([*head, "", ""]).encode("latin-1", "replace") + sent)

    def _cut(self) -> None:
        self.close_connection = True
        with suppress(OSError):  # the client may have cut it
            self.connection.shutdown(socket.SHUT_RDWR)


def run_python(code: str, folder: Path, environment: dict[str, str]) -> str:
    """Runs code in a new interpreter inside `folder`; returns what it printed."""
    script = folder / f"fresh_{threading.get_ident()}.py"
    script.write_text(textwrap.dedent(code))
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return done.stdout
