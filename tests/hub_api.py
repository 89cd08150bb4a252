"""What tests need of the Hub, without sockets: repositories, and the answers to the requests of huggingface_hub 2.4.

Large files go by LFS, to and from a second address (the storage) whose signed links carry no credentials, as on the Hub. There
is no Xet, so clients set `HF_HUB_DISABLE_XET=1`.
"""

import base64
import hashlib
import json
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from hub_cards import validate_card

MAIN = "refs/heads/main"
GITATTRIBUTES = "".join(f"*.{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in ("bin", "pt", "safetensors", "zip"))


class HubError(Exception):
    """What the server answers instead of a result: a status, the Hub's name for the error (if any) and its message."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass(frozen=True)
class Entry:
    """A file of a commit: the sha256 of its bytes, and git's id of its blob (of the pointer, where the file is LFS's)."""

    sha256: str
    blob_id: str
    size: int
    lfs: bool

    @classmethod
    def of(cls, content: bytes, lfs: bool) -> "Entry":
        """The entry of these bytes."""
        sha256 = hashlib.sha256(content).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(content)}\n".encode()
        blob = pointer if lfs else content
        return cls(sha256, hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest(), len(content), lfs)

    @property
    def etag(self) -> str:
        """What the Hub identifies the file's bytes by, and what a client's cache is named after."""
        return self.sha256 if self.lfs else self.blob_id


@dataclass(frozen=True)
class Commit:
    """A whole tree of files, with who wrote it and on top of which commit."""

    oid: str
    parent: str | None
    title: str
    author: str
    date: str
    files: dict[str, Entry]


class Repository:
    """One repository: commits, a `state` that every change replaces (visibility, refs, pull requests), bytes in a folder."""

    def __init__(self, folder: Path, repo_id: str, private: bool, author: str) -> None:
        self.folder, self.repo_id, self.lock = folder, repo_id, threading.RLock()
        folder.mkdir(parents=True)
        self.commits: dict[str, Commit] = {}
        self.state: dict[str, Any] = {"private": private, "refs": {}, "discussions": []}
        self.commit(MAIN, "initial commit", author, {".gitattributes": self.add(GITATTRIBUTES.encode(), lfs=False)}, None)

    def add(self, content: bytes, lfs: bool) -> Entry:
        """Stores a file's bytes."""
        entry = Entry.of(content, lfs)
        (self.folder / entry.sha256).write_bytes(content)
        return entry

    def has(self, sha256: str) -> bool:
        return (self.folder / sha256).exists()

    def content(self, sha256: str) -> bytes:
        return (self.folder / sha256).read_bytes()

    def set_ref(self, ref: str, oid: str | None) -> None:
        """Points a ref at a commit, or removes it."""
        refs = {name: at for name, at in {**self.state["refs"], ref: oid}.items() if at is not None}
        self.state = {**self.state, "refs": refs}

    def find_ref(self, revision: str) -> str | None:
        """The full name of a branch or a pull request; None where there is none of that name."""
        return next((ref for ref in (revision, f"refs/heads/{revision}") if ref in self.state["refs"]), None)

    def read(self, revision: str) -> Commit:
        """The commit that a branch, a pull request or a commit id (from 7 characters on) stands for."""
        ref = self.find_ref(revision)
        if ref is not None:
            return self.commits[self.state["refs"][ref]]
        found = [commit for oid, commit in self.commits.items() if len(revision) >= 7 and oid.startswith(revision)]
        if len(found) != 1:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found[0]

    def history(self, revision: str) -> list[Commit]:
        """A commit and its ancestors, the newest first."""
        commits = [self.read(revision)]
        while (parent := commits[-1].parent) is not None:
            commits.append(self.read(parent))
        return commits

    def commit(self, ref: str, title: str, author: str, files: dict[str, Entry], parent: str | None) -> Commit:
        """Writes a commit of a whole tree and points a ref at it."""
        with self.lock:
            body = [self.repo_id, len(self.commits), title, {path: asdict(entry) for path, entry in files.items()}]
            oid = hashlib.sha1(json.dumps(body).encode()).hexdigest()
            date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
            self.commits[oid] = Commit(oid, parent, title, author, date, dict(sorted(files.items())))
            self.set_ref(ref, oid)
            return self.commits[oid]


class Store:
    """All repositories, by id; their bytes are in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, threading.Lock()
        self.repositories: dict[str, Repository] = {}

    def create(self, repo_id: str, private: bool, author: str) -> Repository:
        with self.lock:
            if repo_id in self.repositories:
                raise HubError(409, "You already created this model repo")
            self.repositories[repo_id] = Repository(self.folder / repo_id, repo_id, private, author)
            return self.repositories[repo_id]

    def find(self, repo_id: str) -> Repository | None:
        return self.repositories.get(repo_id)


@dataclass(frozen=True)
class User:
    """A user, and the namespaces that the user may read and write."""

    name: str
    organizations: tuple[str, ...] = ()
    can_write: bool = True

    def owns(self, repo_id: str) -> bool:
        return repo_id.split("/")[0] in (self.name, *self.organizations)


@dataclass
class Request:
    """What a client sent; `path` is still quoted, `user` is None without credentials."""

    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes
    user: User | None = None

    def json(self) -> Any:
        return json.loads(self.body)

    def asks(self, name: str) -> bool:
        return self.query.get(name, ["0"])[0].lower() in ("1", "true")

    def known(self) -> User:
        if self.user is None:
            raise HubError(401, "Invalid username or password.")
        return self.user

    def writer(self, repo_id: str) -> User:
        user = self.known()
        if not user.owns(repo_id) or not user.can_write:
            raise HubError(403, f"You don't have the rights to write to {repo_id}")
        return user


@dataclass
class Response:
    """What the server answers; a body that is no bytes is sent as JSON."""

    body: Any = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        self.headers.setdefault("Content-Type", "application/json")
        return json.dumps(self.body).encode()


Handler = Callable[..., Response]
ROUTES: list[tuple[str, re.Pattern[str], Handler]] = []
PARTS = {"repo": r"[^/]+/[^/.][^/]*?", "path": ".+"}


def route(method: str, template: str) -> Callable[[Handler], Handler]:
    """Registers a method of `HubApi` for a path; `{name}` matches one part of it, `{repo}` two and `{path}` the rest."""
    pattern = re.sub(r"\{(\w+)\}", lambda m: f"(?P<{m[1]}>{PARTS.get(m[1], '[^/]+')})", template.replace(".", r"\."))

    def register(handler: Handler) -> Handler:
        ROUTES.append((method, re.compile(pattern), handler))
        return handler

    return register


def described(path: str, entry: Entry) -> dict[str, Any]:
    """A file as the Hub lists it."""
    lfs = {"oid": entry.sha256, "size": entry.size, "pointerSize": 0}
    return {"type": "file", "path": path, "oid": entry.blob_id, "size": entry.size} | ({"lfs": lfs} if entry.lfs else {})


class HubApi:
    """Answers requests from a store.

    Args:
        store: The repositories.
        users: By their tokens.
        url: The Hub's own address.
        storage_url: The address that bytes of large files go to and come from.
    """

    def __init__(self, store: Store, users: dict[str, User], url: str, storage_url: str) -> None:
        self.store, self.users, self.url, self.storage_url = store, users, url, storage_url
        self.secret = secrets.token_hex()

    def answer(self, request: Request) -> Response:
        """The response to a request; errors become the Hub's error responses."""
        try:
            if (given := request.headers.get("authorization")) is not None:
                request.user = self.users.get(given.removeprefix("Bearer "))
                if request.user is None:
                    raise HubError(401, "Invalid credentials in Authorization header")
            return self.dispatch(request)
        except HubError as error:
            headers = {"X-Error-Message": error.message.replace("\n", " ")}
            headers |= {"X-Error-Code": error.code} if error.code else {}
            if error.code == "EntryNotFound" and (found := re.fullmatch(r"/(.+?/.+?)/resolve/([^/]+)/.*", request.path)):
                headers["X-Repo-Commit"] = self.store.repositories[found[1]].read(unquote(found[2])).oid
            return Response({"error": error.message}, error.status, headers)

    def dispatch(self, request: Request) -> Response:
        for method, pattern, handler in ROUTES:
            if method == ("GET" if request.method == "HEAD" else request.method) and (found := pattern.fullmatch(request.path)):
                arguments: dict[str, Any] = {name: unquote(value) for name, value in found.groupdict().items()}
                if "repo" in arguments:
                    arguments["repo"] = self.readable(request, arguments["repo"])
                return handler(self, request, **arguments)
        raise HubError(404, f"Sorry, this server does not know {request.method} {request.path}")

    def readable(self, request: Request, repo_id: str) -> Repository:
        """A repository that the user may see. As on the Hub, one that is missing and one that is private look the same."""
        repository = self.store.find(repo_id)
        mine = request.user is not None and request.user.owns(repo_id)
        if repository is None or (repository.state["private"] and not mine):
            raise HubError(404 if request.user else 401, "Repository not found", "RepoNotFound")
        return repository

    def may_upload(self, request: Request, repo: Repository, as_pull_request: bool) -> User:
        """Whoever may read may propose; only those who may write change a branch."""
        return request.known() if as_pull_request else request.writer(repo.repo_id)

    # Repositories

    @route("GET", "/api/whoami-v2")
    def whoami(self, request: Request) -> Response:
        return Response({"type": "user", "name": request.known().name, "orgs": []})

    @route("POST", "/api/repos/create")
    def create_repo(self, request: Request) -> Response:
        wanted = request.json()
        repo_id = f"{wanted.get('organization') or request.known().name}/{wanted['name']}"
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        answer = {"url": f"{self.url}/{repo_id}", "name": repo_id}
        try:
            self.store.create(repo_id, private, request.writer(repo_id).name)
        except HubError as error:
            if error.status != 409:
                raise
            return Response({"error": error.message, **answer}, error.status)
        return Response(answer)

    @route("GET", "/api/models/{repo}/revision/{revision}")
    @route("GET", "/api/models/{repo}")
    def model_info(self, request: Request, repo: Repository, revision: str = "main") -> Response:
        commit = repo.read(revision)
        info = {
            "id": repo.repo_id,
            "sha": commit.oid,
            "lastModified": commit.date,
            "private": repo.state["private"],
            "tags": [],
        }
        siblings = []
        for path, entry in commit.files.items():
            lfs = {"lfs": {"sha256": entry.sha256, "size": entry.size, "pointerSize": 0}} if entry.lfs else {}
            siblings.append({"rfilename": path, "blobId": entry.blob_id, "size": entry.size, **lfs})
        return Response(info | {"siblings": siblings})

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self, request: Request) -> Response:
        errors = validate_card(request.json()["content"])
        return Response({"errors": [{"message": text} for text in errors], "warnings": []}, 400 if errors else 200)

    @route("GET", "/api/models/{repo}/tree/{revision}/{path}")
    @route("GET", "/api/models/{repo}/tree/{revision}")
    def tree(self, request: Request, repo: Repository, revision: str, path: str = "") -> Response:
        """All files of a revision or of one of its folders; the folders themselves are left out."""
        files = repo.read(revision).files
        inside = [described(name, entry) for name, entry in files.items() if name.startswith(f"{path}/" if path else "")]
        if not inside:
            raise HubError(404, f"{path} does not exist on {revision}", "EntryNotFound")
        return Response(inside)

    @route("POST", "/api/models/{repo}/branch/{name}")
    def create_branch(self, request: Request, repo: Repository, name: str) -> Response:
        request.writer(repo.repo_id)
        if f"refs/heads/{name}" in repo.state["refs"]:
            raise HubError(409, f"Reference already exists: refs/heads/{name}")
        repo.set_ref(f"refs/heads/{name}", repo.read(request.json().get("startingPoint", "main")).oid)
        return Response("OK")

    @route("DELETE", "/api/models/{repo}/branch/{name}")
    def delete_branch(self, request: Request, repo: Repository, name: str) -> Response:
        request.writer(repo.repo_id)
        if name == "main" or f"refs/heads/{name}" not in repo.state["refs"]:
            raise HubError(403 if name == "main" else 404, f"Cannot delete the branch {name}")
        repo.set_ref(f"refs/heads/{name}", None)
        return Response("OK")

    # Uploads

    @route("POST", "/api/models/{repo}/preupload/{revision}")
    def preupload(self, request: Request, repo: Repository, revision: str) -> Response:
        self.may_upload(request, repo, request.asks("create_pr") or revision.startswith("refs/pr/"))
        files = repo.read(revision).files
        patterns = [line.split()[0] for line in GITATTRIBUTES.splitlines()]
        answers = []
        for path in (item["path"] for item in request.json()["files"]):
            large = any(fnmatch(path.rsplit("/", 1)[-1], pattern) for pattern in patterns)
            known = {"oid": files[path].etag} if path in files else {}
            answers.append({"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, **known})
        return Response({"files": answers})

    @route("POST", "/{repo}.git/info/lfs/objects/batch")
    def lfs_batch(self, request: Request, repo: Repository) -> Response:
        """Where to upload each object; an object that is there already needs no action."""
        batch = request.json()
        ref = batch.get("ref", {}).get("name", "")
        self.may_upload(request, repo, not ref or ref.startswith("refs/pr/"))
        objects = []
        for item in batch["objects"]:
            verify = {"href": f"{self.url}/api/models/{repo.repo_id}/lfs/verify"}
            actions = {"upload": {"href": self.signed(repo, item["oid"])}, "verify": verify}
            objects.append({**item, **({} if repo.has(item["oid"]) else {"actions": actions})})
        return Response({"transfer": "basic", "objects": objects})

    @route("POST", "/api/models/{repo}/lfs/verify")
    def lfs_verify(self, request: Request, repo: Repository) -> Response:
        self.uploaded(repo, request.json()["oid"])
        return Response("OK")

    def uploaded(self, repo: Repository, oid: str) -> Entry:
        """The entry of a large file whose bytes must have come before."""
        if not repo.has(oid):
            raise HubError(400, f"LFS object {oid} was not uploaded")
        return Entry.of(repo.content(oid), lfs=True)

    def signed(self, repo: Repository, oid: str) -> str:
        """A link to the storage that only this server can have made."""
        return f"{self.storage_url}/{quote(repo.repo_id)}/objects/{oid}?signature={self.secret}"

    def answer_storage(self, request: Request) -> Response:
        """The storage: `/org/name/objects/<oid>`. It refuses credentials, which are for the Hub alone."""
        if request.query.get("signature") != [self.secret] or "authorization" in request.headers:
            return Response(b"no signed link, or one with credentials", 403)
        org, name, _, oid = request.path.strip("/").split("/")
        repo = self.store.repositories[f"{org}/{name}"]
        if request.method != "PUT":
            return file_response(repo.content(oid), oid, {})
        if hashlib.sha256(request.body).hexdigest() != oid:
            return Response(f"the uploaded bytes are not those of {oid}".encode(), 400)
        repo.add(request.body, lfs=True)
        return Response()

    @route("POST", "/api/models/{repo}/commit/{revision}")
    def commit(self, request: Request, repo: Repository, revision: str) -> Response:
        """All lines of the body in one commit, or nothing."""
        as_pull_request = request.asks("create_pr")
        author = self.may_upload(request, repo, as_pull_request or revision.startswith("refs/pr/")).name
        (_, header), *operations = [(item["key"], item["value"]) for item in map(json.loads, request.body.splitlines())]
        with repo.lock:
            base, target = repo.read(revision), repo.find_ref(revision)
            expected, number = header.get("parentCommit"), len(repo.state["discussions"]) + 1
            if expected is not None and as_pull_request:
                base = repo.read(expected)
            elif expected is not None and repo.read(expected) != base:
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            files = self.applied(repo, base.files, operations)
            if as_pull_request:
                target = f"refs/pr/{number}"
                repo.state = {**repo.state, "discussions": [*repo.state["discussions"], header["summary"]]}
            if target is None:
                raise HubError(404, f"{revision} is no branch", "RevisionNotFound")
            made = repo.commit(target, header["summary"], author, files, base.oid)
        urls = {"commitUrl": f"{self.url}/{repo.repo_id}/commit/{made.oid}"}
        urls |= {"pullRequestUrl": f"{self.url}/{repo.repo_id}/discussions/{number}"} if as_pull_request else {}
        return Response({"success": True, "commitOid": made.oid, "hookOutput": "", **urls})

    def applied(self, repo: Repository, files: dict[str, Entry], operations: list[tuple[str, Any]]) -> dict[str, Entry]:
        """The tree after a commit's operations; raises `HubError` for what the Hub would not accept."""
        files = dict(files)
        for kind, value in operations:
            path = value["path"]
            if any(part in ("", ".", "..", ".git") for part in path.rstrip("/").split("/")):
                raise HubError(400, f"invalid path: {path}")
            if kind == "file":
                content = base64.b64decode(value["content"], validate=True)
                if path == "README.md" and (errors := validate_card(content.decode())):
                    raise HubError(400, f"Invalid metadata in README.md: {'; '.join(errors)}")
                files[path] = repo.add(content, lfs=False)
            elif kind == "lfsFile":
                files[path] = self.uploaded(repo, value["oid"])
            elif kind == "deletedFile" and path in files:
                del files[path]
            else:
                raise HubError(404, f"{kind} of {path}, which is not there or not served", "EntryNotFound")
        return files

    # Downloads

    @route("GET", "/{repo}/resolve/{revision}/{path}")
    @route("GET", "/api/models/{repo}/resolve/{revision}/{path}")
    def resolve(self, request: Request, repo: Repository, revision: str, path: str) -> Response:
        """A file: its bytes, or a link to the storage for large ones."""
        commit = repo.read(revision)
        entry = commit.files.get(path)
        if entry is None:
            raise HubError(404, "Entry not found", "EntryNotFound")
        headers = {"X-Repo-Commit": commit.oid}
        if not entry.lfs:
            return file_response(repo.content(entry.sha256), entry.etag, headers)
        headers |= {"X-Linked-Size": str(entry.size), "X-Linked-Etag": f'"{entry.etag}"'}
        return Response(b"", 302, headers | {"Location": self.signed(repo, entry.sha256)})


def file_response(content: bytes, etag: str, headers: dict[str, str]) -> Response:
    """A file's bytes, always all of them."""
    return Response(content, 200, headers | {"ETag": f'"{etag}"', "Content-Type": "application/octet-stream"})
