"""A tracker that writes to files: what training logs is read back from it, of the trainer and of the command."""

import json
from pathlib import Path
from typing import Any

import pytest
from training_runs import CHATS, chat_trainer
from transformers import PreTrainedTokenizerFast

pytest.importorskip("tensorboard", reason="the tracker is tensorboard: pip install tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

MEASURED = {f"train/{name}" for name in ("loss", "grad_norm", "learning_rate", "kl_head", "kl_stale", "gap_closed")}


def test_the_trainer_tells_tensorboard(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Every number of the log at its step, training and evaluation apart, and the options once."""
    asked: dict[str, Any] = {"report_to": "tensorboard", "eval_strategy": "steps", "eval_steps": 3}
    trainer = chat_trainer(tmp_path, tiny_tokenizer, CHATS, CHATS[:2], **asked)
    trainer.train()
    logged = {}
    for line in trainer.state.log_history:
        for name, value in line.items():
            room = "eval" if name.startswith("eval_") else "train"
            logged[f"{room}/{name.removeprefix('eval_')}", line["step"]] = pytest.approx(value, rel=1e-6)
    (place,) = (tmp_path / "runs").iterdir()
    found = EventAccumulator(str(place)).Reload()
    told = {(tag, event.step): event.value for tag in found.Tags()["scalars"] for event in found.Scalars(tag)}
    assert told == {key: value for key, value in logged.items() if not key[0].endswith("/step")}
    assert {(name, step) for name in MEASURED for step in (1, 2, 3)} < told.keys()
    assert ("eval/loss", 3) in told
    (options,) = found.Tensors("args/text_summary")
    assert json.loads(options.tensor_proto.string_val[0])["objective"] == "mrp"
