"""New heads for models, and their initialization."""

import copy
from typing import Any, get_args

import torch
from torch import nn

from modeling_mrp.model.head import MRPHead
from modeling_mrp.model.loading import device_of

from .train.options import HeadInit

NEW_HEADS = get_args(HeadInit)
_PUBLISHED_STD = 0.2  # in the published recipe


def with_new_head(model: Any, layers: int = 3, how: str | None = None) -> Any:
    """Attach a new head to a model, in place of its head if it has one, and return the model.

    Args:
        model: The model, which is changed.
        layers: Number of decoder layers in the head.
        how: How the head is initialized: `identity`, `backbone`, `cancel` or `published`, as
            `new_head` explains. None selects `backbone`, or `identity` if the backbone's layers
            cannot be copied.

    Raises:
        ValueError: if `layers` is not a positive int, if `how` is none of these, or if it is
            `backbone` and the backbone's layers cannot be copied.
    """
    model.attach_head(new_head(model, layers, how))
    return model


@torch.no_grad()
def new_head(model: Any, layers: int = 3, how: str | None = None) -> MRPHead:
    """Make a new head for a model's backbone, on the device and in the dtype of its `lm_head`.
    Random weights are drawn from torch's global generator.

    Args:
        model: The model.
        layers: Number of decoder layers in the head. Published heads have 3.
        how: How the head is initialized; None selects `backbone`, or `identity` if the backbone's
            layers cannot be copied. Below, h_A are the backbone's final hidden states, to which the
            head adds its output.
            `identity`: matrices are drawn from a normal distribution with the backbone's standard
            deviation, and the weight of the head's last norm is zero. So the head adds nothing.
            `backbone`: the layers are copies of the backbone's last layers, and the input
            projection passes on the normed h_A unchanged. The weight of the head's last norm is
            zero here, too.
            `cancel`: matrices as under `identity`, but the output is about -h_A, so that at first
            the estimate is no token in particular. This is for backbones whose logits before a
            reveal say nothing of those after it.
            `published`: matrices are drawn with a standard deviation of 0.2, and the weights of all
            norms are 1, as in the published recipe. Such a head adds noise until it is trained.

    Raises:
        ValueError: if `layers` is not a positive int, if `how` is none of these, or if it is
            `backbone` and the backbone's layers cannot be copied: there are fewer than `layers`,
            they are offloaded or quantized, or their type differs from that of a head's layers.
    """
    if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
        raise ValueError(f"head_layers is {layers!r}: a head has 1 layer or more (3 are published)")
    if how not in (None, *NEW_HEADS):
        raise ValueError(f"head_init is {how!r}: choose one of {', '.join(NEW_HEADS)}")
    config = copy.deepcopy(model.config)
    config.num_nextn_predict_layers = layers
    with torch.device(device_of(model.lm_head)):
        head = MRPHead(config).to(model.lm_head.weight.dtype)
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(
                module.weight,
                std=_PUBLISHED_STD if how == "published" else config.initializer_range,
            )
    if how == "published":
        nn.init.ones_(head.norm.weight)
    if how == "cancel":
        _cancel_hidden_states(head, model.model.norm.weight)
    if how in (None, "backbone"):
        sources = list(model.model.layers)
        problem = _copying_problem(head, sources)
        if problem is None:
            _copy_last_layers(head, sources)
        elif how is not None:
            raise ValueError(f"head_init is 'backbone', but {problem}")
    return head


def _copying_problem(head: MRPHead, layers: list[nn.Module]) -> str | None:
    """Explain why the last of a backbone's `layers` cannot be copied into a head, and name the
    remedy; return None if they can."""
    depth = len(head.layers)
    if depth > len(layers):
        return f"the head has {depth} layers and the backbone {len(layers)}: use fewer head_layers"
    source = layers[-1]
    if type(source) is not type(head.layers[0]):
        return (
            f"the backbone's layers are {type(source).__name__}s and a head's "
            f"{type(head.layers[0]).__name__}s: use 'identity'"
        )
    for layer in layers[-depth:]:
        for weight in layer.parameters():
            if type(weight) is not nn.Parameter or weight.is_meta:
                return (
                    "its last layers are offloaded or quantized: load them into memory as they "
                    "are, or use 'identity'"
                )
    return None


def _copy_last_layers(head: MRPHead, layers: list[nn.Module]) -> None:
    """Copy the last of a backbone's `layers` into a head, and set the head's input projection so
    that it passes on the normed hidden states h_A unchanged and ignores the embeddings."""
    hidden = head.eh_proj.out_features
    head.eh_proj.weight.zero_()
    head.eh_proj.weight[:, hidden:].fill_diagonal_(1.0)
    for layer, source in zip(head.layers, layers[-len(head.layers) :], strict=True):
        layer.load_state_dict(source.state_dict())


def _cancel_hidden_states(head: MRPHead, norm_weight: torch.Tensor) -> None:
    """Make a head pass on the normed hidden states h_A with the opposite sign, in about the size
    that h_A has after the backbone's last norm, whose weight is `norm_weight`."""
    hidden = head.eh_proj.out_features
    head.eh_proj.weight[:, hidden:] -= torch.eye(hidden).to(head.eh_proj.weight)
    head.norm.weight.fill_(norm_weight.float().square().mean().sqrt().item())
