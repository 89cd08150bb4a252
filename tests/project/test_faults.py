"""Faults that are put in to see whether tests find them: those listed stand where they did, and new
ones are of every kind."""

import json
from pathlib import Path
from typing import Any

from tests.drawn_faults import drawn, harmless
from tests.mutants import RECORD, changed
from tests.support.fault_kinds import KINDS, faults_of
from tests.support.fault_server import exchange
from tests.support.line_map import sources

SOURCE = '''\
def mean(values, least=1):
    """Doc."""
    if len(values) < least or not values:
        raise ValueError("few")
    with open("log") as file:
        file.write(str(-values[0]))
    total = sum(sorted(values, reverse=True)[1:])
    return (total, least) if total else 0
'''
EXPECTED = {
    "comparison turned": [
        "if (len(values) <= least) or not values:",
        "if (len(values) > least) or not values:",
    ],
    "index or bound shifted": [
        "file.write(str(-values[0 + 1]))",
        "total = sum(sorted(values, reverse=True)[1 + 1:])",
        "total = sum(sorted(values, reverse=True)[(1) - 1:])",
    ],
    "boolean negated": [
        "if len(values) < least or (values):",
        "total = sum(sorted(values, reverse=False)[1:])",
        "return (total, least) if (not (total)) else 0",
    ],
    "and, or": [
        "if (len(values) < least and (not values)):",
        "if (not values):",
        "if (len(values) < least):",
    ],
    "check left out": ["if False:", "pass"],
    "keyword dropped": ["total = sum(sorted(values)[1:])"],
    "not closed": [
        "with __import__('contextlib').nullcontext((_held_file := open('log')).__enter__()) as "
        "file:"
    ],
    "default changed": ["def mean(values, least=2):"],
    "wrong branch": ["return (0 if total else (total, least))", "return None"],
    "sign turned": ["file.write(str(values[0]))"],
    "ended early": ["return"],
    "elements swapped": ["return ((least, total)) if total else 0"],
}


def test_every_kind_of_fault(tmp_path: Path) -> None:
    (tmp_path / "mean.py").write_text(SOURCE)
    faults = faults_of(tmp_path, "mean.py")
    assert {
        kind: sorted(fault.after for fault in faults if fault.kind == kind) for kind in KINDS
    } == {kind: sorted(after) for kind, after in EXPECTED.items()}
    source = SOURCE.encode()
    assert all(fault.valid(source) and fault.applied(source) != source for fault in faults)
    assert {fault.function for fault in faults} == {range(2, 9)}
    left_out = next(fault for fault in faults if fault.after == "if False:")
    assert (left_out.line, left_out.first, left_out.last) == (3, 4, 4), (
        "tests are asked for that run what it guards"
    )


def test_functions_that_are_there_get_a_fault(tmp_path: Path) -> None:
    """Through decorators and from elsewhere; what ran at import, and what is no function's body,
    needs a new import."""
    path = tmp_path / "counted.py"
    path.write_text(
        "from functools import cache\n"
        "class Counter:\n"
        "    @property\n"
        "    def double(self):\n"
        "        return 2 + len('ab')\n"
        "@cache\n"
        "def early(count=2):\n"
        "    return [count < item for item in (1, 2, 3)]\n"
        "TABLE = early()\n"
        "def make():\n"
        "    return lambda: 1 + 1\n"
        "inner = make()\n"
    )
    source = path.read_bytes()
    names: dict[str, Any] = {}
    exec(compile(source, path, "exec"), names)
    counter = names["Counter"]()
    reached = {}
    for fault in faults_of(tmp_path, "counted.py"):
        executed = {(str(path), "early")}
        reach = exchange(path, source, fault, executed)
        reached[f"{fault.line}: {fault.after}"] = reach
        if "2 - len" in fault.after:
            assert counter.double == 0
    assert {name for name, reach in reached.items() if reach} == {
        "5: return (2 - len('ab'))",
        "5: return None",
    }
    assert {"7: def early(count=3):", "11: return lambda: (1 - 1)"} <= reached.keys()
    assert names["early"]() == [False, False, True]


def test_a_seed_draws_the_same_faults_of_every_kind() -> None:
    files = sources(["trainer/mrp_trainer/train", "trainer/mrp_trainer/outputs.py"])
    first, again, other = (drawn(files, seed, 24) for seed in (3, 3, 4))
    assert [fault.key for fault in first] == [fault.key for fault in again]
    assert {fault.key for fault in first} != {fault.key for fault in other}
    assert {fault.kind for fault in first} == {*KINDS}


def test_listed_faults_stand_in_their_files() -> None:
    mutants = json.loads(RECORD.read_text(encoding="utf-8"))
    assert [mutant for mutant in mutants if changed(mutant) is None] == []
    assert all(harmless().values())
