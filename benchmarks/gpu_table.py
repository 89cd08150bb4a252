"""What `benchmarks.gpu` found, briefly."""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from mrp_trainer.publishing.card import markdown_table

Line = dict[str, Any]


def table(lines: Iterable[Line]) -> str:
    """Errors out of bounds, times over their floors, speeds over other ways, texts that differ, and what was left out."""
    lines = list(lines)
    checks = [line for line in lines if "check" in line]
    wrong = [line for line in checks if not line["ok"]]
    parts = [f"{len(checks)} checks against float64, {len(wrong)} out of bounds", *map(json.dumps, wrong)]
    parts += [json.dumps(line) for line in lines if "failed" in line or "stopped" in line]
    parts += _kernels(lines) + _rounds(lines) + _generate(lines) + _same_tokens(lines)
    parts += [json.dumps(line) for line in lines if "memory" in line]
    left = Counter(f"{line['left_out']} ({line['why']})" for line in lines if "left_out" in line)
    parts += ["left out: " + ", ".join(f"{count} x {what}" for what, count in left.items())] if left else []
    return "\n\n".join(parts)


def _kernels(lines: list[Line]) -> list[str]:
    rows = [
        [
            *(line["time"], line["shape"], _sizes(line), line["way"], f"{line['us']:.1f}", f"{line['over_floor']:.2f}"),
            f"{line['over_kernel']:.2f}x",
            "one by one" if "launched_by_host" in line else "as a graph",
        ]
        for line in lines
        if "time" in line
    ]
    columns = ["kernel", "shape", "sizes", "way", "us", "over its floor", "over the kernel", "launched"]
    return [markdown_table(columns, rows)] if rows else []


def _rounds(lines: list[Line]) -> list[str]:
    rows = [
        [
            *(str(line[name]) for name in ("shape", "batch", "states", "prefix", "way")),
            f"{line['us']:.0f}",
            f"{line['over_floor']:.2f}",
            f"{line['faster_than_transformers']:.2f}x" if "faster_than_transformers" in line else "",
        ]
        for line in lines
        if "prefix" in line and "us" in line
    ]
    columns = ["shape", "batch", "K", "prefix", "way", "us", "over its floor", "over transformers"]
    return [markdown_table(columns, rows)] if rows else []


def _generate(lines: list[Line]) -> list[str]:
    rows = [
        [line["generate"], line["way"], f"{line['over_static']:.2f}x", f"{line['forwards_over']:.2f}x"]
        for line in lines
        if "generate" in line
    ]
    return [markdown_table(["generate", "way", "speed over static", "forwards"], rows)] if rows else []


def _same_tokens(lines: list[Line]) -> list[str]:
    rows = [
        [
            " ".join(
                [line["same_tokens"], *(f"{name} {line[name]}" for name in ("batch", "states", "prefix") if name in line)]
            ),
            *(line["way"], line["as"], f"{100 * line['texts_equal']:.1f} %", f"{100 * line['tokens_equal']:.1f} %"),
            f"{line['first_difference']}: {line['logprobs_there']}" if "first_difference" in line else "none",
        ]
        for line in lines
        if "same_tokens" in line
    ]
    columns = ["same tokens", "way", "as", "texts", "tokens", "first difference: batch, row, token: log-probabilities"]
    return [markdown_table(columns, rows)] if rows else []


def _sizes(line: Line) -> str:
    if "rows" in line:
        return f"{line['rows']} rows" + (", float32" if line["dtype"] == "float32" else "")
    prefix = f", prefix {line['prefix_tokens']}" if "prefix_tokens" in line else ""
    return f"batch {line['batch']}, K {line['states']}{prefix}"
