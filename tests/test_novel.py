"""What a problem asks for is the same however it is said, and held-out problems are told apart by it."""

from typing import Any

import pytest
from mrp_trainer.data.tasks import FAMILIES, Problem, problems

from benchmarks.novel import JUDGED, asked_for, parts


def math(*equations: str) -> Problem:
    return Problem("math", "", "\n".join(["Let x be the pens.", *(f"x = {one}" for one in equations), "#### 9"]))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (math("2 + 3 = 5", "5 * 2 = 10"), math("3 + 2 = 5", "2 * 5 = 10"), True),
        (math("12 - 3 = 9"), math("12 - 4 = 8"), False),
        (math("2 + 3 = 5", "5 * 2 = 10"), math("2 + 3 = 5"), False),
        (math("2 + 2 = 4"), math("2 * 2 = 4"), False),
    ],
)
def test_chains(one: Problem, other: Problem, same: bool) -> None:
    assert (asked_for(one) == asked_for(other)) == same


@pytest.mark.parametrize(
    ("prompt", "cases", "asked"),
    [
        ("Given a number, return it plus 3 if it is even, else times 2.", [(0, 3)], ("number", "even", "plus 3", "times 2")),
        (
            "If the number is even return it plus 3, or else return it times 2.",
            [(0, 3)],
            ("number", "even", "plus 3", "times 2"),
        ),
        ("Count the numbers of a list that plus 3 are not 4.", [([], 0)], ("count", "not 4", "plus 3")),
        ("Return how many numbers of a list are not 4 when taken plus 3.", [([], 0)], ("count", "not 4", "plus 3")),
        ("Sum the numbers of a list that are not 4, each plus 3.", [([], 0)], ("sum", "not 4", "plus 3")),
        (
            "From a list keep the numbers that are greater than 4, each minus 9.",
            [([], [])],
            ("list", "greater than 4", "minus 9"),
        ),
    ],
)
def test_functions(prompt: str, cases: Any, asked: tuple[str, ...]) -> None:
    assert asked_for(Problem("code", prompt, "", cases=cases)) == asked


def test_every_problem_has_one() -> None:
    """A chain has two or three steps; a function one test, and two changes of a number or one of a list's."""
    assert set(JUDGED) < set(FAMILIES)
    assert {len(asked_for(problem)) for problem in problems("math", "tune", 50)} == {2, 3}
    for problem in problems("code", "tune", 50):
        goal, *phrases = asked_for(problem)
        assert len(phrases) == (3 if goal == "number" else 2)


def test_parts_are_the_first_of_each() -> None:
    drawn = problems("math", "tune", 10)
    known = {asked_for(problem) for problem in drawn[:4]}
    of, share = parts("math", "tune", 2, known)
    assert of == {"novel": [problem for problem in drawn if asked_for(problem) not in known][:2], "known": drawn[:2]}
    assert share == sum(asked_for(problem) in known for problem in drawn) / 10
