"""The command `mrp` in this process."""

from collections.abc import Sequence
from typing import Any

import typer
from mrp_trainer import cli
from typer.testing import CliRunner

# The console's width decides where lines break.
RUNNER = CliRunner(env={"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"})


def main(arguments: Sequence[str]) -> None:
    """Run `mrp`; a flag may stand before several values, which are given one by one. `SystemExit` where it fails."""
    words: list[str] = []
    flag = None
    for word in arguments:
        if flag is not None and not word.startswith("--") and words[-1] != flag:
            words.append(flag)
        flag = word if word.startswith("--") else flag
        words.append(word)
    try:
        cli.app(words)
    except SystemExit as done:
        if done.code:
            raise


def mrp(*arguments: str, fails: bool = False) -> str:
    """What a command prints; of one that fails, on standard error."""
    result = RUNNER.invoke(cli.app, list(arguments))
    if fails:
        assert result.exit_code == 1, result.output
        assert "Traceback" not in result.output
        return result.stderr
    assert result.exit_code == 0, result.output
    return result.stdout


def command(*path: str) -> Any:
    """A command's parser by its names."""
    found: Any = typer.main.get_command(cli.app)
    for name in path:
        found = found.commands[name]
    return found
