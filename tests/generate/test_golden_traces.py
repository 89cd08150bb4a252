"""Texts, steps and costs of every mode are those of the record."""

import json
from pathlib import Path

import pytest

from tests.golden_traces import MODES, of_mode, of_others

EXPECTED = json.loads((Path(__file__).parents[1] / "golden_traces.json").read_text())


@pytest.mark.parametrize("mode", [*MODES, None])
def test_every_trace_is_as_recorded(mode: str | None) -> None:
    for name, told in of_mode(mode) if mode else of_others():
        assert told == EXPECTED[name], name
