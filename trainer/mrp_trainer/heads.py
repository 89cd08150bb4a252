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
    """Give a model a new head, which replaces its head if it has one, and return the model;
    arguments and errors as in `new_head`."""
    model.attach_head(new_head(model, layers, how))
    return model


@torch.no_grad()
def new_head(model: Any, layers: int = 3, how: str | None = None) -> MRPHead:
    """Make a head for a model's backbone, on its device and in its dtype; torch's generator draws
    the random part.

    Args:
        model: The model.
        layers: Decoder layers of the head (published: 3).
        how: `identity`: matrices are drawn from a normal distribution with the backbone's std, and
            the last norm has weight zero, so that the head adds nothing. `backbone`: the layers are
            copies of the backbone's last layers, they read the hidden states h_A through an
            identity, and the last norm is the same. `published`: as in the published recipe, with
            std 0.2 and norms one; such a head adds noise until it is trained. None: `backbone`, or
            `identity` if the backbone's layers cannot be copied.

    Raises:
        ValueError: if `layers` is not a positive int, `how` is something else, or `backbone` cannot
            copy its layers: too few, offloaded, quantized, or of another kind than a head's.
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
    if how in (None, "backbone"):
        sources = list(model.model.layers)
        problem = _copying_problem(head, sources)
        if problem is None:
            _copy_last_layers(head, sources)
        elif how is not None:
            raise ValueError(f"head_init is 'backbone', but {problem}")
    return head


def _copying_problem(head: MRPHead, layers: list[nn.Module]) -> str | None:
    """Explain why a head cannot have copies of a backbone's last layers, with the remedy; None if
    it can."""
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
    """Copy a backbone's last layers into a head, and make the head read h_A through an identity."""
    hidden = head.eh_proj.out_features
    head.eh_proj.weight.zero_()
    head.eh_proj.weight[:, hidden:].fill_diagonal_(1.0)
    for layer, source in zip(head.layers, layers[-len(head.layers) :], strict=True):
        layer.load_state_dict(source.state_dict())
