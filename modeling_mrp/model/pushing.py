"""Publication of a saved checkpoint in one commit, or none: all that a model which was loaded as remote code needs for it.

The installed command `mrp push` renders a whole card, and is patient with a Hub that does not answer.
"""

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCardData, ModelInfo, get_session
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id

from .layouts import is_hub_id
from .saving import CUSTOM_GENERATE

KINDS = {"full": "a full model", "head": "an MRP head", "adapter": "an adapter"}
CONFIGS = {"full": "config.json", "head": "config.json", "adapter": "adapter_config.json"}
TAGS = ["dllm", "diffusion-lm", "block-diffusion", "speculative-decoding", "sdar", "mrp"]
_HEAD_TAGS = ["speculators", "draft-model"]
WEIGHTS = re.compile(r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
NOT_FILLED_IN = "Nothing is told of it yet: `mrp push` renders a card with its facts, its use and what was measured."
NOT_DRAWN = "It has no picture of a decode, which a model that pushes itself does not draw. The installed package draws one:"
PATIENCE = 60.0  # seconds that the Hub may be silent before a request counts as lost
_SAY_NOTHING = frozenset((".gitattributes", ".gitignore", "README.md", "LICENSE"))


def kind_of(names: Collection[str], read: Callable[[str], bytes]) -> str | None:
    """Tell what a repository or folder with these files is.

    Args:
        names: The paths of its files.
        read: Gives a file's content.

    Returns:
        "full", "head" or "adapter" for this package's kinds, a description of anything else, or None where there is nothing
        that a model could be told from.
    """
    if "adapter_config.json" in names:
        return "adapter"
    if "config.json" in names:
        try:
            config = json.loads(read("config.json"))
            model_type = config.get("model_type")
        except (ValueError, AttributeError, RecursionError):
            return "a config.json that cannot be read"
        if model_type != "sdar_mrp":
            return f"a model of type {model_type!r}"
        return "head" if config.get("base_model_name_or_path") else "full"
    others = sorted(set(names) - _SAY_NOTHING)
    return f"files of no model of this package, such as {others[0]}" if others else None


def tags_of(kind: str) -> list[str]:
    """List the tags by which a kind of repository is found."""
    return [*TAGS, *(_HEAD_TAGS if kind == "head" else [])]


def is_ours(path: str) -> bool:
    """Tell whether an earlier push may have put this file there, so that a later one may remove it."""
    return bool(WEIGHTS.fullmatch(path) or re.fullmatch(r"[a-z_]+_mrp\.py", path) or path == CUSTOM_GENERATE)


def check_target(repo_id: str, revision: str | None, create_pr: bool) -> None:
    """Refuse what is no repository's name, or both a branch and a pull request, with a `ValueError`."""
    if revision is not None and create_pr:
        raise ValueError(f"revision={revision!r} and create_pr=True: push to a branch, or open a pull request")
    validate_repo_id(repo_id)


def full_name(api: HfApi, repo_id: str) -> str:
    """Complete the name of a repository that has no owner with the user's, who is asked for."""
    return repo_id if "/" in repo_id else f"{api.whoami()['name']}/{repo_id}"


def check_base(base: str | None) -> None:
    """Refuse a base model that others cannot find, with a `ValueError`."""
    if base is not None and not is_hub_id(base):
        raise ValueError(
            f"base_model is {base!r}: it must be the id of a model on the Hub, 'org/name', where others find it. Name it "
            "when saving (base_model_name_or_path), or with --base-model of the command"
        )


Operation = CommitOperationAdd | CommitOperationDelete


@dataclass(frozen=True)
class Remote:
    """A repository as a push found it.

    Attributes:
        sha: The commit to stand on.
        names: The paths of its files.
        branch: Whether the branch is there.
        card: Its README.md, if it has one.
    """

    sha: str
    names: frozenset[str]
    branch: bool
    card: str | None

    def stale(self, names: Collection[str]) -> list[str]:
        """List the files of an earlier push that are not among `names`, which this one sends."""
        return sorted(name for name in self.names if is_ours(name) and name not in names)


@contextmanager
def answered_within(seconds: float) -> Iterator[None]:
    """Bound the silence of the Hub in a request, which huggingface_hub leaves unbounded unless its client was given a bound."""
    client = get_session()
    before = client.timeout
    if before.read is None:
        client.timeout = seconds
    try:
        yield
    finally:
        client.timeout = before


def revision_info(api: HfApi, repo_id: str, revision: str | None = None, files_metadata: bool = False) -> ModelInfo:
    """Ask for what a revision holds, with the client's timeout, which `model_info` would otherwise override."""
    timeout = get_session().timeout.read
    return api.model_info(repo_id, revision=revision, files_metadata=files_metadata, timeout=timeout)


def look(api: HfApi, repo_id: str, branch: str, kind: str) -> Remote | None:
    """Read what a branch holds, or `main` where there is no such branch yet; None where there is no repository.

    Raises:
        ValueError: if it is of another kind than what is pushed.
    """
    exists = True
    try:
        try:
            info = revision_info(api, repo_id, branch)
        except RevisionNotFoundError:
            exists, info = False, revision_info(api, repo_id)
    except RepositoryNotFoundError:
        return None
    names = frozenset(sibling.rfilename for sibling in info.siblings or ())
    with TemporaryDirectory() as cache:

        def read(name: str) -> bytes:
            return Path(api.hf_hub_download(repo_id, name, revision=info.sha, cache_dir=cache)).read_bytes()

        there = kind_of(names, read)
        if there not in (None, kind):
            raise ValueError(
                f"{repo_id} holds {KINDS.get(str(there), there)}, and what is pushed is {KINDS[kind]}: push it to a "
                "repository of its own, or delete that one on the Hub first"
            )
        card = read("README.md").decode(errors="replace") if "README.md" in names else None
    return Remote(str(info.sha), names, exists, card)


def landed(api: HfApi, repo_id: str, branch: str, before: str, operations: Collection[Operation]) -> CommitInfo | None:
    """Find the commit of an answer that was lost on the way: what the branch holds now, if that is what was sent.

    Args:
        api: The Hub.
        repo_id: The repository.
        branch: Its branch.
        before: The commit that it was on.
        operations: What was sent.
    """
    info = revision_info(api, repo_id, branch, files_metadata=True)
    files = {sibling.rfilename: sibling for sibling in info.siblings or ()}

    def holds(operation: Operation) -> bool:
        file = files.get(operation.path_in_repo)
        if isinstance(operation, CommitOperationDelete) or file is None:
            return isinstance(operation, CommitOperationDelete) and file is None
        if file.lfs is not None:
            return file.lfs.sha256 == operation.upload_info.sha256.hex()
        with operation.as_file() as stream:
            content = stream.read()
        return file.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # git's

    if info.sha == before or not all(map(holds, operations)):
        return None
    url = f"{api.endpoint}/{repo_id}/commit/{info.sha}"
    return CommitInfo(commit_url=url, commit_message="", commit_description="", oid=str(info.sha))


@answered_within(PATIENCE)
def push_saved(
    folder: Path,
    repo_id: str,
    private: bool = True,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    commit_description: str | None = None,
    token: str | bool | None = None,
) -> CommitInfo:
    """Push all files of a folder that `save_pretrained` has just written, in one commit.

    Weights and code of an earlier push that are not among them are removed in the same commit. A repository without a card gets
    one of a few lines.

    Raises:
        ValueError: if the name of the base is not that of a repository, or the target holds another kind of thing.
        HfHubHTTPError: if the Hub refuses, or somebody else committed meanwhile; no commit is then made.
        Exception: the HTTP library's, if the Hub does not answer within `PATIENCE`, or not readably.
    """
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    kind = str(kind_of(files, lambda name: files[name].read_bytes()))
    if kind == "adapter":  # the options of `generate` are those of its base
        files.pop("generation_config.json", None)
    base = json.loads(files[CONFIGS[kind]].read_text(encoding="utf-8")).get("base_model_name_or_path")
    check_base(base)
    api, branch = HfApi(token=token), revision or "main"
    repo_id = full_name(api, repo_id)
    remote = look(api, repo_id, branch, kind)
    if remote is None:
        api.create_repo(repo_id, private=private, exist_ok=True)
        remote = look(api, repo_id, branch, kind)
    if remote is None:
        raise ConnectionError(f"{repo_id} was created and cannot be found: push again")
    operations: list[Operation] = [CommitOperationAdd(*file) for file in files.items()]
    operations += [CommitOperationDelete(name) for name in remote.stale(files)]
    if remote.card is None:
        operations.append(CommitOperationAdd("README.md", short_card(repo_id, kind, base).encode()))
    if not remote.branch:
        api.create_branch(repo_id, branch=branch, revision=remote.sha, exist_ok=True)
    try:
        return api.create_commit(
            repo_id,
            operations,
            commit_message=commit_message or f"Upload {KINDS[kind]}",
            commit_description=commit_description,
            revision=None if create_pr else branch,
            create_pr=create_pr,
            parent_commit=remote.sha,
        )
    except HfHubHTTPError:
        raise
    except Exception:  # the answer was lost, or cannot be read
        done = None if create_pr else landed(api, repo_id, branch, remote.sha, operations)
        if done is None:
            raise
        return done


def short_card(repo_id: str, kind: str, base: str | None) -> str:
    """Write a card that says what a repository holds and which model it belongs to."""
    data = ModelCardData(
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        license="unknown",
        tags=tags_of(kind),
        base_model=base,
        base_model_relation="adapter" if base else None,
    )
    belongs = f" of `{base}`" if base else ""
    text = f"Here is {KINDS[kind]}{belongs}. {NOT_FILLED_IN}\n\n{NOT_DRAWN}\n\n```\nmrp push {repo_id} {repo_id}\n```"
    return f"---\n{data.to_yaml()}\n---\n\n# {repo_id.split('/')[-1]}\n\n{text}\n"


__all__ = [
    "CONFIGS",
    "KINDS",
    "NOT_FILLED_IN",
    "PATIENCE",
    "WEIGHTS",
    "Operation",
    "Remote",
    "answered_within",
    "check_base",
    "check_target",
    "full_name",
    "is_ours",
    "kind_of",
    "landed",
    "look",
    "push_saved",
    "revision_info",
    "tags_of",
]
