"""How the commands end when something does not fit."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def told() -> Iterator[None]:
    """Ends the command with what is wrong, without a traceback, for errors that name a value and the remedy."""
    try:
        yield
    except (ValueError, ImportError, OSError, FloatingPointError) as error:
        typer.secho(f"Error: {error}", fg="red", err=True)
        raise typer.Exit(1) from error
