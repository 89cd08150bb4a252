"""Packed training passes over noisy copies of samples and their clean tokens: the attention rule,
random numbers, and the keys and values that several passes share.

Positions and blocks count from 0 at a sample's first token; each sample may have a block size of
its own.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.cache_utils import Cache

from modeling_mrp.rules.draft import mix_bits, noise_key

CLEAN_VIEW = 0  # views above 0 are noisy copies
NO_VIEW = -1  # padding


@dataclass(frozen=True)
class PackedRule:
    """The rule of attention in a pass over noisy copies and the clean sequence, [x_t | x_0] (SDAR,
    section 3; MRP, section 4).

    A noisy token sees its own noisy block and the clean tokens of earlier blocks; a clean token
    sees the clean tokens of its own and earlier blocks; nothing crosses from one sample to another.
    Padding (view -1) sees only itself.

    Attributes:
        view: [batch, length] long: 0 clean, 1, 2, ... the noisy copy, -1 padding.
        block: [batch, length] long: the token's block index.
        sample: [batch, length] long: the sample a token belongs to, when several share a row.
    """

    view: Tensor
    block: Tensor
    sample: Tensor

    def __call__(self, row: Tensor, head: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        """Return whether queries see keys, in the form of flex attention's `mask_mod`; indices are
        broadcast, and all heads have the same mask."""
        query_view, key_view = self.view[row, query], self.view[row, key]
        query_block, key_block = self.block[row, query], self.block[row, key]
        clean = (key_view == CLEAN_VIEW) & (
            (key_block < query_block) | ((query_view == CLEAN_VIEW) & (key_block == query_block))
        )
        noisy = (key_view != CLEAN_VIEW) & (key_view == query_view) & (key_block == query_block)
        same_sample = (self.sample[row, query] == self.sample[row, key]) & (key_view != NO_VIEW)
        return ((clean | noisy) & same_sample & (query_view != NO_VIEW)) | (query == key)

    def dense(self) -> Tensor:
        """Return the whole mask, [batch, 1, length, length] bool."""
        rows, length = self.view.shape
        row = torch.arange(rows, device=self.view.device)
        column = torch.arange(length, device=self.view.device)
        return self(row[:, None, None], None, column[None, :, None], column[None, None, :])[:, None]


@dataclass
class PackedBatch:
    """One training pass [x_t | x_0] (noisy copies first, then the clean sequence), padded to a
    common length.

    Attributes:
        input_ids: [batch, length] long; masked positions hold `mask_token_id`.
        target_ids: [batch, length] long; the true token; in noisy copies -1 (`BLANK`) after the end
            of a text.
        position_ids: [batch, length] long; absolute positions.
        block: [batch, length] long; position // block size.
        view: [batch, length] long; 0 clean, 1, 2, ... noisy copies, -1 padding.
        sample: [batch, length] long; the number of a token's sample within the row.
        weight: [batch, length] float32; the loss weight of a masked position, 0 elsewhere.
        response_tokens: [] long; the supervised response tokens, by which the loss is divided.
        noise_key: [batch, length] long below 2**32; one number for all tokens of a sample, new at
            each visit.
    """

    input_ids: Tensor
    target_ids: Tensor
    position_ids: Tensor
    block: Tensor
    view: Tensor
    sample: Tensor
    weight: Tensor
    response_tokens: Tensor
    noise_key: Tensor

    def rule(self) -> PackedRule:
        """Return the rule of attention of the packed rows."""
        return PackedRule(self.view, self.block, self.sample)

    @property
    def begins(self) -> Tensor:
        """Mark the first column of each block, [batch, length] bool."""
        columns = torch.stack([self.view, self.sample, self.block])
        return F.pad((columns[..., 1:] != columns[..., :-1]).any(0), (1, 0), value=True)

    def before(self) -> Tensor:
        """Find the column of the previous position, [batch, length] long; -1 where there is none.

        That column is in the same view or, at the start of a block, in the clean one. Models whose
        hidden states predict the next position take their prediction from it.
        """
        view = torch.where(self.begins, CLEAN_VIEW, self.view)
        size = int(self.position_ids.max()) + 2

        def key(view: Tensor, position: Tensor) -> Tensor:
            return (self.sample * (int(self.view.max()) + 1) + view) * size + position

        keys, order = torch.where(self.view == NO_VIEW, -1, key(self.view, self.position_ids)).sort(
            -1
        )
        previous_keys = key(view, self.position_ids - 1)
        index = torch.searchsorted(keys, previous_keys).clamp(max=keys.shape[1] - 1)
        exists = (
            (keys.gather(1, index) == previous_keys)
            & (self.view != NO_VIEW)
            & (self.position_ids > 0)
        )
        return torch.where(exists, order.gather(1, index), -1)

    @property
    def supervised(self) -> Tensor:
        """Mark the masked positions that carry loss, [batch, length] bool."""
        return self.weight > 0


def noisy_length(batch: PackedBatch) -> int:
    """Count the columns of the noisy copies, after which the clean sequence begins."""
    return int((batch.view == CLEAN_VIEW).any(0).int().argmax())


def noisy_copies(batch: PackedBatch) -> PackedBatch:
    """Select the columns of the noisy copies."""
    length = noisy_length(batch)
    return replace(
        batch, **{name: value[:, :length] for name, value in vars(batch).items() if value.dim()}
    )


def sparse_mask(rule: PackedRule, queries: int) -> BlockMask:
    """Make flex attention's mask between the first `queries` columns and all columns, as tiles that
    all heads share.

    To find the tiles, a mask [queries, length] bool is made for each batch row in turn; attention
    itself holds no such mask.
    """
    rows, length = rule.view.shape
    return create_block_mask(rule, rows, None, queries, length, device=rule.view.device)


def widest(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for devices that may not support it, such as Apple's and some of
    Intel's."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


def uniform(batch: PackedBatch, purpose: int, index: Tensor) -> Tensor:
    """Draw uniform numbers in (0, 1), [batch, length] in the `widest` dtype. They depend on the
    sample, the noisy copy, `purpose` and `index`, [batch, length] long, which holds positions, or
    block indices for one number per block."""
    bits = noise_key(batch.noise_key, index, mix_bits(batch.view + 1) ^ purpose)
    dtype = widest(index.device)
    return ((bits.to(dtype) + 0.5) * 2.0**-32).clamp(max=1 - torch.finfo(dtype).eps)


class CleanCache(Cache):
    """A cache of keys and values of the clean half of a packed pass [x_t | x_0], computed once.

    Clean tokens never see noisy ones, so their keys and values do not depend on the noisy copies.
    The first pass, over all columns (the noisy copies' first), stores them; later passes, over the
    noisy columns alone, read them, with gradients where the first pass had them.
    """

    def __init__(self, noisy_length: int) -> None:
        super().__init__(layers=[])
        self.noisy_length = noisy_length
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def filled(self) -> bool:
        """Return whether the first pass has run."""
        return bool(self.stored)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of all columns, [batch, heads, columns, head_dim]; store the clean
        ones in the first pass."""
        if layer_idx in self.stored:
            keys, values = self.stored[layer_idx]
            return torch.cat([key_states, keys], 2), torch.cat([value_states, values], 2)
        keys = key_states[:, :, self.noisy_length :]
        values = value_states[:, :, self.noisy_length :]
        # A copy frees the noisy columns; with gradients the backward pass holds them anyway.
        if not keys.requires_grad:
            keys = keys.contiguous()
            values = values.contiguous()
        self.stored[layer_idx] = (keys, values)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are always passed explicitly."""
        return 0
