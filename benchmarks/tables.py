"""Prints the tables that the documents quote, from the lines that measurements left.

``python -m benchmarks.tables TABLE`` reads `benchmarks/results` (or `--results FOLDER`). From `tiny_frontier*.jsonl`:
`frontier` accuracy and cost of every mode and setting; `targets` every target, alone and drafted, and `summary` the same in
short; `headline` drafts of `static` beside the released reference; `eager` and `recovered` what `mrp_remask` makes of eager
reveals. `heldout` the card's, from `tiny_heldout_{math,code}.jsonl`; `sweep`, `novel`, `head_prefix`, `published_head`,
`retrained`, `departures` and `low_precision` from the files of these names behind `tiny_`; `cost` from `cost_model.jsonl`;
`auto_clock`; `compiled`.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from mrp_trainer.data.tasks import FAMILIES
from mrp_trainer.publish.card import markdown_table as _markdown
from mrp_trainer.publish.card import results_table

from .common import RESULTS, read_lines
from .frontier import JUDGED, STATES, on_frontier, setting_name
from .targets import TARGETS, alone, drafted

Line = dict[str, Any]
EAGER_TAUS = (0.5, 0.6)


def frontier_lines(folder: Path = RESULTS) -> list[Line]:
    """The lines of all files of the frontier, math before code before source."""
    lines = [line for path in sorted(folder.glob("tiny_frontier*.jsonl")) for line in read_lines(path)]
    return sorted(lines, key=lambda line: FAMILIES.index(line["family"]))


def _with_interval(line: Line, name: str, digits: int) -> str:
    return "{:.{d}f} ({:.{d}f}-{:.{d}f})".format(line[name], *line[f"{name}_95"], d=digits)


def frontier(folder: Path = RESULTS) -> str:
    """Accuracy and tokens per forward of every setting, with 95 % intervals; a star where none is better at both."""
    families: dict[str, list[Line]] = {}
    rows: dict[str, dict[str, Line]] = {}
    for line in (line for line in frontier_lines(folder) if line["family"] in JUDGED):
        families.setdefault(line["family"], []).append(line)
        rows.setdefault(setting_name(line), {})[line["family"]] = line
    cells = []
    for name, by in rows.items():
        row = [name]
        for family, lines in families.items():
            if (one := by.get(family)) is None:
                row += ["", ""]
                continue
            speed = _with_interval(one, "tokens_per_forward", 2)
            row += [_with_interval(one, "accuracy", 1), speed + (" *" if on_frontier(one, lines) else "")]
        row.append(", ".join(f"{by[family]['head_per_token']:.2f}" for family in families if family in by))
        differ = [by[family].get("texts_that_differ") for family in families if family in by]
        cells.append([*row, "" if None in differ else ", ".join(map(str, differ))])
    head = [title for family in families for title in (f"{family} %", f"{family}: tokens / forward")]
    pair = ", ".join(families)
    return _markdown(["mode", *head, f"head / token ({pair})", f"texts that differ ({pair})"], cells)


def _line_of(lines: Sequence[Line], setting: Line) -> Line:
    """The one line of a setting."""
    (line,) = (line for line in lines if setting_name(line) == setting_name(setting))
    return line


# Mode, K and head passes a round, where a target is drafted.
_TARGET_COLUMNS = (("self_spec", 4), ("draft_graph", 4), ("mrp_spec", 4), ("self_spec", 8), ("draft_graph", 8), ("mrp_spec", 8))


def targets(folder: Path = RESULTS) -> str:
    """Tokens per forward of each target, alone and drafted; over its own in brackets, and how many texts differ from it."""
    cells = []
    for family, target in product(FAMILIES, TARGETS):
        lines = [line for line in frontier_lines(folder) if line["family"] == family]
        ways = [drafted(mode, target, states) for mode, states in _TARGET_COLUMNS]
        ways.append(drafted("mrp_spec", target, 8, draft_passes=2))
        made = [_line_of(lines, way) for way in ways]
        drafts = [f"{line['tokens_per_forward']:.2f} ({line['over_target']:.2f}x)" for line in made]
        heads = f"{made[5]['head_per_token']:.2f}, {made[6]['head_per_token']:.2f}"
        differ = sum(line["texts_that_differ"] for line in lines if line.get("target") == target)
        own = _line_of(lines, alone(target))["tokens_per_forward"]
        cells.append([f"`{target}`", family, f"{own:.2f}", *drafts, heads, str(differ)])
    head = [f"{mode} K={states}" for mode, states in _TARGET_COLUMNS]
    last = ["mrp_spec K=8, 2 head passes", "its head passes a token", "texts that differ"]
    return _markdown(["target", "problems", "alone", *head, *last], cells)


def summary(folder: Path = RESULTS) -> str:
    """Problems that each target solves and its tokens per forward, alone and drafted: math and code in one cell."""
    ways: tuple[Callable[[str], Line], ...] = (
        alone,
        partial(drafted, "self_spec", states=4),
        partial(drafted, "mrp_spec", states=4),
        partial(drafted, "mrp_spec", states=8, draft_passes=2),
    )
    of = {family: [line for line in frontier_lines(folder) if line["family"] == family] for family in JUDGED}
    cells = []
    for target in TARGETS:
        made = [[_line_of(lines, way(target)) for lines in of.values()] for way in ways]
        pairs = [[f"{line['tokens_per_forward']:.2f}" for line in pair] for pair in made]
        solved = [f"{line['accuracy']:.1f}" for line in made[0]]
        differ = sum(line["texts_that_differ"] for lines in of.values() for line in lines if line.get("target") == target)
        cells.append([f"`{target}`", *(", ".join(pair) for pair in (solved, *pairs)), str(differ)])
    head = ["alone", "`self_spec`, K = 4", "`mrp_spec`, K = 4", "`mrp_spec`, K = 8, two head passes"]
    return _markdown(["target", "solved, %", *head, "texts that differ"], cells)


_BESIDE_RELEASED: tuple[tuple[str, str, dict[str, bool]], ...] = (
    ("released reference", "released", {"head_prefix": False}),
    ("released reference with a head prefix", "released", {"head_prefix": True}),
    ("self_spec", "self_spec", {}),
    ("mrp_spec", "mrp_spec", {}),
)


def headline(folder: Path = RESULTS) -> str:
    """Tokens per forward of drafted `static` by family; over the released reference at the same K in brackets."""
    lines = frontier_lines(folder)
    rows = []
    for states, (title, mode, more) in product(STATES, _BESIDE_RELEASED):
        of = [
            _line_of([line for line in lines if line["family"] == family], drafted(mode, "static", states, **more))
            for family in FAMILIES
        ]
        ratios = [f" ({_ratio(line, 'over_released')})" if "over_released" in line else "" for line in of]
        speeds = [f"{line['tokens_per_forward']:.2f}{ratio}" for line, ratio in zip(of, ratios, strict=True)]
        rows.append([f"{title} K={states}", *speeds])
    return _markdown(["mode", *FAMILIES], rows)


def eager(folder: Path = RESULTS) -> str:
    """`static`, and `dynamic` beside `mrp_remask` where eager reveals are often wrong; 95 % intervals in brackets."""
    lines = frontier_lines(folder)
    dynamic: list[Line] = [{"decoding": "dynamic", "confidence_threshold": tau} for tau in EAGER_TAUS]
    rows = []
    for setting in [alone("static"), *dynamic, *({**one, **_REREAD} for one in dynamic)]:
        of = [_line_of([line for line in lines if line["family"] == family], setting) for family in JUDGED]
        cells = [(_with_interval(line, "accuracy", 1), _with_interval(line, "tokens_per_forward", 2)) for line in of]
        rows.append([setting_name(setting), *sum(cells, ())])
    head = [title for family in JUDGED for title in (f"{family} %", f"{family}: tokens / forward")]
    return _markdown(["mode", *head], rows)


_REREAD = {"decoding": "mrp_remask", "remask_rule": "reread"}
# The paper's accuracy of SDAR-8B by threshold, in percent: `dynamic`, and with remasking.
_PAPER = {
    "GSM8K": {0.5: (67.9, 82.3), 0.7: (85.9, 89.0), 0.9: (90.8, 91.4)},
    "MATH500": {0.5: (45.2, 58.0), 0.7: (60.8, 69.0), 0.9: (70.0, 72.0)},
    "HumanEval": {0.5: (32.3, 54.9), 0.7: (64.6, 72.6), 0.9: (75.0, 75.0)},
    "MBPP": {0.5: (34.6, 49.4), 0.7: (54.9, 60.3), 0.9: (66.9, 68.5)},
}


def recovered(folder: Path = RESULTS) -> str:
    """Accuracy of `dynamic`, and with remasking, by threshold; ours with 95 % intervals, the paper's below."""
    taus = list(_PAPER["GSM8K"])
    rows = []
    for family in JUDGED:
        lines = [line for line in frontier_lines(folder) if line["family"] == family]
        cells = []
        for tau in taus:
            dynamic: Line = {"decoding": "dynamic", "confidence_threshold": tau}
            pair = [_line_of(lines, setting) for setting in (dynamic, {**dynamic, **_REREAD})]
            cells.append(" -> ".join(_with_interval(line, "accuracy", 1) for line in pair))
        rows.append([family, *cells])
    rows += [[f"paper: {name}, 8B", *("{} -> {}".format(*by[tau]) for tau in taus)] for name, by in _PAPER.items()]
    return _markdown(["problems", *(f"tau {tau}, %" for tau in taus)], rows)


def heldout(folder: Path = RESULTS) -> str:
    """Accuracy and cost of the modes that the card shows."""
    return results_table([line for family in JUDGED for line in read_lines(folder / f"tiny_heldout_{family}.jsonl")])


def _ratio(line: Line, name: str) -> str:
    """A ratio and, where it was measured, its 95 % interval."""
    interval = line.get(f"{name}_95")
    return f"{line[name]:.2f}x" + (f", {interval[0]:.2f}-{interval[1]:.2f}" if interval else "")


def sweep(folder: Path = RESULTS) -> str:
    """A table for each axis, family and K: a row a point, tokens per forward of every mode, and what drafting costs."""
    along = {"batch": ("batch", "batch_size"), "prompt": ("prompt tokens", "prompt_asked")}
    lines = read_lines(folder / "tiny_sweep.jsonl")
    tables = []
    for axis, family, states in dict.fromkeys((line["axis"], line["family"], line.get("states")) for line in lines):
        if states is None:
            continue  # `static`, which is in the tables of every K
        group = [line for line in lines if (line["axis"], line["family"]) == (axis, family)]
        group = [line for line in group if line.get("states", states) == states]
        tables.append(f"{family}, K = {states}\n\n{_sweep_table(group, *along[axis])}")
    return "\n\n".join(tables)


def _sweep_table(lines: list[Line], title: str, key: str) -> str:
    modes = list(dict.fromkeys(line["mode"] for line in lines))
    at = {(line["mode"], line[key]): line for line in lines}
    values = list(dict.fromkeys(line[key] for line in lines))

    def cell(mode: str, value: int, field: str, digits: int) -> str:
        line = at.get((mode, value), {})
        return f"{line[field]:.{digits}f}" if field in line else ""

    shown: list[tuple[str, str, str, int]] = [(mode, mode, "tokens_per_forward", 2) for mode in modes]
    for mode in ("self_spec", "mrp_spec"):
        if mode in modes:
            shown += [
                (f"{mode}: states / forward", mode, "states_per_forward", 1),
                (f"{mode}: accepted %", mode, "accepted_percent", 0),
            ]
    if "mrp_spec" in modes:
        shown.append(("mrp_spec: head / token", "mrp_spec", "head_per_token", 2))
    rows = [[str(value), *(cell(mode, value, field, digits) for _, mode, field, digits in shown)] for value in values]
    return _markdown([title, *(name for name, *_ in shown)], rows)


def cost(folder: Path = RESULTS) -> str:
    """Predictions by family: the mode to use at each shape, batch and K, then the batch at which each mode stops paying."""
    lines = read_lines(folder / "cost_model.jsonl")
    choices = [line for line in lines if line["kind"] == "choice"]
    limits = [line for line in lines if line["kind"] == "limit"]
    tables = (
        _pivot(choices, ["device", "shape", "batch"], lambda line: f"{line['decoding']} {line['speedup']:.2f}x"),
        _pivot(limits, ["device", "shape", "mode"], lambda line: str(line["stops_paying_at_batch"] or "never")),
    )
    return "Mode to use, speed over static\n\n{}\n\nSlower than static from batch\n\n{}".format(*tables)


def _pivot(lines: list[Line], names: list[str], cell: Callable[[Line], str]) -> str:
    """A row for each value of `names`, a column for each family and K."""
    columns = list(dict.fromkeys((line["family"], line["states"]) for line in lines))
    rows: dict[tuple[Any, ...], dict[tuple[str, int], str]] = {}
    for line in lines:
        rows.setdefault(tuple(line[name] for name in names), {})[line["family"], line["states"]] = cell(line)
    return _markdown(
        [*names, *(f"{family} K={k}" for family, k in columns)],
        [[*map(str, row), *(of.get(column, "") for column in columns)] for row, of in rows.items()],
    )


def auto_clock(folder: Path = RESULTS) -> str:
    """Speed of `auto` over the target, median with the least and the most, and behind the semicolon over the best fixed K."""
    rows: dict[tuple[str, int], dict[str, str]] = {}
    for line in read_lines(folder / "auto_clock.jsonl"):
        auto = "{:.2f}x ({:.2f}-{:.2f})".format(line["over_target"]["auto"]["median"], *line["over_target"]["auto"]["range"])
        shown = f"{auto}; {line['auto_over_best']['median']:.2f}x, {line['best']}"
        rows.setdefault((line["model"], line["batch_size"]), {})[line["target"]] = shown
    targets = list(dict.fromkeys(target for row in rows.values() for target in row))
    cells = [[model, str(batch), *(row.get(target, "") for target in targets)] for (model, batch), row in rows.items()]
    return _markdown(["model", "batch", *(f"`{target}`" for target in targets)], cells)


def novel(folder: Path = RESULTS) -> str:
    """Problems that ask for what training never asked for beside the others, with 95 % intervals."""
    cells: dict[tuple[str, str], list[str]] = {}
    for line in read_lines(folder / "tiny_novel.jsonl"):
        accuracy = "{:.1f} ({:.1f}-{:.1f})".format(line["accuracy"], *line["accuracy_95"])
        speed = "{:.2f} ({:.2f}-{:.2f})".format(line["tokens_per_forward"], *line["tokens_per_forward_95"])
        cells.setdefault((line["family"], line["mode"]), []).extend((accuracy, speed))
    head = [f"{part}: {what}" for part in ("novel", "known") for what in ("%", "tokens / forward")]
    return _markdown(["problems", "mode", *head], [[family, f"`{mode}`", *of] for (family, mode), of in cells.items()])


def head_prefix(folder: Path = RESULTS) -> str:
    """Tokens per forward with and without the head's own prefix."""
    rows = [
        [
            line["family"],
            str(line["states"]),
            f"{line['tokens_per_forward']:.2f}",
            f"{line['block_only']:.2f}",
            "{:.2f} ({:.2f}-{:.2f})".format(line["ratio"], *line["ratio_95"]),
        ]
        for line in read_lines(folder / "tiny_head_prefix.jsonl")
    ]
    return _markdown(["family", "K", "with prefix", "block alone", "ratio"], rows)


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
        ratios = (f"{line['tokens_per_forward']:.2f} ({_ratio(line, 'over_published')})" for line in others)
        differ = sum(line["texts_that_differ"] for line in of.values())
        cells.append([family, str(states), _with_interval(first, "tokens_per_forward", 2), *ratios, str(differ)])
    head = [f"{loop}, {head} head" for loop, head in columns]
    return _markdown(["family", "K", *head, "texts that differ"], cells)


def retrained(folder: Path = RESULTS) -> str:
    """The embedded head against the one before it."""
    rows = []
    for line in read_lines(folder / "tiny_retrained.jsonl"):
        if line["decoding"] == "mrp_spec":
            what = f"{line.get('target', 'static')}: tokens a forward, K = {line['num_draft_states']}"
            digits, change = 2, "{:.3f}x ({:.3f}-{:.3f})"
            now, over = line["tokens_per_forward"], change.format(line["ratio"], *line["ratio_95"])
        else:
            what, digits, change = "`mrp_direct`, %", 1, "{:+.1f} ({:+.1f} to {:+.1f})"
            now, over = line["accuracy"], change.format(line["difference"], *line["difference_95"])
        rows.append([line["family"], what, f"{line['before']:.{digits}f}", f"{now:.{digits}f}", over])
    return _markdown(["family", "", "before", "now", "change"], rows)


def departures(folder: Path = RESULTS) -> str:
    """What SDAR's own script does otherwise changes: a row a way to decode and departure."""
    families: dict[str, None] = {}
    rows: dict[tuple[str, str], dict[str, Line]] = {}
    for line in read_lines(folder / "tiny_departures.jsonl"):
        families[line["family"]] = None
        way = "`static`" if "threshold" not in line else f"`dynamic` {line['threshold']}"
        way += f", {line['denoising_steps']} steps" if "denoising_steps" in line else ""
        way += ", greedy" if line.get("top_k") == 1 else f", top_p {line['top_p']}"
        rows.setdefault((way, ", ".join(f"`{name}`" for name in line["departures"]) or "none"), {})[line["family"]] = line
    cells = []
    for row, by in rows.items():
        cells.append([*row])
        for line in (by[family] for family in families):
            accuracy = "{:.1f} ({:.1f}-{:.1f})".format(line["accuracy"], *line["accuracy_95"])
            differ = f"{100 * line['texts_that_differ'] / line['texts']:.1f}"
            cells[-1] += [accuracy, f"{line['tokens_per_forward']:.2f}", differ]
    head = [f"{family}: {what}" for family in families for what in ("%", "tokens / forward", "texts that differ, %")]
    return _markdown(["decoding", "departure", *head], cells)


def low_precision(folder: Path = RESULTS) -> str:
    """Texts that equal the target's in low precision, in percent: the target decoded otherwise, then drafted by K."""
    rows: dict[str, dict[tuple[str, str], Line]] = {}
    for line in read_lines(folder / "tiny_low_precision.jsonl"):
        way = f"{line['mode']} K={line['K']}" if "K" in line else f"the target, batches of {line['batch_size']}"
        way = "the target, beside a longer text" if "longer" in line else way
        rows.setdefault(way, {})[line["family"], line["target"]] = line
    columns = list(dict.fromkeys(column for by in rows.values() for column in by))

    def cell(line: Line | None) -> str:
        return "{:.1f} ({:.1f}-{:.1f})".format(*(100 * part for part in (line["share"], *line["interval"]))) if line else ""

    cells = [[way, *(cell(by.get(column)) for column in columns)] for way, by in rows.items()]
    return _markdown(["decoded", *(f"{family}, `{target}`: equal, %" for family, target in columns)], cells)


def compiled(folder: Path = RESULTS) -> str:
    """What the compiler makes of the kernels."""
    known = (
        "dtype",
        "launch",
        "kernel",
        "registers",
        "stack_bytes",
        "shared_bytes",
        "programs",
        "matrix_instructions",
        "asynchronous_copies",
        "narrow_accesses",
    )
    rows = []
    for line in read_lines(folder / "compiled.jsonl"):
        sizes = ", ".join(name if value is True else f"{name} {value}" for name, value in line.items() if name not in known)
        numbers = (f"{line['shared_bytes'] / 1024:.0f}", *(str(line[name]) for name in known[6:]))
        named = (line["launch"], sizes, line["dtype"], line["kernel"])
        rows.append([*named, str(line["registers"]), str(line["stack_bytes"]), *numbers])
    columns = [
        "registers",
        "stack, bytes",
        "shared, KB",
        "programs",
        "matrix instructions",
        "asynchronous copies",
        "narrow accesses",
    ]
    return _markdown(["launch", "sizes", "dtype", "kernel", *columns], rows)


TABLES: dict[str, Callable[[Path], str]] = {
    table.__name__: table
    for table in (
        *(frontier, summary, targets, headline, eager, recovered, heldout, sweep, cost, auto_clock),
        *(novel, head_prefix, published_head, retrained, departures, low_precision, compiled),
    )
}


def main(arguments: list[str] | None = None) -> None:
    """Command line: prints one table, or the tables of one measurement."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description="Prints measurements as Markdown tables.")
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the measurements")
    options = parser.parse_args(arguments)
    print(TABLES[options.table](options.results))


if __name__ == "__main__":
    main()
