"""When drafting pays at the published shapes, predicted from a device's roofline: over `static`, or behind SGLang.

    python -m benchmarks.cost_model --device H200 --batch 1 2 4 --states 4 8
    python -m benchmarks.cost_model --served

The first prints the best mode at each shape, batch size and K, `static` where no draft pays. Tokens per forward, states per
forward and head passes per round come from `results/tiny_sweep.jsonl`, measured by commit 27b9ad0 with the embedded toy
checkpoint; the bandwidth is ideal. So predictions hold for a model whose drafts are accepted as often, on a device that never
waits. `--shape 30b-a3b` is SDAR-30B-A3B; a round reads only the experts that some token chooses (`Shape.experts_read`).

The second prints the best K and its speed over `LowConfidence` by concurrent requests, for drafts that are each right with the
same chance if those before were. Added to the roofline are what a forward of the engine takes beyond its bytes, as published,
and launches outside of graphs, copies and reads, as counted (`tests/plugin/test_serving_work.py`). Stock takes one more forward
per block, to store its keys and values. The seconds of a launch, a copy and a read are assumptions.
"""

import json
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from mrp_trainer.data.tasks import FAMILIES
from mrp_trainer.evaluate.roofline import PUBLISHED, Counts, Device, Shape, round_seconds
from mrp_trainer.publish.card import markdown_table

from .common import RESULTS, parser_of

# The H200's bandwidth was measured with a large copy; the other bandwidths and all peaks (dense bf16) are the makers' numbers.
DEVICES = {
    "H200": Device("H200", 4.3e12, 989e12),
    "A100-80G": Device("A100-80G", 2.04e12, 312e12),
    "RTX4090": Device("RTX4090", 1.01e12, 165e12),
}
SHAPES = (*map(str.lower, PUBLISHED), "30b-a3b")
# SDAR-30B-A3B in blocks of 16, like the counts, with a head of three dense layers.
EXPERTS = Shape(
    "30B-A3B", 2048, 6144, 48, 32, 4, 128, 151936, 16, 3, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768
)
SPECULATING = ("self_spec", "mrp_spec")
# Bandwidth and dense bf16 peak as its maker gives them.
RTX_PRO = Device("RTX PRO 6000", 1.79e12, 503e12)
PUBLISHED_FORWARD = 19.6e-3  # seconds of SDAR-8B at batch 1 on it, in SGLang
LAUNCH, CROSSING = 6e-6, 20e-6  # assumed seconds of a launch outside of graphs, and of a copy or a read
REQUESTS = (1, 2, 4, 8, 16, 32, 64)
COUNTS = RESULTS / "tiny_sweep.jsonl"
Line = dict[str, Any]


class Beside(NamedTuple):
    """The work of a served round beside the networks and their picks, at most, as a test counts it: kernels launched, copies to
    the device, and reads that the host waits for."""

    launches: int
    copies: int
    reads: int


# With a head pass for drafts and one for a clean block; and without drafts.
DRAFTED, ALONE = Beside(30, 4, 2), Beside(12, 1, 1)
# Assumed launches of a head pass in a graph: its inputs and metadata are written, and its result is copied.
HEAD_PASS = 12


def counts_at(lines: Sequence[Line], family: str, mode: str, states: int, batch: int, block_size: int) -> Counts:
    """Return the counts of a mode, measured at the largest batch that is at most the one asked for.

    `static` scores one state a forward and, at a block's end, the next block's first one as well.
    """
    alone = mode == "static"
    wanted = {"family": family, "mode": mode, **({} if alone else {"states": states})}
    fitting = [line for line in lines if all(line.get(name) == value for name, value in wanted.items())]
    fitting = [line for line in fitting if line.get("axis") != "prompt" and line["batch_size"] <= (1 if alone else batch)]
    line = max(fitting, key=lambda line: line["batch_size"])
    if alone:
        return Counts(line["tokens_per_forward"], 1 + 1 / block_size)
    packed = max(1.0, line["states_per_head_pass"])
    return Counts(line["tokens_per_forward"], line["states_per_forward"], line["head_passes_per_round"], packed)


def table(device: Sequence[str], shape: Sequence[str], batch: Sequence[int], states: Sequence[int], prefix: int) -> str:
    """Predict the best mode and its speed over `static`, by family and K, shape and batch size."""
    lines = [line for line in map(json.loads, COUNTS.read_text().splitlines()) if "benchmark" not in line]
    columns = list(product(FAMILIES, states))
    choices = list[list[str]]()
    for of, size in product(map(DEVICES.__getitem__, device), shape):
        sizes = EXPERTS if size == "30b-a3b" else PUBLISHED[size.upper()]
        for rows in batch:
            cells = []
            for family, k in columns:
                known = {mode: counts_at(lines, family, mode, k, rows, sizes.block_size) for mode in ("static", *SPECULATING)}
                speed = {
                    mode: one.tokens_per_forward / round_seconds(sizes, of, one, rows, prefix) for mode, one in known.items()
                }
                over = {mode: round(one / speed["static"], 3) for mode, one in speed.items()}
                best = max(over, key=over.__getitem__)
                cells.append(f"{best} {over[best]:.2f}x")
            choices.append([of.name, sizes.name, str(rows), *cells])
    return markdown_table(["device", "shape", "batch", *(f"{family} K={k}" for family, k in columns)], choices)


def stock_seconds(shape: Shape, device: Device, waits: float, prefix: int, batch: int) -> float:
    """Predict the seconds per token of each row under stock's static decoding, which stores each block by an extra forward.

    Args:
        shape: Of the model.
        device: The device.
        waits: Seconds of a forward beyond its bytes or FLOPs.
        prefix: Committed tokens of each request.
        batch: Concurrent requests.
    """
    return (round_seconds(shape, device, Counts(1, 1), batch, prefix) + waits) * (1 + 1 / shape.block_size)


def mrp_seconds(shape: Shape, device: Device, waits: float, prefix: int, batch: int, width: int, chance: float) -> float:
    """Predict the seconds per token of each row under MRP with K = `width`, where each draft is right with a chance.

    Other arguments are those of `stock_seconds`.
    """
    tokens, block = sum(chance**place for place in range(width)), shape.block_size
    counts, beside = Counts(1, 1 + 1 / block), ALONE
    if width > 1:  # a head pass for drafts, and one per clean block
        counts, beside = Counts(tokens, width, 1 + tokens / block, width - 1), DRAFTED
    seconds = round_seconds(shape, device, counts, batch, prefix) + waits
    seconds += (beside.launches + counts.head_passes * HEAD_PASS) * LAUNCH
    return (seconds + (beside.copies + beside.reads) * CROSSING) / tokens


def served(chance: float, prefix: int) -> str:
    """Predict the best K and its speed by concurrent requests, on devices that wait as published and that never wait."""
    waits = PUBLISHED_FORWARD - round_seconds(PUBLISHED["8B"], RTX_PRO, Counts(1, 1), 1, prefix)
    cases: dict[str, tuple[Shape, Device, float]] = {
        "8B, RTX PRO 6000, as published": (PUBLISHED["8B"], RTX_PRO, waits),
        "8B, RTX PRO 6000, no waits": (PUBLISHED["8B"], RTX_PRO, 0.0),
        "4B, H200, no waits": (PUBLISHED["4B"], DEVICES["H200"], 0.0),
        "1.7B, H200, no waits": (PUBLISHED["1.7B"], DEVICES["H200"], 0.0),
    }
    lines = []
    for name, case in cases.items():
        cells = []
        for batch in REQUESTS:
            speeds = {
                width: stock_seconds(*case, prefix, batch) / mrp_seconds(*case, prefix, batch, width, chance)
                for width in (1, 2, 3, 4)
            }
            best = max(speeds, key=speeds.__getitem__)
            cells.append(f"{f'K={best}' if best > 1 else 'rests'} {speeds[best]:.2f}x")
        lines.append([name, *cells])
    return markdown_table(["predicted", *(str(batch) for batch in REQUESTS)], lines)


def main(arguments: list[str] | None = None) -> None:
    """Command line: a Markdown table."""
    parser = parser_of("cost_model", __doc__)
    parser.add_argument("--device", nargs="+", default=["H200"], choices=[*DEVICES])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["4b"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 3, 4, 6, 8])
    parser.add_argument("--states", nargs="+", type=int, choices=(4, 8), default=[4, 8], help="K: what was measured")
    parser.add_argument("--prefix", type=int, default=512, help="committed tokens of a row")
    parser.add_argument("--served", action="store_true", help="behind SGLang, by concurrent requests")
    parser.add_argument("--acceptance", type=float, default=0.75, help="chance of a draft that is served")
    given = vars(parser.parse_args(arguments))
    chance = given.pop("acceptance")
    print(served(chance, given["prefix"]) if given.pop("served") else table(**given))


if __name__ == "__main__":
    main()
