"""Timings of rounds for each batch and number of states K, and the K with the most tokens per
second."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modeling_mrp.modeling import MRPForCausalLM

from .checks import TOKENS, WARM_UPS, decode, drafters

# New tokens of the shorter of two timed calls, whose difference is the time of further rounds.
SHORT = 16


@dataclass(frozen=True)
class Timed:
    """Timings of rounds with `batch` rows of `states` states each (1: the target alone), as medians
    over turns: seconds of one round, and token rates of a whole call, prompts included."""

    batch: int
    states: int
    seconds: float
    tokens_per_forward: float
    tokens_per_second: float


def time_rounds(
    model: MRPForCausalLM, inputs: dict[str, Tensor], state_counts: Sequence[int], repetitions: int
) -> Iterator[Timed]:
    """Time rounds with each of `state_counts` on a batch, in turns: the difference in seconds of
    two calls over their difference in rounds, so that prompts cancel out. Drafts are for the
    checkpoint's target, or for `static`."""
    target = model.generation_config.target or "static"
    measured: dict[int, list[tuple[float, float, float]]] = {states: [] for states in state_counts}
    for repetition in range(-WARM_UPS if model.device.type != "cpu" else 0, repetitions):
        for states in state_counts:
            mode: dict[str, Any] = {"decoding": target}
            if states != 1:
                mode |= {"decoding": drafters(model)[0], "target": target}
                mode |= {"num_draft_states": states}
            without_eos = {**mode, "eos_token_id": None}
            short, short_output = _timed_decode(model, inputs, max_new_tokens=SHORT, **without_eos)
            long, long_output = _timed_decode(model, inputs, max_new_tokens=TOKENS, **without_eos)
            seconds, out = _timed_decode(model, inputs, **mode)
            if repetition >= 0:
                tokens = int((out.reveal_step >= 0).sum())
                rounds = max(1, _round_count(long_output) - _round_count(short_output))
                in_round = (long - short) / rounds
                measured[states].append(
                    (in_round, tokens / int(out.stats.row_forwards.sum()), tokens / seconds)
                )
    for states in state_counts:
        yield Timed(
            len(inputs["input_ids"]),
            states,
            *map(statistics.median, zip(*measured[states], strict=True)),
        )
    model.release_graphs()


def _timed_decode(
    model: MRPForCausalLM, inputs: dict[str, Tensor], **options: Any
) -> tuple[float, Any]:
    start = now(model.device)
    out = decode(model, inputs, **options)
    return now(model.device) - start, out


def now(device: torch.device) -> float:
    """Read the clock in seconds, once a device has finished."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _round_count(out: Any) -> int:
    """Count the rounds of an output: its backbone forwards after those of the prompt."""
    return int(out.stats.forwards["denoise"] + out.stats.forwards["verify"])


def proposed(timed: Sequence[Timed]) -> dict[int, int]:
    """Return for each number of rows the K that made the most tokens a second."""
    by_speed = sorted(timed, key=lambda timing: (timing.batch, timing.tokens_per_second))
    return {timing.batch: timing.states for timing in by_speed}
