"""The synthetic problems against their own words, judge and splits."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest
from helpers import python_function
from mrp_trainer.data import tasks
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


def solves(problem: Problem, text: str) -> bool | None:
    return judge([problem], [text])[0]


@pytest.mark.parametrize("split", SPLITS)
def test_math_answers_follow_from_the_words(split: Any) -> None:
    for problem in problems("math", split, 300):
        assert problem.number == number_that_the_words_say(problem.prompt), problem
        assert solves(problem, problem.answer), problem


@pytest.mark.parametrize("split", SPLITS)
def test_code_cases_follow_from_the_words(split: Any) -> None:
    for problem in problems("code", split, 300):
        assert len(problem.cases) >= 6
        for argument, result in problem.cases:
            assert result == result_that_the_words_say(problem.prompt, argument), problem


def test_math_judge_refuses_every_single_slip() -> None:
    for problem in problems("math", "heldout", 300):
        opening, *equations, last = problem.answer.split("\n")
        unknown = equations[0].split(" ")[0]
        assert not solves(problem, "\n".join([opening, *equations, f"#### {problem.number + 1}"]))
        assert not solves(problem, "\n".join([re.sub(rf"\b{unknown}\b", "other", opening), *equations, last]))
        for i, equation in enumerate(equations):
            left, result = equation.rsplit(" ", 1)
            for slip in (f"{left} {int(result) + 1}", equation.replace(unknown, f"{unknown}_other", 1)):
                assert not solves(problem, "\n".join([opening, *equations[:i], slip, *equations[i + 1 :], last])), slip


def passes_in_python(problem: Problem, source: str) -> bool:
    try:
        function = python_function(source)
        return all(function(argument) == result for argument, result in problem.cases)
    except (NameError, TypeError, ValueError, RecursionError, ZeroDivisionError, SyntaxError):
        return False


def test_code_judge_agrees_with_python_on_every_single_slip() -> None:
    slips = []
    for problem in problems("code", "train", 30, seed=1):
        for match in re.finditer(r"\b(\d+|[a-z_]+)\b", problem.answer):
            slip = str(int(match[0]) + 1) if match[0].isdigit() else match[0] + "_other"
            slips.append((problem, problem.answer[: match.start()] + slip + problem.answer[match.end() :]))
    verdicts = judge(*zip(*slips, strict=True))
    for (problem, source), verdict in zip(slips, verdicts, strict=True):
        assert verdict == passes_in_python(problem, source), source
    # Some slips do no harm (the function's own name); most do.
    assert verdicts.count(False) > 4 * verdicts.count(True) > 0


MATH = Problem("math", "Ana has 3 pens. Ana buys 4 more. Ana loses 1. How many pens are there now?", "", number=6)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Let n_now be the pens.\nn_now = 3 + 4 = 7\nn_now = 7 - 1 = 6\n#### 6", True),
        ("The pens are x.\nx = 2 * 3 = 6\n#### 6", True),
        ("Let n be the pens.\nn = 3 + 4 = 7\nn = 7 - 1 = 6\n#### 7", False),
        ("Let n be the pens.\nn = 3 + 4 = 7\nn = 7 - 0 = 7\n#### 6", False),
        ("Let n be the pens.\nn = 3 + 4 = 8\nn = 7 - 1 = 6\n#### 6", False),
        ("Let n be the pens.\nn = 3 + 4 = 7\nn = 1 - 7 = 6\n#### 6", False),
        ("Let n be the pens.\nn = 3 + 4 = 7\nm = 7 - 1 = 6\n#### 6", False),
        ("Let n be the pens.\nn = 3 + 4 = 7\nn = 7 - 1 = 6\n#### 6 pens", False),
        ("Let n be the pens.\nn = 3 + 4 = 7\nn = 7 - 1 = 6", False),
        ("#### 6", False),
        ("", False),
    ],
)
def test_math_judge_by_hand(text: str, right: bool) -> None:
    assert judge([MATH], [text]) == [right]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("def f(xs):\n    return sum(x + 1 for x in xs if x > 2)", True),
        ("def f(xs):\n    t = 0\n    for x in xs:\n        if 2 < x:\n            t += 1 + x\n    return t", True),
        ("def f(xs):\n    return sum(x + 1 for x in xs if x > 3)", False),
        ("def f(xs):\n    t = 0\n    for x in xs:\n        if 2 < x:\n            t += 1 + x\n        return t", False),
        ("import os\ndef f(xs):\n    return sum(x + 1 for x in xs if x > 2)", False),
        ("", False),
    ],
)
def test_code_judge_by_hand(text: str, right: bool) -> None:
    assert judge([Problem("code", "", "", cases=[([], 0), ([1, 3, 5], 10), ([2, 2], 0)])], [text]) == [right]


def test_a_batch_of_every_family_is_judged_in_order() -> None:
    asked = [make_problem(family, "train", index) for index in range(3) for family in FAMILIES]
    answers = [problem.answer for problem in asked]
    assert judge(asked, answers) == [True, True, None] * 3
    assert judge(asked, [*answers[:4], "import os", *answers[5:]]) == [True, True, None, True, False, None, True, True, None]
    assert judge([], []) == []


# Splits


@pytest.mark.parametrize(("family", "split"), [*zip(FAMILIES, SPLITS, strict=True)])
def test_a_problem_is_a_function_of_its_arguments(family: Any, split: Any) -> None:
    first = [make_problem(family, split, i) for i in range(20)]
    assert first == [make_problem(family, split, i) for i in reversed(range(20))][::-1]
    assert first != [make_problem(family, split, i, seed=1) for i in range(20)]
    assert len({problem.prompt for problem in first}) > 10


def test_a_problem_does_not_depend_on_the_process() -> None:
    program = (
        "from mrp_trainer.data.tasks import make_problem\n"
        "print([make_problem(f, 'tune', 5) for f in ('math', 'code', 'source')])"
    )
    expected = str([make_problem(family, "tune", 5) for family in FAMILIES])
    environment = {**os.environ, "PYTHONHASHSEED": "123", "PYTHONIOENCODING": "utf-8"}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, encoding="utf-8", check=True)
    assert run.stdout.strip() == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_splits_share_no_prompt(family: Any) -> None:
    counts = {"train": 2000, "tune": 500, "heldout": 500}
    prompts = [problem.prompt for split in SPLITS for problem in problems(family, split, counts[split])]
    assert len(prompts) == 3000
    assert len(set(prompts)) == 3000


def test_source_modules_belong_to_one_split() -> None:
    train, tune, heldout = (set(source_modules(split)) for split in ("train", "tune", "heldout"))
    assert train
    assert tune
    assert heldout
    assert not heldout & train
    assert not tune & train
    assert not heldout & tune


@pytest.mark.parametrize("split", SPLITS)
def test_source_problems_are_passages_of_their_own_split(split: Any) -> None:
    modules = source_modules(split)
    for problem in problems("source", split, 100):
        assert any(problem.prompt + problem.answer in module for module in modules)


def test_unknown_family_and_split_are_named() -> None:
    family: Any = "poems"
    split: Any = "test"
    with pytest.raises(ValueError, match="unknown family 'poems'"):
        make_problem(family, "train", 0)
    with pytest.raises(ValueError, match="unknown split 'test'"):
        make_problem("math", split, 0)


def test_more_problems_than_there_are() -> None:
    """A count beyond the prompts there are is an error instead of an endless search."""
    with pytest.raises(ValueError, match=r"count is 9, and math/tune has about 3 different prompts: ask for fewer"):
        few("math", "tune", 9)


def few(family: Any, split: Any, count: int) -> list[Problem]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tasks, "make_problem", lambda f, s, index, seed: Problem(f, str(index % 3), ""))
        return problems(family, split, count)
