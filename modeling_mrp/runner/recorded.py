"""Caches for recorded rounds: they stay where they are, and what was recorded on them is kept between calls.

Recordings are dear, so they outlive the call of `generate` that made them, together with the cache they write to: by model,
until the model is gone, its weights lie elsewhere, `release_graphs` is called, or other calls need the room more. A cache
that a call hands out stays its holder's: if the next call needs the place, what is held is first copied out of it.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .cache import BlockCache
from .graphs import RECORDERS, Graphs, Recorder, Registers, fixed_copy, shapes_of
from .round_layers import REPLACED, ROUND_ATTENTION

# What a model keeps between calls, caches and recordings: a share of the device's memory. What was not used for longest goes.
KEPT_SHARE = 1 / 8
_NO_GPU_MEMORY = 32 << 30  # bytes of memory that are assumed of a device that only stands in for one
# Tokens of the smallest cache. Others have twice as many, four times, ..., so that growing prompts find the same one.
LEAST_CAPACITY = 1024

_PLAIN = frozenset({bool, int, float, str, type(None)})


class RecordedCache:
    """A KV cache that stays where it is, and what was recorded on it.

    Args:
        cache: Whose buffers these are.
        recorder: What records.
        weights: The model's `fingerprint`.

    Attributes:
        parts: Forwards that are recorded one by one.
        registers: Rounds that are recorded whole, a set for each way of decoding.
        busy: A call is using it.
    """

    def __init__(self, cache: BlockCache, recorder: Recorder, weights: Hashable) -> None:
        self.cache, self.weights, self.recorder = cache.alias(), weights, recorder
        self.parts = Graphs(recorder)
        self.registers: OrderedDict[Hashable, Registers] = OrderedDict()
        self.draft_weight: Tensor | None = None
        self.busy = False
        self._lent: weakref.ref[BlockCache] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the cache and of all recordings."""
        weight = 0 if self.draft_weight is None else self.draft_weight.numel() * self.draft_weight.element_size()
        return self.cache.nbytes + self.parts.nbytes + weight + sum(each.nbytes for each in self.registers.values())

    def lend(self) -> BlockCache:
        """Lend the cache, emptied. Whoever holds what was lent before keeps it, in memory of its own."""
        holder = None if self._lent is None else self._lent()
        if holder is not None and holder.shares(self.cache):
            holder.detach()
        cache = self.cache.alias()
        cache.empty()
        self.take(cache)
        return cache

    def take(self, cache: BlockCache) -> None:
        """Note who holds the cache."""
        self._lent = weakref.ref(cache)

    def registers_for(self, key: Hashable, tree: Any) -> Registers:
        """Fill the registers of an earlier call of the same kind, or new ones, with the leaves of `tree`."""
        key = key, shapes_of(tree_leaves(tree))
        if key in self.registers:
            self.registers[key].write(tree)
        else:
            self.registers[key] = Registers(tree, self.recorder)
        self.registers.move_to_end(key)
        return self.registers[key]

    def rows_of(self, weight: Tensor, ids: Tensor) -> Tensor:
        """Compute `weight[ids]` anew, into a place that stays."""
        shape = (len(ids), weight.shape[1])
        if self.draft_weight is None or self.draft_weight.shape != shape or self.draft_weight.dtype != weight.dtype:
            self.draft_weight = fixed_copy(weight[:0].new_empty(shape))
        with torch.no_grad():
            return torch.index_select(weight.detach(), 0, ids, out=self.draft_weight)


_KEPT: "weakref.WeakKeyDictionary[nn.Module, list[RecordedCache]]" = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def release_graphs(model: nn.Module | None = None) -> None:
    """Free what is kept between calls of `generate`, recordings and KV caches, of one model or of all."""
    with _LOCK:
        if model is None:
            _KEPT.clear()
        else:
            _KEPT.pop(model, None)


def recording_report(model: nn.Module) -> dict[str, int]:
    """Count what is kept for a model: `recordings`, their `replays` so far, `bytes`, and caches on which one `failed`."""
    with _LOCK:
        kept = list(_KEPT.get(model, []))
    graphs = [each for one in kept for each in (one.parts, *(registers.graphs for registers in one.registers.values()))]
    return {
        "recordings": sum(known.replay is not None for each in graphs for known in each.kept.values()),
        "replays": sum(each.replays for each in graphs),
        "bytes": sum(one.nbytes for one in kept),
        "failed": sum(one.recorder.failed for one in kept),
    }


def fingerprint(model: nn.Module) -> Hashable:
    """Collect where a model's weights lie, how its modules are set and hooked, and which attention it uses."""
    tensors = (*model.parameters(), *model.buffers())
    places = tuple((tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in tensors if not tensor.is_meta)
    settings = tuple(
        (type(module), len(module._forward_hooks), len(module._forward_pre_hooks), _settings(module))
        for module in model.modules()
    )
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return places, settings, REPLACED if attention == ROUND_ATTENTION else attention  # which another thread may be inside of


def _settings(module: nn.Module) -> Hashable:
    """Collect plain attributes, and lists of such: adapters are switched by them."""
    found: list[tuple[str, Any]] = []
    for name, value in vars(module).items():
        kind = type(value)
        if kind in _PLAIN:
            found.append((name, value))
        elif kind is list or kind is tuple or (kind is dict and name[0] != "_"):
            found.append((name, repr(value)))
    return tuple(found)


def obstacle(model: Any) -> str | None:
    """Say why rounds of this model cannot be recorded here, with what to do; None if they can."""
    tensors = (*model.parameters(), *model.buffers())
    others = {type(tensor).__name__ for tensor in tensors} - {"Tensor", "Parameter", "Buffer"}
    if others:
        return f"weights are of the kind {', '.join(sorted(others))}, and where those lie is not known: load plain tensors"
    devices = {tensor.device for tensor in tensors}
    names = ", ".join(sorted(map(str, devices)))
    if len(devices) > 1:
        return f"the model lies on several devices ({names}): load it on one"
    (device,) = devices
    if device.type not in RECORDERS:
        return f"the model is on {device}: move it to a CUDA device"
    if torch.is_autocast_enabled(device.type):
        return "autocast is on, and what it casts does not stay in place: load the model in that dtype instead"
    if torch.compiler.is_compiling():
        return "generate is being compiled: compile the model instead"
    return None


def recorder_for(model: Any, graphs: bool | None) -> Callable[[], Recorder] | None:
    """Make what records this model's rounds, by the option `graphs`; or None.

    Raises:
        ValueError: if `graphs` is True and it is impossible.
    """
    if graphs is False:
        return None
    if (why := obstacle(model)) is not None:
        if graphs:
            raise ValueError(f"graphs is True, but {why}, or leave graphs unset")
        return None
    device = model.lm_head.weight.device
    return partial(RECORDERS[device.type], device)


@contextmanager
def recorded_cache(
    model: Any,
    recorder: Callable[[], Recorder],
    past: BlockCache | None,
    rows: int,
    capacity: int,
    scratch: int,
    with_head: bool,
) -> Iterator[tuple[RecordedCache, BlockCache]]:
    """Lend a recorded cache with room for one call, and the cache to work with: one that is kept, or a new one.

    Args:
        model: The model.
        recorder: Makes one for a new recorded cache.
        past: A cache to go on from, or None. It is taken over.
        rows, capacity, scratch: See `BlockCache`; room is left to go on.
        with_head: Whether the head's layers are needed.
    """
    weights = fingerprint(model)
    with _LOCK:
        kept = [one for one in _KEPT.get(model, []) if one.weights == weights]
        found = None
        if past is not None:
            found = next((one for one in kept if past.shares(one.cache) and past.fits(rows, capacity, scratch)), None)
            with_head = with_head or bool(past.head_layers)
        if found is not None:
            assert past is not None
            cache = past
            found.take(cache)
        else:
            found = next((one for one in kept if not one.busy and _fits(one.cache, rows, capacity, scratch, with_head)), None)
            if found is None:
                # A smaller one for as many rows makes room for the new one, before that takes its own.
                kept = [
                    one for one in kept if one.busy or one.cache.rows != rows or (past is not None and past.shares(one.cache))
                ]
                with torch.inference_mode(False), torch.no_grad():
                    fresh = model.block_cache(rows, _roomy(capacity), scratch, with_head=with_head)
                found = RecordedCache(fresh, recorder(), weights)
                del fresh
            cache = found.lend()
            if past is not None:
                cache.fill_from(past)
        found.busy = True
        _KEPT[model] = [found, *(one for one in kept if one is not found)]
    try:
        yield found, cache
    finally:
        with _LOCK:
            found.busy = False
            if model in _KEPT:
                _evict(_KEPT[model], int(KEPT_SHARE * _memory(model.lm_head.weight.device)))


def _roomy(capacity: int) -> int:
    roomy = LEAST_CAPACITY
    while roomy < capacity:
        roomy *= 2
    return roomy


def _evict(kept: list[RecordedCache], limit: int) -> None:
    """Drop what was not used for longest until what is kept, newest first, fits `limit` bytes."""
    for one in reversed(list(kept)):
        while sum(each.nbytes for each in kept) > limit and len(one.registers) > (one is kept[0]):
            one.registers.popitem(last=False)
        if sum(each.nbytes for each in kept) > limit and not one.busy:
            kept.remove(one)


def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _NO_GPU_MEMORY


def _fits(cache: BlockCache, rows: int, capacity: int, scratch: int, with_head: bool) -> bool:
    return cache.fits(rows, capacity, scratch) and (bool(cache.head_layers) or not with_head)


__all__ = [
    "RecordedCache",
    "fingerprint",
    "obstacle",
    "recorded_cache",
    "recorder_for",
    "recording_report",
    "release_graphs",
]
