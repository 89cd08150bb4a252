"""The sandbox against real Python: what it computes, what it refuses, and what a call may cost."""

from typing import Any

import pytest
from helpers import python_function
from mrp_trainer.sandbox import SandboxError, call_function


def body(*lines: str) -> str:
    return "\n".join(["def f(x):", *(f"    {line}" for line in lines)])


# What is accepted

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


# What is refused


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
