"""Pictures of training runs: loss, gap closed and tokens per forward over training steps, from the
log that a run keeps."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .svg import Picture, picture_of

_STATE = "trainer_state.json"
# Panels by title, each with its curves: keys of the log, and their labels.
_PANELS: dict[str, dict[str, str]] = {
    "loss": {"loss": "training", "eval_loss": "held-out"},
    "gap closed": {"gap_closed": "training", "eval_gap_closed": "held-out"},
    "tokens per forward": {
        "eval_tokens_per_forward": "with the head",
        "eval_stale_tokens_per_forward": "without a head",
    },
}
_WIDTH, _HEIGHT = 400.0, 200.0  # size of a panel's plot


@dataclass(frozen=True)
class Curve:
    """A curve of a panel: its name; its points (x, y) in SVG units from the upper left corner of
    the plot; and its last value."""

    name: str
    points: Sequence[tuple[float, float]]
    last: float


@dataclass(frozen=True)
class Panel:
    """A plot of curves over training steps. Its height reaches from the lowest value (`low`) to the
    highest (`high`)."""

    title: str
    curves: Sequence[Curve]
    low: float
    high: float


def draw_run(folder: Path | str) -> Picture:
    """Draw the training log in `folder`: its own log, or that of its newest checkpoint.
    `ValueError` if there is no log, or it has no numbers to draw."""
    folder = Path(folder)
    states = [folder / _STATE]
    states += sorted(folder.glob(f"checkpoint-*/{_STATE}"), key=_step_of, reverse=True)
    path = next((state for state in states if state.is_file()), None)
    if path is None:
        raise ValueError(f"{folder} holds no log of a training run ({_STATE}): name its folder")
    try:
        history = json.loads(path.read_bytes())["log_history"]
        steps = max((line["step"] for line in history if "loss" in line), default=0)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no log of a training run: {error!r}") from error
    panels = []
    for title, names in _PANELS.items():
        if (panel := _panel(title, names, history, steps)) is not None:
            panels.append(panel)
    if not panels:
        raise ValueError(f"{path} has no losses to draw: set logging_steps for the run")
    parts = []
    for panel in panels:
        for curve in panel.curves:
            parts.append(f"{panel.title}, {curve.name}: {curve.last:.3g}")
    title = f"{folder.name}, {steps} steps: {'; '.join(parts)}"
    return picture_of(
        "run.svg.jinja", title, panels=panels, steps=steps, width=_WIDTH, height=_HEIGHT
    )


def _step_of(path: Path) -> int:
    step = path.parent.name.rpartition("-")[2]
    return int(step) if step.isdigit() else -1


def _panel(
    title: str, names: Mapping[str, str], history: Sequence[Mapping[str, Any]], steps: int
) -> Panel | None:
    """Lay out the curves of a panel, with heights from the lowest to the highest value. `names`
    maps keys of the log to the curves' names. Return None if the log has no values for these
    keys."""
    series: dict[str, list[tuple[int, float]]] = {}
    for line in history:
        for key, name in names.items():
            if key in line:
                series.setdefault(name, []).append((line["step"], line[key]))
    values = [value for points in series.values() for _, value in points]
    if not values:
        return None
    low = min(values)
    high = max(values)
    curves = []
    for name, points in series.items():
        placed = []
        for step, value in points:
            share = (value - low) / (high - low) if high > low else 0.5
            placed.append((_WIDTH * step / max(1, steps), _HEIGHT * (1 - share)))
        curves.append(Curve(name, placed, points[-1][1]))
    return Panel(title, curves, low, high)
