"""A round of decoding on a GPU: ours, the same work in plain transformers, and the least time that bytes and FLOPs allow."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer
from transformers.cache_utils import DynamicCache

from modeling_mrp.generate.output import MRPGenerateOutput
from modeling_mrp.modeling import MRPForCausalLM

from .agreement import agreement, without_cache
from .common import now
from .cost_model import Counts, round_seconds
from .engine import backbone_hidden, fallbacks, head_residual
from .roofline import Device, Shape

# Options of `generate` by name; the last is what the others are compared with.
WAYS: dict[str, dict[str, Any]] = {
    "ours": {},
    "no graphs": {"graphs": False},
    "no kernels": {"kernels": False},
    "neither": {"graphs": False, "kernels": False},
}
# Tokens that the shorter and the longer of two calls generate: what they differ by is rounds alone.
SHORT, LONG = 16, 64
# Calls of each way before one counts: a step runs as it is when it is first met, and is recorded when it is met again.
WARM_UPS = 2
# By how much the log-probabilities of two texts may differ where they part: a near-tie that sums in another order decide.
NEAR_TIE = {torch.float32: 1e-2, torch.bfloat16: 0.25}


@dataclass(frozen=True)
class Round:
    """What is checked and timed.

    Attributes:
        batch: Rows.
        states: K, the states of a row in a round; 1: `static`.
        prefix: Tokens of each row's prompt.
    """

    batch: int
    states: int
    prefix: int

    @property
    def options(self) -> dict[str, Any]:
        """The mode that has such rounds."""
        return {"decoding": "static"} if self.states == 1 else {"decoding": "mrp_spec", "num_draft_states": self.states}

    def ids(self, model: MRPForCausalLM, length: int) -> Tensor:
        """Random tokens [batch, length] below the mask id."""
        generator = torch.Generator(model.device).manual_seed(0)
        shape = (self.batch, length)
        return torch.randint(model.config.mask_token_id, shape, generator=generator, device=model.device)

    def floor_seconds(self, shape: Shape, device: Device) -> float:
        """The least time of a round: one backbone forward over K states, and with drafts one pass of the head over K - 1 of
        them, each with picks at the half of the positions that are masked on average."""
        drafts = float(self.states > 1)
        counts = Counts(1.0, self.states, drafts, max(1, self.states - 1), drafts)
        return sum(round_seconds(shape, device, counts, self.batch, self.prefix).values())


def decode(model: MRPForCausalLM, inputs: dict[str, Tensor], tokens: int, **options: Any) -> tuple[float, MRPGenerateOutput]:
    """Seconds of a call of `generate`, and what it gave but for its cache."""
    began = now(model.device)
    asked: dict[str, Any] = {**inputs, **options}
    out = model.generate(**asked, max_new_tokens=tokens, return_dict_in_generate=True)
    seconds = now(model.device) - began
    assert isinstance(out, MRPGenerateOutput)
    return seconds, without_cache(out)


def check_texts(
    model: MRPForCausalLM, inputs: dict[str, Tensor], tokens: int, options: dict[str, Any], ours: dict[str, Any]
) -> dict[str, Any]:
    """Compare a call as it is with one without graphs and kernels: equal up to near-ties, and on a GPU nothing fell back.

    Args:
        model: The model.
        inputs: Of `generate`.
        tokens: New ones.
        options: The mode.
        ours: Options of the call that is checked; it is made so often that its rounds are replayed.
    """
    for _ in range(WARM_UPS + 1):
        _, checked = decode(model, inputs, tokens, **options, **ours)
    ran = fallbacks(model)
    _, plain = decode(model, inputs, tokens, **options, **WAYS["neither"])
    told = agreement([checked], [plain])
    same = told["texts_equal"] == 1 or told["gap"] <= NEAR_TIE[model.dtype]
    return {"ok": same and not ran["fell_back"], **told, **ran}


class PlainRound:
    """The same round as transformers alone does it: a forward over K blocks on a `DynamicCache` under a 4-D mask, logits in
    float32 and their softmax at all positions; then K - 1 head passes over a block, one after the other, as published.

    Args:
        model: The model.
        timed: What is timed.
    """

    def __init__(self, model: MRPForCausalLM, timed: Round) -> None:
        self.model, self.timed = model, timed
        config, device, block = model.config, model.device, model.config.block_size
        tokens, generator = timed.states * block, torch.Generator(device).manual_seed(0)
        self.ids = timed.ids(model, tokens)
        self.positions = timed.prefix + torch.arange(block, device=device).repeat(timed.batch, timed.states)
        own = torch.eye(timed.states, dtype=torch.bool, device=device).repeat_interleave(block, 0).repeat_interleave(block, 1)
        seen = torch.ones(tokens, timed.prefix, dtype=torch.bool, device=device)
        self.mask = torch.cat([seen, own], 1).expand(timed.batch, 1, -1, -1)
        self.cache = DynamicCache(config=config)
        shape = (timed.batch, config.num_key_value_heads, timed.prefix, config.head_dim)
        for layer in range(config.num_hidden_layers):
            kept = torch.randn(2, *shape, generator=generator, device=device, dtype=torch.float32).to(model.dtype)
            self.cache.update(kept[0], kept[1], layer)
        self.prefixes = [(layer.keys, layer.values) for layer in self.cache.layers]

    def __call__(self) -> Tensor:
        """[rows, tokens] the tokens that the backbone picks."""
        block = self.model.config.block_size
        hidden = backbone_hidden(self.model, self.ids, self.positions, self.mask, self.cache)
        for layer, (keys, values) in zip(self.cache.layers, self.prefixes, strict=True):
            layer.keys, layer.values = keys, values
        picked = self._pick(hidden)
        estimate, own = hidden[:, :block], self.mask[:, :, :block, self.timed.prefix : self.timed.prefix + block]
        for _ in range(self.timed.states - 1):
            ids, positions = self.ids[:, :block], self.positions[:, :block]
            estimate = estimate + head_residual(self.model, ids, estimate, positions, own)
            self._pick(estimate)
        return picked

    def _pick(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.lm_head.weight).float().softmax(-1).max(-1).indices


@torch.inference_mode()
def time_round(model: MRPForCausalLM, shape: Shape, device: Device, timed: Round, repeats: int) -> Iterator[dict[str, Any]]:
    """Time a round in every way and in plain transformers, in turns.

    Our round is the difference of a longer and a shorter call over that of their rounds, so that the prompt drops out.

    Args:
        model: Random weights at the shape, whose texts do not end by themselves.
        shape: For the floor.
        device: What the device can do, as measured.
        timed: The round.
        repeats: Turns.

    Yields:
        By way: the time, its quartiles and what it is over the floor and over transformers.
    """
    ids = timed.ids(model, timed.prefix)
    inputs = {"inputs": ids, "attention_mask": torch.ones_like(ids)}  # a random token may be the one for padding

    def ours(options: dict[str, Any]) -> float:
        (short, few), (long, many) = (decode(model, inputs, n, **timed.options, **options) for n in (SHORT, LONG))
        return (long - short) / (rounds_of(many) - rounds_of(few))

    plain = Timer("plain()", globals={"plain": PlainRound(model, timed)})
    clocks: dict[str, Callable[[], float]] = {way: partial(ours, options) for way, options in WAYS.items()}
    clocks["transformers"] = lambda: plain.timeit(3).mean  # waits for the device
    times: dict[str, list[float]] = {way: [] for way in clocks}
    warm_ups = WARM_UPS if model.device.type == "cuda" else 0
    for turn in range(warm_ups + repeats):
        for way, clock in clocks.items():
            seconds = clock()
            times[way] += [seconds] if turn >= warm_ups else []
    floor, base = timed.floor_seconds(shape, device), np.median(times["transformers"])
    for way, seconds_of in times.items():
        low, median, high = np.quantile(seconds_of, (0.25, 0.5, 0.75))
        yield {
            "way": way,
            **{name: round(1e6 * float(value), 2) for name, value in (("us", median), ("us_25", low), ("us_75", high))},
            "floor_us": round(1e6 * floor, 2),
            "over_floor": round(float(median) / floor, 3),
            "faster_than_transformers": round(float(base / median), 3),
        }
    ran = fallbacks(model)
    yield {"way": "ours", "ok": not ran["fell_back"], **ran}


def rounds_of(out: MRPGenerateOutput) -> int:
    """Backbone forwards behind the prompt's."""
    assert out.stats is not None
    assert out.stats.forwards is not None
    return out.stats.forwards["denoise"] + out.stats.forwards["verify"]
