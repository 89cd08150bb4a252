"""The Hub's HTTP interface as huggingface_hub 2.4 uses it, without sockets: from a request and the store to a response.

Here: who may do what, repositories, trees, refs and pull requests. `hub_transfer` has what moves files.
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote

from hub_cards import card_metadata, card_tags, validate_card
from hub_store import MAIN, Commit, Entry, HubError, Repository, Store


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
        try:
            return json.loads(self.body)
        except ValueError as error:
            raise HubError(400, f"the body is not JSON: {error}") from error

    def asks(self, name: str) -> bool:
        return self.query.get(name, ["0"])[0].lower() in ("1", "true")


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
PARTS = {"repo": r"[^/]+/[^/.][^/]*?", "path": ".+", "kind": "read|write", "number": r"\d+"}


def route(method: str, template: str) -> Callable[[Handler], Handler]:
    """Registers a method of `HubApi` for a path; `{name}` matches one part of it, `{repo}` two and `{path}` the rest."""
    pattern = re.compile(
        re.sub(r"\{(\w+)\}", lambda m: f"(?P<{m[1]}>{PARTS.get(m[1], '[^/]+')})", template.replace(".", r"\."))
    )

    def register(handler: Handler) -> Handler:
        ROUTES.append((method, pattern, handler))
        return handler

    return register


def described(path: str, entry: Entry) -> dict[str, Any]:
    """A file as the Hub lists it."""
    lfs = {"oid": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
    return {"type": "file", "path": path, "oid": entry.blob_id, "size": entry.size} | ({"lfs": lfs} if entry.lfs else {})


def described_folder(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "oid": hashlib.sha1(path.encode()).hexdigest(), "size": 0}


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

    def answer(self, request: Request) -> Response:
        """The response to a request; errors become the Hub's error responses."""
        try:
            request.user = self.authenticate(request)
            return self.dispatch(request)
        except HubError as error:
            headers = {"X-Error-Message": error.message.replace("\n", " ")} | (
                {"X-Error-Code": error.code} if error.code else {}
            )
            if error.code == "EntryNotFound" and (found := re.fullmatch(r"/(.+?/.+?)/resolve/([^/]+)/.*", request.path)):
                headers["X-Repo-Commit"] = self.store.repositories[found[1]].resolve(unquote(found[2]))
            return Response({"error": error.message}, error.status, headers)

    def authenticate(self, request: Request) -> User | None:
        given = request.headers.get("authorization")
        if given is None:
            return None
        user = self.users.get(given.removeprefix("Bearer "))
        if user is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        return user

    def dispatch(self, request: Request) -> Response:
        for method, pattern, handler in ROUTES:
            if method == ("GET" if request.method == "HEAD" else request.method) and (found := pattern.fullmatch(request.path)):
                arguments: dict[str, Any] = {name: unquote(value) for name, value in found.groupdict().items()}
                if "repo" in arguments:
                    arguments["repo"] = self.readable(request, arguments["repo"])
                return handler(self, request, **arguments)
        raise HubError(404, f"Sorry, this server does not know {request.method} {request.path}")

    # Who may do what

    def readable(self, request: Request, repo_id: str) -> Repository:
        """A repository that the user may see. As on the Hub, one that is missing and one that is private look the same."""
        repository = self.store.find(repo_id)
        mine = request.user is not None and request.user.owns(repo_id)
        if repository is None or (repository.state["private"] and not mine):
            raise HubError(404 if request.user else 401, "Repository not found", "RepoNotFound")
        return repository

    def known(self, request: Request) -> User:
        if request.user is None:
            raise HubError(401, "Invalid username or password.")
        return request.user

    def writer(self, request: Request, repo_id: str) -> User:
        user = self.known(request)
        if not user.owns(repo_id) or not user.can_write:
            raise HubError(403, f"You don't have the rights to write to {repo_id}")
        return user

    # Users and repositories

    @route("GET", "/api/whoami-v2")
    def whoami(self, request: Request) -> Response:
        user = self.known(request)
        organizations = [{"type": "org", "name": name, "roleInOrg": "admin"} for name in user.organizations]
        role = "write" if user.can_write else "read"
        token = {"type": "access_token", "accessToken": {"displayName": "test", "role": role}}
        return Response({"type": "user", "name": user.name, "fullname": user.name, "orgs": organizations, "auth": token})

    @route("POST", "/api/repos/create")
    def create_repo(self, request: Request) -> Response:
        wanted = request.json()
        repo_id = f"{wanted.get('organization') or self.known(request).name}/{wanted['name']}"
        user = self.writer(request, repo_id)
        if wanted.get("type", "model") != "model":
            raise HubError(400, "this server has models only")
        answer = {"url": f"{self.url}/{repo_id}", "name": repo_id}
        try:
            self.store.create(repo_id, wanted.get("visibility") == "private" or bool(wanted.get("private")), user.name)
        except HubError as error:
            return Response({"error": error.message, **answer}, error.status)
        return Response(answer)

    @route("DELETE", "/api/repos/delete")
    def delete_repo(self, request: Request) -> Response:
        wanted = request.json()
        repo_id = f"{wanted.get('organization') or self.known(request).name}/{wanted['name']}"
        self.readable(request, repo_id)
        self.writer(request, repo_id)
        self.store.delete(repo_id)
        return Response("OK")

    @route("PUT", "/api/models/{repo}/settings")
    def settings(self, request: Request, repo: Repository) -> Response:
        self.writer(request, repo.repo_id)
        wanted = request.json()
        repo.change(private=wanted["visibility"] == "private" if "visibility" in wanted else wanted["private"])
        return Response({"private": repo.state["private"]})

    @route("GET", "/api/models/{repo}/auth-check")
    def auth_check(self, request: Request, repo: Repository) -> Response:
        return Response("OK")

    @route("GET", "/api/models/{repo}/revision/{revision}")
    @route("GET", "/api/models/{repo}")
    def model_info(self, request: Request, repo: Repository, revision: str = "main") -> Response:
        commit, state = repo.read(revision), repo.state
        blobs = request.asks("blobs")
        siblings = [
            {"rfilename": path} | ({key: value for key, value in described(path, entry).items() if blobs and key != "path"})
            for path, entry in commit.files.items()
        ]
        for sibling in siblings if blobs else ():
            sibling["blobId"] = sibling.pop("oid")
            if sibling.get("lfs"):
                sibling["lfs"]["sha256"] = sibling["lfs"].pop("oid")
        info: dict[str, Any] = {"id": repo.repo_id, "modelId": repo.repo_id, "author": repo.repo_id.split("/")[0]}
        info |= {"sha": commit.oid, "lastModified": commit.date, "createdAt": state["created"], "private": state["private"]}
        info |= {"gated": False, "disabled": False, "downloads": 0, "likes": 0, "siblings": siblings}
        return Response(info | self.derived(repo, commit))

    def derived(self, repo: Repository, commit: Commit) -> dict[str, Any]:
        """What the Hub reads from a repository's card and config."""
        texts = {name: repo.content(commit.files[name].sha256) for name in ("README.md", "config.json") if name in commit.files}
        card = card_metadata(texts["README.md"].decode()) if "README.md" in texts else {}
        config = json.loads(texts["config.json"]) if "config.json" in texts else {}
        tags = [*card_tags(card), *(["safetensors"] if any(path.endswith(".safetensors") for path in commit.files) else [])]
        tags += [str(config["model_type"])] if "model_type" in config else []
        tags += ["custom_code"] if "auto_map" in config else []
        kept = {key: config[key] for key in ("architectures", "model_type", "auto_map") if key in config}
        named = {key: card[key] for key in ("library_name", "pipeline_tag") if key in card}
        return {"tags": list(dict.fromkeys(tags)), "config": kept, **named, **({"cardData": card} if card else {})}

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self, request: Request) -> Response:
        errors, warnings = validate_card(request.json()["content"])
        report = {"errors": [{"message": text} for text in errors], "warnings": [{"message": text} for text in warnings]}
        return Response(report, 400 if errors else 200)

    # Trees, refs, discussions

    @route("GET", "/api/models/{repo}/tree/{revision}/{path}")
    @route("GET", "/api/models/{repo}/tree/{revision}")
    def tree(self, request: Request, repo: Repository, revision: str, path: str = "") -> Response:
        files = repo.read(revision).files
        prefix = f"{path}/" if path else ""
        inside = {name: entry for name, entry in files.items() if name.startswith(prefix)}
        if path and not inside:
            raise HubError(404, f"{path} does not exist on {revision}", "EntryNotFound")
        folders = sorted({name[: i + len(prefix)] for name in inside for i, c in enumerate(name[len(prefix) :]) if c == "/"})
        everything = [*(described_folder(name) for name in folders), *(described(name, e) for name, e in inside.items())]
        recursive = request.asks("recursive")
        return Response([item for item in everything if recursive or "/" not in item["path"][len(prefix) :]])

    @route("POST", "/api/models/{repo}/paths-info/{revision}")
    def paths_info(self, request: Request, repo: Repository, revision: str) -> Response:
        files = repo.read(revision).files
        if "json" in request.headers.get("content-type", ""):
            paths = request.json()["paths"]
        else:
            paths = parse_qs(request.body.decode()).get("paths", [])
        known = [described(path, files[path]) for path in paths if path in files]
        folders = [path for path in paths if any(name.startswith(f"{path}/") for name in files)]
        return Response([*known, *(described_folder(path) for path in folders)])

    @route("GET", "/api/models/{repo}/refs")
    def refs(self, request: Request, repo: Repository) -> Response:
        groups: dict[str, list[dict[str, str]]] = {"branches": [], "tags": [], "converts": [], "pullRequests": []}
        kinds = {"heads": "branches", "tags": "tags", "pr": "pullRequests"}
        for ref, oid in repo.state["refs"].items():
            _, kind, name = ref.split("/", 2)
            groups[kinds[kind]].append({"name": ref if kind == "pr" else name, "ref": ref, "targetCommit": oid})
        return Response(groups if request.asks("include_prs") else {k: v for k, v in groups.items() if k != "pullRequests"})

    @route("GET", "/api/models/{repo}/commits/{revision}")
    def commits(self, request: Request, repo: Repository, revision: str) -> Response:
        keys = ("title", "message", "date")
        return Response(
            [{"id": c.oid, "authors": [{"user": c.author}], **{k: getattr(c, k) for k in keys}} for c in repo.history(revision)]
        )

    @route("POST", "/api/models/{repo}/branch/{name}")
    def create_branch(self, request: Request, repo: Repository, name: str) -> Response:
        self.writer(request, repo.repo_id)
        if name.startswith("refs/"):
            raise HubError(400, f"Invalid reference for a branch: {name}")
        if f"refs/heads/{name}" in repo.state["refs"]:
            raise HubError(409, f"Reference already exists: refs/heads/{name}")
        repo.set_ref(f"refs/heads/{name}", repo.resolve(request.json().get("startingPoint", "main")))
        return Response("OK")

    @route("DELETE", "/api/models/{repo}/branch/{name}")
    def delete_branch(self, request: Request, repo: Repository, name: str) -> Response:
        self.writer(request, repo.repo_id)
        if name == "main" or f"refs/heads/{name}" not in repo.state["refs"]:
            raise HubError(403 if name == "main" else 404, f"Cannot delete the branch {name}")
        repo.set_ref(f"refs/heads/{name}", None)
        return Response("OK")

    @route("POST", "/api/models/{repo}/tag/{revision}")
    def create_tag(self, request: Request, repo: Repository, revision: str) -> Response:
        self.writer(request, repo.repo_id)
        ref = f"refs/tags/{request.json()['tag']}"
        if ref in repo.state["refs"]:
            raise HubError(409, f"Tag already exists: {ref}")
        repo.set_ref(ref, repo.resolve(revision))
        return Response("OK")

    @route("GET", "/api/models/{repo}/discussions")
    def discussions(self, request: Request, repo: Repository) -> Response:
        found = [self.discussion_json(repo, opened) for opened in repo.state["discussions"]]
        return Response({"discussions": found, "count": len(found), "start": 0})

    @route("POST", "/api/models/{repo}/discussions")
    def open_discussion(self, request: Request, repo: Repository) -> Response:
        wanted = request.json()
        number = repo.open_discussion(wanted["title"], self.known(request).name, wanted.get("pullRequest", False))
        return Response({"num": number})

    @route("GET", "/api/models/{repo}/discussions/{number}")
    def discussion(self, request: Request, repo: Repository, number: str) -> Response:
        opened = next((d for d in repo.state["discussions"] if d["num"] == int(number)), None)
        if opened is None:
            raise HubError(404, f"There is no discussion {number}")
        changes = {"base": MAIN, "mergeCommitId": opened.get("merged")}
        details = {"changes": changes, "filesWithConflicts": [], "events": [], "diff": ""}
        return Response(self.discussion_json(repo, opened) | details)

    @route("POST", "/api/models/{repo}/discussions/{number}/merge")
    def merge(self, request: Request, repo: Repository, number: str) -> Response:
        user = self.writer(request, repo.repo_id)
        with repo.lock:
            head, base = repo.read(f"refs/pr/{number}"), repo.read("main")
            ahead = any(commit.oid == base.oid for commit in repo.history(head.oid))
            files = head.files if ahead else base.files | head.files
            merged = repo.commit(MAIN, f"Merge pull request {number}", "", user.name, files, base.oid)
            changed = {"status": "merged", "merged": merged.oid}
            repo.change(discussions=[d | changed if d["num"] == int(number) else d for d in repo.state["discussions"]])
        return Response("OK")

    def discussion_json(self, repo: Repository, opened: dict[str, Any]) -> dict[str, Any]:
        return opened | {"author": {"name": opened["author"]}, "repo": {"name": repo.repo_id, "type": "model"}}
