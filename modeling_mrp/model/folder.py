"""What a folder holds that may be published: its kind, the declared files, and nothing else."""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_relative_import_files

from .layouts import HEAD, StoredTensor, stored_tensors
from .saving import CUSTOM_GENERATE

KINDS = {"full": "a full model", "head": "an MRP head", "adapter": "an adapter"}
CONFIGS = {"full": "config.json", "head": "config.json", "adapter": "adapter_config.json"}

_WEIGHTS = re.compile(r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_NAMES = """
config.json generation_config.json adapter_config.json README.md LICENSE .gitattributes
tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json vocab.json merges.txt
chat_template.jinja
"""
_DECLARED = frozenset(_NAMES.split())
_UNSAFE = frozenset((".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"))
_TRAINER_STATE = re.compile(r"training_args\.bin|(optimizer|scheduler|scaler)\.(pt|bin)|rng_state.*\.pth")
_SAY_NOTHING = frozenset((".gitattributes", ".gitignore", "README.md", "LICENSE"))


def kind_of(names: Collection[str], read: Callable[[str], bytes]) -> str | None:
    """What a repository or folder with these files is.

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
        except (ValueError, AttributeError):
            return "a config.json that cannot be read"
        if model_type != "sdar_mrp":
            return f"a model of type {model_type!r}"
        return "head" if config.get("base_model_name_or_path") else "full"
    others = sorted(set(names) - _SAY_NOTHING)
    return f"files of no model of this package, such as {others[0]}" if others else None


def is_ours(path: str) -> bool:
    """Whether an earlier push may have put this file there for a kind of checkpoint, so that a later one may remove it."""
    return bool(_WEIGHTS.fullmatch(path) or re.fullmatch(r"[a-z_]+_mrp\.py", path) or path == CUSTOM_GENERATE)


@dataclass(frozen=True)
class Folder:
    """A checkpoint's folder that was found fit to be published.

    Attributes:
        path: The folder.
        kind: "full", "head" or "adapter".
        base: The model that a head or an adapter says it belongs to.
        files: What is to be published, by path in the repository.
        left_out: What else lies there.
    """

    path: Path
    kind: str
    base: str | None
    files: dict[str, Path]
    left_out: list[str]


def read_folder(path: Path | str) -> Folder:
    """Sorts a folder's files and checks them; changes nothing.

    Raises:
        ValueError: if it is not a folder, holds no checkpoint of this package or more than one kind, a pickle, weights that are
            cut short or do not belong to its kind, or lacks a file that it needs. The remedy is named.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder: save the model there first, with save_pretrained")
    names = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    flat = {name for name in names if "/" not in name}
    unsafe = sorted(name for name in flat if Path(name).suffix in _UNSAFE and not _TRAINER_STATE.fullmatch(name))
    if unsafe:
        raise ValueError(
            f"{path} holds {', '.join(unsafe)}: files of that kind can run code when loaded and are never published. "
            "Save the weights as safetensors, and move these files out of the folder"
        )
    kind = kind_of(flat, lambda name: (path / name).read_bytes())
    if kind not in KINDS:
        raise ValueError(f"{path} holds {kind or 'no checkpoint'}: give a folder that save_pretrained of this package wrote")
    if kind == "adapter" and {"model.safetensors", "model.safetensors.index.json"} & flat:
        raise ValueError(f"{path} holds both an adapter and a whole model: move one of them to a folder of its own")
    chosen = {name for name in flat if name in _DECLARED or _WEIGHTS.fullmatch(name)}
    if kind == "adapter":
        chosen -= {"config.json", "generation_config.json"}
    else:
        chosen |= _code(path) | ({CUSTOM_GENERATE} & names)
    _check_weights(path, kind, chosen)
    base = json_of(path / CONFIGS[kind]).get("base_model_name_or_path")
    return Folder(path, kind, base, {name: path / name for name in sorted(chosen)}, sorted(names - chosen))


def _code(path: Path) -> set[str]:
    """The code files that the folder's `auto_map` names, and those that they import.

    Raises:
        ValueError: if it names code outside the folder or of another repository, or a file is missing.
    """
    found: set[str] = set()
    for reference in json_of(path / "config.json").get("auto_map", {}).values():
        if not re.fullmatch(r"[a-z_]+_mrp\.\w+", str(reference)):
            raise ValueError(
                f"{path}/config.json takes its code from {reference!r}, and only code in the folder itself is published: save "
                "it again with save_pretrained"
            )
        module = path / f"{reference.split('.')[0]}.py"
        try:
            found |= {module.name, *(Path(file).name for file in get_relative_import_files(module))}
        except FileNotFoundError as error:
            raise ValueError(
                f"{path} lacks {Path(str(error.filename)).name}, which its config.json needs: save it again"
            ) from error
    if not found:
        raise ValueError(
            f"{path}/config.json has no auto_map, so that nobody could load it: save it again with save_pretrained"
        )
    return found


def tensors_in(path: Path) -> dict[str, StoredTensor]:
    """What a folder's weights hold, from their headers.

    Raises:
        ValueError: if a file is damaged or cut short.
    """
    return stored_tensors(sorted(file for file in path.glob("*.safetensors") if _WEIGHTS.fullmatch(file.name)))


def _check_weights(path: Path, kind: str, names: set[str]) -> None:
    prefix = "adapter_model" if kind == "adapter" else "model"
    index = path / f"{prefix}.safetensors.index.json"
    shards = set(json_of(index).get("weight_map", {}).values()) or {f"{prefix}.safetensors"}
    if missing := sorted(shards - names):
        raise ValueError(f"{path} lacks {', '.join(missing)}: save the weights again, as safetensors")
    if stale := sorted(name for name in names - shards if _WEIGHTS.fullmatch(name) and name != index.name):
        raise ValueError(f"{path} holds {', '.join(stale)}, which the model does not use: remove what an earlier save left")
    tensors = tensors_in(path)
    if kind == "head" and (other := sorted(name for name in tensors if not name.startswith(HEAD))):
        raise ValueError(
            f"{path}/config.json says that this is a head, and its weights hold {len(other)} other tensors, such as "
            f"{other[0]}: save it again with head_only=True"
        )
    if kind == "full" and not any(name.startswith("model.") for name in tensors):
        raise ValueError(f"{path} holds no backbone, and config.json names none: save the whole model, or with head_only=True")


def json_of(path: Path) -> dict[str, Any]:
    """What a JSON file holds, nothing if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


__all__ = ["CONFIGS", "CUSTOM_GENERATE", "KINDS", "Folder", "is_ours", "json_of", "kind_of", "read_folder", "tensors_in"]
