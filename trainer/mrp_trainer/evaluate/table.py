"""Output of `mrp evaluate`: a table that grows with every measurement, or JSON lines."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from .cost import CHARGED, charged
from .results import mode_name

# Heading, field and digits of the columns after problem set and mode.
_COLUMNS = (
    ("right %", "accuracy", 1),
    ("tokens / unit", "tokens_per_unit", 2),
    ("tokens / forward", "tokens_per_forward", 2),
    ("accepted length", "mean_accepted_length", 2),
    ("head / token", "head_per_token", 2),
    ("= first %", "identical_to_first", 1),
    ("seconds", "seconds", 1),
)
_CAPTION = "in brackets: 95 % intervals; a unit is a forward of the backbone, passes of the head charged as at {}"


@contextmanager
def printing(as_json: bool) -> Iterator[tuple[Callable[[Mapping[str, Any]], None], Callable[[str], None]]]:
    """Yield two functions: one prints a measurement as a JSON line or as a row of a table, the other a text above the table.

    The table is as wide as the terminal, or 160 columns without one; on a terminal it grows with every row.
    """
    if as_json:
        yield lambda line: print(json.dumps(line), flush=True), print
        return
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)
    table = Table("asked", "mode", caption=_CAPTION.format(CHARGED), caption_justify="left")
    for heading, *_ in _COLUMNS:
        table.add_column(heading, justify="right")
    with Live(table, console=console, auto_refresh=False) as live:

        def add(line: Mapping[str, Any]) -> None:
            table.add_row(*row_of(line))
            table.caption = _CAPTION.format(line.get("charged_as", CHARGED))
            live.refresh()

        yield add, partial(live.console.print, markup=False, highlight=False, soft_wrap=True)


def row_of(line: Mapping[str, Any]) -> list[str]:
    """Format a measurement as cells; "-" for missing values."""
    line = charged(line, line.get("charged_as", CHARGED))
    asked = line["family"] if "family" in line else Path(line["file"]).name
    return [asked, mode_name(line), *(_value(line, name, digits) for _, name, digits in _COLUMNS)]


def _value(line: Mapping[str, Any], name: str, digits: int) -> str:
    value, interval = line.get(name), line.get(f"{name}_95")
    if value is None:
        return "-"
    if interval is None or name == "tokens_per_forward":
        return f"{value:.{digits}f}"
    return f"{value:.{digits}f} ({interval[0]:.{digits}f}-{interval[1]:.{digits}f})"
