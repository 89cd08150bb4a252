"""Publishing a checkpoint: one commit with everything in it, or none; and what a broken connection left is not sent again."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, RepoCard
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from .card import About, check_card, is_own_card, read_results, renamed, render_card
from .cardtext import PICTURE
from .folder import Folder, read_folder
from .hub import KINDS, PATIENCE, Remote, answered_within, check_base, look

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Publication:
    """What a push sends, or sent.

    Attributes:
        repo_id: The repository.
        kind: "full", "head" or "adapter".
        where: The branch, or "a pull request".
        private: Whether the repository is created private, if it is not there yet.
        sizes: Bytes of each file, by path in the repository.
        left_out: Files of the folder that are not published.
        deleted: Files of an earlier push that are removed; known once the repository was looked at.
        commit: The commit; None of a dry run.
    """

    repo_id: str
    kind: str
    where: str
    private: bool
    sizes: dict[str, int]
    left_out: list[str]
    deleted: list[str] = field(default_factory=list)
    commit: CommitInfo | None = None

    def __str__(self) -> str:
        if self.commit is None:
            end = "Dry run: nothing was sent."
        else:
            end = str(getattr(self.commit, "pr_url", None) or self.commit.commit_url)
        visibility = "private" if self.private else "public"
        owner = "" if "/" in self.repo_id else " of your own"
        lines = [f"{KINDS[self.kind]} to {self.repo_id}{owner} ({self.where}; {visibility} if it is new)"]
        lines += [f"{size:>15,}  {path}" for path, size in self.sizes.items()]
        lines += [f"{sum(self.sizes.values()):>15,}  bytes in {len(self.sizes)} files"]
        lines += [f"left out: {', '.join(self.left_out)}"] if self.left_out else []
        lines += [f"removed there: {', '.join(self.deleted)}"] if self.deleted else []
        return "\n".join([*lines, end])


def publish(
    folder: Path | str,
    repo_id: str,
    *,
    private: bool = True,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    token: str | bool | None = None,
    dry_run: bool = False,
    card: ModelCard | Path | None = None,
    new_card: bool = False,
    results: Sequence[Path | str] = (),
    about: Path | str | None = None,
    tags: Sequence[str] = (),
) -> Publication:
    """Pushes a saved checkpoint in one commit; the folder is only read.

    A repository that is new is created private. Large files go first: as long as the commit is not made nobody sees them, and
    a second push after a broken connection does not send them again. Weights and code that an earlier push left and this
    one does not have are removed in the same commit. The remote code is what the installed package generates.

    Args:
        folder: What `save_pretrained` wrote: a full model, a head (`head_only=True`) or a peft adapter.
        repo_id: "org/name", or "name" for a repository of the user's own, which a dry run cannot tell the owner of.
        private: Whether to create the repository private; one that is there stays as it is.
        revision: The branch, created if it is not there; `main` by default.
        create_pr: Opens a pull request instead of changing `main`.
        commit_message: The commit's title.
        commit_description: Its text.
        token: As `huggingface_hub` takes it; the saved one by default.
        dry_run: Only says what would be sent, without any connection.
        card: The card to publish. By default the folder's README.md, if a person wrote it or nothing new is to be told; else
            one is rendered. A rendered one does not replace what a person wrote in the repository.
        new_card: Renders the card whatever there is.
        results: Result files for the rendered card (`read_results`).
        about: A file that tells of the checkpoint, for the rendered card (`About`).
        tags: More tags for it.

    Returns:
        What was sent, with the commit.

    Raises:
        ValueError: if the folder, the card or the id is not fit to be published, or the repository holds another kind of thing.
        PermissionError: if the token may not write there.
        ConnectionError: if the Hub could not be reached, or was changed meanwhile. The folder and the branch are as they were.
    """
    if revision is not None and create_pr:
        raise ValueError(f"revision={revision!r} and create_pr=True: push to a branch, or open a pull request")
    validate_repo_id(repo_id)
    found = read_folder(folder)
    check_base(found.base)
    card_of = partial(_card, found, card=card, new_card=new_card, results=read_results(results), about=about, tags=tags)
    text, is_rendered = card_of(repo_id)
    push = _Push(HfApi(token=token), repo_id, revision or "main", create_pr)
    if "/" not in repo_id and not dry_run:
        with push.explained():
            push.repo_id = repo_id = f"{push.api.whoami()['name']}/{repo_id}"
        text, is_rendered = card_of(repo_id)
    additions = {name: CommitOperationAdd(name, path) for name, path in found.files.items() if name != "README.md"}
    additions |= {name: CommitOperationAdd(name, code.encode()) for name, code in found.code.items()}
    additions["README.md"] = CommitOperationAdd("README.md", text.encode())
    sizes = {name: additions[name].upload_info.size for name in sorted(additions)}
    where = "a pull request" if create_pr else f"branch {revision or 'main'}"
    publication = Publication(repo_id, found.kind, where, private, sizes, found.left_out)
    if dry_run:
        return publication
    with push.explained():
        remote = push.prepare(found, private, text)
        if is_rendered and not new_card and remote.card is not None and is_own_card(remote.card):
            log.warning("%s keeps its README.md, which a person wrote: pass new_card=True to replace it", repo_id)
            del additions["README.md"], sizes["README.md"]
        deleted = remote.stale(additions)
        title = commit_message or f"Upload {KINDS[found.kind]}"
        commit = push.send(remote, list(additions.values()), deleted, title, commit_description)
    return replace(publication, deleted=deleted, commit=commit)


def _card(
    folder: Folder,
    repo_id: str,
    card: ModelCard | Path | None,
    new_card: bool,
    results: Sequence[Any],
    about: Path | str | None,
    tags: Sequence[str],
) -> tuple[str, bool]:
    """The card's text, checked, and whether it was rendered."""
    there = folder.files["README.md"].read_text(encoding="utf-8") if "README.md" in folder.files else None
    told, pictured = bool(results or about or tags), PICTURE in folder.files
    if card is not None:
        if told or new_card:
            raise ValueError("card=... is published as it is: leave out results, about, tags and new_card, or leave out card")
        text, is_rendered = card.read_text(encoding="utf-8") if isinstance(card, Path) else str(card), False
    elif there is not None and not new_card and is_own_card(there):
        if told:
            raise ValueError(
                f"{folder.path}/README.md was written by a person and is kept, so that results, about and tags would say "
                "nothing: leave them out, or pass new_card=True to replace it"
            )
        text, is_rendered = there, False
    elif there is not None and not (new_card or told) and (again := renamed(there, repo_id, folder.base, pictured)) is not None:
        text, is_rendered = again, True
    else:
        person = None if about is None else About.load(about)
        text, is_rendered = str(render_card(folder.path, folder.kind, repo_id, results, person, tags)), True
    check_card(text)
    return text, is_rendered


class _Push:
    """The steps of one push. Retrying uploads is huggingface_hub's; what fails all the same is explained."""

    def __init__(self, api: HfApi, repo_id: str, branch: str, create_pr: bool) -> None:
        self.api, self.repo_id, self.branch, self.create_pr = api, repo_id, branch, create_pr

    def prepare(self, folder: Folder, private: bool, card: str) -> Remote:
        """Look at the repository, refuse one of another kind and a card against the Hub's rules, create what is not there."""
        remote = look(self.api, self.repo_id, self.branch, folder.kind)
        RepoCard(card).validate(repo_type="model")
        if remote is None:
            self.api.create_repo(self.repo_id, private=private, exist_ok=True)
            remote = look(self.api, self.repo_id, self.branch, folder.kind)
        if remote is None:
            raise ConnectionError(f"{self.repo_id} was created and cannot be found: push again")
        return remote

    def send(
        self, remote: Remote, additions: list[CommitOperationAdd], deleted: list[str], title: str, text: str | None
    ) -> CommitInfo:
        """Upload what is large, then make the commit on top of the one that was looked at."""
        known = self.branch if remote.branch else "main"
        self.api.preupload_lfs_files(self.repo_id, additions, revision=known, create_pr=self.create_pr)
        operations = [*additions, *map(CommitOperationDelete, deleted)]
        commit = partial(self.api.create_commit, self.repo_id, operations, commit_message=title, commit_description=text)
        if self.create_pr:
            return commit(create_pr=True, parent_commit=remote.sha)
        if not remote.branch:
            self.api.create_branch(self.repo_id, branch=self.branch, revision=remote.sha, exist_ok=True)
        try:
            return commit(revision=self.branch, parent_commit=remote.sha)
        except BaseException:
            if not remote.branch:
                with suppress(Exception):  # the first error is the one to tell
                    self.api.delete_branch(self.repo_id, branch=self.branch)
            raise

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say of a failure what it means for the repository and the folder, and what to do."""
        try:
            with answered_within(PATIENCE):
                yield
        except Exception as error:
            answered = _answered(error)
            status = None if answered is None else answered.response.status_code
            if status in (401, 403):
                raise PermissionError(
                    f"the token may not write to {self.repo_id} ({first_line(error)}): log in with `hf auth login`, or pass "
                    "the token of somebody who may. Nothing was changed"
                ) from error
            if status == 412:
                raise ConnectionError(
                    f"somebody else committed to {self.repo_id} ({self.branch}) meanwhile, and that is kept: look "
                    "at it, then push again"
                ) from error
            if status is None and not is_connection(error):
                raise
            look_first = f", after a look at the pull requests of {self.repo_id}: the last one may be this push's"
            raise ConnectionError(
                f"the push to {self.repo_id} was given up ({first_line(error)}). Its files and your folder are as they were, "
                f"or it was done and only the answer was lost; push again{look_first if self.create_pr else ''}: what was "
                "uploaded already is not sent again"
            ) from error


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _answered(error: BaseException) -> HfHubHTTPError | None:
    """Find the Hub's answer behind an error: huggingface_hub wraps those of uploads."""
    return next((cause for cause in _causes(error) if isinstance(cause, HfHubHTTPError)), None)


def is_connection(error: BaseException) -> bool:
    """Tell whether a connection failed, or gave an answer that cannot be read."""
    if isinstance(error, OfflineModeIsEnabled):  # it stays so, and says what to do
        return False
    broken = ConnectionError | TimeoutError | json.JSONDecodeError
    kinds = [kind for cause in _causes(error) for kind in type(cause).__mro__]
    # huggingface_hub has httpx or httpx2, so that its class goes by its name
    return any(kind.__name__ == "TransportError" or issubclass(kind, broken) for kind in kinds)


def first_line(error: BaseException) -> str:
    """Name an error by the first line of what lies behind it: the Hub's answer if there was one."""
    *_, last = _causes(error)
    told = _answered(error) or last
    return f"{type(told).__name__}: {str(told).strip()}".splitlines()[0]


__all__ = ["Publication", "first_line", "is_connection", "publish"]
