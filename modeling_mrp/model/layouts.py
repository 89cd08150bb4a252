"""Layouts of checkpoints: the tensor names of heads, and the files of a folder or a repository."""

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
    extract_commit_hash,
)

HEAD = "mrp_head."
PUBLISHED_HEAD = "mrp_modules.0.model."  # in heavyball/sdar-*-mrp-*
HUB_OPTIONS = (
    "cache_dir",
    "force_download",
    "proxies",
    "local_files_only",
    "token",
    "revision",
    "subfolder",
)


def our_name(name: str) -> str:
    """Return the name that a tensor of a published head has in this package; return other names
    unchanged."""
    return HEAD + name.removeprefix(PUBLISHED_HEAD) if name.startswith(PUBLISHED_HEAD) else name


def hub_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Select those keyword arguments that say how to fetch a file from the Hub (`HUB_OPTIONS`), and
    are not None."""
    return {name: kwargs[name] for name in HUB_OPTIONS if kwargs.get(name) is not None}


def json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file and return its object. Raise `ValueError` if the file is malformed or holds
    no object."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds no JSON object: save it again, or download it again")
    return fields


def stored_json(
    source: str, name: str = CONFIG_NAME, **hub: Any
) -> tuple[dict[str, Any], str | None]:
    """Read a JSON file of a checkpoint, which is fetched from the Hub if needed. Return its object,
    and the commit of the repository (None if the checkpoint is a folder).

    Args:
        source: The checkpoint: a folder, or the id of a repository.
        name: The name of the file.
        hub: Options for fetching from the Hub, such as `revision` and `token` (`HUB_OPTIONS`).

    Raises:
        OSError: if the file is missing.
        ValueError: if the file holds no object.
    """
    try:
        if (path := cached_file(source, name, **hub)) is None:
            raise OSError(
                f"there is no {name}; an adapter is loaded with model.load_adapter, on its base"
            )
    except OSError as error:
        message = " ".join(str(error).split())
        raise OSError(
            f"{source!r} is no folder here, and could not be read as a repository: check the path "
            f"({message})"
        ) from error
    commit = None if os.path.isdir(source) else extract_commit_hash(path, None)
    return json_object(Path(path)), commit


def read_gguf(
    source: str, gguf_file: str, dtype: Any, **hub: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a GGUF file of a folder or repository with transformers, which takes minutes. Return the
    fields of the config, and the tensors by name. Quantized tensors are converted to `dtype`. `hub`
    are options for fetching from the Hub, such as `revision` (`HUB_OPTIONS`)."""
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf_file, dtype=dtype, **hub)
    return model.config.to_dict(), model.state_dict()


def weight_files(source: str, prefixes: tuple[str, ...] = ("",), **hub: Any) -> list[Path]:
    """Find the safetensors files of a checkpoint; fetch them from the Hub if needed. If there are
    several (shards), return only those with tensors whose names begin with one of `prefixes`. Raise
    `ValueError` if the checkpoint has none.

    Args:
        source: The checkpoint: a folder, or the id of a repository.
        prefixes: Beginnings of tensor names; by default, all shards are returned.
        hub: Options for fetching from the Hub, such as `revision` and `token` (`HUB_OPTIONS`).
    """
    names = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    file = None
    for name in names:  # the first one that exists
        file = file or cached_file(source, name, _raise_exceptions_for_missing_entries=False, **hub)
    if file is None:
        raise ValueError(
            f"no {' and no '.join(names)} in {source}: only safetensors are read. Check the path"
        )
    if not file.endswith(SAFE_WEIGHTS_INDEX_NAME):
        return [Path(file)]
    shards = {shard for name, shard in weight_map(Path(file)).items() if name.startswith(prefixes)}
    return [Path(cached_file(source, shard, **hub)) for shard in sorted(shards)]


def weight_map(index: Path) -> dict[str, str]:
    """Read the index of a sharded checkpoint. Return a dict that maps the name of each tensor to
    the name of its file. Raise `ValueError` if the index is malformed or names a file outside the
    checkpoint's folder."""
    fields = json_object(index)
    files = fields.get("weight_map")
    remedy = "save the checkpoint again, or download it again"
    if not isinstance(files, dict) or not files or not isinstance(fields.get("metadata"), dict):
        raise ValueError(
            f"weight_map or metadata of {index} is missing, no object, or empty: {remedy}"
        )
    for name, file in files.items():
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or not file.endswith(".safetensors")
        ):
            raise ValueError(
                f"weight_map of {index} has {file!r} for {name}: it must be a safetensors file "
                f"beside it; {remedy}"
            )
    return files


def stored_names(source: str, **hub: Any) -> set[str]:
    """Return the names of a checkpoint's tensors, as this package spells them (`our_name`). The set
    is empty if there are no safetensors files under the usual names.

    Args:
        source: The checkpoint: a folder, or the id of a repository.
        hub: Options for fetching from the Hub, such as `revision` and `token` (`HUB_OPTIONS`).
    """
    single, index = (
        cached_file(source, name, _raise_exceptions_for_missing_entries=False, **hub)
        for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
    )
    if single is None:
        return set() if index is None else set(map(our_name, weight_map(Path(index))))
    with safe_open(single, framework="pt") as tensors:
        return set(map(our_name, tensors.keys()))


def check_depth(config: Any, names: Collection[str], source: str) -> None:
    """Raise `ValueError` if a config asks for more layers than a checkpoint has. Callers check this
    before they make any layer.

    Args:
        config: The `MRPConfig`.
        names: The names of the checkpoint's tensors (`stored_names`). If there are none, nothing is
            checked.
        source: The checkpoint, for the message.
    """
    for field, prefix in (
        ("num_hidden_layers", "model.layers."),
        ("num_nextn_predict_layers", f"{HEAD}layers."),
    ):
        layer_numbers = {
            name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)
        }
        # a head repository has no layers of the backbone
        stored_here = bool(names) and (bool(layer_numbers) or field != "num_hidden_layers")
        if stored_here and (layers := getattr(config, field)) > len(layer_numbers):
            raise ValueError(
                f"{source} does not fit its config: {field} is {layers}, and it holds "
                f"{len(layer_numbers)} layers {prefix}*: correct config.json (without a head "
                "num_nextn_predict_layers is 0), or download the weights again"
            )


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form of a repository's id on the Hub, `org/name`, which some
    paths have, too."""
    return re.fullmatch(
        r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*", name
    ) is not None and not re.search(r"\.\.|--", name)


def backbone_location(name: str, source: str) -> str:
    """Check the name of the backbone that the config of a head repository gives, and return it
    unchanged.

    Two kinds of names are allowed: the id of a repository on the Hub, if no path of this name
    exists here; and, in the config of a local folder only, the absolute path of a folder that
    exists.

    Args:
        name: The name in the config.
        source: The head repository: a folder, or the id of a repository.

    Raises:
        ValueError: for any other name.
    """
    is_repository = isinstance(name, str) and is_hub_id(name) and not os.path.exists(name)
    is_local = isinstance(name, str) and os.path.isdir(source) and os.path.isabs(name)
    if is_local and not os.path.isdir(name):
        raise ValueError(
            f"the folder {name} is gone, which the head in {source} names as its backbone: name "
            f"its new place, with --backbone of mrp, or by from_backbone(folder, head={source!r})"
        )
    if not is_repository and not is_local:
        raise ValueError(
            f"the config of {source} names the backbone {name!r}, which is not followed: it must "
            "be 'org/name', and no path that exists here, or in a folder's config another's "
            "absolute path. Load both by from_backbone(backbone, head=...)"
        )
    return name
