"""Checks that a checkpoint's tensors fit its config. They read only the headers of its files,
before the checkpoint is published or served."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from .model.configuration import MRPConfig
from .model.layouts import check_depth, our_name
from .modeling import MRPForCausalLM


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file.

    Attributes:
        file: The file.
        shape: The shape of the tensor.
        dtype: The type of its numbers, as safetensors spells it (`BF16`).
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Read the headers of safetensors files. Return the stored tensors by their names in this
    package. Raise `ValueError` for a damaged file."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  not a dict: it has no iterator
                    tensor = tensors.get_slice(name)
                    stored[our_name(name)] = StoredTensor(
                        file, tuple(tensor.get_shape()), str(tensor.get_dtype())
                    )
        except SafetensorError as error:
            raise ValueError(
                f"{file} is not a whole safetensors file: download it again ({error})"
            ) from error
    return stored


def check_tensors(config: MRPConfig, stored: Mapping[str, StoredTensor], prefix: str = "") -> None:
    """Check that a checkpoint has the tensors that its config implies, with the right shapes.

    Args:
        config: The config.
        stored: The checkpoint's tensors, by name.
        prefix: Only tensors whose names begin with this are implied: for a checkpoint of a head
            alone, the prefix of the head's tensors.

    Raises:
        ValueError: if there are differences; it lists all tensors that are missing, unexpected or
            of a wrong shape. Before that, it is raised if the config asks for more layers than
            `stored` has. If embeddings are tied, `lm_head.weight` may be missing.
    """
    check_depth(config, stored, "the checkpoint")
    with torch.device("meta"):
        state: Any = MRPForCausalLM(config).state_dict().items()
    expected = {name: tuple(tensor.shape) for name, tensor in state if name.startswith(prefix)}
    missing = expected.keys() - stored.keys()
    if config.tie_word_embeddings:
        missing -= {"lm_head.weight"}
    misfits = []
    for name in sorted(missing):
        misfits.append(f"missing: {name}")
    for name in sorted(stored.keys() - expected.keys()):
        misfits.append(f"unexpected: {name}")
    for name, tensor in stored.items():
        if tensor.shape != expected.get(name, tensor.shape):
            misfits.append(
                f"wrong shape: {name} is {list(tensor.shape)}, needs {list(expected[name])}"
            )
    if misfits:
        raise ValueError(
            f"the checkpoint does not fit its config ({len(misfits)} tensors):\n  "
            + "\n  ".join(misfits)
            + "\nCheck num_nextn_predict_layers (0: no head), the sizes in config.json, and that "
            "the download is whole"
        )
