"""Each kernel against float64, and its time against its PyTorch twin, `torch.compile` of that, and the floor of its device."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from modeling_mrp.head_input_mrp import normed_pair, normed_pair_ref
from modeling_mrp.kernels_mrp import Dispatch
from modeling_mrp.noise_mrp import noise_keys
from modeling_mrp.pick_mrp import (
    pick,
    pick_ref,
    residual_magnitude,
    residual_magnitude_ref,
    token_log_odds,
    token_log_odds_ref,
)
from modeling_mrp.readout_mrp import Picked, Readout

from .roofline import Device, Shape, Work
from .round_attention import Round
from .timing import in_turns, reason

KERNEL = Dispatch(forced=True)
MASK_ID = 0
# Of a result's relative error. Rounding of inputs is shared with the float64 twin: what is left is that of sums, of the softmax
# and, where a result is rounded to 16 bits, of that.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-3, torch.float16: 1e-3}
ROUNDED = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One kernel on one set of inputs.

    Attributes:
        name: Of the kernel.
        fields: What the inputs are.
        ways: What computes the same: `kernel`, `torch` and others; compiled ones are added where they are timed.
        error: How far the kernel is from float64.
        tolerance: What that may be.
        floor: What any of them must read and compute.
    """

    name: str
    fields: dict[str, Any]
    ways: dict[str, Call]
    error: Callable[[], float]
    tolerance: float
    floor: Work

    def check(self) -> dict[str, Any]:
        """A line of what was found."""
        error = self.error()
        return {"check": self.name, **self.fields, "error": float(f"{error:.3g}"), "ok": error <= self.tolerance}

    def time(self, device: Device, on: torch.device, repeats: int) -> Iterator[dict[str, Any]]:
        """A line for each way, in turns; on CUDA also for the twin compiled. A way that fails is told and left out."""
        ways = dict(self.ways)
        if on.type == "cuda":
            # What was compiled before is forgotten: beyond 8 variants of one function, PyTorch would run it uncompiled.
            torch.compiler.reset()
            ways["compile"] = torch.compile(self.ways["torch"])
        for way in list(ways):
            try:
                ways[way]()
            except Exception as error:
                del ways[way]
                yield {"failed": self.name, **self.fields, "way": way, "error": reason(error)}
        if "kernel" not in ways:
            return
        times, floor = in_turns(ways, on, repeats), device.seconds(self.floor)
        for way, taken in times.items():
            line = {"time": self.name, **self.fields, "way": way, **taken.line(), "floor_us": round(1e6 * floor, 3)}
            line |= {"floor_bytes": int(self.floor.bytes), "floor_flops": int(self.floor.flops)}
            over_kernel = round(taken.median / times["kernel"].median, 3)
            yield {**line, "over_floor": round(taken.median / floor, 3), "over_kernel": over_kernel}


def relative(ours: Tensor, exact: Tensor) -> float:
    """The norm of the difference over that of what is right; infinite if anything is not a number."""
    difference = (ours.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30)
    return float(difference.nan_to_num(nan=torch.inf))


def _between(ours: Callable[[], Tensor], exact: Callable[[], Tensor]) -> float:
    return relative(ours(), exact())


@dataclass(frozen=True)
class Vocabulary:
    """Inputs of the vocabulary-wide kernels: rows of hidden states on a readout.

    Attributes:
        readout: Random weights.
        hidden: [n, hidden_size].
        keys: [n] long, of the noise.
        token: [n] long, given tokens.
    """

    readout: Readout
    hidden: Tensor
    keys: Tensor
    token: Tensor

    @staticmethod
    def random(vocab: int, hidden_size: int, rows: int, dtype: torch.dtype, device: torch.device, seed: int) -> "Vocabulary":
        """Logits of standard deviation 4."""
        generator = torch.Generator(device).manual_seed(seed)
        weight = torch.randn(vocab, hidden_size, generator=generator, device=device).div_(hidden_size**0.5).to(dtype)
        hidden = torch.randn(rows, hidden_size, generator=generator, device=device).mul_(4).to(dtype)
        keys = noise_keys(*torch.randint(1 << 20, (3, rows), generator=generator, device=device))
        token = torch.randint(1, vocab, (rows,), generator=generator, device=device)
        return Vocabulary(Readout(weight, MASK_ID), hidden, keys, token)

    @property
    def exact(self) -> Readout:
        """The readout in float64."""
        return replace(self.readout, weight=self.readout.weight.double())

    @property
    def work(self) -> Work:
        """All weights read once, and multiplied with every row."""
        numbers = self.readout.weight.numel()
        return Work((numbers + self.hidden.numel()) * self.hidden.element_size(), 2 * len(self.hidden) * numbers)

    def cases(self) -> Iterator[Case]:
        """`pick`, greedy and sampled, `token_log_odds` and `residual_magnitude`."""
        (vocab, size), dtype = self.readout.weight.shape, self.hidden.dtype
        fields = {"rows": len(self.hidden), "vocab": vocab, "hidden": size, "dtype": str(dtype)[6:]}
        ways: dict[str, Call]
        exact: Callable[[], Tensor]
        for name, keys, temperature in (("pick", None, 1.0), ("pick sampled", self.keys, 0.7)):
            asked = replace(self, readout=replace(self.readout, temperature=temperature))
            ways = {
                "kernel": partial(pick, asked.readout, self.hidden, keys, dispatch=KERNEL),
                "torch": partial(pick_ref, asked.readout, self.hidden, keys),
            }
            tolerance = TOLERANCE[dtype] if keys is None else 10 * TOLERANCE[dtype]  # the noise is float32's
            yield Case(name, fields, ways, partial(asked.error_of_pick, ways["kernel"], keys), tolerance, self.work)
        ways = {
            "kernel": partial(token_log_odds, self.readout, self.hidden, self.token, dispatch=KERNEL),
            "torch": partial(token_log_odds_ref, self.readout, self.hidden, self.token),
        }
        exact = partial(token_log_odds_ref, self.exact, self.hidden.double(), self.token)
        yield Case("token_log_odds", fields, ways, partial(_between, ways["kernel"], exact), TOLERANCE[dtype], self.work)
        weight = self.readout.weight
        ways = {
            "kernel": partial(residual_magnitude, weight, self.hidden, self.token, KERNEL),
            "torch": partial(residual_magnitude_ref, weight, self.hidden, self.token),
        }
        exact = partial(residual_magnitude_ref, weight.double(), self.hidden.double(), self.token)
        least = Work(2 * self.hidden.numel() * self.hidden.element_size(), 2 * self.hidden.numel())
        yield Case("residual_magnitude", fields, ways, partial(_between, ways["kernel"], exact), TOLERANCE[dtype], least)

    def error_of_pick(self, kernel: Callable[[], Picked], keys: Tensor | None) -> float:
        """The larger of how far the picked token's score is from the best, and the error of its log-odds."""
        picked, exact = kernel(), self.exact
        worst, odds = 0.0, []
        for at in exact.chunks(len(self.hidden)):
            scores = exact.tempered(exact.logits(self.hidden[at].double()), None)
            shown = exact.shown(scores, None if keys is None else keys[at])
            own = shown.gather(1, picked.token[at, None])[:, 0]
            worst = max(worst, float((shown.amax(-1) - own).max()))
            odds.append(token_log_odds_ref(exact, self.hidden[at].double(), picked.token[at]))
        return max(worst, relative(picked.log_odds, torch.cat(odds)))


def head_input_case(vocab: int, hidden_size: int, rows: int, dtype: torch.dtype, device: torch.device, seed: int) -> Case:
    """Embeddings and hidden states under their norms."""
    torch.manual_seed(seed)
    embed = nn.Embedding(vocab, hidden_size, device=device, dtype=dtype)
    enorm, hnorm = (Qwen3RMSNorm(hidden_size).to(device, dtype) for _ in range(2))
    for module in (embed, enorm, hnorm):
        module.requires_grad_(False)
        module.weight.normal_(1.0, 0.2)
    ids = torch.randint(vocab, (rows,), device=device)
    hidden = torch.randn(rows, hidden_size, device=device, dtype=dtype)

    def exact() -> Tensor:
        def normed(x: Tensor, norm: Qwen3RMSNorm) -> Tensor:
            return x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt() * norm.weight.double()

        return torch.cat([normed(embed.weight[ids].double(), enorm), normed(hidden.double(), hnorm)], -1)

    def twin() -> Tensor:
        return normed_pair_ref(embed(ids), hidden, enorm, hnorm)

    kernel: Callable[[], Any] = partial(normed_pair, embed, enorm, hnorm, ids, hidden, KERNEL)
    size = hidden.element_size()
    work = Work((4 * hidden.numel() + 2 * hidden_size) * size, 8 * hidden.numel())
    fields = {"rows": rows, "hidden": hidden_size, "dtype": str(dtype)[6:]}
    ways: dict[str, Call] = {"kernel": kernel, "torch": twin}
    return Case("head_input", fields, ways, partial(_between, kernel, exact), ROUNDED[dtype], work)


def attention_case(shape: Shape, batch: int, states: int, prefix: int, dtype: torch.dtype, device: torch.device) -> Case:
    """One layer's attention in a round."""
    sizes = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
    timed = Round(batch, states, shape.block_size, prefix, *sizes, dtype, str(device))
    contenders = timed.contenders()
    ways: dict[str, Call] = {"kernel": contenders["kernel"], "torch": contenders["sdpa_mask"], "flex": contenders["flex"]}
    fields = {"batch": batch, "states": states, "prefix_tokens": prefix, "dtype": str(dtype)[6:]}
    error = partial(_between, contenders["kernel"], timed.exact)
    return Case("round_attention", fields, ways, error, ROUNDED[dtype], timed.floor)
