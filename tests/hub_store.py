"""What a Hub keeps: repositories, commits, refs and objects, as files of a folder. A commit appears whole or not at all."""

import hashlib
import json
import os
import shutil
import threading
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MAIN = "refs/heads/main"
LFS_PATTERNS = (
    "*.bin",
    "*.gz",
    "*.h5",
    "*.npy",
    "*.npz",
    "*.onnx",
    "*.pickle",
    "*.pkl",
    "*.pt",
    "*.pth",
    "*.safetensors",
    "*.zip",
)
GITATTRIBUTES = "".join(f"{pattern} filter=lfs diff=lfs merge=lfs -text\n" for pattern in LFS_PATTERNS)


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

    @property
    def etag(self) -> str:
        """What the Hub identifies the file's bytes by, and what a client's cache is named after."""
        return self.sha256 if self.lfs else self.blob_id

    @property
    def pointer_size(self) -> int:
        return len(lfs_pointer(self.sha256, self.size))


@dataclass(frozen=True)
class Commit:
    """A whole tree of files, with who wrote it and on top of which commit."""

    oid: str
    parent: str | None
    title: str
    message: str
    author: str
    date: str
    files: dict[str, Entry]


def lfs_pointer(sha256: str, size: int) -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def is_safe(path: str) -> bool:
    """Whether a path stays inside its repository."""
    parts = path.split("/")
    return not any(part in ("", ".", "..", ".git") for part in parts) and "\\" not in path


class Repository:
    """One repository's folder: `repo.json` (visibility, refs, pull requests), `commits/` and `objects/` (by sha256).

    Every change ends in the one replacement of `repo.json`; what is not named there does not exist.
    """

    def __init__(self, folder: Path, repo_id: str) -> None:
        self.folder, self.repo_id = folder, repo_id
        self.lock = threading.RLock()

    def create(self, private: bool, author: str) -> None:
        (self.folder / "commits").mkdir(parents=True)
        (self.folder / "objects").mkdir()
        self._save({"private": private, "created": now(), "refs": {}, "discussions": []})
        self.commit(MAIN, "initial commit", "", author, {".gitattributes": self.regular(GITATTRIBUTES.encode())}, None)

    @property
    def state(self) -> dict[str, Any]:
        return json.loads((self.folder / "repo.json").read_text())

    def _save(self, state: dict[str, Any]) -> None:
        new = self.folder / "repo.json.new"
        new.write_text(json.dumps(state, indent=1))
        os.replace(new, self.folder / "repo.json")

    def change(self, **values: Any) -> None:
        with self.lock:
            self._save(self.state | values)

    def set_ref(self, ref: str, oid: str | None) -> None:
        """Points a ref at a commit, or removes it."""
        with self.lock:
            refs = self.state["refs"]
            self.change(refs={name: at for name, at in (refs | {ref: oid}).items() if at is not None})

    def find_ref(self, revision: str) -> str | None:
        """The full name of a branch, a tag or a pull request; None where there is none of that name."""
        return next(
            (ref for ref in (revision, f"refs/heads/{revision}", f"refs/tags/{revision}") if ref in self.state["refs"]), None
        )

    def resolve(self, revision: str) -> str:
        """The commit that a branch, a tag, a pull request or a commit id (from 7 characters on) stands for."""
        ref = self.find_ref(revision)
        if ref is not None:
            return self.state["refs"][ref]
        found = [path.stem for path in (self.folder / "commits").glob(f"{revision}*.json")] if len(revision) >= 7 else []
        if len(found) != 1:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found[0]

    def read(self, revision: str) -> Commit:
        stored = json.loads((self.folder / "commits" / f"{self.resolve(revision)}.json").read_text())
        return Commit(**stored | {"files": {path: Entry(**entry) for path, entry in stored["files"].items()}})

    def history(self, revision: str) -> list[Commit]:
        """A commit and its ancestors, the newest first."""
        commits = [self.read(revision)]
        while (parent := commits[-1].parent) is not None:
            commits.append(self.read(parent))
        return commits

    def has_object(self, sha256: str) -> bool:
        return (self.folder / "objects" / sha256).exists()

    def add_object(self, content: bytes) -> str:
        sha256 = hashlib.sha256(content).hexdigest()
        new = self.folder / "objects" / f"{sha256}.{threading.get_ident()}.new"
        new.write_bytes(content)
        os.replace(new, self.folder / "objects" / sha256)
        return sha256

    def content(self, sha256: str) -> bytes:
        return (self.folder / "objects" / sha256).read_bytes()

    def regular(self, content: bytes) -> Entry:
        """Stores the bytes of a file that git keeps itself."""
        return Entry(self.add_object(content), git_blob_id(content), len(content), lfs=False)

    def large(self, sha256: str, size: int | None) -> Entry:
        """A file whose bytes must have been uploaded before."""
        if not self.has_object(sha256) or size not in (None, found := len(self.content(sha256))):
            raise HubError(400, f"LFS object {sha256} of {size} bytes was not uploaded")
        return Entry(sha256, git_blob_id(lfs_pointer(sha256, found)), found, lfs=True)

    def commit(self, ref: str, title: str, message: str, author: str, files: dict[str, Entry], parent: str | None) -> Commit:
        """Writes a commit of a whole tree and points a ref at it."""
        with self.lock:
            listed = {path: asdict(entry) for path, entry in sorted(files.items())}
            body = {"parent": parent, "title": title, "message": message, "author": author, "date": now(), "files": listed}
            count = len(list((self.folder / "commits").iterdir()))
            oid = hashlib.sha1(json.dumps([self.repo_id, count, body]).encode()).hexdigest()
            (self.folder / "commits" / f"{oid}.json").write_text(json.dumps({"oid": oid, **body}))
            self.set_ref(ref, oid)
            return self.read(oid)

    def open_discussion(self, title: str, author: str, pull_request: bool, at: str | None = None) -> int:
        """Opens a discussion or a pull request from a commit (main's, if none is given); returns its number."""
        with self.lock:
            discussions = self.state["discussions"]
            number = len(discussions) + 1
            opened = {"num": number, "title": title, "author": author, "createdAt": now(), "isPullRequest": pull_request}
            self.change(discussions=[*discussions, {**opened, "status": "draft" if pull_request else "open"}])
            if pull_request:
                self.set_ref(f"refs/pr/{number}", at or self.resolve("main"))
            return number


class Store:
    """All repositories of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repositories = {
            str(path.parent.relative_to(folder)): Repository(path.parent, str(path.parent.relative_to(folder)))
            for path in folder.glob("*/*/repo.json")
        }
        self.lock = threading.Lock()

    def create(self, repo_id: str, private: bool, author: str) -> Repository:
        repository = Repository(self.folder / repo_id, repo_id)
        with self.lock:
            if self.find(repo_id) is not None:
                raise HubError(409, "You already created this model repo")
            repository.create(private, author)
            self.repositories[repo_id] = repository
        return repository

    def find(self, repo_id: str) -> Repository | None:
        return self.repositories.get(repo_id)

    def delete(self, repo_id: str) -> None:
        with self.lock:
            shutil.rmtree(self.repositories.pop(repo_id).folder)
