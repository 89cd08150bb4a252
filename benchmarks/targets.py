"""Tokens per forward of every target, alone and drafted: ``python -m benchmarks.targets``.

Greedy, float64, so that a drafted text can be compared with its target's token by token: a line says how many texts differ.
`self_spec` drafts from stale logits and uses no head, `mrp_spec` from the head; a head pass is no forward and is counted apart.
"""

import argparse
from typing import Any

import torch
from mrp_trainer.tasks import FAMILIES, problems

from .common import TINY, emit, header, load
from .measure import measure

TARGETS: dict[str, dict[str, Any]] = {
    "static": {},
    "dynamic": {"confidence_threshold": 0.9},
    "sequential": {},
    "entropy_bound": {"entropy_threshold": 0.35},
}
# Mode, K and head passes a round.
DRAFTED = (
    ("self_spec", 4, 0),
    ("self_spec", 8, 0),
    ("mrp_spec", 4, 1),
    ("mrp_spec", 8, 1),
    ("mrp_spec", 8, 2),
    ("mrp_spec", 8, 7),
)


def ways(target: str, drafted: tuple[str, int, int] | None) -> dict[str, Any]:
    """Return the options of `generate` for a target, alone (None) or drafted: mode, K states, and head passes a round."""
    if drafted is None:
        return {"decoding": target, **TARGETS[target]}
    mode, states, passes = drafted
    more = {"draft_passes": passes} if passes else {}
    return {"decoding": mode, "target": target, **TARGETS[target], "num_draft_states": states, **more}


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line for each family, target and way to draft for it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.targets", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--split", default="heldout", choices=("heldout", "tune"))
    parser.add_argument("--count", type=int, default=200, help="problems of math and code; half as many of source")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--target", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--family", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    options = parser.parse_args(arguments)
    model, tokenizer = load(options.model)
    emit(header("targets", options, model))
    model = model.to(torch.float64)
    for family in options.family:
        asked = problems(family, options.split, options.count // 2 if family == "source" else options.count)
        for target in options.target:
            alone = measure(model, tokenizer, asked, options.batch_size, **ways(target, None))
            emit({"family": family, "target": target, "drafts": None, **alone.line()})
            for way in DRAFTED:
                drafted = measure(model, tokenizer, asked, options.batch_size, **ways(target, way))
                mode, states, passes = way
                line = {"family": family, "target": target, "drafts": mode, "K": states, "passes": passes}
                differ = sum(a != b for a, b in zip(drafted.ids, alone.ids, strict=True))
                emit({**line, **drafted.line(), **drafted.over(target=alone), "texts_that_differ": differ})


if __name__ == "__main__":
    main()
