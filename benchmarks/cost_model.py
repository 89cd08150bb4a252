"""When drafting pays at the published shapes, predicted from a device's roofline.

    python -m benchmarks.cost_model --device H200 --batch 1 2 4 --states 4 8

Prints the best mode and its speed over `static` at each shape, batch size and K; `static` where no
draft pays. Tokens per forward, states per forward and head passes per round are those of
`benchmarks.frontier`, measured with the embedded toy checkpoint; the bandwidth is ideal. So
predictions hold for a model whose drafts are accepted as often, on a device that never waits.
Beside `mrp_trainer.evaluate.cost`, this model has the keys and values of the text, and no launches.
`--shape 30b-a3b` is SDAR-30B-A3B; a round reads only the experts that some token
chooses (`Shape.experts_read`).

    python -m benchmarks.cost_model --memory

prints what the published shapes take in memory instead: weights of backbone and head in bfloat16,
or with the matrices of all layers in int8 or 4 bits (`WEIGHT_BYTES`) and embedding and `lm_head` in
bfloat16, and the cache of a row of 1,000 tokens.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

from mrp_trainer.data.tasks import FAMILIES
from mrp_trainer.evaluate.roofline import (
    DEVICES,
    PUBLISHED,
    WEIGHT_BYTES,
    Counts,
    Shape,
    round_seconds,
)
from mrp_trainer.publish.card import markdown_table

from .common import RESULTS, parser_of
from .frontier import setting_name, shortlisted
from .tables import by_setting
from .targets import alone, drafted

SHAPES = (*map(str.lower, PUBLISHED), "30b-a3b")
# SDAR-30B-A3B with the block size of the measured counts, 16, and a head of three dense layers.
EXPERTS = Shape(
    "30B-A3B",
    2048,
    6144,
    48,
    32,
    4,
    128,
    151936,
    16,
    3,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
)
Line = dict[str, Any]


def counts_at(line: Line, batch: int) -> Counts:
    """Return the counts of a line of the frontier. In a batch of several rows all compute as many
    states as the row with the most, which has K nearly always."""
    most = line.get("num_draft_states", 1)
    states = line["states_per_forward"]
    return Counts(
        line["tokens_per_forward"],
        max(states, most) if batch > 1 else states,
        line["head_per_token"] * line["tokens_per_forward"],
        max(1, most - 1),
    )


def table(
    device: Sequence[str],
    shape: Sequence[str],
    batch: Sequence[int],
    states: Sequence[int],
    prefix: int,
) -> str:
    """Tabulate the best mode and its predicted speed over `static` after `prefix` tokens, as
    Markdown; columns are by K."""
    measured = by_setting(RESULTS)
    columns = list(product(FAMILIES, states))
    choices = list[list[str]]()
    for hardware, size in product(map(DEVICES.__getitem__, device), shape):
        sizes = EXPERTS if size == "30b-a3b" else PUBLISHED[size.upper()]
        for rows in batch:
            entries = []
            for family, k in columns:
                speeds: dict[str, float] = {}
                settings = {
                    "static": alone("static"),
                    "self_spec": drafted("self_spec", "static", k),
                }
                settings["mrp_spec"] = shortlisted("static", k, 1)
                for mode, setting in settings.items():
                    counts = counts_at(measured[family, setting_name(setting)], rows)
                    seconds = round_seconds(sizes, hardware, counts, rows, prefix)
                    speeds[mode] = counts.tokens_per_forward / seconds
                # rounded first: of equal modes the simplest is the best
                speedups = {}
                for mode, speed in speeds.items():
                    speedups[mode] = round(speed / speeds["static"], 3)
                best = max(speedups, key=speedups.__getitem__)
                entries.append(f"{best} {speedups[best]:.2f}x")
            choices.append([hardware.name, sizes.name, str(rows), *entries])
    titles = [f"{family} K={k}" for family, k in columns]
    return markdown_table(["device", "shape", "batch", *titles], choices)


def memory() -> str:
    """Tabulate the memory of weights and cache at the published shapes, as Markdown."""
    rows = []
    for shape in PUBLISHED.values():
        row = [shape.name]
        for per_weight in WEIGHT_BYTES.values():
            row.append(f"{shape.weight_bytes(per_weight) / 2**30:.1f}")
        row.append(f"{1000 * shape.cache_bytes / 2**20:.0f}")
        rows.append(row)
    titles = [f"{name}, GiB" for name in WEIGHT_BYTES]
    return markdown_table(["shape", *titles, "cache of 1,000 tokens, MiB"], rows)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: print a Markdown table."""
    parser = parser_of("cost_model", __doc__)
    parser.add_argument("--device", nargs="+", default=["H200"], choices=[*DEVICES])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["4b"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 3, 4, 6, 8])
    parser.add_argument(
        "--states", nargs="+", type=int, choices=(4, 8), default=[4, 8], help="values of K"
    )
    parser.add_argument("--prefix", type=int, default=512, help="committed tokens of a row")
    parser.add_argument("--memory", action="store_true", help="print memory in place of speed")
    options = vars(parser.parse_args(arguments))
    print(memory() if options.pop("memory") else table(**options))


if __name__ == "__main__":
    main()
