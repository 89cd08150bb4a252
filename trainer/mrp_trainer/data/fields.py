"""Errors of records, and checks of the values in their fields."""

from collections.abc import Mapping, Sequence
from typing import Any


class FieldError(ValueError):
    """An error in a record.

    Args:
        field_name: The field at fault, such as "messages[0].content"; None for the record as a
            whole.
        message: What is wrong.
    """

    def __init__(self, field_name: str | None, message: str) -> None:
        super().__init__(message)
        self.field_name = field_name


class RecordError(ValueError):
    """An error that lists malformed records, one per line.

    Args:
        problems: For each malformed record, a text that names its file, line and field, and what is
            wrong. A file or table that cannot be read is listed in the same way.
        incomplete: Whether there may be further malformed records that are not listed.
    """

    def __init__(self, problems: Sequence[str], incomplete: bool = False) -> None:
        lines = list(problems)
        if len(problems) != 1:
            lines.insert(
                0,
                f"{'the first ' * incomplete}{len(problems)} malformed "
                f"records{' (there may be more)' * incomplete}:",
            )
        super().__init__("\n  ".join(lines))


def string(name: str, value: Any) -> str:
    """Return `value` if it is a string that UTF-8 can encode; `FieldError` for the field `name` if
    not."""
    if not isinstance(value, str):
        raise FieldError(name, f"found {format_value(value)}: a string is needed")
    check_utf8(value, name)
    return value


def are_mappings(value: Any) -> bool:
    """Return whether a value is a list of mappings."""
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def check_utf8(text: str, name: str | None = None) -> None:
    """Raise `FieldError`, for the field `name`, if UTF-8 cannot encode a text: tokenizers cannot
    read it. `name` is None for a text that is not in a field."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = (
            f"{'found ' * (name is not None)}half a surrogate pair, {text[error.start]!a}, at "
            f"character {error.start}"
        )
        raise FieldError(name, f"{problem}: text that UTF-8 can hold is needed") from error


def format_value(value: Any) -> str:
    """Return the `repr` of a value for an error message, cut to 40 characters; "nothing" for
    None."""
    if value is None:
        return "nothing"
    text = repr(value)
    if len(text) > 40:
        text = f"{text[:37]}..."
    return text
