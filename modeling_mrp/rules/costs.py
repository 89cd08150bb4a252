"""Costs of a round's forwards for each number of states.

They come from a table that `mrp doctor` measures (`round_costs` in the generation config), or they
are predicted (`predicted_costs`). Only their ratios matter.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# The numbers of states per row to choose from; each has its own CUDA graph.
WIDTHS = (1, 2, 3, 4, 6, 8)


# The form of a table of costs, for error messages.
TABLE = (
    "give a dict with increasing numbers of `states`, for each of them the cost of a `backbone` "
    "forward and, with a head, of a `head` pass, all above 0, and `host`, the cost of drafting a "
    "state; or leave it out"
)


@dataclass(frozen=True)
class RoundCosts:
    """Costs of forwards, in any unit, for each number of states in a forward (the rows of the batch
    times the states of each row).

    Attributes:
        states: Increasing numbers of states. The cost for a number between two of them is
            interpolated. After the last one, costs grow in proportion to the number.
        backbone: For each of `states`, the cost of a backbone forward with its picks.
        head: For each of `states`, the cost of a head pass with its picks. Empty for a model
            without a head.
        host: Cost of drafting one state on the host.
    """

    states: tuple[int, ...]
    backbone: tuple[float, ...]
    head: tuple[float, ...] = ()
    host: float = 0.0
    _rounds: dict[tuple[int, int, int], float] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> "RoundCosts":
        """Make costs from their JSON form, a dict of the attributes by name; raise `ValueError` for
        a malformed table."""
        unknown = {*table} - {"states", "backbone", "head", "host"}
        states, backbone = (tuple(table.get(name) or ()) for name in ("states", "backbone"))
        head = tuple(table.get("head") or ())
        numbers = [*states, *backbone, *head, table.get("host", 0.0)]
        valid = not unknown and states and len(states) == len(backbone)
        valid = valid and len(head) in (0, len(states))
        valid = valid and all(
            isinstance(number, int | float) and 0 <= number < float("inf") for number in numbers
        )
        if not valid or min(*states, *backbone, *head) <= 0 or sorted({*states}) != [*states]:
            raise ValueError(f"round_costs is {table!r}: {TABLE}")
        return cls(states, backbone, head, table.get("host", 0.0))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, which `from_dict` reads. It has no entry `head` if there are no
        head passes."""
        table = {"states": [*self.states], "backbone": [*self.backbone], "head": [*self.head]}
        return {name: costs for name, costs in table.items() if costs} | {"host": self.host}

    def of_round(self, rows: int, width: int, passes: int) -> float:
        """Return the cost of a round of `rows` rows in which each row has `width` states and the
        head runs `passes` times."""
        key = (rows, width, passes)
        if (cost := self._rounds.get(key)) is None:
            cost = interpolated(self.states, self.backbone, rows * width)
            cost += self.host * rows * width + self.of_head(rows, width, passes)
            self._rounds[key] = cost
        return cost

    def of_head(self, rows: int, width: int, passes: int) -> float:
        """Return the cost of all head passes of a round of `rows` rows in which each row submits
        `width` states and the head runs `passes` times; 0 without head passes."""
        if not passes:
            return 0.0
        sizes = draft_sizes(width, passes)
        return sum([interpolated(self.states, self.head, rows * size) for size in sizes])


def interpolated(points: Sequence[int], values: Sequence[float], point: int) -> float:
    """Interpolate at `point` between increasing `points`, each with its value in `values`.

    Before the first point the value is constant. After the last point it grows in proportion to the
    point.
    """
    index = bisect_left(points, point)
    if index == len(points):
        return values[-1] * point / points[-1]
    if index == 0 or points[index] == point:
        return values[index]
    share = (point - points[index - 1]) / (points[index] - points[index - 1])
    return values[index - 1] + share * (values[index] - values[index - 1])


def draft_sizes(width: int, passes: int) -> list[int]:
    """Return, for each head pass of a round, the number of states that the head reads in a row's
    draft.

    The numbers increase evenly up to `width` - 1: for a `width` of 5, they are [2, 4] with two
    passes and [4] with one. As each pass reads more states than the one before, there are at most
    `width` - 1 passes, even if `passes` is larger.

    Args:
        width: The number of states that a row submits.
        passes: The number of head passes in the round, at least 1.
    """
    passes = min(passes, width - 1)
    return [-(-count * (width - 1) // passes) for count in range(1, passes + 1)]
