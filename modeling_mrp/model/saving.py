"""Writing of MRP models: heads on their own, and everything beside what is there before it is replaced."""

import copy
import inspect
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from .configuration import MRPConfig
from .custom_generate import generate
from .families.registry import DENSE
from .head import MRPHead
from .layouts import HEAD, StoredTensor, stored_tensors, weight_files

CONFIGURATION, MODELING = "configuration_mrp.py", "modeling_mrp.py"
CUSTOM_GENERATE = "custom_generate/generate.py"
AUTO_MAP = {
    "AutoConfig": "configuration_mrp.MRPConfig",
    "AutoModel": "modeling_mrp.MRPForCausalLM",
    "AutoModelForCausalLM": "modeling_mrp.MRPForCausalLM",
}
_WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


class BackboneSource(NamedTuple):
    """The origin of a model's backbone: a repository's id and commit, or a folder's absolute path and None."""

    name: str
    revision: str | None


def head_to_save(
    model: Any, state_dict: dict[str, Tensor] | None, named: BackboneSource | None
) -> tuple[dict[str, Tensor], MRPConfig]:
    """Select the tensors and the config of a head repository, whose backbone is the `named` or else the loaded one.

    Raises:
        ValueError: if the model has no head, its backbone no name or, as loaded, other weights; or the head not just its own
            tensors.
    """
    backbone = named or model.backbone_source
    if model.mrp_head is None or backbone is None:
        raise ValueError(
            "head_only=True needs a head, and a checkpoint that it can name as its backbone: the model has "
            f"{'no MRP head' if model.mrp_head is None else 'one, and was not loaded from any'}. Give it one with attach_head, "
            "pass base_model_name_or_path (and base_model_revision), or save it whole"
        )
    state = model.state_dict() if state_dict is None else state_dict
    head = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items() if name.startswith(HEAD)}
    with torch.device("meta"):
        own = {HEAD + name for name in MRPHead(model.config).state_dict()}
    if others := (head.keys() ^ own) | {name for name, tensor in head.items() if type(tensor) is not Tensor}:
        raise ValueError(
            f"the head holds other tensors than its own, or lacks some: {sorted(others)[:4]}, ... Merge adapters first "
            "(merge_and_unload), or save them with peft; save a quantized head with the whole model, or quantize the rest only"
        )
    if named is None:
        _check_unchanged(state, backbone)
    config = copy.deepcopy(model.config)
    drafted = {"proposal_type": "greedy", "speculative_tokens": max(config.block_size - 1, 1)}  # of a block but its next one
    config.speculators_model_type = "mrp"
    config.speculators_config = {  # in the words of vLLM's library speculators, for its tools
        "algorithm": "mrp",
        "default_proposal_method": "greedy",
        "proposal_methods": [{**drafted, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
        "verifier": {"name_or_path": backbone.name, "architectures": config.architectures or [type(model).__name__]},
    }
    config.auto_map, config.architectures = dict(AUTO_MAP), [type(model).__name__]
    config.dtype = next(tensor.dtype for tensor in head.values() if tensor.is_floating_point())
    config.base_model_name_or_path, config.base_model_revision = backbone
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the backbone's
    return head, config


def _check_unchanged(state: Mapping[str, Tensor], backbone: BackboneSource) -> None:
    """Refuse to name a checkpoint as the backbone that has other weights, such as those before an adapter was merged.

    The first row of every tensor is compared, to the rounding of the 16-bit types. A checkpoint that is no longer here passes.
    """
    try:
        files = stored_tensors(weight_files(backbone.name, revision=backbone.revision, local_files_only=True))
    except (OSError, ValueError):
        files = {}
    for name, value in state.items():
        if not name.startswith(HEAD) and (".lora_" in name or (name in files and _differ(value, files[name]))):
            raise ValueError(
                f"the head's backbone is no longer {backbone.name}: {name} is not of it. If an adapter was merged into it, "
                "publish it as it is now and name that (base_model_name_or_path), or save the model whole"
            )


def _differ(value: Tensor, stored: StoredTensor) -> bool:
    """Compare first rows; what is spread over devices, or quantized, cannot be compared."""
    plain = type(value) in (Tensor, nn.Parameter) and value.is_floating_point() and not value.is_meta
    if not plain or tuple(value.shape) != stored.shape or not value.numel():
        return False
    with safe_open(stored.file, framework="pt") as tensors:
        row = tensors.get_slice(stored.name)[:1]
    return not torch.allclose(value[:1].detach().cpu().double(), row.double(), rtol=2**-7, atol=1e-7, equal_nan=True)


def model_tags(family: str) -> list[str]:
    """List the tags of a model's repository, by its family."""
    return ["dllm", "diffusion-lm", "block-diffusion", "speculative-decoding", family, "mrp"]


def code_files(family: str = DENSE) -> dict[str, str]:
    """Collect the remote code that a repository carries, by path: these files, if they are it, or what `bundle` generates for a
    model of that family."""
    own = Path(__file__)
    if own.name == MODELING:
        files = {name: own.with_name(name).read_text(encoding="utf-8") for name in (CONFIGURATION, MODELING)}
    else:
        files = import_module(f"{__name__.partition('.')[0]}.bundle").files(family)
    return {**files, CUSTOM_GENERATE: f"from typing import Any\n\n\n{inspect.getsource(generate)}"}


def write_code(folder: Path, family: str = DENSE) -> None:
    """Put the remote code beside a checkpoint of that family."""
    for name, text in code_files(family).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


@contextmanager
def written_beside(folder: Path) -> Iterator[Path]:
    """Lend a temporary folder whose files move into `folder` when all are written; weights of another split are removed."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as beside:
            yield Path(beside)
            files = [path for path in Path(beside).rglob("*") if path.is_file()]
            for path in sorted(files, key=lambda path: path.suffix == ".json"):
                target = folder / path.relative_to(beside)
                target.parent.mkdir(exist_ok=True)
                os.replace(path, target)
        names = {path.name for path in files}
        if any(map(_WEIGHT_FILES.fullmatch, names)):
            for path in folder.iterdir():
                if _WEIGHT_FILES.fullmatch(path.name) and path.name not in names:
                    path.unlink()
    except BaseException:
        if made and not any(folder.iterdir()):
            folder.rmdir()
        raise
