"""A process that has collected the tests once, and tries faults of functions in forks of itself.

A fault changes the code of one function, which is exchanged in the functions that are there. What
that does not reach is left to a process that imports the package anew: lines outside of functions,
defaults, functions that run while modules are imported, and closures of theirs.
"""

import gc
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

from tests.support.fault_kinds import Fault


def functions_in(code: CodeType) -> Iterator[CodeType]:
    """List the functions of a module and of its classes, without those inside functions."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & inspect.CO_OPTIMIZED:
                yield constant
            else:
                yield from functions_in(constant)


def last_line(code: CodeType) -> int:
    last = max(line or 0 for *_, line in code.co_lines())
    return max([last, *(last_line(part) for part in code.co_consts if isinstance(part, CodeType))])


def exchange(path: Path, source: bytes, fault: Fault, executed: set[tuple[str, str]]) -> bool:
    """Give the functions of a file that are there the code with a fault; return whether that is all
    that the fault changes, and else do nothing.

    Args:
        path: The file from which they were imported.
        source: What is in it without the fault.
        fault: The fault.
        executed: Files and names of the functions that ran when modules were imported.
    """
    codes = []
    for text in (source, fault.applied(source)):
        module = compile(text, str(path), "exec", dont_inherit=True)
        codes.append(list(functions_in(module)))
    before, after = codes
    if fault.line not in fault.function or len(before) != len(after):
        return False
    for old, new in zip(before, after, strict=True):
        if old.co_firstlineno <= fault.line <= last_line(old):
            return exchange_code(old, new, executed)
    return False


def exchange_code(old: CodeType, new: CodeType, executed: set[tuple[str, str]]) -> bool:
    name, inner = old.co_qualname, f"{old.co_qualname}.<locals>."
    functions = []
    for function in gc.get_objects():
        if not isinstance(function, FunctionType):
            continue
        code = function.__code__
        if code.co_filename != old.co_filename:
            continue
        if code.co_qualname.startswith(inner):
            return False
        if code.co_qualname == name and code.co_firstlineno == old.co_firstlineno:
            functions.append(function)
    for file, ran in executed:
        if file == old.co_filename and (ran == name or ran.startswith(inner)):
            return False
    if any(function.__code__.co_freevars != new.co_freevars for function in functions):
        return False
    for function in functions:
        function.__code__ = new
    return bool(functions)


class FaultServer:
    """A pytest plugin that, in place of running the tests, calls `work` with itself.

    Attributes:
        items: The tests that were collected, by name.
        executed: Files and names of the functions that ran before.
    """

    def __init__(self, work: Callable[["FaultServer"], None]) -> None:
        self.work = work
        self.items: dict[str, pytest.Item] = {}
        self.executed: set[tuple[str, str]] = set()
        self.failures: list[str] = []

    def serve(self, files: Sequence[str]) -> None:
        """Collect files of tests, and work."""
        sys.setprofile(self.note)
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        pytest.main([*options, "--continue-on-collection-errors", *files], plugins=[self])

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            self.executed.add((frame.f_code.co_filename, frame.f_code.co_qualname))

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        sys.setprofile(None)
        self.items = {item.nodeid: item for item in session.items}
        self.work(self)
        return True

    def named(self, names: Sequence[str]) -> list[pytest.Item] | None:
        """Find tests by their names, or all of a file; None if one was not collected."""
        found: list[pytest.Item] = []
        for name in names:
            if "::" in name and name not in self.items:
                return None
            found += [
                item
                for nodeid, item in self.items.items()
                if nodeid == name or nodeid.startswith(f"{name}::")
            ]
        return found

    def first_failure(self, items: Sequence[pytest.Item]) -> str:
        """Run tests up to the first that fails; return its name, "" if none does."""
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failures:
                return self.failures[0]
        return ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failures.append(report.nodeid)
