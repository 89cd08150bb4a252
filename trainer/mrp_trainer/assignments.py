"""What `--set NAME=VALUE` assigns to options of `generate`."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml


def assigned(assignments: Sequence[str], flags: Mapping[str, str], fixed: Mapping[str, str]) -> dict[str, Any]:
    """Read assignments, the values as YAML writes them.

    Args:
        assignments: "NAME=VALUE" each.
        flags: The flag of each option that has one.
        fixed: Who decides on an option that cannot be given.

    Raises:
        ValueError: for an assignment without a name or value, a name that is given twice, or one of `flags` or `fixed`.
    """
    found: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = (part.strip() for part in assignment.partition("="))
        if not (name and equals and text):
            raise ValueError(f"--set {assignment}: write it as NAME=VALUE")
        if name in found:
            raise ValueError(f"--set {assignment}: {name} is given twice, leave one out")
        if name in flags:
            raise ValueError(f"--set {assignment}: use --{flags[name]}")
        if name in fixed:
            raise ValueError(f"--set {assignment}: {fixed[name]} decides on {name}, leave it out")
        found[name] = _value(text, assignment)
    return found


def _value(text: str, assignment: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {assignment}: the value is not YAML: {error}") from error
    if isinstance(value, str):  # YAML 1.1 reads 1e-3, which has no point, as a text
        try:
            return float(value)
        except ValueError:
            return value
    return value


__all__ = ["assigned"]
