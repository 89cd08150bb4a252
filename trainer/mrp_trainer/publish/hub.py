"""Kinds of repositories on the Hub, and what a branch of one holds before a push."""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from modeling_mrp.model.code import CUSTOM_GENERATE, model_tags
from modeling_mrp.model.families.registry import DENSE
from modeling_mrp.model.layouts import is_hub_id

KINDS = {"full": "a full model", "head": "an MRP head", "adapter": "an adapter"}
CONFIGS = {"full": "config.json", "head": "config.json", "adapter": "adapter_config.json"}
WEIGHTS = re.compile(r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
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


def tags_of(kind: str, family: str = DENSE) -> list[str]:
    """List the tags by which a kind of repository is found, of a model of that family."""
    return [*model_tags(family), *(["draft-model"] if kind == "head" else [])]


def check_base(base: str | None) -> None:
    """Refuse a base model that others cannot find, with a `ValueError`."""
    if base is not None and not is_hub_id(base):
        raise ValueError(
            f"base_model is {base!r}: it must be the id of a model on the Hub, 'org/name', where others find it. Name it "
            "when saving (base_model_name_or_path), or with --base-model of the command"
        )


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
        """List weights and code of an earlier push that are not among `names`, which this one sends."""
        return sorted(name for name in self.names if _is_ours(name) and name not in names)


def _is_ours(path: str) -> bool:
    return bool(WEIGHTS.fullmatch(path) or re.fullmatch(r"[a-z_]+_mrp\.py", path) or path == CUSTOM_GENERATE)


def look(api: HfApi, repo_id: str, branch: str, kind: str) -> Remote | None:
    """Read what a branch holds, or `main` where there is no such branch yet; None where there is no repository.

    Raises:
        ValueError: if it is of another kind than what is pushed.
    """
    exists = True
    try:
        try:
            info = api.model_info(repo_id, revision=branch)
        except RevisionNotFoundError:
            exists, info = False, api.model_info(repo_id)
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


__all__ = ["CONFIGS", "KINDS", "WEIGHTS", "Remote", "check_base", "kind_of", "look", "tags_of"]
