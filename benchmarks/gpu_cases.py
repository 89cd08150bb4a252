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

from .engine import scratch_of_a_layer
from .roofline import Device, Shape, Work
from .round_attention import Round as Attention
from .timing import copies_for, reason, timed

KERNEL = Dispatch(forced=True)
MASK_ID = 0
Way = Callable[..., Any]
Inputs = tuple[Tensor, ...]
# Of a relative error. Rounding of inputs is shared with float64: left is that of sums, and of results rounded to 16 bits.
SUMMED = {torch.float32: 1e-4, torch.bfloat16: 1e-3, torch.float16: 1e-3}
ROUNDED = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Case:
    """One kernel on one set of inputs.

    Attributes:
        name: Of the kernel.
        inputs: By seed, other numbers of the same sizes in other places, but for what is too large to be cached.
        ways: What computes the same of inputs: `kernel`, its twin `torch`, and others.
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

    def time(self, ways: dict[str, Way], device: Device, on: torch.device) -> Iterator[dict[str, Any]]:
        """Time some ways; a line for each, also for one that fails."""
        copies, floor = copies_for(self.floor.bytes, on), 1e6 * device.seconds(self.floor)
        inputs = [self.inputs(seed) for seed in range(copies)]
        for way, call in ways.items():
            line = {"time": self.name, "way": way}
            try:
                taken = timed([partial(call, *each) for each in inputs], on)
            except Exception as error:  # the other ways are timed all the same
                yield {"failed": f"time of {self.name}", "way": way, "error": reason(error)}
            else:
                yield {**line, **taken, "floor_us": round(floor, 3), "over_floor": round(taken["us"] / floor, 3)}


def relative(ours: Tensor, exact: Tensor) -> float:
    """Divide the norm of the difference by that of what is right; infinite if anything is not a number."""
    difference = (ours.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30)
    return float(difference.nan_to_num(nan=torch.inf))


def _against(exact: Way, kernel: Way) -> Callable[[Inputs], float]:
    def error(inputs: Inputs) -> float:
        ours, right = (result if isinstance(result, tuple) else (result,) for result in (kernel(*inputs), exact(*inputs)))
        return max(relative(mine, other) for mine, other in zip(ours, right, strict=True))

    return error


def vocabulary_cases(shape: Shape, rows: int, dtype: torch.dtype, on: torch.device) -> Iterator[Case]:
    """The row kernel of the pick, greedy and sampled, on float32 logits of standard deviation 4 of so many rows."""
    vocab = shape.vocab_size
    plain = Unembedding(torch.empty(vocab, 0, device=on), MASK_ID)
    floor = Work(vocab * rows * 4, 2 * rows * vocab)

    def inputs(seed: int) -> Inputs:
        generator = torch.Generator(on).manual_seed(seed)
        logits = torch.randn(rows, vocab, generator=generator, device=on).mul_(4)
        return logits, noise_keys(*torch.randint(1 << 20, (3, rows), generator=generator, device=on))

    for name, unembedding in (("pick", plain), ("pick sampled", replace(plain, temperature=0.7))):
        sampled = name != "pick"
        ways: dict[str, Way] = {
            "kernel": lambda x, keys, r=unembedding, s=sampled: pick_rows(r, x, x, None, keys if s else None, KERNEL),
            "torch": lambda x, keys, r=unembedding, s=sampled: pick_rows_ref(r, x, x, None, keys if s else None),
        }
        error = partial(_error_of_pick, unembedding, ways["kernel"], sampled)
        yield Case(name, inputs, ways, error, SUMMED[torch.float32] * (10 if sampled else 1), floor)  # its noise is float32


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


def attention_case(shape: Shape, batch: int, states: int, prefix: int, dtype: torch.dtype, on: torch.device) -> Iterator[Case]:
    """One layer's attention in a round."""
    sizes = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
    round_ = Attention(batch, states, shape.block_size, prefix, *sizes, dtype, str(on))
    found = round_.contenders()
    ways: dict[str, Way] = {"kernel": found["kernel"], "torch": found["sdpa_mask"], "flex": found["flex"]}
    yield Case("round_attention", round_.inputs, ways, _against(round_.exact, ways["kernel"]), ROUNDED[dtype], round_.floor)


def layer_cases(shape: Shape, batch: int, states: int, dtype: torch.dtype, on: torch.device) -> Iterator[Case]:
    """`sum_and_norm` and `rotated`: what stands between the matrix products of a layer."""
    tokens, dim = states * shape.block_size, shape.head_dim
    size = shape.hidden_size

    def norm_of(width: int) -> Any:
        made = Qwen3RMSNorm(width).to(on, dtype).requires_grad_(False)
        made.weight.normal_(1.0, 0.2, generator=torch.Generator(on).manual_seed(width))
        return made

    def normed(x: Tensor, norm: Any) -> Tensor:  # in float64, without its casts
        return x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt() * norm.weight.double()

    def numbers(seed: int, *widths: int) -> Inputs:
        generator = torch.Generator(on).manual_seed(seed)
        return tuple(torch.randn(batch, tokens, width, generator=generator, device=on).to(dtype) for width in widths)

    def case(name: str, widths: list[int], ways: dict[str, Way], exact: Way, moved: int, flops: int, rounded: int) -> Case:
        """For a token `moved` numbers are read or written and `flops` computed; results are rounded so often in a row."""
        floor = Work(batch * tokens * moved * dtype.itemsize, batch * tokens * flops)
        tolerance = max(1, rounded / 2) * ROUNDED[dtype]
        return Case(name, lambda seed: numbers(seed, *widths), ways, _against(exact, ways["kernel"]), tolerance, floor)

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
    (angles,) = numbers(0, dim // 2)
    rotary = angles.repeat(1, 1, 2).cos(), angles.repeat(1, 1, 2).sin()
    cache = scratch_of_a_layer(batch, shape.num_key_value_heads, dim, tokens, like=angles)

    def exact_rotated(projected: Tensor) -> Inputs:
        heads = (x.transpose(1, 2) for x in projected.double().unflatten(-1, (-1, dim)).split(counts, 2))
        query, key, value = heads
        cos, sin = (x.double()[:, None] for x in rotary)
        turned = (normed(query, attention.q_norm), normed(key, attention.k_norm))
        return *(x * cos + torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1) * sin for x in turned), value

    ways = {
        "kernel": lambda projected: (rotated(attention, projected, rotary, cache, KERNEL), *cache.written(0)),
        "torch": lambda projected: (rotated_ref(attention, projected, rotary, cache), *cache.written(0)),
    }
    counts = [shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads]
    width = dim * sum(counts)
    yield case("rotated", [width], ways, exact_rotated, 2 * width + 2 * dim, 7 * dim * sum(counts[:2]), 4)
