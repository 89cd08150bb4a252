"""Figures (``python -m benchmarks.plots frontier``, ``batches`` or ``long``; needs matplotlib, the
extra `bench`).

Reads `tiny_frontier*.jsonl` or `long.jsonl` from `benchmarks/results` and writes an SVG file beside
them: the same bytes for the same numbers, with text kept as text.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from mrp_trainer.evaluate.cost import CHARGED, Deployment

from .common import RESULTS, parser_of, read_lines
from .longtext import WINDOW, units_along
from .tables import BATCH_DEVICES, BATCHES, frontier_lines, speed_over_alone
from .targets import TARGETS

Line = dict[str, Any]
DETERMINISTIC: Any = {
    "svg.hashsalt": "mrp",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "axes.grid": True,
    "grid.alpha": 0.3,
}

# Colour, marker and line style of each mode's curve in the frontier; drafts have their target's
# marker.
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
    """Plot accuracy over tokens per unit with 95 % intervals, a panel per family; drafts have their
    target's marker."""
    lines = [line for line in lines if "accuracy" in line]
    families = list(dict.fromkeys(line["family"] for line in lines))
    figure = Figure(figsize=(1.8 + 5.2 * len(families), 4.8), layout="constrained")
    for column, family in enumerate(families):
        axes = figure.add_subplot(1, len(families), column + 1)
        curves: dict[tuple[str, str], list[Line]] = {}
        for line in lines:
            if line["family"] == family:
                mode = " ".join(filter(None, (line["decoding"], line.get("remask_rule"))))
                curves.setdefault((mode, line.get("target", "")), []).append(line)
        for (mode, target), points in curves.items():
            color, marker, style = CURVES[mode]
            points = sorted(points, key=lambda line: line["tokens_per_unit"])
            axes.errorbar(
                [line["tokens_per_unit"] for line in points],
                [line["accuracy"] for line in points],
                xerr=_arms(points, "tokens_per_unit"),
                yerr=_arms(points, "accuracy"),
                color=color,
                marker=marker or CURVES[target][1],
                linestyle=style,
                ms=5,
                lw=1,
                elinewidth=0.4,
                label=f"{mode} of {target}" if target else mode,
            )
        axes.set(
            title=family,
            xlabel=f"tokens per unit, {CHARGED}",
            ylabel="problems solved, %",
        )
    # every family has all curves
    figure.legend(*axes.get_legend_handles_labels(), fontsize=7, loc="outside right upper")
    return figure


def batches_figure(folder: Path) -> Figure:
    """Plot the speed of the best drafts over the target alone by batch size, without a head and
    with it; a panel per device. Where a curve is at 1, no draft pays."""
    figure = Figure(figsize=(1.8 + 3.6 * len(BATCH_DEVICES), 4.2), layout="constrained")
    panels = figure.subplots(1, len(BATCH_DEVICES), sharey=True)
    colors = dict(zip(TARGETS, ("#1b9e77", "#d95f02", "#7570b3", "#e7298a"), strict=True))
    for axes, device in zip(panels, BATCH_DEVICES, strict=True):
        for target, color in colors.items():
            speeds: dict[str, list[float]] = {"without a head": [], "with it": []}
            for batch in BATCHES:
                by_way = speed_over_alone(folder, target, Deployment(device=device, batch=batch))
                for curve, (speed, _) in zip(speeds.values(), by_way, strict=True):
                    curve.append(speed)
            for (way, curve), style in zip(speeds.items(), ("--", "-"), strict=True):
                label = f"{target}, {way}"
                axes.plot(BATCHES, curve, color=color, linestyle=style, marker=".", label=label)
        axes.set(title=f"4B on one {device}", xlabel="batch", xscale="log", xticks=BATCHES)
        axes.set_xticks([], minor=True)
        axes.set_xticklabels(map(str, BATCHES))
    panels[0].set(ylabel="speed over the target alone, predicted")
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=7, loc="outside right upper")
    return figure


def _arms(points: Sequence[Line], name: str) -> list[list[float]]:
    """Compute the lengths of error bars below and above points, clipped at 0 against rounding."""
    below = []
    above = []
    for line in points:
        low, high = line[f"{name}_95"]
        below.append(max(0.0, line[name] - low))
        above.append(max(0.0, high - line[name]))
    return [below, above]


def long_figure(lines: Sequence[Line]) -> Figure:
    """Plot tokens per unit along a text: each target alone, with `self_spec`, with `mrp_spec`; a
    panel per block size and T."""
    lines = [line for line in lines if "decoding" in line]
    blocks = sorted({line["block_size"] for line in lines})
    figure = Figure(figsize=(1.8 + 4.2 * len(blocks), 6.4), layout="constrained")
    panels = figure.subplots(2, len(blocks), sharex=True, sharey="row", squeeze=False)
    colors = dict(zip(TARGETS, ("#1b9e77", "#d95f02", "#7570b3", "#e7298a"), strict=True))
    styles = {"alone": ":", "self_spec": "--", "mrp_spec": "-"}
    for line in lines:
        target = line["decoding"]
        drafter = "alone"
        if "target" in line:
            target = line["target"]
            drafter = line["decoding"]
        axes = panels[int(line["do_sample"]), blocks.index(line["block_size"])]
        _, along = units_along(line)
        middles = [WINDOW * (window + 0.5) for window in range(len(along))]
        axes.plot(
            middles,
            along,
            color=colors[target],
            linestyle=styles[drafter],
            lw=1.2,
            label=f"{target}, {drafter}",
        )
        axes.set(
            title=f"blocks of {line['block_size']}, T = {line['do_sample']:d}",
            xlabel="tokens into the text",
        )
    for axes in panels[:, 0]:
        axes.set(ylabel="tokens per unit")
    handles = {}
    for axes in panels.flat:
        for curve, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles[label] = curve
    figure.legend(handles.values(), handles.keys(), fontsize=7, loc="outside right upper")
    return figure


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: write a figure's SVG file, without a date or matplotlib's version."""
    parser = parser_of("plots", __doc__)
    parser.add_argument(
        "figure", choices=("frontier", "batches", "long"), nargs="?", default="frontier"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="the folder to read, and to write to"
    )
    options = parser.parse_args(arguments)
    path = options.results / f"{options.figure}.svg"
    with matplotlib.rc_context(DETERMINISTIC):
        if options.figure == "long":
            figure = long_figure(read_lines(options.results / "long.jsonl", current=False))
        elif options.figure == "batches":
            figure = batches_figure(options.results)
        else:
            figure = frontier_figure(frontier_lines(options.results))
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    print(path)


if __name__ == "__main__":
    main()
