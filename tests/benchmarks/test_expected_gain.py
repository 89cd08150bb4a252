"""The comparison of `auto` with fixed numbers of states: what it decodes and charges."""

import json
from pathlib import Path
from typing import Any

import pytest
from mrp_trainer.data.tasks import problems

from benchmarks import expected_gain
from benchmarks.common import TINY, encode_prompts, load
from modeling_mrp.rules.costs import RoundCosts
from modeling_mrp.rules.gain import Fixed

COSTS = RoundCosts((1, 8), (1.0, 8.0), (0.5, 4.0))


def test_texts_end_where_the_model_ends_them() -> None:
    """What it would write after its end is judged by nobody."""
    model, tokenizer = load(TINY)
    prompts = encode_prompts(problems("math", "tune", 3), tokenizer)
    rounds, texts = expected_gain.rounds_of(
        model.double(), "sequential", prompts, 3, 0, lambda: Fixed(4)
    )
    eos: Any = model.generation_config.eos_token_id
    for text in texts:
        assert len(text) < expected_gain.NEW
        assert text[-1] in eos
        assert not set(text[:-1]) & set(eos)
    assert {width for _, width, _, _ in rounds} <= {1, 2, 3, 4}


def test_a_round_is_charged_for_its_rows_states_and_passes() -> None:
    rounds = [(1, 4, 0, 4), (2, 2, 1, 3)]
    # a pass over the two drafts of each row that three states allow
    assert expected_gain.charge(rounds, COSTS) == 4.0 + 4.0 + COSTS.of_head(2, 3, 1)


def test_the_table_is_printed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lines.jsonl"
    given = ["--count", "1", "--batches", "1", "--targets", "static", "--output", str(out)]
    expected_gain.main(given)
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in out.read_text().splitlines()][1:]
    assert len(lines) == 2 * 5
    for line in lines:
        assert 0 < line["best"] <= line["alone"]
    expected_gain.main(["--table", str(out)])
    table = capsys.readouterr().out
    assert table in printed
    assert "10 cells: least" in table
