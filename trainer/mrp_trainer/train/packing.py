"""Noisy copies of a packed batch and their random numbers; keys and values that several passes over one batch share."""

from dataclasses import replace

from torch import Tensor, cat
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.cache_utils import Cache

from modeling_mrp.rules.draft import mix_bits, noise_key

from .packed import CLEAN_VIEW, PackedBatch, PackedRule


def noisy_length(batch: PackedBatch) -> int:
    """Count the columns of the noisy copies: the clean sequence begins behind them."""
    return int((batch.view == CLEAN_VIEW).any(0).int().argmax())


def noisy_copies(batch: PackedBatch) -> PackedBatch:
    """Select the columns of the noisy copies."""
    length = noisy_length(batch)
    return replace(
        batch, **{name: value[:, :length] for name, value in vars(batch).items() if value is not None and value.dim()}
    )


def sparse_mask(rule: PackedRule, queries: int) -> BlockMask:
    """Make flex attention's mask of the first `queries` columns: who sees whom by tile, the same for all heads.

    To find the tiles a [queries, length] bool is made once a batch row and dropped; attention itself holds none.
    """
    rows, length = rule.view.shape
    return create_block_mask(rule, rows, None, queries, length, device=rule.view.device)


def uniform(batch: PackedBatch, purpose: int, of: Tensor) -> Tensor:
    """Draw numbers in (0, 1), [batch, length] float64, that depend on sample, noisy copy and value of `of` alone.

    Args:
        batch: The batch.
        purpose: Different draws have different numbers.
        of: [batch, length] long: positions, or their blocks for one draw a block.

    Raises:
        ValueError: if the batch carries no `noise_key`.
    """
    if batch.noise_key is None:
        raise ValueError("this batch has no noise_key to draw from: DiffusionCollator gives one")
    return (noise_key(batch.noise_key, of, mix_bits(batch.view + 1) ^ purpose).double() + 0.5) * 2.0**-32


class CleanCache(Cache):
    """The clean half of a packed pass [x_t | x_0], computed once.

    Clean tokens never look at noisy ones, so their keys and values are the same whatever the noisy copies hold. The first
    pass, over all columns, leaves them here; later passes over the noisy columns alone read them, with gradients where
    the first pass had them.

    Args:
        noisy_length: Columns of the noisy copies, which come first.
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
            return cat([key_states, keys], 2), cat([value_states, values], 2)
        keys, values = (states[:, :, self.noisy_length :] for states in (key_states, value_states))
        # Copies let go of the noisy columns; where there are gradients these are held for the backward pass all the same.
        self.kept[layer_idx] = (keys, values) if keys.requires_grad else (keys.contiguous(), values.contiguous())
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always passed explicitly."""
        return 0
