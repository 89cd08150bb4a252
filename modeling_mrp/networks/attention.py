"""Attention by `round_attention` in the layers of a model: in a round they are given a `RoundMask`.

Keys and values then go into the cache together with the attention, in one call, and not by `BlockCache.update`. To
`torch.compile` this call is one opaque operation: what it traces does not see the cache, which it would copy, nor how many
slots are committed, for each number of which it would compile anew.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..kernels.dispatch import Dispatch
from ..kernels.round_attention import RoundMask, attend
from .cache import BlockCache

# What `attn_implementation` is during a forward under a `RoundMask`. Each copy of this file (remote code of two repositories in
# one process) has masks of its own class, so also a name of its own.
ROUND_ATTENTION = f"{__name__}.round_attention"
REPLACED = "sdpa"  # the implementation that it stands in for

_inside: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
_inside_lock = threading.Lock()
_here = threading.local()  # `cache`: that of the round which this thread is in
_operators: list[Callable[..., Tensor]] = []  # `_attend_in_round` as an operation, once there has been a round


def takes_round_masks(model: Any, dispatch: Dispatch) -> bool:
    """Tell if the layers of a model are to be given a `RoundMask` in rounds: an attention that was chosen in place of SDPA
    stays, and what was compiled without kernels is left whole.

    Raises:
        ValueError: if kernels are forced, and another attention was chosen.
    """
    chosen = model.config._attn_implementation
    if chosen in (REPLACED, ROUND_ATTENTION):
        return dispatch.forced is not False or not any(
            part._compiled_call_impl for part in (model.model, model.mrp_head) if part
        )
    if dispatch.forced:
        raise ValueError(
            f"kernels is True, but the model attends by {chosen!r}, whose place the kernel does not take: use "
            f"attn_implementation={REPLACED!r}, or kernels=None or kernels=False"
        )
    return False


@contextmanager
def round_attention_of(model: Any) -> Iterator[None]:
    """Let the layers of a model know what a `RoundMask` is.

    Layers look their attention up by the name in the config that they all share, so there is no way around a name of
    our own there. What it names computes SDPA as before for everything but a `RoundMask`, so that other threads that
    use the model meanwhile, also without kernels, notice nothing; the last one to leave puts the name back.
    """
    with _inside_lock:
        if not _operators:
            _operators.append(_as_operation())
            AttentionInterface.register(ROUND_ATTENTION, _attention)
        _inside[model] = _inside.get(model, 0) + 1
        if _inside[model] == 1:
            model.config._attn_implementation = ROUND_ATTENTION
    try:
        yield
    finally:
        with _inside_lock:
            _inside[model] -= 1
            if not _inside[model]:
                del _inside[model]
                model.config._attn_implementation = REPLACED


@contextmanager
def under_round_masks(model: Any, cache: BlockCache) -> Iterator[None]:
    """Have a forward under a `RoundMask` put its keys and values where the cache says, together with its attention."""
    outer, _here.cache = getattr(_here, "cache", None), cache
    cache.deferred = True
    try:
        with round_attention_of(model):
            yield
    finally:
        cache.deferred = False
        _here.cache = outer


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend as transformers' layers ask for it."""
    if attention_mask is None and getattr(_here, "cache", None) is not None:
        raise ValueError(
            f"a {type(module).__name__} was given no mask in a round, and would see everything: pass on the mask that the "
            "backbone is called with, or use kernels=False"
        )
    if not isinstance(attention_mask, RoundMask):
        return ALL_ATTENTION_FUNCTIONS[REPLACED](module, query, key, value, attention_mask, **kwargs)
    mask = attention_mask
    layer: Any = module.layer_idx
    if torch.compiler.is_compiling():
        seen = (mask.committed, mask.parent, mask.width, mask.block_size)
        return _operators[0](query, key, value, *seen, layer, kwargs["scaling"], mask.dispatch.forced), None
    keys, values = _here.cache.store(key, value, layer)
    return attend(query, keys, values, mask, kwargs["scaling"]), None


def _attend_in_round(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    committed: Tensor,
    parent: Tensor | None,
    width: int,
    block_size: int,
    layer: int,
    scale: float,
    forced: bool | None,
) -> Tensor:
    """Put the round's keys and values into the cache, and attend to what lies there: [rows, queries, heads, head_dim]."""
    keys, values = _here.cache.store(key, value, layer)
    return attend(query, keys, values, RoundMask(committed, parent, width, block_size, Dispatch(forced)), scale)


def _as_operation() -> Callable[..., Tensor]:
    """Make `_attend_in_round` an operation that `torch.compile` leaves whole; each copy of this file has one of its own."""
    schema = (
        "(Tensor query, Tensor key, Tensor value, Tensor committed, Tensor? parent, int width, int block_size, int layer, "
        "float scale, bool? forced) -> Tensor"
    )
    name = f"{__name__.replace('.', '_')}::attend"
    made = torch.library.custom_op(name, _attend_in_round, mutates_args=(), schema=schema)
    made.register_fake(lambda query, *_: torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format))
    return made._opoverload
