"""A round's time by batch and number of states, and the number of drafts that pays."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modeling_mrp.generate.output import MRPGenerateOutput
from modeling_mrp.modeling import MRPForCausalLM

from .texts import TOKENS, WARM_UPS, decode, drafters

# Tokens of the shorter of two calls; what they differ by is rounds alone.
SHORT = 16


@dataclass(frozen=True)
class Timed:
    """Rounds of one width and batch.

    Attributes:
        batch, states: Rows, and K, the states of a row; 1: the target alone.
        seconds: Of a round, the median of all turns.
        tokens_per_forward: Of the whole call.
        tokens_per_second: Of the whole call, with its prompts.
    """

    batch: int
    states: int
    seconds: float
    tokens_per_forward: float
    tokens_per_second: float


def mode_of(model: MRPForCausalLM, states: int) -> dict[str, Any]:
    """Give the options of `generate` for rounds of K states: the checkpoint's target, or `static`, alone or drafted."""
    target = model.generation_config.target or "static"
    drafted = {"decoding": drafters(model)[0], "target": target, "num_draft_states": states}
    return {"decoding": target} if states == 1 else drafted


def time_rounds(model: MRPForCausalLM, inputs: dict[str, Tensor], every: Sequence[int], turns: int) -> Iterator[Timed]:
    """Time rounds of each width on a batch, in turns: the difference of two calls over that of their rounds, so that prompts
    drop out."""
    batch = len(inputs["input_ids"])
    rounds: dict[int, list[float]] = {states: [] for states in every}
    whole: dict[int, list[tuple[float, float]]] = {states: [] for states in every}
    for turn in range(-WARM_UPS if model.device.type == "cuda" else 0, turns):
        for states in every:
            asked = mode_of(model, states)
            (short, few), (long, many) = (
                _clocked(model, inputs, max_new_tokens=count, eos_token_id=None, **asked) for count in (SHORT, TOKENS)
            )
            seconds, out = _clocked(model, inputs, **asked)
            if turn >= 0:
                rounds[states].append((long - short) / max(1, _rounds(many) - _rounds(few)))
                assert out.reveal_step is not None
                assert out.stats is not None
                assert out.stats.row_forwards is not None
                tokens = int((out.reveal_step >= 0).sum())
                whole[states].append((tokens / int(out.stats.row_forwards.sum()), tokens / seconds))
    for states in every:
        forwards, speed = (statistics.median(values) for values in zip(*whole[states], strict=True))
        yield Timed(batch, states, statistics.median(rounds[states]), forwards, speed)
    model.release_graphs()


def _clocked(model: MRPForCausalLM, inputs: dict[str, Tensor], **options: Any) -> tuple[float, MRPGenerateOutput]:
    begun = _now(model.device)
    out = decode(model, inputs, **options)
    return _now(model.device) - begun, out


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _rounds(out: MRPGenerateOutput) -> int:
    """Count the backbone forwards behind the prompt's."""
    assert out.stats is not None
    assert out.stats.forwards is not None
    return out.stats.forwards["denoise"] + out.stats.forwards["verify"]


def proposed(timed: Sequence[Timed]) -> dict[int, int]:
    """Choose by batch the K that made the most tokens a second."""
    best = {batch: [one for one in timed if one.batch == batch] for batch in dict.fromkeys(one.batch for one in timed)}
    return {batch: max(ways, key=lambda one: one.tokens_per_second).states for batch, ways in best.items()}
