"""Decodes held-out problems with each target, alone and drafted, and prints what it cost: ``python -m mrp_trainer.demo``.

All take turns on each batch of problems, in one process, a drafted one right behind its target, so that the wall-clock ratios
compare like with like. (``make demo`` runs it, too.)
"""

import argparse
import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from .data.tasks import Family, Problem, problems
from .embedded import EMBEDDED
from .evaluate.command import Decoded, decode_problems
from .loading import load_model, load_tokenizer

JUDGED: tuple[Family, ...] = ("math", "code")
TARGETS: dict[str, dict[str, Any]] = {
    "static": {"decoding": "static"},
    "sequential": {"decoding": "sequential"},
    "entropy_bound 0.35": {"decoding": "entropy_bound", "entropy_threshold": 0.35},
    "dynamic 0.9": {"decoding": "dynamic", "confidence_threshold": 0.9},
}


@dataclass(frozen=True)
class Mode:
    """A row of the table.

    Attributes:
        against: The row that its speed and texts are compared with: a drafted one's target, and `static` for a target.
        options: Of `generate`.
    """

    against: str
    options: dict[str, Any]


def _modes() -> dict[str, Mode]:
    modes: dict[str, Mode] = {}
    for target, options in TARGETS.items():
        modes[target] = Mode("static", options)
        drafted = {**options, "decoding": "mrp_spec", "target": options["decoding"], "num_draft_states": "auto"}
        modes[f"{target}, drafted"] = Mode(target, drafted)
    return modes


MODES = _modes()


@dataclass
class Measured:
    """One mode on one family, batch by batch."""

    batches: list[Decoded]

    @property
    def accuracy(self) -> float:
        """Percent solved."""
        return statistics.mean(100 * right for batch in self.batches for right in batch.judged)

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(len(ids) for batch in self.batches for ids in batch.ids)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens over backbone forwards, each row counting its own."""
        return self.tokens / sum(sum(map(len, b.ids)) / b.tokens_per_forward for b in self.batches)

    @property
    def head_forwards_per_token(self) -> float:
        """Head forwards over tokens, each row counting its own."""
        return sum(b.head_forwards_per_token * sum(map(len, b.ids)) for b in self.batches) / self.tokens

    def identical(self, other: "Measured") -> float:
        """Percent of outputs equal to another mode's."""
        pairs = [(a, b) for x, y in zip(self.batches, other.batches, strict=True) for a, b in zip(x.ids, y.ids, strict=True)]
        return 100 * sum(a == b for a, b in pairs) / len(pairs)


def measure(
    model: Any, tokenizer: Any, asked: dict[Family, list[Problem]], batch_size: int, progress: Progress
) -> dict[str, dict[Family, Measured]]:
    """Every mode on every family; on each batch the modes take turns."""
    measured: dict[str, dict[Family, Measured]] = {name: {family: Measured([]) for family in asked} for name in MODES}
    task = progress.add_task("decoding", total=sum(map(len, asked.values())) * len(MODES))
    decode_problems(model, tokenizer, next(iter(asked.values()))[:2], 2)  # warm up
    gc.freeze()  # to look through all that was imported takes as long as a batch, and would count for one of them
    for family, found in asked.items():
        for begin in range(0, len(found), batch_size):
            for name, mode in MODES.items():
                progress.update(task, description=f"{family}: {name}")
                part = found[begin : begin + batch_size]
                decoded = decode_problems(
                    model, tokenizer, part, batch_size, lambda n: progress.advance(task, n), **mode.options
                )
                measured[name][family].batches.append(decoded)
    gc.unfreeze()
    return measured


def _time_ratios(mode: Measured, against: Measured) -> list[float]:
    return [reference.seconds / batch.seconds for batch, reference in zip(mode.batches, against.batches, strict=True)]


def result_table(measured: dict[str, dict[Family, Measured]]) -> Table:
    """One row a mode; token counts over the judged families, real source text apart."""
    table = Table(title="Held-out problems: what each target solves and costs, alone and drafted", title_justify="left")
    for heading in (
        "mode",
        "math %",
        "code %",
        "tokens/forward",
        "head/token",
        "speed",
        "= %",
        "source: tokens/forward",
        "= % ",
    ):
        table.add_column(heading, justify="left" if heading == "mode" else "right", no_wrap=True)
    for name, row in MODES.items():
        mode, against = measured[name], measured[row.against]
        judged, reference = (Measured([batch for family in JUDGED for batch in of[family].batches]) for of in (mode, against))
        ratios = _time_ratios(judged, reference)
        table.add_row(
            name,
            f"{mode['math'].accuracy:.1f}",
            f"{mode['code'].accuracy:.1f}",
            f"{judged.tokens_per_forward:.2f}",
            f"{judged.head_forwards_per_token:.2f}",
            f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})",
            f"{judged.identical(reference):.1f}",
            f"{mode['source'].tokens_per_forward:.2f}",
            f"{mode['source'].identical(against['source']):.1f}",
        )
    return table


def show_answers(console: Console, asked: dict[Family, list[Problem]], measured: dict[str, dict[Family, Measured]]) -> None:
    """A few problems as text: the prompt and the answer, drafted."""
    for family in JUDGED:
        batch = measured["dynamic 0.9, drafted"][family].batches[0]
        for problem, text, right in list(zip(asked[family], batch.texts, batch.right, strict=False))[:2]:
            body = Text(problem.prompt, style="bold")
            body.append(f"\n\n{text}", style="not bold")
            verdict = "[green]right[/]" if right else "[red]wrong[/]"
            console.print(Panel(body, title=family, subtitle=verdict, title_align="left", width=100))


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the demo."""
    parser = argparse.ArgumentParser(
        prog="python -m mrp_trainer.demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default=EMBEDDED)
    parser.add_argument("--count", type=int, default=64, help="problems per family")
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args(arguments)
    console = Console(width=None if Console().is_terminal else 140)
    model: Any = load_model(options.model)
    if torch.cuda.is_available():
        model = model.to("cuda")
    tokenizer = load_tokenizer(options.model)
    asked = {family: problems(family, "heldout", options.count) for family in (*JUDGED, "source")}
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        measured = measure(model, tokenizer, asked, options.batch_size, progress)
    show_answers(console, asked, measured)
    console.print(result_table(measured))
    console.print("Speed and = %: a drafted row against its target, and a target against static.")
    console.print(
        f"{options.count} problems a family, batches of {options.batch_size}, greedy, {model.dtype} on {model.device.type}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads."
    )


if __name__ == "__main__":
    main()
