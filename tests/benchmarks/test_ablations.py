"""Heads of the distribution, which exist in the ablations alone, and the command that makes the
table."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import ablations
from modeling_mrp import MRPForCausalLM
from tests.support.helpers import random_ids


def test_a_head_of_the_distribution_predicts_all_of_it() -> None:
    """Whatever is added up: after each step the estimate is the head's output."""
    cell = {**ablations.DEFAULTS, "distribution": True}
    model: Any = ablations.new_model(cell, 1).double()
    ids = random_ids(0, 1, 16)
    positions = torch.arange(16)[None]
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool)
    with torch.no_grad():
        hidden = model.backbone(ids, positions, mask)
        estimate = hidden + model.residual(ids, hidden, positions, mask)
        output = MRPForCausalLM.residual(model, ids, hidden, positions, mask)
    torch.testing.assert_close(estimate, output)
    assert not torch.allclose(output, hidden, atol=0.1)


def test_drafts_of_such_a_head_are_lossless() -> None:
    """Though they are of no use before it is trained."""
    model: Any = ablations.new_model({**ablations.DEFAULTS, "distribution": True}, 1).double()
    ids = random_ids(1, 2, 9)
    options = {"max_new_tokens": 16, "pad_token_id": 0, "do_sample": False}
    drafted = model.generate(ids, decoding="mrp_spec", target="static", **options)
    assert drafted.equal(model.generate(ids, decoding="static", **options))


def test_a_command_that_is_repeated_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "lines.jsonl"
    small = ["--records", "30", "--steps", "1", "--batch-size", "2", "--count", "2"]
    arguments = ["--work", str(tmp_path), "--output", str(output), *small, "--cell"]
    cells = ["1 layer", "from random layers, distribution"]
    ablations.main([*arguments, cells[0]])
    first = output.read_text()
    ablations.main([*arguments, *cells])
    assert output.read_text().startswith(first)
    lines = [line for line in map(json.loads, output.read_text().splitlines()) if "cell" in line]
    assert [line["cell"] for line in lines] == cells
    capsys.readouterr()
    ablations.main(["--table", str(output)])
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert header.startswith("| head | gap closed | K=1 % | K=2 % |")
    assert [row.split(" | ")[0] for row in rows] == [f"| {cell}" for cell in cells]
