"""Checkpoint folders to be published: their kind, checks of their content, and the choice of the
files to publish."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from modeling_mrp.generate.options import MRPGenerationConfig
from modeling_mrp.headers import StoredTensor, check_tensors, stored_tensors
from modeling_mrp.model.code import code_files
from modeling_mrp.model.configuration import MRPConfig
from modeling_mrp.model.families.sdar import DENSE
from modeling_mrp.model.layouts import HEAD, json_object, weight_files

from ..loading import load_tokenizer

KINDS = {"full": "a full model", "head": "an MRP head", "adapter": "an adapter"}
CONFIGS = {"full": "config.json", "head": "config.json", "adapter": "adapter_config.json"}
PICTURE = "decode.svg"  # shown in the card
_NAMES = """
generation_config.json README.md LICENSE .gitattributes
tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json
vocab.json merges.txt
chat_template.jinja
"""
_DECLARED = frozenset((*_NAMES.split(), PICTURE))


@dataclass(frozen=True)
class Folder:
    """A checkpoint's folder that is fit to be published.

    Attributes:
        path: The folder.
        kind: The kind of the checkpoint: "full", "head" or "adapter".
        base: The model that a head or an adapter names as its base.
        files: The files to publish, by name.
        code: The text of each file of remote code to publish, by name. This package generates it,
            whatever code the folder holds.
        left_out: The names of the folder's other files.
    """

    path: Path
    kind: str
    base: str | None
    files: dict[str, Path]
    code: dict[str, str]
    left_out: list[str]


def read_folder(path: Path | str) -> Folder:
    """Check a checkpoint's folder, and select the files to publish; nothing is changed.

    Raises:
        ValueError: if `path` is not a folder, or holds no checkpoint of this package; if weights
            are truncated or do not fit the config; or if the tokenizer does not load, needs code
            from a repository, or has more tokens than the model.
        OSError: if a shard is missing.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(
            f"{path} is not a folder: save the model there first, with save_pretrained, or fetch "
            "it by hf download"
        )
    kind = _kind_of(path)
    fields = json_of(path / CONFIGS[kind])
    names = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    weights = _checked_weights(path, kind)
    chosen = {CONFIGS[kind], *weights, *(_DECLARED & names)}
    code: dict[str, str] = {}
    if kind == "adapter":
        chosen.discard("generation_config.json")
    else:
        code = code_files(fields.get("family", DENSE))
        MRPGenerationConfig.from_dict(json_of(path / "generation_config.json"))
    if {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"} & names:
        _check_tokenizer(path, kind)
    files = {name: path / name for name in sorted(chosen)}
    return Folder(
        path,
        kind,
        fields.get("base_model_name_or_path"),
        files,
        code,
        sorted(names - chosen - code.keys()),
    )


def _kind_of(path: Path) -> str:
    if (path / "adapter_config.json").is_file():
        return "adapter"
    fields = json_of(path / "config.json")
    if fields.get("model_type") != "sdar_mrp":
        contents = "no checkpoint"
        if "model_type" in fields:
            contents = f"a model of type {fields['model_type']!r}"
        raise ValueError(
            f"{path} holds {contents}: give a folder that save_pretrained of this package wrote"
        )
    return "head" if fields.get("base_model_name_or_path") else "full"


def tensors_in(path: Path) -> dict[str, StoredTensor]:
    """Return a description of each tensor of a folder's weights, by name. Only the headers of the
    weight files are read."""
    adapter = path / "adapter_model.safetensors"
    return stored_tensors([adapter] if adapter.is_file() else weight_files(str(path)))


def first_not_finite(tensors: Mapping[str, StoredTensor]) -> str | None:
    """Return the name of the first tensor that contains NaN or infinity, or None. All values are
    read."""
    for file in sorted({tensor.file for tensor in tensors.values()}):
        with safe_open(file, framework="pt") as stored:
            for name in sorted(stored.keys()):
                tensor = stored.get_tensor(name)
                if tensor.is_floating_point() and not bool(tensor.float().isfinite().all()):
                    return str(name)
    return None


def _checked_weights(path: Path, kind: str) -> set[str]:
    """Check that the weights in a folder fit its config; return the names of the weight files."""
    tensors = tensors_in(path)
    names = {tensor.file.name for tensor in tensors.values()}
    if kind == "adapter":
        return names
    config = MRPConfig.from_pretrained(path)
    # otherwise the file has the tensors that its quantizer makes
    if getattr(config, "quantization_config", None) is None:
        check_tensors(config, tensors, HEAD if kind == "head" else "")
    if "model.safetensors" not in names:
        names.add("model.safetensors.index.json")
    return names


def _check_tokenizer(path: Path, kind: str) -> None:
    """Raise `ValueError` if a folder's tokenizer needs code from a repository, does not load, or
    has more tokens than the model."""
    if (named := json_of(path / "tokenizer_config.json").get("auto_map")) is not None:
        raise ValueError(
            f"{path}/tokenizer_config.json takes code from {named!r}, and only the code of this "
            "package is published: remove auto_map, and see that the tokenizer loads without it"
        )
    tokenizer = load_tokenizer(str(path), local_files_only=True)
    if kind != "adapter" and len(tokenizer) > (size := MRPConfig.from_pretrained(path).vocab_size):
        raise ValueError(
            f"the tokenizer in {path} has {len(tokenizer)} tokens, and the model {size}: publish "
            "the model's own tokenizer"
        )


def json_of(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file; an empty dict if the file is missing. `ValueError` if the
    file holds something else."""
    return json_object(path) if path.is_file() else {}
