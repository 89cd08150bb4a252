"""The layouts that checkpoints come in: names of tensors, and contents of the safetensors files.

| layout | `model_type` | head | written by |
|---|---|---|---|
| `mrp` | `sdar_mrp` | `mrp_head.*`, or none | this package |
| `sdar` | `sdar` | none | JetLM/SDAR-* |
| `heavyball` | `sdar` | `mrp_modules.0.model.*` | heavyball/sdar-*-mrp-* |

The backbone's tensors have Qwen3's names in all of them.
"""

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

HEAD = "mrp_head."
PUBLISHED_HEAD = "mrp_modules.0.model."
KEY_MAPPING = {r"^mrp_modules\.0\.model\.": HEAD}  # transformers renames by it while it loads
DRAFT_TOKENS = HEAD + "draft_token_ids"
HUB_OPTIONS = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")


def our_name(name: str) -> str:
    """Translate a tensor's name into our layout."""
    return HEAD + name.removeprefix(PUBLISHED_HEAD) if name.startswith(PUBLISHED_HEAD) else name


def published_name(name: str) -> str:
    """Translate a tensor's name into the published layouts."""
    return PUBLISHED_HEAD + name.removeprefix(HEAD) if name.startswith(HEAD) else name


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: its name there, its shape and its type as safetensors spells it (`BF16`)."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str


def hub_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Select the keyword arguments that say where and how a file is fetched."""
    return {name: kwargs[name] for name in HUB_OPTIONS if kwargs.get(name) is not None}


def json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ValueError: if it holds anything else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON that is read here: save it again, or download it again ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not an object: save it again, or download it again")
    return found


def stored_json(source: str, name: str = CONFIG_NAME, **hub: Any) -> tuple[Path, dict[str, Any]]:
    """Find a JSON file of a checkpoint, fetched if it has to be; also read it.

    Raises:
        ValueError: if it holds no object.
        OSError: if there is none, or no such folder or repository.
    """
    try:
        path = cached_file(source, name, **hub)
    except OSError as error:
        raise OSError(
            f"{source!r} is no folder here, and as a repository it could not be read: check the path ({error})"
        ) from error
    if path is None:
        raise OSError(f"{source} has no {name}: check the path (an adapter is loaded with model.load_adapter, on its base)")
    return Path(path), json_object(Path(path))


def shards_of(index_file: Path) -> dict[str, str]:
    """Read from an index in which file beside it each tensor lies.

    Raises:
        ValueError: if it is none, or names a file outside the checkpoint.
    """
    try:
        shard_of = dict(json_object(index_file)["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index_file} is not an index of shards: download it again ({error!r})") from error
    for shard in shard_of.values():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ValueError(
                f"{index_file} names the shard {shard!r}: a shard is a .safetensors file beside the index, and nothing else "
                "is read"
            )
    return shard_of


def weight_files(source: str, prefixes: tuple[str, ...] = ("",), **hub: Any) -> list[Path]:
    """Find a checkpoint's safetensors files, fetched if they have to be: all, or those with tensors of these prefixes.

    Raises:
        ValueError: if there are none, or if the index names a file outside the checkpoint.
        OSError: if the Hub does not answer, or refuses, or a shard is not there.
    """
    names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    there = (cached_file(source, name, _raise_exceptions_for_missing_entries=False, **hub) for name in names)
    if (found := next(filter(None, there), None)) is None:
        raise ValueError(
            f"no {' and no '.join(names)} in {source}: only safetensors are read, never pickled weights (.bin, .pt). Check the "
            "path, or convert the checkpoint to safetensors"
        )
    if not found.endswith(SAFE_WEIGHTS_INDEX_NAME):
        return [Path(found)]
    shards = {shard for name, shard in shards_of(Path(found)).items() if name.startswith(prefixes)}
    return [Path(cached_file(source, shard, **hub)) for shard in sorted(shards)]


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """List the tensors of safetensors files by our names, from their headers.

    Raises:
        ValueError: if a file is damaged or cut short, or a tensor comes twice.
    """
    found: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  not a dict: it has no iterator
                    part = tensors.get_slice(name)
                    if (ours := our_name(name)) in found:
                        raise ValueError(f"{name} in {file} is also {found[ours].name} in {found[ours].file}: keep one of them")
                    found[ours] = StoredTensor(name, file, tuple(part.get_shape()), str(part.get_dtype()))
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file: download it again ({error})") from error
    return found


def check_fit(
    found: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]], optional: Collection[str] = ()
) -> None:
    """Compare a checkpoint's tensors with those that its config calls for, by our names.

    Raises:
        ValueError: if one is missing (and not optional), one too many, or has another shape or kind of numbers; lists all.
    """
    published = any(tensor.name.startswith(PUBLISHED_HEAD) for tensor in found.values())
    missing = sorted(expected.keys() - found.keys() - set(optional))
    misfits = [f"missing: {published_name(name) if published else name}" for name in missing]
    misfits += [f"unexpected: {found[name].name}" for name in sorted(found.keys() - expected.keys() - set(optional))]
    for name in sorted(expected.keys() & found.keys()):
        tensor = found[name]
        if tensor.shape != expected[name]:
            misfits.append(f"wrong shape: {tensor.name} is {list(tensor.shape)}, needs {list(expected[name])}")
        elif not re.match(r"I64$" if name == DRAFT_TOKENS else r"B?F\d", tensor.dtype):
            misfits.append(f"wrong type: {tensor.name} holds {tensor.dtype} numbers")
    raise_misfits(misfits)


def raise_misfits(misfits: list[str]) -> None:
    """Raise one `ValueError` that lists the misfits, if there are any."""
    if misfits:
        raise ValueError(
            f"the checkpoint does not fit its config ({len(misfits)} tensors):\n  " + "\n  ".join(misfits) + "\n"
            "Check num_nextn_predict_layers (0: no head), the sizes in config.json, and that the download is whole"
        )


def is_hub_id(name: str) -> bool:
    """Tell if a name can be a repository's on the Hub, `org/name`, and is no path."""
    return re.fullmatch(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", name) is not None and ".." not in name


def backbone_location(name: str, source: str) -> str:
    """Find the backbone that the config of the head repository `source` names.

    A config that came from the Hub may name a repository on the Hub, `org/name`, and nothing else. That of a local folder may
    also name an existing folder by its absolute path.

    Raises:
        ValueError: for any other name.
    """
    if os.path.isdir(source) and os.path.isabs(name) and os.path.isdir(name):
        return name
    if not is_hub_id(name):
        raise ValueError(
            f"the config of {source} names the backbone {name!r}, which is not followed: a config from the Hub names a "
            "repository ('org/name'), that of a local folder may also name an existing folder by its absolute path. "
            "Give another its head by from_backbone(backbone, head=...)"
        )
    if os.path.exists(name):
        raise ValueError(
            f"the config of {source} names the repository {name!r}, but a local path of that name exists and would be read "
            "instead: work in another folder, or say which is meant by from_backbone(backbone, head=...)"
        )
    return name


__all__ = [
    "DRAFT_TOKENS",
    "HEAD",
    "HUB_OPTIONS",
    "KEY_MAPPING",
    "PUBLISHED_HEAD",
    "StoredTensor",
    "backbone_location",
    "check_fit",
    "hub_options",
    "is_hub_id",
    "json_object",
    "our_name",
    "published_name",
    "raise_misfits",
    "shards_of",
    "stored_json",
    "stored_tensors",
    "weight_files",
]
