"""Tables and figures of the ablations, with the paper's numbers beside ours.

``python -m benchmarks.ablation_report`` reads `tiny_ablations.jsonl` from `benchmarks/results`, prints Markdown
tables and writes PNG figures beside them. A cell's value is the mean over seeds, its interval that of a
bootstrap over seeds and, inside each, over problems; a comparison is paired: the same seeds and problems.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from mrp_trainer.intervals import Interval, percentiles
from mrp_trainer.publishing.card import markdown_table

from .common import RESULTS, read_lines

Line = dict[str, Any]
# GSM8K, SDAR-4B, direct decoding with K = 1, 2, 3, 4 reveals (MRP, section 4): accuracy in percent.
PAPER = {"residual": (88.6, 84.9, 70.9, 57.2), "direct prediction": (84.8, 16.9, 5.9, 1.9)}
REVEALS = ("on_policy", "random", "random_count", "on_policy on random masks", "random on decoded states")
DEPTHS = ("1 layer", "2 layers", "on_policy", "4 layers")
UNROLLS = ("K=1", "on_policy", "K=3")
PARTS = ("on_policy", "without order", "without rereading", "plain", "reverse KL", "from nothing")
_RESAMPLES = 2000
NAMES = {"on_policy": "on_policy (3 layers, K = 2)"}


class Cells:
    """Measurements by cell, family and setting: for each seed an array [problems, 2] of (numerator, denominator)."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.lines = lines

    def of(self, cell: str, family: str, decoding: str, number: int) -> dict[int, np.ndarray]:
        """By seed: tokens and forwards of each problem for `mrp_spec`, right and 1 for `mrp_direct`."""
        found = {}
        for line in self.lines:
            which = line.get("num_draft_states", line.get("mrp_steps"))
            if (line["cell"], line["family"], line["decoding"], which) == (cell, family, decoding, number):
                if decoding == "mrp_spec":
                    columns = [line["tokens"], line["row_forwards"]]
                else:
                    columns = [[int(right) for right in line["right"]], [1] * len(line["right"])]
                found[line["seed"]] = np.array(columns, dtype=float).T
        return found

    def seeds(self, cell: str) -> list[int]:
        """Which seeds a cell was run with."""
        return sorted({line["seed"] for line in self.lines if line["cell"] == cell})


def resampled(by_seed: Sequence[np.ndarray], resamples: int, seed: int = 0) -> np.ndarray:
    """[resamples] means over seeds drawn with replacement of ratios of sums over problems drawn with replacement.

    The same `seed` draws the same training seeds and problems, so differences of two cells are paired.
    """
    random = np.random.default_rng(seed)
    problems = by_seed[0].shape[0]
    which = random.integers(len(by_seed), size=(resamples, len(by_seed)))
    times = random.multinomial(problems, np.full(problems, 1 / problems), size=resamples)
    ratios = np.stack([(times @ counts)[:, 0] / (times @ counts)[:, 1] for counts in by_seed], 1)
    return np.take_along_axis(ratios, which, 1).mean(1)


def mean(by_seed: Sequence[np.ndarray]) -> float:
    """The mean over seeds of ratios of sums."""
    return float(np.mean([counts[:, 0].sum() / counts[:, 1].sum() for counts in by_seed]))


def interval(by_seed: dict[int, np.ndarray], scale: float = 1.0, resamples: int = _RESAMPLES) -> Interval:
    """A cell's value."""
    values = list(by_seed.values())
    return percentiles(scale * mean(values), scale * resampled(values, resamples))


def difference(
    cell: dict[int, np.ndarray], other: dict[int, np.ndarray], scale: float = 1.0, resamples: int = _RESAMPLES
) -> Interval:
    """A cell minus another, over the seeds that both have."""
    shared = sorted(cell.keys() & other.keys())
    a, b = [cell[s] for s in shared], [other[s] for s in shared]
    return percentiles(scale * (mean(a) - mean(b)), scale * (resampled(a, resamples) - resampled(b, resamples)))


def _shown(value: Interval, digits: int, sign: bool = False) -> str:
    plus = "+" if sign else ""
    return f"{value.value:{plus}.{digits}f} ({value.low:{plus}.{digits}f} to {value.high:{plus}.{digits}f})"


def acceptance_table(cells: Cells, names: Sequence[str], against: str = "on_policy") -> str:
    """Tokens per forward of `mrp_spec` by cell, and how far each is from the first."""
    rows = []
    for name in names:
        seeds = cells.seeds(name)
        if not seeds:
            continue
        row = [NAMES.get(name, name), str(len(seeds))]
        for family in ("math", "code"):
            for states in (4, 8):
                found = cells.of(name, family, "mrp_spec", states)
                shown = _shown(interval(found), 2)
                if name != against:
                    shown += f"; {_shown(difference(found, cells.of(against, family, 'mrp_spec', states)), 2, sign=True)}"
                row.append(shown)
        rows.append(row)
    return markdown_table(["head", "seeds", "math K=4", "math K=8", "code K=4", "code K=8"], rows)


def direct_table(cells: Cells, names: dict[str, str]) -> str:
    """Accuracy of `mrp_direct` by reveals a step, ours by family and the paper's."""
    rows = []
    for name, title in names.items():
        for family in ("math", "code"):
            found = [cells.of(name, family, "mrp_direct", k) for k in (1, 2, 3, 4)]
            if all(found):
                seeds = str(len(cells.seeds(name)))
                rows.append([title, family, seeds, *(_shown(interval(at, 100), 1) for at in found)])
    rows += [[f"paper: {name}", "GSM8K, 4B", "", *map(str, numbers)] for name, numbers in PAPER.items()]
    return markdown_table(["head", "problems", "seeds", "K=1 %", "K=2 %", "K=3 %", "K=4 %"], rows)


def direct_differences(cells: Cells, what: str, pairs: Sequence[tuple[str, str, str]]) -> str:
    """How far one head is ahead of another with `mrp_direct`, in points, where both have the same seeds."""
    rows = []
    for title, ours, other in pairs:
        for family in ("math", "code"):
            found = [(cells.of(ours, family, "mrp_direct", k), cells.of(other, family, "mrp_direct", k)) for k in (1, 2, 3, 4)]
            if all(a.keys() & b.keys() for a, b in found):
                rows.append([title, family, *(_shown(difference(a, b, 100), 1, sign=True) for a, b in found)])
    return markdown_table([what, "problems", "K=1", "K=2", "K=3", "K=4"], rows)


def drafting_table(cells: Cells, pairs: Sequence[tuple[str, str, str]]) -> str:
    """How many tokens a forward one cell is ahead of another, where both have the same seeds."""
    rows = []
    for title, ours, other in pairs:
        places = [(family, number) for family in ("math", "code") for number in (4, 8)]
        found = [(cells.of(ours, *place), cells.of(other, *place)) for place in ((f, "mrp_spec", n) for f, n in places)]
        if all(a.keys() & b.keys() for a, b in found):
            seeds = str(len(found[0][0].keys() & found[0][1].keys()))
            rows.append([title, seeds, *(_shown(difference(a, b), 2, sign=True) for a, b in found)])
    return markdown_table(["what differs", "seeds", "math K=4", "math K=8", "code K=4", "code K=8"], rows)


def direct_figure(cells: Cells, starts: Mapping[str, dict[str, str]]) -> Figure:
    """Accuracy against unverified reveals a step: ours, a row a start of the head and a panel a family, and the paper's."""
    starts = {start: names for start, names in starts.items() if any(cells.seeds(name) for name in names)}
    figure = Figure(figsize=(11.5, 3.4 * len(starts)), layout="constrained")
    grid = figure.add_gridspec(len(starts), 3)
    for row, (start, names) in enumerate(starts.items()):
        for column, family in enumerate(("math", "code")):
            axes = figure.add_subplot(grid[row, column])
            for index, (name, title) in enumerate(names.items()):
                found = [cells.of(name, family, "mrp_direct", k) for k in (1, 2, 3, 4)]
                if all(found):
                    _points(axes, (1, 2, 3, 4), [interval(at, 100) for at in found], title, f"C{index}")
            _finish(axes, f"{family}, {start}", "reveals a step, K", "accuracy, %")
    axes = figure.add_subplot(grid[0, 2])
    for index, (name, numbers) in enumerate(PAPER.items()):
        axes.plot((1, 2, 3, 4), numbers, "o-", ms=4, label=name, color=f"C{index}")
    _finish(axes, "the paper: GSM8K, SDAR-4B", "reveals a step, K", "accuracy, %")
    return figure


def acceptance_figure(cells: Cells, groups: Mapping[str, Sequence[str]]) -> Figure:
    """Tokens per forward of `mrp_spec` with 8 states, a panel a question, a point a cell."""
    groups = {title: names for title, names in groups.items() if sum(bool(cells.seeds(name)) for name in names) > 1}
    figure = Figure(figsize=(9.2, 3.8 * -(-len(groups) // 2)), layout="constrained")
    for place, (title, names) in enumerate(groups.items(), 1):
        axes = figure.add_subplot(-(-len(groups) // 2), 2, place)
        there = [name for name in names if cells.seeds(name)]
        for family, color in (("math", "C0"), ("code", "C1")):
            values = [interval(cells.of(name, family, "mrp_spec", 8)) for name in there]
            _points(axes, range(len(there)), values, family, color, line="")
        axes.set_xticks(range(len(there)), [NAMES.get(name, name) for name in there], rotation=30, ha="right")
        _finish(axes, title, "", "tokens per forward, mrp_spec K=8" if place % 2 else "", ticks=False)
    return figure


def _points(axes: Axes, x: Sequence[float], values: Sequence[Interval], label: str, color: str, line: str = "-") -> None:
    middle = [value.value for value in values]
    around = [[v.value - v.low for v in values], [v.high - v.value for v in values]]
    axes.errorbar(x, middle, np.maximum(around, 0), fmt=f"o{line}", ms=4, capsize=3, label=label, color=color)


def _finish(axes: Axes, title: str, x: str, y: str, ticks: bool = True) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    if ticks:
        axes.set_xticks((1, 2, 3, 4))
        axes.set_ylim(0, 100)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="best")


DIRECT = {
    "on_policy": "residual, trained with K = 2",
    "hidden": "direct prediction, trained with K = 2",
    "K=1": "residual, trained with K = 1",
    "hidden K=1": "direct prediction, trained with K = 1",
}
DIRECT_FROM_NOTHING = {
    "from nothing": DIRECT["on_policy"],
    "hidden from nothing": DIRECT["hidden"],
    "K=1 from nothing": DIRECT["K=1"],
    "hidden K=1 from nothing": DIRECT["hidden K=1"],
}
STARTS = {"from the backbone's layers": DIRECT, "from random layers": DIRECT_FROM_NOTHING}
PAIRS = (
    ("K = 1", "K=1", "hidden K=1"),
    ("K = 2", "on_policy", "hidden"),
    ("K = 1, from random layers", "K=1 from nothing", "hidden K=1 from nothing"),
    ("K = 2, from random layers", "from nothing", "hidden from nothing"),
)
# What an `on_policy` head has learned of another kind than a published one, one thing at a time.
CAUSES = (
    ("reveals, on decoded states", "on_policy", "random on decoded states"),
    ("reveals, on random masks", "on_policy on random masks", "random"),
    ("states, with on-policy reveals", "on_policy", "on_policy on random masks"),
    ("states, with random reveals", "random on decoded states", "random"),
)
UNROLLED = (("two steps over one", "on_policy", "K=1"), ("three steps over two", "K=3", "on_policy"))
GROUPS = {"what is revealed in training": REVEALS, "depth of the head": DEPTHS, "steps unrolled": UNROLLS, "parts": PARTS}


def report(cells: Cells) -> str:
    """All tables, as `benchmarks/README.md` quotes them."""
    titles = DIRECT | {name: f"{title}, from random layers" for name, title in DIRECT_FROM_NOTHING.items()}
    parts = [
        "### Residual against direct prediction",
        direct_table(cells, titles),
        direct_differences(cells, "trained with", PAIRS),
    ]
    for title, names in GROUPS.items():
        if sum(bool(cells.seeds(name)) for name in names) > 1:
            parts += [f"### Tokens per forward: {title}", acceptance_table(cells, names)]
        if names is REVEALS:
            parts.append(drafting_table(cells, CAUSES))
        if names is UNROLLS:
            parts.append(direct_differences(cells, "unrolled in training", UNROLLED))
    return "\n\n".join(parts)


def main(arguments: list[str] | None = None) -> None:
    """Command line: prints the tables, and writes the figures for the results that are there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablation_report", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    cells = Cells(read_lines(options.results / "tiny_ablations.jsonl"))
    print(report(cells))
    figures = {"ablation_direct": direct_figure(cells, STARTS), "ablation_acceptance": acceptance_figure(cells, GROUPS)}
    with matplotlib.rc_context({"savefig.dpi": 130}):
        for name, figure in figures.items():
            figure.savefig(options.results / f"{name}.png", metadata={"Software": None})


if __name__ == "__main__":
    main()
