"""Prints the tables that README, MODEL_CARD and the checkpoint's card quote, from the lines that measurements left.

``python -m benchmarks.tables heldout`` is the table of decoding modes on 500 held-out problems a family, from
`benchmarks/results/tiny_heldout_{math,code}.jsonl`; ``python -m benchmarks.tables yardstick`` the comparison with the published
algorithm, from `benchmarks/results/tiny_yardstick.jsonl`; ``python -m benchmarks.tables remask`` the rules of `mrp_remask` at
equal tokens per forward, from `benchmarks/results/tiny_remask.jsonl`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def heldout() -> str:
    """Accuracy and cost of every mode."""
    modes: dict[str, dict[str, Any]] = {}
    for family in ("math", "code"):
        for line in _lines(f"tiny_heldout_{family}.jsonl"):
            name = line["decoding"]
            name += f" K={line['num_draft_states']}" if "num_draft_states" in line else ""
            name += f" tau={line['confidence_threshold']}" if "confidence_threshold" in line else ""
            modes.setdefault(name, {})[family] = line
    rows = []
    for name, by in modes.items():
        pair = [by["math"], by["code"]]
        rows.append(
            [
                name,
                *(f"{line['accuracy']:.1f}" for line in pair),
                ", ".join(f"{line['tokens_per_forward']:.2f}" for line in pair),
                ", ".join(f"{line['head_per_token']:.2f}" for line in pair),
                ", ".join(f"{line['identical_to_first']:.1f}" for line in pair),
            ]
        )
    head = [
        "mode",
        "math %",
        "code %",
        "tokens / forward (math, code)",
        "head forwards / token",
        "same as static % (math, code)",
    ]
    return _markdown(head, rows)


def yardstick() -> str:
    """Tokens per forward by family and batch size, a row a mode."""
    lines = _lines("tiny_yardstick.jsonl")
    columns = list(dict.fromkeys((line["family"], line["batch_size"]) for line in lines))
    cells: dict[str, dict[tuple[str, int], str]] = {}
    for line in lines:
        ratio = f" ({line['over_published']:.2f}x)" if "over_published" in line else ""
        cells.setdefault(line["mode"], {})[line["family"], line["batch_size"]] = f"{line['tokens_per_forward']:.2f}{ratio}"
    return _markdown(
        ["mode", *(f"{family}, batch {size}" for family, size in columns)],
        [[mode, *(of[column] for column in columns)] for mode, of in cells.items()],
    )


def _compared(line: dict[str, Any]) -> str:
    return f"{line['other_accuracy']:.1f} ({line['difference']:+.1f}, {line['low']:+.1f} to {line['high']:+.1f})"


def remask() -> str:
    """Accuracy of the first rule and of the others at equal tokens per forward, by family."""
    lines = [line for line in _lines("tiny_remask.jsonl") if "against" in line]
    others = list(dict.fromkeys(line["against"] for line in lines))
    at: dict[tuple[str, float | str], dict[str, dict[str, Any]]] = {}
    for line in lines:
        at.setdefault((line["family"], line["tokens_per_forward"]), {})[line["against"]] = line
    rows = []
    for (family, speed), by in sorted(at.items(), key=lambda item: (item[0][0] != "math", item[0][1] == "mean", item[0][1])):
        # Each comparison has its own speeds, so the first rule's means differ.
        ours = "" if speed == "mean" else f"{next(iter(by.values()))['accuracy']:.1f}"
        cells = [_compared(by[other]) if other in by else "" for other in others]
        rows.append([family, speed if isinstance(speed, str) else f"{speed:.2f}", ours, *cells])
    return _markdown(["family", "tokens / forward", f"{lines[0]['rule']} %", *(f"{other} %" for other in others)], rows)


def main(arguments: list[str] | None = None) -> None:
    """Command line: prints one table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description="Prints one table as Markdown.")
    parser.add_argument("table", choices=("heldout", "yardstick", "remask"))
    print({"heldout": heldout, "yardstick": yardstick, "remask": remask}[parser.parse_args(arguments).table]())


if __name__ == "__main__":
    main()
