"""Decodes held-out problems with each target, alone and drafted, and prints what it cost: ``python -m mrp_trainer.demo``.

It is `mrp evaluate` with these options. (``make demo`` runs it, too.)
"""

from typing import Annotated, Any

import typer

from .embedded import EMBEDDED
from .evaluate.command import evaluate
from .evaluate.options import EvaluateOptions

TARGETS: dict[str, dict[str, Any]] = {
    "static": {"decoding": "static"},
    "sequential": {"decoding": "sequential"},
    "entropy_bound 0.35": {"decoding": "entropy_bound", "entropy_threshold": 0.35},
    "dynamic 0.9": {"decoding": "dynamic", "confidence_threshold": 0.9},
}


def main(
    model: Annotated[str, typer.Option(help="Checkpoint: folder or Hub id.")] = EMBEDDED,
    count: Annotated[int, typer.Option(help="Problems of each family.")] = 64,
    batch_size: Annotated[int, typer.Option(help="Prompts per call of generate.")] = 16,
) -> None:
    """Show what each target solves and costs, alone and drafted, with two answers of each family above."""
    targets = [one["decoding"] for one in TARGETS.values()]
    evaluate(
        EvaluateOptions(
            model=model,
            family=["math", "code", "source"],
            count=count,
            batch_size=batch_size,
            decoding=[*targets, "mrp_spec"],
            target=targets,
            states=[4],
            show=2,
        )
    )


if __name__ == "__main__":
    typer.run(main)
