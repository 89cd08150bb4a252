"""Print the tables in the documents from measured lines.

``python -m benchmarks.tables TABLE`` reads `benchmarks/results` (or `--results FOLDER`). From
`tiny_frontier*.jsonl`: `frontier` has accuracy and cost of every mode and setting, `undrafted`
leaves out the drafted ones; `targets` has every target, alone and drafted in every way, `summary`
its main numbers; `batches` the speed of the best drafts by batch size and device; `break_even` what
a head pass may cost; `aims` what the head gains, beside the aim; `headline` drafts of `static`
beside the released reference.
From files of their own: `sampled` (`tiny_sampled.jsonl`) targets at temperature 1; `seeds`
(`tiny_seed_*.jsonl`) heads of several training seeds; `rules` (`tiny_rules.jsonl`) every reveal
rule; `heldout` (`tiny_heldout_{math,code}.jsonl`) the model card's table. `provenance` says at
which commit each file was measured, `charges` what forwards and passes of the head are charged.

Tokens are per unit (`mrp_trainer.evaluate.cost`), the predicted time of a forward of one state, of
4B on an H200 at batch 1, unless a column says otherwise.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

from mrp_trainer.data.tasks import FAMILIES
from mrp_trainer.evaluate.cost import CHARGED, Deployment, charged, pass_units, units_per_forward
from mrp_trainer.evaluate.cost import break_even as affordable
from mrp_trainer.evaluate.roofline import PUBLISHED
from mrp_trainer.publish.card import markdown_table, results_table

from modeling_mrp.networks.picker import SHORTLIST

from .common import RESULTS, parser_of, read_lines
from .frontier import (
    JUDGED,
    STATES,
    WIDTHS,
    drafts_of,
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


def row_of(
    lines: Iterable[Line], name: str, deployment: Deployment = CHARGED, digits: int = 2
) -> str:
    """Format the number `name` of several lines, separated by commas; tokens per unit are those at
    `deployment`."""
    return ", ".join(f"{charged(line, deployment)[name]:.{digits}f}" for line in lines)


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
_OTHER_SHAPES = [Deployment(shape) for shape in PUBLISHED if shape != CHARGED.shape]
_AT_OTHER_SHAPES = [f"at {deployment.shape}" for deployment in _OTHER_SHAPES]


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
        units = [row_of(lines, "tokens_per_unit", deployment) for deployment in _OTHER_SHAPES]
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


@dataclass(frozen=True)
class Drafts:
    """Measured lines of all drafts for a target with one K.

    Attributes:
        headless: Lines of drafts without a head.
        by_head: Lines of drafts by the head.
    """

    headless: list[Line]
    by_head: list[Line]

    def best(self, deployment: Deployment = CHARGED) -> tuple[Line, Line]:
        """Return the line without a head and the one with it that have the most tokens per unit at
        `deployment`, charged there."""
        best = []
        for lines in (self.headless, self.by_head):
            at_deployment = map(partial(charged, deployment=deployment), lines)
            best.append(max(at_deployment, key=itemgetter("tokens_per_unit")))
        return best[0], best[1]


def drafts(
    measured: Mapping[tuple[str, str], Line], family: str, target: str, states: int
) -> Drafts:
    """Collect the measured lines of all drafts for a target with K = `states`."""
    headless, by_head = drafts_of(target, states)
    if states == max(WIDTHS):
        by_head.append(shortlisted(target, states, 2))
    of_target = Drafts([], [])
    for lines, ways in ((of_target.headless, headless), (of_target.by_head, by_head)):
        for way in ways:
            lines.append(measured[family, setting_name(way)])
    return of_target


def way_of(line: Line) -> str:
    """Name the way in which the drafts of a line are made: "self_spec lookup"."""
    name = str(line["decoding"])
    if "prompt_lookup_num_tokens" in line:
        name += " lookup"
    if line.get("draft_passes", 1) > 1:
        name += f" {line['draft_passes']} passes"
    return name


def over(line: Line, baseline: Line) -> str:
    """Format a line's tokens per unit over those of the same K without a head, with the paired
    interval of their tokens per forward."""
    lookup = "_lookup" if "prompt_lookup_num_tokens" in baseline else ""
    return ratio(line, baseline, f"over_{baseline['decoding']}{lookup}")


def targets(folder: Path = RESULTS) -> str:
    """Tabulate tokens per unit of each target, alone and drafted in each way, with tokens per
    forward in brackets; a way with prompt lookup, which is for `sequential`, in the cell of the way
    without it.

    The ratios are of the best drafts by the head over the best without it.
    """
    measured = by_setting(folder)
    rows = []
    cells: dict[str, str] = {}
    for family, target in product(FAMILIES, TARGETS):
        cells = {}
        ratios = []
        for states in WIDTHS:
            of_target = drafts(measured, family, target, states)
            for line in (*of_target.headless, *of_target.by_head):
                cell = f"{line['tokens_per_unit']:.2f} ({line['tokens_per_forward']:.2f})"
                title = f"{way_of(line).replace(' lookup', '')} K={states}"
                if title in cells:
                    cells[title] += f", lookup {cell}"
                else:
                    cells[title] = cell
            headless, by_head = of_target.best()
            ratios.append(f"{by_head['tokens_per_unit'] / headless['tokens_per_unit']:.2f}x")
        target_speed = measured[family, setting_name(alone(target))]["tokens_per_unit"]
        differ = str(_differ(measured, [family], target))
        rows.append(
            [f"`{target}`", family, f"{target_speed:.2f}", *cells.values(), *ratios, differ]
        )
    ratio_heads = [f"with a head over without, K={states}" for states in WIDTHS]
    return markdown_table(
        ["target", "problems", "alone", *cells, *ratio_heads, "texts that differ"], rows
    )


def charges(folder: Path = RESULTS) -> str:
    """Tabulate what forwards and head passes are charged, in units, by shape, device and batch size
    (a prediction, for which no results are read): forwards of K states, and a pass over K - 1
    states that chooses among all tokens or a shortlist."""
    rows = []
    for deployment in _CHARGED_DEPLOYMENTS:
        entries = []
        for states in (2, 4, 8, 16):
            line = {"head_per_token": 0, "states_per_forward": states}
            entries.append(
                f"{units_per_forward({**line, 'num_draft_states': states}, deployment):.2f}"
            )
        for states in WIDTHS:
            for listed in (0, SHORTLIST):
                line = {"num_draft_states": states, "draft_shortlist": listed}
                entries.append(f"{pass_units(line, deployment):.2f}")
        rows.append([deployment.shape, deployment.device, str(deployment.batch), *entries])
    head = ["shape", "device", "batch", *(f"{states} states" for states in (2, 4, 8, 16))]
    for states in WIDTHS:
        head += [f"pass, K = {states}", f"with a list, K = {states}"]
    return markdown_table(head, rows)


BATCHES = (1, 2, 4, 8, 16, 32)
BATCH_DEVICES = ("H200", "A100-80G", "RTX4090")
_CHARGED_DEPLOYMENTS = (
    *(Deployment(shape) for shape in PUBLISHED),
    *(Deployment(device=device) for device in BATCH_DEVICES[1:]),
    *(Deployment(batch=batch) for batch in (4, 8, 16)),
)


def fastest(lines: Iterable[Line], deployment: Deployment) -> tuple[float, str]:
    """Return the most tokens per unit among lines at a deployment, and a name of the way and K that
    make them."""
    best = max((charged(line, deployment) for line in lines), key=itemgetter("tokens_per_unit"))
    states = best.get("num_draft_states", 1)
    name = "alone" if states == 1 else f"{way_of(best)} K={states}"
    return best["tokens_per_unit"], name


def speed_over_alone(folder: Path, target: str, deployment: Deployment) -> list[tuple[float, str]]:
    """Return the speed over a target alone of the best drafts without a head, and of the best with
    it, at a deployment, for math; each with the name of the way and its K. Where no draft is
    faster, it is that of the target alone, 1."""
    measured = by_setting(folder, JUDGED)
    undrafted = measured["math", setting_name(alone(target))]
    slow = charged(undrafted, deployment)["tokens_per_unit"]
    headless = [undrafted]
    by_head = [undrafted]
    for states in WIDTHS:
        of_target = drafts(measured, "math", target, states)
        headless += of_target.headless
        by_head += of_target.by_head
    speeds = []
    for lines in (headless, by_head):
        speed, name = fastest(lines, deployment)
        speeds.append((speed / slow, name))
    return speeds


def batches(folder: Path = RESULTS) -> str:
    """Tabulate the speed over the target alone of the best drafts without a head and with it, by
    device and batch size, for math, with K in brackets; where no draft is faster, the target
    alone."""
    rows = []
    for target, device in product(TARGETS, BATCH_DEVICES):
        entries = []
        for batch in BATCHES:
            speeds = []
            for speed, name in speed_over_alone(folder, target, Deployment("4B", device, batch)):
                states = name.rpartition("K=")[2]
                speeds.append(f"{speed:.2f}" + (f" ({states})" if name != "alone" else ""))
            entries.append(", ".join(speeds))
        rows.append([f"`{target}`", device, *entries])
    return markdown_table(["target", "device", *(f"batch {batch}" for batch in BATCHES)], rows)


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
    """Tabulate tokens per unit of the best drafts by the head, the ratio to the best drafts without
    it at the same K, with its 95 % interval, and the aimed ratio."""
    measured = by_setting(folder)
    rows = []
    for target, states, (index, family) in product(TARGETS, WIDTHS, enumerate(JUDGED)):
        aim = AIMS[target, states][index]
        headless, by_head = drafts(measured, family, target, states).best()
        entries = []
        for line in (headless, by_head):
            entries.append(f"{way_of(line)} {line['tokens_per_unit']:.2f}")
        reached = by_head["tokens_per_unit"] >= aim * headless["tokens_per_unit"]
        rows.append(
            [
                f"`{target}`",
                str(states),
                family,
                *entries,
                over(by_head, headless),
                f"{aim}x",
                "yes" if reached else "no",
            ]
        )
    head = ["best without a head", "best with it", "ratio", "aim", "reached"]
    return markdown_table(["target", "K", "problems", *head], rows)


def break_even(folder: Path = RESULTS) -> str:
    """Tabulate the most that a head pass may cost, in percent of a unit, to match the best draft
    without a head of the same K, and in brackets what it is charged."""
    measured = by_setting(folder)
    rows = []
    for family, target in product(FAMILIES, TARGETS):
        entries = []
        for states in WIDTHS:
            of_target = drafts(measured, family, target, states)
            headless, _ = of_target.best()
            line = of_target.by_head[0]
            most = 100 * affordable(line, headless)
            entries.append(f"{most:.0f} ({100 * pass_units(line):.0f})")
        rows.append([f"`{target}`", family, *entries])
    return markdown_table(["target", "problems", *(f"K={states}" for states in WIDTHS)], rows)


def _differ(measured: dict[tuple[str, str], Line], families: Sequence[str], target: str) -> int:
    """Count the drafted texts of some families that differ from those of their target alone."""
    count = 0
    for (family, _), line in measured.items():
        if family in families and line.get("target") == target:
            count += line["texts_that_differ"]
    return count


def summary(folder: Path = RESULTS) -> str:
    """Tabulate problems solved and tokens per unit of each target, alone and with the best drafts
    without a head and with it, then the widest interval."""
    measured = by_setting(folder, JUDGED)
    rows = []
    arms = []
    for target in TARGETS:
        undrafted = lines_of(measured, alone(target))
        entries = [row_of(undrafted, "accuracy", digits=1), row_of(undrafted, "tokens_per_unit")]
        by_head: list[Line] = []
        for states in WIDTHS:
            headless: list[Line] = []
            by_head = []
            ratios = []
            for family in JUDGED:
                without, line = drafts(measured, family, target, states).best()
                headless.append(without)
                by_head.append(line)
                ratios.append(f"{line['tokens_per_unit'] / without['tokens_per_unit']:.2f}")
                for end in line["tokens_per_unit_95"]:
                    arms.append(abs(end / line["tokens_per_unit"] - 1))
            entries += [row_of(lines, "tokens_per_unit") for lines in (headless, by_head)]
            entries.append(", ".join(ratios))
        # of the last setting, drafts by the head with the largest K
        entries += [row_of(by_head, "tokens_per_unit", deployment) for deployment in _OTHER_SHAPES]
        entries.append(row_of(by_head, "tokens_per_forward"))
        rows.append([f"`{target}`", *entries, str(_differ(measured, JUDGED, target))])
    head = ["target", "solved, %", "alone"]
    for states in WIDTHS:
        head += [f"without a head, K = {states}", f"with it, K = {states}", "ratio"]
    table = markdown_table(
        [*head, *_AT_OTHER_SHAPES, "a forward", "texts that differ"],
        rows,
    )
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
            setting = drafted(mode, "static", states, **options)
            if mode == "mrp_spec":
                setting = shortlisted("static", states, 1)
            lines = [measured[family, setting_name(setting)] for family in FAMILIES]
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
    head = ["target", "solved, %", "alone"]
    for states in WIDTHS:
        head += [f"`self_spec`, K = {states}", f"`mrp_spec`, K = {states}"]
    return markdown_table([*head, "texts that differ"], rows)


def seeds(folder: Path = RESULTS) -> str:
    """Tabulate tokens per forward of heads that one recipe trained with several seeds, and of the
    embedded head.

    The spread is the largest over the least, less 1; in brackets is the half width of the first
    seed's 95 % interval.
    """
    paths = sorted(folder.glob("tiny_seed_*.jsonl"))
    trained = [named(read_lines(path, current=False)) for path in paths]
    measured = by_setting(folder, JUDGED)
    rows = []
    for target, states, family in product(TARGETS, WIDTHS, JUDGED):
        name = family, setting_name(drafted("mrp_spec", target, states))
        by_embedded = measured[family, setting_name(shortlisted(target, states, 1))]
        speeds = [lines[name]["tokens_per_forward"] for lines in trained]
        low, high = trained[0][name]["tokens_per_forward_95"]
        spread = (
            f"{max(speeds) / min(speeds) - 1:.1%} ({(high - low) / 2 / speeds[0]:.1%})".replace(
                "%", " %"
            )
        )
        differ = sum(lines[name]["texts_that_differ"] for lines in trained)
        entries = [f"{speed:.2f}" for speed in speeds]
        embedded = f"{by_embedded['tokens_per_forward']:.2f}"
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
    batches,
    charges,
    aims,
    break_even,
    headline,
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
