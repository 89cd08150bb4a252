"""A small Hub on loopback for tests, with one user, alice: what huggingface_hub asks for when it pushes and loads models.

with HubServer() as hub:
    run_python("from huggingface_hub import create_repo; create_repo('org/name')", tmp_path, hub.environment(tmp_path))
    hub.files("org/name")       # what is stored, by path
    hub.requests                # what was asked for
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

from huggingface_hub import constants
from transformers.utils import hub as transformers_hub

Files = dict[str, bytes]


class HubError(Exception):
    """A status, what the body holds, and the Hub's name for the error."""


@dataclass(frozen=True)
class Commit:
    oid: str
    title: str
    files: Files


@dataclass
class Repository:
    """The commits of each ref, the newest first."""

    private: bool
    refs: dict[str, list[Commit]] = field(default_factory=dict)

    def read(self, revision: str) -> Commit:
        commits = {one.oid: one for commits in self.refs.values() for one in commits}
        if (found := self.refs.get(revision, [commits.get(revision)])[0]) is None:
            raise HubError(404, {"error": f"Invalid rev id: {revision}"}, "RevisionNotFound")
        return found

    def history(self, revision: str) -> list[Commit]:
        return self.refs[revision]

    def commit(self, ref: str, title: str, files: Files, onto: str = "main") -> Commit:
        before = self.refs.get(ref) or self.refs.get(onto, [])
        number = sum(map(len, self.refs.values()))
        made = Commit(hashlib.sha1(f"{id(self)} {number}".encode()).hexdigest(), title, dict(sorted(files.items())))
        self.refs[ref] = [made, *before]
        return made


class HubServer:
    """Serves repositories; a context manager.

    Attributes:
        url: The address, for `HF_ENDPOINT`.
        repositories: By id.
        requests: What was asked for, "METHOD /path", in order.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "HubServer":
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def repository(self, repo_id: str) -> Repository:
        """A repository; `HubError` if there is none."""
        if repo_id not in self.repositories:
            raise HubError(404, {"error": "Repository not found"}, "RepoNotFound")
        return self.repositories[repo_id]

    def files(self, repo_id: str, revision: str = "main") -> Files:
        return self.repository(repo_id).read(revision).files

    def create(self, repo_id: str, private: bool = False) -> Repository:
        repo = self.repositories[repo_id] = Repository(private)
        repo.commit("main", "initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"})
        return repo

    def commit(self, repo_id: str, files: Files) -> str:
        """Write a commit with these files beside the ones before it, as if somebody else had pushed them; returns its id."""
        repo = self.repositories.get(repo_id) or self.create(repo_id)
        return repo.commit("main", "by the test", repo.read("main").files | files).oid

    def environment(self, home: Path, token: str = "hf_alice", **more: str) -> dict[str, str]:
        """The environment of a process that uses this Hub: own caches under `home`, no credentials but the token."""
        ours = ("HF_", "HUGGING", "TRANSFORMERS_", "PYTHONPATH")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours) and not k.lower().endswith("_proxy")}
        off = ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS")
        kept |= {"HF_ENDPOINT": self.url, "HF_HOME": str(home / "hf"), "HF_MODULES_CACHE": str(home / "modules")}
        return kept | {"TOKENIZERS_PARALLELISM": "false", **dict.fromkeys(off, "1"), "HF_TOKEN": token} | more


@contextmanager
def using(hub: HubServer, home: Path, token: str = "hf_alice") -> Iterator[None]:
    """Let this process use a Hub, with a token, and a cache under `home`."""
    files = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    told = {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": files, "HF_HUB_CACHE": str(home / "hub-cache")}
    told |= {"HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    # transformers keeps the client that it makes first.
    fresh = mock.patch.object(transformers_hub, "_hf_api", None, create=True)
    with mock.patch.multiple(constants, **told), mock.patch.dict(os.environ, HF_TOKEN=token), fresh:
        yield


class _Handler(BaseHTTPRequestHandler):
    """Answers a request and logs it."""

    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are logged in `HubServer.requests`."""

    def _serve(self) -> None:
        where = urlsplit(self.path)
        self.query = parse_qs(where.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {where.path}")
            try:
                status, body, headers = 200, *self._answer(unquote(where.path))
            except HubError as error:
                status, body, code = error.args
                headers = {"X-Error-Message": body["error"], "X-Error-Code": code}
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    do_GET = do_HEAD = do_POST = _serve

    def _answer(self, path: str) -> tuple[Any, dict[str, str]]:
        method = "GET" if self.command == "HEAD" else self.command
        for wanted, pattern, answer in ROUTES:
            if method == wanted and (found := re.fullmatch(pattern, path)):
                answered = answer(self, *found.groups())
                return answered if isinstance(answered, tuple) else (answered, {})
        raise HubError(404, {"error": f"This server does not know {self.command} {path}"}, "")

    def whoami(self) -> Any:
        return {"type": "user", "name": "alice", "orgs": []}

    def create_repo(self) -> Any:
        wanted = json.loads(self.body)
        repo_id = f"{wanted.get('organization') or 'alice'}/{wanted['name']}"
        answer = {"url": f"{self.hub.url}/{repo_id}", "name": repo_id}
        if repo_id in self.hub.repositories:
            raise HubError(409, {"error": "You already created this model repo", **answer}, "")
        self.hub.create(repo_id, wanted.get("visibility") == "private" or bool(wanted.get("private")))
        return answer

    def model_info(self, repo_id: str, revision: str = "main") -> Any:
        commit = self.hub.repository(repo_id).read(revision)
        return {"id": repo_id, "sha": commit.oid, "tags": [], "siblings": [{"rfilename": path} for path in commit.files]}

    def tree(self, repo_id: str, revision: str, folder: str = "") -> Any:
        files = self.hub.files(repo_id, revision).items()
        found = [{"type": "file", "path": path, "size": len(one), "oid": oid(one)} for path, one in files]
        if not (found := [one for one in found if one["path"].startswith(folder or "")]):
            raise HubError(404, {"error": f"{folder} does not exist on {revision}"}, "EntryNotFound")
        return found

    def validate_yaml(self) -> Any:
        return {"errors": [], "warnings": []}

    def create_branch(self, repo_id: str, name: str) -> Any:
        repo = self.hub.repository(repo_id)
        repo.refs[name] = list(repo.refs["main"])
        return "OK"

    def preupload(self, repo_id: str, revision: str) -> Any:
        self.hub.files(repo_id, revision)
        paths = [one["path"] for one in json.loads(self.body)["files"]]
        return {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}

    def commit(self, repo_id: str, revision: str) -> Any:
        """All lines of the body in one commit."""
        repo = self.hub.repository(repo_id)
        (_, header), *operations = [(item["key"], item["value"]) for item in map(json.loads, self.body.splitlines())]
        files = dict(repo.read(revision).files)
        for kind, value in operations:
            if kind == "deletedFile":
                del files[value["path"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        number = sum(ref.startswith("refs/pr/") for ref in repo.refs) + 1
        proposed = "create_pr" in self.query
        made = repo.commit(f"refs/pr/{number}" if proposed else revision, header["summary"], files, revision)
        urls = {"commitUrl": f"{self.hub.url}/{repo_id}/commit/{made.oid}"}
        urls |= {"pullRequestUrl": f"{self.hub.url}/{repo_id}/discussions/{number}"} if proposed else {}
        return {"success": True, "commitOid": made.oid, "hookOutput": "", **urls}

    def resolve(self, repo_id: str, revision: str, path: str) -> Any:
        commit = self.hub.repository(repo_id).read(revision)
        if path not in commit.files:
            raise HubError(404, {"error": "Entry not found"}, "EntryNotFound")
        content = commit.files[path]
        return content, {"X-Repo-Commit": commit.oid, "ETag": f'"{oid(content)}"', "X-Linked-Size": str(len(content))}


def oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


REPO = "([^/]+/[^/]+)"
ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("GET", "/api/whoami-v2", _Handler.whoami),
    ("POST", "/api/repos/create", _Handler.create_repo),
    ("GET", f"/api/models/{REPO}", _Handler.model_info),
    ("GET", f"/api/models/{REPO}/revision/(.+)", _Handler.model_info),
    ("GET", f"/api/models/{REPO}/tree/([^/]+)(?:/(.+))?", _Handler.tree),
    ("POST", "/api/validate-yaml", _Handler.validate_yaml),
    ("POST", f"/api/models/{REPO}/branch/(.+)", _Handler.create_branch),
    ("POST", f"/api/models/{REPO}/preupload/(.+)", _Handler.preupload),
    ("POST", f"/api/models/{REPO}/commit/(.+)", _Handler.commit),
    ("GET", f"/(?:api/models/)?{REPO}/resolve/((?:refs/[^/]+/)?[^/]+)/(.+)", _Handler.resolve),
]


def run_python(code: str, folder: Path, environment: dict[str, str]) -> str:
    """Run code in a new interpreter inside `folder`; returns what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return done.stdout
