"""What `mrp evaluate` prints: a table that grows with every measurement, or JSON lines."""

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

_COLUMNS = (
    *("asked", "mode", "right %", "tokens / unit", "tokens / forward", "accepted length", "head / token"),
    *("= first %", "seconds"),
)
_CAPTION = "in brackets: 95 % intervals; a unit is a forward of the backbone, passes of the head charged as at {}"


@contextmanager
def printing(as_json: bool) -> Iterator[tuple[Callable[[Mapping[str, Any]], None], Callable[[str], None]]]:
    """Lend functions that print a measurement, as a JSON line or as a row of a table, and a text above it.

    The table has the terminal's width, 160 columns where there is none, and grows on a terminal with every row.
    """
    if as_json:
        yield lambda line: print(json.dumps(line), flush=True), print
        return
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)
    table = Table(*_COLUMNS, caption=_CAPTION.format(CHARGED), caption_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    with Live(table, console=console, auto_refresh=False) as live:

        def add(line: Mapping[str, Any]) -> None:
            table.add_row(*row_of(line))
            table.caption = _CAPTION.format(line.get("charged_as", CHARGED))
            live.refresh()

        yield add, partial(live.console.print, markup=False, highlight=False, soft_wrap=True)


def row_of(line: Mapping[str, Any]) -> list[str]:
    """A measurement as cells; "-" for what it does not have."""
    line = charged(line, line.get("charged_as", CHARGED))
    asked = line["family"] if "family" in line else Path(line["file"]).name
    return [
        asked,
        mode_name(line),
        _value(line, "accuracy", 1),
        _value(line, "tokens_per_unit", 2),
        f"{line['tokens_per_forward']:.2f}",
        _value(line, "mean_accepted_length", 2),
        _value(line, "head_per_token", 2),
        _value(line, "identical_to_first", 1),
        _value(line, "seconds", 1),
    ]


def _value(line: Mapping[str, Any], name: str, digits: int) -> str:
    value, interval = line.get(name), line.get(f"{name}_95")
    if value is None:
        return "-"
    return f"{value:.{digits}f}" + ("" if interval is None else f" ({interval[0]:.{digits}f}-{interval[1]:.{digits}f})")


__all__ = ["printing", "row_of"]
