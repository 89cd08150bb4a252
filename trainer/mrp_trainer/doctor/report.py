"""What was found out, and how it is told."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: Of what was checked.
        ok: Whether it is as it should be; None where it could not be checked.
        difference: The largest difference from what is right.
        note: Details, or the reason.
    """

    name: str
    ok: bool | None
    difference: float | None = None
    note: str = ""

    @classmethod
    def raised(cls, name: str, error: BaseException) -> "Check":
        """Tell of a check that raised: the kind of the error and its first line."""
        first = next(iter(str(error).strip().splitlines()), "")
        return cls(name, False, None, f"{type(error).__name__}: {first}")

    @property
    def verdict(self) -> str:
        """In words."""
        return "left out" if self.ok is None else "ok" if self.ok else "**failed**"
