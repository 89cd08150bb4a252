"""Each kernel against float64, and its time against its PyTorch twin, `torch.compile` of that, and the floor of its device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modeling_mrp.kernels.dispatch import Dispatch
from modeling_mrp.kernels.noise import noise_keys
from modeling_mrp.kernels.pick import (
    pick,
    pick_ref,
    token_log_odds,
    token_log_odds_ref,
)
from modeling_mrp.kernels.unembedding import Picked, Unembedding

from .roofline import Device, Shape, Work
from .round_attention import Round
from .timing import copies_for, in_turns, reason, still_there

KERNEL = Dispatch(forced=True)
MASK_ID = 0
# Of a result's relative error. Rounding of inputs is shared with the float64 twin: what is left is that of sums, of the softmax
# and, where a result is rounded to 16 bits, of that.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-3, torch.float16: 1e-3}
ROUNDED = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
Way = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One kernel on one set of inputs.

    Attributes:
        name: Of the kernel.
        fields: What the inputs are.
        inputs: By seed, other numbers of the same sizes in other places, but for what is too large to be cached.
        ways: What computes the same of inputs: `kernel`, `torch` and others; a compiled one is added where they are timed.
        error: How far the kernel is from float64.
        tolerance: What that may be.
        floor: What any of them must read and compute.
    """

    name: str
    fields: dict[str, Any]
    inputs: Callable[[int], tuple[Any, ...]]
    ways: dict[str, Way]
    error: Callable[[], float]
    tolerance: float
    floor: Work

    def check(self) -> dict[str, Any]:
        """A line of what was found."""
        error = self.error()
        return {"check": self.name, **self.fields, "error": float(f"{error:.3g}"), "ok": error <= self.tolerance}

    def time(self, device: Device, on: torch.device, repeats: int) -> Iterator[dict[str, Any]]:
        """A line for each way, in turns; on CUDA also for the twin compiled. A way that fails is told and left out.

        So many copies of the inputs take turns that the device's cache has not kept one until it is used again.
        """
        ways = dict(self.ways)
        if on.type == "cuda":
            # What was compiled before is forgotten: beyond 8 variants of one function, PyTorch would run it uncompiled.
            torch.compiler.reset()
            ways["compile"] = torch.compile(self.ways["torch"])
        copies = copies_for(self.floor.bytes, on)
        inputs = [self.inputs(seed) for seed in range(copies)]
        for way in list(ways):
            try:
                ways[way](*inputs[0])
            except Exception as error:
                still_there(on, error)
                del ways[way]
                yield {"failed": self.name, **self.fields, "way": way, "error": reason(error)}
        if "kernel" not in ways:
            return
        calls = {way: [partial(call, *each) for each in inputs] for way, call in ways.items()}
        times, floor = in_turns(calls, on, repeats), device.seconds(self.floor)
        for way, taken in times.items():
            line = {"time": self.name, **self.fields, "way": way, **taken.line(), "floor_us": round(1e6 * floor, 3)}
            line |= {"floor_bytes": int(self.floor.bytes), "floor_flops": int(self.floor.flops), "copies": copies}
            over_kernel = round(taken.median / times["kernel"].median, 3)
            yield {**line, "over_floor": round(taken.median / floor, 3), "over_kernel": over_kernel}


def relative(ours: Tensor, exact: Tensor) -> float:
    """The norm of the difference over that of what is right; infinite if anything is not a number."""
    difference = (ours.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30)
    return float(difference.nan_to_num(nan=torch.inf))


def between(case_inputs: Callable[[int], tuple[Any, ...]], ours: Way, exact: Way) -> float:
    """`relative` of what both give; the largest, if that is more than one tensor."""
    inputs = case_inputs(0)
    pairs = zip(_each(ours(*inputs)), _each(exact(*inputs)), strict=True)
    return max(relative(mine, right) for mine, right in pairs)


def _each(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


@dataclass(frozen=True)
class Vocabulary:
    """Inputs of the vocabulary-wide kernels: rows of hidden states on a unembedding.

    Attributes:
        unembedding: Random weights.
        rows: Of hidden states.
    """

    unembedding: Unembedding
    rows: int

    @staticmethod
    def random(vocab: int, hidden_size: int, rows: int, dtype: torch.dtype, device: torch.device) -> "Vocabulary":
        """Logits of standard deviation 4."""
        generator = torch.Generator(device).manual_seed(rows)
        weight = torch.randn(vocab, hidden_size, generator=generator, device=device).div_(hidden_size**0.5).to(dtype)
        return Vocabulary(Unembedding(weight, MASK_ID), rows)

    def inputs(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [rows, hidden_size], keys of the noise [rows], and given tokens [rows]."""
        (vocab, size), device, rows = self.unembedding.weight.shape, self.unembedding.weight.device, self.rows
        generator = torch.Generator(device).manual_seed(seed)
        hidden = torch.randn(rows, size, generator=generator, device=device).mul_(4).to(self.unembedding.weight.dtype)
        keys = noise_keys(*torch.randint(1 << 20, (3, rows), generator=generator, device=device))
        return hidden, keys, torch.randint(1, vocab, (rows,), generator=generator, device=device)

    @property
    def exact(self) -> Unembedding:
        """The unembedding in float64."""
        return replace(self.unembedding, weight=self.unembedding.weight.double())

    @property
    def work(self) -> Work:
        """All weights read once, and multiplied with every row."""
        weight = self.unembedding.weight
        hidden = self.rows * weight.shape[1]
        return Work((weight.numel() + hidden) * weight.element_size(), 2 * self.rows * weight.numel())

    def _case(self, name: str, ways: dict[str, Way], error: Callable[[], float], tolerance: float, work: Work) -> Case:
        (vocab, size), dtype = self.unembedding.weight.shape, self.unembedding.weight.dtype
        fields = {"rows": self.rows, "vocab": vocab, "hidden": size, "dtype": str(dtype)[6:]}
        return Case(name, fields, self.inputs, ways, error, tolerance, work)

    def cases(self) -> Iterator[Case]:
        """`pick`, greedy and sampled, and `token_log_odds`."""
        unembedding, exact, tolerance = self.unembedding, self.exact, TOLERANCE[self.unembedding.weight.dtype]
        yield self._pick_case("pick", unembedding, False, tolerance)
        yield self._pick_case(
            "pick sampled", replace(unembedding, temperature=0.7), True, 10 * tolerance
        )  # its noise is float32
        ways: dict[str, Way] = {
            "kernel": lambda hidden, _, token: token_log_odds(unembedding, hidden, token, dispatch=KERNEL),
            "torch": lambda hidden, _, token: token_log_odds_ref(unembedding, hidden, token),
        }
        error = partial(between, self.inputs, ways["kernel"], lambda h, _, token: token_log_odds_ref(exact, h.double(), token))
        yield self._case("token_log_odds", ways, error, tolerance, self.work)

    def _pick_case(self, name: str, unembedding: Unembedding, sampled: bool, tolerance: float) -> Case:
        ways: dict[str, Way] = {
            "kernel": lambda hidden, keys, _: pick(unembedding, hidden, keys if sampled else None, dispatch=KERNEL),
            "torch": lambda hidden, keys, _: pick_ref(unembedding, hidden, keys if sampled else None),
        }
        asked = replace(self, unembedding=unembedding)
        return self._case(name, ways, partial(asked.error_of_pick, ways["kernel"], sampled), tolerance, self.work)

    def error_of_pick(self, kernel: Callable[..., Picked], sampled: bool) -> float:
        """The larger of how far the picked token's score is from the best, and the error of its log-odds."""
        hidden, keys, _ = inputs = self.inputs(0)
        picked, exact = kernel(*inputs), self.exact
        worst, odds = 0.0, []
        for at in exact.chunks(len(hidden)):
            scores = exact.tempered(exact.logits(hidden[at].double()), None)
            shown = exact.shown(scores, keys[at] if sampled else None)
            own = shown.gather(1, picked.token[at, None])[:, 0]
            worst = max(worst, float((shown.amax(-1) - own).max()))
            odds.append(token_log_odds_ref(exact, hidden[at].double(), picked.token[at]))
        return max(worst, relative(picked.log_odds, torch.cat(odds)))


def normed_exactly(x: Tensor, norm: Any) -> Tensor:
    """Float64 numbers under a `Qwen3RMSNorm`, without its casts."""
    return x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt() * norm.weight.double()


def attention_case(shape: Shape, batch: int, states: int, prefix: int, dtype: torch.dtype, device: torch.device) -> Case:
    """One layer's attention in a round."""
    sizes = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
    timed = Round(batch, states, shape.block_size, prefix, *sizes, dtype, str(device))
    contenders = timed.contenders()
    ways: dict[str, Way] = {"kernel": contenders["kernel"], "torch": contenders["sdpa_mask"], "flex": contenders["flex"]}
    fields = {"batch": batch, "states": states, "prefix_tokens": prefix, "dtype": str(dtype)[6:]}
    error = partial(between, timed.inputs, ways["kernel"], timed.exact)
    return Case("round_attention", fields, timed.inputs, ways, error, ROUNDED[dtype], timed.floor)
