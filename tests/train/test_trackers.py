"""A tracker that writes to files: what training logs is read back from it, of the trainer and of the command."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_training_from_python import CHATS, new_trainer
from transformers import PreTrainedTokenizerFast

pytest.importorskip("tensorboard", reason="the tracker is tensorboard: pip install tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

MEASURED = {f"train/{name}" for name in ("loss", "grad_norm", "learning_rate", "kl_head", "kl_stale", "gap_closed")}


def events(folder: Path) -> EventAccumulator:
    """What was written of a run, into the one folder that the Trainer makes for it."""
    (place,) = (folder / "runs").iterdir()
    return EventAccumulator(str(place)).Reload()


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    found = events(folder)
    return {(tag, event.step): event.value for tag in found.Tags()["scalars"] for event in found.Scalars(tag)}


def text(folder: Path, tag: str) -> Any:
    (event,) = events(folder).Tensors(f"{tag}/text_summary")
    return json.loads(event.tensor_proto.string_val[0])


def as_named(name: str) -> str:
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"


def test_the_trainer_tells_tensorboard(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Every number of the log at its step, training and evaluation apart, and the options and the config once."""
    asked: dict[str, Any] = {"report_to": "tensorboard", "eval_strategy": "steps", "eval_steps": 3}
    trainer = new_trainer(tmp_path, tiny_tokenizer, CHATS, CHATS[:2], **asked)
    trainer.train()
    logged = {
        (as_named(name), line["step"]): pytest.approx(value, rel=1e-6)
        for line in trainer.state.log_history
        for name, value in line.items()
        if name != "step"
    }
    assert scalars(tmp_path) == logged
    assert {(name, step) for name in MEASURED for step in (1, 2, 3)} < logged.keys()
    assert ("eval/loss", 3) in logged
    options = text(tmp_path, "args")
    assert (options["objective"], options["max_steps"], options["report_to"]) == ("mrp", 3, ["tensorboard"])
    assert text(tmp_path, "model_config")["num_nextn_predict_layers"] == trainer.model.config.num_nextn_predict_layers
