"""Where rounds are recorded: KV caches that stay where they are, and what was recorded on them, kept between calls.

Recordings are dear, so they outlive the call of `generate` that made them, together with the cache they write to: by model,
until the model is gone, its weights lie elsewhere, or `release_graphs` is called. A cache that a call hands out is not used by
another one as long as somebody holds it.
"""

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from .cache_mrp import BlockCache
from .graphs_mrp import RECORDERS, Graphs, Recorder, Registers, described, leaves
from .round_attention_mrp import REPLACED, ROUND_ATTENTION

# Sets of registers of a workplace: one for each way of decoding. Each is a few MB (the hidden states of some blocks per row).
REGISTERS = 4
# Workplaces of a model that are kept between calls: batch sizes, or caches that users hold on to.
WORKPLACES = 2
# A bigger cache is given back when its call is over, and what was recorded on it goes too.
KEPT_BYTES = 4 << 30
# Capacities are multiples of so many tokens, so that prompts of about the same length find the same workplace.
CAPACITY_STEP = 512
# A recording reads at least so many committed slots.
FIRST_BUCKET = 256

_PLAIN = frozenset({bool, int, float, str, type(None)})


class Workplace:
    """A KV cache that stays where it is, and what was recorded on it.

    Args:
        cache: Whose buffers these are.
        recorder: What records.
        weights: The model's `fingerprint`.
    """

    def __init__(self, cache: BlockCache, recorder: Recorder, weights: Hashable) -> None:
        self.cache, self.weights, self.recorder = copy.copy(cache), weights, recorder
        self.parts = Graphs(recorder)
        self.registers: OrderedDict[Hashable, Registers] = OrderedDict()
        self.lent: weakref.ref[BlockCache] | None = weakref.ref(cache)

    @property
    def free(self) -> bool:
        """Nobody holds the cache that was lent."""
        return self.lent is None or self.lent() is None

    def lend(self) -> BlockCache:
        """The cache, emptied. The workplace is free again when this object is gone."""
        for buffer in self.cache._buffers.values():
            buffer.zero_()  # what an earlier call left may be infinite, and a masked slot still enters with weight 0
        cache = copy.copy(self.cache)
        nothing = torch.zeros(cache.rows, dtype=torch.long)
        cache.hold(nothing[:, None][:, :0], nothing, nothing)
        self.lent = weakref.ref(cache)
        return cache

    def registers_for(self, key: Hashable, parts: Sequence[Any]) -> Registers:
        """Those of an earlier call of the same kind, or new ones, filled with the tensors of `parts`."""
        key = key, described(leaves(tuple(parts)))
        if key in self.registers:
            self.registers[key].write(parts)
        else:
            self.registers[key] = Registers(parts, self.recorder)
        self.registers.move_to_end(key)
        if len(self.registers) > REGISTERS:
            self.registers.popitem(last=False)
        return self.registers[key]


_WORKPLACES: "weakref.WeakKeyDictionary[nn.Module, list[Workplace]]" = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def release_graphs(model: nn.Module | None = None) -> None:
    """Frees what is kept between calls of `generate`, recordings and KV caches, of one model or of all."""
    with _LOCK:
        if model is None:
            _WORKPLACES.clear()
        else:
            _WORKPLACES.pop(model, None)


def fingerprint(model: nn.Module) -> Hashable:
    """Where a model's weights lie, how its modules are set and hooked, and which attention it uses."""
    tensors = (*model.parameters(), *model.buffers())
    places = tuple((tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in tensors if not tensor.is_meta)
    settings = tuple(
        (type(module), len(module._forward_hooks), len(module._forward_pre_hooks), _settings(module))
        for module in model.modules()
    )
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return places, settings, REPLACED if attention == ROUND_ATTENTION else attention  # which another thread may be inside of


def _settings(module: nn.Module) -> Hashable:
    """Plain attributes, and lists of such: adapters are switched by them."""
    found: list[tuple[str, Any]] = []
    for name, value in vars(module).items():
        kind = type(value)
        if kind in _PLAIN:
            found.append((name, value))
        elif kind is list or kind is tuple or (kind is dict and name[0] != "_"):
            found.append((name, repr(value)))
    return tuple(found)


def obstacle(model: Any) -> str | None:
    """Why rounds of this model cannot be recorded here, with what to do; None if they can."""
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
    """Makes what records this model's rounds, by the option `graphs`; or None.

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


def bucket(used: int, capacity: int) -> int:
    """How many committed slots a recording reads for `used` of them: 256, 384, 512, 768, 1024, ... so that a text needs few.

    At most half of what is read was for nothing: of an SDAR-4B, 147 KB a slot and row, 75 MB of 9 GB at 1,024 slots.
    """
    size = FIRST_BUCKET
    while size < used:
        size = size + size // 2 if size & (size - 1) == 0 else size // 3 * 4
    return min(size, capacity)


def workplace_for(
    model: Any,
    recorder: Callable[[], Recorder],
    past: BlockCache | None,
    rows: int,
    capacity: int,
    scratch: int,
    with_head: bool,
) -> tuple[Workplace, BlockCache]:
    """A workplace with room, and the cache to work with: an earlier one that is free, the one of `past`, or a new one.

    Args:
        model: The model.
        recorder: Makes one for a new workplace.
        past: A cache to go on from, or None.
        rows, capacity, scratch: See `BlockCache`; room is left to go on.
        with_head: Whether the head's layers are needed.
    """
    weights = fingerprint(model)
    roomy = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP
    with _LOCK:
        kept = [place for place in _WORKPLACES.get(model, []) if place.weights == weights]
        if past is not None:
            cache = past.with_room(rows, roomy if capacity > past.capacity else capacity, scratch)
            found = next((place for place in kept if place.cache._buffers is cache._buffers), None)
            if found is not None:
                found.lent = weakref.ref(cache)
        else:
            found = next(
                (place for place in kept if place.free and _fits(place.cache, rows, capacity, scratch, with_head)), None
            )
            if found is None:
                # A smaller one for as many rows makes room for the new one, before that takes its own.
                kept = [place for place in kept if not (place.free and place.cache.rows == rows)][: WORKPLACES - 1]
                _WORKPLACES[model] = kept
                with torch.inference_mode(False), torch.no_grad():
                    cache = model.block_cache(rows, roomy, scratch, with_head=with_head)
            else:
                cache = found.lend()
        if found is None:
            found = Workplace(cache, recorder(), weights)
        kept = [found, *(place for place in kept if place is not found)]
        _WORKPLACES[model] = [place for place in kept if place.cache.nbytes <= KEPT_BYTES][:WORKPLACES]
        return found, cache


def _fits(cache: BlockCache, rows: int, capacity: int, scratch: int, with_head: bool) -> bool:
    # A cache that grew in inference mode cannot be written to outside of it.
    frozen = not torch.is_inference_mode_enabled() and any(t.is_inference() for t in cache._buffers.values())
    room = cache.rows == rows and cache.capacity >= capacity and cache.scratch >= scratch
    return room and not frozen and (bool(cache.head_layers) or not with_head)


__all__ = [
    "Workplace",
    "bucket",
    "fingerprint",
    "obstacle",
    "recorder_for",
    "release_graphs",
    "workplace_for",
]
