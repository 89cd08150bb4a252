"""Habits of Hugging Face's trainers: arguments from a command line, heads that are saved and pushed
while training, cards, and trackers that are not there."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from mrp_trainer.train.arguments import MRPTrainingArguments
from safetensors.torch import load_file
from transformers import HfArgumentParser, PreTrainedTokenizerFast

from modeling_mrp import MRPForCausalLM
from tests.support.helpers import older_than, same_tensors
from tests.support.hub_server import HubServer
from tests.support.places import TINY
from tests.support.training_runs import Rows, Run, start, trainer_of

CHATS = [{"prompt": f"What is {n} + 4?", "completion": f"n = {n + 4}"} for n in range(6)]


def test_arguments_from_a_command_line_and_a_file(tmp_path: Path) -> None:
    """By `HfArgumentParser`, with help."""
    parser = HfArgumentParser(MRPTrainingArguments)
    command = ["--output_dir", str(tmp_path), "--objective", "mrp", "--use_cpu", "--no_packed"]
    command += ["--learning_rate", "3e-4", "--block_sizes", "8", "16", "--max_length", "64"]
    (given,) = parser.parse_args_into_dataclasses([*command, "--unroll", "3"])
    assert (given.learning_rate, given.block_sizes, given.max_length) == (3e-4, [8, 16], 64)
    assert (given.packed, given.unroll, given.order_weight) == (False, 3, 0.5)
    (plain,) = parser.parse_args_into_dataclasses(command[:5])
    direct = MRPTrainingArguments(str(tmp_path), objective="mrp", use_cpu=True)
    for name in ("max_length", "num_train_epochs", "packed", "report_to", "reveal_rule"):
        assert getattr(plain, name) == getattr(direct, name), name
    (tmp_path / "run.yaml").write_text(f"output_dir: {tmp_path}\nobjective: mrp\nuse_cpu: true\n")
    (of_file,) = parser.parse_yaml_file(str(tmp_path / "run.yaml"))
    assert of_file.head_objective() == plain.head_objective()
    assert "Head steps unrolled in training." in parser.format_help()
    with pytest.raises(ValueError, match="noisy_copies is 3: it must be from 1 to 2"):
        parser.parse_args_into_dataclasses([*command, "--noisy_copies", "3"])


def test_arguments_by_trls_parser(tmp_path: Path) -> None:
    """Of a file that a command line overrides, as TRL's own scripts take them (trl 1.16.0 beside
    the other packages: pip install --no-deps trl)."""
    trl = pytest.importorskip("trl", reason="needs trl: pip install --no-deps trl")
    text = f"output_dir: {tmp_path}\nobjective: mrp\nuse_cpu: true\n"
    text += "unroll: 2\nblock_sizes: [8, 16]\n"
    (tmp_path / "run.yaml").write_text(text)
    parser = trl.TrlParser(MRPTrainingArguments)
    words = ["--config", str(tmp_path / "run.yaml"), "--unroll", "3"]
    (given,) = parser.parse_args_and_config(words)
    assert isinstance(given, MRPTrainingArguments)
    assert (given.objective, given.block_sizes, given.unroll) == ("mrp", [8, 16], 3)


@pytest.mark.parametrize("name", ["wandbee", "wandb"])
def test_a_tracker_that_is_not_there(name: str, tmp_path: Path) -> None:
    message = f"report_to is '{name}': this tracker is not installed, .* Install its package"
    with pytest.raises(ValueError, match=message):
        MRPTrainingArguments(str(tmp_path), objective="mrp", use_cpu=True, report_to=name)


def named_model() -> Any:
    model: Any = MRPForCausalLM.from_pretrained(TINY)
    model.backbone_source = (str(TINY), None)
    return model


def test_what_is_saved_is_the_head(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = named_model()
    trainer = trainer_of(tmp_path, model, CHATS, None, tiny_tokenizer, objective="mrp", max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "head"))
    names = load_file(tmp_path / "head" / "model.safetensors").keys()
    assert names
    assert all(name.startswith("mrp_head.") for name in names)
    assert same_tensors(MRPForCausalLM.from_pretrained(tmp_path / "head").mrp_head, model.mrp_head)
    model.save_pretrained(tmp_path / "whole")  # as it is outside of the trainer
    assert len(load_file(tmp_path / "whole" / "model.safetensors")) > len(names)


def test_a_card_of_the_output_folder(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """As `mrp push` renders it; it names no folder of this machine."""
    given = (named_model(), CHATS, None, tiny_tokenizer)
    trainer = trainer_of(tmp_path, *given, objective="mrp", max_steps=1)
    with pytest.raises(ValueError, match="holds no checkpoint"):
        trainer.create_model_card()
    trainer.save_model()
    trainer.create_model_card("org/my-head", tags="math", license="mit", language=["en"])
    card = (tmp_path / "README.md").read_text()
    assert "\n# my-head\n" in card
    metadata = ModelCard(card).data
    assert (metadata.license, metadata.language) == ("mit", ["en"])
    assert metadata.tags[-2:] == ["draft-model", "math"]
    assert str(tmp_path.parent) not in card
    assert str(TINY) not in card


def test_heads_are_pushed_while_training(
    hub: HubServer,
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With each checkpoint; one that cannot be pushed ends nothing."""
    model: Any = MRPForCausalLM.from_pretrained(TINY)
    model.backbone_source = ("org/backbone", None)
    shared: dict[str, Any] = {
        "objective": "mrp",
        "max_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
        "push_to_hub": True,
        "hub_model_id": "org/head",
        "hub_strategy": "every_save",
    }
    trainer = trainer_of(tmp_path / "run", model, CHATS, None, tiny_tokenizer, **shared)
    trainer.train()
    titles = [commit.title for commit in hub.repository("org/head").history("main")]
    assert titles[:2] == [f"Training in progress, step {step}" for step in (2, 1)]
    files = hub.files("org/head")
    assert json.loads(files["config.json"])["base_model_name_or_path"] == "org/backbone"
    assert not [name for name in files if name.endswith((".pt", ".pth", ".bin"))]

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("the Hub cannot be reached")

    monkeypatch.setattr("mrp_trainer.train.trainer.push", refuse)
    with caplog.at_level(logging.WARNING):
        trainer_of(tmp_path / "again", model, CHATS, None, tiny_tokenizer, **shared).train()
    told = "checkpoint-1 was not pushed, and training goes on: the Hub cannot be reached"
    assert told in caplog.text


@pytest.mark.skipif(older_than("5.23"), reason="transformers saves parts of a sharded head")
def test_sharded_checkpoints_of_a_head_hold_the_head(tmp_path: Path) -> None:
    options = {"objective": "mrp", "max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    options |= {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "FULL_STATE_DICT"}}
    run = Run(tmp_path, options, Rows(8), sharded=True, backbone="org/backbone")
    assert start(run, 2) == [0, 0]
    for name in ("checkpoint-2", "final"):
        names = load_file(tmp_path / name / "model.safetensors").keys()
        assert names
        assert all(weight.startswith("mrp_head.") for weight in names), name
