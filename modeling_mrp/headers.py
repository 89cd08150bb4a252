"""Comparison of checkpoints with their configs by the headers of their files, before anything is pushed or served."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from .model.configuration import MRPConfig
from .model.layouts import our_name
from .modeling import MRPForCausalLM


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file: its shape, and its type as safetensors spells it (`BF16`)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """List the tensors of safetensors files by our names; `ValueError` for a file that is damaged or cut short."""
    found: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  not a dict: it has no iterator
                    part = tensors.get_slice(name)
                    found[our_name(name)] = StoredTensor(file, tuple(part.get_shape()), str(part.get_dtype()))
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file: download it again ({error})") from error
    return found


def check_tensors(config: MRPConfig, found: Mapping[str, StoredTensor], prefix: str = "") -> None:
    """Raise `ValueError` with all differences unless the tensors found, by our names, are a config's under a prefix."""
    with torch.device("meta"):
        state: Any = MRPForCausalLM(config).state_dict().items()
    needed = {name: tuple(tensor.shape) for name, tensor in state if name.startswith(prefix)}
    missing = needed.keys() - found.keys() - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    misfits = [f"missing: {name}" for name in sorted(missing)]
    misfits += [f"unexpected: {name}" for name in sorted(found.keys() - needed.keys())]
    for name, tensor in found.items():
        if tensor.shape != needed.get(name, tensor.shape):
            misfits.append(f"wrong shape: {name} is {list(tensor.shape)}, needs {list(needed[name])}")
    if misfits:
        raise ValueError(
            f"the checkpoint does not fit its config ({len(misfits)} tensors):\n  " + "\n  ".join(misfits) + "\n"
            "Check num_nextn_predict_layers (0: no head), the sizes in config.json, and that the download is whole"
        )
