"""Texts, steps and costs of every mode are those of the record."""

import json
from pathlib import Path

from golden_traces import cases


def test_every_trace_is_as_recorded() -> None:
    expected = json.loads(Path(__file__).with_name("golden_traces.json").read_text())
    got = dict(cases())
    assert {name for name in expected if got.get(name) != expected[name]} == set()
    assert got.keys() == expected.keys()
