"""Packed passes of training, which hold noisy copies of samples and their clean tokens together: who sees whom in them, their
random numbers, and the keys and values that several passes share.

Positions are absolute and count from 0 at a sample's first token, and so do blocks, whose size a sample may have for itself.
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
    """The rule of attention in a pass of noisy copies and the clean sequence, [x_t | x_0] (SDAR, section 3; MRP, section 4).

    A noisy token sees its own noisy block and the clean tokens of earlier blocks; a clean token sees the clean tokens
    of its own and earlier blocks; nothing crosses from one sample to another. Padding (view -1) sees only itself.

    Attributes:
        view: [batch, length] long: 0 clean, 1, 2, ... the noisy copy, -1 padding.
        block: [batch, length] long: the token's block index.
        sample: [batch, length] long: the sample a token belongs to, when several share a row.
    """

    view: Tensor
    block: Tensor
    sample: Tensor

    def __call__(self, row: Tensor, head: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        """Tell of indices that broadcast who sees whom: flex attention's `mask_mod`. All heads see the same."""
        query_view, key_view = self.view[row, query], self.view[row, key]
        query_block, key_block = self.block[row, query], self.block[row, key]
        clean = (key_view == CLEAN_VIEW) & (
            (key_block < query_block) | ((query_view == CLEAN_VIEW) & (key_block == query_block))
        )
        noisy = (key_view != CLEAN_VIEW) & (key_view == query_view) & (key_block == query_block)
        same = (self.sample[row, query] == self.sample[row, key]) & (key_view != NO_VIEW)
        return ((clean | noisy) & same & (query_view != NO_VIEW)) | (query == key)

    def dense(self) -> Tensor:
        """Write the rule out: [batch, 1, length, length] bool."""
        rows, length = self.view.shape
        row, column = (torch.arange(n, device=self.view.device) for n in (rows, length))
        return self(row[:, None, None], None, column[None, :, None], column[None, None, :])[:, None]


@dataclass
class PackedBatch:
    """One training pass [x_t | x_0] (noisy copies first, then the clean sequence), padded to a common length.

    Attributes:
        input_ids: [batch, length] long; masked positions hold `mask_token_id`.
        target_ids: [batch, length] long; the true token; -1 behind the end of a text in noisy copies of the trainer.
        position_ids: [batch, length] long; absolute positions.
        block: [batch, length] long; position // block size.
        view: [batch, length] long; 0 clean, 1, 2, ... noisy copies, -1 padding.
        sample: [batch, length] long; which sample of the row a token belongs to.
        weight: [batch, length] float32; the loss weight of a masked position, 0 elsewhere.
        response_tokens: How many response tokens the batch supervises: the loss is divided by it.
        noise_key: [batch, length] long below 2**32; the same for all tokens of a sample, and another for each visit of one.
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
        """Make the rule that says which tokens of the packed rows attend to which."""
        return PackedRule(self.view, self.block, self.sample)

    @property
    def begins(self) -> Tensor:
        """[batch, length] bool: the first column of each block."""
        columns = torch.stack([self.view, self.sample, self.block])
        return F.pad((columns[..., 1:] != columns[..., :-1]).any(0), (1, 0), value=True)

    def before(self) -> Tensor:
        """Find the column before each one: [batch, length] long, -1 where there is none.

        It is in the same view or, before a block, in the clean one. A model whose hidden states are those of the next position
        predicts from there.
        """
        view = torch.where(self.begins, CLEAN_VIEW, self.view)
        size = int(self.position_ids.max()) + 2

        def place(view: Tensor, position: Tensor) -> Tensor:
            return (self.sample * (int(self.view.max()) + 1) + view) * size + position

        known, order = torch.where(self.view == NO_VIEW, -1, place(self.view, self.position_ids)).sort(-1)
        wanted = place(view, self.position_ids - 1)
        at = torch.searchsorted(known, wanted).clamp(max=known.shape[1] - 1)
        there = (known.gather(1, at) == wanted) & (self.view != NO_VIEW) & (self.position_ids > 0)
        return torch.where(there, order.gather(1, at), -1)

    @property
    def supervised(self) -> Tensor:
        """[batch, length] bool: masked positions that carry loss."""
        return self.weight > 0


def noisy_length(batch: PackedBatch) -> int:
    """Count the columns of the noisy copies: the clean sequence begins behind them."""
    return int((batch.view == CLEAN_VIEW).any(0).int().argmax())


def noisy_copies(batch: PackedBatch) -> PackedBatch:
    """Select the columns of the noisy copies."""
    length = noisy_length(batch)
    return replace(batch, **{name: value[:, :length] for name, value in vars(batch).items() if value.dim()})


def sparse_mask(rule: PackedRule, queries: int) -> BlockMask:
    """Make flex attention's mask of the first `queries` columns: who sees whom by tile, the same for all heads.

    To find the tiles a [queries, length] bool is made once a batch row and dropped; attention itself holds none.
    """
    rows, length = rule.view.shape
    return create_block_mask(rule, rows, None, queries, length, device=rule.view.device)


def uniform(batch: PackedBatch, purpose: int, of: Tensor) -> Tensor:
    """Draw numbers in (0, 1), [batch, length] float64, that depend on sample, noisy copy and value of `of` alone, [batch,
    length] long: positions, or their blocks for one draw a block. Each `purpose` has numbers of its own.
    """
    return (noise_key(batch.noise_key, of, mix_bits(batch.view + 1) ^ purpose).double() + 0.5) * 2.0**-32


class CleanCache(Cache):
    """The clean half of a packed pass [x_t | x_0], computed once.

    Clean tokens never look at noisy ones, so their keys and values are the same whatever the noisy copies hold. The first
    pass, over all columns, leaves them here; later passes over the noisy columns alone read them, with gradients where
    the first pass had them. The noisy copies' columns come first.
    """

    def __init__(self, noisy_length: int) -> None:
        super().__init__(layers=[])
        self.noisy_length = noisy_length
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def filled(self) -> bool:
        """Whether the first pass has been."""
        return bool(self.kept)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Keys and values ([batch, heads, columns, head_dim]) of all columns, whichever pass this is."""
        if layer_idx in self.kept:
            keys, values = self.kept[layer_idx]
            return torch.cat([key_states, keys], 2), torch.cat([value_states, values], 2)
        keys, values = (states[:, :, self.noisy_length :] for states in (key_states, value_states))
        # Copies let go of the noisy columns; where there are gradients these are held for the backward pass all the same.
        self.kept[layer_idx] = (keys, values) if keys.requires_grad else (keys.contiguous(), values.contiguous())
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always passed explicitly."""
        return 0
