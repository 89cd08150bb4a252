"""Costs: of each request in its response's metadata, of all on the metrics endpoint."""

from collections.abc import Sequence
from typing import Any, NamedTuple

RAW = "mrp_blocks"  # per token, as the engine carries it: the costs of the block that it begins, else None
SHOWN = "mrp"


class Usage(NamedTuple):
    """Costs so far.

    Attributes:
        forwards: Forwards of the backbone in which the request took part,
        head_forwards: and of the head.
        drafted, accepted: Drafted states that were scored, and of these the right ones; remembered ones count.
    """

    forwards: int = 0
    head_forwards: int = 0
    drafted: int = 0
    accepted: int = 0

    def minus(self, other: "Usage") -> "Usage":
        """The costs since then."""
        return Usage(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))

    def plus(self, other: "Usage") -> "Usage":
        """Both together."""
        return Usage(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


class Report:
    """Notes what requests cost: for their responses on the requests themselves, for the endpoint in counters."""

    def __init__(self) -> None:
        self.counters: dict[str, Any] = {}

    def begin(self, req: Any) -> None:
        """Begin to count a request, or begin anew where the engine has taken its rows away."""
        req.mrp_seen, req.mrp_open = Usage(), getattr(req, "mrp_open", Usage())

    def note(self, req: Any, usage: Usage) -> None:
        """Note what a request has come to since its state was made."""
        since = usage.minus(req.mrp_seen)
        req.mrp_seen, req.mrp_open = usage, req.mrp_open.plus(since)
        self._count(since._asdict())

    def count_tokens(self, requests: Sequence[Any], starts: list[int], grown: list[int]) -> None:
        """Lay the costs of blocks that are done to their tokens.

        Args:
            requests: The rows'.
            starts: Where each one's block starts.
            grown: By how many tokens, prompt included, each one's text has grown: a block or none.
        """
        for req, start, size in zip(requests, starts, grown, strict=True):
            new = start + size - max(start, len(req.origin_input_ids))
            if size and new > 0:
                info = req.customized_info = req.customized_info or {}
                info.setdefault(RAW, []).extend([tuple(req.mrp_open), *[None] * (new - 1)])
                req.mrp_open = Usage()
                self._count({"tokens": new})

    def _count(self, numbers: dict[str, int]) -> None:
        for name, number in numbers.items() if self.counters else ():
            self.counters[name].inc(number)

    def count_in(self, make: Any) -> None:
        """Count for the endpoint from now on; `make(name, documentation)` makes a counter."""
        told = {
            "forwards": "Forwards of the backbone, one for each request that took part",
            "head_forwards": "Forwards of the head, one for each request that took part",
            "drafted": "Drafted states that were scored",
            "accepted": "Drafted states that were accepted",
            "tokens": "Tokens of finished blocks, prompts not included",
        }
        self.counters = {name: make(f"sglang:mrp_{name}", text) for name, text in told.items()}


def shown_usage(blocks: Sequence[Sequence[int] | None], tokens: int) -> dict[str, float | int]:
    """Sum a response's blocks up: what its metadata show."""
    total = Usage()
    for each in blocks:
        total = total if each is None else total.plus(Usage(*each))
    shown: dict[str, float | int] = dict(total._asdict())
    shown["tokens_per_forward"] = tokens / max(1, total.forwards)
    shown["acceptance"] = total.accepted / max(1, total.drafted)
    return shown


__all__ = ["RAW", "SHOWN", "Report", "Usage", "shown_usage"]
