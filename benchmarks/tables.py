"""Print the tables in the documents from measured lines.

``python -m benchmarks.tables TABLE`` reads `benchmarks/results` (or `--results FOLDER`). From
`tiny_frontier*.jsonl`: `frontier` has accuracy and cost of every mode and setting, `undrafted`
leaves out the drafted ones; `targets` has every target, alone and drafted, `summary` its main
numbers; `break_even` what a head pass may cost; `aims` what a pass with a shortlist gains, beside
the aim; `headline` drafts of `static` beside the released reference.
From files of their own: `fresh` (`tiny_fresh_{math,code}.jsonl`) targets on fresh problems;
`sampled` (`tiny_sampled.jsonl`) targets at temperature 1; `seeds` (`tiny_seed_*.jsonl`) heads of
several training seeds; `rules` (`tiny_rules.jsonl`) every reveal rule; `heldout`
(`tiny_heldout_{math,code}.jsonl`) the model card's table. `provenance` says at which commit each
file was measured.

Tokens are per unit (`mrp_trainer.evaluate.cost`): a backbone forward, with the head's passes
charged as at the 4B shape, unless a column says otherwise.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from math import hypot
from pathlib import Path
from typing import Any

from mrp_trainer.data.tasks import FAMILIES
from mrp_trainer.evaluate.cost import CHARGED, HEAD_SHARES, charged
from mrp_trainer.evaluate.cost import break_even as affordable
from mrp_trainer.publish.card import markdown_table, results_table

from modeling_mrp.networks.picker import SHORTLIST

from .common import RESULTS, parser_of, read_lines
from .frontier import (
    GRAPH,
    JUDGED,
    STATES,
    WIDTHS,
    graph_of,
    on_frontier,
    sampled_settings,
    setting_name,
    shortlisted,
)
from .targets import RULES, TARGETS, alone, drafted

Line = dict[str, Any]


def frontier_lines(folder: Path = RESULTS) -> list[Line]:
    """Read the lines of all files of the frontier, in the order math, code, source."""
    lines = [
        charged(line)
        for path in sorted(folder.glob("tiny_frontier*.jsonl"))
        for line in read_lines(path)
    ]
    return sorted(lines, key=lambda line: FAMILIES.index(line["family"]))


def named(lines: Iterable[Line]) -> dict[tuple[str, str], Line]:
    """Return lines by (family, setting name); of lines of the same setting, the last one."""
    return {(line["family"], setting_name(line)): line for line in lines}


def by_setting(folder: Path, families: Sequence[str] = FAMILIES) -> dict[tuple[str, str], Line]:
    """Return the frontier's lines of some families, by (family, setting name)."""
    return named(line for line in frontier_lines(folder) if line["family"] in families)


def interval(line: Line, name: str, digits: int) -> str:
    """Format the number `name` of a line with its 95 % interval."""
    return "{:.{d}f} ({:.{d}f}-{:.{d}f})".format(line[name], *line[f"{name}_95"], d=digits)


def solved_and_speed(lines: Iterable[Line]) -> list[str]:
    """Format accuracy and tokens per unit of each line, two cells each."""
    return [
        cell
        for line in lines
        for cell in (interval(line, "accuracy", 1), interval(line, "tokens_per_unit", 2))
    ]


def row_of(lines: Iterable[Line], name: str, shape: str = CHARGED) -> str:
    """Format the number `name` of several lines, separated by commas; head passes are charged as at
    `shape`."""
    return ", ".join(f"{charged(line, shape)[name]:.2f}" for line in lines)


def ratio(line: Line, baseline: Line, name: str) -> str:
    """Format a line's tokens per unit over another line's, with its 95 % interval.

    `name` is the line's field with the ratio of the two lines' tokens per forward.
    """
    value = line["tokens_per_unit"] / baseline["tokens_per_unit"]
    low, high = (end * value / line[name] for end in line[f"{name}_95"])
    return f"{value:.2f}x, {low:.2f}-{high:.2f}"


SOLVED_AND_SPEED = [
    title for family in JUDGED for title in (f"{family} %", f"{family}: tokens / unit")
]
_OTHERS = [shape for shape in HEAD_SHARES if shape != CHARGED]


def frontier(folder: Path = RESULTS, drafted: bool = True) -> str:
    """Tabulate accuracy and tokens per unit, with 95 % intervals, of every setting, or only of
    settings without drafts.

    A star marks the settings of the frontier (`on_frontier`).
    """
    measured, rows = by_setting(folder, JUDGED), []
    best = {
        key
        for key, line in measured.items()
        if on_frontier(line, [measured[rival] for rival in measured if rival[0] == key[0]])
    }
    for name in dict.fromkeys(name for _, name in measured):
        lines = [measured[family, name] for family in JUDGED if (family, name) in measured]
        if not drafted and "target" in lines[0]:
            continue
        entries = []
        for family in JUDGED:
            formatted = (
                solved_and_speed([measured[family, name]])
                if (family, name) in measured
                else ["", ""]
            )
            entries += [formatted[0], formatted[1] + " *" * ((family, name) in best)]
        differ = ", ".join(
            str(line["texts_that_differ"]) for line in lines if "texts_that_differ" in line
        )
        units = [row_of(lines, "tokens_per_unit", shape) for shape in _OTHERS]
        rows.append(
            [
                name,
                *entries,
                *units,
                row_of(lines, "tokens_per_forward"),
                row_of(lines, "head_per_token"),
                differ,
            ]
        )
    head = [
        *(f"at {shape}" for shape in _OTHERS),
        "tokens / forward",
        "head / token",
        "texts that differ",
    ]
    return markdown_table(
        ["mode", *SOLVED_AND_SPEED, *(f"{title} ({', '.join(JUDGED)})" for title in head)], rows
    )


def draft_settings(target: str, states: int) -> dict[str, Line]:
    """Return by name the settings that draft for a target with K = `states`; the last setting makes
    two head passes."""
    return {
        **{
            mode: drafted(mode, target, states) for mode in ("self_spec", "draft_graph", "mrp_spec")
        },
        "mrp_spec 2 passes": drafted("mrp_spec", target, states, draft_passes=2),
    }


def _draft_lines(
    measured: dict[tuple[str, str], Line], family: str, target: str, states: int
) -> dict[str, Line]:
    """Return the measured lines of the settings in `draft_settings`, by name."""
    named = {
        name: measured.get((family, setting_name(setting)))
        for name, setting in draft_settings(target, states).items()
    }
    return {name: line for name, line in named.items() if line is not None}


def _headless(drafts: dict[str, Line]) -> Line:
    """Return the line with the most tokens per unit among drafts without a head."""
    return max(
        (line for line in drafts.values() if not line["head_per_token"]),
        key=lambda line: line["tokens_per_unit"],
    )


def targets(folder: Path = RESULTS) -> str:
    """Tabulate tokens per unit of each target, alone and drafted, with tokens per forward in
    brackets.

    The ratios are of `mrp_spec` with one pass over the best draft without a head.
    """
    measured, rows = by_setting(folder), []
    for family, target in product(FAMILIES, TARGETS):
        entries, ratios = [], []
        for states in (4, 8):
            drafts = _draft_lines(measured, family, target, states)
            for line in drafts.values():
                plain = f" ({line['tokens_per_forward']:.2f})" if line["head_per_token"] else ""
                entries.append(f"{line['tokens_per_unit']:.2f}{plain}")
            best = _headless(drafts)["tokens_per_unit"]
            ratios.append(f"{drafts['mrp_spec']['tokens_per_unit'] / best:.2f}x")
        target_speed = measured[family, setting_name(alone(target))]["tokens_per_unit"]
        rows.append(
            [
                f"`{target}`",
                family,
                f"{target_speed:.2f}",
                *entries,
                *ratios,
                str(_differ(measured, [family], target)),
            ]
        )
    head = [
        f"{name} K={states}"
        for states in (4, 8)
        for name in _draft_lines(measured, "math", "static", states)
    ]
    ratios = [f"mrp_spec over the best without a head, K={states}" for states in (4, 8)]
    return markdown_table(
        ["target", "problems", "alone", *head, *ratios, "texts that differ"], rows
    )


# By target and K, the aims for math and code: tokens per unit over those of the best draft without
# a head.
AIMS = {
    **{(target, 4): (1.05, 1.05) for target in TARGETS},
    **{("dynamic", 4): (1.3, 1.3), ("static", 8): (1.35, 1.35), ("sequential", 8): (1.2, 1.3)},
    **{(target, 8): (1.4, 1.4) for target in ("dynamic", "entropy_bound")},
}


def aims(folder: Path = RESULTS) -> str:
    """Tabulate tokens per unit of `mrp_spec`, the ratio to the best draft without a head at the
    same K, and the aimed ratio.

    Passes are charged as with a shortlist; columns are by number of passes, with 95 % intervals.
    """
    measured, rows = by_setting(folder), []
    for target, states, (index, family) in product(TARGETS, WIDTHS, enumerate(JUDGED)):
        lines, aim = _draft_lines(measured, family, target, states), AIMS[target, states][index]
        best = _headless(lines)
        drafts = [
            charged({**line, "draft_shortlist": SHORTLIST})
            for line in lines.values()
            if line["head_per_token"]
        ]
        field = f"over_{best['decoding']}"
        entries = [
            f"{line['tokens_per_unit']:.2f} ({ratio(line, best, field)})" for line in drafts
        ] + [""] * (2 - len(drafts))
        reached = max(line["tokens_per_unit"] for line in drafts) >= aim * best["tokens_per_unit"]
        stale = f"{best['decoding']} {best['tokens_per_unit']:.2f}"
        rows.append(
            [
                f"`{target}`",
                str(states),
                family,
                stale,
                *entries,
                f"{aim}x",
                "yes" if reached else "no",
            ]
        )
    return markdown_table(
        [
            "target",
            "K",
            "problems",
            "best without a head",
            "one pass",
            "two passes",
            "aim",
            "reached",
        ],
        rows,
    )


def break_even(folder: Path = RESULTS) -> str:
    """Tabulate the most that a head pass may cost, in percent of a backbone forward, to match the
    best draft without a head.

    Drafts with and without a head have the same K, and are compared by tokens per unit.
    """
    measured, rows = by_setting(folder), []
    for family, target in product(FAMILIES, TARGETS):
        entries = []
        for states in WIDTHS:
            drafts = _draft_lines(measured, family, target, states)
            entries += [
                f"{100 * affordable(line, _headless(drafts)):.0f}"
                for line in drafts.values()
                if line["head_per_token"]
            ]
        rows.append([f"`{target}`", family, *entries])
    return markdown_table(["target", "problems", "K=4", "K=8", "K=8, two passes"], rows)


def _differ(measured: dict[tuple[str, str], Line], families: Sequence[str], target: str) -> int:
    """Count the drafted texts of some families that differ from those of their target alone."""
    drafts = (
        line
        for (family, _), line in measured.items()
        if family in families and line.get("target") == target
    )
    return sum(line["texts_that_differ"] for line in drafts)


def summary(folder: Path = RESULTS) -> str:
    """Tabulate problems solved and tokens per unit of each target, alone and drafted, then the
    widest interval."""
    measured, rows, arms = by_setting(folder), [], list[float]()
    for target in TARGETS:
        settings = [
            alone(target),
            *(drafted(mode, target, k) for k in (4, 8) for mode in ("self_spec", "mrp_spec")),
        ]
        lines = [
            [measured[family, setting_name(setting)] for family in JUDGED] for setting in settings
        ]
        units = [row_of(pair, "tokens_per_unit") for pair in lines]
        arms += [
            abs(end / line["tokens_per_unit"] - 1)
            for pair in lines
            for line in pair
            for end in line["tokens_per_unit_95"]
        ]
        other_shapes = [row_of(lines[-1], "tokens_per_unit", shape) for shape in _OTHERS]
        solved = ", ".join(f"{line['accuracy']:.1f}" for line in lines[0])
        plain = row_of(lines[-1], "tokens_per_forward")
        rows.append(
            [
                f"`{target}`",
                solved,
                *units,
                *other_shapes,
                plain,
                str(_differ(measured, JUDGED, target)),
            ]
        )
    head = ["alone", *(f"`{mode}`, K = {k}" for k in (4, 8) for mode in ("self_spec", "mrp_spec"))]
    last = [*(f"at {shape}" for shape in _OTHERS), "a forward"]
    table = markdown_table(["target", "solved, %", *head, *last, "texts that differ"], rows)
    return (
        f"{table}\n"
        "\n"
        f"95 % intervals of tokens per unit reach {100 * max(arms):.0f} % to either side at most."
    )


_BESIDE_RELEASED: tuple[tuple[str, str, dict[str, bool]], ...] = (
    ("released reference", "released", {"head_prefix": False}),
    ("released reference with a head prefix", "released", {"head_prefix": True}),
    ("self_spec", "self_spec", {}),
    ("mrp_spec", "mrp_spec", {}),
)


def headline(folder: Path = RESULTS) -> str:
    """Tabulate tokens per unit of drafted `static` by family, and in brackets over the released
    reference at the same K."""
    measured, rows = by_setting(folder), []
    for states in STATES:
        released = {
            family: measured[
                family, setting_name(drafted("released", "static", states, head_prefix=False))
            ]
            for family in FAMILIES
        }
        for title, mode, options in _BESIDE_RELEASED:
            lines = {
                family: measured[family, setting_name(drafted(mode, "static", states, **options))]
                for family in FAMILIES
            }
            entries = []
            for family, line in lines.items():
                ratio_text = (
                    f" ({ratio(line, released[family], 'over_released')})"
                    if "over_released" in line
                    else ""
                )
                entries.append(f"{line['tokens_per_unit']:.2f}{ratio_text}")
            rows.append(
                [f"{title} K={states}", *entries, row_of(lines.values(), "tokens_per_forward")]
            )
    return markdown_table(["mode", *FAMILIES, f"tokens / forward ({', '.join(FAMILIES)})"], rows)


def rules(folder: Path = RESULTS) -> str:
    """Tabulate the problems that each reveal rule solves, with 95 % intervals, and its tokens per
    unit, alone and drafted."""
    measured, rows = named(read_lines(folder / "tiny_rules.jsonl")), []
    for target in RULES:
        variants = [
            alone(target),
            *(drafted("mrp_spec", target, states, draft_passes=1) for states in WIDTHS),
        ]
        lines = [
            [measured[family, setting_name(setting)] for family in JUDGED] for setting in variants
        ]
        pairs = [row_of(pair, "tokens_per_unit") for pair in lines]
        differ = sum(line["texts_that_differ"] for pair in lines[1:] for line in pair)
        rows.append(
            [
                f"`{target}`",
                *(interval(line, "accuracy", 1) for line in lines[0]),
                *pairs,
                str(differ),
            ]
        )
    head = [*(f"{family} %" for family in JUDGED), "alone", *(f"K = {states}" for states in WIDTHS)]
    return markdown_table(["rule", *head, "texts that differ"], rows)


def fresh(folder: Path = RESULTS) -> str:
    """Tabulate the frontier's numbers beside those of 2,000 fresh problems, whose seed is in the
    file of their lines.

    The number in brackets is the difference divided by its standard error; tokens are per forward.
    """
    measured, rows = by_setting(folder, JUDGED), []
    fresh_lines = named(
        line for family in JUDGED for line in read_lines(folder / f"tiny_fresh_{family}.jsonl")
    )

    def apart(old: Line, new: Line, name: str, digits: int) -> str:
        errors = [(high - low) / 3.92 for low, high in (old[f"{name}_95"], new[f"{name}_95"])]
        distance = f" ({(new[name] - old[name]) / hypot(*errors):+.1f})" if any(errors) else ""
        return f"{old[name]:.{digits}f}, {new[name]:.{digits}f}{distance}"

    for target, family in product(TARGETS, JUDGED):
        pairs = [(setting, setting) for setting in (alone(target), drafted("self_spec", target, 8))]
        pairs += [
            (drafted(GRAPH, target, 8), graph_of(target, 8)),
            (drafted("mrp_spec", target, 8), shortlisted(target, 8, 1)),
        ]
        pairs_of_lines = [
            (measured[family, setting_name(old)], fresh_lines[family, setting_name(new)])
            for old, new in pairs
        ]
        speeds = [apart(*pair, "tokens_per_forward", 2) for pair in pairs_of_lines]
        listing = [charged({**line, "draft_shortlist": SHORTLIST}) for line in pairs_of_lines[-1]]
        best = [
            max(line["tokens_per_forward"] for line in side[1:3])
            for side in zip(*pairs_of_lines, strict=True)
        ]
        ratios = ", ".join(
            f"{line['tokens_per_unit'] / best_headless:.2f}x"
            for line, best_headless in zip(listing, best, strict=True)
        )
        differ = sum(line["texts_that_differ"] for _, line in pairs_of_lines[1:])
        rows.append(
            [
                f"`{target}`",
                family,
                apart(*pairs_of_lines[0], "accuracy", 1),
                *speeds,
                ratios,
                str(differ),
            ]
        )
    head = [
        "solved, %",
        "alone",
        "self_spec",
        "draft_graph",
        "mrp_spec",
        "tokens / unit over the best without a head",
    ]
    return markdown_table(["target", "problems", *head, "texts that differ"], rows)


def sampled(folder: Path = RESULTS) -> str:
    """Tabulate targets at temperature 1: problems solved and tokens per unit, alone and drafted;
    cells hold math and code."""
    measured, settings, rows = (
        named(read_lines(folder / "tiny_sampled.jsonl")),
        sampled_settings(),
        [],
    )
    for target in TARGETS:
        target_settings = [
            setting for setting in settings if setting.get("target", setting["decoding"]) == target
        ]
        lines = [
            [measured[family, setting_name(setting)] for family in JUDGED]
            for setting in target_settings
        ]
        solved = ", ".join(interval(line, "accuracy", 1) for line in lines[0])
        units = [row_of(pair, "tokens_per_unit") for pair in lines]
        rows.append([f"`{target}`", solved, *units, str(_differ(measured, JUDGED, target))])
    head = [f"`{mode}`, K = {states}" for states in WIDTHS for mode in ("self_spec", "mrp_spec")]
    return markdown_table(["target", "solved, %", "alone", *head, "texts that differ"], rows)


def seeds(folder: Path = RESULTS) -> str:
    """Tabulate tokens per forward of heads that one recipe trained with several seeds, and of the
    embedded head.

    The spread is the largest over the least, less 1; in brackets is the half width of the first
    seed's 95 % interval.
    """
    paths = sorted(folder.glob("tiny_seed_*.jsonl"))
    trained = [named(read_lines(path, embedded=False)) for path in paths]
    measured, rows = by_setting(folder, JUDGED), []
    for target, states, family in product(TARGETS, WIDTHS, JUDGED):
        name = family, setting_name(drafted("mrp_spec", target, states))
        speeds = [lines[name]["tokens_per_forward"] for lines in trained]
        low, high = trained[0][name]["tokens_per_forward_95"]
        spread = (
            f"{max(speeds) / min(speeds) - 1:.1%} ({(high - low) / 2 / speeds[0]:.1%})".replace(
                "%", " %"
            )
        )
        differ = sum(lines[name]["texts_that_differ"] for lines in trained)
        entries = [f"{speed:.2f}" for speed in (*speeds, measured[name]["tokens_per_forward"])]
        rows.append(
            [f"`{target}`", str(states), family, *entries[:-1], spread, entries[-1], str(differ)]
        )
    head = [
        *(f"seed {path.stem.rsplit('_', 1)[1]}" for path in paths),
        "spread",
        "embedded",
        "texts that differ",
    ]
    return markdown_table(["target", "K", "problems", *head], rows)


def heldout(folder: Path = RESULTS) -> str:
    """Tabulate accuracy and cost of the modes on the model card."""
    return results_table(
        [line for family in JUDGED for line in read_lines(folder / f"tiny_heldout_{family}.jsonl")]
    )


def provenance(folder: Path = RESULTS) -> str:
    """Tabulate the commits at which each file of results was measured, and the noted digests of the
    decoding code."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        headers = [
            line for line in map(json.loads, path.read_text().splitlines()) if "benchmark" in line
        ]
        commits = ", ".join(dict.fromkeys(str(header["commit"]) for header in headers))
        noted = ", ".join(
            dict.fromkeys(header.get("deciding", "of that commit") for header in headers)
        )
        if headers:  # training logs have none
            rows.append([f"`{path.name}`", commits, noted])
    return markdown_table(["results", "commit", "deciding code"], rows)


TABLES: dict[str, Callable[..., str]] = {"undrafted": partial(frontier, drafted=False)}
for _table in (
    frontier,
    summary,
    targets,
    aims,
    break_even,
    headline,
    fresh,
    sampled,
    seeds,
    rules,
    heldout,
    provenance,
):
    TABLES[_table.__name__] = _table


def main(arguments: list[str] | None = None) -> None:
    """Run the command line: print one table."""
    parser = parser_of("tables", __doc__)
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="the folder of the measurements"
    )
    options = parser.parse_args(arguments)
    print(TABLES[options.table](options.results))


if __name__ == "__main__":
    main()
