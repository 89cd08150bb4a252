"""Keys and values of committed blocks by absolute position, and the scratch of the states being scored."""

import copy
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..model.offloading import device_of
from ..rules.constants import indices


class PassingReference(weakref.ref[Any]):
    """A weak reference that may be pickled and copied: out of a pickle it comes dead, as its object stays behind."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (set(),)  # which nothing else holds

    def __deepcopy__(self, memo: Any) -> "PassingReference":
        return self


class WeightsSeen:
    """A module's parameters at some time, to tell later whether they are still the same."""

    def __init__(self, module: nn.Module) -> None:
        self.seen = [(PassingReference(weight), _state_of(weight)) for weight in _held_parameters(module)]

    def same(self, module: nn.Module | None) -> bool:
        """Tell if nothing was replaced, moved or written to; writes to `.data` are not counted."""
        weights = [] if module is None else _held_parameters(module)
        return len(weights) == len(self.seen) and all(
            seen() is weight and state == _state_of(weight) for (seen, state), weight in zip(self.seen, weights, strict=True)
        )


def _held_parameters(module: nn.Module) -> list[Tensor]:
    return [weight for weight in module.parameters() if not weight.is_meta]  # those that are offloaded come anew each time


def _state_of(weight: Tensor) -> list[int]:
    """Where a weight lies, and how often it was written to: autograd's counter, for which there is no public name."""
    place = weight.data_ptr() if type(weight) in (Tensor, nn.Parameter) else 0
    return [place, 0 if weight.is_inference() else weight._version]


def devices_of_layers(model: Any, with_head: bool) -> tuple[torch.device, ...]:
    """List the devices on which a model's layers compute, the backbone's first, then with the head's."""
    layers = list(model.model.layers) + (list(model.mrp_head.layers) if with_head else [])
    return tuple(device_of(layer.self_attn.k_proj) for layer in layers)


class BlockCache(Cache):
    """KV memory of fixed size: [scratch | committed slots] in one buffer per device, written in place.

    A committed token lives in the slot of its absolute position, so padding takes no room and rows of different length
    need no special case. The states of a round are written to the scratch, right before slot 0, so that what
    attention reads is one view without a copy. When a state turns out clean, `commit` copies its keys and values to its slots.

    Between two calls of `generate` it remembers whose keys and values it holds, so that the next one starts behind them. A
    call takes over the cache it is given: what that held beyond the new prompt is gone (`copy.deepcopy` keeps it).

    Args:
        batch_size: Rows.
        num_key_value_heads: KV heads of every layer.
        head_dim: Size of a head.
        layer_devices: The device of every layer: the backbone's first, then the head's.
        capacity: Committed slots per row, a multiple of the block size.
        scratch: Tokens that can be scored at once per row.
        dtype: Of keys and values.
        head_layers: How many of the layers are the head's.
        hidden_size: Of the hidden states that are kept for a head to read later; 0: none are.

    Attributes:
        ids: [rows, length] long, the text whose tokens the slots hold, by absolute position.
        held: [rows] long, so many first tokens of it have their keys and values in all layers of the backbone.
        head_held: [rows] long, the same for the layers of the head.
        hidden_held: [rows] long, so many have hidden states that the head may still read, if it has not read them.
        owner: A weak reference to the model whose keys and values these are.
        weights: The parts of that model whose keys and values these are, by name, as they were then.
        deferred: Whether attention calls `store` itself, as in rounds under a `RoundMask`.
    """

    def __init__(
        self,
        batch_size: int,
        num_key_value_heads: int,
        head_dim: int,
        layer_devices: Sequence[torch.device],
        capacity: int,
        scratch: int,
        dtype: torch.dtype,
        head_layers: int = 0,
        hidden_size: int = 0,
    ) -> None:
        super().__init__(layers=[])
        self.rows, self.num_key_value_heads, self.head_dim = batch_size, num_key_value_heads, head_dim
        self.dtype, self.head_layers = dtype, head_layers
        self.scratch = scratch
        self.capacity = capacity
        self.owner: PassingReference | None = None
        self.weights: dict[str, WeightsSeen] = {}
        self.deferred, self.hidden_size = False, hidden_size
        self.empty()
        self._device_of = list(layer_devices)
        devices = list(dict.fromkeys(layer_devices))
        # Not zeroed: memory that a call does not come to use is never touched. See `clear`.
        self._buffers = {
            device: torch.empty(
                2,
                self._device_of.count(device),
                batch_size,
                num_key_value_heads,
                scratch + capacity,
                head_dim,
                dtype=dtype,
                device=device,
            )
            for device in devices
        }
        shape = batch_size, capacity + scratch, hidden_size  # what is not to be kept goes behind the capacity
        self._hidden = torch.empty(shape, dtype=dtype, device=layer_devices[-1])
        self._index = [self._device_of[:layer].count(device) for layer, device in enumerate(self._device_of)]
        self._write = self._read = slice(0, 0)

    @property
    def layer_devices(self) -> tuple[torch.device, ...]:
        """The device of every layer."""
        return tuple(self._device_of)

    @property
    def nbytes(self) -> int:
        """Bytes held, fixed at construction."""
        return sum(buffer.numel() * buffer.element_size() for buffer in (*self._buffers.values(), self._hidden))

    @property
    def writable(self) -> bool:
        """False outside of inference mode for a cache that was made in it."""
        return torch.is_inference_mode_enabled() or not any(buffer.is_inference() for buffer in self._buffers.values())

    def target_scratch(self, width: int, used: int) -> None:
        """Let the next forward write `width` scratch tokens and read them before the first `used` committed slots."""
        self._write = slice(self.scratch - width, self.scratch)
        self._read = slice(self.scratch - width, self.scratch + used)

    def target_slots(self, start: int, length: int) -> None:
        """Let the next forward write the slots [start, start + length) and read all slots up to there."""
        self._write = slice(self.scratch + start, self.scratch + start + length)
        self._read = slice(self.scratch, self.scratch + start + length)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values ([batch, heads, new, head_dim]) to the target and return what attention reads; while
        `deferred`, leave both to `store`."""
        return (key_states, value_states) if self.deferred else self.store(key_states, value_states, layer_idx)

    def store(self, key_states: Tensor, value_states: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Do what `update` does, at once."""
        keys, values = self.written(layer)
        keys.copy_(key_states)
        values.copy_(value_states)
        return self.read(layer)

    def written(self, layer: int) -> tuple[Tensor, Tensor]:
        """Select the target, where keys and values of the next forward go: [batch, heads, new, head_dim]."""
        keys, values = self._buffers[self._device_of[layer]][:, self._index[layer], :, :, self._write]
        return keys, values

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Select the keys and values that attention reads, [batch, heads, seen, head_dim], once the target is written."""
        keys, values = self._buffers[self._device_of[layer]][:, self._index[layer], :, :, self._read]
        return keys, values

    def commit(self, width: int, source: Tensor, start: Tensor, which: Tensor, length: int, layers: range) -> None:
        """Copy one scored block per row from the scratch to its committed slots.

        Args:
            width: Tokens of each row in the forward that scored it.
            source: [rows] long, where the block begins among these.
            start: [rows] long, the block's absolute position.
            which: [rows] bool, the rows that commit; another row's scratch is copied onto itself.
            length: Tokens in the block.
            layers: The layers whose forward that was.
        """
        offsets = indices(length, start.device)
        source = self.scratch - width + source[:, None] + offsets
        slots = torch.where(which[:, None], self.scratch + start[:, None] + offsets, source)
        rows = indices(len(start), start.device)[:, None]
        for part in self._of(layers):
            if part.shape[-1] * part.element_size() % 8 == 0:
                part = part.view(torch.int64)  # a number of a narrow type costs as much to index as a wide one
            row, to, of = rows.to(part.device), slots.to(part.device), source.to(part.device)
            part[:, :, row, :, to] = part[:, :, row, :, of]

    def clear(self, layers: range, start: int) -> None:
        """Zero the slots of some layers from `start` on.

        A masked slot still enters attention with its weight of 0, which what is not finite would survive.
        """
        for part in self._of(layers):
            part[..., self.scratch + start :, :] = 0

    def keep_hidden(self, hidden: Tensor, start: Tensor, which: Tensor) -> None:
        """Keep hidden states [rows, n, hidden_size] of rows' texts from `start` [rows] on, where `which` [rows] says so."""
        offsets = indices(hidden.shape[1], start.device)
        slots = torch.where(which[:, None], start[:, None] + offsets, self.capacity + offsets)
        self._hidden[indices(len(start), start.device)[:, None], slots] = hidden.to(self._hidden.device)

    def kept_hidden(self, start: int, length: int) -> Tensor:
        """[rows, length, hidden_size]: what was kept, and anything where nothing was."""
        return self._hidden[:, start : start + length]

    def hold(self, ids: Tensor, held: Tensor, head_held: Tensor, hidden_held: Tensor) -> None:
        """Note what is held: `ids` [rows, length], `held`, `head_held` and `hidden_held` [rows], all long (see the
        attributes)."""
        self.ids, self.held, self.head_held, self.hidden_held = ids, held, head_held, hidden_held

    def empty(self) -> None:
        """Hold nothing."""
        nothing = torch.zeros(self.rows, dtype=torch.long)
        self.hold(nothing[:, None][:, :0], nothing, nothing, nothing)

    def reusable(self, ids: Tensor, upto: Tensor, block_size: int, with_head: bool, later: bool = False) -> Tensor:
        """Count the first tokens of each row's text that need no prefill: the longest common prefix, in whole blocks.

        Args:
            ids: [rows, length] long, the text by absolute position.
            upto: [rows] long, the most that is asked for.
            block_size: Keys and values depend on the whole block.
            with_head: Whether the head's layers must hold them too.
            later: Whether it is enough that the head can read them later.
        """
        length = min(ids.shape[1], self.ids.shape[1])
        common = (ids[:, :length] == self.ids[:, :length].to(ids.device)).long().cumprod(1).sum(1)
        of_head = torch.maximum(self.head_held, self.hidden_held) if later else self.head_held
        held = torch.minimum(self.held, of_head) if with_head else self.held
        return torch.minimum(torch.minimum(common, held.to(ids.device)), upto) // block_size * block_size

    def with_room(self, rows: int, capacity: int, scratch: int) -> "BlockCache":
        """Make room: return this cache, or a bigger one with what it holds.

        Args:
            rows: A multiple of this one's: each is then held so many times, one after the other.
            capacity, scratch: At least so many slots, and tokens that can be scored at once.
        """
        if self.fits(rows, capacity, scratch):
            return self
        capacity, scratch = max(capacity, self.capacity), max(scratch, self.scratch)
        heads, width, devices = self.num_key_value_heads, self.head_dim, self._device_of
        bigger = BlockCache(rows, heads, width, devices, capacity, scratch, self.dtype, self.head_layers, self.hidden_size)
        bigger.owner = self.owner
        bigger.fill_from(self)
        return bigger

    def fits(self, rows: int, capacity: int, scratch: int) -> bool:
        """Tell if it has room for so much, and may be written to."""
        return rows == self.rows and capacity <= self.capacity and scratch <= self.scratch and self.writable

    def fill_from(self, other: "BlockCache") -> None:
        """Hold what another cache of as many layers holds, a divisor of this one's rows: each so many times in turn."""
        copies = self.rows // other.rows
        self.hold(*(t.repeat_interleave(copies, 0) for t in (other.ids, other.held, other.head_held, other.hidden_held)))
        used = int(other.held.max())
        for device, buffer in other._buffers.items():
            held = buffer[:, :, :, :, other.scratch : other.scratch + used]
            self._buffers[device][:, :, :, :, self.scratch : self.scratch + used] = held.repeat_interleave(copies, 2)
        self._hidden[:, :used] = other._hidden[:, :used].repeat_interleave(copies, 0)

    def alias(self) -> "BlockCache":
        """Make another cache on the same memory."""
        return copy.copy(self)

    def first(self, rows: int) -> "BlockCache":
        """Make a cache of the first rows, on the same memory."""
        part = self.alias()
        part.rows, part._hidden = rows, self._hidden[:rows]
        part._buffers = {device: buffer[:, :, :rows] for device, buffer in self._buffers.items()}
        return part

    def swap(self, one: int, other: int, layers: range, used: int, with_hidden: bool) -> None:
        """Exchange what two rows have in the first `used` slots: keys and values of some layers, also kept hidden states."""
        parts = [part[..., self.scratch : self.scratch + used, :].movedim(2, 0) for part in self._of(layers)]
        for part in [*parts, self._hidden[:, :used]] if with_hidden else parts:
            kept = part[one].clone()
            part[one] = part[other]
            part[other] = kept

    def shares(self, other: "BlockCache") -> bool:
        """Tell if two caches have the same memory."""
        return self._buffers is other._buffers

    def detach(self) -> None:
        """Go on with a copy of the memory that is shared."""
        self._buffers = {device: buffer.clone() for device, buffer in self._buffers.items()}
        self._hidden = self._hidden.clone()

    def _of(self, layers: range) -> Iterator[Tensor]:
        """Select the memory of some layers, of each device: [2, layers, rows, heads, scratch + capacity, head_dim]."""
        for device, buffer in self._buffers.items():
            held = [self._index[layer] for layer in layers if self._device_of[layer] == device]
            if held:
                yield buffer[:, held[0] : held[-1] + 1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: rows differ in length, so there is no common one; positions are always passed explicitly."""
        return 0


__all__ = ["BlockCache", "PassingReference", "WeightsSeen", "devices_of_layers"]
