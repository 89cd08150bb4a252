"""Block diffusion: masks of attention, and the training pass that holds noisy and clean tokens together.

Positions are absolute and count from 0 at a sequence's first real token; the block of a position is
``position // block_size``. Masks here are boolean, True where a query may look at a key.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE_INDEX = -100
CLEAN_VIEW = 0  # views above 0 are noisy copies
NO_VIEW = -1  # padding


def block_causal_mask(query_positions: Tensor, key_positions: Tensor, key_valid: Tensor, block_size: int) -> Tensor:
    """Let every token see the earlier blocks and the whole of its own block (SDAR, section 3).

    Args:
        query_positions: [batch, queries] absolute positions.
        key_positions: [batch, keys] absolute positions.
        key_valid: [batch, keys] bool; False for padding.
        block_size: Tokens per block.

    Returns:
        [batch, 1, queries, keys] bool.
    """
    not_later = key_positions[:, None, :] // block_size <= query_positions[:, :, None] // block_size
    return (not_later & key_valid[:, None, :])[:, None]


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
        view: [batch, length] long; 0 clean, 1, 2, ... noisy copies, -1 padding.
        sample: [batch, length] long; which sample of the row a token belongs to.
        weight: [batch, length] float32; the loss weight of a masked position, 0 elsewhere.
        response_tokens: How many response tokens the batch supervises: the loss is divided by it.
        noise_key: [batch, length] long below 2**32; the same for all tokens of a sample, and another for each visit of one.
    """

    input_ids: Tensor
    target_ids: Tensor
    position_ids: Tensor
    view: Tensor
    sample: Tensor
    weight: Tensor
    response_tokens: Tensor
    noise_key: Tensor | None = None

    def rule(self, block_size: int) -> PackedRule:
        """Make the rule of attention."""
        return PackedRule(self.view, self.position_ids // block_size, self.sample)

    def attention_mask(self, block_size: int) -> Tensor:
        """Write the rule of attention out, [batch, 1, length, length] bool: see `PackedRule`."""
        return self.rule(block_size).dense()

    @property
    def supervised(self) -> Tensor:
        """[batch, length] bool: masked positions that carry loss."""
        return self.weight > 0


def pack_noisy(
    input_ids: Tensor, response: Tensor, valid: Tensor, masked: Tensor, weight: Tensor, mask_token_id: int
) -> PackedBatch:
    """Pack a batch of sequences (one sample a row) with one noisy copy: [x_t | x_0].

    Args:
        input_ids: [batch, length] long.
        response: [batch, length] bool: the tokens that are learned.
        valid: [batch, length] bool: False for padding, on either side. Positions are counted from the first token.
        masked: [batch, length] bool: response tokens hidden in the noisy copy.
        weight: [batch, length] float: loss weight of each masked token (published: 1 / t).
        mask_token_id: The mask's id.
    """
    batch, length = input_ids.shape
    positions = (valid.long().cumsum(-1) - 1).clamp(min=0)
    hidden = masked & response & valid
    noisy_view = torch.where(valid, 1, NO_VIEW)
    clean_view = torch.where(valid, CLEAN_VIEW, NO_VIEW)
    return PackedBatch(
        input_ids=torch.cat([input_ids.masked_fill(hidden, mask_token_id), input_ids], 1),
        target_ids=torch.cat([input_ids, input_ids], 1),
        position_ids=torch.cat([positions, positions], 1),
        view=torch.cat([noisy_view, clean_view], 1),
        sample=torch.zeros(batch, 2 * length, dtype=torch.long, device=input_ids.device),
        weight=torch.cat([torch.where(hidden, weight.float(), 0.0), torch.zeros_like(weight, dtype=torch.float32)], 1),
        response_tokens=(response & valid).sum(),
    )


__all__ = [
    "CLEAN_VIEW",
    "IGNORE_INDEX",
    "NO_VIEW",
    "PackedBatch",
    "PackedRule",
    "block_causal_mask",
    "pack_noisy",
]
