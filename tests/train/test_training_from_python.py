"""`MRPTrainer` as a program uses it: records of any layout, the command's defaults, and the Trainer's own habits."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import mrp
from conftest import TINY
from helpers import same_tensors
from hub_server import HubServer
from mrp_trainer.data.rows import RecordRows
from mrp_trainer.data.samples import samples_of
from mrp_trainer.data.sources import open_source
from mrp_trainer.data.tasks import training_lines
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.inputs import check_tokenizer, encoder_of
from mrp_trainer.train.settings import read_settings
from safetensors.torch import load_file
from training_runs import CHATS, chat_trainer
from transformers import EarlyStoppingCallback, PreTrainedTokenizerFast

from modeling_mrp import MRPForCausalLM

RECORDS = [
    *CHATS,
    {"prompt": "def double(x):\n", "completion": "    return 2 * x\n"},
    {"text": "Everything in this line is learned."},
]


def contents(rows: Any) -> list[tuple[int, list[int], list[bool]]]:
    return [(sample.index, sample.ids.tolist(), sample.response.tolist()) for row in rows for sample in samples_of(row)]


def in_a_table() -> Any:
    datasets = pytest.importorskip("datasets", reason="the dataset is one of its own")
    names = ("messages", "prompt", "completion", "text")
    return datasets.Dataset.from_list([{name: record.get(name) for name in names} for record in RECORDS])


@pytest.mark.parametrize(("kind", "packed"), [("list", True), ("str", False), ("Path", True), ("table", False)])
def test_records_become_the_rows_that_the_command_reads(
    kind: str, packed: bool, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    dataset = in_a_table() if kind == "table" else {"list": RECORDS, "str": str(path), "Path": path}[kind]
    trainer = chat_trainer(tmp_path / "run", tiny_tokenizer, dataset, dataset, packed=packed, seed=7)
    encoder = encoder_of(trainer.model, tiny_tokenizer, 64)
    assert contents(trainer.train_dataset) == contents(RecordRows(open_source([str(path)]), encoder, packed, seed=7))
    assert contents(trainer.eval_dataset) == contents(RecordRows(open_source([str(path)]), encoder, packed, shuffle=False))


@pytest.mark.parametrize("objective", ["mrp", "block_diffusion"])
def test_the_defaults_are_those_of_the_command(objective: str, tmp_path: Path) -> None:
    command = read_settings(objective, None, {"model": "m", "output_dir": str(tmp_path)})
    assert command.training == {"output_dir": str(tmp_path)}
    program = command.arguments(use_cpu=True)
    assert program.learning_rate == {"mrp": 1e-3, "block_diffusion": 1e-4}[objective]
    assert program.lr_scheduler_kwargs == {"min_lr_rate": 0.1}
    other = MRPTrainingArguments(
        str(tmp_path), objective=objective, use_cpu=True, lr_scheduler_type="linear", learning_rate=1.0
    )
    assert (other.lr_scheduler_kwargs, other.learning_rate) == (None, 1.0)


def test_processes_share_a_run_on_a_cpu_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers divides a run among the processes of torchrun on a GPU, and on a CPU where `use_cpu` says so."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert MRPTrainingArguments(str(tmp_path), objective="mrp").use_cpu


@pytest.mark.parametrize("objective", ["mrp", "block_diffusion"])
def test_what_trains_is_float32(objective: str, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Of a model of 16 bits, as published ones are loaded: a rate at which every update would be rounded away."""
    model = MRPForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    trainer = chat_trainer(
        tmp_path, tiny_tokenizer, model=model, objective=objective, bf16=True, learning_rate=1e-6, max_steps=1
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train()
    for name, value in model.state_dict().items():
        learns = name.startswith("mrp_head.") == (objective == "mrp")
        assert value.dtype == (torch.float32 if learns else torch.bfloat16), name
        assert learns or torch.equal(value, before[name]), name
    changed = "mrp_head.layers.0.mlp.up_proj.weight" if objective == "mrp" else "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(model.state_dict()[changed], before[changed])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train": []}, r"train_dataset: found no records"),
        ({"train": [*CHATS, {"messages": [{"role": "user", "content": "Hi."}]}]}, r"line 7, field messages: .* no assistant"),
        ({"train": {"train": CHATS}}, r"has the splits train: give one of them"),
        ({"train": iter(CHATS)}, "a list_iterator, which comes in order only: give a list, or a .jsonl file"),
        ({"tokenizer": None}, "train_dataset holds records: give processing_class, the tokenizer"),
        ({"held_out": {"a": CHATS, "b": RECORDS[7:]}, "eval_prompts": 1}, "eval_prompts is 1: give eval_dataset, with prompts"),
        ({"eval_prompts": 1}, "eval_prompts is 1: give eval_dataset"),
        ({"dtype": torch.bfloat16}, r"the model is torch\.bfloat16: give bf16=True, or load it with dtype=torch\.float32"),
    ],
)
def test_refused_datasets(given: Any, message: str, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    given = {"tokenizer": tiny_tokenizer, **given}
    model = MRPForCausalLM.from_pretrained(TINY, dtype=given.pop("dtype", torch.float32))
    with pytest.raises(ValueError, match=message):
        chat_trainer(tmp_path / "run", model=model, **given)
    assert not (tmp_path / "run").exists()


def test_the_best_head_is_loaded(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """ "Best" is here the highest loss: training lowers it, so that this is step 1 and patience ends at step 3."""
    asked: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    asked |= {"metric_for_best_model": "eval_loss", "greater_is_better": True, "max_steps": 9, "save_total_limit": None}
    asked |= {"learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    trainer = chat_trainer(tmp_path, tiny_tokenizer, CHATS, CHATS, callbacks=[EarlyStoppingCallback(2)], **asked)
    trainer.train()
    assert trainer.state.global_step == 3
    best, last = (load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors") for step in (1, 3))
    trained = trainer.model.state_dict()
    assert all(torch.equal(trained[name], value) for name, value in best.items())
    assert any(not torch.equal(trained[name], value) for name, value in last.items())


def test_pushed_models_load(hub: HubServer, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """A backbone at every save and at the end; the head alone where the backbone is on the Hub. No pickle arrives."""
    shared: dict[str, Any] = {"max_steps": 1, "save_steps": 1, "push_to_hub": True}
    whole = {"objective": "block_diffusion", "hub_model_id": "org/whole"}
    trainer = chat_trainer(tmp_path / "whole", tiny_tokenizer, **shared, **whole)
    trainer.train()
    trainer.save_model()
    model, head = MRPForCausalLM.from_pretrained("org/whole"), {"hub_model_id": "org/head", "hub_private_repo": False}
    trainer = chat_trainer(tmp_path / "head", tiny_tokenizer, model=model, **shared, **head)
    trainer.train()
    trainer.push_to_hub()
    loaded = MRPForCausalLM.from_pretrained("org/head")
    assert loaded.backbone_source.name == "org/whole"
    assert loaded.generation_config.decoding == "mrp_spec"
    assert same_tensors(loaded.mrp_head, model.mrp_head)
    assert [hub.repository(f"org/{name}").private for name in ("whole", "head")] == [True, False]
    titles = [hub.repository(f"org/{name}").history("main")[0].title for name in ("whole", "head")]
    assert titles == ["Model save", "End of training"]
    for repo_id in ("org/whole", "org/head"):
        names = set(hub.files(repo_id))
        assert {"model.safetensors", "modeling_mrp.py", "tokenizer.json", "chat_template.jinja", "README.md"} <= names
        assert not [name for name in names if name.endswith((".bin", ".pt", ".pth"))]


def test_another_models_tokenizer(tiny_tokenizer: Any, tmp_path: Path) -> None:
    model, word = MRPForCausalLM.from_pretrained(TINY), tiny_tokenizer.convert_ids_to_tokens(20)
    for change, said in (
        (lambda tokenizer: tokenizer.add_tokens([f"<new {i}>" for i in range(9)]), "it has 1289 tokens, .* vocabulary 1280"),
        (lambda tokenizer: setattr(tokenizer, "mask_token", "<|im_start|>"), "its mask has the id 1, and the model's 3"),
        (lambda tokenizer: setattr(tokenizer, "eos_token", "<|im_start|>"), "its eos has the id 1, and .* texts 2, 0"),
    ):
        tokenizer = copy.deepcopy(tiny_tokenizer)
        change(tokenizer)
        with pytest.raises(ValueError, match=f"^the tokenizer does not fit the model: {said}. Give the tokenizer"):
            check_tokenizer(tokenizer, model)
    with pytest.raises(ValueError, match="the tokenizer does not fit the model"):
        chat_trainer(tmp_path, tokenizer, CHATS, model=model)
    tokenizer.save_pretrained(tmp_path / "other")
    (tmp_path / "data.jsonl").write_text("\n".join(training_lines("math", "train", 4)))
    flags = ["--model", str(TINY), "--tokenizer", str(tmp_path / "other"), "--data", str(tmp_path / "data.jsonl")]
    for command in (["train", "head", "--set", "use_cpu=true", "--output-dir"], ["decode", "--output"]):
        assert re.search(said, mrp(*command, str(tmp_path / "new.jsonl"), *flags, fails=True))
        assert not (tmp_path / "new.jsonl").exists()
    unmasked = copy.deepcopy(tiny_tokenizer)
    unmasked.mask_token = None
    check_tokenizer(unmasked, model)  # its mask is an added token all the same
    model.config.mask_token_id = 20
    with pytest.raises(ValueError, match=f"the model's mask, id 20, is its token {re.escape(repr(word))}"):
        check_tokenizer(unmasked, model)
