"""The tuning of rivals: tokens a forward of all candidates for each target and K, the best in bold, as a Markdown table.

``python -m benchmarks.tuned draft_graph``: candidates differ in the number of nodes as a multiple of K - 1, in pruning, and in
tokens per position. ``psd``, at K = 8: candidates are the fields of `Reading`; brackets have the number of problems solved
beyond the policy's, and a candidate that loses more than one in a hundred is not chosen. On 40 problems of math and 40 of code,
after the 25 that graphs are calibrated on, in float32.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from mrp_trainer.data.tasks import problems
from mrp_trainer.publish.card import markdown_table

from .common import TINY, load, parser_of
from .draft_graph import Build
from .frontier import CALIBRATED_ON, GRAPH, JUDGED, PSD, WIDTHS, Decoder, Setting, graph_of, psd_of
from .psd import Reading
from .targets import TARGETS, alone

# With K - 1 nodes all are drafted, so pruning makes no difference.
BUILDS = [Build(1, False), *(Build(*one) for one in product((2, 4), (False, True))), Build(2, True, 1)]
READINGS = [Reading(*one) for one in product((0, 1), (False, True), (0.0, 0.5))]
COUNTS = ("tokens", "forwards", "right")
CANDIDATES: dict[str, tuple[Any, Sequence[Any]]] = {GRAPH: (graph_of, BUILDS), PSD: (psd_of, READINGS)}


def table(kind: str, decoder: Decoder, count: int) -> str:
    """Decode with all candidates, and tabulate the results."""
    asked = [problems(family, "tune", CALIBRATED_ON + count)[CALIBRATED_ON:] for family in JUDGED]
    make, candidates = CANDIDATES[kind]

    def decoded(setting: Setting) -> tuple[float, int]:
        made = [decoder.decoded(setting, few) for few in asked]
        tokens, forwards, right = (sum(sum(map(int, getattr(one, name))) for one in made) for name in COUNTS)
        return tokens / forwards, right

    rows = []
    for target, states in product(TARGETS, WIDTHS[1:] if kind == PSD else WIDTHS):
        cells, worth = list[str](), list[tuple[float, float]]()
        least = decoded(alone(target))[1] if kind == PSD else 0
        for candidate in candidates:
            speed, solved = decoded(make(target, states, candidate))
            worth.append((min(0.0, solved - least + count * len(JUDGED) / 100), speed))
            cells.append(f"{speed:.2f}" + (f" ({solved - least:+d})" if kind == PSD else ""))
        best = worth.index(max(worth))
        cells[best] = f"**{cells[best]}**"
        rows.append([f"`{target}` {states}", *cells])
    return markdown_table(["target, K", *(" ".join(map(str, one)) for one in candidates)], rows)


def main(arguments: list[str] | None = None) -> None:
    """Command line: a Markdown table."""
    parser = parser_of("tuned", __doc__)
    parser.add_argument("kind", choices=list(CANDIDATES))
    parser.add_argument("--count", type=int, default=40)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model, tokenizer = load(TINY)
    print(table(options.kind, Decoder(model, tokenizer, 10), options.count))


if __name__ == "__main__":
    main()
