"""Packed training passes over noisy copies of samples and their clean tokens: the attention rule,
random numbers, and the keys and values that several passes share.

In each sample, positions and blocks are counted from 0 at the first token. Each sample may have a
block size of its own.
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
    """The attention rule of a pass [x_t | x_0], where x_t are noisy copies and x_0 is the clean
    text (SDAR, section 3; MRP, section 4).

    A noisy token sees its own block in its own noisy copy, and the clean tokens of earlier blocks.
    A clean token sees the clean tokens of its own block and of earlier blocks. No token sees a
    token of another sample. Padding (view -1) sees only itself.

    Attributes:
        view: int64 [batch, length]: 0 for clean tokens, 1, 2, ... for the noisy copies, -1 for
            padding.
        block: int64 [batch, length]: the index of the token's block in its sample.
        sample: int64 [batch, length]: the number of the token's sample in its row, which may hold
            several samples.
    """

    view: Tensor
    block: Tensor
    sample: Tensor

    def __call__(self, row: Tensor, head: Tensor | None, query: Tensor, key: Tensor) -> Tensor:
        """Return a bool tensor that is True where a query sees a key. The arguments are those of
        flex attention's `mask_mod`: indices, which are broadcast. All heads have the same mask."""
        query_view, key_view = self.view[row, query], self.view[row, key]
        query_block, key_block = self.block[row, query], self.block[row, key]
        clean = (key_view == CLEAN_VIEW) & (
            (key_block < query_block) | ((query_view == CLEAN_VIEW) & (key_block == query_block))
        )
        noisy = (key_view != CLEAN_VIEW) & (key_view == query_view) & (key_block == query_block)
        same_sample = (self.sample[row, query] == self.sample[row, key]) & (key_view != NO_VIEW)
        return ((clean | noisy) & same_sample & (query_view != NO_VIEW)) | (query == key)

    def dense(self) -> Tensor:
        """Return the whole mask, bool [batch, 1, length, length], which is True where a query sees
        a key."""
        rows, length = self.view.shape
        row = torch.arange(rows, device=self.view.device)
        column = torch.arange(length, device=self.view.device)
        return self(row[:, None, None], None, column[None, :, None], column[None, None, :])[:, None]


@dataclass
class PackedBatch:
    """The batch of one training pass [x_t | x_0]: in each row, first the noisy copies x_t, then the
    clean text x_0, padded to the same length in all rows.

    Attributes:
        input_ids: int64 [batch, length]; masked positions hold `mask_token_id`.
        target_ids: int64 [batch, length]; the true token, but -1 (`BLANK`) in noisy copies after
            the end of a text, or between the end of a turn and the end of its block.
        position_ids: int64 [batch, length]; the token's position in its sample.
        block: int64 [batch, length]; position // block size.
        view: int64 [batch, length]; 0 for clean tokens, 1, 2, ... for noisy copies, -1 for padding.
        sample: int64 [batch, length]; the number of the token's sample in its row.
        weight: float32 [batch, length]; the weight of the loss at a position; 0 where there is
            none.
        response_tokens: int64 []; the number of response tokens (those to learn) in the samples,
            each counted once; the loss is divided by it.
        noise_key: int64 [batch, length], below 2**32; the same number for all tokens of a sample,
            but another one in each epoch. It is 0 in padding, and in noisy copies that are the
            states of `sequential`, which need no noise.
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
        """Return the attention rule of this batch."""
        return PackedRule(self.view, self.block, self.sample)

    @property
    def begins(self) -> Tensor:
        """Return bool [batch, length], True at the first column of each block."""
        columns = torch.stack([self.view, self.sample, self.block])
        return F.pad((columns[..., 1:] != columns[..., :-1]).any(0), (1, 0), value=True)

    def before(self) -> Tensor:
        """Return, for each column, the index of the column that holds the previous position of the
        same sample. For models whose hidden states predict the next position: the prediction for a
        column is taken from the column returned for it.

        Returns:
            int64 [batch, length]. For a column of the clean text, or for the first column of a
                block in a noisy copy, a column of the clean text; for another column of a noisy
                copy, a column of the same copy; for the first position of a sample and for padding,
                -1.
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

    def next_view(self) -> Tensor:
        """Return, for each column of a noisy copy, the column of the same position in the next
        noisy copy of its sample, int64 [batch, length]; -1 for the columns of the last copy, of the
        clean text and of padding."""
        views = int(self.view.max()) + 2
        size = int(self.position_ids.max()) + 1

        def key(view: Tensor) -> Tensor:
            found = (self.sample * views + view) * size + self.position_ids
            return torch.where(self.view > CLEAN_VIEW, found, -1)

        keys, order = key(self.view).sort(-1)
        wanted = key(self.view + 1)
        index = torch.searchsorted(keys, wanted).clamp(max=keys.shape[1] - 1)
        exists = (keys.gather(1, index) == wanted) & (wanted >= 0)
        return torch.where(exists, order.gather(1, index), -1)

    @property
    def supervised(self) -> Tensor:
        """Return bool [batch, length], True at the masked positions that have a loss."""
        return self.weight > 0


def noisy_length(batch: PackedBatch) -> int:
    """Return the number of columns of the noisy copies; the clean text begins after them."""
    return int((batch.view == CLEAN_VIEW).any(0).int().argmax())


def noisy_copies(batch: PackedBatch) -> PackedBatch:
    """Return the part of a batch that covers only the columns of the noisy copies."""
    length = noisy_length(batch)
    return replace(
        batch, **{name: value[:, :length] for name, value in vars(batch).items() if value.dim()}
    )


def sparse_mask(rule: PackedRule, queries: int) -> BlockMask:
    """Make the mask of flex attention that follows `rule`. The queries are those of the first
    `queries` columns, the keys those of all columns. All heads share the mask.

    To find the tiles of the mask, a dense mask, bool [batch, 1, queries, length], is made here.
    Attention itself holds no such mask.
    """
    rows, length = rule.view.shape
    return create_block_mask(rule, rows, None, queries, length, device=rule.view.device)


def widest(device: torch.device) -> torch.dtype:
    """Return the widest float dtype that can be relied on: float64 on CPU and CUDA, and otherwise
    float32, since some devices, such as Apple's and some of Intel's, may not support float64."""
    return torch.float64 if device.type in ("cpu", "cuda") else torch.float32


def uniform(batch: PackedBatch, purpose: int, index: Tensor) -> Tensor:
    """Draw uniform random numbers. The same arguments always give the same numbers. They differ
    between samples, between the noisy copies of a sample, and between epochs.

    Args:
        batch: The batch.
        purpose: A number that the caller chooses. Draws for another purpose get other numbers.
        index: int64 [batch, length]. Columns of a noisy copy with the same index get the same
            number. If it holds positions, each position gets its own number; if it holds block
            indices, all columns of a block share one.

    Returns:
        [batch, length], numbers in (0, 1) in the dtype that `widest` returns.
    """
    bits = noise_key(batch.noise_key, index, mix_bits(batch.view + 1) ^ purpose)
    dtype = widest(index.device)
    return ((bits.to(dtype) + 0.5) * 2.0**-32).clamp(max=1 - torch.finfo(dtype).eps)


class CleanCache(Cache):
    """A cache that keeps the keys and values of the clean text of a packed pass [x_t | x_0], so
    that they are computed once.

    Clean tokens never see noisy ones, so their keys and values do not depend on the noisy copies.
    The first pass covers all columns, those of the noisy copies first, and stores the keys and
    values of the clean text. Later passes cover only the noisy columns, and read the stored keys
    and values. These have gradients if they had gradients in the first pass.

    Args:
        noisy_length: The number of columns of the noisy copies.
    """

    def __init__(self, noisy_length: int) -> None:
        super().__init__(layers=[])
        self.noisy_length = noisy_length
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def filled(self) -> bool:
        """Return whether the first pass has stored its keys and values."""
        return bool(self.stored)

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all columns, [batch, heads, columns, head_dim]. The first
        pass also stores those of the clean text; later passes append the stored ones to those of
        the noisy columns."""
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
