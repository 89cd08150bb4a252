"""Synthetic, verifiable problems for small diffusion language models.

There are three families. A problem is a pure function of its family, split, index and seed.

* ``math``: a word problem with small numbers, answered by a chain of short equations and a final
  ``#### number``.
* ``code``: a one-sentence specification, answered by a small Python function that is run on hidden
  inputs.
* ``source``: a stretch of real Python source of the interpreter's standard library, to be
  continued. It has no right answer.

The answers contain free choices that must agree with each other: the order of operands, names of
one to three words that recur, a loop or a comprehension. A decoder that reveals several positions
at once, without checking that they agree, gets the answers wrong.

The hash of a problem's prompt decides its split, so no prompt can occur in two splits. The splits
also draw from disjoint seeds. `mrp tasks` writes problems as JSON lines.
"""

import hashlib
import json
import operator
import random
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from .sandbox import run_functions

Family = Literal["math", "code", "source"]
Split = Literal["train", "tune", "heldout"]
FAMILIES: tuple[Family, ...] = get_args(Family)
SPLITS: tuple[Split, ...] = get_args(Split)

# Percents of the hash range that belong to a split.
_SPLIT_RANGES: dict[Split, range] = {
    "heldout": range(0, 8),
    "tune": range(8, 16),
    "train": range(16, 100),
}


@dataclass(frozen=True)
class Problem:
    """A synthetic problem.

    Attributes:
        family: The family of the problem.
        prompt: The user's prompt; in ``source``, the text to continue.
        answer: One of the right answers; in ``source``, the real continuation.
        number: In ``math``, the number that must follow ``####``.
        cases: In ``code``, pairs ``(argument, result)`` that the function must reproduce.
    """

    family: Family
    prompt: str
    answer: str
    number: int | None = None
    cases: list[tuple[Any, Any]] = field(default_factory=list)

    def messages(self) -> list[dict[str, str]]:
        """Return the prompt as a chat of one user turn."""
        return [{"role": "user", "content": self.prompt}]


_PEOPLE = ("Ana", "Bo", "Carl", "Dina", "Emil", "Fay", "Gus", "Hana", "Ivo", "June", "Kai", "Lena")
_ITEMS = ("apples", "pens", "coins", "shells", "stamps", "cards", "books", "beads", "nuts", "keys")
_NAME_HEADS = ("x", "n", "total", "count", "value", "item", "left", "rest", "number", "amount")
_NAME_TAILS = ("now", "all", "here", "new", "old", "one")
_OPENINGS = (
    "Let {u} be the {things}.",
    "Call the {things} {u}.",
    "We write {u} for the {things}.",
    "The {things} are {u}.",
)
# By operation, templates of sentences that describe it; p and q are persons, n is a number.
_SENTENCES: dict[str, tuple[str, ...]] = {
    "+": ("{p} buys {n} more.", "{q} gives {p} {n} more.", "{p} finds {n}."),
    "-": ("{p} loses {n}.", "{p} gives {n} to {q}.", "{p} sells {n}."),
    "*": ("Then {p} has {times} times as many.", "The number grows {times} times."),
}
_RESULTS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
_LARGEST = 30


def _name(rng: random.Random, reserved: tuple[str, ...] = ()) -> str:
    """Make up an identifier of one to three words that is not in `reserved`."""
    while True:
        words = [rng.choice(_NAME_HEADS), *rng.sample(_NAME_TAILS, rng.choice((0, 0, 1, 2)))]
        if (name := "_".join(words)) not in reserved:
            return name


def _math(rng: random.Random) -> Problem:
    person, partner = rng.sample(_PEOPLE, 2)
    items = rng.choice(_ITEMS)
    value = rng.randint(2, 20)
    sentences = [
        rng.choice(("{p} has {n} {things}.", "{p} starts with {n} {things}.")).format(
            p=person, n=value, things=items
        )
    ]
    unknown = _name(rng)
    lines = [rng.choice(_OPENINGS).format(u=unknown, things=items)]
    for _ in range(rng.choice((2, 3))):
        possible = {"+": value < _LARGEST, "-": value > 1, "*": value * 2 <= _LARGEST}
        kind = rng.choice([kind for kind in _SENTENCES if possible[kind]])
        if kind == "*":
            operand = 3 if value * 3 <= _LARGEST and rng.random() < 0.5 else 2
        elif kind == "+":
            operand = rng.randint(1, min(9, _LARGEST - value))
        else:
            operand = rng.randint(1, min(9, value - 1))
        words = {
            "p": person,
            "q": partner,
            "n": operand,
            "times": {2: "two", 3: "three"}.get(operand),
        }
        sentences.append(rng.choice(_SENTENCES[kind]).format(**words))
        first, second = (operand, value) if kind != "-" and rng.random() < 0.5 else (value, operand)
        value = _RESULTS[kind](value, operand)
        lines.append(f"{unknown} = {first} {kind} {second} = {value}")
    sentences.append(
        rng.choice((f"How many {items} does {person} have?", f"How many {items} are there now?"))
    )
    lines.append(f"#### {value}")
    return Problem("math", " ".join(sentences), "\n".join(lines), number=value)


_EQUATION = re.compile(r"([a-z_]+) = (\d{1,9}) ([-+*]) (\d{1,9}) = (\d{1,9})")


def _judge_math(problem: Problem, text: str) -> bool:
    """Return whether a text solves a problem. Its final number must be right; every equation must
    be true, and use the result of the equation before it; and all equations must be about the same
    unknown, which the first line names."""
    lines = text.strip().split("\n")
    if len(lines) < 3 or lines[-1] != f"#### {problem.number}":
        return False
    unknowns = set()
    results: list[int] = []
    for line in lines[1:-1]:
        if (match := _EQUATION.fullmatch(line)) is None:
            return False
        unknown, first, sign, second, result = match.groups()
        operands = (int(first), int(second))
        if _RESULTS[sign](*operands) != int(result):
            return False
        if results and results[-1] not in operands:
            return False
        unknowns.add(unknown)
        results.append(int(result))
    return (
        len(unknowns) == 1
        and unknowns.pop() in re.findall(r"[a-z_]+", lines[0])
        and results[-1] == problem.number
    )


@dataclass(frozen=True)
class _Phrase:
    """A fragment of a specification: its words, the ways to write it in Python (``{x}`` stands for
    the variable), and the function that it computes."""

    words: str
    python: tuple[str, ...]
    compute: Callable[[int], Any]


def _test(rng: random.Random) -> _Phrase:
    k = rng.randint(2, 9)
    return rng.choice(
        (
            _Phrase("even", ("{x} % 2 == 0",), lambda v: v % 2 == 0),
            _Phrase("odd", ("{x} % 2 == 1", "{x} % 2 != 0"), lambda v: v % 2 == 1),
            _Phrase(f"greater than {k}", (f"{{x}} > {k}",), lambda v: v > k),
            _Phrase(f"less than {k}", (f"{{x}} < {k}",), lambda v: v < k),
            _Phrase(f"not {k}", (f"{{x}} != {k}", f"{k} != {{x}}"), lambda v: v != k),
        )
    )


def _map(rng: random.Random) -> _Phrase:
    k = rng.randint(2, 9)
    return rng.choice(
        (
            _Phrase(f"plus {k}", (f"{{x}} + {k}", f"{k} + {{x}}"), lambda v: v + k),
            _Phrase(f"minus {k}", (f"{{x}} - {k}",), lambda v: v - k),
            _Phrase(f"times {k}", (f"{{x}} * {k}", f"{k} * {{x}}"), lambda v: v * k),
        )
    )


def _code_number(rng: random.Random) -> Problem:
    test = _test(rng)
    yes = _map(rng)
    no = _map(rng)
    prompt = rng.choice(
        (
            "Given a number, return it {yes} if it is {test}, else {no}.",
            "Write a function of a number: {yes} when {test}, otherwise {no}.",
            "If the number is {test} return it {yes}, or else return it {no}.",
        )
    ).format(test=test.words, yes=yes.words, no=no.words)
    function = _name(rng)
    x = _name(rng, (function,))
    layout = rng.choice(
        (
            "def {f}({x}):\n    if {test}:\n        return {yes}\n    return {no}",
            "def {f}({x}):\n    return {yes} if {test} else {no}",
            "def {f}({x}):\n"
            "    if {test}:\n"
            "        {x} = {yes}\n"
            "    else:\n"
            "        {x} = {no}\n"
            "    return {x}",
        )
    )
    python = {}
    for name, phrase in (("test", test), ("yes", yes), ("no", no)):
        python[name] = rng.choice(phrase.python).format(x=x)
    answer = layout.format(f=function, x=x, **python)
    cases = [(v, yes.compute(v) if test.compute(v) else no.compute(v)) for v in range(-5, 20)]
    return Problem("code", prompt, answer, cases=cases)


# By the result of the function: prompts, start and increment of the loop, and the comprehension.
_LOOP = (
    "def {f}({xs}):\n"
    "    {acc} = ZERO\n"
    "    for {x} in {xs}:\n"
    "        if {test}:\n"
    "            {acc} += GAIN\n"
    "    return {acc}"
)
_GOALS: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    "sum": (
        (
            "Sum the numbers of a list that are {test}, each {each}.",
            "Return the sum of all numbers {test} in a list, {each} each.",
            "Given a list, add up every number {each} that is {test}.",
        ),
        "0",
        "{each}",
        "def {f}({xs}):\n    return sum({each} for {x} in {xs} if {test})",
    ),
    "list": (
        (
            "From a list keep the numbers that are {test}, each {each}.",
            "Return a list of all numbers {test} in a list, {each} each.",
            "Given a list, collect every number {each} that is {test}.",
        ),
        "[]",
        "[{each}]",
        "def {f}({xs}):\n    return [{each} for {x} in {xs} if {test}]",
    ),
    "count": (
        (
            "Count the numbers of a list that {each} are {test}.",
            "Return how many numbers of a list are {test} when taken {each}.",
            "Given a list, how many numbers {each} are {test}?",
        ),
        "0",
        "1",
        "def {f}({xs}):\n    return sum(1 for {x} in {xs} if {test})",
    ),
}


def _code_list(rng: random.Random) -> Problem:
    test = _test(rng)
    transform = _map(rng)
    goal = rng.choice(("sum", "list", "count"))
    prompts, zero, gain, comprehension = _GOALS[goal]
    layouts = (_LOOP.replace("ZERO", zero).replace("GAIN", gain), comprehension)
    function = _name(rng)
    xs = _name(rng, (function,))
    x = _name(rng, (function, xs))
    acc = _name(rng, (function, xs, x))
    python_each = rng.choice(transform.python).format(x=x)
    layout = rng.choice(layouts)
    # Both are drawn, so that every goal takes the same number of random numbers.
    test_before = rng.choice(test.python).format(x=x)
    test_after = rng.choice(test.python).format(x=f"({python_each})")
    answer = layout.format(
        f=function,
        xs=xs,
        x=x,
        acc=acc,
        each=python_each,
        test=test_after if goal == "count" else test_before,
    )

    def expected(values: list[int]) -> Any:
        results = []
        for v in values:
            result = transform.compute(v)
            if test.compute(result if goal == "count" else v):
                results.append(result)
        if goal == "count":
            return len(results)
        return sum(results) if goal == "sum" else results

    inputs: list[list[int]] = []
    for length in (0, 1, 5, 8, 12):
        inputs.append([rng.randint(-5, 20) for _ in range(length)])
    inputs.append(list(range(-5, 21)))
    return Problem(
        "code",
        rng.choice(prompts).format(test=test.words, each=transform.words),
        answer,
        cases=[(v, expected(v)) for v in inputs],
    )


_SOURCE_PROMPT_CHARS = 160
_SOURCE_ANSWER_CHARS = 240


@cache
def source_modules(split: Split) -> tuple[str, ...]:
    """Return the source texts of those modules of the standard library that belong to a split. The
    modules are the top-level `.py` files of more than 4,000 bytes. The hash of a file's name
    decides its split."""
    folder = Path(sysconfig.get_path("stdlib"))
    return tuple(
        path.read_text(encoding="utf-8")
        for path in sorted(folder.glob("*.py"))
        if path.stat().st_size > 4000 and belongs(path.name, split)
    )


def _source(rng: random.Random, split: Split) -> Problem:
    modules = source_modules(split)
    text = rng.choices(modules, weights=[len(m) for m in modules])[0]
    starts = rng.randrange(max(1, len(text) - _SOURCE_PROMPT_CHARS - _SOURCE_ANSWER_CHARS))
    start = text.find("\n", starts) + 1
    middle = start + _SOURCE_PROMPT_CHARS
    return Problem("source", text[start:middle], text[middle : middle + _SOURCE_ANSWER_CHARS])


def belongs(text: str, split: Split) -> bool:
    """Return whether a text belongs to a split. The hash of the text decides: 84 % of all texts
    belong to `train`, and 8 % each to `tune` and `heldout`."""
    return (
        int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % 100
        in _SPLIT_RANGES[split]
    )


def make_problem(family: Family, split: Split, index: int, seed: int = 0) -> Problem:
    """Make one problem. The same arguments always give the same problem.

    Args:
        family: `math`, `code` or `source`.
        split: `train`, `tune` or `heldout`. A prompt occurs in only one of them.
        index: The number of the problem, counted from 0. Problems with different numbers may have
            the same prompt.
        seed: Another seed gives other problems.
    """
    rng = random.Random(f"{family}/{split}/{seed}/{index}")
    while True:
        if family == "math":
            problem = _math(rng)
        elif family == "source":
            problem = _source(rng, split)
        elif rng.random() < 0.5:
            problem = _code_number(rng)
        else:
            problem = _code_list(rng)
        if belongs(problem.prompt, split):
            return problem


def problems(family: Family, split: Split, count: int, seed: int = 0) -> list[Problem]:
    """List the first ``count`` problems of a split that have different prompts; `ValueError` if the
    split has fewer."""
    by_prompt: dict[str, Problem] = {}
    index = 0
    while len(by_prompt) < count:
        if index == 100 * count:
            raise ValueError(
                f"count is {count}, and {family}/{split} has about {len(by_prompt)} different "
                "prompts: ask for fewer"
            )
        problem = make_problem(family, split, index, seed)
        by_prompt.setdefault(problem.prompt, problem)
        index += 1
    return list(by_prompt.values())


def judge(problems: Sequence[Problem], texts: Sequence[str]) -> list[bool | None]:
    """Judge an answer to each problem. Functions are run in processes of their own
    (`run_functions`).

    Args:
        problems: The problems.
        texts: For each problem, the answer, without special tokens.

    Returns:
        For each problem, whether the answer is right. ``math``: whether the chain of equations is
            true and ends in the right number. ``code``: whether the text is one function, uses only
            the Python that `run_functions` allows, and gives the right result in every case of
            `Problem.cases`. ``source``: None, since real text has no right continuation.
    """
    programs = []
    for problem, text in zip(problems, texts, strict=True):
        if problem.family == "code":
            programs.append((text, [argument for argument, _ in problem.cases]))
    results = iter(run_functions(programs))
    verdicts: list[bool | None] = []
    for problem, text in zip(problems, texts, strict=True):
        if problem.family == "code":
            verdicts.append(next(results) == [result for _, result in problem.cases])
        elif problem.family == "math":
            verdicts.append(_judge_math(problem, text))
        else:
            verdicts.append(None)
    return verdicts


def training_lines(family: Family, split: Split, count: int, seed: int = 0) -> Iterator[str]:
    """Yield the first ``count`` problems of a split with different prompts, as JSON lines to train
    on. A line is a chat of the prompt and the answer (`messages`) or, in the family `source`,
    `prompt` and `completion`. `ValueError` if the split has fewer."""
    for problem in problems(family, split, count, seed):
        if family == "source":
            yield json.dumps({"prompt": problem.prompt, "completion": problem.answer})
        else:
            yield json.dumps(
                {
                    "messages": [
                        *problem.messages(),
                        {"role": "assistant", "content": problem.answer},
                    ]
                }
            )
