"""What the tests of the engine ask for, and how they read what they get."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mrp_trainer.data.tasks import Problem

from benchmarks.server import CPU_ENVIRONMENT, Measured
from modeling_mrp import MRPForCausalLM
from tests.support.engine_reference import low_confidence

CONCURRENCY, BLOCK, STATES = 16, 16, 4
COUNTS = {"math": 80, "code": 80, "source": 40}
BUDGETS = (32, 48, 64, 80)
ENVIRONMENT = {**CPU_ENVIRONMENT, "TRITON_INTERPRET": "0"}
# Two probabilities this close are compared otherwise by float32 in batches of other sizes.
NEAR = 1e-5


@dataclass(frozen=True)
class Asked:
    """Prompts of all families, and how many new tokens each may get."""

    problems: list[Problem]
    prompts: list[list[int]]
    budgets: list[int]


def target_of(threshold: float) -> dict[str, Any]:
    """The target of ours whose text is that of stock's `LowConfidence` with a threshold."""
    return (
        {"target": "static"}
        if threshold == 1
        else {"target": "dynamic", "confidence_threshold": threshold}
    )


# Fixtures: have a line printed behind the tests; what an algorithm answers at a threshold.
Report = Callable[[str], None]
Measure = Callable[[str, float], Measured]


def up_to_eos(ids: Sequence[int], eos: Sequence[int]) -> list[int]:
    """A text without what stands behind its first eos."""
    return list(ids[: next((i + 1 for i, token in enumerate(ids) if token in eos), len(ids))])


def sse(response: Any) -> Iterator[bytes]:
    """The data of the events of a stream, to its end."""
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield line[len(b"data: ") :]


def explained(
    model: MRPForCausalLM,
    asked: Asked,
    threshold: float,
    served: list[list[int]],
    others: list[list[int]],
    eos: Sequence[int],
) -> str:
    """Say how many texts are not the one served, each of which has a near tie before it differs."""
    other = [
        place for place, (text, one) in enumerate(zip(served, others, strict=True)) if text != one
    ]
    for place in other:
        text, one = served[place], others[place]
        first = next(i for i in range(len(text) + 1) if text[i : i + 1] != one[i : i + 1])
        reference = low_confidence(
            model, asked.prompts[place], threshold, asked.budgets[place], eos
        )
        assert min(reference.closest[: first + 1]) < NEAR, (
            f"prompt {place} from token {first} on: {text} against {one}"
        )
    return f"{len(other)} of {len(others)} texts differ, by a near tie each: {other}"
