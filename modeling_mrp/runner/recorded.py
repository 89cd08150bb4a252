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

from .cache import BlockCache
from .graphs import RECORDERS, Graphs, Recorder, Registers, described, leaves
from .round_layers import REPLACED, ROUND_ATTENTION

# Sets of registers of a recorded cache: one for each way of decoding. Each is a few MB (hidden states of some blocks per row).
REGISTERS = 4
# Recorded caches of a model that are kept between calls: batch sizes, or caches that users hold on to.
KEPT_CACHES = 2
# A bigger cache is given back when its call is over, and what was recorded on it goes too: a share of the device's memory.
KEPT_SHARE = 1 / 8
_NO_GPU_MEMORY = 32 << 30  # bytes of memory that are assumed of a device that only stands in for one
# Capacities are multiples of so many tokens, so that prompts of about the same length find the same one.
CAPACITY_STEP = 512
# A recording reads at least so many committed slots.
FIRST_BUCKET = 256

_PLAIN = frozenset({bool, int, float, str, type(None)})


class RecordedCache:
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
        """The cache, emptied. It is free again when this object is gone."""
        cache = copy.copy(self.cache)
        cache.empty()
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


_KEPT: "weakref.WeakKeyDictionary[nn.Module, list[RecordedCache]]" = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def release_graphs(model: nn.Module | None = None) -> None:
    """Frees what is kept between calls of `generate`, recordings and KV caches, of one model or of all."""
    with _LOCK:
        if model is None:
            _KEPT.clear()
        else:
            _KEPT.pop(model, None)


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


def recorded_cache_for(
    model: Any,
    recorder: Callable[[], Recorder],
    past: BlockCache | None,
    rows: int,
    capacity: int,
    scratch: int,
    with_head: bool,
) -> tuple[RecordedCache, BlockCache]:
    """A recorded cache with room, and the cache to work with: an earlier one that is free, the one of `past`, or a new one.

    Args:
        model: The model.
        recorder: Makes one for a new recorded cache.
        past: A cache to go on from, or None.
        rows, capacity, scratch: See `BlockCache`; room is left to go on.
        with_head: Whether the head's layers are needed.
    """
    weights = fingerprint(model)
    roomy = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP
    with _LOCK:
        kept = [one for one in _KEPT.get(model, []) if one.weights == weights]
        if past is not None:
            cache = past.with_room(rows, roomy if capacity > past.capacity else capacity, scratch)
            found = next((one for one in kept if one.cache._buffers is cache._buffers), None)
            if found is not None:
                found.lent = weakref.ref(cache)
        else:
            found = next((one for one in kept if one.free and _fits(one.cache, rows, capacity, scratch, with_head)), None)
            if found is None:
                # A smaller one for as many rows makes room for the new one, before that takes its own.
                kept = [one for one in kept if not (one.free and one.cache.rows == rows)][: KEPT_CACHES - 1]
                _KEPT[model] = kept
                with torch.inference_mode(False), torch.no_grad():
                    cache = model.block_cache(rows, roomy, scratch, with_head=with_head)
            else:
                cache = found.lend()
        if found is None:
            found = RecordedCache(cache, recorder(), weights)
        kept = [found, *(one for one in kept if one is not found)]
        most = KEPT_SHARE * _memory(model.lm_head.weight.device)
        _KEPT[model] = [one for one in kept if one.cache.nbytes <= most][:KEPT_CACHES]
        return found, cache


def _memory(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _NO_GPU_MEMORY


def _fits(cache: BlockCache, rows: int, capacity: int, scratch: int, with_head: bool) -> bool:
    room = cache.rows == rows and cache.capacity >= capacity and cache.scratch >= scratch
    return room and cache.writable and (bool(cache.head_layers) or not with_head)


def recording_report(model: nn.Module) -> dict[str, int]:
    """Count what is kept of a model's recordings.

    Returns:
        `recordings`; `replays`, of all of them; `bytes` of the KV caches they work on; `failed`, caches on which a step could
        not be recorded, so that rounds run one launch at a time.
    """
    with _LOCK:
        kept = list(_KEPT.get(model, []))
    graphs = [graph for one in kept for graph in (one.parts, *(registers.graphs for registers in one.registers.values()))]
    return {
        "recordings": sum(known.replay is not None for graph in graphs for known in graph.kept.values()),
        "replays": sum(graph.replays for graph in graphs),
        "bytes": sum(one.cache.nbytes for one in kept),
        "failed": sum(one.recorder.failed for one in kept),
    }


__all__ = [
    "RecordedCache",
    "bucket",
    "fingerprint",
    "obstacle",
    "recorder_for",
    "recording_report",
    "release_graphs",
    "recorded_cache_for",
]
