"""Engines that serve the embedded checkpoint on a CPU, started when a test needs one, and what they
answered."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import asking
import pytest
from asking import Asked, Measure, Report, target_of
from mrp_trainer.data.problems import encode
from mrp_trainer.data.tasks import problems

from benchmarks.common import TINY
from benchmarks.server import Measured, Server, backbone_for_stock

LINES: list[str] = []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Shows what was counted."""
    if LINES:
        terminalreporter.section("serving")
        terminalreporter.write_line("\n".join(LINES))


@pytest.fixture(scope="session")
def report() -> Report:
    """Has a line printed behind the tests."""
    return LINES.append


@pytest.fixture(scope="session")
def asked(tiny_tokenizer: Any) -> Asked:
    chosen = [
        problem
        for family, count in asking.COUNTS.items()
        for problem in problems(family, "heldout", count)
    ]
    prompts = [encode(problem, tiny_tokenizer)[0] for problem in chosen]
    return Asked(
        chosen, prompts, [asking.BUDGETS[i % len(asking.BUDGETS)] for i in range(len(chosen))]
    )


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Server]:
    """Makes a server of the embedded checkpoint with MRP, or of its backbone as stock's."""
    backbone = cache(lambda: backbone_for_stock(TINY, tmp_path_factory.mktemp("stock") / "sdar"))

    def make(algorithm: str, threshold: float) -> Server:
        drafted = {
            "decoding": "mrp_spec",
            "num_draft_states": asking.STATES,
            **target_of(threshold),
        }
        model, options = (
            (TINY, drafted) if algorithm == "MRP" else (backbone(), {"threshold": threshold})
        )
        return Server(
            model,
            tmp_path_factory.mktemp("server"),
            algorithm,
            options,
            environment=asking.ENVIRONMENT,
        )

    return make


@pytest.fixture(scope="session")
def server(serve: Callable[..., Server]) -> Iterator[Server]:
    """One with MRP at 0.9 that lives as long as the tests."""
    with serve("MRP", 0.9) as started:
        yield started


@pytest.fixture(scope="session")
def measured(serve: Callable[..., Server], asked: Asked, request: pytest.FixtureRequest) -> Measure:
    """What an algorithm answers to all prompts, at a threshold; with MRP each request asks for its
    own."""

    @cache
    def ask(algorithm: str, threshold: float) -> Measured:
        measure = partial(
            Server.measure,
            prompts=asked.prompts,
            budgets=asked.budgets,
            concurrency=asking.CONCURRENCY,
            block=asking.BLOCK,
        )
        if algorithm == "MRP":
            return measure(
                request.getfixturevalue("server"),
                **({} if threshold == 0.9 else target_of(threshold)),
            )
        with serve(algorithm, threshold) as started:
            return measure(started)

    return ask
