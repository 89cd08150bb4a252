"""Publishing a checkpoint: one commit with everything in it, or none."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, RepoCard
from huggingface_hub.utils import validate_repo_id

from .card import About, check_card, is_own_card, read_results, renamed, render_card
from .cardtext import PICTURE
from .folder import Folder, read_folder
from .hub import KINDS, check_base, look

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
    token: str | bool | None = None,
    dry_run: bool = False,
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
        token: As `huggingface_hub` takes it; the saved one by default.
        dry_run: Only says what would be sent, without any connection.
        new_card: Renders the card whatever there is. By default it is the folder's README.md, if a person wrote it or nothing
            new is to be told; else one is rendered, which does not replace what a person wrote in the repository.
        results: Result files for the rendered card (`read_results`).
        about: A file that tells of the checkpoint, for the rendered card (`About`).
        tags: More tags for it.

    Returns:
        What was sent, with the commit.

    Raises:
        ValueError: if the folder, the card or the id is not fit to be published, or the repository holds another kind of thing.
        ConnectionError: if the Hub refused it or could not be reached. The folder and the branch are as they were.
    """
    if revision is not None and create_pr:
        raise ValueError(f"revision={revision!r} and create_pr=True: push to a branch, or open a pull request")
    validate_repo_id(repo_id)
    found = read_folder(folder)
    check_base(found.base)
    card_of = partial(_card, found, new_card=new_card, results=read_results(results), about=about, tags=tags)
    text, is_rendered = card_of(repo_id)
    api = HfApi(token=token)
    if "/" not in repo_id and not dry_run:
        with explained("push"):
            repo_id = f"{api.whoami()['name']}/{repo_id}"
        text, is_rendered = card_of(repo_id)
    additions = {name: CommitOperationAdd(name, path) for name, path in found.files.items() if name != "README.md"}
    additions |= {name: CommitOperationAdd(name, code.encode()) for name, code in found.code.items()}
    additions["README.md"] = CommitOperationAdd("README.md", text.encode())
    sizes = {name: additions[name].upload_info.size for name in sorted(additions)}
    branch = revision or "main"
    where = "a pull request" if create_pr else f"branch {branch}"
    publication = Publication(repo_id, found.kind, where, private, sizes, found.left_out)
    if dry_run:
        return publication
    with explained("push"):
        remote = look(api, repo_id, branch, found.kind)
        RepoCard(text).validate(repo_type="model")
        if remote is None:
            api.create_repo(repo_id, private=private, exist_ok=True)
            remote = look(api, repo_id, branch, found.kind)
        assert remote is not None, repo_id
        if is_rendered and not new_card and remote.card is not None and is_own_card(remote.card):
            log.warning("%s keeps its README.md, which a person wrote: pass new_card=True to replace it", repo_id)
            del additions["README.md"], sizes["README.md"]
        deleted = remote.stale(additions)
        is_new = not (create_pr or remote.branch)
        if is_new:
            api.create_branch(repo_id, branch=branch, revision=remote.sha, exist_ok=True)
        try:
            commit = api.create_commit(
                repo_id,
                [*additions.values(), *map(CommitOperationDelete, deleted)],
                commit_message=commit_message or f"Upload {KINDS[found.kind]}",
                revision=None if create_pr else branch,
                create_pr=create_pr,
                parent_commit=remote.sha,
            )
        except BaseException:
            if is_new:
                with suppress(Exception):  # the first error is the one to tell
                    api.delete_branch(repo_id, branch=branch)
            raise
    return replace(publication, deleted=deleted, commit=commit)


def _card(
    folder: Folder,
    repo_id: str,
    new_card: bool,
    results: Sequence[Any],
    about: Path | str | None,
    tags: Sequence[str],
) -> tuple[str, bool]:
    """The card's text, checked, and whether it was rendered."""
    there = folder.files["README.md"].read_text(encoding="utf-8") if "README.md" in folder.files else None
    told, pictured = bool(results or about or tags), PICTURE in folder.files
    if there is not None and not new_card and is_own_card(there):
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


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Say of an error of the Hub, or of the way to it, what it leaves behind.

    Raises:
        ConnectionError: in place of one of the HTTP client's.
    """
    try:
        yield
    except Exception as error:
        # huggingface_hub has httpx or httpx2, so that their common class goes by its name; it wraps those of uploads
        kinds = {kind.__name__ for one in (error, error.__cause__) for kind in type(one).__mro__}
        if not kinds & {"HTTPError", "JSONDecodeError"}:
            raise
        raise ConnectionError(
            f"the {what} was given up ({type(error).__name__}: {str(error).strip()}). The branch and your folder are as they "
            f"were, or only the answer was lost: {what} again, what was uploaded is not sent again. A token that may write "
            "comes from `hf auth login`"
        ) from error


__all__ = ["Publication", "explained", "publish"]
