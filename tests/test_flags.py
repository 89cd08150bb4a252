"""One declaration of an option, two kinds of command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import typer
from mrp_trainer.flags import argument_parser, flag, shown_default, takes_flags, too_small
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
    line = ["--source", "a", "--names", "b", "--names", "c", "--kinds", "small", "--number", "2", "--rate", "0.5"]
    line += ["--not-packed", "--dry-run"]
    expected = {
        "source": "a",
        "names": ["b", "c"],
        "kinds": ["small"],
        "count": 2,
        "rate": 0.5,
        "packed": False,
        "dry_run": True,
    }
    found = given(*line)
    assert found == expected
    assert type(found["kinds"][0]) is str
    assert given("--other", "1", only="one") == {"other": 1}
    assert given("--source", "a", defaults=True, required=["source"]) == {
        "source": "a",
        "count": 3,
        "packed": True,
        "dry_run": False,
    }


@pytest.mark.parametrize("line", ["--other 1", "--kinds tiny", "--number 0", "--count 1", "--silent 1"])
def test_a_command_refuses_what_is_no_flag_and_no_choice(line: str) -> None:
    with pytest.raises(AssertionError, match="Error"):
        given(*line.split())


def test_a_required_flag() -> None:
    with pytest.raises(AssertionError, match="--source"):
        given(required=["source"])


@dataclass
class Plain:
    where: Path = flag("Folder.", Path("runs"))
    names: list[str] = flag("Of whom.", ["ann", "bob"], metavar="NAME")
    kind: str = flag("Of which kind.", "big", kind=Literal["big", "small"])
    rate: float = flag("How fast.", 0.5)
    chat: bool = flag("As a chat.", False)


def test_an_argparse_line() -> None:
    parser = argument_parser(Plain, "prog", None)
    assert Plain(**vars(parser.parse_args([]))) == Plain(Path("runs"), ["ann", "bob"], "big", 0.5, False)
    line = ["--where", "out", "--names", "a", "b", "--kind", "small", "--rate", "2", "--chat"]
    assert Plain(**vars(parser.parse_args(line))) == Plain(Path("out"), ["a", "b"], "small", 2.0, True)
    shown = " ".join(parser.format_help().split())
    for text in ("[default: runs]", "NAME [NAME ...] Of whom. [default: ann, bob]", "{big,small}", "[default: 0.5]"):
        assert text in shown
    assert "As a chat. [default" not in shown
    with pytest.raises(SystemExit):
        parser.parse_args(["--kind", "tiny"])


def test_defaults_in_words() -> None:
    shown = {name: shown_default(one) for name, one in Options.__dataclass_fields__.items() if name != "silent"}
    assert shown == {
        **{"source": None, "names": "ann", "kinds": "both", "count": "3", "rate": "as it comes", "packed": "packed"},
        **{"dry_run": None, "other": "7"},
    }


def test_what_is_below_its_minimum() -> None:
    assert list(too_small(Options("a", count=0))) == [("count", 0, 1)]
    assert list(too_small(Options("a", count=1))) == []
