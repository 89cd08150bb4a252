"""A sandbox for small Python functions that a model wrote; each program runs in a process of its
own.

`run_functions` starts one bare interpreter (``python -I -S``: no environment, no installed
packages, an empty working folder), which forks a child for every program. The child checks the
syntax tree against a list of what is allowed, calls the function under the limits of the operating
system, and writes its results to a pipe.

A hostile program **cannot** name anything but its own variables and nine builtins. As a second
defence, it is limited to 1 second of CPU time, 10 seconds of wall clock and 256 MiB of memory. It
cannot open a file or a socket, write a byte to a file, or (unless the user is root) start a
process. A program that is too slow, is too big, or crashes its interpreter fails alone.

It **can** use up its CPU time and memory, and return anything. A program that gets past both the
list and CPython acts as the user who runs the command, so run untrusted weights as a user with
nothing to lose. The sandbox needs a POSIX system.
"""

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile

# The parser needs unicodedata for names and escapes beyond ASCII. It is imported here, since later
# no file can be opened.
import unicodedata  # noqa: F401
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

_CPU_SECONDS, _SECONDS, _MEMORY, _ANSWER = 1, 10, 2**28, 2**20  # memory and answer in bytes

_BUILTINS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (sum, len, max, min, abs, sorted, list, int, bool)
}
_GRAMMAR = (
    *(
        ast.Assign,
        ast.AugAssign,
        ast.For,
        ast.If,
        ast.Return,
        ast.Expr,
        ast.Pass,
        ast.Break,
        ast.Continue,
    ),
    *(
        ast.BinOp,
        ast.UnaryOp,
        ast.BoolOp,
        ast.And,
        ast.Or,
        ast.Compare,
        ast.IfExp,
        ast.Subscript,
        ast.Call,
    ),
    *(ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.USub, ast.UAdd, ast.Not),
    *(ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
    *(
        ast.List,
        ast.ListComp,
        ast.GeneratorExp,
        ast.comprehension,
        ast.Name,
        ast.Load,
        ast.Store,
        ast.Constant,
    ),
)


def run_functions(programs: Sequence[tuple[str, Sequence[Any]]]) -> list[list[Any] | str]:
    """Call functions that are given as source text, without allowing them to do harm.

    A source text must define one function of one plain argument, and nothing else. Its body may
    hold assignments, ``for``, ``if``, ``return``, ``pass``, ``break`` and ``continue``. Expressions
    are ``+ - * // %``, ``not and or``, comparisons except ``is``, ``a if b else c``, lists, list
    comprehensions, generator expressions, ``x[i]`` and calls of ``sum len max min abs sorted list
    int bool``. Constants are ints, bools, strs and None.

    Args:
        programs: For each program, its source text and a list of arguments. The function is called
            once with each argument, which is a value that JSON can represent.

    Returns:
        For each program, a list with the result for each argument, or a text with the reason why
            the program was refused or failed.
    """
    if not programs:
        return []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-I", "-S", "-W", "ignore", os.path.abspath(__file__)]
        ended = subprocess.run(
            command,
            input=json.dumps(programs),
            stdout=subprocess.PIPE,
            cwd=folder,
            env={},
            text=True,
            check=True,
        )
    return [_results(line) for line in ended.stdout.splitlines()]


def _results(line: str) -> list[Any] | str:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return f"no whole answer, but {line[:100]!r}"


def _serve() -> None:
    """Run the programs from standard input, each in a child process. For each child, print its line
    of JSON, up to `_ANSWER` bytes."""
    for source, arguments in json.load(sys.stdin):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            try:
                _confine(writer)
                os.write(1, _answer(source, arguments).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            answer = pipe.read(_ANSWER).decode()
        os.waitpid(child, 0)
        print(answer or json.dumps("killed: too slow or too big"))


def _confine(writer: int) -> None:
    """Restrict this process. Only the pipe `writer` stays open, as standard output; time, memory
    and files are limited."""
    import resource

    os.dup2(writer, 1)
    os.close(0)
    os.closerange(2, writer + 1)
    signal.alarm(_SECONDS)
    for limit, value in (
        (resource.RLIMIT_CPU, _CPU_SECONDS),
        (resource.RLIMIT_AS, _MEMORY),
        *(
            (limit, 0)
            for limit in (
                resource.RLIMIT_FSIZE,
                resource.RLIMIT_NPROC,
                resource.RLIMIT_NOFILE,
                resource.RLIMIT_CORE,
            )
        ),
    ):
        # a lower limit is already set, or the system does not have this limit
        with suppress(ValueError):
            resource.setrlimit(limit, (value, value))


def _answer(source: str, arguments: Sequence[Any]) -> str:
    """Run a program; return its results as JSON, or the message of its error."""
    try:
        function = _function(source)
        return json.dumps([function(argument) for argument in arguments])
    except Exception as error:
        return json.dumps(f"{type(error).__name__}: {error}"[:1000])


def _function(source: str) -> Callable[[Any], Any]:
    """Return the function that a source text defines; `ValueError` for syntax that is not allowed,
    `SyntaxError` if the text is not Python."""
    module = ast.parse(source)
    match module.body:
        case [
            ast.FunctionDef(
                args=ast.arguments(
                    posonlyargs=[],
                    args=[ast.arg(annotation=None)],
                    vararg=None,
                    kwonlyargs=[],
                    kwarg=None,
                    defaults=[],
                ),
                decorator_list=[],
                returns=None,
            ) as function
        ]:
            subtrees = [*function.body, *getattr(function, "type_params", ())]
        case _:
            raise ValueError(
                "the text must be one undecorated function of one plain argument, and nothing else"
            )
    for subtree in subtrees:
        for node in ast.walk(subtree):
            _check(node)
    namespace: dict[str, Any] = {"__builtins__": _BUILTINS}
    exec(compile(module, "<program>", "exec"), namespace)
    return namespace[function.name]


def _check(node: ast.AST) -> None:
    if not isinstance(node, _GRAMMAR):
        raise ValueError(f"{type(node).__name__} is refused")
    match node:
        case ast.Call(func=called):
            if not (isinstance(called, ast.Name) and called.id in _BUILTINS):
                raise ValueError(f"only {', '.join(_BUILTINS)} can be called")
        case ast.Name(id=name):
            if name.startswith("__"):
                raise ValueError(f"name {name!r} is refused")
        case ast.Constant(value=value):
            if value is not None and type(value) not in (int, bool, str):
                raise ValueError(f"a constant of type {type(value).__name__} is refused")


if __name__ == "__main__":
    _serve()
