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
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    lines: list[Line] = []
    for path in sorted(folder.glob("tiny_frontier*.jsonl")):
        lines += map(charged, read_lines(path))
    return sorted(lines, key=lambda line: FAMILIES.index(line["family"]))


def named(lines: Iterable[Line]) -> dict[tuple[str, str], Line]:
    """Return lines by (family, setting name); of lines of the same setting, the last one."""
    return {(line["family"], setting_name(line)): line for line in lines}


def by_setting(folder: Path, families: Sequence[str] = FAMILIES) -> dict[tuple[str, str], Line]:
    """Return the frontier's lines of some families, by (family, setting name)."""
    return named(line for line in frontier_lines(folder) if line["family"] in families)


def lines_of(measured: Mapping[tuple[str, str], Line], setting: Line) -> list[Line]:
    """Return the measured lines of a setting, a line for each family in `JUDGED`."""
    return [measured[family, setting_name(setting)] for family in JUDGED]


def interval(line: Line, name: str, digits: int) -> str:
    """Format the number `name` of a line with its 95 % interval."""
    return "{:.{d}f} ({:.{d}f}-{:.{d}f})".format(line[name], *line[f"{name}_95"], d=digits)


def solved_and_speed(lines: Iterable[Line]) -> list[str]:
    """Format accuracy and tokens per unit of each line, two cells each."""
    entries = []
    for line in lines:
        entries.append(interval(line, "accuracy", 1))
        entries.append(interval(line, "tokens_per_unit", 2))
    return entries


def row_of(lines: Iterable[Line], name: str, shape: str = CHARGED, digits: int = 2) -> str:
    """Format the number `name` of several lines, separated by commas; head passes are charged as at
    `shape`."""
    return ", ".join(f"{charged(line, shape)[name]:.{digits}f}" for line in lines)


def ratio(line: Line, baseline: Line, name: str) -> str:
    """Format a line's tokens per unit over another line's, with its 95 % interval.

    `name` is the line's field with the ratio of the two lines' tokens per forward.
    """
    value = line["tokens_per_unit"] / baseline["tokens_per_unit"]
    low, high = (end * value / line[name] for end in line[f"{name}_95"])
    return f"{value:.2f}x, {low:.2f}-{high:.2f}"


SOLVED_AND_SPEED: list[str] = []
for _family in JUDGED:
    SOLVED_AND_SPEED += [f"{_family} %", f"{_family}: tokens / unit"]
_OTHER_SHAPES = [shape for shape in HEAD_SHARES if shape != CHARGED]
_AT_OTHER_SHAPES = [f"at {shape}" for shape in _OTHER_SHAPES]


def frontier(folder: Path = RESULTS, drafted: bool = True) -> str:
    """Tabulate accuracy and tokens per unit, with 95 % intervals, of every setting, or only of
    settings without drafts.

    A star marks the settings of the frontier (`on_frontier`).
    """
    measured = by_setting(folder, JUDGED)
    by_family: dict[str, list[Line]] = {}
    by_name: dict[str, list[Line]] = {}
    for (family, name), line in measured.items():
        by_family.setdefault(family, []).append(line)
        by_name.setdefault(name, []).append(line)
    rows = []
    for name, lines in by_name.items():
        if not drafted and "target" in lines[0]:
            continue
        entries = []
        for family in JUDGED:
            if (family, name) not in measured:
                entries += ["", ""]
                continue
            line = measured[family, name]
            solved, speed = solved_and_speed([line])
            star = " *" if on_frontier(line, by_family[family]) else ""
            entries += [solved, speed + star]
        units = [row_of(lines, "tokens_per_unit", shape) for shape in _OTHER_SHAPES]
        differ = [str(line["texts_that_differ"]) for line in lines if "texts_that_differ" in line]
        rows.append(
            [
                name,
                *entries,
                *units,
                row_of(lines, "tokens_per_forward"),
                row_of(lines, "head_per_token"),
                ", ".join(differ),
            ]
        )
    head = [
        *_AT_OTHER_SHAPES,
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
        "self_spec": drafted("self_spec", target, states),
        "draft_graph": drafted("draft_graph", target, states),
        "mrp_spec": drafted("mrp_spec", target, states),
        "mrp_spec 2 passes": drafted("mrp_spec", target, states, draft_passes=2),
    }


def _draft_lines(
    measured: dict[tuple[str, str], Line], family: str, target: str, states: int
) -> dict[str, Line]:
    """Return the measured lines of the settings in `draft_settings`, by name."""
    lines = {}
    for name, setting in draft_settings(target, states).items():
        line = measured.get((family, setting_name(setting)))
        if line is not None:
            lines[name] = line
    return lines


def _headless(drafts: dict[str, Line]) -> Line:
    """Return the line with the most tokens per unit among drafts without a head."""
    headless = [line for line in drafts.values() if not line["head_per_token"]]
    return max(headless, key=lambda line: line["tokens_per_unit"])


def _with_head(drafts: dict[str, Line]) -> list[Line]:
    """Return the lines of drafts with a head."""
    return [line for line in drafts.values() if line["head_per_token"]]


def targets(folder: Path = RESULTS) -> str:
    """Tabulate tokens per unit of each target, alone and drafted, with tokens per forward in
    brackets.

    The ratios are of `mrp_spec` with one pass over the best draft without a head.
    """
    measured = by_setting(folder)
    rows = []
    for family, target in product(FAMILIES, TARGETS):
        entries = []
        ratios = []
        for states in (4, 8):
            drafts = _draft_lines(measured, family, target, states)
            for line in drafts.values():
                entry = f"{line['tokens_per_unit']:.2f}"
                if line["head_per_token"]:
                    entry += f" ({line['tokens_per_forward']:.2f})"
                entries.append(entry)
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
    head = []
    ratios = []
    for states in (4, 8):
        for name in _draft_lines(measured, "math", "static", states):
            head.append(f"{name} K={states}")
        ratios.append(f"mrp_spec over the best without a head, K={states}")
    return markdown_table(
        ["target", "problems", "alone", *head, *ratios, "texts that differ"], rows
    )


# By target and K, the aims for math and code: tokens per unit over those of the best draft without
# a head.
AIMS = {
    **{(target, 4): (1.05, 1.05) for target in TARGETS},
    ("dynamic", 4): (1.3, 1.3),
    ("static", 8): (1.35, 1.35),
    ("sequential", 8): (1.2, 1.3),
    ("dynamic", 8): (1.4, 1.4),
    ("entropy_bound", 8): (1.4, 1.4),
}


def aims(folder: Path = RESULTS) -> str:
    """Tabulate tokens per unit of `mrp_spec`, the ratio to the best draft without a head at the
    same K, and the aimed ratio.

    Passes are charged as with a shortlist; columns are by number of passes, with 95 % intervals.
    """
    measured = by_setting(folder)
    rows = []
    for target, states, (index, family) in product(TARGETS, WIDTHS, enumerate(JUDGED)):
        lines = _draft_lines(measured, family, target, states)
        aim = AIMS[target, states][index]
        best = _headless(lines)
        field = f"over_{best['decoding']}"
        entries = []
        speeds = []
        for line in _with_head(lines):
            draft = charged({**line, "draft_shortlist": SHORTLIST})
            speeds.append(draft["tokens_per_unit"])
            entries.append(f"{draft['tokens_per_unit']:.2f} ({ratio(draft, best, field)})")
        entries += [""] * (2 - len(entries))
        reached = max(speeds) >= aim * best["tokens_per_unit"]
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
    measured = by_setting(folder)
    rows = []
    for family, target in product(FAMILIES, TARGETS):
        entries = []
        for states in WIDTHS:
            drafts = _draft_lines(measured, family, target, states)
            for line in _with_head(drafts):
                entries.append(f"{100 * affordable(line, _headless(drafts)):.0f}")
        rows.append([f"`{target}`", family, *entries])
    return markdown_table(["target", "problems", "K=4", "K=8", "K=8, two passes"], rows)


def _differ(measured: dict[tuple[str, str], Line], families: Sequence[str], target: str) -> int:
    """Count the drafted texts of some families that differ from those of their target alone."""
    count = 0
    for (family, _), line in measured.items():
        if family in families and line.get("target") == target:
            count += line["texts_that_differ"]
    return count


# Titles of columns, and the settings whose numbers they hold: K = 4, then K = 8.
_BOTH_DRAFTERS: list[str] = []
for _states in WIDTHS:
    _BOTH_DRAFTERS += [f"`self_spec`, K = {_states}", f"`mrp_spec`, K = {_states}"]


def _drafted_by_both(target: str) -> list[Line]:
    settings = []
    for states in WIDTHS:
        settings.append(drafted("self_spec", target, states))
        settings.append(drafted("mrp_spec", target, states))
    return settings


def summary(folder: Path = RESULTS) -> str:
    """Tabulate problems solved and tokens per unit of each target, alone and drafted, then the
    widest interval."""
    measured = by_setting(folder)
    rows = []
    arms = []
    for target in TARGETS:
        solved = row_of(lines_of(measured, alone(target)), "accuracy", digits=1)
        units = []
        for setting in (alone(target), *_drafted_by_both(target)):
            lines = lines_of(measured, setting)
            units.append(row_of(lines, "tokens_per_unit"))
            for line in lines:
                for end in line["tokens_per_unit_95"]:
                    arms.append(abs(end / line["tokens_per_unit"] - 1))
        # of the last setting, `mrp_spec` with the largest K
        other_shapes = [row_of(lines, "tokens_per_unit", shape) for shape in _OTHER_SHAPES]
        plain = row_of(lines, "tokens_per_forward")
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
    head = ["target", "solved, %", "alone", *_BOTH_DRAFTERS, *_AT_OTHER_SHAPES, "a forward"]
    table = markdown_table([*head, "texts that differ"], rows)
    return (
        f"{table}\n"
        "\n"
        "The 95 % intervals of tokens per unit extend at most "
        f"{100 * max(arms):.0f} % to either side."
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
    measured = by_setting(folder)
    rows = []
    for states in STATES:
        released = setting_name(drafted("released", "static", states, head_prefix=False))
        for title, mode, options in _BESIDE_RELEASED:
            name = setting_name(drafted(mode, "static", states, **options))
            lines = [measured[family, name] for family in FAMILIES]
            entries = []
            for family, line in zip(FAMILIES, lines, strict=True):
                entry = f"{line['tokens_per_unit']:.2f}"
                if "over_released" in line:
                    entry += f" ({ratio(line, measured[family, released], 'over_released')})"
                entries.append(entry)
            rows.append([f"{title} K={states}", *entries, row_of(lines, "tokens_per_forward")])
    return markdown_table(["mode", *FAMILIES, f"tokens / forward ({', '.join(FAMILIES)})"], rows)


def rules(folder: Path = RESULTS) -> str:
    """Tabulate the problems that each reveal rule solves, with 95 % intervals, and its tokens per
    unit, alone and drafted."""
    measured = named(read_lines(folder / "tiny_rules.jsonl"))
    rows = []
    for target in RULES:
        lines = lines_of(measured, alone(target))
        solved = [interval(line, "accuracy", 1) for line in lines]
        units = [row_of(lines, "tokens_per_unit")]
        differ = 0
        for states in WIDTHS:
            lines = lines_of(measured, drafted("mrp_spec", target, states, draft_passes=1))
            units.append(row_of(lines, "tokens_per_unit"))
            differ += sum(line["texts_that_differ"] for line in lines)
        rows.append([f"`{target}`", *solved, *units, str(differ)])
    solved_head = [f"{family} %" for family in JUDGED]
    drafted_head = [f"K = {states}" for states in WIDTHS]
    head = ["rule", *solved_head, "alone", *drafted_head, "texts that differ"]
    return markdown_table(head, rows)


def fresh(folder: Path = RESULTS) -> str:
    """Tabulate the frontier's numbers beside those of 2,000 fresh problems, whose seed is in the
    file of their lines.

    The number in brackets is the difference divided by its standard error; tokens are per forward.
    """
    measured = by_setting(folder, JUDGED)
    rows = []
    fresh_lines: dict[tuple[str, str], Line] = {}
    for family in JUDGED:
        fresh_lines |= named(read_lines(folder / f"tiny_fresh_{family}.jsonl"))

    def compare(old: Line, new: Line, name: str, digits: int) -> str:
        errors = [(high - low) / 3.92 for low, high in (old[f"{name}_95"], new[f"{name}_95"])]
        text = f"{old[name]:.{digits}f}, {new[name]:.{digits}f}"
        if any(errors):
            text += f" ({(new[name] - old[name]) / hypot(*errors):+.1f})"
        return text

    for target, family in product(TARGETS, JUDGED):
        settings = [
            (alone(target), alone(target)),
            (drafted("self_spec", target, 8), drafted("self_spec", target, 8)),
            (drafted(GRAPH, target, 8), graph_of(target, 8)),
            (drafted("mrp_spec", target, 8), shortlisted(target, 8, 1)),
        ]
        old_lines = []
        new_lines = []
        speeds = []
        for old, new in settings:
            old_lines.append(measured[family, setting_name(old)])
            new_lines.append(fresh_lines[family, setting_name(new)])
            speeds.append(compare(old_lines[-1], new_lines[-1], "tokens_per_forward", 2))
        ratios = []
        for _, *headless, by_head in (old_lines, new_lines):
            best = max(line["tokens_per_forward"] for line in headless)
            speed = charged({**by_head, "draft_shortlist": SHORTLIST})["tokens_per_unit"]
            ratios.append(f"{speed / best:.2f}x")
        differ = sum(line["texts_that_differ"] for line in new_lines[1:])
        solved = compare(old_lines[0], new_lines[0], "accuracy", 1)
        rows.append([f"`{target}`", family, solved, *speeds, ", ".join(ratios), str(differ)])
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
    measured = named(read_lines(folder / "tiny_sampled.jsonl"))
    lines_of_target: dict[str, list[list[Line]]] = {}
    for setting in sampled_settings():
        target = setting["target"] if "target" in setting else setting["decoding"]
        lines_of_target.setdefault(target, []).append(lines_of(measured, setting))
    rows = []
    for target in TARGETS:
        settings_lines = lines_of_target[target]
        solved = ", ".join(interval(line, "accuracy", 1) for line in settings_lines[0])
        units = [row_of(lines, "tokens_per_unit") for lines in settings_lines]
        rows.append([f"`{target}`", solved, *units, str(_differ(measured, JUDGED, target))])
    head = ["target", "solved, %", "alone", *_BOTH_DRAFTERS, "texts that differ"]
    return markdown_table(head, rows)


def seeds(folder: Path = RESULTS) -> str:
    """Tabulate tokens per forward of heads that one recipe trained with several seeds, and of the
    embedded head.

    The spread is the largest over the least, less 1; in brackets is the half width of the first
    seed's 95 % interval.
    """
    paths = sorted(folder.glob("tiny_seed_*.jsonl"))
    trained = [named(read_lines(path, embedded=False)) for path in paths]
    measured = by_setting(folder, JUDGED)
    rows = []
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
        entries = [f"{speed:.2f}" for speed in speeds]
        embedded = f"{measured[name]['tokens_per_forward']:.2f}"
        rows.append([f"`{target}`", str(states), family, *entries, spread, embedded, str(differ)])
    head = [f"seed {path.stem.rsplit('_', 1)[1]}" for path in paths]
    head += ["spread", "embedded", "texts that differ"]
    return markdown_table(["target", "K", "problems", *head], rows)


def heldout(folder: Path = RESULTS) -> str:
    """Tabulate accuracy and cost of the modes on the model card."""
    lines = []
    for family in JUDGED:
        lines += read_lines(folder / f"tiny_heldout_{family}.jsonl")
    return results_table(lines)


def provenance(folder: Path = RESULTS) -> str:
    """Tabulate the commits at which each file of results was measured, and the noted digests of the
    decoding code."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        # dictionaries, to drop repetitions and keep the order
        commits: dict[str, None] = {}
        digests: dict[str, None] = {}
        for line in map(json.loads, path.read_text().splitlines()):
            if "benchmark" in line:
                commits[str(line["commit"])] = None
                digests[line.get("deciding", "of that commit")] = None
        if commits:  # training logs have no header
            rows.append([f"`{path.name}`", ", ".join(commits), ", ".join(digests)])
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
