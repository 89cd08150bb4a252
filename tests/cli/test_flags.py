"""One declaration of an option, and its command line."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest
import typer
from mrp_trainer.flags import flag, shown_default, takes_flags
from typer.testing import CliRunner


@dataclass
class Options:
    source: str = flag("From where.", metavar="PATH")
    names: list[str] = flag("Of whom.", ["ann"])
    kinds: list[str] = flag("Of which kinds.", [], kind=list[Literal["big", "small"]], shown="both")
    count: int = flag("How many.", 3, min=1, name="--number")
    rate: float | None = flag("How fast.", None, shown="as it comes")
    packed: bool = flag("Together.", True, name="--packed/--not-packed")
    dry_run: bool = flag("Do nothing.", False)
    other: int = flag("Of one command.", 7, only="one")
    silent: int = 5


def given(*arguments: str, **how: Any) -> dict[str, Any]:
    """What a command of typer gets for a command line."""
    app, seen = typer.Typer(), []

    @app.command()
    @takes_flags(Options, **how)
    def command(**arguments: Any) -> None:
        seen.append(arguments)

    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return seen[0]


def test_a_command_gets_what_was_given() -> None:
    assert given() == {}
    line = "--source a --names b --names c --kinds small --number 2 --rate 0.5 --not-packed --dry-run"
    found = given(*line.split())
    expected = {"source": "a", "names": ["b", "c"], "kinds": ["small"], "count": 2, "rate": 0.5}
    assert found == {**expected, "packed": False, "dry_run": True}
    assert type(found["kinds"][0]) is str
    assert given("--other", "1", only="one") == {"other": 1}
    assert given("--source", "a", required=["source"]) == {"source": "a"}


@pytest.mark.parametrize("line", ["--other 1", "--kinds tiny", "--number 0", "--count 1", "--silent 1"])
def test_a_command_refuses_what_is_no_flag_and_no_choice(line: str) -> None:
    with pytest.raises(AssertionError, match="Error"):
        given(*line.split())


def test_defaults_in_words() -> None:
    shown = {name: shown_default(one) for name, one in Options.__dataclass_fields__.items() if name != "silent"}
    assert shown == {
        **{"source": None, "names": "ann", "kinds": "both", "count": "3", "rate": "as it comes", "packed": "packed"},
        **{"dry_run": None, "other": "7"},
    }
