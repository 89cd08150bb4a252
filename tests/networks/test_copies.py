"""Copies between host and device in a round, counted on a stand-in for a device: the host waits for
what was picked, once behind each network, and for nothing else."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from modeling_mrp.generate.loop import RoundDecoder
from modeling_mrp.networks.networks import Networks
from tests.support.devices import SMALL, Copies, counted_copies, place
from tests.support.helpers import left_padded
from tests.support.random_cases import make_model

ROWS = {1: [[1, 2, 3, 4, 5, 6]], 4: [[1, 2, 3, 4, 5, 6], [7, 8, 9], [10, 11], [12] * 9]}
SAMPLED: dict[str, Any] = {"do_sample": True, "seed": 4, "temperature": 0.8}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {**SAMPLED, "top_k": 0},
    "truncated": {**SAMPLED, "top_k": 20, "top_p": 0.9},
    "a least length": {"min_new_tokens": 8, "eos_token_id": [3, 9]},
    "bans": {"no_repeat_ngram_size": 2},
}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    with counted_copies(monkeypatch) as counted:
        yield counted


def rounds_of(
    copies: Copies, patch: pytest.MonkeyPatch, rows: int, **options: Any
) -> list[dict[str, int]]:
    """Decode, and count by round: its copies and waits, forwards of both networks, and commits."""
    model = make_model().float()
    place(model, SMALL)
    counted: list[dict[str, int]] = []
    real = {name: getattr(Networks, name) for name in ("score", "head", "commit")}
    run = RoundDecoder.round

    def noted(name: str) -> Any:
        def call(self: Networks, *args: Any, **named: Any) -> Any:
            counted[-1][name] += 1
            return real[name](self, *args, **named)

        return call

    def one_round(self: RoundDecoder, *args: Any) -> None:
        copies.reset()
        counted.append({"score": 0, "head": 0, "commit": 0})
        run(self, *args)
        counted[-1] |= {"uploads": copies.uploads, "reads": copies.reads}
        assert copies.waits == []

    with patch.context() as inner:
        inner.setattr(RoundDecoder, "round", one_round)
        for name in real:
            inner.setattr(Networks, name, noted(name))
        inputs = {name: value.to(SMALL) for name, value in left_padded(ROWS[rows]).items()}
        model.generate(**inputs, max_new_tokens=10, **{"eos_token_id": None, **options})
    return counted


CASES = [
    *product(("self_spec", "mrp_spec"), ROWS, (1, 4, 8), ("greedy", "sampled")),
    *product(("self_spec", "mrp_spec"), (4,), (4,), ("truncated", "a least length", "bans")),
]


@pytest.mark.parametrize(("drafts", "rows", "states", "sampling"), CASES)
def test_a_round_waits_once(
    drafts: str,
    rows: int,
    states: int,
    sampling: str,
    copies: Copies,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For the picks of each forward, of which the head's decide what is scored."""
    mode: dict[str, Any] = {"decoding": "static"}
    if states > 1:
        mode = {"decoding": drafts, "target": "static", "num_draft_states": states}
    rounds = rounds_of(copies, monkeypatch, rows, **mode, **SAMPLINGS[sampling])
    assert len(rounds) > 2
    for counted in rounds:
        assert counted["score"] == 1
        assert counted["reads"] == 1 + counted["head"]
        assert counted["head"] == 0 or drafts == "mrp_spec"
