"""How far guesses are from what the backbone says, on models of which that is known."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import premise
from benchmarks.premise import APART, LISTED, Sums, compared
from tests.support.places import TINY
from tests.support.random_cases import make_model

PROMPTS = [list(range(1, 12)), [3, 5]]


def drafting_model() -> Any:
    model: Any = make_model(block_size=8)
    model.generation_config.eos_token_id = None
    return model


def test_of_a_head_that_adds_nothing_and_of_positions_that_see_nothing() -> None:
    """Such a head guesses what was computed before, which another does not; the further apart, the
    fewer positions. Where positions do not look at each other, nothing changes."""
    model = drafting_model()
    sums = compared(model, "static", PROMPTS, 16, False)
    assert sorted(sums) == list(APART)
    counts = [sums[steps].positions for steps in APART]
    assert counts == sorted(counts, reverse=True)
    assert all(some.stale_kl > 0 and some.stale_kl != some.head_kl for some in sums.values())
    torch.nn.init.zeros_(model.mrp_head.norm.weight)
    for some in compared(model, "static", PROMPTS, 16, False).values():
        assert some.stale_kl == pytest.approx(some.head_kl)
        assert some.stale_same == some.head_same
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    for some in compared(model, "sequential", PROMPTS, 16, False).values():
        assert some.stale_kl == pytest.approx(0, abs=1e-9)
        assert some.stale_same == some.positions
        assert some.missed == [0] * len(LISTED)


def test_of_the_next_position_alone() -> None:
    """One of every state of a block whose guesses are so old."""
    sums = compared(drafting_model(), "sequential", PROMPTS[1:], 14, True)
    # the first block has two given tokens; the last step of a block leaves nothing to guess
    assert [sums[steps].positions for steps in APART] == [
        (6 - steps) * (steps < 6) + (8 - steps) for steps in APART
    ]


def test_what_a_list_misses_and_what_that_loses() -> None:
    """The backbone's token is the likeliest but twenty of the stale ones, at two positions; the
    head has it at the first."""
    actual = torch.full((2, 100), -9.0).index_fill_(1, torch.tensor([7]), 0.0).log_softmax(-1)
    stale = torch.zeros(2, 100)
    stale[:, 30:50] = 1.0
    stale[:, 7] = 0.5
    head = torch.zeros(2, 100)
    head[0, 7] = 1.0
    head[1, 8] = 1.0
    sums = Sums()
    sums.add(actual, stale.log_softmax(-1), head.log_softmax(-1))
    assert (sums.positions, sums.stale_same, sums.head_same) == (2, 0, 1)
    assert sums.missed == [2, 0, 0, 0, 0]
    assert sums.lost == [1, 0, 0, 0, 0]


def test_problems_and_chats_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both print a table; that of chats has their kinds."""
    given = ["--count", "1", "--targets", "sequential"]
    premise.main(given)
    table = capsys.readouterr().out
    assert table.count("| `sequential` |") == 2 * len(APART)
    prompts = tmp_path / "prompts.jsonl"
    line = {"messages": [{"role": "user", "content": "Hello"}], "kind": "chat"}
    prompts.write_text(json.dumps(line) + "\n")
    out = tmp_path / "lines.jsonl"
    given += ["--prompts", str(prompts), "--tokens", "16", "--next", "--output", str(out)]
    premise.main([*given, "--model", str(TINY), "--head", str(TINY)])
    lines = [json.loads(line) for line in out.read_text().splitlines()][1:]
    assert {line["kind"] for line in lines} == {"chat"}
    assert all(line["stale_kl"] >= 0 for line in lines)
