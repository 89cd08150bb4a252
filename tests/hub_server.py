"""A small Hub on loopback for tests: what huggingface_hub 2.4 asks for when it pushes and loads models, with users by token.

with HubServer() as hub:
    hub.add_user("alice", token="hf_alice", organizations=["org"])
    environment = hub.environment(tmp_path, "hf_alice")
    run_python("from huggingface_hub import create_repo; create_repo('org/name')", tmp_path, environment)
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
from collections.abc import Callable, Iterator, Sequence
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
Answer = tuple[int, Any, dict[str, str]]


class HubError(Exception):
    """A status, a message, the Hub's name for the error, and what else the body holds."""


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    files: Files


@dataclass
class Repository:
    """Commits by id, the commit of each ref, and how many pull requests there are."""

    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    pull_requests: int = 0

    def ref(self, revision: str) -> str:
        return revision if revision.startswith("refs/") else f"refs/heads/{revision}"

    def read(self, revision: str) -> Commit:
        oid = self.refs.get(self.ref(revision), revision)
        if oid not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[oid]

    def history(self, revision: str) -> list[Commit]:
        """A commit and its ancestors, the newest first."""
        commits = [self.read(revision)]
        while (parent := commits[-1].parent) is not None:
            commits.append(self.commits[parent])
        return commits

    def commit(self, ref: str, title: str, files: Files, parent: str | None) -> Commit:
        oid = hashlib.sha1(f"{id(self)} {len(self.commits)}".encode()).hexdigest()
        self.commits[oid] = Commit(oid, parent, title, dict(sorted(files.items())))
        self.refs[ref] = oid
        return self.commits[oid]


@dataclass(frozen=True)
class User:
    name: str
    organizations: Sequence[str]

    def owns(self, repo_id: str) -> bool:
        return repo_id.split("/")[0] in (self.name, *self.organizations)


def oid_of(path: str, content: bytes) -> str:
    """What a file's bytes are identified by: sha256 where it goes by LFS, else the id of git's blob."""
    large = path.endswith(".safetensors")
    return hashlib.sha256(content).hexdigest() if large else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def described(file: tuple[str, bytes]) -> dict[str, Any]:
    """A file as listings tell of it."""
    path, content = file
    oid, size = oid_of(path, content), len(content)
    lfs = {"lfs": {"oid": oid, "sha256": oid, "size": size, "pointerSize": 0}} if path.endswith(".safetensors") else {}
    return {"type": "file", "path": path, "oid": oid, "size": size, **lfs}


class HubServer:
    """Serves repositories; a context manager.

    Attributes:
        url: The address, for `HF_ENDPOINT`.
        repositories: By id.
        requests: What was asked for, "METHOD /path", in order.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users: dict[str, User] = {}
        self.repositories: dict[str, Repository] = {}
        self.objects: Files = {}
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

    def add_user(self, name: str, token: str, organizations: Sequence[str] = ()) -> None:
        self.users[token] = User(name, tuple(organizations))

    def repository(self, repo_id: str) -> Repository:
        return self.repositories[repo_id]

    def files(self, repo_id: str, revision: str = "main") -> Files:
        return self.repositories[repo_id].read(revision).files

    def create(self, repo_id: str, private: bool) -> Repository:
        repo = self.repositories[repo_id] = Repository(private)
        repo.commit("refs/heads/main", "initial commit", {".gitattributes": b"*.safetensors filter=lfs\n"}, None)
        return repo

    def commit(self, repo_id: str, files: Files, private: bool = False) -> str:
        """Write a commit with these files beside the ones before it, as if somebody else had pushed them; returns its id."""
        repo = self.repositories.get(repo_id) or self.create(repo_id, private)
        base = repo.read("main")
        return repo.commit("refs/heads/main", "by the test", base.files | files, base.oid).oid

    def environment(self, home: Path, token: str | None = None, **more: str) -> dict[str, str]:
        """The environment of a process that uses this Hub: own caches under `home`, no credentials but the token."""
        ours = ("HF_", "HUGGING", "TRANSFORMERS_", "PYTHONPATH")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours) and not k.lower().endswith("_proxy")}
        off = ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_PROGRESS_BARS")
        kept |= {"HF_ENDPOINT": self.url, "HF_HOME": str(home / "hf"), "HF_MODULES_CACHE": str(home / "modules")}
        kept |= {"TOKENIZERS_PARALLELISM": "false", **dict.fromkeys(off, "1")}
        return kept | ({} if token is None else {"HF_TOKEN": token}) | more


@contextmanager
def using(hub: HubServer, home: Path, token: str) -> Iterator[None]:
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
        asked = f"{self.command} {where.path}"
        self.query = parse_qs(where.query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.hub.lock:
            self.hub.requests.append(asked)
            status, body, headers = self._answer(unquote(where.path))
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"" if self.command == "HEAD" else body)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def _answer(self, path: str) -> Answer:
        try:
            given = self.headers.get("Authorization")
            self.user = None if given is None else self.hub.users.get(given.removeprefix("Bearer "))
            if given is not None and self.user is None:
                raise HubError(401, "Invalid credentials in Authorization header")
            method = "GET" if self.command == "HEAD" else self.command
            for wanted, pattern, answer in ROUTES:
                if method == wanted and (found := re.fullmatch(pattern, path)):
                    answered = answer(self, *found.groups())
                    return 200, *(answered if isinstance(answered, tuple) else (answered, {}))
            raise HubError(404, f"This server does not know {self.command} {path}")
        except HubError as error:
            status, message, code, more = (*error.args, None, None)[:4]
            return status, {"error": message, **(more or {})}, {"X-Error-Message": message, "X-Error-Code": code or ""}

    def readable(self, repo_id: str) -> Repository:
        """A repository that the user may see; one that is missing and one that is private look the same."""
        repo = self.hub.repositories.get(repo_id)
        if repo is None or (repo.private and not (self.user and self.user.owns(repo_id))):
            raise HubError(404 if self.user else 401, "Repository not found", "RepoNotFound")
        return repo

    def writable(self, repo_id: str) -> None:
        if self.user is None or not self.user.owns(repo_id):
            raise HubError(403 if self.user else 401, f"You don't have the rights to write to {repo_id}")

    def whoami(self) -> Any:
        if self.user is None:
            raise HubError(401, "Invalid username or password.")
        return {"type": "user", "name": self.user.name, "orgs": []}

    def create_repo(self) -> Any:
        wanted = json.loads(self.body)
        repo_id = f"{wanted.get('organization') or self.whoami()['name']}/{wanted['name']}"
        self.writable(repo_id)
        answer = {"url": f"{self.hub.url}/{repo_id}", "name": repo_id}
        if repo_id in self.hub.repositories:
            raise HubError(409, "You already created this model repo", None, answer)
        self.hub.create(repo_id, wanted.get("visibility") == "private" or bool(wanted.get("private")))
        return answer

    def model_info(self, repo_id: str, revision: str = "main") -> Any:
        repo = self.readable(repo_id)
        commit = repo.read(revision)
        siblings = [{"rfilename": one["path"], "blobId": one["oid"], **one} for one in map(described, commit.files.items())]
        return {"id": repo_id, "sha": commit.oid, "private": repo.private, "tags": [], "siblings": siblings}

    def tree(self, repo_id: str, revision: str, folder: str | None = None) -> Any:
        files = self.readable(repo_id).read(revision).files
        found = [described(one) for one in files.items() if one[0].startswith(folder or "")]
        if not found:
            raise HubError(404, f"{folder} does not exist on {revision}", "EntryNotFound")
        return found

    def validate_yaml(self) -> Any:
        return {"errors": [], "warnings": []}

    def create_branch(self, repo_id: str, name: str) -> Any:
        self.writable(repo_id)
        repo = self.readable(repo_id)
        if repo.ref(name) in repo.refs:
            raise HubError(409, f"Reference already exists: {name}")
        repo.refs[repo.ref(name)] = repo.read(json.loads(self.body or b"{}").get("startingPoint", "main")).oid
        return "OK"

    def preupload(self, repo_id: str, revision: str) -> Any:
        files, answers = self.readable(repo_id).read(revision).files, []
        if "create_pr" not in self.query:
            self.writable(repo_id)
        for path in (item["path"] for item in json.loads(self.body)["files"]):
            known = {"oid": oid_of(path, files[path])} if path in files else {}
            mode = "lfs" if path.endswith(".safetensors") else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, **known})
        return {"files": answers}

    def lfs_batch(self, repo_id: str) -> Any:
        items = json.loads(self.body)["objects"]
        for item in items:
            if item["oid"] not in self.hub.objects:
                item["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}"}}
        return {"transfer": "basic", "objects": items}

    def lfs_upload(self, oid: str) -> Any:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(400, f"the uploaded bytes are not those of {oid}")
        self.hub.objects[oid] = self.body
        return b""

    def commit(self, repo_id: str, revision: str) -> Any:
        """All lines of the body in one commit, or nothing."""
        repo, proposed = self.readable(repo_id), self.query.get("create_pr", ["0"])[0].lower() in ("1", "true")
        if not proposed:
            self.writable(repo_id)
        (_, header), *operations = [(item["key"], item["value"]) for item in map(json.loads, self.body.splitlines())]
        base = repo.read(revision)
        if header.get("parentCommit") not in (None, base.oid) and not proposed:
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(base.files)
        for kind, value in operations:
            if kind == "deletedFile":
                del files[value["path"]]
            else:
                large = kind == "lfsFile"
                files[value["path"]] = self.hub.objects[value["oid"]] if large else base64.b64decode(value["content"])
        repo.pull_requests += proposed
        ref = f"refs/pr/{repo.pull_requests}" if proposed else repo.ref(revision)
        made = repo.commit(ref, header["summary"], files, base.oid)
        urls = {"commitUrl": f"{self.hub.url}/{repo_id}/commit/{made.oid}"}
        urls |= {"pullRequestUrl": f"{self.hub.url}/{repo_id}/discussions/{repo.pull_requests}"} if proposed else {}
        return {"success": True, "commitOid": made.oid, "hookOutput": "", **urls}

    def resolve(self, repo_id: str, revision: str, path: str) -> Any:
        commit = self.readable(repo_id).read(revision)
        if path not in commit.files:
            raise HubError(404, "Entry not found", "EntryNotFound")
        content = commit.files[path]
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{oid_of(path, content)}"', "X-Linked-Size": str(len(content))}
        return content, headers


REPO, NAME = "([^/]+/[^/]+)", "([^/]+)"
ROUTES: list[tuple[str, str, Callable[..., Any]]] = [
    ("GET", "/api/whoami-v2", _Handler.whoami),
    ("POST", "/api/repos/create", _Handler.create_repo),
    ("GET", f"/api/models/{REPO}", _Handler.model_info),
    ("GET", f"/api/models/{REPO}/revision/(.+)", _Handler.model_info),
    ("GET", f"/api/models/{REPO}/tree/{NAME}(?:/(.+))?", _Handler.tree),
    ("POST", "/api/validate-yaml", _Handler.validate_yaml),
    ("POST", f"/api/models/{REPO}/branch/(.+)", _Handler.create_branch),
    ("POST", f"/api/models/{REPO}/preupload/(.+)", _Handler.preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", f"/lfs/{NAME}", _Handler.lfs_upload),
    ("POST", f"/api/models/{REPO}/commit/(.+)", _Handler.commit),
    ("GET", f"/(?:api/models/)?{REPO}/resolve/((?:refs/[^/]+/)?[^/]+)/(.+)", _Handler.resolve),
]


def run_python(code: str, folder: Path, environment: dict[str, str]) -> str:
    """Run code in a new interpreter inside `folder`; returns what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return done.stdout
