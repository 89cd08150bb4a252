"""Counters of a server in Prometheus' text format. They have the names that tools for vLLM and
SGLang read, and also this package's names."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from modeling_mrp.generate.request import RequestOutput

_COUNTED = ("forwards", "head_forwards", "drafted", "accepted", "revoked")


class Metrics:
    """Counters of a server: totals over all texts that have ended, and the number of answers.

    Attributes:
        answers: The number of answers by HTTP status.
        totals: Totals by name: `texts`, `prompt_tokens`, `tokens`, `rounds`, `forwards`,
            `head_forwards`, `drafted`, `accepted` and `revoked`.
        offered: For each depth k = 1, 2, ..., the number of rounds that accepted at least k - 1
            drafts and offered a k-th one.
        accepted: For each depth k, the number of these rounds that accepted the k-th draft.
    """

    def __init__(self) -> None:
        self.answers: Counter[int] = Counter()  # number of answers by HTTP status
        self.totals: Counter[str] = Counter()
        self.offered: Counter[int] = Counter()  # by depth, from 1 on
        self.accepted: Counter[int] = Counter()

    def count(self, output: RequestOutput) -> None:
        """Add the counts in the last result of a text to the totals."""
        counts = output.counts
        self.totals["texts"] += 1
        self.totals["prompt_tokens"] += len(output.prompt_ids)
        self.totals["tokens"] += len(output.generated_tokens)
        self.totals["rounds"] += sum(counts.lengths)
        for name in _COUNTED:
            self.totals[name] += getattr(counts, name)
        for depth, number in enumerate(counts.offered_at_depth, 1):
            self.offered[depth] += number
        for depth, number in enumerate(counts.accepted_at_depth, 1):
            self.accepted[depth] += number

    def page(self, manager: Any) -> str:
        """Return a page in Prometheus' text format with all counts, the number of texts that
        `manager`, a `ContinuousBatchingManager`, is decoding, and the number of texts that wait for
        it."""
        totals = self.totals
        lines: list[str] = []

        def add(kind: str, name: str, values: float | Mapping[str, float]) -> None:
            lines.append(f"# TYPE {name} {kind}")
            if not isinstance(values, Mapping):
                values = {"": values}
            for label, value in values.items():
                lines.append(f"{name}{label} {value}")

        statuses = {f'{{status="{key}"}}': count for key, count in sorted(self.answers.items())}
        offered = {f'{{depth="{depth}"}}': count for depth, count in self.offered.items()}
        accepted = {f'{{depth="{depth}"}}': count for depth, count in self.accepted.items()}
        positions = {f'{{position="{depth - 1}"}}': count for depth, count in self.accepted.items()}
        add("counter", "mrp_requests_total", statuses)
        for name in ("texts", "prompt_tokens", "tokens", "rounds", *_COUNTED):
            add("counter", f"mrp_{name}_total", totals[name])
        add("gauge", "mrp_tokens_per_forward", totals["tokens"] / max(1, totals["forwards"]))
        add("counter", "mrp_drafts_offered_total", offered)
        add("counter", "mrp_drafts_accepted_total", accepted)
        for name in (
            "mrp_requests_running",
            "vllm:num_requests_running",
            "sglang:num_running_reqs",
        ):
            add("gauge", name, manager.running)
        for name in ("mrp_requests_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs"):
            add("gauge", name, manager.waiting)
        for name in ("vllm", "sglang"):
            add("counter", f"{name}:prompt_tokens_total", totals["prompt_tokens"])
            add("counter", f"{name}:generation_tokens_total", totals["tokens"])
        add("counter", "vllm:spec_decode_num_drafts_total", totals["rounds"])
        add("counter", "vllm:spec_decode_num_draft_tokens_total", totals["drafted"])
        add("counter", "vllm:spec_decode_num_accepted_tokens_total", totals["accepted"])
        add("counter", "vllm:spec_decode_num_accepted_tokens_per_pos_total", positions)
        add("counter", "sglang:spec_verify_ct_total", totals["rounds"])
        add("gauge", "sglang:spec_accept_length", totals["tokens"] / max(1, totals["rounds"]))
        add("gauge", "sglang:spec_accept_rate", totals["accepted"] / max(1, totals["drafted"]))
        return "\n".join(lines) + "\n"
