"""The sandbox against Python itself: what it computes, what it refuses, and what no program can do."""

import builtins
import os
import re
import resource
from pathlib import Path
from typing import Any

import pytest
from helpers import python_function
from mrp_trainer.data import sandbox
from mrp_trainer.data.sandbox import run_functions


def body(*lines: str) -> str:
    return "\n".join(["def f(x):", *(f"    {line}" for line in lines)])


def returned(expression: str) -> str:
    return body(f"return {expression}")


OF_INT = [
    body("'docstring'", "return"),
    body("return (x + 2 - 3 * x) * -x"),
    body("return [-x // 3, +x % -3, x // -2]"),
    body("return x and 7 or not x and 8 or x // 1"),
    body("return 1 < x <= 5 != 3 >= x == x"),
    body("return (x in [1, 2, 3]) + (x not in [1, 2])"),
    body("return [x, True, None, 'a', [x]]"),
    body("return [[x, 1], [x]] < [[x, 2]]"),
    body("return [[1, x][x % 2], [1, x][-1], 'ab'[x % 2]]"),
    body("return [0] * x + x * [1, 2] + list('ab')"),
    body("return [abs(x), max(x, 3), min(x, 3, 2), int('12') + int(x > 1), bool(x)]"),
    body("x += 1", "x -= 3", "x *= 2", "x //= 3", "x %= 4", "return x"),
    body("if x > 3:", "    return 1", "elif x > 1:", "    return 2", "else:", "    x = 9", "return x"),
    body("for i in [1, 2, 3, 4]:", "    if i == x:", "        break", "    x += i", "return [x, i]"),
    body("a = [x]", "for i in a:", "    if i > 9:", "        continue", "    a += [i + 1]", "    pass", "return a"),
    body("ﬁ = ä = x", "return [fi, ä, '\\N{BULLET}']"),
]
OF_LIST = [
    body("return [len(x), sum(x), sorted(x), list(x) == x, max(x + [0]) - min(x + [0])]"),
    body("return list(i for i in x if i > 1 if i < 9)"),
    body("return [[j for j in x if j <= i] for i in x]"),
    body("k = 3", "i = 7", "return [[i * k for i in x], i]"),
    body("sum = 0", "for i in x:", "    sum += i", "return [sum, x[0] if x else None]"),
]


@pytest.mark.parametrize(
    ("sources", "arguments"),
    [(OF_INT, [0, 1, 2, 3, 7, -5, True]), (OF_LIST, [[], [4], [3, 1, 2], [5, -2, 5, 8, 0, 3]])],
    ids=["numbers", "lists"],
)
def test_what_is_accepted_computes_what_python_computes(sources: list[str], arguments: list[Any]) -> None:
    found = run_functions([(source, arguments) for source in sources])
    for source, results in zip(sources, found, strict=True):
        function = python_function(source)
        assert repr(results) == repr([function(argument) for argument in arguments]), source


def test_every_call_has_an_argument_of_its_own() -> None:
    argument = [[1], [2, 3]]
    source = body("for i in x:", "    i += [9]", "x += [8]", "return x")
    assert run_functions([(source, [argument, argument])]) == [[[[1, 9], [2, 3, 9], 8]] * 2]
    assert argument == [[1], [2, 3]]


LOOP = "    for j in [1] * 1000000:"
REFUSED = {
    "one undecorated function": [
        *("import os", "x = 1", "", "f(1)", "f = lambda x: x", "class F:\n    pass", "async def f(x):\n    return x"),
        *(body("return x") + "\n" + body("return x"), body("return x") + "\nf(1)", "@abs\n" + body("return x")),
        *(f"def f({parameters}):\n    return 1" for parameters in ("", "x, y", "x=1", "*x", "**x", "*, x", "x, /", "x: int")),
        "def f(x) -> int:\n    return x",
    ],
    "SyntaxError|IndentationError": ["def f(x) return x", "def f(x):\nreturn x", body("return x", "break")],
    "is refused": [
        *(body(line, "return x") for line in ("import os", "from os import path", "global g", "del x", "assert x", "raise x")),
        *(body(line, "    pass") for line in ("while x:", "with x:", "def g(y):", "class G:", "try:\n        x\n    except:")),
        *(body(line) for line in ("yield x", "x.y = 1", "a, b = [x, x]", "match x:\n        case 1: pass", "return [*[x]]")),
        *map(returned, ("x.real", "x.__class__", "(1).__class__.__base__", "__builtins__", "__import__", "[x][0:1]", "(x, x)")),
        *map(returned, ("lambda y: y", "(y := x)", "(yield x)", "{1: x}", "{x}", "{i for i in [x]}", "{i: i for i in [x]}")),
        *map(returned, ("f'{x}'", "x ** 2", "x / 2", "x << 2", "x & 2", "x | 2", "x @ x", "~x", "x is None", "x is not x")),
        *map(returned, ("1.5", "b''", "...", "1j", "sum(x, start=1)", "sum(*[x])")),
    ],
    "can be called": [
        *(
            returned(f"{name}(x)")
            for name in dir(builtins)
            if name.islower() and name not in {*sandbox._BUILTINS, "__import__"}
        ),
        *map(returned, ("f(x)", "__import__('os')", "[abs][0](x)")),
    ],
    "NameError": [body("return f if x < 0 else open"), body("a = [i for i in [x]]", "return i")],
    "TypeError": [body("return x[0]"), body("return sum"), body("return (i for i in [x])")],
    "ZeroDivisionError": [body("return x // 0")],
    "null bytes": ["def f(x):\n    return '\0'"],
    "UnicodeEncodeError": ["def f(x):\n    return '\ud800'"],
    "Recursion|Memory|too many nested": [body("return " + "-" * 3900 + "1"), "def sum(x):\n    return sum([x])"],
    "too slow or too big": [
        body("for i in [1] * 1000000:", LOOP, "        pass"),
        body("a = x", "for i in [1] * 100:", "    a *= a"),
    ],
    "MemoryError": [body("return [0] * 1000000000"), body("a = [0]", "for i in a:", "    a += a")],
    "no whole answer": [body("return [0] * 1000000")],
    "Circular reference": [body("a = [x]", "a += [a]", "return a")],
    "Recursion|no whole answer": [body("a = []", "for i in [x] * 999999:", "    a = [a]", "return a")],
    "Exceeds the limit": [body("a = 7", "for i in [x] * 15:", "    a *= a", "return a")],
}


def test_what_is_refused_fails_alone() -> None:
    """Together, one behind the other: each says why it has no result, and a right program behind each has one."""
    right = (body("return x + 1"), [1, 2])
    cases = [(reason, source) for reason, sources in REFUSED.items() for source in sources]
    found = run_functions([program for _, source in cases for program in ((source, [3]), right)])
    assert found[1::2] == [[2, 3]] * len(cases)
    for (reason, source), why in zip(cases, found[::2], strict=True):
        assert isinstance(why, str), source
        assert re.search(reason, why), source


def test_the_interpreter_takes_nothing_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('taken from the working directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    assert run_functions([(body("return x"), [1])]) == [[1]]


def test_limits_hold_without_the_list(tmp_path: Path) -> None:
    """Were the list passed, what runs could still open nothing, start nothing and write nothing."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            sandbox._confine(writer)
            for attempt, *arguments in (
                (os.open, tmp_path / "new", os.O_CREAT),
                (os.open, "/etc/passwd", os.O_RDONLY),
                (os.pipe,),
            ):
                try:
                    attempt(*arguments)
                except OSError:
                    os.write(1, b"refused ")
            limits = [
                resource.getrlimit(limit) for limit in (resource.RLIMIT_CPU, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE)
            ]
            os.write(1, str(limits).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        assert pipe.read() == "refused refused refused [(1, 1), (0, 0), (0, 0)]"
    os.waitpid(child, 0)
    assert not list(tmp_path.iterdir())
