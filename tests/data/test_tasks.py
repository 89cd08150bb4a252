"""The synthetic problems against their own words, judge and splits."""

import re
from typing import Any

import pytest
from mrp_trainer.data.tasks import (
    FAMILIES,
    SPLITS,
    Problem,
    judge,
    make_problem,
    problems,
    source_modules,
)

# Problems: the words, the answer and the judge


def number_that_the_words_say(prompt: str) -> int:
    value = 0
    for sentence in prompt.split(". "):
        digits = [int(d) for d in re.findall(r"\d+", sentence)]
        if re.search(r" (has|starts with) \d", sentence):
            value = digits[0]
        elif re.search(r" (buys|finds) | more$", sentence):
            value += digits[0]
        elif re.search(r" (loses|sells) | to [A-Z]", sentence):
            value -= digits[0]
        elif "times" in sentence:
            value *= 3 if "three" in sentence else 2
        else:
            assert sentence.startswith("How many ")
    return value


def result_that_the_words_say(prompt: str, argument: Any) -> Any:
    maps = re.findall(r"(plus|minus|times) (\d)", prompt)
    name, limit = re.findall(r"(even|odd|greater than|less than|not)(?: (\d))?", prompt)[0]

    def mapped(value: int, which: int) -> int:
        kind, k = maps[which]
        return {"plus": value + int(k), "minus": value - int(k), "times": value * int(k)}[kind]

    def passes(value: int) -> bool:
        k = int(limit or 0)
        tests = {"even": value % 2 == 0, "odd": value % 2 == 1, "greater than": value > k, "less than": value < k}
        return tests.get(name, value != k)

    if isinstance(argument, int):
        return mapped(argument, 0) if passes(argument) else mapped(argument, 1)
    if re.search("[Cc]ount|how many", prompt):
        return len([v for v in argument if passes(mapped(v, 0))])
    kept = [mapped(v, 0) for v in argument if passes(v)]
    return sum(kept) if re.search("[Ss]um|add up", prompt) else kept


@pytest.mark.parametrize("split", SPLITS)
def test_answers_follow_from_the_words(split: Any) -> None:
    sums = problems("math", split, 300)
    for problem in sums:
        assert problem.number == number_that_the_words_say(problem.prompt), problem
        assert max(map(int, re.findall(r"\d+", problem.answer))) <= 30
    assert judge(sums, [problem.answer for problem in sums]) == [True] * 300
    functions = problems("code", split, 300)
    assert judge(functions, [problem.answer for problem in functions]) == [True] * 300
    for problem in functions:
        assert len(problem.cases) >= 6
        for argument, result in problem.cases:
            assert result == result_that_the_words_say(problem.prompt, argument), problem


MATH = Problem("math", "Ana has 3 pens. Ana buys 4 more. Ana loses 1. How many pens are there now?", "", number=6)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Let n_now be the pens.\nn_now = 3 + 4 = 7\nn_now = 7 - 1 = 6\n#### 6", True),
        ("The pens are x.\nx = 2 * 3 = 6\n#### 6", True),
        ("Let n be the pens.\nn = 3 + 4 = 7\nn = 7 - 0 = 7\n#### 6", False),
        ("Let n be the pens.\nn = 3 + 4 = 7\nn = 1 - 7 = 6\n#### 6", False),
        ("Let n and m be the pens.\nn = 3 + 4 = 7\nm = 7 - 1 = 6\n#### 6", False),
        ("Let m be the pens.\nn = 3 + 4 = 7\nn = 7 - 1 = 6\n#### 6", False),
        ("Let n be the pens.\nn = 3 + 3 = 6\nn = 5 + 1 = 6\n#### 6", False),
        ("Let n be the pens.\nn = 3 + 4 = 7\nn = 7 - 1 = 6\n#### 6 pens", False),
        ("#### 6", False),
    ],
)
def test_math_judge_by_hand(text: str, right: bool) -> None:
    assert judge([MATH], [text]) == [right]


def test_code_judge_by_hand() -> None:
    problem = Problem("code", "", "", cases=[([], 0), ([1, 3, 5], 10), ([2, 2], 0)])
    right = "def f(xs):\n    t = 0\n    for x in xs:\n        if 2 < x:\n            t += 1 + x\n    return t"
    wrong = [right.replace("2 <", "3 <"), right.replace("    return", "        return"), f"import os\n{right}", ""]
    assert judge([problem] * 5, [right, *wrong]) == [True] + [False] * 4


def test_a_batch_of_every_family_is_judged_in_order() -> None:
    asked = [make_problem(family, "train", index) for index in range(3) for family in FAMILIES]
    answers = [problem.answer for problem in asked]
    assert judge(asked, [*answers[:4], "import os", *answers[5:]]) == [True, True, None, True, False, None, True, True, None]
    assert judge([], []) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_splits_share_no_prompt_and_a_problem_is_a_function_of_its_arguments(family: Any) -> None:
    """Of source: also no module."""
    counts = {"train": 2000, "tune": 500, "heldout": 500}
    asked = {split: problems(family, split, count) for split, count in counts.items()}
    assert len({problem.prompt for split in SPLITS for problem in asked[split]}) == 3000
    assert asked["tune"][5] == make_problem(family, "tune", 5) != make_problem(family, "tune", 5, seed=1)
    train, tune, heldout = (set(source_modules(split)) for split in SPLITS)
    assert train and tune and heldout and not train & tune and not train & heldout and not tune & heldout  # noqa: PT018
    if family == "source":
        assert all(any(p.prompt + p.answer in module for module in tune) for p in asked["tune"][:50])
