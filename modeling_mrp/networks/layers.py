"""The choice of layers that run fused in a round, and the packing of their weights.

A fused Qwen3 layer is four matrix products, the round's attention, and five more launches
(`run_fused`). Matrix products with the same input become one product if `pack` has made their
weights adjacent. Otherwise each `nn.Linear` or its replacement (LoRA, quantised weights) is called.
If any module does more than its class, all layers are called as modules, under a dense mask.
"""

import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3MLP,
    Qwen3RMSNorm,
)

from ..kernels.dispatch import Dispatch
from ..kernels.round_layers import FusedLayer, Linear, Norm, Plans, Product, listed
from ..model.families.sdar import MRPBackbone
from ..model.head import MRPHead
from .inspection import decide

# The module whose hooks only record outputs that a model was asked for, such as hidden states.
_NOTES_ONLY = "transformers.utils.output_capturing"
_SILU: type[nn.Module] = type(ACT2FN["silu"])
_PACKING = threading.Lock()
# Packages with the classes that kernels replace.
_OWN_PACKAGES = ("torch.nn.", "transformers.", __name__.partition(".networks.")[0])


def plan_layers(
    model: Any, with_head: bool, dispatch: Dispatch, model_key: Hashable = None
) -> Plans | None:
    """Plan how `run_fused` computes the layers of the backbone and, if `with_head`, of the head,
    with few launches in place of calls of their modules.

    Args:
        model: The `MRPForCausalLM`.
        with_head: Whether the head takes part.
        dispatch: Decides between kernels and PyTorch.
        model_key: The model's `fingerprint`, or None. With a fingerprint, modules are examined only
            if it has changed since the last call.

    Returns:
        A dict from `model.model` and, if `with_head`, `model.mrp_head` to its plan. None if
        layers must be called as modules.

    Raises:
        ValueError: if layers must be called as modules, and `dispatch` forces kernels.
    """
    layers: dict[Any, list[Any]] = {
        model.model: list(model.model.layers)[: model.config.num_hidden_layers]
    }
    if with_head:
        layers[model.mrp_head] = list(model.mrp_head.layers)
    look = partial(_obstacle_of_layers, model, layers)
    obstacle = look() if model_key is None else decide(model, model_key, ("fused", with_head), look)
    pytorch_only = obstacle is None and dispatch.forced is False
    if not pytorch_only and not dispatch.allows(
        "the kernels of its layers", next(model.model.parameters()), obstacle=obstacle
    ):
        return None
    look_at_traits = partial(_traits, layers)
    if model_key is None:
        traits = look_at_traits()
    else:
        traits = decide(model, model_key, ("traits", with_head), look_at_traits)
    traits_of_layers = iter(traits)
    plans: Plans = {}
    for owner, network_layers in layers.items():
        planned = [_planned(layer, next(traits_of_layers)) for layer in network_layers]
        plans[owner] = (planned, _norm(owner.norm))
    return plans


@dataclass(frozen=True)
class _Traits:
    """How the modules of a decoder layer can be computed.

    Attributes:
        inputs_adjacent, gates_adjacent: Whether the weights of the linear layers that read the
            attention's input, or the MLP's, are adjacent in memory (`_linear_groups`).
        inputs_plain, gates_plain: Whether all of these linear layers are plain (`_plain`).
        o_proj_plain, down_proj_plain: Whether `o_proj` and `down_proj` are plain.
        is_silu: Whether the gate goes through a plain SiLU.
    """

    inputs_adjacent: bool
    gates_adjacent: bool
    inputs_plain: bool
    gates_plain: bool
    o_proj_plain: bool
    down_proj_plain: bool
    is_silu: bool


def _traits(layers: dict[Any, list[Any]]) -> list[_Traits]:
    """Examine all layers; return their traits in order."""
    found = []
    for network_layers in layers.values():
        for layer in network_layers:
            inputs, gates = _linear_groups(layer)
            found.append(
                _Traits(
                    inputs_adjacent=packed_weight(inputs) is not None,
                    gates_adjacent=packed_weight(gates) is not None,
                    inputs_plain=all(map(_plain, inputs)),
                    gates_plain=all(map(_plain, gates)),
                    o_proj_plain=_plain(layer.self_attn.o_proj),
                    down_proj_plain=_plain(layer.mlp.down_proj),
                    is_silu=deviation(layer.mlp.act_fn, _SILU) is None,
                )
            )
    return found


def _planned(layer: Any, traits: _Traits) -> FusedLayer:
    """Look up what `run_fused` needs of a decoder layer."""
    attention = layer.self_attn
    mlp = layer.mlp
    inputs, gates = _linear_groups(layer)
    return FusedLayer(
        index=attention.layer_idx,
        input_norm=_norm(layer.input_layernorm),
        mlp_norm=_norm(layer.post_attention_layernorm),
        query_norm=_norm(attention.q_norm),
        key_norm=_norm(attention.k_norm),
        scaling=attention.scaling,
        of_attention=_product(inputs, traits.inputs_adjacent, traits.inputs_plain),
        o_proj=_linear(attention.o_proj, traits.o_proj_plain),
        of_mlp=_product(gates, traits.gates_adjacent, traits.gates_plain),
        activation=mlp.act_fn,
        is_silu=traits.is_silu,
        down_proj=_linear(mlp.down_proj, traits.down_proj_plain),
    )


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight, norm.variance_epsilon)


def _linear(linear: Any, plain: bool) -> Linear:
    """Return a function that applies a linear layer: without a call of its module if it is
    `plain`."""
    return partial(F.linear, weight=linear.weight) if plain else linear


def _product(linears: Sequence[Any], adjacent: bool, plain: bool) -> Product:
    """Make a function that applies several linear layers to one input [..., in_features].

    Args:
        linears: The layers.
        adjacent: Whether their weights are adjacent in memory. If so, the function returns one
            tensor [..., sum of out_features] with their outputs side by side. If not, it returns a
            list of their outputs.
        plain: Whether the layers are plain linear layers, without bias.
    """
    if adjacent:
        return partial(F.linear, weight=_joined_weight(linears))
    return listed([_linear(linear, plain) for linear in linears])


def _obstacle_of_layers(model: Any, layers: dict[Any, list[Any]]) -> str | None:
    """Explain why layers cannot run fused and must be called as modules, with the remedy; return
    None if they can run fused. `layers` maps the backbone, and the head if it takes part, to its
    layers."""
    if (attention := model.config._attn_implementation) != "sdpa":
        return f"the model attends by {attention!r}: use attn_implementation='sdpa'"
    if any(module._compiled_call_impl is not None for module in model.modules()):
        return "the model has parts that were compiled: leave it uncompiled"
    for module, kind in _replaced_modules(model, layers):
        reason = deviation(module, kind)
        if reason is not None:
            return reason
    return None


def deviation(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Describe how a module deviates from the class `kind`, with the remedy. Return None if it does
    not deviate. Global hooks do not count."""
    module_class = type(module)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for hook in hooks.values():
            if getattr(hook, "__module__", None) != _NOTES_ONLY:
                return f"a {module_class.__name__} carries hooks: remove them"
    if (
        "forward" in module.__dict__
        or module_class.forward is not kind.forward
        or not issubclass(module_class, kind)
    ):
        return f"a {module_class.__name__} is wrapped or no {kind.__name__}: use plain modules"
    # Other packages may have replaced the class or its methods by their own (Liger does).
    if not module_class.forward.__module__.startswith(_OWN_PACKAGES):
        return (
            f"the forward of a {module_class.__name__} was replaced by one of "
            f"{module_class.forward.__module__}: leave it as it was"
        )
    return None


def _replaced_modules(
    model: Any, layers: dict[Any, list[Any]]
) -> Iterator[tuple[Any, type[nn.Module]]]:
    """Yield the modules that fused layers replace, each with its expected class. A module comes
    before the modules in it, because a module of an unexpected class may lack them."""
    yield model.model, MRPBackbone
    if model.mrp_head in layers:
        yield model.mrp_head, MRPHead
    for owner, network_layers in layers.items():
        yield owner.norm, Qwen3RMSNorm
        for layer in network_layers:
            yield layer, Qwen3DecoderLayer
            yield layer.self_attn, Qwen3Attention
            yield layer.mlp, Qwen3MLP
            for norm in (
                layer.input_layernorm,
                layer.post_attention_layernorm,
                layer.self_attn.q_norm,
                layer.self_attn.k_norm,
            ):
                yield norm, Qwen3RMSNorm


def _linear_groups(layer: Any) -> tuple[list[Any], list[Any]]:
    """Group those linear layers of a decoder layer that share an input: the projections to queries,
    keys and values, and the gate and up projections of the MLP."""
    attention = layer.self_attn
    mlp = layer.mlp
    return [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]


@torch.inference_mode(False)
@torch.no_grad()
def pack(model: nn.Module) -> bool:
    """Make the weights of linear layers that share an input adjacent in memory. Return whether any
    weights were moved.

    The parameters stay the same objects, but become parts of a larger storage, so nothing is held
    twice. A group of layers is left as it is if one of them is more than a plain `nn.Linear`
    (adapters, quantised weights, hooks), or if they lie on different devices.
    """
    packed = None
    with _PACKING:
        for layer in model.modules():
            if not isinstance(layer, Qwen3DecoderLayer):
                continue
            for linears in _linear_groups(layer):
                weights = [linear.weight.data for linear in linears if _plain(linear)]
                if (
                    len(weights) == len(linears)
                    and packed_weight(linears) is None
                    and len({weight.device for weight in weights}) == 1
                ):
                    packed = torch.cat(weights)
                    for linear, view in zip(
                        linears, packed.split(list(map(len, weights))), strict=True
                    ):
                        linear.weight.data = view
    if packed is not None and packed.is_cuda:
        torch.cuda.empty_cache()  # where the weights lay, in pieces that little else fits
    return packed is not None


def packed_weight(linears: Sequence[Any]) -> Tensor | None:
    """Return a view of the weights of linear layers as one matrix [sum of out_features,
    in_features]. Return None if the weights are not adjacent in memory, or if one of `linears` is
    more than a plain `nn.Linear` without bias."""
    if not all(map(_plain, linears)):
        return None
    first = linears[0].weight
    storage = first.untyped_storage().data_ptr()
    address = first.data_ptr()
    for linear in linears:
        if (
            linear.weight.data_ptr() != address
            or linear.weight.untyped_storage().data_ptr() != storage
        ):
            return None
        address += linear.weight.nbytes
    return _joined_weight(linears)


def _joined_weight(linears: Sequence[Any]) -> Tensor:
    """Return a view of adjacent weights as one matrix."""
    first = linears[0].weight
    rows = sum(len(linear.weight) for linear in linears)
    view: Tensor = first.as_strided((rows, first.shape[1]), first.stride())
    return view


def _plain(linear: Any) -> bool:
    """Return whether a module is a plain linear layer, without bias and with a contiguous
    weight."""
    return (
        type(linear) is nn.Linear
        and linear.bias is None
        and type(linear.weight) is nn.Parameter
        and linear.weight.is_contiguous()
        and not linear.weight.is_meta
        and deviation(linear, nn.Linear) is None
    )
