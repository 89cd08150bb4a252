"""The noise of sampled picks: a counter-based generator, a pure function of (seed, position, masks left, token id)."""

import math

import torch
from torch import Tensor

from ..rules.noise import mix_bits
from .dispatch import tl, triton

_UINT32 = 0xFFFFFFFF


def scattered(*shape: int, like: Tensor, seed: int = 0) -> Tensor:
    """Make pseudo-random numbers of a shape, of mean 0 and variance 1, with the device and dtype of a tensor.

    They come from a hash: torch's generators are not used, so that what is drawn elsewhere stays the same.
    """
    numbers = mix_bits(torch.arange(seed << 24, (seed << 24) + math.prod(shape), device=like.device))
    return ((numbers.float() * 2.0**-31 - 1) * 3**0.5).view(shape).to(like.dtype)


def noise_keys(seed: Tensor, position: Tensor, masks_left: Tensor) -> Tensor:
    """Make the keys [n] of the noise at a state's position; all arguments are [n] long."""
    key: Tensor = mix_bits(seed & _UINT32)
    key = mix_bits(key ^ ((seed >> 32) & _UINT32))
    key = mix_bits(key ^ (position & _UINT32))
    key = mix_bits(key ^ (masks_left & _UINT32) ^ 0x9E3779B9)
    return key


def noise_bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """Draw 32 random bits for each of keys [n] and token ids [m]: [n, m] int64."""
    bits: Tensor = mix_bits(mix_bits(tokens * 0x9E3779B1 & _UINT32) ^ keys[:, None])
    return bits


def gumbel_noise(keys: Tensor, tokens: int | Tensor, dtype: torch.dtype) -> Tensor:
    """Draw standard Gumbel noise for token ids at each key.

    Args:
        keys: [n] long, from `noise_keys`.
        tokens: [m] long, or how many of the first ids.
        dtype: float32 or float64; both see the same 32 random bits.

    Returns:
        [n, m].
    """
    bits = noise_bits(keys, torch.arange(tokens, device=keys.device) if isinstance(tokens, int) else tokens)
    # -log(u) for u = (bits + 1/2) / 2^32, from whichever end of the unit interval keeps the precision.
    lower = bits < 1 << 31
    nearest = (torch.where(lower, bits, _UINT32 - bits).to(dtype) + 0.5) * 2.0**-32
    return -torch.where(lower, -nearest.log(), -torch.log1p(-nearest)).log()


if triton is not None:

    @triton.jit
    def _mix32(x):  # type: ignore[no-untyped-def]
        x = x ^ (x >> 16)
        x = x * 0x7FEB352D
        x = x ^ (x >> 15)
        x = x * 0x846CA68B
        return x ^ (x >> 16)

    @triton.jit
    def token_noise_bits(key, tokens):  # type: ignore[no-untyped-def]
        """Draw the bits of `noise_bits` at one key (int64) for token ids [n]: [n] uint32."""
        return _mix32(_mix32(tokens.to(tl.uint32) * 0x9E3779B1) ^ key.to(tl.uint32))

    @triton.jit
    def gumbel_of_bits(bits):  # type: ignore[no-untyped-def]
        """Turn uint32 bits into `gumbel_noise`, log1p(-x) being log(1 - x) * x / (1 - (1 - x)), which is as precise."""
        lower = (bits >> 31) == 0
        nearest = (tl.where(lower, bits, ~bits).to(tl.float32) + 0.5) * 2.0**-32
        rest = 1.0 - nearest
        log = tl.log(tl.where(lower, nearest, rest))
        gap = 1.0 - rest  # `nearest` as it was rounded on the way; 0 where nothing was left of it
        upper = tl.where(gap == 0.0, nearest, -log * (nearest / tl.where(gap == 0.0, 1.0, gap)))
        return -tl.log(tl.where(lower, -log, upper))
