"""Each kernel on inputs of a round: its error against float64, and its time beside its PyTorch twin's and the floor."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from modeling_mrp.kernels.dispatch import Dispatch
from modeling_mrp.kernels.fused_layers import rotated, rotated_ref, sum_and_norm, sum_and_norm_ref
from modeling_mrp.kernels.noise import gumbel_noise, noise_keys
from modeling_mrp.kernels.pick import Unembedding, log_odds, pick_rows, pick_rows_ref
from modeling_mrp.kernels.round_attention import RoundMask, round_attention, round_attention_twin
from modeling_mrp.networks.cache import BlockCache

from .roofline import Device, Shape, Work
from .timing import copies_for, reason, timed

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
        inputs: By seed, other numbers of the same sizes in other places, but for what is too large to be cached.
        ways: What computes the same of inputs: `kernel`, and its twin `torch`.
        error: How far the kernel's result of inputs is from float64.
        tolerance: What that may be.
        floor: What any way must read, write and compute.
    """

    name: str
    inputs: Callable[[int], Inputs]
    ways: dict[str, Way]
    error: Callable[[Inputs], float]
    tolerance: float
    floor: Work

    def check(self) -> dict[str, Any]:
        """Compare the kernel with float64."""
        error = self.error(self.inputs(0))
        return {"check": self.name, "ok": error <= self.tolerance, "error": float(f"{error:.3g}"), "tolerance": self.tolerance}

    def time(self, device: Device, on: torch.device) -> Iterator[dict[str, Any]]:
        """Time every way; a line for each, also for one that fails."""
        copies, floor = copies_for(self.floor.bytes, on), 1e6 * device.seconds(self.floor)
        inputs = [self.inputs(seed) for seed in range(copies)]
        for way, call in self.ways.items():
            try:
                taken = timed([partial(call, *each) for each in inputs], on)
            except Exception as error:  # the other ways are timed all the same
                yield {"failed": f"time of {self.name}", "way": way, "error": reason(error)}
            else:
                line = {"time": self.name, "way": way, **taken}
                yield {**line, "floor_us": round(floor, 3), "over_floor": round(taken["us"] / floor, 3)}


def relative(ours: Tensor, exact: Tensor) -> float:
    """Divide the norm of the difference by that of what is right; infinite if anything is not a number."""
    difference = (ours.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30)
    return float(difference.nan_to_num(nan=torch.inf))


def _against(exact: Way, kernel: Way) -> Callable[[Inputs], float]:
    def error(inputs: Inputs) -> float:
        ours, right = (result if isinstance(result, tuple) else (result,) for result in (kernel(*inputs), exact(*inputs)))
        return max(relative(mine, other) for mine, other in zip(ours, right, strict=True))

    return error


def _normal(seed: int, on: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    if on.type == "meta":  # whoever asks wants to know what is launched
        return torch.empty(*shape, dtype=dtype, device=on)
    return torch.randn(*shape, generator=torch.Generator(on).manual_seed(seed), device=on).to(dtype)


def vocabulary_cases(shape: Shape, rows: int, on: torch.device) -> Iterator[Case]:
    """The row kernel of the pick, greedy and sampled, on float32 logits of standard deviation 4 of so many rows."""
    vocab = shape.vocab_size
    plain = Unembedding(torch.empty(vocab, 0, device=on), MASK_ID)

    def inputs(seed: int) -> Inputs:
        keys = torch.randint(1 << 20, (3, rows), generator=torch.Generator(on).manual_seed(seed), device=on)
        return _normal(seed, on, torch.float32, rows, vocab).mul_(4), noise_keys(*keys)

    for name, unembedding in (("pick", plain), ("pick sampled", replace(plain, temperature=0.7))):
        sampled = name != "pick"
        ways: dict[str, Way] = {
            "kernel": lambda x, keys, r=unembedding, s=sampled: pick_rows(r, x, x, None, keys if s else None, KERNEL),
            "torch": lambda x, keys, r=unembedding, s=sampled: pick_rows_ref(r, x, x, None, keys if s else None),
        }
        error = partial(_error_of_pick, unembedding, ways["kernel"], sampled)
        tolerance = SUMMED * (10 if sampled else 1)  # its noise is float32
        yield Case(name, inputs, ways, error, tolerance, Work(vocab * rows * 4, 2 * rows * vocab))


def _error_of_pick(unembedding: Unembedding, kernel: Way, sampled: bool, inputs: Inputs) -> float:
    """Find the larger of how far the picked token's score is from the best, and the error of its log-odds."""
    (logits, keys), (token, odds) = inputs, kernel(*inputs)
    worst, exact = 0.0, []
    for at in unembedding.chunks(len(logits)):
        scores = unembedding.tempered(logits[at].double())
        exact.append(log_odds(scores, token[at]))
        shown = scores + gumbel_noise(keys[at], scores.shape[1], scores.dtype) if sampled else scores
        worst = max(worst, float((shown.amax(-1) - shown.gather(1, token[at, None])[:, 0]).max()))
    return max(worst, relative(odds, torch.cat(exact)))


def attention_cases(shape: Shape, batch: int, states: int, prefix: int, dtype: torch.dtype, on: torch.device) -> Iterator[Case]:
    """One layer's attention in a round; the last of several states looks at the first one.

    Inputs are queries [rows, heads, queries, head_dim], keys and values [rows, kv_heads, keys, head_dim], laid out as in a
    decode: queries by token, keys and values in one buffer by slot. SDPA's keys and values, repeated for every query head,
    are part of its call, as they are of transformers'.
    """
    heads, kv_heads, dim, block = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, shape.block_size
    queries, used, scale = states * block, 1 << (prefix - 1).bit_length(), dim**-0.5
    parent = torch.full((batch, states), -1, device=on)
    parent[:, 1:][:, -1:] = 0
    mask = RoundMask(torch.full((batch,), prefix, device=on), parent, states, block)
    dense = mask.dense(used)

    def inputs(seed: int) -> Inputs:
        query = _normal(seed, on, dtype, batch, queries, heads, dim).transpose(1, 2)
        key, value = _normal(seed + 1, on, dtype, batch, used + queries, 2, kv_heads, dim).permute(2, 0, 3, 1, 4)
        return query, key, value

    def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = (each.repeat_interleave(heads // kv_heads, 1) for each in (key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=dense, scale=scale)
        return attended.transpose(1, 2)

    def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return round_attention_twin(query.double(), key.double(), value.double(), mask, scale)

    # Keys, values and queries are read once, results written once, and the pairs that see each other multiplied.
    moved = kv_heads * (queries + prefix) + heads * queries
    seen = queries * (prefix + block) + block**2 * (states > 1)
    floor = Work(2 * batch * dim * moved * dtype.itemsize, 4 * batch * dim * heads * seen)
    ways: dict[str, Way] = {"kernel": lambda query, key, value: round_attention(query, key, value, mask, scale), "torch": sdpa}
    yield Case("round_attention", inputs, ways, _against(exact, ways["kernel"]), ROUNDED[dtype], floor)


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

    def case(name: str, widths: list[int], ways: dict[str, Way], exact: Way, moved: int, flops: int, rounded: int) -> Case:
        """For a token `moved` numbers are read or written and `flops` computed; results are rounded so often in a row."""
        floor = Work(batch * tokens * moved * dtype.itemsize, batch * tokens * flops)
        tolerance = max(1, rounded / 2) * ROUNDED[dtype]

        def inputs(seed: int) -> Inputs:
            return tuple(_normal(seed + place, on, dtype, batch, tokens, width) for place, width in enumerate(widths))

        return Case(name, inputs, ways, _against(exact, ways["kernel"]), tolerance, floor)

    norm = norm_of(size)

    def exact_sum(hidden: Tensor, added: Tensor) -> Inputs:
        total = hidden.double() + added.double()
        return total, normed(total.to(dtype).double(), norm)

    ways: dict[str, Way] = {
        "kernel": lambda hidden, added: sum_and_norm(hidden, added, norm, KERNEL),
        "torch": lambda hidden, added: sum_and_norm_ref(hidden, added, norm),
    }
    yield case("sum_and_norm", [size, size], ways, exact_sum, 4 * size, 5 * size, 2)

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

    ways = {
        "kernel": lambda projected: (rotated(attention, projected, rotary, cache, KERNEL), *cache.written(0)),
        "torch": lambda projected: (rotated_ref(attention, projected, rotary, cache), *cache.written(0)),
    }
    width = dim * sum(counts)
    yield case("rotated", [width], ways, exact_rotated, 2 * width + 2 * dim, 7 * dim * sum(counts[:2]), 4)
