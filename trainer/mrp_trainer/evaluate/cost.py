"""The cost of decoding: tokens per *unit*.

A unit is the predicted time of a backbone forward that scores one state of each row, for a model of
a published size on a device at a batch size: a `Deployment`, such as 4B on an H200 at batch 1.
Forwards are charged for the states that they score, and head passes for the states and the tokens
that they read. The prediction has weights, products, launches, and the host's time for each drafted
state (`modeling_mrp.networks.predicted`). Tokens per unit are relative: at the same deployment,
twice as many take half the time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from modeling_mrp.networks.predicted import Rates, costs_at
from modeling_mrp.rules.costs import WIDTHS, RoundCosts, draft_sizes, interpolated

from .roofline import BYTES, DEVICES, PUBLISHED


@dataclass(frozen=True)
class Deployment:
    """Where decoding is charged.

    Attributes:
        shape: A published model size: "1.7B", "4B" or "8B".
        device: The name of a device (`roofline.DEVICES`).
        batch: The number of rows in a forward.
    """

    shape: str = "4B"
    device: str = "H200"
    batch: int = 1

    def __str__(self) -> str:
        return f"{self.shape} on one {self.device} at batch {self.batch}"


CHARGED = Deployment()


@cache
def costs_of(
    shape: str, device: str, block_size: int, shortlist: int = 0, head_layers: int | None = None
) -> RoundCosts:
    """Predict the costs of forwards of a published size on a device, in seconds, in bfloat16.

    Args:
        shape: The published size.
        device: The name of the device.
        block_size: The number of tokens in a state.
        shortlist: Number of tokens among which a head pass chooses at each position; 0 for all.
        head_layers: The number of the head's layers; None for the published heads' three.
    """
    named = DEVICES[device]
    rates = Rates.of_gpu(named.bandwidth, named.peak * named.achievable)
    published = PUBLISHED[shape]
    sizes = vars(published) | {
        "block_size": block_size,
        "num_nextn_predict_layers": published.head_layers if head_layers is None else head_layers,
    }
    return costs_at(SimpleNamespace(**sizes), rates, BYTES, shortlist)


def charged_as(hidden_size: int | None) -> str:
    """Return the published model size, such as "4B", as which a model is charged: the size with
    this `hidden_size`, or "4B" if there is none."""
    sizes = {shape.hidden_size: name for name, shape in PUBLISHED.items()}
    return sizes.get(hidden_size or 0, CHARGED.shape)


def pass_units(line: Mapping[str, Any], deployment: Deployment = CHARGED) -> float:
    """Compute the cost of a head pass in units, for the mode of a result line (see
    `units_per_forward`)."""
    costs = _costs(line, deployment)
    sizes = draft_sizes(max(2, _most_states(line)), line.get("draft_passes") or 1)
    seconds = [interpolated(costs.states, costs.head, deployment.batch * size) for size in sizes]
    return sum(seconds) / len(seconds) / costs.of_round(deployment.batch, 1, 0)


def units_per_forward(line: Mapping[str, Any], deployment: Deployment = CHARGED) -> float | None:
    """Compute what a backbone forward costs together with the head passes that belong to it, where
    1 is the cost of a forward that scores one state of each row.

    `line` is a result line, a JSON object that `mrp evaluate` writes for a mode on a problem set.
    With K = its `num_draft_states`, forwards are charged the most that its `states_per_forward` can
    cost on average, which is if every forward scores either one state or K. They are charged K
    states in a batch of several rows, which all compute as many states as the row with the most;
    and in lines of earlier versions, which do not know their states. Return None if the line has
    no `head_per_token`.
    """
    passes = line.get("head_per_token")
    if passes is None:
        return None
    most = max(2, _most_states(line))
    drafts = _most_states(line) > 1
    states = line.get("states_per_forward", most if drafts else 1)
    if deployment.batch > 1 and drafts:
        states = most
    costs = _costs(line, deployment)
    alone = costs.of_round(deployment.batch, 1, 0)
    widest = costs.of_round(deployment.batch, most, 0)
    units = 1 + (states - 1) / (most - 1) * (widest / alone - 1)
    if passes:
        units += passes * line["tokens_per_forward"] * pass_units(line, deployment)
    return float(units)


def _most_states(line: Mapping[str, Any]) -> int:
    """Return the largest number of states of a row in a forward: K, or 1 without drafts."""
    states = line.get("num_draft_states", 1)
    return WIDTHS[-1] if states == "auto" else int(states)


def _costs(line: Mapping[str, Any], deployment: Deployment) -> RoundCosts:
    block_size = line.get("block_size", PUBLISHED[deployment.shape].block_size)
    return costs_of(
        deployment.shape, deployment.device, block_size, line.get("draft_shortlist") or 0
    )


def charged(line: Mapping[str, Any], deployment: Deployment = CHARGED) -> dict[str, Any]:
    """Return a copy of a result line with its tokens per unit. A result line is a JSON object that
    `mrp evaluate` writes for a mode on a problem set.

    Returns:
        The copy, with these fields added:
        `tokens_per_unit`: the line's `tokens_per_forward`, divided by the number of units that
            `units_per_forward` computes. None if head passes were not counted.
        `tokens_per_unit_95`: the line's interval `tokens_per_forward_95`, divided by the same
            number, as the cost of a forward hardly varies. Left out if the line has no such
            interval, or if head passes were not counted.
    """
    units = units_per_forward(line, deployment)
    speed = line["tokens_per_forward"]
    interval = line.get("tokens_per_forward_95")
    added: dict[str, Any] = {"tokens_per_unit": None if units is None else speed / units}
    if units is not None and interval is not None:
        added["tokens_per_unit_95"] = [end / units for end in interval]
    return {**line, **added}


def break_even(
    drafted: Mapping[str, Any], baseline: Mapping[str, Any], deployment: Deployment = CHARGED
) -> float:
    """Compute the largest cost of a head pass, in units, at which the mode of the result line
    `drafted` is no slower than that of `baseline`, which has no head passes. The cost is below 0 if
    `drafted` is slower even with free head passes. A result line is a JSON object that `mrp
    evaluate` writes for a mode on a problem set."""
    per_token = []
    for line in (drafted, baseline):
        units = units_per_forward({**line, "head_per_token": 0}, deployment)
        assert units is not None
        per_token.append(units / line["tokens_per_forward"])
    return float((per_token[1] - per_token[0]) / drafted["head_per_token"])
