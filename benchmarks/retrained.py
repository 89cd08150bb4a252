"""Whether a head that was trained again is as good as the one before it: both on the same held-out problems.

``python -m benchmarks.retrained --model NEW --before OLD`` decodes with `mrp_spec` of each target (tokens per forward, their
ratio) and with `mrp_direct` (accuracy) and prints a JSON line for each, with paired 95 % intervals. Both have the same
backbone, so in float64 every text of `mrp_spec` is the same.
"""

import argparse
from typing import Any

import numpy as np
from mrp_trainer.decoded import Decoded, decode_problems
from mrp_trainer.intervals import RESAMPLES, percentiles, resampled_sums
from mrp_trainer.tasks import problems

from .bootstrap import Cost, ratio
from .common import TINY, emit, header, load
from .targets import TARGETS, drafted


def drafting(new: Decoded, old: Decoded) -> dict[str, Any]:
    """Tokens per forward of both, and the ratio."""
    assert new.ids == old.ids, "drafts never change the text"
    over = ratio(Cost.of(new), Cost.of(old))
    return {
        "tokens_per_forward": round(new.tokens_per_forward, 3),
        "before": round(old.tokens_per_forward, 3),
        "ratio": round(over.value, 3),
        "ratio_95": over.rounded(),
    }


def accuracy(new: Decoded, old: Decoded) -> dict[str, Any]:
    """Accuracy of both in percent, and the difference in points."""
    judged = np.array([new.judged, old.judged], dtype=float).T
    mine, before = 100 * judged.mean(0)
    sums = resampled_sums(judged, RESAMPLES, seed=0)
    points = percentiles(mine - before, 100 * (sums[:, 0] - sums[:, 1]) / len(judged))
    return {
        "accuracy": round(mine, 1),
        "before": round(before, 1),
        "difference": round(points.value, 1),
        "difference_95": points.rounded(1),
    }


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line for each family and setting."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retrained", description=__doc__)
    parser.add_argument("--model", default=str(TINY), help="the new one")
    parser.add_argument("--before", required=True, metavar="FOLDER", help="the other one")
    parser.add_argument("--family", nargs="+", default=["math", "code"])
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--split", default="heldout", choices=("heldout", "tune"))
    parser.add_argument("--target", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--states", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--batch-size", type=int, default=50)
    options = parser.parse_args(arguments)
    new, tokenizer = load(options.model)
    emit(header("retrained", options, new))
    old, _ = load(options.before)
    new, old = new.double(), old.double()
    settings = [drafted("mrp_spec", target, states) for target in options.target for states in options.states]
    for family in options.family:
        asked = problems(family, options.split, options.count)
        for setting in [*settings, {"decoding": "mrp_direct"}]:
            decoded = [decode_problems(model, tokenizer, asked, options.batch_size, **setting) for model in (new, old)]
            measured = (accuracy if setting["decoding"] == "mrp_direct" else drafting)(*decoded)
            emit({"family": family, **setting, **measured})


if __name__ == "__main__":
    main()
