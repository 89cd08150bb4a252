"""The command line `mrp`, run in this process."""

from collections.abc import Iterator
from typing import Any

import typer
from mrp_trainer import cli
from typer.testing import CliRunner

# The console's width decides where lines break.
RUNNER = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})


def mrp(*arguments: str, fails: bool = False) -> str:
    """Run a command; return its standard output, or its standard error if it has to fail."""
    result = RUNNER.invoke(cli.app, list(arguments))
    if fails:
        # anything else would be a traceback
        assert isinstance(result.exception, SystemExit), repr(result.exception)
        assert result.exit_code in (1, 2), result.output
        return result.stderr
    assert result.exit_code == 0, result.output
    return result.stdout


def command(*path: str) -> Any:
    """Return the parser of a command, as of `command("train", "head")`."""
    found: Any = typer.main.get_command(cli.app)
    for name in path:
        found = found.commands[name]
    return found


def leaves(parser: Any = None, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the parser of each command that is no group."""
    parser = parser or command()
    inner = getattr(parser, "commands", {})
    if not inner:
        yield path, parser
    for name, of_name in inner.items():
        yield from leaves(of_name, *path, name)
