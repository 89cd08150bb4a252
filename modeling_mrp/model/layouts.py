"""The layouts that checkpoints come in: names of tensors, and the files of a folder or a repository.

The backbone's tensors have Qwen3's names in all of them.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file, extract_commit_hash

HEAD = "mrp_head."
PUBLISHED_HEAD = "mrp_modules.0.model."  # in heavyball/sdar-*-mrp-*
HUB_OPTIONS = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")


def our_name(name: str) -> str:
    """Translate a tensor's name into our layout."""
    return HEAD + name.removeprefix(PUBLISHED_HEAD) if name.startswith(PUBLISHED_HEAD) else name


def hub_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Select the keyword arguments that say where and how a file is fetched."""
    return {name: kwargs[name] for name in HUB_OPTIONS if kwargs.get(name) is not None}


def json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file; `ValueError` if it holds no object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object: save it again, or download it again")
    return found


def stored_json(source: str, name: str = CONFIG_NAME, **hub: Any) -> tuple[dict[str, Any], str | None]:
    """Read a JSON file of a checkpoint, fetched from the Hub if needed, and find its commit, None for a folder's.

    Raises `OSError` if there is none, or no such folder or repository, and `ValueError` if it holds no object.
    """
    try:
        if (path := cached_file(source, name, **hub)) is None:
            raise OSError(f"there is no {name}; an adapter is loaded with model.load_adapter, on its base")
    except OSError as error:
        raise OSError(
            f"{source!r} is no folder here, and as a repository it could not be read: check the path ({error})"
        ) from error
    return json_object(Path(path)), None if os.path.isdir(source) else extract_commit_hash(path, None)


def weight_files(source: str, prefixes: tuple[str, ...] = ("",), **hub: Any) -> list[Path]:
    """Find a checkpoint's safetensors files, fetched if needed: all, or those with tensors of some prefixes.

    Raises `ValueError` if there are none, and `OSError` if the Hub does not answer, or refuses, or a shard is not there.
    """
    names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    there = (cached_file(source, name, _raise_exceptions_for_missing_entries=False, **hub) for name in names)
    if (found := next(filter(None, there), None)) is None:
        raise ValueError(f"no {' and no '.join(names)} in {source}: only safetensors are read. Check the path")
    if not found.endswith(SAFE_WEIGHTS_INDEX_NAME):
        return [Path(found)]
    shards = {shard for name, shard in json_object(Path(found))["weight_map"].items() if name.startswith(prefixes)}
    return [Path(cached_file(source, shard, **hub)) for shard in sorted(shards)]


def is_hub_id(name: str) -> bool:
    """Tell if a name can be a repository's id on the Hub, `org/name`, rather than a path."""
    return re.fullmatch(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", name) is not None and ".." not in name


def backbone_location(name: str, source: str) -> str:
    """Check the name of a backbone in the config of the head repository `source`, and return it.

    Raises `ValueError` for a name that is neither a repository's nor, in a local folder's config, a folder's absolute path.
    """
    if os.path.isdir(source) and os.path.isabs(name) and os.path.isdir(name):
        return name
    if not is_hub_id(name) or os.path.exists(name):
        raise ValueError(
            f"the config of {source} names the backbone {name!r}, which is not followed: a config from the Hub names a "
            "repository ('org/name') and no path that exists here, that of a local folder may also name an existing folder by "
            "its absolute path. Give another its head by from_backbone(backbone, head=...)"
        )
    return name
