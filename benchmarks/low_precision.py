"""Texts that rounding changes: ``python -m benchmarks.low_precision``.

In float64 a drafted text is its target's. In bfloat16 the last bits of a product depend on its shape, so that near-ties fall
either way. A line gives the share of texts that equal those of the target decoded in batches of `--batch-size`: of drafted ones
by K, and as a control of the target itself in batches of other sizes, which no one would call another decoder.
"""

import argparse
from typing import Any

import torch
from mrp_trainer.intervals import wilson
from mrp_trainer.tasks import FAMILIES, problems

from .common import TINY, emit, header, load
from .measure import measure
from .targets import TARGETS
from .wallclock import DTYPES

DRAFTED = (("self_spec", 4), ("mrp_spec", 2), ("mrp_spec", 4), ("mrp_spec", 8))


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line for each family, target and way to decode it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.low_precision", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--split", default="heldout", choices=("heldout", "tune"))
    parser.add_argument("--count", type=int, default=200, help="problems of a family")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--controls", type=int, nargs="+", default=[1, 3, 16], help="batch sizes")
    parser.add_argument("--target", nargs="+", default=["static", "dynamic"], choices=list(TARGETS))
    parser.add_argument("--family", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    options = parser.parse_args(arguments)
    emit(header("low_precision", options))
    model, tokenizer = load(options.model)
    model = model.to(DTYPES[options.dtype])
    for family in options.family:
        asked = problems(family, options.split, options.count)
        for target in options.target:

            def texts(size: int, **settings: Any) -> list[list[int]]:
                return measure(model, tokenizer, asked, size, **settings).ids  # noqa: B023, called before the next problems

            alone: dict[str, Any] = {"decoding": target, **TARGETS[target]}
            expected = texts(options.batch_size, **alone)
            others = [({"mode": target, "batch_size": size}, texts(size, **alone)) for size in options.controls]
            for mode, states in DRAFTED:
                drafted = texts(options.batch_size, **alone | {"decoding": mode, "target": target, "num_draft_states": states})
                others.append(({"mode": mode, "K": states, "batch_size": options.batch_size}, drafted))
            for how, found in others:
                equal = sum(a == b for a, b in zip(found, expected, strict=True))
                share = wilson(equal, len(asked))
                line = {"family": family, "target": target, "dtype": options.dtype, **how, "texts": len(asked)}
                emit({**line, "equal": equal, "share": round(share.value, 4), "interval": share.rounded(4)})


if __name__ == "__main__":
    with torch.inference_mode():
        main()
