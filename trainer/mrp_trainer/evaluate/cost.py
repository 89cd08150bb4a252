"""What decoding costs: tokens per *unit*, a unit being one backbone forward, with the head's passes charged.

A head pass is charged the share that it reads of what a backbone forward reads, picks included, at a published shape: 27, 18
and 16 % at 1.7B, 4B and 8B. A forward costs the same whatever its number of states, which holds at small batches on a GPU.
"""

from collections.abc import Mapping
from typing import Any

CHARGED = "4B"
# As `Shape.head_share` of `benchmarks/roofline.py` counts them.
HEAD_SHARES = {"1.7B": 0.273494760, "4B": 0.175231703, "8B": 0.163143550}
_BY_HIDDEN_SIZE = {2048: "1.7B", 2560: "4B", 4096: "8B"}


def charged_as(hidden_size: int | None) -> str:
    """Choose the published shape whose head cost is used for a model: the one of its `hidden_size`, else that of 4B."""
    return _BY_HIDDEN_SIZE.get(hidden_size or 0, CHARGED)


def charged(line: Mapping[str, Any], shape: str = CHARGED) -> dict[str, Any]:
    """Add `tokens_per_unit` to a measurement, a unit being a backbone forward with its head passes charged.

    It is None where the line does not say how often the head ran. The interval of the tokens a forward is divided by the same
    units: the head's passes a forward hardly vary.
    """
    passes, speed, interval = line.get("head_per_token"), line["tokens_per_forward"], line.get("tokens_per_forward_95")
    if passes is None:
        return {**line, "tokens_per_unit": None}
    units = 1 + HEAD_SHARES[shape] * passes * speed
    added: dict[str, Any] = {"tokens_per_unit": speed / units}
    if interval is not None:
        added["tokens_per_unit_95"] = [end / units for end in interval]
    return {**line, **added}


__all__ = ["CHARGED", "HEAD_SHARES", "charged", "charged_as"]
