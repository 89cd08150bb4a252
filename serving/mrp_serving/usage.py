"""Costs and traces: of each request in its response's metadata, of all requests on the metrics
endpoint."""

from collections.abc import Sequence
from typing import Any

from modeling_mrp.rules.state import Row

from .requests import Progress

SHOWN = "mrp"
_COUNTED = {
    "forwards": "Forwards of the backbone, one for each request that took part",
    "head_forwards": "Forwards of the head, one for each request that took part",
    "drafted": "Drafted states that were scored",
    "accepted": "Drafted states that were accepted",
}


class Report:
    """Counters of the metrics endpoint; counts nothing before `count_in`."""

    def __init__(self) -> None:
        self.counters: dict[str, Any] = {}

    def count_in(self, make: Any) -> None:
        """Create the counters, each by `make(name, documentation)`, and count from now on."""
        told = {**_COUNTED, "tokens": "Tokens of finished blocks, prompts not included"}
        self.counters = {name: make(f"sglang:mrp_{name}", text) for name, text in told.items()}

    def count(self, **numbers: int) -> None:
        """Add each number to the counter of its name."""
        for name, number in numbers.items() if self.counters else ():
            self.counters[name].inc(number)


def totals(rows: Sequence[Row]) -> dict[str, int]:
    """Sum each count over rows; return the sums by name."""
    return {name: sum(getattr(row.counts, name) for row in rows) for name in _COUNTED}


def shown_of(req: Any) -> dict[str, Any] | None:
    """Return the costs and traces for a request's metadata; None if the request has not been
    decoded yet."""
    progress: Progress | None = getattr(req, "mrp", None)
    if progress is None:
        return None
    counts, text = progress.counts, req.output_ids_through_stop
    shown: dict[str, Any] = {name: getattr(counts, name) for name in _COUNTED}
    shown["revoked"] = counts.revoked
    shown["tokens_per_forward"] = len(text) / max(1, counts.forwards)
    shown["acceptance"] = counts.accepted / max(1, counts.drafted)
    shown["offered_at_depth"], shown["accepted_at_depth"] = (
        list(counts.offered_at_depth),
        list(counts.accepted_at_depth),
    )
    if progress.asked.reveal_step:
        shown["reveal_step"] = progress.step[: len(text)]
    if progress.asked.provisional:
        shown["provisional_ids"] = [] if req.finished() else progress.block
    return shown
