"""The recipe of the embedded checkpoint at toy length: every stage, a resumed run, and an export that loads anywhere."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from conftest import TINY
from mrp_trainer.train import tiny as train_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer

from modeling_mrp import MRPForCausalLM
from modeling_mrp.model.saving import code_files

pytestmark = pytest.mark.skipif(not TINY.exists(), reason="the embedded checkpoint is not here")


def run(work: Path, stage: str, **options: Any) -> None:
    train_tiny.main(stage=stage, work=work, **options)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A work folder after the stages up to the head, in three steps each; the tokenizer is the embedded one."""
    work = tmp_path_factory.mktemp("work")
    run(work, "backbone", steps=3, batch_size=2)
    run(work, "trajectories", trajectories=6)
    run(work, "head", head_steps=3, head_batch_size=2, head_name="ours")
    return work


def test_a_head_is_trained_on_its_backbone(work: Path) -> None:
    backbone = MRPForCausalLM.from_pretrained(work / "backbone" / "final").state_dict()
    trained = MRPForCausalLM.from_pretrained(work / "ours" / "final")
    assert trained.config.num_nextn_predict_layers == 3
    for name, value in trained.state_dict().items():
        assert name.startswith("mrp_head.") or torch.equal(value, backbone[name])
    assert trained.mrp_head.norm.weight.abs().max() > 0  # it began at zero
    assert len((work / "trajectories.jsonl").read_text().splitlines()) == 6
    assert [json.loads(line)["step"] for line in (work / "ours" / "log.jsonl").read_text().splitlines()] == [3, 3]


def test_processes_share_whole_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_tiny, "_processes", lambda: SimpleNamespace(num_processes=2))
    with pytest.raises(typer.Exit):
        run(tmp_path, "backbone", steps=3, batch_size=3)
    assert "the batch size is 3, and 2 processes share it: use a multiple of 2" in capsys.readouterr().err


def test_an_export_loads_with_plain_transformers(work: Path, tmp_path: Path) -> None:
    """With the code that the package generates; a second export replaces the first."""
    target = tmp_path / "exported"
    for _ in range(2):
        run(work, "export", head_name="ours", target=target)
    assert {name: (target / name).read_text() for name in code_files()} == code_files()
    assert list(tmp_path.iterdir()) == [target]
    model = AutoModelForCausalLM.from_pretrained(target, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=True)
    out = model.generate(
        **tokenizer("Bo has 3 pens.", return_tensors="pt"), max_new_tokens=5, num_draft_states=4, return_dict_in_generate=True
    )
    assert out.stats.forwards["verify"] > 0  # mrp_spec is the default of an export
