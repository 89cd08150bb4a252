"""The KV cache: committed blocks by absolute position and, after the longest text, the states that
are being scored."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..model.loading import device_of
from .inspection import PassingReference, weight_versions
from .uploads import upload_all

# If shapes must stay the same, the number of slots that attention reads of the texts is rounded up
# to a power of two, at least this one.
LEAST_BUCKET = 256


def devices_of_layers(model: Any, with_head: bool) -> tuple[torch.device, ...]:
    """Return the device on which each layer of a model computes: first the layers of the backbone,
    then, if `with_head`, those of the head."""
    layers = list(model.model.layers)
    if with_head:
        layers += model.mrp_head.layers
    return tuple(device_of(layer.self_attn.k_proj) for layer in layers)


class BlockCache(Cache):
    """Keys and values, in memory that is allocated once: one buffer per device, `[rows, slots,
    layers, 2, kv_heads, head_dim]`, written in place.

    A committed token, whose keys and values are final, lies in the slot of its absolute position,
    so padding takes no slots. The states of a round are written after the longest text, so that
    attention reads one slice. `move` copies the keys and values of an accepted clean state (a block
    without masks) to the text of its row. A call of `generate` that gets a cache overwrites it
    after the prefix that the cache shares with the new prompt. To keep the cache, pass a
    `copy.deepcopy` of it.

    Args:
        model: The `MRPForCausalLM`.
        rows: Number of rows of a batch.
        capacity: Number of slots per row for committed tokens, a multiple of the block size.
        scratch: Number of slots per row for tokens that are being scored.
        with_head: Whether the cache also has the head's layers, after those of the backbone, and
            hidden states that the head reads later.
        fixed: Whether forwards on this cache are recorded as CUDA graphs, which need fixed shapes.
            If so, the number of slots that attention reads of the texts is rounded up to a power of
            two.

    Attributes:
        shifted: Whether the backbone's hidden state at a position predicts the token at the next
            position, instead of the one there.
        hidden: [rows, slots, hidden_size], the hidden states by position. If `shifted`, a slot
            holds the hidden state of the position before.
        ids: For each row, the text whose tokens the slots hold.
        held, head_held: For each row, the number of leading tokens whose keys and values are in all
            layers of the backbone (`held`) and in all layers of the head (`head_held`).
        hidden_held: For each row, the number of leading tokens that the head has read or can still
            read from `hidden`.
        owner: A weak reference to the model that filled the cache.
        weights: Maps the names of the model's parts to their `weight_versions` at the time when the
            cache was filled.
        first, active: The rows that take part in forwards: `active` rows, from the row `first` on.
        begin, end: The range of the *target*, which is the slots that the next forward writes.
        written: For each layer, the keys and the values of the target, [rows, heads, new, head_dim]
            each.
        read: For each layer, the keys and the values that attention reads, including the target,
            [rows, heads, seen, head_dim] each.
    """

    def __init__(
        self,
        model: Any,
        rows: int,
        capacity: int,
        scratch: int,
        with_head: bool,
        fixed: bool = False,
    ) -> None:
        super().__init__(layers=[])
        config = model.config
        key_weight = model.model.layers[0].self_attn.k_proj.weight
        self.rows = rows
        self.capacity = capacity
        self.scratch = scratch
        self.fixed = fixed
        self.dtype = model.dtype
        self.shifted = model.model.shifted
        self.layer_devices = devices_of_layers(model, with_head)
        self.head_layers = len(self.layer_devices) - config.num_hidden_layers
        self.owner = PassingReference(model)
        self.weights: dict[str, list[Any]] = {}
        self.empty()
        heads = config.num_key_value_heads
        width = config.head_dim
        if (getattr(model, "tp_size", None) or 1) > 1 and hasattr(key_weight, "to_local"):
            heads = len(key_weight.to_local()) // width
        self._index = []
        for layer, device in enumerate(self.layer_devices):
            self._index.append(self.layer_devices[:layer].count(device))
        slots = scratch + (bucket(capacity) if fixed else capacity)
        # attention multiplies masked values by 0, but memory that was never written may hold NaN
        self._buffers: dict[torch.device, Tensor] = {}
        for device, layers in Counter(self.layer_devices).items():
            shape = (rows, slots, layers, 2, heads, width)
            self._buffers[device] = torch.zeros(shape, dtype=self.dtype, device=device)
        size = (
            rows,
            capacity + scratch * self.shifted,
            config.hidden_size if with_head or self.shifted else 0,
        )
        self.hidden = torch.empty(size, dtype=self.dtype, device=self.layer_devices[-1])
        self.hidden[:, :1] = 0  # before the first token
        self.first = 0
        self.active = rows
        self.begin = 0
        self.end = 0

    @property
    def nbytes(self) -> int:
        """The size of all buffers in bytes, fixed at construction."""
        return sum(buffer.nbytes for buffer in (*self._buffers.values(), self.hidden))

    def target(self, used: int, width: int, prefill: bool = False) -> None:
        """Set the slots that the next forward uses: it writes `width` slots of each row, and its
        attention reads all slots up to the last one written.

        Args:
            used: The first slot to write, usually the number of slots that the texts take.
            width: The number of slots to write in each row.
            prefill: Whether the forward computes tokens of the texts, in their own slots. Any other
                forward scores states, which are written after the texts. If the cache is `fixed`
                (made for CUDA graphs), their first slot is not `used`, but `used` rounded up to a
                power of two (`bucket`).
        """
        self.begin = bucket(used) if self.fixed and not prefill else used
        self.end = self.begin + width
        self.written = self._views(self.begin)
        self.read = self._views(0)

    @contextmanager
    def of_rows(self, first: int, count: int) -> Iterator[None]:
        """Context manager: while it is open, forwards run on `count` rows only, from the row
        `first` on."""
        before = self.first, self.active
        self.first, self.active = first, count
        try:
            yield
        finally:
            self.first, self.active = before

    def _views(self, begin: int) -> list[tuple[Tensor, Tensor]]:
        """Return views of each layer's keys and values, [rows, heads, slots, head_dim] each, from
        slot `begin` to the end of the target."""
        views = {}
        for device, buffer in self._buffers.items():
            rows = buffer[self.first : self.first + self.active]
            target = rows[:, begin : self.end].permute(2, 3, 0, 4, 1, 5)
            views[device] = target.flatten(0, 1).unbind(0)
        layers = []
        for device, index in zip(self.layer_devices, self._index, strict=True):
            layers.append((views[device][2 * index], views[device][2 * index + 1]))
        return layers

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values of a layer, [rows, heads, new, head_dim] each, to the slots
        that `target` has set; return all keys and values that attention reads in this layer, [rows,
        heads, seen, head_dim] each. Further arguments are ignored."""
        keys, values = self.written[layer_idx]
        keys.copy_(key_states)
        values.copy_(value_states)
        return self.read[layer_idx]

    def move(self, layers: range, moves: Sequence[tuple[int, int, int]], length: int) -> None:
        """For each `(row, source, target)` in `moves`, copy `length` slots of the row in the given
        layers, from slot `source` on to slot `target` on."""
        row, source, target = np.array(moves, np.int64).T
        offsets = np.arange(length)
        for buffer in self._layer_views(layers):
            # A number of a narrow type costs as much to index as a wide one; other devices may lack
            # such writes of int64.
            if (
                buffer.device.type in ("cpu", "cuda")
                and buffer.shape[-1] * buffer.element_size() % 8 == 0
            ):
                buffer = buffer.view(torch.int64)
            first = row * buffer.shape[1]
            indices = []
            for begin in (first + source, first + target):
                indices.append((begin[:, None] + offsets).ravel())
            sources, targets = upload_all(indices, buffer.device)
            slots = buffer.flatten(0, 1)
            slots[targets] = slots[sources]

    def blank(self, layers: range, row: int, begin: int = 0, end: int | None = None) -> None:
        """Zero the slots of a row from `begin` to `end`, by default all, in the given layers.
        Attention multiplies masked slots by the weight 0, but 0 times NaN is NaN."""
        for buffer in self._layer_views(layers):
            buffer[row, begin:end] = 0

    def swap(self, pairs: Sequence[tuple[int, int]], used: int) -> None:
        """Exchange the content of the first `used` slots between the two rows of each pair,
        including the hidden states of these slots."""
        firsts, seconds = np.array(pairs, np.int64).T
        targets = np.concatenate([firsts, seconds])
        sources = np.concatenate([seconds, firsts])
        for buffer in self._held_parts(used):
            indices = upload_all([targets, sources], buffer.device)
            buffer[indices[0]] = buffer[indices[1]]

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Context manager for changes that must be completed: while it is open, the cache is marked
        as empty. At its end, the record of what the cache holds is as before. If an error or an
        interrupt ends the context, the cache stays marked as empty."""
        contents = self.ids, self.held, self.head_held, self.hidden_held
        self.empty()
        yield
        self.hold(*contents)

    def hold(
        self, ids: list[list[int]], held: list[int], head_held: list[int], hidden_held: list[int]
    ) -> None:
        """Record what the cache holds in each row, as attributes of the same names. No keys or
        values are written.

        Args:
            ids: For each row, the text whose tokens the slots hold.
            held, head_held: For each row, the number of leading tokens whose keys and values are in
                all layers of the backbone (`held`) and in all layers of the head (`head_held`).
            hidden_held: For each row, the number of leading tokens that the head has read, or can
                still read from the attribute `hidden`.
        """
        self.ids, self.held, self.head_held, self.hidden_held = ids, held, head_held, hidden_held
        # a copy of the cache needs no copies of views
        self.written = []
        self.read = []

    def empty(self) -> None:
        """Record that the cache holds no tokens. No memory is freed or overwritten."""
        nothing = [0] * self.rows
        self.hold([[] for _ in nothing], nothing, nothing, nothing)

    def cut(
        self, texts: list[list[int]], limits: Sequence[int], block_size: int, with_head: bool
    ) -> list[int]:
        """Keep of each row only the beginning that its content shares with the row's new text, in
        whole blocks and at most as many tokens as `limits` says. Return the number of tokens that
        remain in each row.

        If `with_head`, only those tokens count that the head has read or can still read. The slots
        after the remaining tokens may be overwritten from now on, even by a call that fails.

        Args:
            texts: For each row, its new text.
            limits: For each row, the largest number of tokens that may remain.
            block_size: The number of tokens of a block.
            with_head: Whether the head takes part in the call.
        """
        lengths = []
        for row, (text, limit) in enumerate(zip(texts, limits, strict=True)):
            limit = min(limit, self.held[row])
            if with_head:
                limit = min(limit, max(self.head_held[row], self.hidden_held[row]))
            ids = self.ids[row][:limit]
            common = next(
                (index for index, token in enumerate(ids) if token != text[index]), len(ids)
            )
            lengths.append(common // block_size * block_size)
        self.hold(
            texts,
            lengths,
            list(map(min, lengths, self.head_held)),
            list(map(min, lengths, self.hidden_held)),
        )
        return lengths

    def fits(self, rows: int, capacity: int, scratch: int, with_head: bool) -> bool:
        """Return whether the cache can be used for a call: it can be written to (a cache made in
        inference mode only within that mode), has exactly `rows` rows, has at least `capacity`
        slots per row for committed tokens and `scratch` for tokens that are being scored, and has
        the head's layers if the call is `with_head`."""
        writable = torch.is_inference_mode_enabled() or not self.hidden.is_inference()
        large_enough = (
            capacity <= self.capacity and scratch <= self.scratch and self.head_layers >= with_head
        )
        return writable and rows == self.rows and large_enough

    def fill_from(self, other: "BlockCache") -> None:
        """Copy into this cache the content of another one, which must have as many layers, and the
        record of it (`hold`). Each row of the other cache is repeated `self.rows // other.rows`
        times."""
        copies = self.rows // other.rows
        used = max(other.held)
        records: list[list[Any]] = []
        for record in (other.ids, other.held, other.head_held, other.hidden_held):
            records.append([value for value in record for _ in range(copies)])
        self.hold(*records)
        for target, source in zip(self._held_parts(used), other._held_parts(used), strict=True):
            target.copy_(source.repeat_interleave(copies, 0))

    def detach(self) -> None:
        """Give the cache memory of its own, with a copy of its content. This is for a cache that
        shares memory with another one because it was made by `copy.copy`."""
        self._buffers = {device: buffer.clone() for device, buffer in self._buffers.items()}
        self.hidden = self.hidden.clone()

    def _held_parts(self, used: int) -> list[Tensor]:
        """Return views of the content of the first `used` slots, [rows, slots, ...]: keys and
        values of each device, and hidden states."""
        views = []
        for buffer in self._buffers.values():
            views.append(buffer[:, :used])
        return [*views, self.hidden[:, : used + self.shifted]]

    def _layer_views(self, layers: range) -> Iterator[Tensor]:
        """Yield, for each device that has some of the given layers, a view of the memory of these
        layers there, [rows, slots, layers, 2, heads, head_dim]."""
        for device, buffer in self._buffers.items():
            indices = [
                self._index[layer] for layer in layers if self.layer_devices[layer] == device
            ]
            if indices:
                yield buffer[:, :, indices[0] : indices[-1] + 1]


def check_past(past: Any, model: Any, rows: int, model_key: Hashable = None) -> None:
    """Raise `ValueError` if a call cannot continue from a cache: if another model filled it, it has
    another number of rows, weights have changed since, or dtype or devices are not the model's.

    Args:
        past: What the caller passed as the cache; an object that is no `BlockCache` is refused.
        model: The model of the call.
        rows: The number of prompts of the call.
        model_key: The model's `fingerprint`, which saves time; None if the caller does not have it.
    """
    reason, owner = None, getattr(past, "owner", None)
    if owner is None or owner() is not model:
        reason = (
            "are not those that generate(..., return_dict_in_generate=True) of this very model "
            "gave, or went through a pickle"
        )
    elif past.rows != rows:
        reason = (
            f"hold {past.rows} rows, and input_ids have {rows}, not the same conversations in the "
            "same order"
        )
    elif changed := [
        name
        for name, seen in past.weights.items()
        if seen != weight_versions(getattr(model, name) or nn.Module(), model_key)
    ]:
        reason = f"are older than the weights of {changed[0]}, which have changed"
    elif (was := (past.dtype, past.layer_devices)) != (
        now := (model.dtype, devices_of_layers(model, past.head_layers > 0))
    ):
        reason = f"have another dtype or other devices, {was}, than the model now, {now}"
    if reason is not None:
        raise ValueError(f"past_key_values {reason}: leave them unset")


def bucket(slots: int) -> int:
    """Round a number of slots up to a power of two, at least `LEAST_BUCKET`."""
    return max(LEAST_BUCKET, 1 << (slots - 1).bit_length())
