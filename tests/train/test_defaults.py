"""Runs without flags: rows, steps and recipe that fit model and data, what Ctrl-C leaves, and an
adapter in place of a whole head."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from mrp_trainer.data.chat import RecordEncoder
from mrp_trainer.data.rows import RecordRows
from mrp_trainer.data.samples import Sample
from mrp_trainer.data.sources import Source
from mrp_trainer.heads import new_head
from mrp_trainer.loading import load_model
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.runs import dry_run, open_run
from mrp_trainer.train.settings import Settings, read_settings
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast, TrainerCallback

from modeling_mrp import MRPForCausalLM
from tests.support.commands import mrp
from tests.support.helpers import word_model
from tests.support.places import ROOT, TINY
from tests.support.random_cases import make_model
from tests.support.training_runs import saved, trainer_of

QUICK = ["use_cpu=true", "disable_tqdm=true", "logging_strategy=no", "dataloader_pin_memory=false"]


def settings_of(folder: Path, *assignments: str, **flags: Any) -> Settings:
    flags = {"model": str(TINY), "output_dir": str(folder), **flags}
    return read_settings("mrp", None, flags, [*QUICK, *assignments])


def chats(path: Path, count: int) -> str:
    """Write a few short chats; return the file."""
    lines = []
    for number in range(count):
        answer = " ".join(["yes"] * (number % 9)) + f" {number + 4}"
        turns = [("user", f"What is {number} + 4?"), ("assistant", answer)]
        messages = [{"role": role, "content": content} for role, content in turns]
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines))
    return str(path)


def test_a_few_chats_without_flags(tmp_path: Path) -> None:
    """Rows as long as the longest chat, and epochs until a hundred steps are made; what is run is
    written down, and a repeated command is the same run."""
    data = chats(tmp_path / "chats.jsonl", 45)
    run = open_run(settings_of(tmp_path / "run", data=[data]))
    rows = run.trainer.train_dataset
    longest = max(len(sample.ids) for row in rows for sample in row)
    steps = -(-len(rows) // 4)
    assert (run.trainer.args.max_length, longest % 16) == (longest, 0)
    assert len(rows) > 4
    assert run.trainer.args.num_train_epochs == -(-100 // steps)
    written = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())
    assert (written["max_length"], written["num_train_epochs"]) == (longest, -(-100 // steps))
    run.lock.release()
    assert not open_run(settings_of(tmp_path / "run", data=[data])).settings.differences(written)


@pytest.fixture
def small(tmp_path: Path, word_tokenizer: PreTrainedTokenizerFast) -> str:
    """A checkpoint of one layer with a head."""
    model = word_model(word_tokenizer)
    torch.nn.init.normal_(model.mrp_head.norm.weight, std=0.3)
    return str(saved(model, word_tokenizer, tmp_path / "base"))


@pytest.mark.parametrize(
    ("lengths", "row_length"),
    [
        ([8] * 50, 8),  # 400 tokens
        ([4] * 1000 + [8], 12),  # 4,008 tokens: 256 rows of 15 at most
        ([4] * 140_000, 2048),
        ([4] * 100 + [3000], 3000),
    ],
)
def test_rows_fit_the_samples(
    lengths: list[int], row_length: int, monkeypatch: pytest.MonkeyPatch, word_tokenizer: Any
) -> None:
    """The longest one, or more of many short ones, as derived by hand."""
    encoder = RecordEncoder(word_tokenizer, 4, 4096, word_tokenizer.mask_token_id)
    monkeypatch.setattr(
        RecordEncoder,
        "sample",
        lambda self, length: Sample(0, np.full(length, 5), np.full(length, True), length),
    )
    monkeypatch.setattr("mrp_trainer.data.rows.pack", lambda lengths, _: [np.arange(len(lengths))])
    rows = RecordRows(Source({"rows": lengths}), encoder, shuffle=False, fit=True)
    assert rows.row_length == row_length
    assert RecordRows(Source({"rows": lengths[:9]}), encoder, shuffle=False).row_length == 4096


def test_fewer_rows_than_a_step_are_said(
    tmp_path: Path, tiny_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    records = [{"text": "a b c d"}] * 3
    given = (MRPForCausalLM.from_pretrained(TINY), records, None, tiny_tokenizer)
    trainer_of(tmp_path, *given, max_length=16, per_device_train_batch_size=8)
    told = "the training data are 3 rows, fewer than the 8 of a step, so that each step takes some"
    assert caplog.text.count(told) == 1
    caplog.clear()
    trainer_of(tmp_path, *given, max_length=16, per_device_train_batch_size=3)
    assert told[:18] not in caplog.text


def test_the_defaults_are_the_recipe(tmp_path: Path) -> None:
    """Without `--config` what is trained, and from what, is as in this project's recipe; a step of
    an evaluation takes as many rows as one of training."""
    options = {"output_dir": str(tmp_path), "use_cpu": "true"}
    model = {"model": str(ROOT / "hub_configs" / "sdar-4b-mrp"), "output_dir": str(tmp_path)}
    recipe = read_settings("mrp", "sdar-4b-mrp-ours", model, QUICK)
    default = MRPTrainingArguments(objective="mrp", **options)
    of_recipe = recipe.arguments(bf16=False)
    assert default.head_objective() == of_recipe.head_objective()
    for name in ("noisy_copies", "noise_per", "inverse_level", "learning_rate", "reread_weight"):
        assert getattr(default, name) == getattr(of_recipe, name), name
    assert settings_of(tmp_path).options.head_layers == recipe.options.head_layers
    embedded = MRPForCausalLM.from_pretrained(TINY)
    copied = new_head(embedded, 3, recipe.options.head_init)
    default_head = new_head(embedded).state_dict()
    assert default_head.keys() == copied.state_dict().keys()
    for name, value in copied.state_dict().items():
        assert torch.equal(default_head[name], value), name
    # a backbone with fewer layers than the head
    assert not new_head(make_model(), 3).norm.weight.any()
    for rows in (2, 7):
        arguments = MRPTrainingArguments(
            objective="mrp", per_device_train_batch_size=rows, **options
        )
        assert arguments.per_device_eval_batch_size == rows
    # copies, unrolled steps and rereading: 9 columns of the backbone and 5 of the head against 3, 2
    for name, ratio in (("sdar-4b-mrp-ours", "2.9"), ("sdar-4b-mrp", "1")):
        told = dry_run(read_settings("mrp", name, model))
        assert told.endswith(f"vocabulary: {ratio} times the published recipe's")


class Interrupts(TrainerCallback):
    """Presses Ctrl-C in a step."""

    def __init__(self, step: int, times: int = 1) -> None:
        self.step = step
        self.times = times

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler of Ctrl-C, which a process started in the background lacks."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_loses_no_step(tmp_path: Path, small: str) -> None:
    """The same command goes on to the weights of a run that was not interrupted."""
    flags = {"model": small, "data": [chats(tmp_path / "chats.jsonl", 12)], "max_steps": 4}
    finals = []
    for name, step in (("whole", 9), ("stopped", 2)):
        settings = settings_of(tmp_path / name, **flags)
        run = open_run(settings)
        run.trainer.add_callback(Interrupts(step))
        if name == "stopped":
            told = "interrupted behind step 2 of 4, which is saved in .*: the same command goes on"
            with pytest.raises(KeyboardInterrupt, match=told):
                run.train()
            assert [path.name for path in run.folder.glob("check*")] == ["checkpoint-2"]
            assert not (run.folder / "config.json").exists()
            run = open_run(settings)
        run.train()
        finals.append(load_file(run.folder / "model.safetensors"))
    for key, value in finals[0].items():
        assert torch.equal(value, finals[1][key]), key
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_a_second_interrupt_ends_at_once(tmp_path: Path, small: str) -> None:
    data = chats(tmp_path / "chats.jsonl", 12)
    run = open_run(settings_of(tmp_path / "run", model=small, data=[data], max_steps=4))
    run.trainer.add_callback(Interrupts(1, times=2))
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        run.train()
    assert not list(run.folder.glob("checkpoint-*"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_adapter_of_a_head(tmp_path: Path, small: str) -> None:
    """Only matrices of the head have one; it is saved alone, continues, and loads with its base."""
    flags = {"model": small, "data": [chats(tmp_path / "c.jsonl", 12)], "lora_rank": 2}
    flags |= {"learning_rate": 0.05}
    folder = tmp_path / "run"
    told = dry_run(settings_of(folder, max_steps=2, **flags))
    run = open_run(settings_of(folder, "save_steps=2", max_steps=2, **flags))
    trained = {
        name for name, weight in run.trainer.model.named_parameters() if weight.requires_grad
    }
    assert trained
    assert all(".mrp_head." in name and "lora_" in name for name in trained)
    count = run.trainer.model.num_parameters(only_trainable=True)
    assert f"of which {count:,} train\n" in told
    run.train()
    assert (folder / "adapter_model.safetensors").is_file()
    assert not (folder / "model.safetensors").exists()
    assert json.loads((folder / "adapter_config.json").read_text())["lora_alpha"] == 4
    loaded = load_model(str(folder))
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    options = {"max_new_tokens": 8, "decoding": "mrp_direct"}
    expected = run.trainer.model.generate(input_ids=ids, **options)
    assert torch.equal(loaded.generate(ids, **options), expected)
    more = settings_of(folder, "save_steps=2", max_steps=3, **flags)
    with pytest.raises(ValueError, match=r"other settings: max_steps was 2 and is 3\. Name anoth"):
        open_run(more)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lora_rank": -1}, "lora_rank is -1: it must be 0 or more"),
        ({"lora_alpha": 8}, "lora_alpha is 8, without lora_rank: give both"),
        ({"lora_rank": 4, "head": "h"}, "lora_rank is 4, .* and head is 'h': leave out either"),
        ({"lora_rank": 4, "head_layers": 2}, "and head_layers is 2: leave out either"),
        ({"lora_rank": 4, "save": "full"}, "and save is 'full': leave out either"),
    ],
)
def test_what_does_not_go_with_an_adapter(
    flags: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(tmp_path, **flags)


def test_an_adapter_needs_a_head(tmp_path: Path, word_tokenizer: Any) -> None:
    model = word_model(word_tokenizer)
    model.detach_head()
    base = saved(model, word_tokenizer, tmp_path / "base")
    flags = {"model": str(base), "data": [chats(tmp_path / "c.jsonl", 2)], "lora_rank": 2}
    for refused in (open_run, dry_run):
        with pytest.raises(ValueError, match="base has no MRP head"):
            refused(settings_of(tmp_path / "run", **flags))
    assert not (tmp_path / "run").exists()


def test_the_rate_has_a_short_name(tmp_path: Path) -> None:
    command = ["train", "head", "--model", str(TINY), "--output-dir", str(tmp_path), "--dry-run"]
    assert "parameters: " in mrp(*command, "--lr", "0.5")
