"""Sample arguments for comparing kernels with their PyTorch twins: few tokens, with the widths of a
model."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from modeling_mrp.kernels.dispatch import Kernel
from modeling_mrp.kernels.pick import LIST, PICK, Unembedding
from modeling_mrp.kernels.round_layers import (
    GATED,
    ROTATED,
    ROUND_ATTENTION,
    SUM_AND_NORM,
    RoundMask,
)
from modeling_mrp.networks.picker import LIKELIEST
from modeling_mrp.rules.draft import mix_bits, noise_key


def pseudo_random(*shape: int, template: Tensor, seed: int = 0) -> Tensor:
    """Make pseudo-random numbers of a given shape by hashing, with mean 0 and variance 1, on the
    device and in the dtype of `template`."""
    numbers = mix_bits(
        torch.arange(seed << 24, (seed << 24) + math.prod(shape), device=template.device)
    )
    return ((numbers.float() * 2.0**-31 - 1) * 3**0.5).view(shape).to(template.dtype)


def _norm(width: int, template: Tensor, seed: int = 0) -> Qwen3RMSNorm:
    norm = Qwen3RMSNorm(width).to(template.device, template.dtype)
    norm.weight.copy_(1 + pseudo_random(width, template=template, seed=seed) / 4)
    return norm


def _tokens(width: int, template: Tensor, seed: int = 0) -> Tensor:
    """Make states [2, 3, width] of a large token, a usual one, and one whose mean square is near
    the epsilon of a norm."""
    return pseudo_random(2, 3, width, template=template, seed=seed) * torch.tensor(
        [9.0, 1.0, 1e-3], device=template.device
    )[:, None].to(template)


def _pick_samples(vocab: int, template: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield arguments for `PICK`, on the device of `template`: logits with a few likely tokens per
    row (tied in one row), picked greedily, greedily with a least logit that only the likeliest
    token reaches, and by sampling."""
    rows = 12
    template = template.float()
    logits = pseudo_random(rows, vocab, template=template)
    columns = torch.arange(6, device=template.device) * vocab // 6
    logits[:, columns] += 9 + 3 * pseudo_random(rows, 6, template=template, seed=1)
    logits[0, columns] = 10.0
    logits[1, columns[2]] = -torch.inf
    keys = noise_key(*torch.arange(3 * rows, device=template.device).view(3, rows))
    likeliest = logits.amax(1)
    for temperature, min_logits, noise in (
        (1.0, None, None),
        (1.0, likeliest, None),
        (0.7, likeliest - 3, keys),
    ):
        yield Unembedding(logits, 0, temperature), logits, min_logits, noise


def _attention_samples(
    heads: int, kv_heads: int, dim: int, template: Tensor
) -> Iterator[tuple[Any, ...]]:
    """Make a sample for `ROUND_ATTENTION`: three rows of two states, the second a child of the
    first, after prefixes of 5, 152 and 299 slots, long enough to be split and merged; yield it
    twice, as for two layers."""
    block = 4
    used = 512
    parent = torch.arange(-1, 1, device=template.device).repeat(3, 1)
    committed = torch.arange(5, 300, 147, device=template.device)[:, None].repeat(1, 2)
    mask = RoundMask(committed, parent, block)
    queries = 4 * pseudo_random(3, 2 * block, heads, dim, template=template).transpose(1, 2)
    keys, values = pseudo_random(
        3, used + 2 * block, 2, kv_heads, dim, template=template, seed=1
    ).permute(2, 0, 3, 1, 4)
    yield from [(queries, keys, values, mask, dim**-0.5)] * 2


def _rotation_sample(heads: int, kv_heads: int, dim: int, template: Tensor) -> tuple[Any, ...]:
    """Make a sample for `ROTATED`, whose output tensors for keys and values are filled with NaN."""
    angles = 3 * pseudo_random(2, 3, dim // 2, template=template).repeat(1, 1, 2)
    target = template.new_full((2, 2, kv_heads, 3, dim), torch.nan)
    norms = _norm(dim, template), _norm(dim, template, 1)
    return (
        _tokens((heads + 2 * kv_heads) * dim, template, 1),
        norms,
        (angles.cos(), angles.sin()),
        target.unbind(0),
    )


@torch.no_grad()
def samples_of(config: Any, template: Tensor) -> dict[Kernel, list[tuple[Any, ...]]]:
    """Make sample arguments for every kernel in the sizes of a config, with the device and dtype of
    `template`."""
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    dim = config.head_dim
    width = config.hidden_size
    picks = list(_pick_samples(config.vocab_size, template))
    gates = 4 * pseudo_random(2, 3, 2 * config.intermediate_size, template=template)
    return {
        PICK: picks,
        LIST: [(*given, LIKELIEST) for given in picks],
        ROUND_ATTENTION: list(_attention_samples(heads, kv_heads, dim, template)),
        SUM_AND_NORM: [
            (_tokens(width, template), _tokens(width, template, 1), _norm(width, template))
        ],
        ROTATED: [_rotation_sample(heads, kv_heads, dim, template)],
        GATED: [(*gates.chunk(2, -1), ACT2FN["silu"])],
    }


@torch.no_grad()
def run_both(kernel: Kernel, arguments: tuple[Any, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """Run a kernel and its PyTorch twin on the same arguments; yield pairs of their results."""
    returned = kernel.launch(*arguments)
    # kernel and twin may write to the same memory
    results = [
        tensor.clone() for tensor in (returned if isinstance(returned, tuple) else (returned,))
    ]
    expected = kernel.twin(*arguments)
    yield from zip(results, expected if isinstance(expected, tuple) else (expected,), strict=True)
