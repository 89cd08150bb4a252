"""The layers of a model in a round: fused or, where a module does more than its class, called under a dense mask.

Fused, a Qwen3 layer is four matrix products, the round's attention, and five launches more (`kernels/round_layers.py` and the
MLP's gate). Products with the same input are one where `pack` has put their weights together; else each `nn.Linear`, or what
stands there (LoRA, quantised weights), is called.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm

from ..kernels.dispatch import Dispatch
from ..kernels.round_layers import ROTATED, ROUND_ATTENTION, SUM_AND_NORM, RoundMask
from ..model.families.sdar import MRPBackbone

# Whose hooks only note what a model was asked to hand out: hidden states of its own forward.
_NOTES_ONLY = "transformers.utils.output_capturing"
# Where the classes are defined that kernels stand for.
_OWN = ("torch.nn.", "transformers.", __name__.partition(".networks.")[0])

# By owner, the backbone or the head, each of its layers with the packed weights of its attention and of its MLP.
Plans = dict[Any, list[tuple[Any, Tensor | None, Tensor | None]]]


def plan_layers(model: Any, with_head: bool, dispatch: Dispatch) -> Plans | None:
    """Plan the fused layers of a decode: backbone's, and head's if it takes part; None: some are to be called as modules.

    Raises:
        ValueError: if kernels are forced and cannot be used here.
    """
    layers: dict[Any, list[Any]] = {model.model: list(model.model.layers)[: model.config.num_hidden_layers]}
    if with_head:
        layers[model.mrp_head] = list(model.mrp_head.layers)
    obstacle = _obstacle_to_fusing(model, layers)
    if dispatch.forced is not False:
        usable = dispatch.allows("the kernels of its layers", next(model.model.parameters()), obstacle=obstacle)
    else:
        usable = obstacle is None  # by the twins
    if not usable:
        return None
    return {
        owner: [(layer, packed_weight(_of_attention(layer)), packed_weight(_of_mlp(layer))) for layer in each]
        for owner, each in layers.items()
    }


def _obstacle_to_fusing(model: Any, layers: dict[Any, list[Any]]) -> str | None:
    """Say why the layers of a model have to be called as modules, with the remedy; None if they can be fused."""
    if (chosen := model.config._attn_implementation) != "sdpa":
        return f"the model attends by {chosen!r}: use attn_implementation='sdpa'"
    if any(part._compiled_call_impl is not None for part in model.modules()):
        return "the model has parts that were compiled: leave it uncompiled"
    found = (deviation(module, kind) for module, kind in _parts(model, layers))
    return next((one for one in found if one is not None), None)


def deviation(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Find what a module does beyond its class `kind` (of torch, transformers or this package), which no kernel reproduces.

    Global hooks (`torch.nn.modules.module.register_module_forward_hook`) are not looked for.

    Returns:
        What is in the way, and the remedy; None if calling the module does only what the class does.
    """
    found = type(module)
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        if hooks and any(getattr(hook, "__module__", None) != _NOTES_ONLY for hook in hooks.values()):
            return f"a {found.__name__} carries hooks: remove them"
    if "forward" in module.__dict__ or found.forward is not kind.forward or not issubclass(found, kind):
        return f"a {found.__name__} is wrapped or no {kind.__name__}: use plain modules"
    # Others may have put classes or methods of their own in these places (Liger does).
    if not found.forward.__module__.startswith(_OWN):
        return f"the forward of a {found.__name__} was replaced by one of {found.forward.__module__}: leave it as it was"
    return None


def _parts(model: Any, layers: dict[Any, list[Any]]) -> Iterator[tuple[Any, type[nn.Module]]]:
    """Iterate over the modules that fused layers replace, each with its expected class.

    A module of another class need not have the parts that come after it.
    """
    yield model.model, MRPBackbone
    for owner, each in layers.items():
        yield owner.norm, Qwen3RMSNorm
        for layer in each:
            yield layer, Qwen3DecoderLayer
            yield layer.self_attn, Qwen3Attention
            yield layer.mlp, Qwen3MLP
            for norm in (layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn.q_norm, layer.self_attn.k_norm):
                yield norm, Qwen3RMSNorm


def run_fused(owner: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: RoundMask, cache: Any) -> Tensor:
    """Run the layers of a backbone or a head, and the norm behind them, in a round.

    Args:
        owner: The module that has them.
        hidden: [rows, tokens, hidden_size], what the first layer reads.
        rotary: cos and sin, [rows, tokens, head_dim] each.
        mask: Its `plans` hold the layers.
        cache: The `BlockCache` that gets keys and values, at its target.

    Returns:
        [rows, tokens, hidden_size].

    Raises:
        RuntimeError: if a forced kernel fails.
    """
    run, added = mask.dispatch.run, None
    for layer, attention_weight, mlp_weight in mask.plans[owner]:
        hidden, normed = run(SUM_AND_NORM, hidden, added, layer.input_layernorm)
        attention, linears = layer.self_attn, _of_attention(layer)
        place, norms = attention.layer_idx, (attention.q_norm, attention.k_norm)
        query, *_ = run(ROTATED, products(normed, linears, attention_weight), norms, rotary, cache.written[place])
        attended = run(ROUND_ATTENTION, query, *cache.read[place], mask, attention.scaling)
        hidden, normed = run(SUM_AND_NORM, hidden, attention.o_proj(attended.flatten(2)), layer.post_attention_layernorm)
        both = products(normed, _of_mlp(layer), mlp_weight)
        gate, up = both.chunk(2, -1) if isinstance(both, Tensor) else both
        added = layer.mlp.down_proj(layer.mlp.act_fn(gate) * up)
    _, last = run(SUM_AND_NORM, hidden, added, owner.norm)
    return last


def _of_attention(layer: Any) -> list[Any]:
    return [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]


def _of_mlp(layer: Any) -> list[Any]:
    return [layer.mlp.gate_proj, layer.mlp.up_proj]


@torch.inference_mode(False)
@torch.no_grad()
def pack(model: nn.Module) -> None:
    """Lay weights that are multiplied with the same input behind one another in memory, for `products`.

    They stay the parameters that they are, now parts of a larger storage: nothing is held twice, and what is loaded, saved,
    trained or cast goes on as before. Left as they are: layers that are more than a plain `nn.Linear` (adapters, quantised
    weights, hooks), or that lie elsewhere than their neighbours.
    """
    moved = None
    for layer in model.modules():
        if not isinstance(layer, Qwen3DecoderLayer):
            continue
        for linears in (_of_attention(layer), _of_mlp(layer)):
            weights = [linear.weight.data for linear in linears if _plain(linear)]
            if len(weights) == len(linears) and packed_weight(linears) is None and len({w.device for w in weights}) == 1:
                moved = torch.cat(weights)
                for linear, part in zip(linears, moved.split([len(w) for w in weights]), strict=True):
                    linear.weight.data = part
    if moved is not None and moved.is_cuda:
        torch.cuda.empty_cache()  # where the weights lay, in pieces that little else fits


def packed_weight(linears: Sequence[Any]) -> Tensor | None:
    """View linear layers' weights as one matrix [sum of out_features, in_features]; None if they are not adjacent."""
    if not all(map(_plain, linears)):
        return None
    first = linears[0].weight
    storage, place = first.untyped_storage().data_ptr(), first.data_ptr()
    for linear in linears:
        if linear.weight.data_ptr() != place or linear.weight.untyped_storage().data_ptr() != storage:
            return None
        place += linear.weight.nbytes
    return first.as_strided((sum(len(linear.weight) for linear in linears), first.shape[1]), first.stride())


def _plain(linear: Any) -> bool:
    """Tell if a module is a plain linear layer: no bias, no hooks or subclass, and a contiguous weight."""
    return (
        type(linear) is nn.Linear
        and linear.bias is None
        and type(linear.weight) is nn.Parameter
        and linear.weight.is_contiguous()
        and not linear.weight.is_meta
        and deviation(linear, nn.Linear) is None
    )


def products(hidden: Tensor, linears: Sequence[Any], weight: Tensor | None) -> Tensor | list[Tensor]:
    """Apply linear layers to one input: a list of results, [..., out_features] each.

    With their packed weight it is one product, and the results lie side by side in one tensor.
    """
    return [linear(hidden) for linear in linears] if weight is None else F.linear(hidden, weight)
