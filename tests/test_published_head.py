"""A head trained by the published recipe beside the embedded one, in both loops: the recipe, the command, the table."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY
from mrp_trainer.evaluate.decoded import NEW_TOKENS
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.tiny import TinyOptions
from test_result_weights import write

from benchmarks import published_head, tables
from benchmarks.common import embedded_weights

pytestmark = pytest.mark.skipif(not TINY.exists(), reason="the embedded checkpoint is not here")


def test_the_recipe_is_the_published_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its states, loss and start; steps, batches and rates are those of the embedded head."""
    called: list[Any] = []
    monkeypatch.setattr(published_head, "train_head", lambda *given, **loss: called.extend((*given, loss)))
    published_head.train_published(tmp_path, 5)
    options, dataset, loss = called
    usual = vars(TinyOptions())
    changed = {name: value for name, value in vars(options).items() if value != usual[name]}
    assert changed == {"work": tmp_path, "head_name": "published", "head_steps": 5, "head_init": "published"}
    arguments = MRPTrainingArguments(str(tmp_path), objective="mrp", use_cpu=True, **loss)
    assert (arguments.noisy_copies, arguments.noise_per, arguments.inverse_level) == (1, "sample", True)
    objective = arguments.head_objective(16)
    assert (objective.reveals.rule, objective.loss, objective.unroll) == ("random", "kl", 1)
    assert (objective.order_weight, objective.reread_weight) == (0, 0)
    assert len(dataset) == 5 * options.head_batch_size
    assert dataset.split == "train"
    assert all(sample.reveal_step is None for sample in dataset)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps and two problems a family; both heads in both loops give the texts of `static`."""
    for family in NEW_TOKENS:
        monkeypatch.setitem(NEW_TOKENS, family, 16)
    path, work = tmp_path / "tiny_published_head.jsonl", tmp_path / "work"
    command = ["--work", str(work), "--output", str(path), "--steps", "2", "--count", "2", "--states", "3", "8"]
    published_head.main(command)
    header, *lines = map(json.loads, path.read_text().splitlines())
    assert {name: header[name] for name in ("backbone", "head")} == embedded_weights()
    assert header["published_head"] != header["head"]
    assert header["options"]["work"] == "work"
    assert [(line["family"], line["num_draft_states"], line["head"], line["decoding"]) for line in lines] == list(
        product(("math", "code"), (3, 8), ("published", "embedded"), ("released", "mrp_spec"))
    )
    assert {line["texts_that_differ"] for line in lines} == {0}
    for line in lines:
        of = line["family"], line["num_draft_states"]
        first = next(one for one in lines if (one["family"], one["num_draft_states"]) == of)
        ratio = line["tokens_per_forward"] / first["tokens_per_forward"]
        assert line["over_published"] == pytest.approx(ratio, abs=2e-3)
        assert line["over_published_95"][0] <= line["over_published"] <= line["over_published_95"][1]
    assert tables.published_head(tmp_path).count("\n| code | ") == 2
    logged = [json.loads(line) for line in (work / "published" / "log.jsonl").read_text().splitlines()]
    assert {line["step"] for line in logged} == {2}
    assert "kl_head" in logged[0]
    assert not {"kl_order", "reread_kl_head"} & logged[0].keys()


def test_the_table(tmp_path: Path) -> None:
    """A line that was measured again counts; two processes write their families in any order."""
    cells = [("published", "released", 2.0), ("published", "mrp_spec", 3.0), ("embedded", "released", 2.5)]
    lines = [
        {
            "family": family,
            "num_draft_states": 4,
            "head": head,
            "decoding": loop,
            "tokens_per_forward": speed,
            "tokens_per_forward_95": [speed - 0.1, speed + 0.1],
            "over_published": speed / 2,
            "over_published_95": [speed / 2 - 0.1, speed / 2 + 0.1],
            "head_per_token": 0.0,
            "texts_that_differ": 1,
        }
        for family in ("code", "math")
        for head, loop, speed in [*cells, ("embedded", "mrp_spec", 5.0), ("embedded", "mrp_spec", 4.0)]
    ]
    write(tmp_path / "tiny_published_head.jsonl", lines)
    head, _, row, code = tables.published_head(tmp_path).splitlines()
    columns = "released, published head | released, embedded head | mrp_spec, published head | mrp_spec, embedded head"
    assert head == f"| family | K | {columns} | tokens / forward | texts that differ |"
    assert code == row.replace("math", "code")
    assert row == (
        "| math | 4 | 2.00 (1.90-2.10) | 2.50 (1.25x, 1.15-1.35) | 3.00 (1.50x, 1.40-1.60) | 4.00 (2.00x, 1.90-2.10) | "
        "2.00, 2.50, 3.00, 4.00 | 4 |"
    )
