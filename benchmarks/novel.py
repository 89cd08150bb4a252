"""Held-out problems that ask for what training never asked for, beside the others: ``python -m benchmarks.novel``.

No prompt is in two splits, but many prompts ask for one function, and many word problems come to the same sums. What is asked
for is in `code` the goal with its test and its changes, and in `math` the chain of equations, in whatever order their operands
are. What training asked for are the problems of the embedded recipe: its backbone's, and those that its head's states are from.
"""

import re
from typing import Any

from mrp_trainer.data.problems import TaskDataset
from mrp_trainer.data.tasks import Problem, Split, problems
from mrp_trainer.train.tiny import BLOCK_SIZE, FAMILIES, TinyOptions
from transformers import PreTrainedTokenizerBase

from .common import TINY, emit, header, load, parser_of
from .frontier import JUDGED, setting_name
from .measure import measure
from .targets import alone, drafted

MODES = tuple(setting for target in ("static", "dynamic") for setting in (alone(target), drafted("mrp_spec", target, 8)))
_EQUATION = re.compile(r"= (\d+) ([-+*]) (\d+) = ")
_CHANGE = re.compile(r"(?:plus|minus|times) \d")
_TEST = re.compile(r"even|odd|(?:greater than|less than|not) \d")


def asked_for(problem: Problem) -> tuple[Any, ...]:
    """Return what a problem of `math` or `code` asks for, the same for every way to say it."""
    if problem.family == "math":
        steps = _EQUATION.findall(problem.answer)
        return tuple((sign, *((a, b) if sign == "-" else sorted((a, b), key=int))) for a, sign, b in steps)
    argument, result = problem.cases[0]
    if not isinstance(argument, list):
        goal = "number"
    elif isinstance(result, list):
        goal = "list"
    else:
        goal = "count" if re.search("Count|how many", problem.prompt) else "sum"
    return goal, *_TEST.findall(problem.prompt), *_CHANGE.findall(problem.prompt)


def asked_in_training(tokenizer: PreTrainedTokenizerBase, backbone: int, head: int) -> set[tuple[Any, ...]]:
    """Return what the recipe's problems ask for: so many of its backbone's, and so many of its head's."""
    found = set()
    for seed, size in enumerate((backbone, head)):
        dataset = TaskDataset(tokenizer, size, FAMILIES, "train", BLOCK_SIZE, seed=seed)
        found |= {asked_for(problem) for problem in map(dataset.problem, range(size)) if problem.family in JUDGED}
    return found


def parts(family: Any, split: Split, count: int, known: set[tuple[Any, ...]]) -> tuple[dict[str, list[Problem]], float]:
    """Return the first problems of a split that are `novel` and `known`, so many of each, and the share that is known.

    Raises:
        ValueError: The split has not so many of either.
    """
    drawn: list[Problem] = []
    of: dict[str, list[Problem]] = {"novel": [], "known": []}
    while min(map(len, of.values())) < count:
        drawn = problems(family, split, len(drawn) + 5 * count)
        of = {"novel": [], "known": []}
        for problem in drawn:
            of["known" if asked_for(problem) in known else "novel"].append(problem)
    return {name: found[:count] for name, found in of.items()}, len(of["known"]) / len(drawn)


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line for each family, mode and part."""
    parser = parser_of("novel", __doc__)
    parser.add_argument("--model", default=str(TINY))
    parser.add_argument("--count", type=int, default=200, help="problems of each part")
    parser.add_argument("--backbone", type=int, default=TinyOptions.steps * TinyOptions.batch_size, help="training problems")
    parser.add_argument("--head", type=int, default=TinyOptions.trajectories, help="training problems")
    parser.add_argument("--batch-size", type=int, default=50)
    options = parser.parse_args(arguments)
    model, tokenizer = load(options.model)
    emit(header("novel", options, model))
    known = asked_in_training(tokenizer, options.backbone, options.head)
    for family in JUDGED:
        of, share = parts(family, "heldout", options.count, known)
        for setting in MODES:
            for part, asked in of.items():
                made = measure(model, tokenizer, asked, options.batch_size, **setting)
                where = {"family": family, "known_percent": round(100 * share, 1), "mode": setting_name(setting), "part": part}
                emit({**where, "problems": len(asked), **made.line()})


if __name__ == "__main__":
    main()
