"""Keys and values of committed blocks by absolute position and, beyond the longest text, of the states being scored."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..model.offloading import device_of

# Slots that attention reads beyond the texts are a power of two of at least so many where shapes have to stay the same.
LEAST_BUCKET = 256


class PassingReference(weakref.ref[Any]):
    """A weak reference that can be pickled and copied; an unpickled one is dead, since its object is not pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (set(),)  # which nothing else holds

    def __deepcopy__(self, memo: Any) -> "PassingReference":
        return self


class WeightsSeen:
    """A snapshot of a module's parameters and active adapters, to tell later whether they are still the same."""

    def __init__(self, module: nn.Module) -> None:
        self.seen = [(PassingReference(weight), _state_of(weight)) for weight in _held_parameters(module)]
        self.adapters = _adapters_on(module)

    def same(self, module: nn.Module) -> bool:
        """Tell if no parameter was replaced, moved or written to since, and the same adapters are active.

        Writes to a parameter's `.data` cannot be seen: autograd does not count them.
        """
        weights = _held_parameters(module)
        if len(weights) != len(self.seen) or self.adapters != _adapters_on(module):
            return False
        pairs = zip(self.seen, weights, strict=True)
        return all(seen() is weight and state == _state_of(weight) for (seen, state), weight in pairs)


def _held_parameters(module: nn.Module) -> list[Tensor]:
    return [weight for weight in module.parameters() if not weight.is_meta]  # those that are offloaded come anew each time


def _adapters_on(module: nn.Module) -> list[Any]:
    """List the active adapters of each of peft's layers, with their scales, and those per row."""
    layers = [
        (list(layer.active_adapters), layer.disable_adapters, layer.merged_adapters[:], dict(getattr(layer, "scaling", {})))
        for layer in adapted_layers(module)
    ]
    return [adapters_of_rows(module), *layers]


def adapters_of_rows(module: nn.Module) -> list[str] | None:
    """Read peft's `adapter_names`, an adapter for each row of a batch, which hooks hand to its layers during a call.

    A call that failed leaves its hooks behind; the last one counts.
    """
    hooks = (hook for part in module.modules() for hook in reversed(part._forward_pre_hooks.values()))
    names = (getattr(hook, "keywords", {}).get("adapter_names") for hook in hooks)
    return next((list(of_rows) for of_rows in names if of_rows is not None), None)


def adapted_layers(module: nn.Module) -> list[Any]:
    """List peft's layers."""
    return [layer for layer in module.modules() if hasattr(layer, "merged_adapters")]


def _state_of(weight: Tensor) -> list[int]:
    """Return where a weight lies and autograd's count of writes to it, for which there is no public name."""
    place = weight.data_ptr() if type(weight) in (Tensor, nn.Parameter) else 0
    return [place, 0 if weight.is_inference() else weight._version]


def devices_of_layers(model: Any, with_head: bool) -> tuple[torch.device, ...]:
    """List the devices on which a model's layers compute, the backbone's first, then with the head's."""
    layers = list(model.model.layers) + (list(model.mrp_head.layers) if with_head else [])
    return tuple(device_of(layer.self_attn.k_proj) for layer in layers)


class BlockCache(Cache):
    """KV memory of fixed size, one buffer per device, `[rows, slots, layers, 2, kv_heads, head_dim]`, written in place.

    A committed token lives in the slot of its absolute position, so padding takes no room and rows of different length need no
    special case. The states of a round are written behind the longest text, so that what attention reads is one slice; when one
    turns out clean, `move` copies its keys and values to its row's text, for all rows and layers at once.

    Between two calls of `generate` it remembers whose keys and values it holds, so that the next one starts behind them. A
    call takes over the cache it is given: what that held beyond the new prompt is gone (`copy.deepcopy` keeps it).

    Args:
        rows, num_key_value_heads, head_dim, dtype: Sizes and dtype of keys and values, the same in every layer.
        layer_devices: The device of every layer: the backbone's first, then the head's, of which there are `head_layers`.
        capacity: Committed slots per row, a multiple of the block size.
        scratch: Tokens that can be scored at once per row.
        hidden_size: Of the hidden states that are kept for a head to read later; 0: none are.
        fixed: Whether shapes are to stay the same from round to round, as for recordings: attention then reads a power of two
            of slots before what is scored.
        ends: Tokens of a block and size of hidden states, where the last one of each block is kept, as a model needs whose
            hidden states are those of the next position; zeros: none are.

    Attributes:
        ids: By row, the text whose tokens the slots hold.
        held, head_held: By row, how many of its first tokens have keys and values in all layers of the backbone, of the head.
        hidden_held: By row, how many have hidden states that the head may still read, if it has not read them.
        owner, weights: The model whose keys and values these are, weakly, and its parts, by name, as they were then.
        written: By layer, the target: where keys and values of the next forward go, [rows, heads, new, head_dim] each.
        read: By layer, what attention reads once the target is written, [rows, heads, seen, head_dim] each.
    """

    def __init__(
        self,
        rows: int,
        num_key_value_heads: int,
        head_dim: int,
        layer_devices: Sequence[torch.device],
        capacity: int,
        scratch: int,
        dtype: torch.dtype,
        head_layers: int = 0,
        hidden_size: int = 0,
        fixed: bool = False,
        ends: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(layers=[])
        self.rows, self.num_key_value_heads, self.head_dim = rows, num_key_value_heads, head_dim
        self.capacity, self.scratch, self.dtype, self.head_layers = capacity, scratch, dtype, head_layers
        self.hidden_size, self.fixed, self.layer_devices = hidden_size, fixed, tuple(layer_devices)
        self.owner: PassingReference | None = None
        self.weights: dict[str, WeightsSeen] = {}
        self.written: list[tuple[Tensor, Tensor]] = []
        self.read: list[tuple[Tensor, Tensor]] = []
        self.empty()
        self._index = [self.layer_devices[:layer].count(device) for layer, device in enumerate(self.layer_devices)]
        slots = scratch + (max(LEAST_BUCKET, 1 << (capacity - 1).bit_length()) if fixed else capacity)
        # Elsewhere no slot is read that was not written before: rows are prefilled and scored together.
        made = torch.zeros if fixed else torch.empty
        self._buffers = {
            device: made(
                (rows, slots, self.layer_devices.count(device), 2, num_key_value_heads, head_dim), dtype=dtype, device=device
            )
            for device in dict.fromkeys(self.layer_devices)
        }
        self.hidden = torch.empty((rows, capacity, hidden_size), dtype=dtype, device=self.layer_devices[-1])
        self.every, end_size = ends
        blocks = capacity // self.every if self.every else 0
        self.ends = torch.empty((rows, blocks, end_size), dtype=dtype, device=self.layer_devices[-1])
        self.active, self.begin, self.end = rows, 0, 0

    @property
    def nbytes(self) -> int:
        """Bytes held, fixed at construction."""
        return sum(buffer.numel() * buffer.element_size() for buffer in (*self._buffers.values(), self.hidden, self.ends))

    @property
    def writable(self) -> bool:
        """Whether it can be written to here: a cache made in inference mode cannot outside of it."""
        return torch.is_inference_mode_enabled() or not any(buffer.is_inference() for buffer in self._buffers.values())

    def target(self, used: int, width: int, prefill: bool = False) -> int:
        """Let the next forward write `width` tokens a row behind the first `used` slots and read all slots up to there.

        Returns:
            The first slot that is written: `used`, or where shapes are fixed the power of two above it; not in a prefill.
        """
        if self.fixed and not prefill:
            used = max(LEAST_BUCKET, 1 << (used - 1).bit_length()) if used else LEAST_BUCKET
        self.begin, self.end = used, used + width
        self.written, self.read = self._views(used), self._views(0)
        return used

    def _views(self, begin: int) -> list[tuple[Tensor, Tensor]]:
        """Select keys and values from a slot to the end of the target, [rows, heads, slots, head_dim], of every layer."""
        views = {
            device: buffer[: self.active, begin : self.end].permute(2, 3, 0, 4, 1, 5).flatten(0, 1).unbind(0)
            for device, buffer in self._buffers.items()
        }
        places = zip(self.layer_devices, self._index, strict=True)
        return [(views[device][2 * at], views[device][2 * at + 1]) for device, at in places]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values, [rows, heads, new, head_dim] each, to the target; return what attention reads."""
        keys, values = self.written[layer_idx]
        keys.copy_(key_states)
        values.copy_(value_states)
        return self.read[layer_idx]

    def move(self, layers: range, moves: Sequence[tuple[int, int, int]], length: int) -> None:
        """Copy blocks of keys and values in some layers.

        For each `(row, source, target)`, `length` slots from `source` on are copied to those from `target` on.
        """
        row, source, target = torch.tensor(moves).unbind(1)
        offsets = torch.arange(length)
        source, target = source[:, None] + offsets, target[:, None] + offsets
        for device, part in self._of(layers):
            at, of, to = (index.to(device, non_blocking=True) for index in (row[:, None], source, target))
            if part.shape[-1] * part.element_size() % 8 == 0:
                part = part.view(torch.int64)  # a number of a narrow type costs as much to index as a wide one
            part[at, to] = part[at, of]

    def blank(self, layers: range, row: int, begin: int, end: int) -> None:
        """Zero the slots of a row from `begin` to `end` in some layers.

        Masked slots have weight 0 in attention, but 0 times NaN or infinity is NaN.
        """
        for _, part in self._of(layers):
            part[row, begin:end] = 0

    def swap(self, pairs: Sequence[tuple[int, int]], used: int) -> None:
        """Exchange the first `used` slots of pairs of rows, with their kept hidden states."""
        ours, theirs = torch.tensor(pairs).unbind(1)
        to, of = torch.cat([ours, theirs]), torch.cat([theirs, ours])
        for part in self._held_parts(used):
            part[to.to(part.device)] = part[of.to(part.device)]

    def hold(self, ids: list[list[int]], held: list[int], head_held: list[int], hidden_held: list[int]) -> None:
        """Record what the cache holds, by row (see the attributes)."""
        self.ids, self.held, self.head_held, self.hidden_held = ids, held, head_held, hidden_held
        self.written, self.read = [], []  # a copy of the cache needs no copies of views

    def empty(self) -> None:
        """Record that it holds nothing."""
        nothing = [0] * self.rows
        self.hold([[] for _ in nothing], nothing, nothing, nothing)

    def reusable(self, texts: Sequence[Sequence[int]], upto: Sequence[int], block_size: int, with_head: bool) -> list[int]:
        """Count the first tokens of each row's text that need no prefill, at most `upto`.

        They are the longest common prefix with what is held, in whole blocks, on which keys and values depend. If `with_head`,
        the head's layers must hold them too, or be able to read them still.
        """
        found = []
        for row, (text, most) in enumerate(zip(texts, upto, strict=True)):
            most = min(most, self.held[row], max(self.head_held[row], self.hidden_held[row]) if with_head else most)
            ids = self.ids[row][:most]
            same = next((at for at, token in enumerate(ids) if token != text[at]), len(ids))
            found.append(same // block_size * block_size)
        return found

    def fits(self, capacity: int, scratch: int, with_head: bool = False) -> bool:
        """Tell if there is room for a number of tokens per row, and for the head's layers if they are needed."""
        return capacity <= self.capacity and scratch <= self.scratch and self.head_layers >= with_head

    def with_room(self, rows: int, capacity: int, scratch: int) -> "BlockCache":
        """Return this cache, or a larger one with its content, with at least the given capacity and scratch.

        If `rows` is a multiple of its rows, each row's content is repeated, the copies one after the other.
        """
        if rows == self.rows and self.fits(capacity, scratch) and self.writable:
            return self
        capacity, scratch = max(capacity, self.capacity), max(scratch, self.scratch)
        bigger = BlockCache(
            *(rows, self.num_key_value_heads, self.head_dim, self.layer_devices, capacity, scratch, self.dtype),
            *(self.head_layers, self.hidden_size, self.fixed, (self.every, self.ends.shape[-1])),
        )
        bigger.owner = self.owner
        bigger.fill_from(self)
        return bigger

    def fill_from(self, other: "BlockCache") -> None:
        """Copy the content of another cache with as many layers; its rows, a divisor of this one's, are each repeated."""
        copies, used = self.rows // other.rows, max(other.held)
        repeated = (
            [one for one in part for _ in range(copies)] for part in (other.ids, other.held, other.head_held, other.hidden_held)
        )
        self.hold(*repeated)  # type: ignore[arg-type]
        for ours, theirs in zip(self._held_parts(used), other._held_parts(used), strict=True):
            ours.copy_(theirs.repeat_interleave(copies, 0))

    def shares(self, other: "BlockCache") -> bool:
        """Tell if two caches share their memory, as after `copy.copy`."""
        return self._buffers is other._buffers

    def detach(self) -> None:
        """Replace shared memory by a copy."""
        self._buffers = {device: buffer.clone() for device, buffer in self._buffers.items()}
        self.hidden, self.ends = self.hidden.clone(), self.ends.clone()

    def _held_parts(self, used: int) -> list[Tensor]:
        """Select the content of the first slots: keys and values, hidden states, and the last ones of blocks, [rows, ...]."""
        blocks = used // self.every if self.every else 0
        return [*(one[:, :used] for one in (*self._buffers.values(), self.hidden)), self.ends[:, :blocks]]

    def _of(self, layers: range) -> Iterator[tuple[torch.device, Tensor]]:
        """Select the memory of some layers on each device: [rows, slots, layers, 2, heads, head_dim]."""
        for device, buffer in self._buffers.items():
            held = [self._index[layer] for layer in layers if self.layer_devices[layer] == device]
            if held:
                yield device, buffer[:, :, held[0] : held[-1] + 1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: rows differ in length, so there is no common one; positions are always passed explicitly."""
        return 0
