"""The costs of a round's forwards by their number of states: a table that `mrp doctor` measures
(`round_costs` of the generation config), or a predicted one (`predicted_costs`). Only ratios
matter."""

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
    """Costs, in any unit, of a forward by its number of states (rows of the batch times states of a
    row).

    Attributes:
        states: Increasing numbers of states. Costs are interpolated between two of them, and grow
            in proportion after the last one.
        backbone: Cost of a backbone forward with picks, for each of `states`.
        head: Cost of a head pass with picks; empty for a model without a head.
        host: Cost of drafting a state on the host.
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
        """Make costs from their JSON form; raise `ValueError` for a malformed table."""
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
        """Return the JSON form, without the cost of head passes if there are none."""
        table = {"states": [*self.states], "backbone": [*self.backbone], "head": [*self.head]}
        return {name: costs for name, costs in table.items() if costs} | {"host": self.host}

    def of_round(self, rows: int, width: int, passes: int) -> float:
        """Return the cost of a round in which each of `rows` rows has `width` states, and the head
        runs `passes` times."""
        key = (rows, width, passes)
        if (cost := self._rounds.get(key)) is None:
            cost = interpolated(self.states, self.backbone, rows * width)
            cost += self.host * rows * width + self.of_head(rows, width, passes)
            self._rounds[key] = cost
        return cost

    def of_head(self, rows: int, width: int, passes: int) -> float:
        """Return the cost of the head passes of a round."""
        if not passes:
            return 0.0
        sizes = draft_sizes(width, passes)
        return sum([interpolated(self.states, self.head, rows * size) for size in sizes])


def interpolated(points: Sequence[int], values: Sequence[float], point: int) -> float:
    """Interpolate values between points. Before the first point the value is constant, and after
    the last one it grows in proportion."""
    index = bisect_left(points, point)
    if index == len(points):
        return values[-1] * point / points[-1]
    if index == 0 or points[index] == point:
        return values[index]
    share = (point - points[index - 1]) / (points[index] - points[index - 1])
    return values[index - 1] + share * (values[index] - values[index - 1])


def draft_sizes(width: int, passes: int) -> list[int]:
    """List the number of states in the draft at each head pass of a round, rising evenly to `width`
    - 1."""
    passes = min(passes, width - 1)
    return [-(-count * (width - 1) // passes) for count in range(1, passes + 1)]
