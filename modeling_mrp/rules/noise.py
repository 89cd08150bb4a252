"""The noise of sampled picks on the host: the bits of `kernels/noise.py`, for the few tokens that a draft chooses among."""

from typing import Any

import numpy as np

_MASK = 0xFFFFFFFF


def mix_bits(x: Any) -> Any:
    """Hash uint32 numbers, an int or an array, by two multiply-xorshift rounds."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def noise_key(seed: int, position: int, masks: int) -> int:
    """The key of the noise at a position of a state with so many masks left."""
    key = mix_bits(seed & _MASK)
    key = mix_bits(key ^ (seed >> 32 & _MASK))
    key = mix_bits(key ^ (position & _MASK))
    return int(mix_bits(key ^ (masks & _MASK) ^ 0x9E3779B9))


def gumbel(keys: list[int], tokens: Any) -> Any:
    """Standard Gumbel noise [n, m] float64 for token ids [n, m] int64 of n keys."""
    hashed = mix_bits(tokens * 0x9E3779B1 & _MASK)
    bits = mix_bits(hashed ^ np.array(keys, dtype=np.int64)[:, None])
    # -log(u) for u = (bits + 1/2) / 2^32, from whichever end of the unit interval keeps the precision.
    lower = bits < 1 << 31
    nearest = (np.where(lower, bits, _MASK - bits) + 0.5) * 2.0**-32
    return -np.log(np.where(lower, -np.log(nearest), -np.log1p(-nearest)))
