"""The embedded checkpoint from its recipe: the backbone that training starts from, and whether a
trained model is as good.

    python -m benchmarks.tiny new runs/tiny/new
    python -m benchmarks.tiny accept runs/tiny/head

`make tiny` makes a model of the same kind: a new backbone of the embedded shape, with its
tokenizer; training texts; the backbone; what it decodes of other training problems for every
target; the head. Another machine or version of torch rounds otherwise, and training amplifies that.
So a model is accepted by its numbers, on fresh held-out problems of math and code: for every
target, it must solve as many as the embedded one and make as many tokens per forward with the
head's drafts, but for `SOLVED` and `SPEED`.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from mrp_trainer.data.tasks import Family
from mrp_trainer.publish.card import markdown_table
from transformers import set_seed

from modeling_mrp import MRPConfig, MRPForCausalLM

from .common import TINY, load, parser_of
from .frontier import JUDGED, SEED, Decoder, problems_of, shortlisted
from .targets import TARGETS, alone

# How many percentage points fewer problems may be solved, and the least share of the embedded
# checkpoint's tokens per forward.
SOLVED, SPEED = 5.0, 0.95
STATES = 8


def new(options: Namespace) -> None:
    """Write a backbone of the embedded shape with random weights, and its tokenizer."""
    set_seed(0)
    _, tokenizer = load(TINY)
    config = MRPConfig.from_pretrained(TINY, num_nextn_predict_layers=0)
    MRPForCausalLM(config).save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)


def numbers_of(folder: Path, family: Family, count: int) -> dict[str, tuple[float, float]]:
    """Decode fresh problems of a family in float64; return for each target the percentage of
    problems that it solves, and tokens per forward of the head's drafts with K = 8."""
    model, tokenizer = load(folder)
    decoder = Decoder(model.to(torch.float64), tokenizer, 12)
    chosen = problems_of(family, "heldout", count, SEED)
    numbers = {}
    for target in TARGETS:
        solved = decoder.decoded(alone(target), chosen).line()["accuracy"]
        drafted = decoder.decoded(shortlisted(target, STATES, 1), chosen)
        numbers[target] = solved, drafted.speed.value
    return numbers


def accept(options: Namespace) -> None:
    """Print the numbers of the embedded checkpoint and of another; exit with an error if the other
    is not as good."""
    rows = []
    worse = []
    for family in JUDGED:
        embedded = numbers_of(TINY, family, options.count)
        other = numbers_of(options.folder, family, options.count)
        for target in TARGETS:
            solved, speed = other[target]
            wanted_solved, wanted_speed = embedded[target]
            cells: list[Any] = [f"`{target}`", family, f"{wanted_solved:.1f}, {solved:.1f}"]
            rows.append([*cells, f"{wanted_speed:.2f}, {speed:.2f}"])
            if solved < wanted_solved - SOLVED or speed < SPEED * wanted_speed:
                worse.append(f"{target} in {family}")
    titles = ["target", "problems", "solved, %: embedded, made"]
    print(markdown_table([*titles, f"tokens / forward, K = {STATES}: embedded, made"], rows))
    if worse:
        raise SystemExit(f"{options.folder} is not as good as the embedded one: {', '.join(worse)}")
    print(f"\n{options.folder} is as good as the embedded checkpoint")


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = parser_of("tiny", __doc__ or "")
    commands = parser.add_subparsers(required=True)
    for command, function in (("new", new), ("accept", accept)):
        of_command = commands.add_parser(command, help=function.__doc__)
        of_command.add_argument("folder", type=Path)
        of_command.set_defaults(run=function)
        if command == "accept":
            of_command.add_argument("--count", type=int, default=100, help="problems of a family")
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
