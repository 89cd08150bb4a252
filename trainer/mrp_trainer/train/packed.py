"""Packed passes of training, which hold noisy copies of samples and their clean tokens together, and who sees whom in them.

Positions are absolute and count from 0 at a sample's first token, and so do blocks, whose size a sample may have for itself.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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
