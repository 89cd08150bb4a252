"""Checkpoints that the plugin serves: checkpoints of this package, either full models or heads
alone, and checkpoints in the published layout with a head."""

import os
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import Tensor
from transformers.generation import GenerationConfig

from modeling_mrp import MRPConfig
from modeling_mrp.headers import check_tensors, stored_tensors
from modeling_mrp.model.families.sdar import DENSE
from modeling_mrp.model.head import check_same_backbone
from modeling_mrp.model.layouts import HEAD, backbone_location, our_name, weight_files

ARCHITECTURES = ("MRPForCausalLM", "SDARMRPForCausalLM")


class Backbone(NamedTuple):
    """The backbone checkpoint that a head repository names.

    Attributes:
        location: A folder, or the id of a repository.
        revision: A commit, branch or tag of the repository; None for a folder.
    """

    location: str
    revision: str | None


class Checkpoint(NamedTuple):
    """The configs of a checkpoint that has been checked.

    Attributes:
        config: The `MRPConfig`. That of a head repository has the sizes of the backbone.
        defaults: The fields of the generation config; empty if there is none.
    """

    config: Any
    defaults: dict[str, Any]


@cache
def open_checkpoint(source: str, revision: str | None, weights: bool = True) -> Checkpoint:
    """Read the configs of a checkpoint. Check its stored tensors against its config before the
    engine loads any tensor. A later call with the same arguments reads nothing again.

    Args:
        source: A folder or a repository's id.
        revision: A commit, branch or tag.
        weights: Whether to check the tensors. Those of quantized checkpoints are never checked.

    Raises:
        ValueError: if the model is not supported; if a tensor is missing, is unexpected or has
            another shape; or if the head does not fit the backbone that its config names, or has
            another quantization config than this backbone.
        OSError: if a file cannot be read.
    """
    config: Any = MRPConfig.from_pretrained(source, revision=revision)
    if config.family != DENSE:
        raise ValueError(
            f"{source} is of the family {config.family!r}, and the plugin has the layers of "
            f"{DENSE!r} only: serve it with `mrp serve`"
        )
    backbone = named_backbone(config, source)
    if backbone is not None:
        of_backbone: Any = MRPConfig.from_pretrained(backbone.location, revision=backbone.revision)
        check_same_backbone(config, of_backbone, source)
        if getattr(of_backbone, "quantization_config", None) != getattr(
            config, "quantization_config", None
        ):
            raise ValueError(
                f"the backbone {backbone.location} that {source} names has another "
                f"quantization_config, and the engine reads that of {source} alone: copy the "
                "backbone's into its config.json"
            )
    if weights and getattr(config, "quantization_config", None) is None:
        _check_tensors(config, source, revision, backbone)
    try:
        defaults = GenerationConfig.from_pretrained(source, revision=revision).to_dict()
    except OSError:
        defaults = {}
    return Checkpoint(config, defaults)


def _check_tensors(
    config: Any, source: str, revision: str | None, backbone: Backbone | None
) -> None:
    tensors = stored_tensors(weight_files(source, revision=revision))
    if backbone is not None:
        check_tensors(config, tensors, HEAD)
        of_backbone = stored_tensors(weight_files(backbone.location, revision=backbone.revision))
        tensors |= {
            name: tensor for name, tensor in of_backbone.items() if not name.startswith(HEAD)
        }
    check_tensors(config, tensors)


def named_backbone(config: Any, source: str) -> Backbone | None:
    """Return the backbone that the config of `source` names; None if it names none, since the
    checkpoint contains its backbone.

    Raises:
        ValueError: if the name is neither a repository's id nor an allowed path.
    """
    if (name := getattr(config, "base_model_name_or_path", None)) is None:
        return None
    location = backbone_location(name, source)
    if os.path.isdir(location):
        return Backbone(location, None)
    return Backbone(location, config.base_model_revision)


def head_weight(name: str) -> str | None:
    """Return the name that a tensor of the checkpoint has within the head; None for a tensor of the
    backbone. `name` is the tensor's name in the checkpoint."""
    own_name = our_name(name)
    return own_name.removeprefix(HEAD) if own_name.startswith(HEAD) else None


def backbone_weights(config: Any, source: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of the backbone that the head repository `source` names; yield
    nothing if its config names no backbone."""
    if (backbone := named_backbone(config, source)) is None:
        return
    for file in weight_files(backbone.location, revision=backbone.revision):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  not a dict: it has no iterator
                if head_weight(name) is None:
                    yield name, tensors.get_tensor(name)
