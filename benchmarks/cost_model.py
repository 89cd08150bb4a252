"""When speculation pays: speed over `static` at the published shapes, from measured counts and the roofline of a device.

``python -m benchmarks.cost_model`` takes tokens per forward, states per forward and head passes per round from results of
`benchmarks.sweep` and prints, for each shape, batch size and K, what a round of `static`, `self_spec` and `mrp_spec` takes and
the mode to use; then where each stops paying. The counts are those of the checkpoint measured, a toy's here, and the bandwidth
is ideal: predictions hold for a model whose drafts are right as often, on a device that never waits. What waiting adds is in
`benchmarks.rounds`.
"""

import argparse
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mrp_trainer.data.tasks import FAMILIES
from mrp_trainer.evaluate.results import with_headers
from torch import nn

from modeling_mrp.modeling import MRPForCausalLM

from .common import HUB_CONFIGS, RESULTS, emit, header
from .roofline import Device, Shape, Work, backbone_forward, head_forward, vocabulary_step

# Bandwidth of the H200 as measured with a large copy, the others and all peaks (dense bf16) as their makers give them.
DEVICES = {
    "H200": Device("H200", 4.3e12, 989e12),
    "A100-80G": Device("A100-80G", 2.04e12, 312e12),
    "RTX4090": Device("RTX4090", 1.01e12, 165e12),
}
SHAPES = ("1.7b", "4b", "8b")
SPECULATING = ("self_spec", "mrp_spec")
LARGEST_BATCH = 1024


@dataclass(frozen=True)
class Counts:
    """What a mode does in a round, per row.

    Attributes:
        tokens_per_forward: Tokens generated per backbone forward.
        states_per_forward: States that a row packs into it.
        head_passes: Passes of the head in a round, one after the other.
        states_per_head_pass: States that a row packs into each.
        draft_picks: Vocabulary steps that drafting takes in a round, one after the other.
    """

    tokens_per_forward: float
    states_per_forward: float
    head_passes: float = 0.0
    states_per_head_pass: float = 1.0
    draft_picks: float = 0.0


def head_share(model: MRPForCausalLM) -> float:
    """Divide the parameters that a head pass and its picks read by those that a backbone forward and its picks read."""

    def size(module: nn.Module | None) -> int:
        return sum(parameter.numel() for parameter in module.parameters()) if module is not None else 0

    picked = model.config.draft_vocab_size or model.config.vocab_size
    return (size(model.mrp_head) + picked * model.config.hidden_size) / (
        size(model.model.layers) + model.lm_head.weight.numel()
    )


def masks_per_state(block_size: int) -> float:
    """Positions of a state that need a pick, on average over a block's states, from all masks to none."""
    return block_size / 2


def static_counts(block_size: int) -> Counts:
    """One token a forward, and a state for each; at a block's end the clean state takes the next block's first one along."""
    return Counts(1.0, 1 + 1 / block_size)


def round_work(shape: Shape, counts: Counts, batch: int, prefix: int) -> dict[str, tuple[float, list[Work]]]:
    """The kernel groups of a round behind `prefix` tokens, by part, and how often each part is done: `backbone`, `vocabulary`,
    `head`, `draft_vocabulary`."""
    masks = batch * masks_per_state(shape.block_size)
    return {
        "backbone": (1, backbone_forward(shape, batch, counts.states_per_forward, prefix)),
        "vocabulary": (1, [vocabulary_step(shape, masks * counts.states_per_forward)]),
        "head": (counts.head_passes, head_forward(shape, batch, counts.states_per_head_pass, prefix)),
        "draft_vocabulary": (counts.draft_picks, [vocabulary_step(shape, masks * counts.states_per_head_pass)]),
    }


def round_seconds(shape: Shape, device: Device, counts: Counts, batch: int, prefix: int) -> dict[str, float]:
    """Seconds of a round by part: see `round_work`."""
    return {
        part: times * sum(map(device.seconds, works))
        for part, (times, works) in round_work(shape, counts, batch, prefix).items()
    }


def tokens_per_second(shape: Shape, device: Device, counts: Counts, batch: int, prefix: int) -> float:
    """Of all rows together."""
    return batch * counts.tokens_per_forward / sum(round_seconds(shape, device, counts, batch, prefix).values())


def speedup(shape: Shape, device: Device, counts: Counts, static: Counts, batch: int, prefix: int) -> float:
    """Speed of a mode over that of `static`."""
    mode, base = (tokens_per_second(shape, device, each, batch, prefix) for each in (counts, static))
    return mode / base


def stops_paying_at(shape: Shape, device: Device, counts: Counts, static: Counts, prefix: int) -> int | None:
    """The smallest batch at which a mode is slower than `static`; None if there is none up to 1024."""
    batches = range(1, LARGEST_BATCH + 1)
    return next((batch for batch in batches if speedup(shape, device, counts, static, batch, prefix) < 1), None)


def counts_of(line: dict[str, Any], mode: str, states: int) -> Counts:
    """Counts from a line of results.

    A line that does not say what a round computes stands for K states a forward and the head's forwards per token. Each head
    pass takes a vocabulary step; `self_spec` drafts from what was picked already, and takes none.
    """
    tokens = line["tokens_per_forward"]
    passes = line.get("head_passes_per_round", line["head_per_token"] * tokens) if mode == "mrp_spec" else 0.0
    return Counts(
        tokens_per_forward=tokens,
        states_per_forward=line.get("states_per_forward", float(states)),
        head_passes=passes,
        states_per_head_pass=max(1.0, line.get("states_per_head_pass", 1.0)),
        draft_picks=line.get("draft_picks_per_round", passes),
    )


def measured_counts(lines: list[dict[str, Any]], family: str, mode: str, states: int, batch: int) -> Counts | None:
    """Counts of a mode from results, measured at the largest batch that is not above the one asked; None without any."""
    fitting = [
        line
        for line in lines
        if line["family"] == family
        and line.get("axis") != "prompt"
        and line["mode"] == mode
        and line.get("states", states) == states
        and line["batch_size"] <= batch
    ]
    return counts_of(max(fitting, key=lambda line: line["batch_size"]), mode, states) if fitting else None


def modes_at(lines: list[dict[str, Any]], family: str, states: int, batch: int, static: Counts) -> dict[str, Counts]:
    """Counts of the modes that are known of a family at a K and batch size; at K = 1 they draft nothing and are `static`."""
    known = {"static": static}
    for mode in SPECULATING:
        counts = static if states == 1 else measured_counts(lines, family, mode, states, batch)
        if counts is not None:
            known[mode] = counts
    return known


def predict(
    shape: Shape, device: Device, family: str, known: dict[str, Counts], batch: int, states: int, prefix: int
) -> Iterator[dict[str, Any]]:
    """A line of kind `point` for each mode and, where both speculating ones are known and draft, one of kind `choice`."""
    place = {"device": device.name, "shape": shape.name, "family": family, "batch": batch, "states": states}
    speed = {}
    for mode, counts in known.items():
        speed[mode] = speedup(shape, device, counts, known["static"], batch, prefix)
        parts = round_seconds(shape, device, counts, batch, prefix)
        yield {
            "kind": "point",
            **place,
            "mode": mode,
            "tokens_per_forward": counts.tokens_per_forward,
            "round_ms": round(1e3 * sum(parts.values()), 3),
            **{f"{name}_ms": round(1e3 * seconds, 3) for name, seconds in parts.items()},
            "speedup": round(speed[mode], 3),
        }
    if states > 1 and set(SPECULATING) <= set(known):
        best = max(speed, key=lambda mode: speed[mode])
        yield {"kind": "choice", **place, "decoding": best, "speedup": round(speed[best], 3)}


def limits(
    shape: Shape, device: Device, family: str, known: dict[str, Counts], states: int, prefix: int
) -> Iterator[dict[str, Any]]:
    """A line of kind `limit` for each speculating mode that is known: the batch at which it stops paying, and why."""
    for mode in SPECULATING:
        if mode in known:
            counts = known[mode]
            yield {
                "kind": "limit",
                "device": device.name,
                "shape": shape.name,
                "family": family,
                "states": states,
                "mode": mode,
                "stops_paying_at_batch": stops_paying_at(shape, device, counts, known["static"], prefix),
                "compute_bound_at_batch": math.ceil(device.ridge / (counts.states_per_forward * shape.block_size)),
            }


def main(arguments: list[str] | None = None) -> None:
    """Command line: JSON lines of kinds `point`, `choice` and `limit`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost_model", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--counts", default=str(RESULTS / "tiny_sweep.jsonl"), help="results of `benchmarks.sweep`")
    parser.add_argument("--family", nargs="+", default=list(FAMILIES), help="whose lines of them to take")
    parser.add_argument("--device", nargs="+", default=["H200"], choices=[*DEVICES])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--states", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--prefix", type=int, default=512, help="committed tokens of a row")
    options = parser.parse_args(arguments)
    counted = list(with_headers(map(json.loads, Path(options.counts).read_text().splitlines())))
    lines = [line for _, line in counted]
    weights = {part: counted[-1][0].get(part) for part in ("backbone", "head")} if counted else {}
    emit({**header("cost_model", options), **weights})
    for name, size, family in itertools.product(options.device, options.shape, options.family):
        shape = Shape.read(HUB_CONFIGS / f"sdar-{size}-mrp")
        for line in _of_family(lines, shape, DEVICES[name], family, options):
            emit(line)


def _of_family(
    lines: list[dict[str, Any]], shape: Shape, device: Device, family: str, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Every prediction of one shape on one device, with the counts of one family."""
    static = static_counts(shape.block_size)
    if (measured := measured_counts(lines, family, "static", 1, 1)) is not None:
        static = replace(static, tokens_per_forward=measured.tokens_per_forward)
    for states in options.states:
        for batch in options.batch:
            known = modes_at(lines, family, states, batch, static)
            yield from predict(shape, device, family, known, batch, states, options.prefix)
        if states > 1:
            known = modes_at(lines, family, states, max(options.batch), static)
            yield from limits(shape, device, family, known, states, options.prefix)


if __name__ == "__main__":
    main()
