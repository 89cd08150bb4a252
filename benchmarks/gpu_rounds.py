"""A round of decoding on a GPU: its texts, and its time beside the floor."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from modeling_mrp.generate.output import MRPGenerateOutput
from modeling_mrp.kernels.dispatch import failed_kernels
from modeling_mrp.model.configuration import MRPConfig
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.graphs import recording_report

from .common import HUB_CONFIGS, now
from .cost_model import Counts, round_seconds
from .roofline import Device, Shape
from .turns import spread, take_turns

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
INIT_STD = 0.02


def published_config(size: str) -> MRPConfig:
    """Read the config of `1.7b`, `4b` or `8b`."""
    return MRPConfig.from_pretrained(HUB_CONFIGS / f"sdar-{size}-mrp")


@torch.no_grad()
def random_model(config: MRPConfig, dtype: torch.dtype, device: str, seed: int = 0) -> MRPForCausalLM:
    """Make a model with random matrices and norms of one, which never ends a text by itself; every tensor is written once."""
    with torch.device("meta"):
        model = MRPForCausalLM(config)
    model = model.to(dtype).to_empty(device=device).eval()
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1)
        else:
            parameter.normal_(0, INIT_STD, generator=generator)
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(device)  # its buffers are no parameters, and came out empty
    model.generation_config.eos_token_id = None
    return model


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
        counts = Counts(1.0, self.states, float(self.states > 1), max(1, self.states - 1))
        return round_seconds(shape, device, counts, self.batch, self.prefix)


def decode(model: MRPForCausalLM, inputs: dict[str, Tensor], tokens: int, **options: Any) -> tuple[float, MRPGenerateOutput]:
    """Time a call of `generate`: seconds, and what it gave but for its cache, which no other call could use."""
    began = now(model.device)
    asked: dict[str, Any] = {**inputs, **options}
    out = model.generate(**asked, max_new_tokens=tokens, return_dict_in_generate=True)
    seconds = now(model.device) - began
    assert isinstance(out, MRPGenerateOutput)
    out.past_key_values = None
    return seconds, out


def fallbacks(model: MRPForCausalLM) -> dict[str, Any]:
    """Count what ran as it should and what fell back.

    Returns:
        `recordings`, `replays` and `bytes` of the model's graphs, `failed_recordings`, `failed_kernels` of this process by
        name, and `fell_back`: whether anything failed, or nothing was replayed on a GPU.
    """
    report, kernels = recording_report(model), failed_kernels()
    failed = report.pop("failed")
    fell_back = bool(kernels or failed or (model.device.type == "cuda" and not report["replays"]))
    return {"fell_back": fell_back, **report, "failed_recordings": failed, "failed_kernels": kernels}


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

    Returns:
        `ok`; `texts`, and how many of them are equal; `gap`, the largest where they part; and `fallbacks`.
    """
    for _ in range(WARM_UPS + 1):
        _, checked = decode(model, inputs, tokens, **options, **ours)
    ran = fallbacks(model)
    _, plain = decode(model, inputs, tokens, **options, **WAYS["neither"])
    found = gaps(checked, plain)
    gap = max((one for one in found if one is not None), default=0.0)
    ok = gap <= NEAR_TIE.get(model.dtype, 0.0) and not ran["fell_back"]
    return {"ok": ok, "texts": len(found), "equal": found.count(None), "gap": round(gap, 4), **ran}


def gaps(ours: MRPGenerateOutput, theirs: MRPGenerateOutput) -> list[float | None]:
    """Give by row how far two texts are apart where they part; None if they are equal.

    Kernels round other sums than PyTorch does, and a near-tie can fall either way; what follows it differs rightly. So the mean
    log-probabilities are compared of what rows revealed in the first step in which they differ. Up to that step both saw the
    same, so they are close where both are right; the gap is infinite where only one goes on.
    """
    found: list[float | None] = []
    for mine, other in zip(_steps(ours), _steps(theirs), strict=True):
        for step in sorted(mine.keys() | other.keys()):
            one, two = (steps.get(step, []) for steps in (mine, other))
            if [each[:2] for each in one] != [each[:2] for each in two]:
                means = [sum(each[2] for each in part) / len(part) if part else math.inf for part in (one, two)]
                found.append(abs(means[0] - means[1]))
                break
        else:
            found.append(None)
    return found


def _steps(out: MRPGenerateOutput) -> list[dict[int, list[tuple[int, int, float]]]]:
    """List by row and step the places, tokens and log-probabilities that it revealed."""
    assert out.sequences is not None
    assert out.token_logprobs is not None
    assert out.reveal_step is not None
    rows = []
    for ids, logprobs, steps in zip(out.sequences, out.token_logprobs.tolist(), out.reveal_step.tolist(), strict=True):
        by_step: dict[int, list[tuple[int, int, float]]] = {}
        for place, (token, logprob, step) in enumerate(zip(ids[-len(steps) :].tolist(), logprobs, steps, strict=True)):
            if step >= 0:
                by_step.setdefault(step, []).append((place, token, logprob))
        rows.append(by_step)
    return rows


@torch.inference_mode()
def time_round(model: MRPForCausalLM, shape: Shape, device: Device, timed: Round, turns: int) -> Iterator[dict[str, Any]]:
    """Time a round in every way, in turns.

    Our round is the difference of a longer and a shorter call over that of their rounds, so that the prompt drops out.

    Args:
        model: Random weights at the shape, whose texts do not end by themselves.
        shape: For the floor.
        device: What the device can do, as measured.
        timed: The round.
        turns: How many.

    Yields:
        By way: microseconds, and how many times the floor.
    """
    ids = timed.ids(model, timed.prefix)
    inputs = {"inputs": ids, "attention_mask": torch.ones_like(ids)}  # a random token may be the one for padding

    def ours(options: dict[str, Any], _: int) -> float:
        (short, few), (long, many) = (decode(model, inputs, n, **timed.options, **options) for n in (SHORT, LONG))
        return (long - short) / (rounds_of(many) - rounds_of(few))

    clocks = {way: partial(ours, options) for way, options in WAYS.items()}
    times = take_turns(clocks, turns, WARM_UPS if model.device.type == "cuda" else 0)
    floor = 1e6 * timed.floor_seconds(shape, device)
    for way, seconds in times.items():
        taken = spread([1e6 * second for second in seconds], 2)
        line = {"way": way, "us": taken["median"], "us_quartiles": taken["quartiles"], "floor_us": round(floor, 2)}
        yield {**line, "over_floor": round(taken["median"] / floor, 3)}
    ran = fallbacks(model)
    yield {"way": "ours", "ok": not ran["fell_back"], **ran}


def rounds_of(out: MRPGenerateOutput) -> int:
    """Count the backbone forwards behind the prompt's."""
    assert out.stats is not None
    assert out.stats.forwards is not None
    return out.stats.forwards["denoise"] + out.stats.forwards["verify"]
