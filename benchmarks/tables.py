"""Prints the tables that the documents quote, from the lines that measurements left.

``python -m benchmarks.tables TABLE`` reads `benchmarks/results` (or `--results FOLDER`): `frontier` accuracy and cost of every
mode and setting, from `tiny_frontier*.jsonl`; `heldout` the decoding modes on 500 problems a family, from
`tiny_heldout_{math,code}.jsonl`, and `eager` and `recovered` the parts of it in which `mrp_remask` is compared with `dynamic`;
`yardstick` and `ratios` the comparison with the released reference, from `tiny_yardstick.jsonl`, and `headline` and `drafting`
the parts of it in which K is 3 or 4, and 8; `targets` every target, alone and drafted, from `tiny_targets.jsonl`; `sweep` from
`tiny_sweep.jsonl`; `cost` from `cost_model.jsonl`; `wallclock` from `wallclock_tiny.jsonl`; `remask` the rules of
`mrp_remask` at equal tokens per forward, from `tiny_remask.jsonl`; `compiled`, and `novel`, `head_prefix`, `specialise` and
`retrained` from the files of these names behind `tiny_`.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mrp_trainer.publishing.card import markdown_table as _markdown
from mrp_trainer.publishing.card import mode_name, results_table

from .common import RESULTS, read_lines
from .frontier import on_frontier, setting_name
from .targets import TARGETS

Line = dict[str, Any]
EAGER_TAUS = (0.4, 0.5)


def frontier_lines(folder: Path = RESULTS) -> list[Line]:
    """The lines of all files of the frontier."""
    return [line for path in sorted(folder.glob("tiny_frontier*.jsonl")) for line in read_lines(path)]


def frontier(folder: Path = RESULTS) -> str:
    """Accuracy and tokens per forward of every setting, with 95 % intervals; a star where none is better at both."""
    families: dict[str, list[Line]] = {}
    rows: dict[str, dict[str, Line]] = {}
    for line in frontier_lines(folder):
        families.setdefault(line["family"], []).append(line)
        rows.setdefault(setting_name(line), {})[line["family"]] = line
    cells = []
    for name, by in rows.items():
        row = [name]
        for family, lines in families.items():
            if (one := by.get(family)) is None:
                row += ["", ""]
                continue
            speed = "{:.2f} ({:.2f}-{:.2f})".format(one["tokens_per_forward"], *one["tokens_per_forward_95"])
            row.append("{:.1f} ({:.1f}-{:.1f})".format(one["accuracy"], *one["accuracy_95"]))
            row.append(speed + (" *" if on_frontier(one, lines) else ""))
        row.append(", ".join(f"{by[family]['head_per_token']:.2f}" for family in families if family in by))
        differ = [by[family].get("texts_that_differ") for family in families if family in by]
        cells.append([*row, "" if None in differ else ", ".join(map(str, differ))])
    head = [title for family in families for title in (f"{family} %", f"{family}: tokens / forward")]
    pair = ", ".join(families)
    return _markdown(["mode", *head, f"head / token ({pair})", f"texts that differ ({pair})"], cells)


def heldout(folder: Path = RESULTS) -> str:
    """Accuracy and cost of every mode."""
    return results_table([line for family in ("math", "code") for line in read_lines(folder / f"tiny_heldout_{family}.jsonl")])


def eager(folder: Path = RESULTS) -> str:
    """`static`, and `dynamic` beside `mrp_remask` where eager reveals are often wrong; 95 % intervals in brackets."""
    families = ("math", "code")
    cells: dict[str, list[str]] = {}
    for line in (line for family in families for line in read_lines(folder / f"tiny_heldout_{family}.jsonl")):
        tau = line.get("confidence_threshold")
        if line["decoding"] == "static" or (line["decoding"] in ("dynamic", "mrp_remask") and tau in EAGER_TAUS):
            accuracy = "{:.1f} ({:.1f}-{:.1f})".format(line["accuracy"], *line["accuracy_95"])
            speed = "{:.2f} ({:.2f}-{:.2f})".format(line["tokens_per_forward"], *line["tokens_per_forward_95"])
            cells.setdefault(mode_name(line), []).extend((accuracy, speed))
    head = [title for family in families for title in (f"{family} %", f"{family}: tokens / forward")]
    return _markdown(["mode", *head], [[mode, *of] for mode, of in cells.items()])


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
    for family in ("math", "code"):
        lines = read_lines(folder / f"tiny_heldout_{family}.jsonl")
        ours = {(line["decoding"], line.get("confidence_threshold")): line for line in lines}
        pairs = [[ours[mode, tau] for mode in ("dynamic", "mrp_remask")] for tau in taus]
        cells = [["{:.1f} ({:.1f}-{:.1f})".format(line["accuracy"], *line["accuracy_95"]) for line in pair] for pair in pairs]
        rows.append([family, *(" -> ".join(cell) for cell in cells)])
    rows += [[f"paper: {name}, 8B", *("{} -> {}".format(*by[tau]) for tau in taus)] for name, by in _PAPER.items()]
    return _markdown(["problems", *(f"tau {tau}, %" for tau in taus)], rows)


# What the lines of a yardstick compare with: until 2026-11-22 an older reading of the released loop, without bonus tokens.
REFERENCES = ("released", "published")


def yardstick(folder: Path = RESULTS) -> str:
    """Tokens per forward by family and batch size, a row a mode; over the released reference in brackets."""
    return _beside_reference(read_lines(folder / "tiny_yardstick.jsonl"))


def headline(folder: Path = RESULTS) -> str:
    """The same for K = 3, which published results are of, and 4, with each mode as it is by default."""
    return _by_default(folder, 3, 4)


def drafting(folder: Path = RESULTS) -> str:
    """The same for K = 8."""
    return _by_default(folder, 8)


def _by_default(folder: Path, *states: int) -> str:
    shown = {f"{mode} K={k}" for mode in (*REFERENCES, "self_spec", "mrp_spec") for k in states}
    return _beside_reference([line for line in read_lines(folder / "tiny_yardstick.jsonl") if line["mode"] in shown])


# Mode, K and head passes a round, where a target is drafted.
_TARGET_COLUMNS = (("self_spec", 4, 0), ("self_spec", 8, 0), ("mrp_spec", 4, 1), ("mrp_spec", 8, 1), ("mrp_spec", 8, 2))


def targets(folder: Path = RESULTS) -> str:
    """Tokens per forward of each target, alone and drafted; over its own in brackets, and how many texts differ from it."""
    rows: dict[tuple[str, str], dict[Any, Line]] = {}
    for line in read_lines(folder / "tiny_targets.jsonl"):
        way = line["drafts"] and (line["drafts"], line["K"], line["passes"])
        rows.setdefault((line["target"], line["family"]), {})[way] = line
    head = [f"{mode} K={k}" + (f", {passes} head passes" if passes > 1 else "") for mode, k, passes in _TARGET_COLUMNS]
    cells = []
    for (target, family), of in sorted(rows.items(), key=lambda row: list(TARGETS).index(row[0][0])):
        drafted = [f"{of[way]['tokens_per_forward']:.2f} ({of[way]['over_target']:.2f}x)" for way in _TARGET_COLUMNS]
        differing = sum(line.get("texts_that_differ", 0) for line in of.values())
        cells.append([f"`{target}`", family, f"{of[None]['tokens_per_forward']:.2f}", *drafted, str(differing)])
    return _markdown(["target", "problems", "alone", *head, "texts that differ"], cells)


def over_reference(line: Line) -> str | None:
    """Name the field that holds a line's ratio to the reference; None if it has none."""
    return next((f"over_{name}" for name in REFERENCES if f"over_{name}" in line), None)


def _beside_reference(lines: Sequence[Line]) -> str:
    columns = list(dict.fromkeys((line["family"], line["batch_size"]) for line in lines))
    cells: dict[str, dict[tuple[str, int], str]] = {}
    for line in lines:
        over = over_reference(line)
        ratio = f" ({_ratio(line, over)})" if over else ""
        cells.setdefault(line["mode"], {})[line["family"], line["batch_size"]] = f"{line['tokens_per_forward']:.2f}{ratio}"
    return _markdown(
        ["mode", *(f"{family}, batch {size}" for family, size in columns)],
        [[mode, *(of[column] for column in columns)] for mode, of in cells.items()],
    )


def ratios(folder: Path = RESULTS) -> str:
    """By family: `mrp_spec` over `self_spec` alone in their batch, and what larger batches leave of each mode's speed.

    Modes that keep all of it in every family are left out.
    """
    lines = [line for line in read_lines(folder / "tiny_yardstick.jsonl") if line["mode"] != "static"]
    families = list(dict.fromkeys(line["family"] for line in lines))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for line in lines:
        for name in ("over_self_spec", "over_batch_1"):
            if name in line and (name == "over_batch_1" or line["batch_size"] == 1):
                what = f"batch {line['batch_size']} over batch 1" if name == "over_batch_1" else "over self_spec"
                cells.setdefault((line["mode"], what), {})[line["family"]] = _ratio(line, name)
    kept = {key: of for key, of in cells.items() if set(of.values()) != {"1.00x, 1.00-1.00"}}
    rows = [[mode, what, *(of[family] for family in families)] for (mode, what), of in kept.items()]
    return _markdown(["mode", "tokens per forward", *families], rows)


def _ratio(line: Line, name: str) -> str:
    """A ratio and, where it was measured, its 95 % interval."""
    interval = line.get(f"{name}_95")
    return f"{line[name]:.2f}x" + (f", {interval[0]:.2f}-{interval[1]:.2f}" if interval else "")


def sweep(folder: Path = RESULTS) -> str:
    """A table for each axis and family: a row a point, tokens per forward of every mode, and what drafting costs."""
    lines = read_lines(folder / "tiny_sweep.jsonl")
    along = {"states": ("K", "states"), "batch": ("batch", "batch_size"), "prompt": ("prompt tokens", "prompt_asked")}
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        fixed = f"batch {line['batch_size']}" if line["axis"] == "states" else ""
        groups.setdefault((line["axis"], ", ".join(filter(None, (line["family"], fixed)))), []).append(line)
    tables = []
    for (axis, name), group in groups.items():
        title, key = along[axis]
        tables.append(f"{name}\n\n{_sweep_table(group, title, key)}")
    return "\n\n".join(tables)


def _sweep_table(lines: list[Line], title: str, key: str) -> str:
    modes = list(dict.fromkeys(line["mode"] for line in lines))
    at = {(line["mode"], line.get(key)): line for line in lines}
    values = list(dict.fromkeys(line[key] for line in lines if key in line))

    def cell(mode: str, value: int, field: str, digits: int) -> str:
        line = at.get((mode, value), at.get((mode, None), {}))
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


def wallclock(folder: Path = RESULTS) -> str:
    """Speed over `static`, median with the least and the most, and the shares of a round's time."""
    kinds = ("backbone", "head", "vocabulary", "commit", "bookkeeping")
    rows = [
        [
            f"{line['shape']} ({line['layers']} layers, {line['dtype']})",
            str(line["batch_size"]),
            line["mode"],
            "{:.2f}x ({:.2f}-{:.2f})".format(line["over_static"]["median"], *line["over_static"]["range"]),
            f"{line['ms_per_round']:.1f}",
            *(f"{line['share'][kind]:.1f}" for kind in kinds),
        ]
        for line in read_lines(folder / "wallclock_tiny.jsonl")
    ]
    parts = _markdown(["shape", "batch", "mode", "speed over static", "ms a round", *(f"{kind} %" for kind in kinds)], rows)
    cells = folder / "auto_clock.jsonl"
    return f"{parts}\n\n{auto_clock(cells)}" if cells.exists() else parts


def auto_clock(path: Path) -> str:
    """Speed over the target of `auto` and of the best fixed K of each cell, median with the least and the most."""
    rows = []
    for line in read_lines(path):
        shown = [line["over_target"]["auto"], line["over_target"][line["best"]], line["auto_over_best"]]
        speeds = ["{:.2f}x ({:.2f}-{:.2f})".format(each["median"], *each["range"]) for each in shown]
        rows.append([line["model"], line["target"], str(line["batch_size"]), speeds[0], line["best"], *speeds[1:]])
    return _markdown(["model", "target", "batch", "auto over target", "best", "best over target", "auto over best"], rows)


def _compared(line: Line) -> str:
    return f"{line['other_accuracy']:.1f} ({line['difference']:+.1f}, {line['low']:+.1f} to {line['high']:+.1f})"


def remask(folder: Path = RESULTS) -> str:
    """Accuracy of the first rule and of the others at equal tokens per forward, by family."""
    lines = [line for line in read_lines(folder / "tiny_remask.jsonl") if "against" in line]
    others = list(dict.fromkeys(line["against"] for line in lines))
    at: dict[tuple[str, float | str], dict[str, Line]] = {}
    for line in lines:
        at.setdefault((line["family"], line["tokens_per_forward"]), {})[line["against"]] = line
    rows = []
    for (family, speed), by in sorted(at.items(), key=lambda item: (item[0][0] != "math", item[0][1] == "mean", item[0][1])):
        # Each comparison has its own speeds, so the first rule's means differ.
        ours = "" if speed == "mean" else f"{next(iter(by.values()))['accuracy']:.1f}"
        cells = [_compared(by[other]) if other in by else "" for other in others]
        rows.append([family, speed if isinstance(speed, str) else f"{speed:.2f}", ours, *cells])
    return _markdown(["family", "tokens / forward", f"{lines[0]['rule']} %", *(f"{other} %" for other in others)], rows)


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


def specialise(folder: Path = RESULTS) -> str:
    """A general head against one with an adapter for a family."""
    rows = [
        [
            line["family"],
            str(line["states"]),
            f"{line['general']:.2f}",
            f"{line['special']:.2f}",
            "{:.3f} ({:.3f}-{:.3f})".format(line["ratio"], *line["ratio_95"]),
            " -> ".join(f"{100 * rate:.1f}" for rate in line["first_draft_accepted"]),
        ]
        for line in read_lines(folder / "tiny_specialise.jsonl")
        if "family" in line
    ]
    return _markdown(["family", "K", "general", "specialist", "ratio", "first draft accepted, %"], rows)


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
    "frontier": frontier,
    "heldout": heldout,
    "eager": eager,
    "recovered": recovered,
    "yardstick": yardstick,
    "headline": headline,
    "drafting": drafting,
    "targets": targets,
    "ratios": ratios,
    "sweep": sweep,
    "cost": cost,
    "wallclock": wallclock,
    "remask": remask,
    "novel": novel,
    "head_prefix": head_prefix,
    "specialise": specialise,
    "retrained": retrained,
    "compiled": compiled,
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
