"""How files move: preupload, LFS's batches and storage, commits, downloads.

Large files go by LFS, to and from a second address (the storage) whose signed links carry no credentials, as on the Hub.
Xet is refused: huggingface_hub 2.4 uploads by Xet without asking the Hub whenever hf_xet is installed, so the clients of
this server set `HF_HUB_DISABLE_XET=1`, and one that does not is told so.
"""

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from fnmatch import fnmatch
from typing import Any
from urllib.parse import quote, urlencode

from hub_api import HubApi, Request, Response, route
from hub_cards import validate_card
from hub_store import Entry, HubError, Repository, is_safe

REGULAR_LIMIT = 10_000_000  # bytes; larger files are LFS's whatever their name


class HubTransfer(HubApi):
    """The whole interface of the Hub.

    Attributes:
        part_size: The bytes of a part of a multipart upload; None: files go up whole.
    """

    part_size: int | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.secret = secrets.token_bytes()
        self.parts: dict[tuple[str, int], bytes] = {}

    # Before an upload

    @route("POST", "/api/models/{repo}/preupload/{revision}")
    def preupload(self, request: Request, repo: Repository, revision: str) -> Response:
        self.may_upload(request, repo, request.asks("create_pr") or revision.startswith("refs/pr/"))
        files = repo.read(revision).files
        attributes = repo.content(files[".gitattributes"].sha256).decode() if ".gitattributes" in files else ""
        patterns = [line.split()[0] for line in attributes.splitlines() if "filter=lfs" in line]

        def mode(path: str, size: int) -> str:
            large = size > REGULAR_LIMIT or any(fnmatch(path.rsplit("/", 1)[-1], pattern) for pattern in patterns)
            return "lfs" if large else "regular"

        return Response(
            {
                "files": [
                    {"path": path, "uploadMode": mode(path, item["size"]), "shouldIgnore": False}
                    | ({"oid": files[path].etag} if path in files else {})
                    for item in request.json()["files"]
                    for path in [item["path"]]
                ]
            }
        )

    def may_upload(self, request: Request, repo: Repository, as_pull_request: bool) -> None:
        """Whoever may read may propose; only those who may write change a branch."""
        if as_pull_request:
            self.known(request)
        else:
            self.writer(request, repo.repo_id)

    @route("GET", "/api/models/{repo}/xet-{kind}-token/{revision}")
    @route("GET", "/api/models/{repo}/xet-{kind}-token")
    def xet(self, request: Request, repo: Repository, kind: str, revision: str = "main") -> Response:
        raise HubError(403, "This server keeps large files by LFS: set HF_HUB_DISABLE_XET=1")

    # LFS

    @route("POST", "/{repo}.git/info/lfs/objects/batch")
    def lfs_batch(self, request: Request, repo: Repository) -> Response:
        """Where to upload each object; an object that is there already needs no action."""
        batch = request.json()
        ref = batch.get("ref", {}).get("name", "")
        self.may_upload(request, repo, not ref or ref.startswith("refs/pr/"))
        if batch["operation"] != "upload" or batch.get("hash_algo", "sha256") != "sha256":
            raise HubError(400, "only uploads by sha256 are served")
        objects = [
            {key: item[key] for key in ("oid", "size")}
            | ({} if repo.has_object(item["oid"]) else {"actions": self.upload_actions(repo, item["oid"], item["size"])})
            for item in batch["objects"]
        ]
        parts = self.part_size is not None and any(item["size"] > self.part_size for item in batch["objects"])
        return Response({"transfer": "multipart" if parts else "basic", "objects": objects})

    def upload_actions(self, repo: Repository, oid: str, size: int) -> dict[str, Any]:
        verify = {"href": f"{self.url}/api/models/{repo.repo_id}/lfs/verify"}
        if self.part_size is None or size <= self.part_size:
            return {"upload": {"href": self.signed("PUT", f"/{repo.repo_id}/objects/{oid}")}, "verify": verify}
        count = -(-size // self.part_size)
        links = {str(n): self.signed("PUT", f"/{repo.repo_id}/objects/{oid}/{n}") for n in range(1, count + 1)}
        complete = f"{self.url}/api/models/{repo.repo_id}/lfs/complete?{urlencode({'signature': self.signature('POST', oid)})}"
        return {"upload": {"href": complete, "header": {"chunk_size": str(self.part_size), **links}}, "verify": verify}

    def signature(self, method: str, path: str) -> str:
        return hmac.new(self.secret, f"{method} {path}".encode(), "sha256").hexdigest()

    def signed(self, method: str, path: str) -> str:
        """A link to the storage that only this server can have made."""
        return f"{self.storage_url}{path}?{urlencode({'signature': self.signature(method, path)})}"

    def check_signature(self, request: Request, method: str, signed: str) -> None:
        if not hmac.compare_digest(request.query.get("signature", [""])[0], self.signature(method, signed)):
            raise HubError(403, "SignatureDoesNotMatch")

    @route("POST", "/api/models/{repo}/lfs/complete")
    def lfs_complete(self, request: Request, repo: Repository) -> Response:
        """Joins the parts of a multipart upload."""
        wanted = request.json()
        self.check_signature(request, "POST", wanted["oid"])
        numbers = [part["partNumber"] for part in wanted["parts"]]
        self.keep(repo, wanted["oid"], b"".join(self.parts.pop((wanted["oid"], number), b"") for number in numbers))
        return Response("OK")

    @route("POST", "/api/models/{repo}/lfs/verify")
    def lfs_verify(self, request: Request, repo: Repository) -> Response:
        wanted = request.json()
        repo.large(wanted["oid"], wanted["size"])
        return Response("OK")

    def keep(self, repo: Repository, oid: str, content: bytes) -> None:
        if hashlib.sha256(content).hexdigest() != oid:
            raise HubError(400, f"the uploaded bytes are not those of {oid}")
        repo.add_object(content)

    def answer_storage(self, request: Request) -> Response:
        """The storage: `/org/name/objects/<oid>[/<part>]`. It refuses credentials, which are for the Hub alone."""
        try:
            method = "GET" if request.method == "HEAD" else request.method
            self.check_signature(request, method, request.path)
            if "authorization" in request.headers:
                raise HubError(400, "credentials were sent to the storage")
            org, name, _, oid, *part = request.path.strip("/").split("/")
            repo = self.store.repositories[f"{org}/{name}"]
            if method == "GET":
                return ranged(request, repo.content(oid), {"ETag": f'"{oid}"'})
            if part:
                self.parts[oid, int(part[0])] = request.body
            else:
                self.keep(repo, oid, request.body)
            return Response(headers={"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'})
        except HubError as error:
            return Response(error.message.encode(), error.status)

    # Commits

    @route("POST", "/api/models/{repo}/commit/{revision}")
    def commit(self, request: Request, repo: Repository, revision: str) -> Response:
        """All lines of the body in one commit, or nothing."""
        as_pull_request = request.asks("create_pr")
        self.may_upload(request, repo, as_pull_request or revision.startswith("refs/pr/"))
        author = self.known(request).name
        header, operations = commit_lines(request.body)
        with repo.lock:
            ref, base = repo.find_ref(revision), repo.read(revision)
            expected = header.get("parentCommit")
            if ref is None:
                raise HubError(404, f"{revision} is no branch", "RevisionNotFound")
            if expected is not None and as_pull_request:
                base = repo.read(expected)
            elif expected is not None and repo.resolve(expected) != base.oid:
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            files = apply(repo, base.files, operations)
            number = repo.open_discussion(header["summary"], author, True, base.oid) if as_pull_request else None
            target = ref if number is None else f"refs/pr/{number}"
            made = repo.commit(target, header["summary"], header.get("description", ""), author, files, base.oid)
        urls = {"commitUrl": f"{self.url}/{repo.repo_id}/commit/{made.oid}"}
        urls |= {"pullRequestUrl": f"{self.url}/{repo.repo_id}/discussions/{number}"} if number is not None else {}
        return Response({"success": True, "commitOid": made.oid, "hookOutput": "", **urls})

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
            return ranged(request, repo.content(entry.sha256), headers | {"ETag": f'"{entry.etag}"'})
        headers |= {"X-Linked-Size": str(entry.size), "X-Linked-Etag": f'"{entry.etag}"'}
        location = self.signed("GET", f"/{quote(repo.repo_id)}/objects/{entry.sha256}")
        return Response(f"Found. Redirecting to {location}".encode(), 302, headers | {"Location": location})


def ranged(request: Request, content: bytes, headers: dict[str, str]) -> Response:
    """A file's bytes, or the one range of them that is asked for."""
    headers = headers | {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
    asked = request.headers.get("range")
    if asked is None:
        return Response(content, 200, headers)
    first, last = asked.removeprefix("bytes=").split("-")
    start = int(first) if first else max(len(content) - int(last), 0)
    stop = min(int(last) + 1, len(content)) if first and last else len(content)
    if start >= stop:
        return Response(b"", 416, headers | {"Content-Range": f"bytes */{len(content)}"})
    return Response(content[start:stop], 206, headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"})


def commit_lines(body: bytes) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    """The header and the operations of a commit's body, a JSON object a line."""
    try:
        lines = [(item["key"], item["value"]) for item in map(json.loads, body.splitlines())]
    except (ValueError, KeyError, TypeError) as error:
        raise HubError(400, f"the commit cannot be read: {error}") from error
    if not lines or lines[0][0] != "header" or not lines[0][1].get("summary"):
        raise HubError(400, "a commit opens with a header that has a summary")
    return lines[0][1], lines[1:]


def apply(repo: Repository, files: dict[str, Entry], operations: list[tuple[str, dict[str, Any]]]) -> dict[str, Entry]:
    """The tree after a commit's operations; raises `HubError` for what the Hub would not accept."""
    files = dict(files)
    for kind, value in operations:
        path = value["path"]
        if not is_safe(path.rstrip("/")):
            raise HubError(400, f"invalid path: {path}")
        if kind == "file":
            try:
                content = base64.b64decode(value["content"], validate=True)
            except binascii.Error as error:
                raise HubError(400, f"{path} is not base64: {error}") from error
            if path == "README.md" and (errors := validate_card(content.decode())[0]):
                raise HubError(400, f"Invalid metadata in README.md: {'; '.join(errors)}")
            files[path] = repo.regular(content)
        elif kind == "lfsFile":
            files[path] = repo.large(value["oid"], value.get("size"))
        elif kind in ("deletedFile", "deletedFolder"):
            inside = f"{path.rstrip('/')}/"
            gone = [name for name in files if (name.startswith(inside) if kind == "deletedFolder" else name == path)]
            if not gone:
                raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
            files = {name: entry for name, entry in files.items() if name not in gone}
        else:
            raise HubError(400, f"unknown operation: {kind}")
    return files
