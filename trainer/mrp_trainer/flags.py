"""Command-line flags that are declared once: as fields of a dataclass, which carry range and help beside type and default.

`takes_flags` gives them to a command of typer, `argument_parser` to an `argparse` one. Nothing here imports torch, so that help
comes at once.
"""

import argparse
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import StrEnum
from functools import partial, wraps
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer


@dataclass(frozen=True)
class Flag:
    """A field's flag.

    Attributes:
        help: Its help.
        panel: The heading that it is under.
        shown: The default in words, where its value says little.
        name: The flag, where it is not the field's name; "--x/--no-x" for a switch that can be off.
        kind: Its type, where the field's says less, such as a literal of its choices.
        more: For `typer.Option`: `metavar`, `min`, `max`.
        positional: Whether it is given without a flag, of a command of typer.
    """

    help: str
    panel: str | None
    shown: str | None
    name: str | None
    kind: Any
    more: dict[str, Any]
    positional: bool = False


def flag(
    help: str,
    default: Any = MISSING,
    *,
    panel: str | None = None,
    shown: str | None = None,
    name: str | None = None,
    kind: Any = None,
    only: str | None = None,
    positional: bool = False,
    **more: Any,
) -> Any:
    """Declare a field of a dataclass that is a flag, too; the arguments are those of `Flag`.

    Args:
        help: See `Flag`.
        default: The field's, a list's contents; a field without one has to be given.
        panel: See `Flag`.
        shown: See `Flag`.
        name: See `Flag`.
        kind: See `Flag`.
        only: The one command that has it, for `takes_flags`; None for all.
        positional: See `Flag`.
        more: See `Flag`.
    """
    metadata = {"flag": Flag(help, panel, shown, name, kind, more, positional), "only": only}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def flagged(options: type, only: str | None = None) -> list[tuple[Field[Any], Flag, Any]]:
    """The fields of a dataclass that a command has flags for, each with its flag and that one's type (None left out)."""
    hints = get_type_hints(options)
    of_command = [one for one in fields(options) if "flag" in one.metadata and one.metadata["only"] in (None, only)]
    return [(one, one.metadata["flag"], one.metadata["flag"].kind or _without_none(hints[one.name])) for one in of_command]


def shown_default(one: Field[Any]) -> str | None:
    """What help shows as an option's default; None for nothing."""
    of_field: Flag = one.metadata["flag"]
    default = one.default if one.default_factory is MISSING else one.default_factory()
    if of_field.shown is not None or default in (None, MISSING, []):
        return of_field.shown
    if isinstance(default, bool):
        return of_field.name.split("/")[not default].strip("-") if of_field.name else None
    if isinstance(default, list):
        return ", ".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


def too_small(options: Any) -> Iterator[tuple[str, Any, Any]]:
    """The name, value and least value of each field that is below its flag's `min`."""
    for one, of_field, _ in flagged(type(options)):
        value, least = getattr(options, one.name), of_field.more.get("min")
        if value is not None and least is not None and value < least:
            yield one.name, value, least


def takes_flags(
    *groups: type, only: str | None = None, required: Sequence[str] = (), defaults: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function that takes keyword arguments a command of typer with the flags of dataclasses.

    It gets an argument for each that was given; lists and their choices are plain.

    Args:
        groups: The dataclasses.
        only: Also the fields that only this command has.
        required: Fields that have to be given, whatever their default.
        defaults: What was not given has the field's default, unless that is a list.
    """
    parameters = []
    for group in groups:
        for one, of_field, kind in flagged(group, only):
            several = get_origin(kind) is list
            default = one.default if defaults and not several and one.default is not MISSING else None
            names = [of_field.name] if of_field.name else [f"--{one.name.replace('_', '-')}"] if kind is bool else []
            option = (typer.Argument if of_field.positional else partial(typer.Option, *names))(
                rich_help_panel=of_field.panel,
                help=f"{of_field.help} Repeatable." if several else of_field.help,
                show_default=True if default is not None else shown_default(one) or False,
                **of_field.more,
            )
            must = one.name in required
            parameters.append(
                inspect.Parameter(
                    one.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if must else default,
                    annotation=Annotated[for_typer(kind) if must else for_typer(kind) | None, option],
                )
            )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(**given: Any) -> Any:
            plain = {name: _plain(value) for name, value in given.items()}
            return function(**{name: value for name, value in plain.items() if value not in (None, [])})

        described: Any = command
        described.__signature__ = inspect.Signature(parameters)
        described.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def argument_parser(options: type, prog: str, description: str | None) -> argparse.ArgumentParser:
    """An `argparse` parser with the flags of a dataclass and its defaults; what a list holds follows one flag."""
    parser = argparse.ArgumentParser(prog=prog, description=description, formatter_class=argparse.RawTextHelpFormatter)
    for one, of_field, kind in flagged(options):
        name, shown = of_field.name or f"--{one.name.replace('_', '-')}", shown_default(one)
        if kind is bool:
            parser.add_argument(name, action="store_true", help=of_field.help)
            continue
        several = get_origin(kind) is list
        single = get_args(kind)[0] if several else kind
        parser.add_argument(
            name,
            nargs="+" if several else None,
            type=single if single in (int, float, Path) else str,
            choices=get_args(single) or None,
            metavar=of_field.more.get("metavar"),
            default=one.default_factory() if one.default_factory is not MISSING else one.default,
            help=of_field.help if shown is None else f"{of_field.help} [default: {shown}]",
        )
    return parser


def _without_none(hint: Any) -> Any:
    return next(one for one in get_args(hint) if one is not type(None)) if get_origin(hint) is UnionType else hint


def for_typer(kind: Any) -> Any:
    """A type as typer takes it, which knows lists of enums and not of literals."""
    inner = get_args(kind)
    if get_origin(kind) is list and get_origin(inner[0]) is Literal:
        return list[StrEnum("Choice", {value: value for value in get_args(inner[0])})]  # type: ignore[misc]
    return kind


def _plain(value: Any) -> Any:
    return [getattr(one, "value", one) for one in value] if isinstance(value, list | tuple) else value


__all__ = ["Flag", "argument_parser", "flag", "flagged", "for_typer", "shown_default", "takes_flags", "too_small"]
