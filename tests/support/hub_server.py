"""A stand-in for the Hub, with one user, alice: it writes commits straight to the Hub's cache, as a
download would.

So commits load offline, in other processes, too. Calls that ask the Hub for nothing are
huggingface_hub's own.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    HfApi,
    ModelCard,
    ModelInfo,
    RepoUrl,
    constants,
)

Files = dict[str, bytes]
URL = "https://huggingface.co"


class Commit(NamedTuple):
    oid: str
    title: str
    files: Files


class Repository(NamedTuple):
    """The commits of each ref, the newest first."""

    private: bool
    refs: dict[str, list[Commit]]

    def history(self, revision: str) -> list[Commit]:
        return self.refs[revision]


class HubServer:
    """Answers the calls of a push and of `mrp heads`; `using` makes this process call it in place
    of the Hub.

    Attributes:
        cache: The Hub's cache that commits are written to.
        repositories: The repositories by id.
    """

    def __init__(self) -> None:
        self.cache = Path()
        self.repositories: dict[str, Repository] = {}

    def __enter__(self) -> "HubServer":
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: there is no process and no port to close."""

    def repository(self, repo_id: str) -> Repository:
        return self.repositories[repo_id]

    def files(self, repo_id: str, revision: str = "main") -> Files:
        return next((commit.files for commit in self.repository(repo_id).history(revision)), {})

    def commit(
        self, repo_id: str, files: Files, title: str = "by the test", ref: str = "main"
    ) -> str:
        """Write a commit with exactly these files to a ref, in a new repository if there is none;
        return the commit's id."""
        repo = self.repositories.setdefault(repo_id, Repository(False, {"main": []}))
        oid = hashlib.sha1(f"{repo_id} {sum(map(len, repo.refs.values()))}".encode()).hexdigest()
        repo.refs[ref] = [Commit(oid, title, files), *repo.refs.get(ref, [])]
        folder = self.cache / f"models--{repo_id.replace('/', '--')}"
        for name, content in {
            f"refs/{ref}": oid.encode(),
            **{f"snapshots/{oid}/{name}": files[name] for name in files},
        }.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return oid

    def create_repo(self, repo_id: str, private: bool | None = None, **_: Any) -> RepoUrl:
        repo_id = repo_id if "/" in repo_id else f"alice/{repo_id}"
        self.repositories.setdefault(repo_id, Repository(bool(private), {"main": []}))
        return RepoUrl(f"{URL}/{repo_id}")

    def create_branch(self, repo_id: str, branch: str, **_: Any) -> None:
        refs = self.repository(repo_id).refs
        refs.setdefault(branch, list(refs["main"]))

    def list_repo_files(self, repo_id: str, revision: str | None = None) -> list[str]:
        return list(self.files(repo_id, revision or "main"))

    def list_models(
        self, filter: Sequence[str], author: str | None = None, limit: int | None = None, **_: Any
    ) -> list[ModelInfo]:
        """List the repositories whose cards have all tags of `filter`, those of `author` alone."""
        models = []
        for repo_id in self.repositories:
            text = self.files(repo_id).get("README.md", b"").decode()
            card = ModelCard(text, ignore_metadata_errors=True)
            if set(filter) <= set(card.data.tags or ()) and author in (
                None,
                repo_id.partition("/")[0],
            ):
                models.append(ModelInfo(id=repo_id))
        return models[:limit]

    def create_commit(
        self,
        repo_id: str,
        operations: Sequence[Any],
        commit_message: str,
        revision: str | None = None,
        create_pr: bool | None = None,
        **_: Any,
    ) -> CommitInfo:
        files = dict(self.files(repo_id, revision or "main"))
        for operation in operations:
            if isinstance(operation, CommitOperationAdd):
                with operation.as_file() as file:
                    files[operation.path_in_repo] = file.read()
            else:
                del files[operation.path_in_repo]
        oid = self.commit(
            repo_id, files, commit_message, "refs/pr/1" if create_pr else revision or "main"
        )
        proposed = f"{URL}/{repo_id}/discussions/1" if create_pr else None
        address = f"{URL}/{repo_id}/commit/{oid}"
        return CommitInfo(
            commit_url=address,
            commit_message=commit_message,
            commit_description="",
            oid=oid,
            pr_url=proposed,
        )


@contextmanager
def using(hub: HubServer, home: Path) -> Iterator[None]:
    """Let this process push to `hub`, and load from the Hub's cache, which lies under `home`."""

    def method(name: str) -> Callable[..., Any]:
        return lambda api, *given, **options: getattr(hub, name)(*given, **options)

    hub.cache = home / "hub-cache"
    methods = {
        name: method(name)
        for name in (
            "create_repo",
            "create_branch",
            "list_repo_files",
            "create_commit",
            "list_models",
        )
    }
    methods["_validate_yaml"] = lambda *_, **__: None
    with (
        mock.patch.multiple(HfApi, **methods),
        mock.patch.multiple(constants, HF_HUB_CACHE=str(hub.cache), HF_HUB_DISABLE_XET=True),
    ):
        yield
