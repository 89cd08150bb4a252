"""Costs and traces of requests. Those of each request go into the metadata of its response; costs
summed over all requests go to the metrics endpoint."""

from collections.abc import Sequence
from typing import Any

from modeling_mrp.rules.state import Row

from .requests import Progress

META_KEY = "mrp"
_COUNTED = {
    "forwards": "Forwards of the backbone, one for each request that took part",
    "head_forwards": "Forwards of the head, one for each request that took part",
    "drafted": "Drafted states that were scored",
    "accepted": "Drafted states that were accepted",
}
_ROUNDS = "Rounds, one for each request that took part: the engine's spec_verify_ct"


class Report:
    """The counters that the server's metrics endpoint shows, summed over all requests: forwards of
    the backbone and of the head, drafted and accepted states, rounds, and tokens.

    `count_in` creates the counters. Before that, `count` does nothing.
    """

    def __init__(self) -> None:
        self.counters: dict[str, Any] = {}

    def count_in(self, make: Any) -> None:
        """Create the counters, so that `count` counts from now on. `make(name, documentation)`
        makes one, as prometheus_client's `Counter` does."""
        documentation = {
            **_COUNTED,
            "rounds": _ROUNDS,
            "tokens": "Tokens of finished blocks, prompts not included",
        }
        self.counters = {
            name: make(f"sglang:mrp_{name}", text) for name, text in documentation.items()
        }

    def count(self, **numbers: int) -> None:
        """Add each number to the counter with its name: `forwards`, `head_forwards`, `drafted`,
        `accepted`, `rounds` or `tokens`. Do nothing if there are no counters yet."""
        if not self.counters:
            return
        for name, number in numbers.items():
            self.counters[name].inc(number)


def totals(rows: Sequence[Row]) -> dict[str, int]:
    """Sum counts over rows. Return the sums by name: `forwards`, `head_forwards`, `drafted`,
    `accepted` and `rounds`. A round of several rows counts once for each row."""
    sums = dict.fromkeys((*_COUNTED, "rounds"), 0)
    for row in rows:
        sums["rounds"] += sum(row.counts.lengths)
        for name in _COUNTED:
            sums[name] += getattr(row.counts, name)
    return sums


def report_of(req: Any) -> dict[str, Any] | None:
    """Collect the costs and traces of a request (the engine's `Req`), for the metadata of its
    response.

    Returns:
        None if the request has not been decoded yet. Otherwise, a dict with these keys:

        - `forwards`, `head_forwards`, `drafted`, `accepted` and `revoked` (reveals masked again):
          counts.
        - `tokens_per_forward`: generated tokens per backbone forward. `acceptance`: the share of
          the drafted states that were accepted.
        - `spec_verify_ct` (rounds), `spec_accept_length` (generated tokens per round),
          `spec_accept_rate`, `spec_accept_token_num` and `spec_draft_token_num` (the same as
          `acceptance`, `accepted` and `drafted`): under the engine's own names for speculative
          decoding.
        - `offered_at_depth`: for each depth k = 1, 2, ..., the number of rounds that accepted at
          least k - 1 drafts and offered a k-th one. `accepted_at_depth`: the number of these rounds
          that accepted the k-th draft.
        - If the request asks for them, `reveal_step`, the step that revealed each token, and
          `provisional_ids`, the block that is being decoded; that list is empty once the request
          has ended.
    """
    progress: Progress | None = getattr(req, "mrp", None)
    if progress is None:
        return None
    counts = progress.counts
    text = req.output_ids_through_stop
    report: dict[str, Any] = {name: getattr(counts, name) for name in _COUNTED}
    report["revoked"] = counts.revoked
    report["tokens_per_forward"] = len(text) / max(1, counts.forwards)
    report["acceptance"] = counts.accepted / max(1, counts.drafted)
    # also under the engine's own names for speculative decoding
    rounds = sum(counts.lengths)
    report["spec_verify_ct"] = rounds
    report["spec_accept_length"] = len(text) / max(1, rounds)
    report["spec_accept_rate"] = report["acceptance"]
    report["spec_accept_token_num"] = counts.accepted
    report["spec_draft_token_num"] = counts.drafted
    report["offered_at_depth"] = list(counts.offered_at_depth)
    report["accepted_at_depth"] = list(counts.accepted_at_depth)
    if progress.options.reveal_step:
        report["reveal_step"] = progress.step[: len(text)]
    if progress.options.provisional:
        report["provisional_ids"] = [] if req.finished() else progress.block
    return report
