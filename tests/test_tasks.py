"""The sandbox against real Python, and the synthetic problems against their own words, judge and splits."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from trainer.sandbox import SandboxError, call_function
from trainer.tasks import (
    FAMILIES,
    SPLITS,
    Problem,
    judge,
    main,
    make_problem,
    problem_from_json,
    problems,
    source_modules,
)


def python_function(source: str) -> Callable[[Any], Any]:
    """What Python itself makes of the one function in a text."""
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return next(value for name, value in namespace.items() if name != "__builtins__")


def body(*lines: str) -> str:
    return "\n".join(["def f(x):", *(f"    {line}" for line in lines)])


# Sandbox: what is accepted

ACCEPTED_OF_INT = [
    body("return x"),
    body("'docstring'", "return x"),
    body("return"),
    body("pass"),
    body("return x + 2 - 3 * x"),
    body("return (x + 2) * -x"),
    body("return x // 3 + x % 3"),
    body("return [-x // 3, +x % -3, x // -2]"),
    body("return not x"),
    body("return x and 7"),
    body("return x or 7"),
    body("return x and 7 or x and 8"),
    body("return 0 and x // 0"),
    body("return 1 or x // 0"),
    body("return 1 < x < 5"),
    body("return 1 < x <= 5 != 3 >= x == x"),
    body("return 5 < 3 < x // 0"),
    body("return x in [1, 2, 3]"),
    body("return x not in [1, 2, 3]"),
    body("return (x == 3) + 1"),
    body("return True == 1"),
    body("return x if x > 2 else -x"),
    body("return [x, True, None, 'a', [x]]"),
    body("return [[x, 1], [x]] < [[x, 2]]"),
    body("return [1, x][x % 2]"),
    body("return [1, x][-1]"),
    body("return [4, 5][x > 2]"),
    body("return 'ab'[x % 2]"),
    body("return 'b' in 'abc'"),
    body("return [0] * x"),
    body("return x * [1, 2] + [x]"),
    body("return abs(x) + abs(-x)"),
    body("return max(x, 3)"),
    body("return min(x, 3, 2)"),
    body("return int('12') + int(x > 1) + int()"),
    body("return bool(x)"),
    body("return list() + list('ab')"),
    body("return sum([[x], [1]], [])"),
    body("return sum([x, x], 5)"),
    body("x += 1", "x -= 3", "x *= 2", "x //= 3", "x %= 4", "return x"),
    body("if x > 3:", "    return 1", "elif x > 1:", "    return 2", "else:", "    x = 9", "return x"),
    body("a = [1]", "b = a", "a += [x]", "return b"),
    body("a = [1]", "b = a", "a = a + [x]", "return b"),
    body("a = [1]", "a += a", "return a"),
    body("for i in [1, 2, 3, 4]:", "    if i == x:", "        break", "    x += i", "return [x, i]"),
    body("for i in [1, 2, 3, 4]:", "    if i == x:", "        continue", "    x += i", "return [x, i]"),
    body("for i in [1, 2]:", "    for j in [1, 2]:", "        if j == x:", "            break", "        x += j", "return x"),
    body("for i in [1, 2]:", "    for j in [1, 2]:", "        if i + j == x:", "            return [i, j]"),
    body("a = [x]", "for i in a:", "    if i < 9:", "        a += [i + 1]", "return a"),
    body("def_ = x", "return def_"),
    "def name_one(name_one_):\n    return name_one_",
    "def x(x):\n    return x",
]
ACCEPTED_OF_LIST = [
    body("return x"),
    body("return len(x)"),
    body("return sum(x)"),
    body("return sorted(x)"),
    body("return list(x) == x"),
    body("return max(x + [0]) - min(x + [0])"),
    body("return max(i * i for i in x + [1])"),
    body("return min(-i for i in x + [1])"),
    body("return sorted(i % 3 for i in x)"),
    body("return list(i for i in x if i > 1 if i < 9)"),
    body("return sum(i + 2 for i in x if i % 2 == 0)"),
    body("return sum(1 for i in x if (i - 4) % 2 != 0)"),
    body("return sum(i > 3 for i in x)"),
    body("return [i for i in x if i not in [3, 4]]"),
    body("return [[i, j] for i in x for j in x if i < j]"),
    body("return [[j for j in x if j <= i] for i in x]"),
    body("return [j for i in [x, x] for j in i]"),
    body("return [x for x in x]"),
    body("return [x for x in x] + x"),
    body("return sum(sum for sum in x)"),
    body("i = 7", "a = [i for i in x]", "return [a, i]"),
    body("k = 3", "return [[i * k for i in x] for j in [1]]"),
    body("sum = 0", "for i in x:", "    sum += i", "return sum"),
    body("a = []", "for i in x:", "    if i > 2:", "        a += [i - 2]", "return a"),
    body("a = 0", "for i in x:", "    a += 1", "return a"),
    body("x += [1]", "return x"),
    body("for i in x:", "    pass", "return len(x)"),
    body("return x[0] if x else None"),
]


@pytest.mark.parametrize("argument", [0, 1, 2, 3, 7, -5, True], ids=repr)
@pytest.mark.parametrize("source", ACCEPTED_OF_INT)
def test_sandbox_computes_what_python_computes_for_numbers(source: str, argument: int) -> None:
    expected = python_function(source)(argument)
    result = call_function(source, argument)
    assert (type(result), result) == (type(expected), expected)


@pytest.mark.parametrize("argument", [[], [4], [3, 1, 2], [5, -2, 5, 8, 0, 3]], ids=repr)
@pytest.mark.parametrize("source", ACCEPTED_OF_LIST)
def test_sandbox_computes_what_python_computes_for_lists(source: str, argument: list[int]) -> None:
    expected = python_function(source)(list(argument))
    result = call_function(source, list(argument))
    assert (type(result), result) == (type(expected), expected)


@pytest.mark.parametrize("source", [body("x += [9]", "return x"), body("for i in x:", "    i += [9]", "return x")])
def test_sandbox_leaves_the_argument_alone(source: str) -> None:
    argument = [[1], [2, 3]]
    assert call_function(source, argument) != [[1], [2, 3]]
    assert argument == [[1], [2, 3]]


# Sandbox: what is refused


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import os", "one undecorated function"),
        ("x = 1", "one undecorated function"),
        ("", "one undecorated function"),
        ("f(1)", "one undecorated function"),
        ("f = lambda x: x", "one undecorated function"),
        ("class F:\n    pass", "one undecorated function"),
        ("async def f(x):\n    return x", "one undecorated function"),
        ("def f(x):\n    return x\ndef g(x):\n    return x", "one undecorated function"),
        ("def f(x):\n    return x\nf(1)", "one undecorated function"),
        ("@abs\ndef f(x):\n    return x", "one undecorated function"),
        ("def f(x) -> int:\n    return x", "one undecorated function"),
        ("def f():\n    return 1", "one plain argument"),
        ("def f(x, y):\n    return x", "one plain argument"),
        ("def f(x=1):\n    return x", "one plain argument"),
        ("def f(*x):\n    return x", "one plain argument"),
        ("def f(**x):\n    return x", "one plain argument"),
        ("def f(*, x):\n    return x", "one plain argument"),
        ("def f(x, /):\n    return x", "one plain argument"),
        ("def f(x, *y):\n    return x", "one plain argument"),
        ("def f(x: int):\n    return x", "one plain argument"),
        ("def f(x) return x", "SyntaxError"),
        ("def f(x):\nreturn x", "SyntaxError"),
        ("def f(x):\n    return '\0'", "null bytes"),
        ("def f(x):\n    return '\ud800'", "UnicodeEncodeError"),
        (body("import os", "return x"), "Import is refused"),
        (body("from os import path", "return x"), "ImportFrom is refused"),
        (body("return x.real"), "Attribute is refused"),
        (body("return x.__class__"), "Attribute is refused"),
        (body("return __import__('os')"), "'__import__' is refused"),
        (body("__x = x", "return __x"), "'__x' is refused"),
        (body("while x:", "    pass"), "While is refused"),
        (body("try:", "    pass", "except:", "    pass"), "Try is refused"),
        (body("with x:", "    pass"), "With is refused"),
        (body("def g(y):", "    return y", "return x"), "FunctionDef is refused"),
        (body("global x", "return 1"), "Global is refused|SyntaxError"),
        (body("del x"), "Delete is refused"),
        (body("assert x"), "Assert is refused"),
        (body("raise x"), "Raise is refused"),
        (body("yield x"), "a statement that is only an expression"),
        (body("return (yield x)"), "Yield is refused"),
        (body("x", "return x"), "a statement that is only an expression"),
        (body("sum([x])", "return x"), "a statement that is only an expression"),
        (body("return lambda y: y"), "Lambda is refused"),
        (body("return (y := x)"), "NamedExpr is refused"),
        (body("return {1: x}"), "Dict is refused"),
        (body("return {x}"), "Set is refused"),
        (body("return {i for i in [x]}"), "SetComp is refused"),
        (body("return {i: i for i in [x]}"), "DictComp is refused"),
        (body("return x, x"), "Tuple is refused"),
        (body("return f'{x}'"), "JoinedStr is refused"),
        (body("return [*[x]]"), "Starred is refused"),
        (body("return [x][0:1]"), "Slice is refused"),
        (body("return x ** 2"), "Pow is refused"),
        (body("return x / 2"), "Div is refused"),
        (body("return x << 2"), "LShift is refused"),
        (body("return x & 2"), "BitAnd is refused"),
        (body("return ~x"), "Invert is refused"),
        (body("return x is None"), "Is is refused"),
        (body("return x is not None"), "IsNot is refused"),
        (body("return 1.5"), "constant of type float"),
        (body("return b''"), "constant of type bytes"),
        (body("return ..."), "constant of type ellipsis"),
        (body("return 1000001"), "constant above 1000000"),
        (body("return 0x" + "f" * 3900), "constant above 1000000"),
        (body("if x < 0:", "    import os", "return x"), "Import is refused"),
        (body("return x", "break"), "outside of a loop"),
        (body("if x:", "    continue"), "outside of a loop"),
        (body("a = b = x"), "one name as its target"),
        (body("a, b = [x, x]"), "one name as its target|Tuple"),
        (body("a = [x]", "a[0] = 1"), "one name as its target"),
        (body("a = [x]", "a[0] += 1"), "AugAssign needs a name"),
        (body("for a, b in [[x, x]]:", "    pass"), "For needs a name"),
        (body("return [a for a, b in [[x, x]]]"), "comprehension needs a name"),
        (body("for a in [x]:", "    pass", "else:", "    pass"), "else"),
        (body("return sum([x], start=1)"), "positional arguments"),
        (body("return sum(*[x])"), "Starred is refused"),
        (body("return [abs][0](x)"), "only builtins"),
    ],
)
def test_sandbox_refuses_a_text_before_it_runs(source: str, reason: str) -> None:
    with pytest.raises(SandboxError, match=reason):
        call_function(source, 3)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (body("return open('/etc/passwd')"), "'open' is not a builtin"),
        (body("return eval('1')"), "'eval' is not a builtin"),
        (body("return range(x)"), "'range' is not a builtin"),
        (body("return f(x)"), "'f' is not a builtin"),
        ("def sum(x):\n    return sum([x])", "'sum' is not a builtin"),
        (body("sum = x", "return sum([x])"), "'sum' is not a builtin"),
        (body("y = sum([x])", "sum = y", "return y"), "'sum' is not a builtin"),
        (body("return [sum([x]) for sum in [x]]"), "'sum' is not a builtin"),
        (body("return y"), "'y' is not defined"),
        (body("return sum"), "'sum' is not defined"),
        (body("return f"), "'f' is not defined"),
        (body("y += 1"), "'y' is not defined"),
        (body("y = y + x"), "'y' is not defined"),
        (body("if x < 0:", "    y = 1", "return y"), "'y' is not defined"),
        (body("a = [i for i in [x]]", "return i"), "'i' is not defined"),
        (body("return [i for j in [x] for i in i]"), "'i' is not defined"),
        (body("return [j for i in j for j in [x]]"), "'j' is not defined"),
        (body("return x[0]"), "TypeError"),
        (body("return [x][1]"), "IndexError"),
        (body("return [x]['a']"), "index must be an int"),
        (body("return [x][None]"), "index must be an int"),
        (body("return x // 0"), "ZeroDivisionError"),
        (body("return x % 0"), "ZeroDivisionError"),
        (body("return x + 'a'"), "Add of int and str"),
        (body("return 'a' + 'b'"), "Add of str and str"),
        (body("return '%999999999d' % x"), "Mod of str and int"),
        (body("return [x] - [x]"), "Sub of list and list"),
        (body("return [x] + 1"), "Add of list and int"),
        (body("return None + 1"), "Add of NoneType and int"),
        (body("return -[x]"), "TypeError"),
        (body("return x < 'a'"), "TypeError"),
        (body("return x in x"), "TypeError"),
        (body("return sorted([x, 'a'])"), "TypeError"),
        (body("return max([])"), "ValueError"),
        (body("return int('a')"), "ValueError"),
        (body("return len(x)"), "TypeError"),
        (body("return abs()"), "TypeError"),
        (body("return sum()"), "TypeError"),
        (body("return sum(x)"), "sum needs a list"),
        (body("return sum([], 'a')"), "sum needs a list"),
        (body("return sum(['a'])"), "Add of int and str"),
        (body("return len(i for i in [x])"), "GeneratorExp is refused here"),
        (body("return (i for i in [x])"), "GeneratorExp is refused here"),
        (body("for i in x:", "    pass"), "only a list can be looped over"),
        (body("return [i for i in 'ab']"), "only a list can be looped over"),
    ],
)
def test_sandbox_reports_what_goes_wrong_in_a_call(source: str, reason: str) -> None:
    with pytest.raises(SandboxError, match=reason):
        call_function(source, 3)


NUMBERS = list(range(100))
DOUBLING = ("a = [0]", "for i in x:", "    a = [a, a]", "    if i == 40:", "        break")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (body("return [0] * 1000000"), "a list of 1000000 elements"),
        (body("return 1000000 * x * 1000000"), "a list of 100000000 elements"),
        (body("a = [0]", "for i in x:", "    a = a + a", "return a"), "more than 10000 elements|budget"),
        (body("a = [0]", "for i in x:", "    a += a", "return a"), "more than 10000 elements|budget"),
        (body("a = 2", "for i in x:", "    a *= a", "return a"), "magnitude"),
        (body("a = 2", "for i in x:", "    a = -a * a", "return a"), "magnitude"),
        (body("return 1000000 * 1000000"), "magnitude"),
        (body("return sum([999999 * 1000000, 999999 * 1000000])"), "magnitude"),
        (body("return int('1" + "0" * 12 + "')"), "magnitude"),
        (body("return int('" + "9" * 3900 + "')"), "magnitude"),
        (body("for i in x:", "    for j in x:", "        for k in x:", "            pass"), "budget of 20000"),
        (body("return [1 for i in x for j in x for k in x]"), "budget of 20000"),
        (body("return sum(1 for i in x for j in x for k in x)"), "budget of 20000"),
        (body("for i in x:", "    x += [i]", "return x"), "budget of 20000"),
        (body("for i in x:", "    y = sorted(x * 90)", "return y"), "budget of 20000"),
        (body("for i in x:", "    y = (x * 90) == (x * 90)"), "budget of 20000"),
        (body(*DOUBLING, "return a"), "nested too deep|budget"),
        (body(*DOUBLING, "return a == a"), "nested too deep|budget"),
        (body("a = []", "for i in x:", "    a = [a]", "return a"), "nested too deep"),
        (body("x += [x]", "return x"), "nested too deep|budget"),
        (body("x += [x]", "return x == [x]"), "nested too deep|budget"),
        (body("return " + "+".join(["1"] * 1900)), "Recursion"),
        (body("return " + "-" * 3900 + "1"), "Recursion|Memory"),
        (body("return " + "(" * 1900 + "1" + ")" * 1900), "SyntaxError|Memory|Recursion"),
        (body("return x" + "[0]" * 1200), "Recursion"),
        (body("x = 1  #" + "#" * 4000), "source of 40.. characters"),
    ],
)
def test_sandbox_bounds_time_and_memory(source: str, reason: str) -> None:
    with pytest.raises(SandboxError, match=reason):
        call_function(source, NUMBERS)


@pytest.mark.parametrize("argument", [1.5, {"a": 1}, (1, 2), [1, [2.0]], 10**12, [0] * 10_001], ids=lambda a: str(a)[:20])
def test_sandbox_refuses_arguments_beyond_its_values(argument: Any) -> None:
    with pytest.raises(SandboxError, match=r"refused|magnitude|too long"):
        call_function(body("return 1"), argument)


def test_budget_is_what_the_caller_says() -> None:
    # Weighing the argument, the statement, its two operands and their sum, the arithmetic, weighing the result.
    source = body("return x + 1")
    assert call_function(source, 1, budget=7) == 2
    with pytest.raises(SandboxError, match="budget of 6 steps"):
        call_function(source, 1, budget=6)


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
def test_math_answers_follow_from_the_words(split: Any) -> None:
    for problem in problems("math", split, 300):
        assert problem.number == number_that_the_words_say(problem.prompt), problem
        assert judge(problem, problem.answer), problem


@pytest.mark.parametrize("split", SPLITS)
def test_code_cases_follow_from_the_words(split: Any) -> None:
    for problem in problems("code", split, 300):
        assert len(problem.cases) >= 6
        for argument, result in problem.cases:
            assert result == result_that_the_words_say(problem.prompt, argument), problem


@pytest.mark.parametrize("split", SPLITS)
def test_code_answers_are_right(split: Any) -> None:
    wrong = [problem.answer for problem in problems("code", split, 300) if not judge(problem, problem.answer)]
    assert wrong == []


@pytest.mark.parametrize("split", SPLITS)
def test_math_judge_refuses_every_single_slip(split: Any) -> None:
    for problem in problems("math", split, 300):
        opening, *equations, last = problem.answer.split("\n")
        unknown = equations[0].split(" ")[0]
        assert not judge(problem, "\n".join([opening, *equations, f"#### {problem.number + 1}"]))
        assert not judge(problem, "\n".join([re.sub(rf"\b{unknown}\b", "other", opening), *equations, last]))
        for i, equation in enumerate(equations):
            left, result = equation.rsplit(" ", 1)
            for slip in (f"{left} {int(result) + 1}", equation.replace(unknown, f"{unknown}_other", 1)):
                assert not judge(problem, "\n".join([opening, *equations[:i], slip, *equations[i + 1 :], last])), slip


@pytest.mark.parametrize("split", SPLITS)
def test_code_judge_refuses_wrong_constants_and_names(split: Any) -> None:
    for problem in problems("code", split, 300):
        if len({str(result) for _, result in problem.cases}) > 1:  # a count that is always 0 survives any constant
            constants = re.sub(r"\b\d+\b", lambda m: str(int(m[0]) + 100), problem.answer)
            assert not judge(problem, constants), constants
        misspelt = problem.answer.replace("):", "_other):", 1)
        assert not judge(problem, misspelt), misspelt


def passes_in_python(problem: Problem, source: str) -> bool:
    try:
        function = python_function(source)
        return all(function(argument) == result for argument, result in problem.cases)
    except (NameError, TypeError, ValueError, RecursionError, ZeroDivisionError, SyntaxError):
        return False


def test_code_judge_agrees_with_python_on_every_single_slip() -> None:
    verdicts = []
    for problem in problems("code", "train", 30, seed=1):
        for match in re.finditer(r"\b(\d+|[a-z_]+)\b", problem.answer):
            slip = str(int(match[0]) + 1) if match[0].isdigit() else match[0] + "_other"
            source = problem.answer[: match.start()] + slip + problem.answer[match.end() :]
            verdicts.append(judge(problem, source))
            assert verdicts[-1] == passes_in_python(problem, source), source
    # Some slips do no harm (the function's own name); most do.
    assert verdicts.count(False) > 4 * verdicts.count(True) > 0


@pytest.mark.parametrize("split", SPLITS)
def test_code_cases_tell_every_wrong_constant(split: Any) -> None:
    missed = []
    for problem in problems("code", split, 100):
        numbers = isinstance(problem.cases[0][0], int)
        arguments = [value if numbers else [value] for value in range(-5, 20)]
        expected = [result_that_the_words_say(problem.prompt, argument) for argument in arguments]
        for match in re.finditer(r"\b\d+\b", problem.answer):
            slip = f"{problem.answer[: match.start()]}{int(match[0]) + 1}{problem.answer[match.end() :]}"
            if judge(problem, slip) and [call_function(slip, argument) for argument in arguments] != expected:
                missed.append(slip)
    assert missed == []


MATH = Problem("math", "Ana has 3 pens. Ana buys 4 more. Ana loses 1. How many pens are there now?", "", number=6)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("Let n_now be the pens.\nn_now = 3 + 4 = 7\nn_now = 7 - 1 = 6\n#### 6", True),
        ("  The pens are x.\nx = 4 + 3 = 7\nx = 7 - 1 = 6\n#### 6\n", True),
        ("The pens are x.\nx = 2 * 3 = 6\n#### 6", True),
        ("Let n be the pens.\nn = 3 + 4 = 7\nn = 7 - 1 = 6\n#### 7", False),
        ("Let n be the pens.\nn = 3 + 4 = 7\nn = 7 - 0 = 7\n#### 6", False),
        ("Let n be the pens.\nn = 3 + 4 = 8\nn = 7 - 1 = 6\n#### 6", False),
        ("Let n be the pens.\nn = 3 + 4 = 7\nn = 1 - 7 = 6\n#### 6", False),
        ("Let n be the pens.\nn = 3 + 4 = 7\nm = 7 - 1 = 6\n#### 6", False),
        ("Let m be the pens.\nn = 3 + 4 = 7\nn = 7 - 1 = 6\n#### 6", False),
        ("Let n be the pens.\nn = 3 + 4 = 7\nn = 7 - 1 =  6\n#### 6", False),
        ("Let n be the pens.\nn = 3 + 4\nn = 7 - 1 = 6\n#### 6", False),
        ("Let n be the pens.\nn = 3 + 4 = 7\nn = 7 - 1 = 6\n#### 6 pens", False),
        ("Let n be the pens.\nn = 3 + 4 = 7\nn = 7 - 1 = 6", False),
        ("Let n be the pens.\n#### 6", False),
        ("#### 6", False),
        ("", False),
    ],
)
def test_math_judge_by_hand(text: str, right: bool) -> None:
    assert judge(MATH, text) is right


def test_math_judge_survives_an_overlong_number() -> None:
    assert not judge(MATH, f"Let n be the pens.\nn = {'9' * 5000} + 0 = 6\n#### 6")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("def f(xs):\n    return sum(x + 1 for x in xs if x > 2)", True),
        ("def f(xs):\n    t = 0\n    for x in xs:\n        if 2 < x:\n            t += 1 + x\n    return t", True),
        ("def f(xs):\n    return sum(x + 1 for x in xs if x > 3)", False),
        ("def f(xs):\n    return sum(x + 2 for x in xs if x > 2)", False),
        ("def f(xs):\n    return sum(y + 1 for x in xs if x > 2)", False),
        ("def f(xs):\n    t = 0\n    for x in xs:\n        if 2 < x:\n            t += 1 + x\n        return t", False),
        ("def f(xs):\n    return sum(x + 1 for x in xs if x > 2", False),
        ("import os\ndef f(xs):\n    return sum(x + 1 for x in xs if x > 2)", False),
        ("", False),
    ],
)
def test_code_judge_by_hand(text: str, right: bool) -> None:
    assert judge(Problem("code", "", "", cases=[([], 0), ([1, 3, 5], 10), ([2, 2], 0)]), text) is right


def test_source_has_no_right_answer() -> None:
    problem = make_problem("source", "train", 0)
    assert problem.answer
    assert judge(problem, problem.answer) is False


def test_messages_hold_the_prompt() -> None:
    assert Problem("math", "How many?", "").messages() == [{"role": "user", "content": "How many?"}]


# Splits


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_problem_is_a_function_of_its_arguments(family: Any, split: Any) -> None:
    first = [make_problem(family, split, i) for i in range(20)]
    assert first == [make_problem(family, split, i) for i in reversed(range(20))][::-1]
    assert first != [make_problem(family, split, i, seed=1) for i in range(20)]
    assert len({problem.prompt for problem in first}) > 10


def test_a_problem_does_not_depend_on_the_process() -> None:
    program = "from trainer.tasks import make_problem; print([make_problem(f, 'tune', 5) for f in ('math', 'code', 'source')])"
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


# Command line


@pytest.mark.parametrize("family", FAMILIES)
def test_command_writes_lines_that_read_back(family: Any, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--family", family, "--split", "tune", "--count", "7", "--seed", "3"])
    lines = capsys.readouterr().out.split("\n")
    assert lines.pop() == ""
    assert [problem_from_json(line) for line in lines] == problems(family, "tune", 7, seed=3)


def test_a_line_read_by_hand() -> None:
    problem = Problem("code", "Add one.", "def f(x):\n    return x + 1", cases=[(1, 2), ([3], [4])])
    line = (
        '{"family": "code", "prompt": "Add one.", "answer": "def f(x):\\n    return x + 1",'
        ' "number": null, "cases": [[1, 2], [[3], [4]]]}'
    )
    assert problem_from_json(line) == problem
    assert json.dumps(asdict(problem)) == line


def test_command_refuses_an_unknown_family(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--family", "poems", "--split", "tune"])
    assert "poems" in capsys.readouterr().err
