"""What `mrp evaluate` prints: a table that grows with every measurement, or JSON lines."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from .results import mode_name

_COLUMNS = ("asked", "mode", "right %", "tokens / forward", "accepted length", "head / token", "= static %", "seconds")


class Printer(Protocol):
    """Where measurements and answers go."""

    def line(self, line: Mapping[str, Any]) -> None:
        """Show a measurement, with the fields of a line of results."""
        ...

    def text(self, text: str) -> None:
        """Show a text, as it is."""
        ...


class JsonPrinter:
    """Prints measurements as JSON lines."""

    def line(self, line: Mapping[str, Any]) -> None:
        """Print a JSON object."""
        print(json.dumps(line), flush=True)

    def text(self, text: str) -> None:
        """Print a text."""
        print(text)


class TablePrinter:
    """Adds a row for every measurement to a table.

    Args:
        live: Shows the table, again after each on a terminal, and else when all are there.
        table: It.
    """

    def __init__(self, live: Live, table: Table) -> None:
        self.live, self.table = live, table

    def line(self, line: Mapping[str, Any]) -> None:
        """Add a row."""
        self.table.add_row(*row_of(line))
        self.live.refresh()

    def text(self, text: str) -> None:
        """Print above the table."""
        self.live.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def printing(as_json: bool) -> Iterator[Printer]:
    """Have measurements printed, as JSON lines or as a table of the terminal's width, 140 columns where there is none."""
    if as_json:
        yield JsonPrinter()
        return
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 140)
    table = Table(*_COLUMNS, caption="in brackets: 95 % intervals", caption_justify="left")
    for column in table.columns[2:]:
        column.justify = "right"
    with Live(table, console=console, auto_refresh=False) as live:
        yield TablePrinter(live, table)


def row_of(line: Mapping[str, Any]) -> list[str]:
    """A measurement as cells; "-" for what it does not have."""
    asked = line["family"] if "family" in line else Path(line["file"]).name
    return [
        asked,
        mode_name(line),
        _value(line, "accuracy", 1),
        _value(line, "tokens_per_forward", 2),
        _value(line, "mean_accepted_length", 2),
        _value(line, "head_per_token", 2),
        _value(line, "identical_to_static", 1),
        _value(line, "seconds", 1),
    ]


def _value(line: Mapping[str, Any], name: str, digits: int) -> str:
    value, interval = line.get(name), line.get(f"{name}_95")
    if value is None:
        return "-"
    return f"{value:.{digits}f}" + ("" if interval is None else f" ({interval[0]:.{digits}f}-{interval[1]:.{digits}f})")


__all__ = ["Printer", "printing", "row_of"]
