"""Options of `generate`: the class `Option`, and the kinds of values that options take.

A reveal rule declares its options in its class (`RevealRule.options`); `DecodingOptions` declares
all others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Values:
    """The values that an option may take: their type and their range.

    Attributes:
        kind: The type of the values, as `isinstance` takes it. A bool does not count as a number.
            If `kind` is `object`, only `holds` decides.
        holds: A function of a value of that type and the model's block size. It returns whether the
            value is in range.
        remedy: The end of the error message for any other value. The message has the model's block
            size in place of `{block_size}`.
    """

    kind: Any
    holds: Callable[[Any, int], bool]
    remedy: str


COUNT = Values(int, lambda value, _: value >= 1, "it must be an int of 1 or more")
STEPS = Values(
    int, lambda value, size: 1 <= value <= size, "it must be an int from 1 to {block_size}"
)
NATS = Values(
    int | float, lambda value, _: value >= 0, "it must be a number of nats, a float of 0 or more"
)
POSITIVE = Values(int | float, lambda value, _: value > 0, "it must be a positive number, a float")
PROBABILITY = Values(
    int | float, lambda value, _: 0 <= value <= 1, "it must be a probability, a float from 0 to 1"
)


@dataclass(frozen=True)
class Option:
    """An option of `generate`.

    Attributes:
        name: The name of the keyword argument.
        default: The value of the option if neither the call nor a config sets it.
        values: The values that the option may take.
        help: The meaning of the option, a line of Markdown.
        modes: The values of `decoding` under which the option has an effect. In a mode that drafts,
            values of `target` count, too. For an option that rules declare, these are the modes of
            those rules.
    """

    name: str
    default: Any
    values: Values
    help: str = ""
    modes: tuple[str, ...] = ()

    @property
    def remedy(self) -> str:
        """The advice in the error message for an invalid value (`Values.remedy`)."""
        return self.values.remedy

    def check(self, value: Any, block_size: int | None, acts: bool = True) -> None:
        """Raise `ValueError` for a value of a wrong type or out of range.

        The range is checked only if the option has an effect (`acts`). If `block_size` is None, it
        does not limit the range. None and the default always pass.
        """
        values = self.values
        if value is None or value is self.default:
            return
        fits = isinstance(value, values.kind) and (
            values.kind in (bool, object) or not isinstance(value, bool)
        )
        if not fits or (acts and not values.holds(value, block_size or 1 << 63)):
            kind = "" if fits else f", of type {type(value).__name__}"
            remedy = self.remedy.replace(
                "{block_size}", f"block_size ({block_size})" if block_size else "block_size"
            )
            raise ValueError(f"{self.name} is {value!r}{kind}: {remedy}")
