"""Each kernel at a model's sizes, on inputs as they come in a round, against float64."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from modeling_mrp.kernels.dispatch import Dispatch, relative_error
from modeling_mrp.kernels.fused_layers import rotated, sum_and_norm
from modeling_mrp.kernels.noise import gumbel_noise, noise_keys
from modeling_mrp.kernels.pick import Unembedding, log_odds, pick_rows, some_logits, some_logits_ref
from modeling_mrp.kernels.round_attention import RoundMask, attend, round_attention_twin
from modeling_mrp.networks.cache import BlockCache
from modeling_mrp.networks.picker import SHORTLIST

from .roofline import Shape

KERNEL = Dispatch(forced=True)
MASK_ID = 0
Way = Callable[..., Any]
Inputs = tuple[Tensor, ...]
# Of a relative error. Rounding of inputs is shared with float64: left is that of sums, and of results rounded to 16 bits.
SUMMED = 1e-4
ROUNDED = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Case:
    """One kernel on one set of inputs.

    Attributes:
        name: Of the kernel.
        inputs: Makes them.
        kernel: Computes with them.
        error: How far the kernel's result of inputs is from float64.
        tolerance: What that may be.
    """

    name: str
    inputs: Callable[[], Inputs]
    kernel: Way
    error: Callable[[Inputs], float]
    tolerance: float


def cases(
    shape: Shape, dtype: torch.dtype, on: torch.device, batch: int, states: int, prefix: int
) -> Iterator[Callable[[], Iterator[Case]]]:
    """List what makes the cases of a round: picks at the masks of its states, attention, and what a layer fuses."""
    rows = batch * states * shape.block_size
    yield partial(vocabulary_cases, shape, rows, on)
    yield partial(shortlist_cases, shape, rows, dtype, on)
    yield partial(attention_cases, shape, batch, states, prefix, dtype, on)
    yield partial(layer_cases, shape, batch, states, dtype, on)


def _against(exact: Way, kernel: Way) -> Callable[[Inputs], float]:
    def error(inputs: Inputs) -> float:
        ours, right = (result if isinstance(result, tuple) else (result,) for result in (kernel(*inputs), exact(*inputs)))
        return max(relative_error(mine, other) for mine, other in zip(ours, right, strict=True))

    return error


def _normal(seed: int, on: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    if on.type == "meta":  # whoever asks wants to know what is launched
        return torch.empty(*shape, dtype=dtype, device=on)
    return torch.randn(*shape, generator=torch.Generator(on).manual_seed(seed), device=on).to(dtype)


def vocabulary_cases(shape: Shape, rows: int, on: torch.device) -> Iterator[Case]:
    """The row kernel of the pick, greedy and sampled, on float32 logits of standard deviation 4 of so many rows."""
    vocab = shape.vocab_size
    plain = Unembedding(torch.empty(vocab, 0, device=on), MASK_ID)

    def inputs() -> Inputs:
        keys = torch.randint(1 << 20, (3, rows), generator=torch.Generator(on).manual_seed(0), device=on)
        return _normal(0, on, torch.float32, rows, vocab).mul_(4), noise_keys(*keys)

    for sampled, unembedding in ((False, plain), (True, replace(plain, temperature=0.7))):

        def kernel(x: Tensor, keys: Tensor, sampled: bool = sampled, unembedding: Unembedding = unembedding) -> Inputs:
            return pick_rows(unembedding, x, x, None, keys if sampled else None, KERNEL)

        error = partial(_error_of_pick, unembedding, kernel, sampled)
        tolerance = SUMMED * (10 if sampled else 1)  # its noise is float32
        yield Case("pick, sampled" if sampled else "pick", inputs, kernel, error, tolerance)


def shortlist_cases(shape: Shape, rows: int, dtype: torch.dtype, on: torch.device) -> Iterator[Case]:
    """Logits of a few tokens at each of so many positions, as drafts of the head choose among."""

    def inputs() -> Inputs:
        weight = _normal(1, on, dtype, shape.vocab_size, shape.hidden_size)
        ids = torch.randint(shape.vocab_size, (rows, SHORTLIST), generator=torch.Generator(on).manual_seed(0), device=on)
        return weight, _normal(2, on, dtype, rows, shape.hidden_size), ids

    def exact(weight: Tensor, hidden: Tensor, ids: Tensor) -> Tensor:
        return some_logits_ref(weight.double(), hidden.double(), ids)

    kernel = partial(some_logits, dispatch=KERNEL)
    yield Case("shortlist", inputs, kernel, _against(exact, kernel), SUMMED)


def _error_of_pick(unembedding: Unembedding, kernel: Way, sampled: bool, inputs: Inputs) -> float:
    """Find the larger of how far the picked token's score is from the best, and the error of its log-odds."""
    (logits, keys), (token, odds) = inputs, kernel(*inputs)
    worst, exact = 0.0, []
    for at in unembedding.chunks(len(logits)):
        scores = unembedding.tempered(logits[at].double())
        exact.append(log_odds(scores, token[at]))
        shown = scores + gumbel_noise(keys[at], scores.shape[1], scores.dtype) if sampled else scores
        worst = max(worst, float((shown.amax(-1) - shown.gather(1, token[at, None])[:, 0]).max()))
    return max(worst, relative_error(odds, torch.cat(exact)))


def attention_cases(shape: Shape, batch: int, states: int, prefix: int, dtype: torch.dtype, on: torch.device) -> Iterator[Case]:
    """One layer's attention in a round; the last of several states looks at the first one.

    Inputs are queries [rows, heads, queries, head_dim], keys and values [rows, kv_heads, keys, head_dim], laid out as in a
    decode: queries by token, keys and values in one buffer by slot.
    """
    heads, kv_heads, dim, block = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, shape.block_size
    queries, used, scale = states * block, 1 << (prefix - 1).bit_length(), dim**-0.5
    parent = torch.full((batch, states), -1, device=on)
    parent[:, 1:][:, -1:] = 0
    mask = RoundMask(torch.full((batch,), prefix, device=on), parent, states, block, KERNEL)

    def inputs() -> Inputs:
        query = _normal(0, on, dtype, batch, queries, heads, dim).transpose(1, 2)
        key, value = _normal(1, on, dtype, batch, used + queries, 2, kv_heads, dim).permute(2, 0, 3, 1, 4)
        return query, key, value

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, mask, scale)

    def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return round_attention_twin(query.double(), key.double(), value.double(), mask, scale)

    yield Case("round_attention", inputs, kernel, _against(exact, kernel), ROUNDED[dtype])


def layer_cases(shape: Shape, batch: int, states: int, dtype: torch.dtype, on: torch.device) -> Iterator[Case]:
    """`sum_and_norm` and `rotated`: what stands between the matrix products of a layer."""
    tokens, dim = states * shape.block_size, shape.head_dim
    size = shape.hidden_size

    def norm_of(width: int) -> Any:
        made = Qwen3RMSNorm(width).to(on, dtype).requires_grad_(False)
        made.weight.copy_(1 + 0.2 * _normal(width, on, dtype, width))
        return made

    def normed(x: Tensor, norm: Any) -> Tensor:  # in float64, without its casts
        return x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt() * norm.weight.double()

    def case(name: str, widths: list[int], kernel: Way, exact: Way, rounded: int) -> Case:
        """Of a kernel whose results are rounded so often in a row."""

        def inputs() -> Inputs:
            return tuple(_normal(place, on, dtype, batch, tokens, width) for place, width in enumerate(widths))

        return Case(name, inputs, kernel, _against(exact, kernel), max(1, rounded / 2) * ROUNDED[dtype])

    norm = norm_of(size)

    def exact_sum(hidden: Tensor, added: Tensor) -> Inputs:
        total = hidden.double() + added.double()
        return total, normed(total.to(dtype).double(), norm)

    yield case("sum_and_norm", [size, size], lambda hidden, added: sum_and_norm(hidden, added, norm, KERNEL), exact_sum, 2)

    attention = SimpleNamespace(head_dim=dim, layer_idx=0, q_norm=norm_of(dim), k_norm=norm_of(dim))
    angles = _normal(0, on, dtype, batch, tokens, dim // 2).repeat(1, 1, 2)
    rotary = angles.cos(), angles.sin()
    cache = BlockCache(batch, shape.num_key_value_heads, dim, [on], 0, tokens, dtype)
    cache.target(0, tokens)
    counts = [shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads]

    def exact_rotated(projected: Tensor) -> Inputs:
        query, key, value = (x.transpose(1, 2) for x in projected.double().unflatten(-1, (-1, dim)).split(counts, 2))
        cos, sin = (x.double()[:, None] for x in rotary)
        turned = (normed(query, attention.q_norm), normed(key, attention.k_norm))
        return *(x * cos + torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1) * sin for x in turned), value

    def kernel(projected: Tensor) -> Inputs:
        return rotated(attention, projected, rotary, cache, KERNEL), *cache.written(0)

    yield case("rotated", [dim * sum(counts)], kernel, exact_rotated, 4)
