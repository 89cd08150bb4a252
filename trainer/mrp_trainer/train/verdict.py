"""The verdict on a trained head: held-out prompts are decoded without the head and with it, and the
speeds are compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..evaluate.cost import charged_as, units_per_forward
from ..evaluate.decoded import decode_prompts

TARGETS = ("static", "dynamic")
STATES = 8
_SHORTLIST = 16  # the default shortlist of a vocabulary of a published size


@dataclass(frozen=True)
class Comparison:
    """The speed of decoding the same prompts under one target, with drafts made without the head
    (`self_spec`) and with it (`mrp_spec`). Speed is measured in tokens per forward of the backbone,
    which does not count passes of the head, and in tokens per unit of cost, which does: a forward
    of the backbone costs one unit, and a pass of the head costs a share of a unit.

    Attributes:
        target: The target of decoding, `static` or `dynamic`.
        without: Tokens per forward without the head. Tokens per unit of cost are the same, since
            there are no head passes.
        drafted: Tokens per forward with the head.
        per_unit: Tokens per unit of cost with the head.
    """

    target: str
    without: float
    drafted: float
    per_unit: float

    @property
    def gain(self) -> float:
        """Return how many times faster decoding is with the head than without it: the tokens per
        unit of cost with the head, divided by those without it. A unit is the cost of one forward
        of the backbone."""
        return self.per_unit / self.without

    def as_log(self) -> dict[str, float]:
        """Return the three speeds under the names that they have in a run's log. Under the target
        `static`, these are `verdict_static_stale_tokens_per_forward` for `without`,
        `verdict_static_tokens_per_forward` for `drafted` and `verdict_static_tokens_per_unit` for
        `per_unit`."""
        return {
            f"verdict_{self.target}_stale_tokens_per_forward": self.without,
            f"verdict_{self.target}_tokens_per_forward": self.drafted,
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
    shape = charged_as(model.config.hidden_size)
    comparisons = []
    for target in TARGETS:
        options["target"] = target
        stale = decode_prompts(
            model, tokenizer, prompts, None, max_new_tokens, decoding="self_spec", **options
        )
        options_of_head = {"decoding": "mrp_spec", "draft_shortlist": _SHORTLIST, **options}
        drafted = decode_prompts(model, tokenizer, prompts, None, max_new_tokens, **options_of_head)
        speed = drafted.tokens_per_forward
        line = {
            "tokens_per_forward": speed,
            "head_per_token": drafted.head_forwards_per_token,
            "draft_shortlist": _SHORTLIST,
            "num_draft_states": STATES,
        }
        units = units_per_forward(line, shape)
        assert units is not None
        comparisons.append(Comparison(target, stale.tokens_per_forward, speed, speed / units))
    return comparisons


def verdict(comparisons: Sequence[Comparison], prompts: int, shape: str) -> str:
    """Describe in a table and a sentence whether a head is worth publishing. It is if, under at
    least one target, decoding is faster with the head than without it, in tokens per unit of cost.
    A forward of the backbone costs one unit, and a pass of the head costs a share of a unit.

    Args:
        comparisons: The speeds with and without the head, under each target.
        prompts: The number of decoded prompts.
        shape: The published model size, such as "4B", for which the cost of a head pass was
            computed.
    """
    lines = [
        f"{prompts} held-out prompts, tokens per forward at K = {STATES}, and per unit, which "
        f"charges the head's passes as at {shape}:",
        f"  {'target':<9}{'without head':>14}{'with head':>11}{'per unit':>10}",
    ]
    for row in comparisons:
        lines.append(
            f"  {row.target:<9}{row.without:>14.2f}{row.drafted:>11.2f}{row.per_unit:>10.2f}"
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
