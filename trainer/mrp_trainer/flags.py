"""Command-line flags declared as dataclass fields. The declaration of a field also holds the flag's
help and its range of values.

Nothing here imports torch, so that help appears at once.
"""

import difflib
import errno
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, field, fields
from enum import StrEnum
from functools import partial, wraps
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
import yaml
from typer.core import TyperGroup


class _Yaml(yaml.SafeLoader):
    """A YAML loader that reads floats and booleans as in YAML 1.2: 1e-3 is a number, and `no` is a
    string, which is a possible value of `save_strategy`."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in known if not tag.endswith(":bool")]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)
_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(true|false)$", re.IGNORECASE), list("tTfF")
)


_INTERRUPTED = 130  # the exit status of a program that Ctrl-C ended
# The placeholder for a flag's value in help, by type.
_METAVARS = {int: "N", float: "X", str: "TEXT"}


class Help(str):
    """The help text of a dataclass field, with other declarations of the field, such as its flag,
    its range and its choices, attached to it.

    They are not entries of the field's metadata, because tools that read dataclasses, such as
    `HfArgumentParser`, pass all metadata on to argparse, which knows only some names.

    Attributes:
        declared: Maps the name of each other declaration to its value.
    """

    declared: Mapping[str, Any]

    def __new__(cls, text: str, **declared: Any) -> "Help":
        """Make a help text with the given declarations, each passed as a keyword argument. `text`
        is the help text."""
        made = super().__new__(cls, text)
        made.declared = MappingProxyType(declared)
        return made


def declared_of(option: Field[Any]) -> Mapping[str, Any]:
    """Return the declarations that are attached to a field's help (see `Help`), by name; empty if
    it has none."""
    return getattr(option.metadata.get("help"), "declared", {})


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
    """Declare a field of a dataclass that is also a command-line flag.

    Args:
        help: The help text of the flag.
        default: The default value of the field; without it, the field is required. Each instance
            gets its own copy of a list.
        panel: The heading under which help lists the flag.
        shown: What help shows as the default, where the value itself would explain little.
        name: The name of the flag, if it differs from the field's: "--x/--no-x" for a switch that
            can be turned off, "--x --y" for two names.
        kind: The type of the flag, if narrower than the field's, such as a `Literal` of its
            choices.
        only: The only command that has the flag, as passed to `takes_flags`; None if all commands
            have it.
        positional: Whether it is a positional argument.
        more: Further arguments of `typer.Option`: `metavar`, `min`, `max`.
    """
    declared = {
        "help": help,
        "panel": panel,
        "shown": shown,
        "name": name,
        "kind": kind,
        "positional": positional,
    }
    metadata = {"help": Help(help, flag={**declared, "more": more}, only=only)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def takes_flags(
    *groups: type, only: str | None = None, required: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that turns a function of keyword arguments into a typer command.

    The function gets a keyword argument for each flag that was given on the command line; choices
    are plain strings.

    Args:
        groups: Dataclasses whose fields are the command's flags.
        only: The name of this command in `flag(only=...)`. Fields that only another command has are
            left out.
        required: Names of fields that must be given, even if they have a default.
    """
    parameters = []
    for group in groups:
        hints = get_type_hints(group)
        for option in fields(group):
            declared = declared_of(option)
            if "flag" in declared and declared["only"] in (None, only):
                parameters.append(_parameter(option, hints[option.name], option.name in required))

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def command(**flags: Any) -> Any:
            with reported_errors():
                return function(**_plain_values(flags))

        described: Any = command
        described.__signature__ = inspect.Signature(parameters)
        described.__annotations__ = {option.name: option.annotation for option in parameters}
        return command

    return decorate


def _plain_values(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the flags that were given, by name, with choices converted to plain
    strings."""
    plain = {}
    for name, value in flags.items():
        if isinstance(value, list | tuple):
            value = [getattr(choice, "value", choice) for choice in value]
        if value not in (None, []):
            plain[name] = value
    return plain


def _parameter(option: Field[Any], hint: Any, required: bool) -> inspect.Parameter:
    """Make the parameter of a typer command for a dataclass field whose type is `hint`. Unless it
    is `required`, its default is None."""
    declared = declared_of(option)["flag"]
    if get_origin(hint) is UnionType:
        hint = next(member for member in get_args(hint) if member is not type(None))
    kind = declared["kind"] or hint
    repeatable = get_origin(kind) is list
    plain = get_args(kind)[0] if repeatable else kind
    choices = get_args(plain)
    description = declared["help"]
    if choices:
        description = f"{description.rstrip('.')}: {', '.join(choices)}."
    if repeatable:
        description = f"{description} Repeatable."
    metavar = option.name.upper() if choices else _METAVARS.get(plain)
    names = []
    if declared["name"]:
        names = declared["name"].split()
    elif kind is bool:
        names = [f"--{option.name.replace('_', '-')}"]
    declare = typer.Argument if declared["positional"] else partial(typer.Option, *names)
    declaration = declare(
        rich_help_panel=declared["panel"],
        help=description,
        show_default=shown_default(option) or False,
        **({"metavar": metavar} | declared["more"]),
    )
    default: Any = inspect.Parameter.empty
    kind = for_typer(kind)
    if not required:
        default = None
        kind = kind | None
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, declaration],
    )


def shown_default(option: Field[Any]) -> str | None:
    """Return the text that help shows as the default of an option; None if it shows none."""
    declared = declared_of(option)["flag"]
    default = option.default if option.default_factory is MISSING else option.default_factory()
    if declared["shown"] is not None or default in (None, MISSING, []):
        return declared["shown"]
    if isinstance(default, bool):
        names = (declared["name"] or "").split("/")
        return names[not default].strip("-") if len(names) == 2 else None
    values = default if isinstance(default, list) else [default]
    return ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def for_typer(kind: Any) -> Any:
    """Convert a list of literals to a list of enums, as typer does not accept the former; return
    any other type unchanged."""
    inner = get_args(kind)
    if get_origin(kind) is list and get_origin(inner[0]) is Literal:
        return list[  # type: ignore[misc]
            StrEnum("Choice", {value: value for value in get_args(inner[0])})
        ]
    return kind


class Commands(TyperGroup):
    """A group of commands that suggests similar flags when a flag is unknown."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; for an unknown flag, extend the error message with suggestions."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            unknown: Any = error
            # the option does not exist
            if hasattr(error, "option_name") and hasattr(error, "possibilities"):
                similar = suggest_flags(unknown.option_name, unknown.ctx.command.params)
                hint = f" Did you mean {' or '.join(similar)}?" if similar else ""
                unknown.message = f"{unknown.message.rstrip('.')}.{hint}"
                unknown.possibilities = None
            raise


def suggest_flags(unknown: str, parameters: Sequence[Any]) -> list[str]:
    """Return flags that may be meant by an unknown one: flags whose field has the unknown name,
    flags whose words begin with the letters of the unknown name (`--max-new-tokens` for `--mnt`),
    flags that begin with the unknown name, and flags with a similar spelling. If there are none,
    return `--set` with an assignment to the unknown name, provided that the command has this flag.
    `parameters` are the parameters of the click command."""
    words = unknown.lstrip("-").replace("_", "-")
    flags = {}
    for parameter in parameters:
        for name in parameter.opts:
            if name.startswith("--"):
                flags[name] = parameter
    names = [name for name, parameter in flags.items() if parameter.name.replace("_", "-") == words]
    names += [name for name in flags if "".join(word[:1] for word in name[2:].split("-")) == words]
    names += [name for name in flags if name.startswith(f"--{words}")]
    names += difflib.get_close_matches(f"--{words}", list(flags), n=2, cutoff=0.75)
    if not names and "--set" in flags:
        return [f"--set {words.replace('-', '_')}=VALUE"]
    return list(dict.fromkeys(names))


@contextmanager
def reported_errors() -> Iterator[None]:
    """A context manager that reports errors in its block without a traceback. A `ValueError`,
    `ImportError`, `OSError`, `FloatingPointError` or network error is printed in red, with exit
    code 1. A `KeyboardInterrupt` that has a message is reported by this message, with exit code
    130."""
    try:
        yield
    except (ValueError, ImportError, OSError, FloatingPointError) as error:
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = ""
        if is_full and "free some space" not in str(error):
            remedy = ": free some space, and repeat the command. What was there before is as it was"
        lines = [f"Error: {error}{remedy}", *getattr(error, "__notes__", ())]
        typer.secho("\n".join(lines), fg="red", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        if not error.args:
            raise
        typer.secho(str(error), err=True)
        raise typer.Exit(_INTERRUPTED) from error
    except Exception as error:
        if not _is_network_error(error):
            raise
        typer.secho(
            f"Error: the Hub cannot be reached: check the network ({error})", fg="red", err=True
        )
        raise typer.Exit(1) from error


def _is_network_error(error: Exception) -> bool:
    """Return whether an error comes from the HTTP library of huggingface_hub. Such errors are not
    subclasses of `OSError`."""
    from huggingface_hub.errors import HfHubHTTPError

    return isinstance(error, HfHubHTTPError.__bases__)


def parse_assignments(
    assignments: Sequence[str],
    flags: Mapping[str, str] = MappingProxyType({}),
    fixed: Collection[str] = (),
) -> dict[str, Any]:
    """Parse the assignments NAME=VALUE of `--set`, in which each VALUE is YAML; return a dict from
    names to values.

    Args:
        assignments: Texts of the form NAME=VALUE.
        flags: Maps names that have a flag of their own to the name of this flag.
        fixed: Names that the command sets itself.

    Raises:
        ValueError: for an assignment without a name or value, a name that is given twice or is one
            of `flags` or `fixed`, or a value that is not YAML.
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = map(str.strip, assignment.partition("="))
        if not (name and equals and text):
            raise ValueError(f"--set {assignment}: write it as NAME=VALUE")
        if name in values:
            raise ValueError(f"--set {assignment}: {name} is given twice, leave one out")
        if name in flags:
            raise ValueError(f"--set {assignment}: use --{flags[name]}")
        if name in fixed:
            raise ValueError(f"--set {assignment}: this command decides on {name}, leave it out")
        values[name] = parse_yaml(text, f"--set {assignment}")
    return values


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML; raise a `ValueError` that begins with `source` if the text is malformed."""
    try:
        return yaml.load(text, _Yaml)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{source} is not YAML that is read here: {error}") from error
