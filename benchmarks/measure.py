"""One mode on one list of problems: texts, cost by problem, and what a round computes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mrp_trainer.data.tasks import Problem
from mrp_trainer.evaluate.decoded import decode_problems
from transformers import PreTrainedTokenizerBase

from modeling_mrp.modeling import MRPForCausalLM

from .bootstrap import Cost, ratio, tokens_per_forward
from .meter import Meter

SAMPLE = 4


@dataclass(frozen=True)
class Measured:
    """What a mode made of problems.

    Attributes:
        ids: Generated ids, by problem.
        cost: Tokens and forwards, by problem.
        per_round: What a round computes (`Meter.per_round`); empty where the mode is not one of `generate`'s.
        drafted: Drafted states that were submitted, all problems together.
        accepted: Drafted states that the backbone came by.
        right: Whether each text is accepted by its judge; None where there is no right answer.
    """

    ids: list[list[int]]
    cost: Cost
    per_round: dict[str, float]
    drafted: int = 0
    accepted: int = 0
    right: list[bool | None] = field(default_factory=list)

    def line(self) -> dict[str, Any]:
        """Tokens per forward with its interval, the head's cost, what a round computes, and the first problems' counts."""
        interval = tokens_per_forward(self.cost)
        line: dict[str, Any] = {
            "tokens_per_forward": round(interval.value, 3),
            "tokens_per_forward_95": interval.rounded(),
            "head_per_token": round(self.cost.head_per_token, 3),
        }
        if self.drafted:
            line["accepted_percent"] = round(100 * self.accepted / self.drafted, 1)
        return {**line, **self.per_round, "sample": self.sample()}

    def sample(self) -> dict[str, list[int]]:
        """The exact counts of the first problems, which are quickly decoded again."""
        return {name: list(counts)[:SAMPLE] for name, counts in vars(self.cost).items()}

    def over(self, **others: "Measured | None") -> dict[str, Any]:
        """`over_NAME` and `over_NAME_95` for each other mode given: the ratio of tokens per forward on the same problems."""
        fields: dict[str, Any] = {}
        for name, other in others.items():
            if other is not None:
                interval = ratio(self.cost, other.cost)
                fields |= {f"over_{name}": round(interval.value, 3), f"over_{name}_95": interval.rounded()}
        return fields

    def same(self, other: "Measured") -> float:
        """Share of problems with the same ids, in percent."""
        return round(100 * sum(a == b for a, b in zip(self.ids, other.ids, strict=True)) / len(self.ids), 1)


def measure(
    model: MRPForCausalLM, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Problem], batch_size: int, **options: Any
) -> Measured:
    """Decodes problems of one family with options of `generate`."""
    meter = Meter(model)
    decoded = decode_problems(meter, tokenizer, asked, batch_size, **options)
    return Measured(
        decoded.ids,
        Cost.of(decoded),
        meter.per_round(),
        decoded.forwards["drafted"],
        decoded.forwards["accepted"],
        decoded.right,
    )
