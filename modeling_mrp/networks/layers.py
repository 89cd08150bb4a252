"""The layers of a model in a round: fused, or called as modules whose attention takes a `RoundMask`.

Fused, a Qwen3 layer is four matrix products, the round's attention, and five launches more (`kernels/fused_layers.py` and the
MLP's gate). Products with the same input are one where `pack` has put their weights together; else each `nn.Linear`, or what
stands there (LoRA, quantised weights), is called.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm

from ..kernels.dispatch import Dispatch
from ..kernels.fused_layers import ROTATED, SUM_AND_NORM
from ..kernels.round_attention import RoundMask, attend
from .cache import BlockCache

# Whose hooks only note what a model was asked to hand out: hidden states of its own forward.
_NOTES_ONLY = "transformers.utils.output_capturing"
# Where the classes are defined that kernels stand for.
_OWN = ("torch.nn.", "transformers.", __name__.partition(".networks.")[0])
# The value of `config._attn_implementation` during a decode under `RoundMask`s, in place of `sdpa` (`round_attention_of`). Each
# copy of this file (remote code of two repositories in one process) has masks of its own class, so also a name of its own.
IN_ROUNDS = f"{__name__}.round_attention"
REPLACED = "sdpa"  # the implementation that it stands in for

_inside: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
_inside_lock = threading.Lock()


def takes_round_masks(model: Any, dispatch: Dispatch) -> bool:
    """Tell if the layers of a model are to be given a `RoundMask` in rounds: an attention that was chosen in place of SDPA
    stays, and what was compiled is called as it is.

    Raises:
        ValueError: if kernels are forced all the same.
    """
    chosen = model.config._attn_implementation
    if chosen not in (REPLACED, IN_ROUNDS):
        why = f"attends by {chosen!r}, whose place the kernel does not take: use attn_implementation={REPLACED!r}"
    elif any(part._compiled_call_impl is not None for part in model.modules()):
        why = "has parts that were compiled, which are left whole: leave it uncompiled"
    else:
        return True
    if dispatch.forced:
        raise ValueError(f"kernels is True, but the model {why}, or kernels=None or kernels=False")
    return False


@contextmanager
def round_attention_of(model: Any) -> Iterator[None]:
    """Put into the model's config the name of an attention that accepts a `RoundMask`, and the old name back at the end.

    Layers look their attention up by the name in the config that they all share, so there is no way around a name of
    our own there. What it names computes SDPA as before for everything but a `RoundMask`, so that other threads that
    use the model meanwhile, also without kernels, notice nothing; the last one to leave puts the name back.
    """
    with _inside_lock:
        AttentionInterface.register(IN_ROUNDS, _attention)
        _inside[model] = _inside.get(model, 0) + 1
        model.config._attn_implementation = IN_ROUNDS
    try:
        yield
    finally:
        with _inside_lock:
            _inside[model] -= 1
            if not _inside[model]:
                model.config._attn_implementation = REPLACED


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend as transformers' layers ask for it."""
    if isinstance(attention_mask, RoundMask):
        return attend(query, key, value, attention_mask, kwargs["scaling"]), None
    return ALL_ATTENTION_FUNCTIONS[REPLACED](module, query, key, value, attention_mask, **kwargs)


def fused_forward(
    owner: Any, layers: Sequence[Any], mask: object, cache: object, kind: type[nn.Module] | None = None
) -> Callable[[Tensor, tuple[Tensor, Tensor]], Tensor] | None:
    """Find what stands in a round for calling layers and the norm behind them; None: they are to be called.

    They are called outside of rounds, and where a module does more than its class does, hooks for instance. What was found
    counts for as long as the mask's `plans` do: for a decode.

    Args:
        owner, layers: The module of the norm, `norm`, and its decoder layers.
        mask: In a round a `RoundMask`, whose dispatch decides between kernels and their twins.
        cache: In a round the `BlockCache` that gets keys and values, at its target.
        kind: What the owner has to be if it is not called either; None: this is asked for by its own forward.

    Returns:
        A function of what the first layer reads, [rows, tokens, hidden_size], and of cos and sin, [rows, tokens, head_dim]
        each; it gives [rows, tokens, hidden_size], and raises a RuntimeError if a forced kernel fails.

    Raises:
        ValueError: if kernels are forced and cannot be used here.
    """
    if not isinstance(mask, RoundMask) or not isinstance(cache, BlockCache):
        return None
    if owner not in mask.plans:
        mask.plans[owner] = _plan(owner, layers, mask.dispatch, kind)
    plan = mask.plans[owner]
    return None if plan is None else partial(_walk, plan, owner.norm, mask, cache)


def _plan(owner: Any, layers: Sequence[Any], dispatch: Dispatch, kind: type[nn.Module] | None) -> list[Any] | None:
    """Pair each layer with its packed weights (see `packed_weight`); None if the layers have to run as modules."""
    found = (deviation(module, expected) for module, expected in _parts(owner, layers, kind))
    obstacle = next((one for one in found if one is not None), None)
    if dispatch.forced is False:
        usable = obstacle is None  # by the twins
    else:
        usable = dispatch.allows("the kernel 'fused_layers'", next(owner.parameters()), obstacle=obstacle)
    return [(layer, packed_weight(_of_attention(layer)), packed_weight(_of_mlp(layer))) for layer in layers] if usable else None


def deviation(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Find what a module does beside its class, `kind`, of torch, transformers or this package: no kernel stands for that.

    Hooks of all modules (`torch.nn.modules.module.register_module_forward_hook`) are not looked for.

    Returns:
        What is in the way, and the remedy; None: calling the module is what the class does.
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


def _parts(owner: Any, layers: Sequence[Any], kind: type[nn.Module] | None) -> Iterator[tuple[Any, type[nn.Module]]]:
    """The modules that are not called, each with what it has to be: what is not need not have the parts that come next."""
    if kind is not None:
        yield owner, kind
    yield owner.norm, Qwen3RMSNorm
    for layer in layers:
        yield layer, Qwen3DecoderLayer
        yield layer.self_attn, Qwen3Attention
        yield layer.mlp, Qwen3MLP
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, layer.self_attn.q_norm, layer.self_attn.k_norm):
            yield norm, Qwen3RMSNorm


def _walk(
    plan: Sequence[Any], norm: Any, mask: RoundMask, cache: BlockCache, hidden: Tensor, rotary: tuple[Tensor, Tensor]
) -> Tensor:
    """The function that `fused_forward` gives."""
    run, added = mask.dispatch.run, None
    for layer, attention_weight, mlp_weight in plan:
        hidden, normed = run(SUM_AND_NORM, hidden, added, layer.input_layernorm)
        attention, linears = layer.self_attn, _of_attention(layer)
        place, norms = attention.layer_idx, (attention.q_norm, attention.k_norm)
        query, *_ = run(ROTATED, products(normed, linears, attention_weight), norms, rotary, cache.written[place])
        keys, values = cache.read[place]
        added = attention.o_proj(attend(query, keys, values, mask, attention.scaling).flatten(2))
        hidden, normed = run(SUM_AND_NORM, hidden, added, layer.post_attention_layernorm)
        both = products(normed, _of_mlp(layer), mlp_weight)
        gate, up = both.chunk(2, -1) if isinstance(both, Tensor) else both
        added = layer.mlp.down_proj(layer.mlp.act_fn(gate) * up)
    _, last = run(SUM_AND_NORM, hidden, added, norm)
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
    """View weights of linear layers as one matrix [sum of out_features, in_features]; None if they do not lie side by side."""
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

    With their `packed_weight` weight it is one product, and the results lie side by side in one tensor.
    """
    return [linear(hidden) for linear in linears] if weight is None else F.linear(hidden, weight)
