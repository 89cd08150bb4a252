"""A round of decoding on a GPU: ours, the same work in plain transformers, and the least time that bytes and FLOPs allow."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicCache

from modeling_mrp.generate.generation import MRPGenerateOutput
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.runner import recorded
from modeling_mrp.runner.cache import BlockCache

from .agreement import agreement, without_cache
from .cost_model import Counts, Setting, round_seconds, round_work
from .roofline import BYTES, Device, Shape, Work
from .timing import NO_LIMIT, Budget, now, reason, still_there, taking_turns

# Tokens that the shorter and the longer of two calls generate: what they differ by is rounds alone.
SHORT, LONG = 16, 64
# Calls of each clock before it counts: a step runs as it is when it is first met, and is recorded when it is met again. What
# comes once in a call is met again in the next one.
_WARM_UPS = 2
# A share of the device's memory is left to what is not counted.
_USABLE = 0.9


@dataclass(frozen=True)
class Round:
    """What is timed.

    Attributes:
        batch: Rows.
        states: K, the states of a row in a round; 1: `static`.
        prefix: Committed tokens of each row.
    """

    batch: int
    states: int
    prefix: int

    @property
    def options(self) -> dict[str, Any]:
        """The mode that has such rounds."""
        return {"decoding": "static"} if self.states == 1 else {"decoding": "mrp_spec", "num_draft_states": self.states}

    def kv_bytes(self, shape: Shape) -> int:
        """Keys and values of the prefix in all layers of the backbone."""
        return self.batch * self.prefix * shape.num_hidden_layers * shape.kv_size * BYTES


def _least(timed: Round) -> tuple[Counts, Setting]:
    """What a round cannot do without: one backbone forward over K states, and with drafts one pass of the head over K - 1 of
    them, each with picks at the half of the positions that are masked on average."""
    drafts = timed.states > 1
    return Counts(1.0, timed.states, float(drafts), max(1, timed.states - 1), float(drafts)), Setting(timed.prefix)


def floor_seconds(shape: Shape, device: Device, timed: Round) -> float:
    """The least time of a round."""
    counts, setting = _least(timed)
    return sum(round_seconds(shape, device, counts, timed.batch, setting).values())


def floor_work(shape: Shape, timed: Round) -> Work:
    """The bytes and FLOPs behind `floor_seconds`, of all its parts together."""
    counts, setting = _least(timed)
    parts = round_work(shape, counts, timed.batch, setting).values()
    done = [(times, work) for times, works in parts for work in works]
    return Work(sum(times * work.bytes for times, work in done), sum(times * work.flops for times, work in done))


class Conversation:
    """Rows of random tokens whose keys and values are there already, random too: what comes is rounds alone.

    Args:
        model: A model whose texts do not end by themselves.
        timed: How many rows, and how long.
    """

    def __init__(self, model: MRPForCausalLM, timed: Round) -> None:
        self.model, self.timed = model, timed
        generator = torch.Generator(model.device).manual_seed(0)
        shape = (timed.batch, timed.prefix)
        self.ids = torch.randint(model.config.mask_token_id, shape, generator=generator, device=model.device)
        self.cache = self._filled(generator)
        self.said: dict[str, MRPGenerateOutput] = {}

    def _filled(self, generator: torch.Generator) -> BlockCache:
        block = self.model.config.block_size
        room = self.timed.prefix + LONG + 2 * block
        cache = self.model.block_cache(self.timed.batch, room, max(2, self.timed.states) * block, with_head=True)
        for buffer in cache._buffers.values():
            for layer in buffer.flatten(0, 1):
                layer.normal_(generator=generator)
        return cache

    def seconds_of_round(self, name: str, options: dict[str, Any]) -> float:
        """From a shorter and a longer call of `generate`: their times' difference over that of their rounds.

        Args:
            name: What the longer call gave is in `said` by this name.
            options: Of `generate`.
        """
        short, few, _ = self._call(SHORT, options)
        long, many, out = self._call(LONG, options)
        self.said[name] = without_cache(out)
        return (long - short) / (many - few)

    def _call(self, tokens: int, options: dict[str, Any]) -> tuple[float, int, MRPGenerateOutput]:
        lengths = torch.full((self.timed.batch,), self.timed.prefix)
        self.cache.hold(self.ids, lengths, lengths)
        began = now(self.model.device)
        out = self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),  # a random token may be the one for padding
            past_key_values=self.cache,
            max_new_tokens=tokens,
            return_dict_in_generate=True,
            **self.timed.options,
            **options,
        )
        seconds = now(self.model.device) - began
        assert isinstance(out, MRPGenerateOutput)
        assert isinstance(out.past_key_values, BlockCache)
        assert out.stats is not None
        assert out.stats.forwards is not None
        self.cache = out.past_key_values  # a bigger one, if graphs asked for more room
        return seconds, out.stats.forwards["denoise"] + out.stats.forwards["verify"], out


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
        self.ids = torch.randint(config.mask_token_id, (timed.batch, tokens), generator=generator, device=device)
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
        hidden = self.model.backbone(self.ids, self.positions, self.mask, self.cache)
        for layer, (keys, values) in zip(self.cache.layers, self.prefixes, strict=True):
            layer.keys, layer.values = keys, values
        picked = self._pick(hidden)
        estimate, own = hidden[:, :block], self.mask[:, :, :block, self.timed.prefix : self.timed.prefix + block]
        for _ in range(self.timed.states - 1):
            estimate = estimate + self.model.residual(self.ids[:, :block], estimate, self.positions[:, :block], own)
            self._pick(estimate)
        return picked

    def _pick(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.lm_head.weight).float().softmax(-1).max(-1).indices


@torch.inference_mode()
def rounds(
    model: MRPForCausalLM,
    shape: Shape,
    device: Device,
    grid: list[Round],
    variants: dict[str, dict[str, Any]],
    repeats: int,
    budget: Budget = NO_LIMIT,
    compiled: bool = False,
) -> Iterator[dict[str, Any]]:
    """A line for each round and each way to do it: its time, that over the floor, and the plain one's time over it; and one
    for how far the ways' tokens are those of the last one.

    Args:
        model: Random weights at the shape.
        shape: For the floor.
        device: What the device can do, as measured.
        grid: What is timed; a round whose cache does not fit beside the weights is left out, with a line that says so.
        variants: Options of `generate` by name.
        repeats: Turns.
        budget: Rounds that it does not reach are left out, with a line for each.
        compiled: Whether the model's parts are.
    """
    kept = recorded.KEPT_SHARE
    recorded.KEPT_SHARE = 1  # else calls on a large cache would record anew, and that would be timed
    try:
        for timed in grid:
            if budget.over:
                yield {"left_out": "round", **_place(shape, timed), "why": "no time is left"}
                continue
            if compiled:
                torch.compiler.reset()  # beyond 8 variants of one function, PyTorch would run it uncompiled
            try:
                lines = _timed(model, shape, device, timed, variants, repeats)
            except Exception as error:  # the rest of the grid is measured all the same
                still_there(model.device, error)
                lines = [{"failed": "round", **_place(shape, timed), "error": reason(error)}]
            yield from lines
            model.release_graphs()
            if model.device.type == "cuda":
                torch.cuda.empty_cache()
    finally:
        recorded.KEPT_SHARE = kept


def _place(shape: Shape, timed: Round) -> dict[str, Any]:
    return {"shape": shape.name, "batch": timed.batch, "states": timed.states, "prefix": timed.prefix}


def _timed(
    model: MRPForCausalLM, shape: Shape, device: Device, timed: Round, variants: dict[str, dict[str, Any]], repeats: int
) -> list[dict[str, Any]]:
    place = _place(shape, timed)
    memory = math.inf
    if model.device.type == "cuda":
        memory = _USABLE * torch.cuda.get_device_properties(model.device).total_memory
    weights = BYTES * shape.parameters
    if weights + 1.3 * timed.kv_bytes(shape) > memory:
        return [{"left_out": "round", **place, "why": "its keys and values do not fit the device"}]
    conversation = Conversation(model, timed)
    clocks: dict[str, Callable[[], float]] = {
        name: partial(conversation.seconds_of_round, name, options) for name, options in variants.items()
    }
    if weights + 3.5 * timed.kv_bytes(shape) <= memory:  # its cache is copied as it grows
        clocks["transformers"] = partial(_clocked, PlainRound(model, timed), model.device)
    for _ in range(_WARM_UPS if model.device.type == "cuda" else 1):
        for clock in clocks.values():
            clock()
    times, floor = taking_turns(clocks, repeats), floor_seconds(shape, device, timed)
    work = floor_work(shape, timed)
    lines = []
    for name, taken in times.items():
        line = {**place, "way": name, **taken.line(), "floor_us": round(1e6 * floor, 2)}
        line |= {"floor_bytes": int(work.bytes), "floor_flops": int(work.flops)}
        line["over_floor"] = round(taken.median / floor, 3)
        if "transformers" in times:
            line["faster_than_transformers"] = round(times["transformers"].median / taken.median, 3)
        lines.append(line)
    *others, last = variants
    for name in others:
        told = agreement([conversation.said[name]], [conversation.said[last]])
        lines.append({"same_tokens": "round", **place, "way": name, "as": last, **told})
    return lines


def _clocked(call: Callable[[], Any], device: torch.device, often: int = 3) -> float:
    began = now(device)
    for _ in range(often):
        call()
    return (now(device) - began) / often
