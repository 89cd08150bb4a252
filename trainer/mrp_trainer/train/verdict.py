"""The verdict on a trained head: held-out prompts are decoded without the head and with it, and the
speeds are compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..evaluate.cost import Deployment, charged_as, units_per_forward
from ..evaluate.decoded import decode_prompts

TARGETS = ("static", "dynamic")
STATES = 8
_SHORTLIST = 16  # the default shortlist of a vocabulary of a published size


@dataclass(frozen=True)
class Comparison:
    """The speed of decoding the same prompts under one target, with drafts made without the head
    (`self_spec`) and with it (`mrp_spec`). Speed is measured in tokens per forward of the backbone,
    which does not count passes of the head, and in tokens per unit of cost, which does (see
    `evaluate.cost`).

    Attributes:
        target: The target of decoding, `static` or `dynamic`.
        without, drafted: Tokens per forward, without the head and with it.
        without_per_unit, per_unit: Tokens per unit of cost, without the head and with it.
    """

    target: str
    without: float
    drafted: float
    without_per_unit: float
    per_unit: float

    @property
    def gain(self) -> float:
        """Return how many times faster decoding is with the head than without it: the tokens per
        unit of cost with the head, divided by those without it."""
        return self.per_unit / self.without_per_unit

    def as_log(self) -> dict[str, float]:
        """Return the speeds under the names that they have in a run's log. Under the target
        `static`, these are `verdict_static_stale_tokens_per_forward` for `without`,
        `verdict_static_tokens_per_forward` for `drafted`, `verdict_static_stale_tokens_per_unit`
        for `without_per_unit` and `verdict_static_tokens_per_unit` for `per_unit`."""
        return {
            f"verdict_{self.target}_stale_tokens_per_forward": self.without,
            f"verdict_{self.target}_tokens_per_forward": self.drafted,
            f"verdict_{self.target}_stale_tokens_per_unit": self.without_per_unit,
            f"verdict_{self.target}_tokens_per_unit": self.per_unit,
        }


def compare(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> list[Comparison]:
    """Decode prompts (lists of ids) greedily, with drafts made without the model's head and with
    it, under the targets `static` and `dynamic`, with up to 8 states per row and forward. Return a
    comparison for each target. `ValueError` if there is no prompt or no head."""
    options: dict[str, Any] = {"do_sample": False, "num_draft_states": STATES}
    deployment = Deployment(charged_as(model.config.hidden_size))
    comparisons = []
    for target in TARGETS:
        options["target"] = target
        stale = decode_prompts(
            model, tokenizer, prompts, None, max_new_tokens, decoding="self_spec", **options
        )
        options_of_head = {"decoding": "mrp_spec", "draft_shortlist": _SHORTLIST, **options}
        drafted = decode_prompts(model, tokenizer, prompts, None, max_new_tokens, **options_of_head)
        per_unit = []
        for decoded in (stale, drafted):
            line = {
                **decoded.costs(),
                "draft_shortlist": _SHORTLIST,
                "num_draft_states": STATES,
                "block_size": model.config.block_size,
            }
            units = units_per_forward(line, deployment)
            assert units is not None
            per_unit.append(decoded.tokens_per_forward / units)
        speeds = stale.tokens_per_forward, drafted.tokens_per_forward
        comparisons.append(Comparison(target, *speeds, *per_unit))
    return comparisons


def verdict(comparisons: Sequence[Comparison], prompts: int, deployment: Deployment) -> str:
    """Describe in a table and a sentence whether a head is worth publishing. It is if, under at
    least one target, decoding is faster with the head than without it, in tokens per unit of cost.

    Args:
        comparisons: The speeds with and without the head, under each target.
        prompts: The number of decoded prompts.
        deployment: Where decoding was charged.
    """
    lines = [
        f"{prompts} held-out prompts, tokens per forward at K = {STATES}, and per unit: the "
        f"predicted time of a forward of one state, {deployment}",
        f"  {'target':<9}{'without head':>14}{'with head':>11}{'per unit:':>11}{'without':>9}"
        f"{'with':>7}",
    ]
    for row in comparisons:
        lines.append(
            f"  {row.target:<9}{row.without:>14.2f}{row.drafted:>11.2f}{'':>11}"
            f"{row.without_per_unit:>9.2f}{row.per_unit:>7.2f}"
        )
    winners = [row for row in comparisons if row.gain > 1]
    if winners:
        gains = []
        for row in winners:
            gains.append(f"{row.gain:.2f} times the tokens per unit with {row.target}")
        lines.append(f"verdict: worth publishing, {' and '.join(gains)}")
    else:
        best = max(row.gain for row in comparisons)
        lines.append(
            f"verdict: no better than none ({best:.2f} times the tokens per unit): train longer, "
            "or on texts that the backbone wrote (mrp decode)"
        )
    return "\n".join(lines)
