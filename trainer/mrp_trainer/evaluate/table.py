"""Output of `mrp evaluate`: a table that grows with every measurement, or JSON lines."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .cost import CHARGED, Deployment, charged
from .results import mode_name

WIDTH = 80
# Heading, field and digits of the columns after the mode.
_COLUMNS = (
    ("right %", "accuracy", 1),
    ("tokens/\nunit", "tokens_per_unit", 2),
    ("tokens/\nforward", "tokens_per_forward", 2),
    ("accepted\nlength", "mean_accepted_length", 2),
    ("head/\ntoken", "head_per_token", 2),
    ("= first %", "identical_to_first", 1),
    ("seconds", "seconds", 1),
)
_CAPTION = (
    "below a value: its 95 % interval; a unit: the predicted time of a forward\n"
    "of one state, for {}"
)


@contextmanager
def printing(
    as_json: bool,
) -> Iterator[tuple[Callable[[Mapping[str, Any]], None], Callable[[str], None]]]:
    """A context manager that yields two functions. The first prints a measurement (a dict of the
    fields of a result line), as a JSON line if `as_json`, and otherwise as a row of a table. The
    second prints a text, above the table if there is one.

    The table fits a terminal of 80 columns, where it grows with every row. Each problem set has a
    heading.
    """
    if as_json:
        yield lambda line: print(json.dumps(line), flush=True), print
        return
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    layout: dict[str, Any] = {
        "box": SIMPLE_HEAD,
        "padding": 0,
        "pad_edge": False,
        "show_edge": False,
    }
    table = Table("mode", caption=_CAPTION.format(CHARGED), caption_justify="left", **layout)
    for heading, *_ in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    headings: list[str] = []
    with Live(table, console=console, auto_refresh=False) as live:

        def add(line: Mapping[str, Any]) -> None:
            if (problem_set := _problem_set_name(line)) not in headings[-1:]:
                headings.append(problem_set)
                table.add_row(Text(problem_set, style="bold"))
            table.add_row(*map(Text, row_of(line)))
            table.caption = _CAPTION.format(_deployment(line))
            live.refresh()

        yield add, partial(live.console.print, markup=False, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.line()


def _problem_set_name(line: Mapping[str, Any]) -> str:
    """Name the problem set of a measurement."""
    return str(line["family"]) if "family" in line else Path(line["file"]).name


def row_of(line: Mapping[str, Any]) -> list[str]:
    """Format a measurement, a result line of `mrp evaluate`, as the cells of a table row: the name
    of the mode, accuracy, tokens per unit and per forward, accepted length, head forwards per
    token, texts equal to those of the first mode, and seconds. A missing value is "-".

    A unit is the predicted time of a forward that scores one state, for a model of the published
    size in the line's field `charged_as`. A value whose interval is in the line has
    this interval in a second line of the cell, except for tokens per forward.
    """
    line = charged(line, _deployment(line))
    return [mode_name(line), *(_value(line, name, digits) for _, name, digits in _COLUMNS)]


def _deployment(line: Mapping[str, Any]) -> Deployment:
    """Return where a measurement is charged."""
    return Deployment(line.get("charged_as", CHARGED.shape))


def _value(line: Mapping[str, Any], name: str, digits: int) -> str:
    value, interval = line.get(name), line.get(f"{name}_95")
    if value is None:
        return "-"
    if interval is None or name == "tokens_per_forward":
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f}\n{interval[0]:.{digits}f}-{interval[1]:.{digits}f}"
