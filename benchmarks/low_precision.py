"""Texts that rounding changes: ``python -m benchmarks.low_precision``.

In float64 a drafted text is its target's. In bfloat16 the last bits of a sum depend on its shape, so that near-ties fall either
way. A line gives the share of texts that equal those of the target decoded in batches of `--batch-size`: of drafted ones by K,
and as a control of the target itself in batches of other sizes, and in the same ones beside a prompt `LONGER` times as long as
the batch's first, with which attention sums over as many keys as it does with drafts. No one would call those other decoders.

Lines go to `benchmarks/results/tiny_low_precision.jsonl` or `--output FILE`; what has one there, of the weights that it uses,
is not measured again. `python -m benchmarks.tables low_precision` prints the table.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from mrp_trainer.intervals import wilson
from mrp_trainer.results import ResultsFile
from mrp_trainer.tasks import FAMILIES, Problem, problems

from .common import RESULTS, TINY, header, load
from .measure import measure
from .targets import TARGETS

DRAFTED = (("self_spec", 4), ("self_spec", 8), ("mrp_spec", 2), ("mrp_spec", 4), ("mrp_spec", 8))
LONGER = 8


def ways(target: str, batch_size: int, controls: list[int]) -> Iterator[dict[str, Any]]:
    """List how a target's texts are decoded once more: fields of a line."""
    yield from ({"mode": target, "batch_size": size} for size in controls)
    yield {"mode": target, "batch_size": batch_size, "longer": LONGER}
    yield from ({"mode": mode, "K": states, "batch_size": batch_size} for mode, states in DRAFTED)


def among_longer(asked: list[Problem], batch_size: int) -> list[Problem]:
    """Put a problem with a prompt `LONGER` times as long behind each batch of problems."""
    found: list[Problem] = []
    for begin in range(0, len(asked), batch_size):
        part = asked[begin : begin + batch_size]
        found += [*part, replace(part[0], prompt=part[0].prompt * LONGER)]
    return found


def main(arguments: list[str] | None = None) -> None:
    """Command line: writes a JSON line for each family, target and way to decode it, and prints how many texts are equal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.low_precision", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument(
        "--output", default=str(RESULTS / "tiny_low_precision.jsonl"), help="lines; goes on behind those that are there"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float64"), default="bfloat16")
    parser.add_argument("--split", default="heldout", choices=("heldout", "tune"))
    parser.add_argument("--count", type=int, default=100, help="problems of a family")
    parser.add_argument("--batch-size", type=int, default=10, help="a divisor of the count")
    parser.add_argument("--controls", type=int, nargs="+", default=[1, 25], help="batch sizes")
    parser.add_argument("--target", nargs="+", default=["static", "dynamic"], choices=list(TARGETS))
    parser.add_argument("--family", nargs="+", default=["source"], choices=list(FAMILIES))
    options = parser.parse_args(arguments)
    size = options.batch_size
    if options.count % size:
        parser.error(f"--batch-size {size} does not divide --count {options.count}")
    model, tokenizer = load(options.model)
    results = ResultsFile(options.output, "equal")
    results.begin(header("low_precision", options, model))
    model = model.to(getattr(torch, options.dtype))
    for family in options.family:
        asked = problems(family, options.split, options.count)
        for target in options.target:
            alone: dict[str, Any] = {"decoding": target, **TARGETS[target]}
            expected: list[list[int]] | None = None
            for way in ways(target, size, options.controls):
                line = {"family": family, "split": options.split, "target": target, "dtype": options.dtype, **way}
                line |= {"of_batch_size": size, "texts": options.count}
                if results.find(**line) is not None:
                    continue
                if expected is None:
                    expected = measure(model, tokenizer, asked, size, **alone).ids
                if "longer" in way:
                    found = measure(model, tokenizer, among_longer(asked, size), size + 1, **alone)
                    ids = [text for place, text in enumerate(found.ids) if place % (size + 1) < size]
                else:
                    drafts = {"decoding": way["mode"], "target": target, "num_draft_states": way["K"]} if "K" in way else {}
                    found = measure(model, tokenizer, asked, way["batch_size"], **alone | drafts)
                    ids = found.ids
                equal = sum(a == b for a, b in zip(ids, expected, strict=True))
                share = wilson(equal, len(asked))
                line |= {"equal": equal, "share": round(share.value, 4), "interval": share.rounded(4)}
                results.add({**line, "head_per_token": round(found.cost.head_per_token, 3)})
                print(f"{family}, {target}: {way}: {equal} of {len(asked)}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
