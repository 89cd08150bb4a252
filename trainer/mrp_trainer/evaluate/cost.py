"""The cost of decoding: tokens per *unit*. A unit is the cost of one backbone forward, and a head
pass costs a share of it.

This share is the number of parameters that a head pass reads, divided by the number that a backbone
forward reads; both include rows of `lm_head`. It is computed for a published model size: 27, 18 and
16 % at 1.7B, 4B and 8B, and 9, 8 and 8 % if the head picks among a shortlist of 16 tokens per
position. A forward is taken to cost the same for any number of states, as it does at small batches
on a GPU.
"""

from collections.abc import Mapping
from typing import Any

from modeling_mrp.rules.costs import WIDTHS

from .roofline import PUBLISHED, masks_per_state

CHARGED = "4B"
HEAD_SHARES = {name: shape.head_share() for name, shape in PUBLISHED.items()}


def charged_as(hidden_size: int | None) -> str:
    """Return the published model size, such as "4B", whose cost of a head pass is assumed for a
    model: the size with this `hidden_size`, or "4B" if there is none."""
    return next(
        (name for name, shape in PUBLISHED.items() if shape.hidden_size == hidden_size), CHARGED
    )


def head_share(line: Mapping[str, Any], shape: str = CHARGED) -> float:
    """Compute the cost of a head pass as a share of a backbone forward: the ratio of the numbers of
    parameters that they read, in a model of the published size `shape` ("1.7B", "4B" or "8B").

    `line` is a result line, a JSON object that `mrp evaluate` writes for a mode on a problem set.
    The picks of a head pass read all rows of `lm_head`. If the line has a `draft_shortlist`, they
    read only the rows in the shortlists of K - 1 states, where K is its `num_draft_states`; the
    largest K, 8, if that is "auto".
    """
    if not (listed := line.get("draft_shortlist")):
        return HEAD_SHARES[shape]
    states = line["num_draft_states"]
    if states == "auto":
        states = WIDTHS[-1]
    published = PUBLISHED[shape]
    return published.head_share(int((states - 1) * masks_per_state(published.block_size) * listed))


def units_per_forward(line: Mapping[str, Any], shape: str = CHARGED) -> float | None:
    """Compute what a backbone forward costs together with the head passes that belong to it, where
    1 is the cost of the forward alone. Each head pass costs the share that `head_share` computes
    for the published model size `shape` ("1.7B", "4B" or "8B").

    `line` is a result line, a JSON object that `mrp evaluate` writes for a mode on a problem set.
    Its `head_per_token` and `tokens_per_forward` give the number of head passes per forward. Return
    None if it has no `head_per_token`.
    """
    passes = line.get("head_per_token")
    if passes is None:
        return None
    return float(1 + head_share(line, shape) * passes * line["tokens_per_forward"])


def charged(line: Mapping[str, Any], shape: str = CHARGED) -> dict[str, Any]:
    """Return a copy of a result line with its tokens per unit. A result line is a JSON object that
    `mrp evaluate` writes for a mode on a problem set. A unit is the cost of one backbone forward; a
    head pass costs a share of it, that of the published model size `shape` ("1.7B", "4B" or "8B").

    Returns:
        The copy, with these fields added:
        `tokens_per_unit`: the line's `tokens_per_forward`, divided by the number of units that
            `units_per_forward` computes. None if head passes were not counted.
        `tokens_per_unit_95`: the line's interval `tokens_per_forward_95`, divided by the same
            number, as the number of head passes per forward hardly varies. Left out if the line has
            no such interval, or if head passes were not counted.
    """
    units = units_per_forward(line, shape)
    speed = line["tokens_per_forward"]
    interval = line.get("tokens_per_forward_95")
    added: dict[str, Any] = {"tokens_per_unit": None if units is None else speed / units}
    if units is not None and interval is not None:
        added["tokens_per_unit_95"] = [end / units for end in interval]
    return {**line, **added}


def break_even(drafted: Mapping[str, Any], baseline: Mapping[str, Any]) -> float:
    """Compute the largest cost of a head pass, as a share of a backbone forward, at which the mode
    of the result line `drafted` is no slower than that of `baseline`, which has no head passes. The
    cost is below 0 if `drafted` is slower even with free head passes. A result line is a JSON
    object that `mrp evaluate` writes for a mode on a problem set."""
    saved = 1 / baseline["tokens_per_forward"] - 1 / drafted["tokens_per_forward"]
    return float(saved / drafted["head_per_token"])
