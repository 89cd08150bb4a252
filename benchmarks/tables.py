"""Prints the tables that the documents quote, from the lines that measurements left.

``python -m benchmarks.tables TABLE`` reads `benchmarks/results` (or `--results FOLDER`). From `tiny_frontier*.jsonl`:
`frontier` accuracy and cost of every mode and setting, `undrafted` without the drafted ones; `targets` every target, alone and
drafted, and `summary` the same in short; `headline` drafts of `static` beside the released reference; `eager` what `mrp_remask`
makes of eager reveals. `rules` every reveal rule, from `tiny_rules.jsonl`; `heldout` the card's, from
`tiny_heldout_{math,code}.jsonl`; `novel` and `published_head` from the files of these names behind `tiny_`; `turns` from
`turns.jsonl`.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from mrp_trainer.data.tasks import FAMILIES
from mrp_trainer.publish.card import markdown_table, results_table

from .common import RESULTS, parser_of, read_lines
from .frontier import JUDGED, RULE_STATES, STATES, on_frontier, setting_name
from .targets import RULES, TARGETS, alone, drafted

Line = dict[str, Any]
EAGER_TAUS = (0.5, 0.6)


def frontier_lines(folder: Path = RESULTS) -> list[Line]:
    """Read the lines of all files of the frontier, math before code before source."""
    lines = [line for path in sorted(folder.glob("tiny_frontier*.jsonl")) for line in read_lines(path)]
    return sorted(lines, key=lambda line: FAMILIES.index(line["family"]))


def by_setting(folder: Path, families: Sequence[str] = FAMILIES) -> dict[tuple[str, str], Line]:
    """Give the frontier's lines by family and name of the setting; the last where one was measured again."""
    lines = frontier_lines(folder)
    return {(line["family"], setting_name(line)): line for line in lines if line["family"] in families}


def interval(line: Line, name: str, digits: int) -> str:
    """Show a number with its 95 % interval."""
    return "{:.{d}f} ({:.{d}f}-{:.{d}f})".format(line[name], *line[f"{name}_95"], d=digits)


def solved_and_speed(lines: Iterable[Line]) -> list[str]:
    """Show accuracy and tokens per forward of each line, two cells each."""
    return [cell for line in lines for cell in (interval(line, "accuracy", 1), interval(line, "tokens_per_forward", 2))]


def ratio(line: Line, name: str) -> str:
    """Show a ratio with its 95 % interval."""
    return "{:.2f}x, {:.2f}-{:.2f}".format(line[name], *line[f"{name}_95"])


SOLVED_AND_SPEED = [title for family in JUDGED for title in (f"{family} %", f"{family}: tokens / forward")]


def frontier(folder: Path = RESULTS, drafted: bool = True) -> str:
    """Accuracy and tokens per forward of every setting, with 95 % intervals; a star where none is better at both."""
    of, rows = by_setting(folder, JUDGED), []
    best = {key for key, line in of.items() if on_frontier(line, [of[other] for other in of if other[0] == key[0]])}
    for name in dict.fromkeys(name for _, name in of):
        made = [of[family, name] for family in JUDGED if (family, name) in of]
        if not drafted and "target" in made[0]:
            continue
        cells = []
        for family in JUDGED:
            shown = solved_and_speed([of[family, name]]) if (family, name) in of else ["", ""]
            cells += [shown[0], shown[1] + " *" * ((family, name) in best)]
        differ = ", ".join(str(line["texts_that_differ"]) for line in made if "texts_that_differ" in line)
        rows.append([name, *cells, ", ".join(f"{line['head_per_token']:.2f}" for line in made), differ])
    pair = ", ".join(JUDGED)
    return markdown_table(["mode", *SOLVED_AND_SPEED, f"head / token ({pair})", f"texts that differ ({pair})"], rows)


def undrafted(folder: Path = RESULTS) -> str:
    """The frontier's targets alone, and what changes the text of a target."""
    return frontier(folder, drafted=False)


# Mode, K and head passes a round, where a target is drafted.
_TARGET_COLUMNS = (("self_spec", 4), ("draft_graph", 4), ("mrp_spec", 4), ("self_spec", 8), ("draft_graph", 8), ("mrp_spec", 8))


def targets(folder: Path = RESULTS) -> str:
    """Tokens per forward of each target, alone and drafted; over its own in brackets, and how many texts differ from it."""
    of, rows = by_setting(folder), []
    for family, target in product(FAMILIES, TARGETS):
        ways = [drafted(mode, target, states) for mode, states in _TARGET_COLUMNS]
        ways.append(drafted("mrp_spec", target, 8, draft_passes=2))
        made = [of[family, setting_name(way)] for way in ways]
        drafts = [f"{line['tokens_per_forward']:.2f} ({line['over_target']:.2f}x)" for line in made]
        heads = f"{made[5]['head_per_token']:.2f}, {made[6]['head_per_token']:.2f}"
        own = of[family, setting_name(alone(target))]["tokens_per_forward"]
        rows.append([f"`{target}`", family, f"{own:.2f}", *drafts, heads, str(_differ(of, [family], target))])
    head = [f"{mode} K={states}" for mode, states in _TARGET_COLUMNS]
    last = ["mrp_spec K=8, 2 head passes", "its head passes a token", "texts that differ"]
    return markdown_table(["target", "problems", "alone", *head, *last], rows)


def _differ(of: dict[tuple[str, str], Line], families: Sequence[str], target: str) -> int:
    """Count the texts of all drafts of a target that differ from its own."""
    drafts = (line for (family, _), line in of.items() if family in families and line.get("target") == target)
    return sum(line["texts_that_differ"] for line in drafts)


def summary(folder: Path = RESULTS) -> str:
    """Problems that each target solves and its tokens per forward, alone and drafted: math and code in one cell."""
    ways: tuple[Callable[[str], Line], ...] = (
        alone,
        partial(drafted, "self_spec", states=4),
        partial(drafted, "mrp_spec", states=4),
        partial(drafted, "mrp_spec", states=8, draft_passes=2),
    )
    of, rows = by_setting(folder), []
    for target in TARGETS:
        made = [[of[family, setting_name(way(target))] for family in JUDGED] for way in ways]
        pairs = [", ".join(f"{line['tokens_per_forward']:.2f}" for line in pair) for pair in made]
        solved = ", ".join(f"{line['accuracy']:.1f}" for line in made[0])
        rows.append([f"`{target}`", solved, *pairs, str(_differ(of, JUDGED, target))])
    head = ["alone", "`self_spec`, K = 4", "`mrp_spec`, K = 4", "`mrp_spec`, K = 8, two head passes"]
    return markdown_table(["target", "solved, %", *head, "texts that differ"], rows)


_BESIDE_RELEASED: tuple[tuple[str, str, dict[str, bool]], ...] = (
    ("released reference", "released", {"head_prefix": False}),
    ("released reference with a head prefix", "released", {"head_prefix": True}),
    ("self_spec", "self_spec", {}),
    ("mrp_spec", "mrp_spec", {}),
)


def headline(folder: Path = RESULTS) -> str:
    """Tokens per forward of drafted `static` by family; over the released reference at the same K in brackets."""
    of, rows = by_setting(folder), []
    for states, (title, mode, more) in product(STATES, _BESIDE_RELEASED):
        made = [of[family, setting_name(drafted(mode, "static", states, **more))] for family in FAMILIES]
        ratios = [f" ({ratio(line, 'over_released')})" if "over_released" in line else "" for line in made]
        speeds = [f"{line['tokens_per_forward']:.2f}{over}" for line, over in zip(made, ratios, strict=True)]
        rows.append([f"{title} K={states}", *speeds])
    return markdown_table(["mode", *FAMILIES], rows)


def eager(folder: Path = RESULTS) -> str:
    """`static`, and `dynamic` beside `mrp_remask` where eager reveals are often wrong; 95 % intervals in brackets."""
    dynamic: list[Line] = [{"decoding": "dynamic", "confidence_threshold": tau} for tau in EAGER_TAUS]
    again = [{**one, "decoding": "mrp_remask", "remask_rule": "reread"} for one in dynamic]
    names, of = map(setting_name, [alone("static"), *dynamic, *again]), by_setting(folder)
    rows = [[name, *solved_and_speed(of[family, name] for family in JUDGED)] for name in names]
    return markdown_table(["mode", *SOLVED_AND_SPEED], rows)


def rules(folder: Path = RESULTS) -> str:
    """Problems that each reveal rule solves, with 95 % intervals, and its tokens per forward, alone and drafted: math, code."""
    of, rows = {(line["family"], setting_name(line)): line for line in read_lines(folder / "tiny_rules.jsonl")}, []
    for target in RULES:
        ways = [alone(target), *(drafted("mrp_spec", target, states, draft_passes=1) for states in RULE_STATES)]
        made = [[of[family, setting_name(way)] for family in JUDGED] for way in ways]
        pairs = [", ".join(f"{line['tokens_per_forward']:.2f}" for line in pair) for pair in made]
        differ = sum(line["texts_that_differ"] for pair in made[1:] for line in pair)
        rows.append([f"`{target}`", *(interval(line, "accuracy", 1) for line in made[0]), *pairs, str(differ)])
    head = [*(f"{family} %" for family in JUDGED), "alone", *(f"K = {states}" for states in RULE_STATES)]
    return markdown_table(["rule", *head, "texts that differ"], rows)


def heldout(folder: Path = RESULTS) -> str:
    """Accuracy and cost of the modes that the card shows."""
    return results_table([line for family in JUDGED for line in read_lines(folder / f"tiny_heldout_{family}.jsonl")])


def novel(folder: Path = RESULTS) -> str:
    """Problems that ask for what training never asked for beside the others, with 95 % intervals."""
    cells: dict[tuple[str, str], list[str]] = {}
    for line in read_lines(folder / "tiny_novel.jsonl"):
        cells.setdefault((line["family"], line["mode"]), []).extend(solved_and_speed([line]))
    head = [f"{part}: {what}" for part in ("novel", "known") for what in ("%", "tokens / forward")]
    return markdown_table(["problems", "mode", *head], [[family, f"`{mode}`", *of] for (family, mode), of in cells.items()])


def published_head(folder: Path = RESULTS) -> str:
    """Tokens per forward of a head trained by the published recipe and of the embedded one, in both loops; in brackets over
    the first of each row, how many times as many."""
    rows: dict[tuple[str, int], dict[tuple[str, str], Line]] = {}
    for line in read_lines(folder / "tiny_published_head.jsonl"):
        of = rows.setdefault((line["family"], line["num_draft_states"]), {})
        of[line["decoding"], line["head"]] = line
    columns = list(product(("released", "mrp_spec"), ("published", "embedded")))
    cells = []
    for (family, states), of in sorted(rows.items(), key=lambda row: (FAMILIES.index(row[0][0]), row[0][1])):
        first, *others = (of[column] for column in columns)
        ratios = (f"{line['tokens_per_forward']:.2f} ({ratio(line, 'over_published')})" for line in others)
        differ = sum(line["texts_that_differ"] for line in of.values())
        cells.append([family, str(states), interval(first, "tokens_per_forward", 2), *ratios, str(differ)])
    head = [f"{loop}, {head} head" for loop, head in columns]
    return markdown_table(["family", "K", *head, "texts that differ"], cells)


def turns(folder: Path = RESULTS) -> str:
    """Speed of each way to draft over the target alone, by rows: the median, and the least and most in brackets."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for line in read_lines(folder / "turns.jsonl"):
        if (over := line.get("over_first")) is not None:
            shown = "{:.2f}x ({:.2f}-{:.2f})".format(over["median"], *over["range"])
            cells.setdefault((str(line["rows"]), line["states"]), {})[line["target"]] = shown
    columns = list(dict.fromkeys(target for row in cells.values() for target in row))
    rows = [[*row, *(of.get(column, "") for column in columns)] for row, of in cells.items()]
    return markdown_table(["rows", "K", *(f"`{target}`" for target in columns)], rows)


TABLES: dict[str, Callable[[Path], str]] = {
    table.__name__: table
    for table in (frontier, undrafted, summary, targets, headline, eager, rules, heldout, novel, published_head, turns)
}


def main(arguments: list[str] | None = None) -> None:
    """Command line: prints one table."""
    parser = parser_of("tables", __doc__)
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the measurements")
    options = parser.parse_args(arguments)
    print(TABLES[options.table](options.results))


if __name__ == "__main__":
    main()
