"""The time of a round by batch and number of states, and the number of drafts that pays."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modeling_mrp.modeling import MRPForCausalLM

from .checks import TOKENS, WARM_UPS, decode, drafters

# Tokens of the shorter of two calls, which differ in rounds alone.
SHORT = 16


@dataclass(frozen=True)
class Timed:
    """Times of rounds with `batch` rows of K states each, 1 for the target alone: seconds of one round, the median over turns,
    and rates of tokens over the whole call, with its prompts."""

    batch: int
    states: int
    seconds: float
    tokens_per_forward: float
    tokens_per_second: float


def time_rounds(model: MRPForCausalLM, inputs: dict[str, Tensor], every: Sequence[int], turns: int) -> Iterator[Timed]:
    """Time rounds of each width on a batch, in turns: the difference between two calls, divided by that of their rounds, so
    that prompts drop out. Drafts are those of the checkpoint's target, or of `static`."""
    target = model.generation_config.target or "static"
    found: dict[int, list[tuple[float, float, float]]] = {states: [] for states in every}
    for turn in range(-WARM_UPS if model.device.type == "cuda" else 0, turns):
        for states in every:
            drafted = {"decoding": drafters(model)[0], "target": target, "num_draft_states": states}
            mode = {"decoding": target} if states == 1 else drafted
            (short, few), (long, many) = (
                _clocked(model, inputs, max_new_tokens=count, eos_token_id=None, **mode) for count in (SHORT, TOKENS)
            )
            seconds, out = _clocked(model, inputs, **mode)
            if turn >= 0:
                tokens = int((out.reveal_step >= 0).sum())
                in_round = (long - short) / max(1, _rounds(many) - _rounds(few))
                found[states].append((in_round, tokens / int(out.stats.row_forwards.sum()), tokens / seconds))
    for states in every:
        yield Timed(len(inputs["input_ids"]), states, *map(statistics.median, zip(*found[states], strict=True)))
    model.release_graphs()


def _clocked(model: MRPForCausalLM, inputs: dict[str, Tensor], **options: Any) -> tuple[float, Any]:
    begun = _now(model.device)
    out = decode(model, inputs, **options)
    return _now(model.device) - begun, out


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _rounds(out: Any) -> int:
    """Count the backbone forwards after the prompt's."""
    return int(out.stats.forwards["denoise"] + out.stats.forwards["verify"])


def proposed(timed: Sequence[Timed]) -> dict[int, int]:
    """Choose for each batch the K that made the most tokens a second."""
    by_speed = sorted(timed, key=lambda one: (one.batch, one.tokens_per_second))
    return {one.batch: one.states for one in by_speed}
