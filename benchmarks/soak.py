"""Decode random cases for a bounded time, each text in several ways that must agree, and count what
was compared.

    python -m benchmarks.soak --minutes 30 --output FILE [--seed 0] [--mode MODE ...]

Models are tiny, with random weights in float64, where near ties do not occur: every difference is a
bug. A case compares a batch with
- `mode`: a mode that drafts, if the case's mode can be a target; otherwise the same rows in another
  order and padding;
- `alone`: one of its rows, decoded by itself;
- `reference`: some of its rows (`--references`), decoded by the slow decoder without a cache,
  `tests/support/reference.py`;
- `reuse`: its texts, cut somewhere and sometimes changed, continued from `past_key_values` and
  without.

Cases are functions of the seed, their number and `--mode`: `--first N --cases 1` repeats one. The
last line has the counts; `tokens_drafted` counts, by target, tokens of drafted texts that were
compared with the target's, and `tokens_with` those for which a kind of draft was drawn: prompt
lookup, drafts that go on into the next block, states by expected gain, and the target given as a
rule object.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from modeling_mrp.generate.option_table import TARGETS, rule_of
from modeling_mrp.generate.options import OPTION_NAMES, MRPGenerationConfig
from modeling_mrp.rules.reveal import RevealRule
from tests.support.random_cases import MODES, Case, Row, assert_same_text, of_slow

from .common import emit, header, parser_of

SIZES = (1, 3, 12, 48, 64)


def as_object(case: Case) -> RevealRule:
    """Make the rule object of a case's target, from the case's options."""
    options = {name: value for name, value in case.options.items() if name in OPTION_NAMES}
    config = MRPGenerationConfig(decoding=case.mode, **options)
    return rule_of(case.mode, config, case.model.config.block_size)


def kinds_of(drafted: dict[str, Any]) -> Iterator[str]:
    """Name the kinds of drafts among drawn options."""
    if drafted.get("prompt_lookup_num_tokens"):
        yield "prompt lookup"
    if drafted.get("draft_next_block"):
        yield "next block"
    if drafted.get("num_draft_states") == "auto":
        yield "expected gain"
    if isinstance(drafted.get("target"), RevealRule):
        yield "rule object"


def compared(case: Case, references: int, kinds: Counter[str]) -> Iterator[tuple[str, Row, Row]]:
    """Decode a case in several ways; yield the kind of each comparison, and the two rows, which
    must be equal. Count in `kinds` the tokens of each kind of draft."""
    rng = case.rng
    indices = list(range(len(case.prompts)))
    if rng.random() < 0.3:
        case.options["max_new_tokens"] += rng.randint(0, 60)
    batch, out = case.decode()
    drafted = case.drafted()
    if drafted and rng.random() < 0.2:
        drafted["target"] = as_object(case)
    order = indices if drafted else rng.sample(indices, len(indices))
    permuted, out_again = case.decode(order, **drafted)
    for index, row in zip(order, permuted, strict=True):
        yield "mode", batch[index], row
        for kind in kinds_of(drafted):
            kinds[kind] += sum(step >= 0 for step in row["steps"])
    index = rng.choice(indices)
    (single,), _ = case.decode([index], **(drafted if rng.random() < 0.5 else {}))
    yield "alone", batch[index], single
    others = [other for other in indices if other != index]
    for slow in (index, *others[: references - 1]):
        yield "reference", batch[slow], of_slow(case.by_reference(slow))
    if rng.random() < 0.6:
        # with the head's keys and values, or without
        past = out_again if order is indices and rng.random() < 0.7 else out
        case.go_on(batch, 300)
        cached, _ = case.decode(past_key_values=past.past_key_values, **case.drafted())
        plain, _ = case.decode()
        for plain_row, cached_row in zip(plain, cached, strict=True):
            yield "reuse", plain_row, cached_row


def soak(
    minutes: float,
    seed: int,
    first: int = 0,
    cases: int | None = None,
    sizes: Sequence[int] = SIZES,
    modes: Sequence[str] = MODES,
    references: int = 1,
) -> Iterator[dict[str, Any]]:
    """Compare case after case; yield a result line for each mismatch, and at last a line with all
    counts."""
    begin = time.monotonic()
    kinds = Counter[str]()
    drafted = Counter[str]()
    kinds_of_drafts = Counter[str]()
    total = Counter[str](tokens=0, rows=0, cases=0, calls=0, mismatches=0)

    def counts() -> dict[str, Any]:
        by = {
            "tokens_by_kind": dict(kinds),
            "tokens_drafted": dict(sorted(drafted.items())),
            "tokens_with": dict(sorted(kinds_of_drafts.items())),
        }
        return {**total, **by, "seconds": round(time.monotonic() - begin, 1), "seed": seed}

    while time.monotonic() - begin < 60 * minutes and (cases is None or total["cases"] < cases):
        number = first + total["cases"]
        case = Case(f"{seed}/{number}", sizes, modes)
        kind = "decode"
        mode = case.mode
        try:
            for kind, decoded, expected in compared(case, references, kinds_of_drafts):
                assert_same_text(decoded, expected, kind)
                count = sum(step >= 0 for step in decoded["steps"])
                total.update(tokens=count, rows=1)
                kinds[kind] += count
                drafted[mode] += count * (kind == "mode" and mode in TARGETS)
        except Exception as error:  # a crash is a finding like any other; go on with the next case
            total["mismatches"] += 1
            yield {
                "mismatch": kind,
                "case": number,
                "mode": case.mode,
                "error": f"{type(error).__name__}: {error}"[:500],
            }
        total.update(cases=1, calls=case.calls)
    yield counts()


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 if a comparison failed."""
    parser = parser_of("soak", __doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to go on")
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="JSON lines: a header, mismatches, and the counts at last",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--cases", type=int, default=None, help="cases at most")
    parser.add_argument(
        "--mode",
        nargs="+",
        choices=list(dict.fromkeys(MODES)),
        default=list(MODES),
        help="modes of cases",
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=SIZES, help="sizes that a batch may have"
    )
    parser.add_argument(
        "--references", type=int, default=1, help="rows of a case that the slow decoder decodes"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # with such small products, more threads only wait for each other
    line: dict[str, Any] = {}
    if options.output.exists() and not options.output.read_text().startswith(
        '{"benchmark": "soak"'
    ):
        parser.error(f"{options.output} is there, and no earlier soak: name another file")
    with options.output.open("w") as file:
        emit(header("soak", options), file)
        for line in soak(
            options.minutes,
            options.seed,
            options.first,
            options.cases,
            options.rows,
            options.mode,
            options.references,
        ):
            emit(line, file)
    return int(line["mismatches"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
