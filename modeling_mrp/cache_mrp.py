"""Keys and values of committed blocks by absolute position, and the scratch of the states being scored."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class BlockCache(Cache):
    """KV memory of fixed size: [scratch | committed slots] in one buffer per device, written in place.

    A committed token lives in the slot of its absolute position, so padding takes no room and rows of different length
    need no special case. The states of a round are written to the scratch, right before slot 0, so that what
    attention reads is one view without a copy. When a state turns out clean, `commit` copies its keys and values to its slots.

    Args:
        batch_size: Rows.
        num_key_value_heads: KV heads of every layer.
        head_dim: Size of a head.
        layer_devices: The device of every layer: the backbone's first, then the head's.
        capacity: Committed slots per row, a multiple of the block size.
        scratch: Tokens that can be scored at once per row.
        dtype: Of keys and values.
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
    ) -> None:
        super().__init__(layers=[])
        self.scratch = scratch
        self.capacity = capacity
        self._device_of = list(layer_devices)
        devices = list(dict.fromkeys(layer_devices))
        # Zeros, since a masked slot still enters the product with its weight of 0, which NaN would survive.
        self._buffers = {
            device: torch.zeros(
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
        self._index = [self._device_of[:layer].count(device) for layer, device in enumerate(self._device_of)]
        self._write = self._read = slice(0, 0)

    @property
    def nbytes(self) -> int:
        """Bytes held, fixed at construction."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def target_scratch(self, width: int, used: int) -> None:
        """The next forward writes `width` scratch tokens and reads them before the first `used` committed slots."""
        self._write = slice(self.scratch - width, self.scratch)
        self._read = slice(self.scratch - width, self.scratch + used)

    def target_slots(self, start: int, length: int) -> None:
        """The next forward writes the slots [start, start + length) and reads all slots up to there."""
        self._write = slice(self.scratch + start, self.scratch + start + length)
        self._read = slice(self.scratch, self.scratch + start + length)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Writes new keys and values ([batch, heads, new, head_dim]) to the target and returns what attention reads."""
        keys, values = self._buffers[self._device_of[layer_idx]][:, self._index[layer_idx]]
        keys[:, :, self._write] = key_states
        values[:, :, self._write] = value_states
        return keys[:, :, self._read], values[:, :, self._read]

    def commit(self, source: Tensor, start: Tensor, which: Tensor, length: int, layers: range) -> None:
        """Copies one scored block per row from the scratch of the last forward to its committed slots.

        Args:
            source: [rows] long, where the block begins in the last forward's scratch.
            start: [rows] long, the block's absolute position.
            which: [rows] bool, the rows that commit; another row's scratch is copied onto itself.
            length: Tokens in the block.
            layers: The layers whose forward that was.
        """
        offsets = torch.arange(length, device=start.device)
        source = self._write.start + source[:, None] + offsets
        slots = torch.where(which[:, None], self.scratch + start[:, None] + offsets, source)
        rows = torch.arange(len(start), device=start.device)[:, None]
        for device, buffer in self._buffers.items():
            held = [self._index[layer] for layer in layers if self._device_of[layer] == device]
            if held:
                part = buffer[:, held[0] : held[-1] + 1]
                row, to, of = rows.to(device), slots.to(device), source.to(device)
                part[:, :, row, :, to] = part[:, :, row, :, of]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Rows differ in length, so there is no common one; positions are always passed explicitly."""
        return 0


__all__ = ["BlockCache"]
