"""Writes a checkpoint in another layout: ours, the published backbone's (`sdar`) or the published head's (`heavyball`).

`mrp convert heavyball/sdar-4b-mrp-3lyr converted` calls it. The layouts differ in the names of the
head's tensors and in the fields of the config; the numbers stay as they are, byte for byte.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, Qwen3Config
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from modeling_mrp.generate.option_table import OPTIONS
from modeling_mrp.model.configuration import MRPConfig
from modeling_mrp.model.families.registry import DENSE
from modeling_mrp.model.layouts import (
    HEAD,
    PUBLISHED_HEAD,
    json_object,
    our_name,
    stored_json,
    stored_tensors,
    weight_files,
)
from modeling_mrp.model.saving import AUTO_MAP, write_code, written_beside
from modeling_mrp.modeling import MRPForCausalLM

from .folder import check_links

Layout = Literal["mrp", "sdar", "heavyball"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
_COPIED = {".json", ".txt", ".jinja", ".model"}  # tokenizers and generation configs: never code, never pickles
# Fields of Qwen3's config that the published one, as transformers 4.52 wrote it, has otherwise or not at all.
_OTHERWISE = {"architectures", "dtype", "layer_types", "model_type", "rope_parameters"}


def published_name(name: str) -> str:
    """Translate a tensor's name into the published layouts."""
    return PUBLISHED_HEAD + name.removeprefix(HEAD) if name.startswith(HEAD) else name


def published_fields(config: MRPConfig) -> dict[str, Any]:
    """A config in the published spelling: `heavyball` if it has a head, `sdar` if not."""
    saved = config.to_dict()
    known = vars(Qwen3Config()).keys() - vars(PreTrainedConfig()).keys() - _OTHERWISE
    fields = {name: value for name, value in saved.items() if name in known or name in ("block_size", "mask_token_id")}
    rope = dict(config.rope_parameters)
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["rope_scaling"] = None if rope == {"rope_type": "default"} else rope
    fields |= {"model_type": "sdar", "torch_dtype": saved.get("dtype"), "fuse_cross_entropy": True}
    fields["architectures"] = ["SDARMRPForCausalLM" if config.has_head else "SDARForCausalLM"]
    if config.has_head:
        fields |= {"num_nextn_predict_layers": config.num_nextn_predict_layers, "num_mrp_heads": config.num_mrp_heads}
    return fields


def convert(source: str | os.PathLike[str], target: str | os.PathLike[str], layout: Layout = "mrp") -> Path:
    """Writes a checkpoint anew in another layout, with its tokenizer and generation config.

    Everything is written beside the target and moved there when it is whole. Tensors keep their bytes and their division into
    shards; of a config the fields that mean something here are kept.

    Args:
        source: A folder, or a repository's id on the Hub, in any layout that carries the backbone.
        target: A folder that does not exist or is empty.
        layout: `mrp`, `sdar` (a backbone alone) or `heavyball` (with a head).

    Returns:
        The target.

    Raises:
        ValueError: if the target holds files, the layout is unknown, is the source's own, or cannot hold what the source holds,
            or the source has no config or tensors that do not fit it.
        OSError: if the source is no folder, and cannot be read as a repository.
    """
    target = Path(target)
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}: choose one of {', '.join(LAYOUTS)}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is not empty: name a new folder")
    stored_json(os.fspath(source))  # or says what is wrong with the source
    folder = Path(source)
    if not folder.is_dir():
        folder = Path(snapshot_download(os.fspath(source), allow_patterns=["*.safetensors", *(f"*{end}" for end in _COPIED)]))
    copied = [path for path in sorted(folder.iterdir()) if path.suffix in _COPIED or path.name.startswith("LICENSE")]
    check_links(folder, (path.name for path in copied))
    fields = json_object(folder / "config.json")
    config = MRPConfig.from_dict(dict(fields))
    own = "mrp" if fields.get("model_type", "sdar_mrp") == "sdar_mrp" else "heavyball" if config.has_head else "sdar"
    _check_possible(str(source), config, own, layout)
    files = weight_files(str(folder))
    MRPForCausalLM.check_tensors(config, stored_tensors(files))
    with written_beside(target) as beside:
        _write(copied, beside, files, config, layout)
    return target


def _check_possible(source: str, config: MRPConfig, own: str, layout: Layout) -> None:
    if config.family != DENSE:
        raise ValueError(
            f"{source} is of the family {config.family!r}, and these layouts are of {DENSE!r}: load it and save it whole with "
            "save_pretrained, which writes this package's layout"
        )
    if config.base_model_name_or_path is not None:
        raise ValueError(f"{source} is a head repository: load it and save it whole with save_pretrained, then convert that")
    if own == layout:
        raise ValueError(f"{source} is in the layout {layout!r} already: copy it, or choose another layout")
    if layout == "sdar" and config.has_head:
        raise ValueError(
            f"{source} has a head, and the layout 'sdar' has no place for one: use 'heavyball', or detach_head first"
        )
    if layout == "heavyball" and not config.has_head:
        raise ValueError(f"{source} has no head, and the layout 'heavyball' is for one: use 'sdar', or attach_head first")


def _write(copied: list[Path], beside: Path, files: list[Path], config: MRPConfig, layout: Layout) -> None:
    rename = our_name if layout == "mrp" else published_name
    for file in files:
        copy_renamed(file, beside / file.name, rename)
    for path in copied:
        shutil.copyfile(path, beside / path.name)
    if (index_path := beside / SAFE_WEIGHTS_INDEX_NAME).exists():
        index = json.loads(index_path.read_text())
        index["weight_map"] = {rename(name): shard for name, shard in index["weight_map"].items()}
        index_path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    if layout == "mrp":
        config.architectures, config.auto_map = ["MRPForCausalLM"], dict(AUTO_MAP)
        config.save_pretrained(beside)
        write_code(beside)
        return
    (beside / "config.json").write_text(json.dumps(published_fields(config), indent=2, sort_keys=True) + "\n")
    if (options_path := beside / "generation_config.json").exists():
        ours = {option.name for option in OPTIONS}
        options = {name: value for name, value in json_object(options_path).items() if name not in ours}
        options_path.write_text(json.dumps(options, indent=2, sort_keys=True) + "\n")


def copy_renamed(source: Path, target: Path, rename: Callable[[str], str]) -> None:
    """Copy a safetensors file and rename its tensors; their bytes stay."""
    with safe_open(source, "pt") as file:
        metadata = file.metadata()
    save_file({rename(name): tensor for name, tensor in load_file(source).items()}, target, metadata)
