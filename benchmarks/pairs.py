"""Try pairs of capabilities at random, each in a tiny model of random weights, and count what
differed.

    python -m benchmarks.pairs --cases 10000 --seed 1 --processes 2

The registry is `tests/support/capabilities.py`, a case `tests/support/pairs.py`: each pair comes
once, in an order of the seed, before any comes again. Cases are functions of the seed and their
number: `--first N --cases 1` repeats one. The result, `--output`, has the seed, the count of cases
of each pair, those that were refused as they have to be, and every mismatch. `--add` goes on from
an earlier result behind its last case.
"""

import json
import multiprocessing
import os
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from .common import RESULTS, header, parser_of


def quiet_process() -> None:
    """Prepare a process: one thread, no warnings, kernels interpreted (triton reads it where
    kernels are defined)."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    torch.set_num_threads(1)  # with such small products, more threads only wait for each other
    warnings.simplefilter("ignore")
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)


def try_cases(seed: int, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Try the cases of some numbers; return a line each, with its error if something differed."""
    from tests.support.capabilities import REGISTRY
    from tests.support.pairs import drawn, refusal_of, tried

    lines = []
    for number in numbers:
        ((name, pair),) = drawn(REGISTRY, seed, number, 1)
        names = [capability.name for capability in pair]
        line: dict[str, Any] = {
            "case": number,
            "pair": names,
            "refused": refusal_of(pair) is not None,
            "tokens": 0,
        }
        try:
            line["tokens"] = tried(name, pair)
        except Exception as error:  # a crash is a finding like any other; go on with the next case
            line["error"] = f"{type(error).__name__}: {error}"[:500]
        lines.append(line)
    return lines


def summary_of(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count cases: by pair, refused ones, and mismatches in full."""
    pairs = Counter[str]()
    tokens = 0
    refused = 0
    mismatches = []
    for line in lines:
        pairs[" + ".join(line["pair"])] += 1
        tokens += line["tokens"]
        if "error" in line:
            mismatches.append(line)
        elif line["refused"]:
            refused += 1
    return {
        "cases": len(lines),
        "pairs": len(pairs),
        "tokens": tokens,
        "refused": refused,
        "mismatches": mismatches,
        "cases_by_pair": dict(sorted(pairs.items())),
    }


def added(earlier: dict[str, Any], summary: dict[str, Any]) -> dict[str, Any]:
    """Add what an earlier result counted to a summary; `ValueError` if its cases are of another
    seed or registry."""
    for name, current in (("seed", summary["options"]["seed"]), ("registry", summary["registry"])):
        then = earlier["options"]["seed"] if name == "seed" else earlier["registry"]
        if then != current:
            raise ValueError(f"{name} was {then} and is {current}: begin again, without --add")
    pairs = Counter(earlier["cases_by_pair"])
    pairs.update(summary["cases_by_pair"])
    together = {"pairs": len(pairs), "cases_by_pair": dict(sorted(pairs.items()))}
    for name in ("cases", "tokens", "refused", "mismatches", "seconds", "runs"):
        together[name] = earlier[name] + summary[name]
    return {**summary, **together}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 if a case differed."""
    parser = parser_of("pairs", __doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no more cases after this time"
    )
    parser.add_argument("--add", type=Path, help="an earlier result, behind whose cases to begin")
    parser.add_argument("--output", type=Path, default=RESULTS / "pairs.json")
    options = parser.parse_args(arguments)
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from tests.support.capabilities import REGISTRY
    from tests.support.pairs import pairs_of

    earlier = json.loads(options.add.read_text()) if options.add else None
    if earlier:
        options.first = earlier["runs"][-1]["first"] + earlier["runs"][-1]["cases"]
    begin = time.monotonic()
    lines: list[dict[str, Any]] = []
    head = header("pairs", options) | {
        "registry": len(REGISTRY),
        "pairs_of_registry": len(pairs_of(REGISTRY)),
    }
    last = options.first + options.cases
    calls = []
    for number in range(options.first, last, 25):
        calls.append((options.seed, range(number, min(number + 25, last))))
    with multiprocessing.get_context("spawn").Pool(options.processes, quiet_process) as pool:
        for chunk_lines in pool.imap(_try_chunk, calls):
            lines += chunk_lines
            for line in chunk_lines:
                if "error" in line:
                    print(json.dumps(line), flush=True)
            summary = {**head, **summary_of(lines), "seconds": round(time.monotonic() - begin)}
            run = {"commit": head["commit"], "first": options.first, "cases": len(lines)}
            summary["runs"] = [run]
            if earlier:
                summary = added(earlier, summary)
            options.output.write_text(json.dumps(summary, indent=0) + "\n")
            if time.monotonic() - begin > 60 * options.minutes:
                break
    print(
        f"{summary['cases']} cases of {summary['pairs']} pairs, "
        f"{len(summary['mismatches'])} mismatches: {options.output}"
    )
    return int(bool(summary["mismatches"]))


def _try_chunk(call: tuple[int, Sequence[int]]) -> list[dict[str, Any]]:
    return try_cases(*call)


if __name__ == "__main__":
    raise SystemExit(main())
