"""Figures of the frontier and the cost model (``python -m benchmarks.plots``; needs matplotlib, the extra `bench`).

Reads `tiny_frontier*.jsonl` and `cost_model.jsonl` from `benchmarks/results` and writes SVG files beside them: the same bytes
for the same numbers, with text as text.
"""

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .common import RESULTS, read_lines
from .tables import frontier_lines

Line = dict[str, Any]
COLORS = {"static": "#777777", "self_spec": "#1b9e77", "mrp_spec": "#7570b3"}
STYLES = ("-", "--", ":", "-.")
DETERMINISTIC: Any = {
    "svg.hashsalt": "mrp",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "axes.grid": True,
    "grid.alpha": 0.3,
}

# What tells the curves of the frontier apart: colour, marker and line of each.
CURVES: dict[str, tuple[str, str, str]] = {
    "static": ("#000000", "s", ""),
    "sequential": ("#000000", "D", ""),
    "entropy_bound": ("#666666", "^", "-"),
    "dynamic": ("#666666", "o", "-"),
    "mrp_remask reread": ("#e7298a", "o", "-"),
    "mrp_remask threshold": ("#e7298a", "x", "--"),
    "mrp_remask residual": ("#e7298a", "+", ":"),
    "mrp_direct": ("#e6ab02", "*", "-"),
    "psd": ("#66a61e", "v", ""),
    "released": ("#a6761d", "", "-"),
    "self_spec": ("#1b9e77", "", "-"),
    "draft_graph": ("#d95f02", "", "-"),
    "mrp_spec": ("#7570b3", "", "-"),
}


def frontier_figure(lines: Sequence[Line]) -> Figure:
    """Accuracy over tokens per forward with 95 % intervals, a panel a family; drafted targets have their target's marker."""
    lines = [line for line in lines if "accuracy" in line]
    families = list(dict.fromkeys(line["family"] for line in lines))
    figure = Figure(figsize=(1.8 + 5.2 * len(families), 4.8), layout="constrained")
    for place, family in enumerate(families):
        axes = figure.add_subplot(1, len(families), place + 1)
        curves: dict[tuple[str, str], list[Line]] = {}
        for line in lines:
            if line["family"] == family:
                mode = " ".join(filter(None, (line["decoding"], line.get("remask_rule"))))
                curves.setdefault((mode, line.get("target", "")), []).append(line)
        for (mode, target), points in curves.items():
            color, marker, style = CURVES[mode]
            points = sorted(points, key=lambda line: line["tokens_per_forward"])
            axes.errorbar(
                [line["tokens_per_forward"] for line in points],
                [line["accuracy"] for line in points],
                xerr=_arms(points, "tokens_per_forward"),
                yerr=_arms(points, "accuracy"),
                color=color,
                marker=marker or CURVES[target][1],
                linestyle=style,
                ms=5,
                lw=1,
                elinewidth=0.4,
                label=f"{mode} of {target}" if target else mode,
            )
        axes.set(title=family, xlabel="tokens per backbone forward", ylabel="problems solved, %")
    figure.legend(*axes.get_legend_handles_labels(), fontsize=7, loc="outside right upper")  # every family has all curves
    return figure


def _arms(points: Sequence[Line], name: str) -> list[list[float]]:
    """How far the intervals of points reach below and above them, as error bars are drawn; rounding may leave a little less."""
    below = [max(0.0, line[name] - line[f"{name}_95"][0]) for line in points]
    return [below, [max(0.0, line[f"{name}_95"][1] - line[name]) for line in points]]


def cost_figure(lines: Sequence[Line], device: str, shape: str) -> Figure:
    """Predicted speed over `static` against the batch size, a panel a family and a line a mode and K."""
    points = [line for line in lines if line["kind"] == "point" and (line["device"], line["shape"]) == (device, shape)]
    batches = sorted({line["batch"] for line in points})
    drafted = [k for k in sorted({line["states"] for line in points}) if k > 1]
    families = list(dict.fromkeys(line["family"] for line in points))
    figure = Figure(figsize=(4.2 * len(families), 3.6), layout="constrained")
    for place, family in enumerate(families):
        axes = figure.add_subplot(1, len(families), place + 1)
        axes.axhline(1, color=COLORS["static"], label="static")
        for mode, (style, k) in product(("self_spec", "mrp_spec"), list(zip(STYLES, drafted, strict=False))):
            at = {
                line["batch"]: line["speedup"]
                for line in points
                if (line["family"], line["mode"], line["states"]) == (family, mode, k)
            }
            if at:
                x = sorted(at)
                axes.plot(x, [at[b] for b in x], style, marker="o", ms=3, color=COLORS[mode], label=f"{mode} K={k}")
        _decorate(axes, f"{family}, {shape} on {device}, predicted", "batch size", "speed over static", batches)
        axes.set_ylim(bottom=0)
    return figure


def _decorate(axes: Axes, title: str, x: str, y: str, ticks: Sequence[float]) -> None:
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=8)


def save(figure: Figure, path: Path) -> None:
    """As SVG, without the date or the version that drew it."""
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def main(arguments: list[str] | None = None) -> None:
    """Command line: writes the figures for the results that are there.

    These are `frontier.svg` and `cost_DEVICE_SHAPE.svg`.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder to read, and to write to")
    parser.add_argument("--device", default="H200")
    parser.add_argument("--shape", default="4B")
    options = parser.parse_args(arguments)
    with matplotlib.rc_context(DETERMINISTIC):
        figures: dict[str, Figure] = {}
        if measured := frontier_lines(options.results):
            figures["frontier.svg"] = frontier_figure(measured)
        if (path := options.results / "cost_model.jsonl").exists():
            name = f"cost_{options.device}_{options.shape}.svg".lower()
            figures[name] = cost_figure(read_lines(path), options.device, options.shape)
        for name, figure in figures.items():
            save(figure, options.results / name)
            print(options.results / name)


if __name__ == "__main__":
    main()
