"""The synthetic problems, their judge, and the sandbox that runs what a model wrote, against Python
itself."""

import builtins
import hashlib
import json
import re
import subprocess
import sys
from typing import Any

import pytest
from mrp_trainer.data import sandbox
from mrp_trainer.data.sandbox import run_functions
from mrp_trainer.data.tasks import (
    FAMILIES,
    SPLITS,
    Problem,
    judge,
    make_problem,
    problems,
    source_modules,
)

from tests.support.helpers import python_function


@pytest.mark.parametrize(
    ("family", "digest"), [("math", "e943315fdebc631c"), ("code", "797dd5405d57fc40")]
)
def test_problems_are_those_that_were_measured_and_their_answers_are_right(
    family: Any, digest: str
) -> None:
    """That what is asked follows from the words was checked when they were written."""
    asked = [problem for split in SPLITS for problem in problems(family, split, 300)]
    told = json.dumps(
        [[problem.prompt, problem.answer, problem.number, problem.cases] for problem in asked]
    )
    assert hashlib.sha256(told.encode()).hexdigest()[:16] == digest
    assert judge(asked, [problem.answer for problem in asked]) == [True] * 900


MATH = Problem(
    "math",
    "Ana has 3 pens. Ana buys 4 more. Ana loses 1. How many pens are there now?",
    "",
    number=6,
)


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


def test_a_batch_of_every_family_is_judged_in_order() -> None:
    asked = [make_problem(family, "train", index) for index in range(3) for family in FAMILIES]
    answers = [problem.answer for problem in asked]
    assert judge(asked, [*answers[:4], "import os", *answers[5:]]) == [
        True,
        True,
        None,
        True,
        False,
        None,
        True,
        True,
        None,
    ]
    assert judge([], []) == []
    problem = Problem("code", "", "", cases=[([], 0), ([1, 3, 5], 10), ([2, 2], 0)])
    right = (
        "def f(xs):\n"
        "    t = 0\n"
        "    for x in xs:\n"
        "        if 2 < x:\n"
        "            t += 1 + x\n"
        "    return t"
    )
    assert judge([problem] * 2, [right, right.replace("2 <", "3 <")]) == [True, False]


@pytest.mark.parametrize("family", FAMILIES)
def test_splits_share_no_prompt_and_a_problem_is_a_function_of_its_arguments(family: Any) -> None:
    """Of source: also no module."""
    counts = {"train": 2000, "tune": 500, "heldout": 500}
    asked = {split: problems(family, split, count) for split, count in counts.items()}
    assert len({problem.prompt for split in SPLITS for problem in asked[split]}) == 3000
    assert (
        asked["tune"][5]
        == make_problem(family, "tune", 5)
        != make_problem(family, "tune", 5, seed=1)
    )
    train, tune, heldout = (set(source_modules(split)) for split in SPLITS)
    assert (  # noqa: PT018
        train
        and tune
        and heldout
        and not train & tune
        and not train & heldout
        and not tune & heldout
    )
    if family == "source":
        assert all(
            any(p.prompt + p.answer in module for module in tune) for p in asked["tune"][:50]
        )


def body(*lines: str) -> str:
    return "\n".join(["def f(x):", *(f"    {line}" for line in lines)])


def returned(expression: str) -> str:
    return body(f"return {expression}")


PROGRAMS = [
    body("'docstring'", "return"),
    returned("[(x + 2 - 3 * x) * -x, -x // 3, +x % -3, x and 7 or not x and 8 or x // 1]"),
    returned(
        "[1 < x <= 5 != 3 >= x == x, (x in [1, 2, 3]) + (x not in [1, 2]), [[x, 1], [x]] < [[x, "
        "2]]]"
    ),
    returned("[x, True, None, 'a', [1, x][-1], 'ab'[x % 2], [0] * x + x * [1, 2] + list('ab')]"),
    returned("[abs(x), max(x, 3), min(x, 3, 2), int('12') + int(x > 1), bool(x)]"),
    body(
        "x += 1",
        "x -= 3",
        "x *= 2",
        "x //= 3",
        "x %= 4",
        "if x > 1:",
        "    return 1",
        "else:",
        "    x = 9",
        "return x",
    ),
    body(
        "for i in [1, 2, 3, 4]:", "    if i == x:", "        break", "    x += i", "return [x, i]"
    ),
    body(
        "a = [x]",
        "for i in a:",
        "    if i > 9:",
        "        continue",
        "    a += [i + 1]",
        "    pass",
        "return a",
    ),
    body(
        "a = [x, 5, 2]",
        "return [len(a), sum(a), sorted(a), list(i for i in a if i > 1 if i < 9), a[0] if x else "
        "None]",
    ),
    body("k = 3", "i = 7", "return [[[j * k for j in [x, 1] if j <= i] for i in [1, x]], i]"),
    body("ﬁ = ä = x", "return [fi, ä, '\\N{BULLET}']"),
]


def test_what_is_accepted_computes_what_python_computes() -> None:
    arguments = [0, 1, 2, 3, 7, -5, True]
    found = run_functions([(source, arguments) for source in PROGRAMS])
    for source, results in zip(PROGRAMS, found, strict=True):
        assert repr(results) == repr(list(map(python_function(source), arguments))), source
    # every call has an argument of its own
    changed = body("for i in x:", "    i += [9]", "x += [8]", "return x")
    assert run_functions([(changed, [[[1], [2]]] * 2)]) == [[[[1, 9], [2, 9], 8]] * 2]


REFUSED = {
    "one undecorated function": [
        *(
            "import os",
            "f = lambda x: x",
            "class F:\n    pass",
            body("return x") + "\nf(1)",
            "@abs\n" + body("return x"),
        ),
        *(
            f"def f({parameters}):\n    return 1"
            for parameters in ("", "x, y", "x=1", "*x", "**x", "*, x", "x, /", "x: int")
        ),
        "def f(x) -> int:\n    return x",
    ],
    "SyntaxError|IndentationError": ["def f(x) return x", body("return x", "break")],
    "is refused": [
        *(
            body(line, "return x")
            for line in (
                "import os",
                "global g",
                "a, b = [x, x]",
                "x.y = 1",
                "while x:\n        pass",
            )
        ),
        *map(
            returned,
            (
                "x.real",
                "(1).__class__.__base__",
                "__builtins__",
                "__import__",
                "[x][0:1]",
                "(x, x)",
                "lambda y: y",
            ),
        ),
        *map(
            returned,
            (
                "(y := x)",
                "{x}",
                "f'{x}'",
                "x ** 2",
                "x << 2",
                "x is None",
                "1.5",
                "b''",
                "...",
                "sum(*[x])",
            ),
        ),
    ],
    "can be called": [
        *map(returned, ("f(x)", "__import__('os')", "[abs][0](x)")),
        *(
            returned(f"{name}(x)")
            for name in dir(builtins)
            if name.islower() and name not in {*sandbox._BUILTINS, "__import__"}
        ),
    ],
    "NameError": [returned("f if x < 0 else open"), body("a = [i for i in [x]]", "return i")],
    "UnicodeEncodeError|null bytes": [
        "def f(x):\n    return '\ud800'",
        "def f(x):\n    return '\0'",
    ],
    "Recursion|Memory|too many nested": [
        returned("-" * 3900 + "1"),
        "def sum(x):\n    return sum([x])",
    ],
    "too slow or too big": [
        body("for i in [1] * 1000000:", "    for j in [1] * 1000000:", "        pass")
    ],
    "MemoryError|no whole answer": [returned("[0] * 1000000000"), returned("[0] * 1000000")],
    "Circular reference": [body("a = [x]", "a += [a]", "return a")],
    "Exceeds the limit": [body("a = 7", "for i in [x] * 15:", "    a *= a", "return a")],
}


def test_what_is_refused_fails_alone() -> None:
    """Together, one behind the other: each says why it has no result, and a right program behind
    each has one."""
    right = (body("return x + 1"), [1, 2])
    cases = [(reason, source) for reason, sources in REFUSED.items() for source in sources]
    found = run_functions([program for _, source in cases for program in ((source, [3]), right)])
    assert found[1::2] == [[2, 3]] * len(cases)
    for (reason, source), why in zip(cases, found[::2], strict=True):
        assert isinstance(why, str), source
        assert re.search(reason, why), source


def test_names_hold_without_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the list passed, no name but the nine builtins could be looked up."""
    monkeypatch.setattr(sandbox, "_check", lambda node: None)
    for name in ("open", "__import__", "getattr", "eval", "json", "os"):
        function = sandbox._function(returned(name))
        with pytest.raises(NameError, match=f"'{name}' is not defined"):
            function(1)
    assert sandbox._function(returned("max(x, 3)"))(1) == 3


def test_limits_hold_without_the_list() -> None:
    """Were the list passed, what runs could still open nothing, start nothing and write nothing,
    and ends on time."""
    confined = """
import os, resource, signal
from mrp_trainer.data import sandbox
kept = os.dup(0)
sandbox._confine(os.dup(1))
names = "CPU", "NPROC", "FSIZE", "NOFILE", "CORE", "AS"
limits = [resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1] for name in names]
opened = []
for number in range(64):
    try:
        os.fstat(number)
        opened.append(number)
    except OSError:
        pass
os.write(1, str([limits, opened, 0 < signal.alarm(0) <= 10]).encode())
os.open("/etc/passwd", os.O_RDONLY)
"""
    done = subprocess.run([sys.executable, "-c", confined], stdout=subprocess.PIPE, check=False)
    assert (done.stdout, done.returncode) == (f"[[1, 0, 0, 0, 0, {2**28}], [1], True]".encode(), 1)


def test_the_interpreter_of_programs_is_bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in an empty folder, without environment variables, installed packages or what the
    working folder has."""
    seen: dict[str, Any] = {}
    run = subprocess.run

    def asked_instead(command: list[str], **options: Any) -> Any:
        script = (
            "import os, sys; print(sys.flags.isolated, sys.flags.no_site, 'SECRET' in os.environ, "
            "os.listdir())"
        )
        seen["answer"] = run([*command[:-1], "-c", script], **options).stdout
        return run(command, **options)

    monkeypatch.setenv("SECRET", "1")
    monkeypatch.setattr(sandbox.subprocess, "run", asked_instead)
    assert run_functions([(returned("x"), [3])]) == [[3]]
    assert seen["answer"] == "1 1 False []\n"
