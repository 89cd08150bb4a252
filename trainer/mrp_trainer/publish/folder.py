"""What a folder holds that may be published: its kind, the declared files, and nothing else."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modeling_mrp.headers import StoredTensor, check_tensors, stored_tensors
from modeling_mrp.model.code import AUTO_MAP, code_files
from modeling_mrp.model.configuration import MRPConfig
from modeling_mrp.model.families.registry import DENSE
from modeling_mrp.model.layouts import HEAD, json_object

from ..loading import load_tokenizer
from .cardtext import PICTURE
from .hub import CONFIGS, KINDS, WEIGHTS, kind_of

log = logging.getLogger(__name__)

_NAMES = """
config.json generation_config.json adapter_config.json README.md LICENSE .gitattributes
tokenizer.json tokenizer_config.json tokenizer.model special_tokens_map.json added_tokens.json vocab.json merges.txt
chat_template.jinja
"""
_DECLARED = frozenset((*_NAMES.split(), PICTURE))


@dataclass(frozen=True)
class Folder:
    """A checkpoint's folder that was found fit to be published.

    Attributes:
        path: The folder.
        kind: "full", "head" or "adapter".
        base: The model that a head or an adapter says it belongs to.
        files: What is to be published, by path in the repository.
        code: The remote code that is published beside it, as this package generates it, whatever lies in the folder.
        left_out: What else lies there.
    """

    path: Path
    kind: str
    base: str | None
    files: dict[str, Path]
    code: dict[str, str]
    left_out: list[str]


def read_folder(path: Path | str) -> Folder:
    """Sorts a folder's files and checks them; changes nothing.

    Raises:
        ValueError: if it is not a folder, holds no checkpoint of this package or more than one kind, a link that
            leaves it (but to the blobs of the Hub's cache), weights that are cut short or do not fit its config, a tokenizer
            that does not load or fit, or lacks a file that it needs. The remedy is named.
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(
            f"{path} is not a folder: save the model there first, with save_pretrained, or fetch it by hf download"
        )
    names = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    flat = {name for name in names if "/" not in name}
    check_links(path, filter(_is_published, flat))
    kind = kind_of(flat, lambda name: (path / name).read_bytes())
    if kind not in KINDS:
        raise ValueError(f"{path} holds {kind or 'no checkpoint'}: give a folder that save_pretrained of this package wrote")
    if kind == "adapter" and {"model.safetensors", "model.safetensors.index.json"} & flat:
        raise ValueError(f"{path} holds both an adapter and a whole model: move one of them to a folder of its own")
    chosen = set(filter(_is_published, flat))
    if kind == "adapter":
        chosen -= {"config.json", "generation_config.json"}
    code = {} if kind == "adapter" else _code(path, names)
    json_of(path / "generation_config.json")
    _check_weights(path, kind, chosen)
    _check_tokenizer(path, kind, chosen)
    base = json_of(path / CONFIGS[kind]).get("base_model_name_or_path")
    files = {name: path / name for name in sorted(chosen)}
    return Folder(path, kind, base, files, code, sorted(names - chosen - code.keys()))


def check_links(path: Path, names: Iterable[str]) -> None:
    """Refuse links whose content lies elsewhere, with a `ValueError`; a snapshot in the Hub's cache has links to its blobs."""
    inside = [path.resolve()]
    if inside[0].parent.name == "snapshots":
        inside.append(inside[0].parents[1] / "blobs")
    for name in sorted(names):
        target = (path / name).resolve()
        if not any(target.is_relative_to(place) for place in inside):
            raise ValueError(
                f"{path / name} is a link to {target}, outside of the folder, and would be published with its content: put a "
                "copy there if that is meant, or remove the link"
            )


def _is_published(name: str) -> bool:
    return name in _DECLARED or WEIGHTS.fullmatch(name) is not None


def _code(path: Path, names: set[str]) -> dict[str, str]:
    """The remote code of a full model or a head.

    Raises:
        ValueError: if the folder's config takes its code from elsewhere, or names none.
    """
    fields = json_of(path / "config.json")
    named = fields.get("auto_map")
    if not isinstance(named, dict) or not named:
        raise ValueError(
            f"{path}/config.json has no auto_map, so that nobody could load it: save it again with save_pretrained"
        )
    for part, reference in named.items():
        if reference != AUTO_MAP.get(part):
            raise ValueError(
                f"{path}/config.json takes its {part} from {reference!r}, and only the code of this package is published: save "
                "it again with save_pretrained"
            )
    code = code_files(fields.get("family", DENSE))
    for name in sorted(code.keys() & names):
        if (path / name).read_bytes() != code[name].encode():
            log.warning("%s/%s is not what this package generates: that is published instead", path, name)
    return code


def tensors_in(path: Path) -> dict[str, StoredTensor]:
    """What a folder's weights hold, from their headers.

    Raises:
        ValueError: if a file is damaged or cut short.
    """
    return stored_tensors(sorted(file for file in path.glob("*.safetensors") if WEIGHTS.fullmatch(file.name)))


def _check_weights(path: Path, kind: str, names: set[str]) -> None:
    prefix = "adapter_model" if kind == "adapter" else "model"
    index = path / f"{prefix}.safetensors.index.json"
    shards = set(json_of(index)["weight_map"].values()) if index.is_file() else {f"{prefix}.safetensors"}
    if missing := sorted(shards - names):
        raise ValueError(f"{path} lacks {', '.join(missing)}: save the weights again, as safetensors")
    if stale := sorted(name for name in names - shards if WEIGHTS.fullmatch(name) and name != index.name):
        raise ValueError(f"{path} holds {', '.join(stale)}, which the model does not use: remove what an earlier save left")
    tensors = tensors_in(path)
    if kind == "adapter":
        return
    config = MRPConfig.from_pretrained(path)
    if kind == "head":
        check_tensors(config, tensors, HEAD)
    elif getattr(config, "quantization_config", None) is None:  # or it has the tensors that its quantizer makes
        check_tensors(config, tensors)


def _check_tokenizer(path: Path, kind: str, names: set[str]) -> None:
    """Load the tokenizer once, if there is one.

    Raises:
        ValueError: if it cannot be loaded, takes its code from a repository, or has more tokens than the model.
    """
    if not {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json"} & names:
        return
    if (named := json_of(path / "tokenizer_config.json").get("auto_map")) is not None:
        raise ValueError(
            f"{path}/tokenizer_config.json takes code from {named!r}, and only the code of this package is published: remove "
            "auto_map, and see that the tokenizer loads without it"
        )
    tokenizer = load_tokenizer(str(path), local_files_only=True)
    if kind != "adapter" and len(tokenizer) > (size := MRPConfig.from_pretrained(path).vocab_size):
        raise ValueError(
            f"the tokenizer in {path} has {len(tokenizer)} tokens, and the model {size}: publish the model's own tokenizer"
        )


def json_of(path: Path) -> dict[str, Any]:
    """What a JSON file holds, nothing if there is none; `ValueError` if that is no object."""
    return json_object(path) if path.is_file() else {}


__all__ = ["Folder", "check_links", "json_of", "read_folder", "tensors_in"]
