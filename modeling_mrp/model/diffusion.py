"""Block diffusion: attention masks (True where a query sees a key), shifted hidden states, and the
noise of the loss.

Positions are absolute, from 0 at a sequence's first real token; the block of a position is
``position // block_size``.
"""

import zlib

import torch
import torch.nn.functional as F
from torch import Tensor


def block_causal_mask(
    query_positions: Tensor, key_positions: Tensor, key_valid: Tensor, block_size: int
) -> Tensor:
    """Make the mask under which each token sees all earlier blocks and the whole of its own block
    (SDAR, section 3).

    Args:
        query_positions: [batch, queries].
        key_positions: [batch, keys].
        key_valid: bool [batch, keys], False for padding.
        block_size: The number of tokens per block.

    Returns:
        bool [batch, 1, queries, keys].
    """
    not_later = key_positions[:, None, :] // block_size <= query_positions[:, :, None] // block_size
    return (not_later & key_valid[:, None, :])[:, None]


def noisy_and_clean_mask(positions: Tensor, valid: Tensor, block_size: int) -> Tensor:
    """Make the mask of one forward over a noisy copy x_t of a text and the clean text x_0, packed
    as [x_t | x_0] (SDAR, section 3).

    A noisy token sees its own noisy block and the clean tokens of earlier blocks. A clean token
    sees the clean tokens of its own block and of earlier ones. Padding sees only itself.

    Args:
        positions: [batch, length].
        valid: bool [batch, length], False for padding.
        block_size: The number of tokens per block.

    Returns:
        bool [batch, 1, 2 * length, 2 * length].
    """
    query_block = (positions // block_size)[:, :, None]
    key_block = (positions // block_size)[:, None, :]
    same_block = key_block == query_block
    earlier_block = key_block < query_block
    noisy_rows = torch.cat([same_block, earlier_block], 2)
    clean_rows = torch.cat([torch.zeros_like(same_block), same_block | earlier_block], 2)
    packed_valid = valid.repeat(1, 2)
    mask = torch.cat([noisy_rows, clean_rows], 1)
    mask = mask & packed_valid[:, :, None] & packed_valid[:, None, :]
    return (mask | torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device))[:, None]


def taken_from(hidden: Tensor, previous: Tensor) -> Tensor:
    """Gather the hidden states at the columns `previous`.

    Args:
        hidden: [batch, length, size].
        previous: int64 [batch, n], columns of `hidden`, or -1 for none.

    Returns:
        [batch, n, size], with zeros where `previous` is -1.
    """
    gathered = hidden.gather(1, previous.clamp(min=0)[..., None].expand(-1, -1, hidden.shape[-1]))
    return gathered.masked_fill(previous[..., None] < 0, 0)


def noise_of(ids: Tensor, valid: Tensor, training: bool) -> Tensor:
    """Draw uniform noise, float32 [batch, 1 + length]: for each text, one number for the noise
    level of the text, then one for each token. Outside training, the seed of a text's noise is
    derived from its tokens, and padding gets 0.

    Args:
        ids: int64 [batch, length].
        valid: bool [batch, length], False for padding.
        training: Whether the noise is random, from torch's generator.
    """
    if training:
        return torch.rand(len(ids), 1 + ids.shape[1], device=ids.device)
    noise = torch.zeros(len(ids), 1 + ids.shape[1])
    for row, (row_valid, tokens) in enumerate(zip(valid.cpu(), ids.cpu(), strict=True)):
        seed = zlib.crc32(repr(tokens[row_valid].tolist()).encode())
        generator = torch.Generator().manual_seed(seed)
        columns = F.pad(row_valid, (1, 0), value=True)
        noise[row, columns] = torch.rand(1 + int(row_valid.sum()), generator=generator)
    return noise.to(ids.device)
