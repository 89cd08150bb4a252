"""Sample arguments for comparing kernels with their PyTorch twins: few tokens, with the widths of a
model."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
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
    """Make a tensor of pseudo-random numbers with mean 0 and variance 1, on the device and in the
    dtype of `template`. The numbers are hashes of their indices, and differ for each `seed`."""
    numbers = mix_bits(
        torch.arange(seed << 24, (seed << 24) + math.prod(shape), device=template.device)
    )
    return ((numbers.float() * 2.0**-31 - 1) * 3**0.5).view(shape).to(template.dtype)


def _norm(width: int, template: Tensor, seed: int = 0) -> Qwen3RMSNorm:
    norm = Qwen3RMSNorm(width).to(template.device, template.dtype)
    norm.weight.copy_(1 + pseudo_random(width, template=template, seed=seed) / 4)
    return norm


def _tokens(width: int, template: Tensor, seed: int = 0) -> Tensor:
    """Make inputs [2, 3, width] for norms. Each row has three tokens: one with large values, one
    with usual values, and one whose mean square is near a norm's epsilon."""
    return pseudo_random(2, 3, width, template=template, seed=seed) * torch.tensor(
        [9.0, 1.0, 1e-3], device=template.device
    )[:, None].to(template)


def _pick_samples(vocab: int, template: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield three sets of arguments for `PICK`, on the device of `template`. All have the same
    logits: each row has a few likely tokens, and in one row these are tied. The first set picks
    greedily. The second picks greedily with a minimum logit that only the likeliest token reaches.
    The third samples."""
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
    """Make arguments for `ROUND_ATTENTION`, and yield them twice, as for two layers. There are
    three rows of two states, the second a child of the first, after prefixes of 5, 152 and 299
    slots, which are long enough to be split and merged."""
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
    """Make arguments for `ROTATED`. The output tensors for keys and values are filled with NaN."""
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
    """Return a dict from every kernel to a list of sample arguments, which have the sizes in a
    config and the device and dtype of `template`."""
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
        GATED: [(*gates.chunk(2, -1),)],
    }


@torch.no_grad()
def run_both(kernel: Kernel, arguments: tuple[Any, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """Run a kernel and its PyTorch twin on the same arguments; yield pairs of the kernel's and the
    twin's results."""
    returned = kernel.launch(*arguments)
    # kernel and twin may write to the same memory
    results = [
        tensor.clone() for tensor in (returned if isinstance(returned, tuple) else (returned,))
    ]
    expected = kernel.twin(*arguments)
    yield from zip(results, expected if isinstance(expected, tuple) else (expected,), strict=True)
