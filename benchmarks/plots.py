"""Figures of the sweeps and of the cost model (``python -m benchmarks.plots``; needs matplotlib, the extra `bench`).

Reads `tiny_sweep.jsonl` and `cost_model.jsonl` from `benchmarks/results` and writes SVG files beside them: the same bytes for
the same numbers, with text as text.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .common import RESULTS, read_lines

Line = dict[str, Any]
COLORS = {"static": "#777777", "published": "#d95f02", "self_spec": "#1b9e77", "mrp_spec": "#7570b3"}
STYLES = ("-", "--", ":", "-.")
DETERMINISTIC: Any = {
    "svg.hashsalt": "mrp",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "axes.grid": True,
    "grid.alpha": 0.3,
}
AXES = {
    "states": ("states", "states a round, K"),
    "batch": ("batch_size", "batch size"),
    "prompt": ("prompt_tokens", "prompt tokens"),
}


def sweep_figure(lines: Sequence[Line], axis: str) -> Figure:
    """Tokens per forward along one axis, a panel a family, with 95 % intervals; `static` has no K and is a level line there."""
    lines = [line for line in lines if line["axis"] == axis]
    if axis == "states":
        lines = [line for line in lines if line["batch_size"] == min(other["batch_size"] for other in lines)]
    families = list(dict.fromkeys(line["family"] for line in lines))
    key, label = AXES[axis]
    figure = Figure(figsize=(4.2 * len(families), 3.4), layout="constrained")
    for place, family in enumerate(families):
        axes = figure.add_subplot(1, len(families), place + 1)
        for mode in COLORS:
            points = [line for line in lines if (line["family"], line["mode"]) == (family, mode)]
            if points and key in points[0]:
                _curve(axes, points, key, mode)
            elif points:
                axes.axhline(points[0]["tokens_per_forward"], color=COLORS[mode], label=mode)
        _decorate(axes, family, label, "tokens per backbone forward", sorted({line[key] for line in lines if key in line}))
        axes.set_ylim(bottom=0)
    return figure


def _curve(axes: Axes, points: list[Line], key: str, mode: str) -> None:
    points = sorted(points, key=lambda line: line[key])
    x = [line[key] for line in points]
    axes.plot(x, [line["tokens_per_forward"] for line in points], "o-", ms=3, color=COLORS[mode], label=mode)
    low, high = zip(*(line["tokens_per_forward_95"] for line in points), strict=True)
    axes.fill_between(x, low, high, color=COLORS[mode], alpha=0.15, lw=0)


def cost_figure(lines: Sequence[Line], device: str, shape: str) -> Figure:
    """Predicted speed over `static` against the batch size, a line a mode and K."""
    points = [line for line in lines if line["kind"] == "point" and (line["device"], line["shape"]) == (device, shape)]
    batches = sorted({line["batch"] for line in points})
    drafted = [k for k in sorted({line["states"] for line in points}) if k > 1]
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(1, color=COLORS["static"], label="static")
    for mode in ("self_spec", "mrp_spec"):
        for style, k in zip(STYLES, drafted, strict=False):
            at = {line["batch"]: line["speedup"] for line in points if (line["mode"], line["states"]) == (mode, k)}
            if at:
                x = sorted(at)
                axes.plot(x, [at[b] for b in x], style, marker="o", ms=3, color=COLORS[mode], label=f"{mode} K={k}")
    _decorate(axes, f"{shape} on {device}, predicted", "batch size", "speed over static", batches)
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
    """Command line: writes `sweep_{states,batch,prompt}.svg` and `cost_DEVICE_SHAPE.svg` for the results that are there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder to read, and to write to")
    parser.add_argument("--device", default="H200")
    parser.add_argument("--shape", default="4B")
    options = parser.parse_args(arguments)
    with matplotlib.rc_context(DETERMINISTIC):
        figures: dict[str, Figure] = {}
        if (path := options.results / "tiny_sweep.jsonl").exists():
            lines = read_lines(path)
            for axis in dict.fromkeys(line["axis"] for line in lines):
                figures[f"sweep_{axis}.svg"] = sweep_figure(lines, axis)
        if (path := options.results / "cost_model.jsonl").exists():
            name = f"cost_{options.device}_{options.shape}.svg".lower()
            figures[name] = cost_figure(read_lines(path), options.device, options.shape)
        for name, figure in figures.items():
            save(figure, options.results / name)
            print(options.results / name)


if __name__ == "__main__":
    main()
