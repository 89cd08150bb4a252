"""`MRPTrainer` as a program uses it: records of any layout, what trains, what is logged, options
and their errors."""

import copy
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from mrp_trainer.data.rows import RecordRows
from mrp_trainer.data.samples import samples_of
from mrp_trainer.data.sources import open_source
from mrp_trainer.data.tasks import Split, training_lines
from mrp_trainer.evaluate.acceptance import measure_acceptance
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.collator import DiffusionCollator
from mrp_trainer.train.inputs import check_tokenizer, encoder_of
from mrp_trainer.train.objectives import HeadObjective
from mrp_trainer.train.optimizer import MuonAdamW
from mrp_trainer.train.packed import PackedBatch
from mrp_trainer.train.reveals import Reveals
from mrp_trainer.train.trainer import MRPTrainer
from torch import nn
from transformers import PreTrainedTokenizerFast, TrainingArguments

from modeling_mrp import MRPForCausalLM
from tests.support.helpers import same_tensors, word_model
from tests.support.hub_server import HubServer
from tests.support.places import TINY
from tests.support.random_cases import make_model
from tests.support.training_runs import trainer_of

CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n} + 4?"},
            {"role": "assistant", "content": f"n = {n} + 4 = {n + 4}"},
        ]
    }
    for n in range(6)
]
RECORDS = [
    *CHATS,
    {"prompt": "def double(x):\n", "completion": "    return 2 * x\n"},
    {"text": "Everything in this line is learned."},
]


def math_problems(size: int, split: Split = "train") -> list[dict[str, Any]]:
    return list(map(json.loads, training_lines("math", split, size)))


def logged(trainer: Any, name: str) -> list[dict[str, float]]:
    return [line for line in trainer.state.log_history if name in line]


def test_mrp_trains_the_head_alone(word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """On a fixed set of 8 problems. A new head adds nothing, so the first line logs kl_head =
    kl_stale."""
    model = word_model(word_tokenizer)
    # a random backbone whose tokens look at each other and that is sure of something
    with torch.no_grad():
        for parameter in model.model.parameters():
            parameter *= 3 if parameter.dim() == 2 else 1
        model.lm_head.weight *= 10
    before = copy.deepcopy(model.state_dict())
    options = {
        "max_steps": 40,
        "per_device_train_batch_size": 8,
        "packed": False,
        "max_length": 128,
        "unroll": 2,
    }
    options |= {"muon_learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    trainer = trainer_of(
        tmp_path, model, math_problems(8), None, word_tokenizer, objective="mrp", **options
    )
    trainer.train()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (not name.startswith("mrp_head")), name
    lines = logged(trainer, "kl_head")
    assert len(lines) == 40
    for line in lines:
        assert line["gap_closed"] == pytest.approx(1 - line["kl_head"] / line["kl_stale"])
    for name in ("kl", "reread_kl"):
        assert lines[0][f"{name}_stale"] > 1e-4
        assert lines[0][f"{name}_head"] == pytest.approx(lines[0][f"{name}_stale"], rel=1e-6)
    assert all(line["kl_head"] < line["kl_stale"] for line in lines[-8:])
    assert sum(line["gap_closed"] for line in lines[-8:]) / 8 > 0.25
    assert all(0 < line["agreement"] <= 1 for line in lines)


def test_evaluation_measures_held_out_samples(
    word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The loss per response token over all batches, and what `mrp_spec` does with the prompts of
    the first samples, with the attention of decoding; and training goes on."""
    model = word_model(word_tokenizer)
    options = {
        "objective": "mrp",
        "max_steps": 2,
        "packed": False,
        "max_length": 128,
        "per_device_eval_batch_size": 3,
    }
    options |= {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_prompts": 3,
        "eval_new_tokens": 12,
        "packed_attention": "tiles",
    }
    trainer = trainer_of(
        tmp_path, model, math_problems(16), math_problems(6, "tune"), word_tokenizer, **options
    )
    seen = set()
    model.get_submodule("mrp_head").register_forward_pre_hook(
        lambda module, inputs: seen.add(
            (module.training, model.config._attn_implementation, torch.is_grad_enabled())
        )
    )
    trainer.train()
    assert {attention for training, attention, _ in seen if training} == {"tiles"}
    assert {grads for training, _, grads in seen if not training} == {False}, "they take memory"
    assert model.config._attn_implementation == "sdpa"
    _, line = logged(trainer, "eval_loss")
    losses, held_out = [], trainer.eval_dataset
    for begin in (0, 3):
        batch = PackedBatch(**trainer.data_collator([held_out[i] for i in range(begin, begin + 3)]))
        with torch.no_grad():
            total, _ = trainer._head_objective(model, batch)
        losses.append((total.item(), int(batch.response_tokens)))
    assert losses[0][1] != losses[1][1]  # a mean of the batches' would be another
    total, tokens = (sum(column) for column in zip(*losses, strict=True))
    assert line["eval_loss"] == pytest.approx(total / tokens, rel=1e-3)  # with other attention
    prompts = [
        held_out[i][0].ids[: int(held_out[i][0].response.argmax())].tolist() for i in range(3)
    ]
    expected = measure_acceptance(model, word_tokenizer, prompts, 12)
    assert {name: line[f"eval_{name}"] for name in expected} == pytest.approx(expected)
    assert line["eval_stale_tokens_per_forward"] > 0


@pytest.mark.parametrize("objective", ["mrp", "block_diffusion"])
def test_what_trains_is_float32(
    objective: str, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Of a model of 16 bits, as published ones are loaded: a rate at which every update would be
    rounded away."""
    model = MRPForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    options = {
        "objective": objective,
        "bf16": True,
        "learning_rate": 1e-6,
        "warmup_steps": 0,
        "max_steps": 1,
    }
    trainer = trainer_of(tmp_path, model, CHATS, None, tiny_tokenizer, max_length=64, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train()
    for name, value in model.state_dict().items():
        learns = name.startswith("mrp_head.") == (objective == "mrp")
        assert value.dtype == (torch.float32 if learns else torch.bfloat16), name
        assert learns or torch.equal(value, before[name]), name
    changed = (
        "mrp_head.layers.0.mlp.up_proj.weight"
        if objective == "mrp"
        else "model.layers.0.mlp.up_proj.weight"
    )
    assert not torch.equal(model.state_dict()[changed], before[changed])


def contents(rows: Any) -> list[tuple[int, list[int], list[bool]]]:
    return [
        (sample.index, sample.ids.tolist(), sample.response.tolist())
        for row in rows
        for sample in samples_of(row)
    ]


def in_a_table() -> Any:
    datasets = pytest.importorskip("datasets", reason="the dataset is one of its own")
    names = ("messages", "prompt", "completion", "text")
    return datasets.Dataset.from_list(
        [{name: record.get(name) for name in names} for record in RECORDS]
    )


@pytest.mark.parametrize(
    ("kind", "packed"), [("list", True), ("str", False), ("Path", True), ("table", False)]
)
def test_records_become_the_rows_that_the_command_reads(
    kind: str, packed: bool, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, RECORDS)))
    dataset = (
        in_a_table() if kind == "table" else {"list": RECORDS, "str": str(path), "Path": path}[kind]
    )
    given = (
        tmp_path / "run",
        MRPForCausalLM.from_pretrained(TINY),
        dataset,
        dataset,
        tiny_tokenizer,
    )
    trainer = trainer_of(*given, max_length=64, packed=packed, seed=7)
    encoder = encoder_of(trainer.model, tiny_tokenizer, 64)
    assert contents(trainer.train_dataset) == contents(
        RecordRows(open_source([str(path)]), encoder, packed, seed=7)
    )
    assert contents(trainer.eval_dataset) == contents(
        RecordRows(open_source([str(path)]), encoder, packed, shuffle=False)
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"objective": None},
            "objective is not given: 'mrp' trains the head on a frozen backbone, 'block_diffusion' "
            "trains",
        ),
        ({"objective": "mpr"}, "objective is 'mpr': choose 'block_diffusion' or 'mrp'"),
        ({"noisy_copies": 3}, "noisy_copies is 3: it must be from 1 to 2"),
        (
            {"gradient_accumulation_steps": 0},
            "gradient_accumulation_steps is 0: it must be 1 or more",
        ),
        (
            {"per_device_train_batch_size": -1},
            "per_device_train_batch_size is -1: it must be 1 or more",
        ),
        (
            {"torch_compile": True},
            "torch_compile is True, which does nothing here: the objectives run in place of the "
            "forward",
        ),
        (
            {"rows_per_step": 10},
            "rows_per_step is 10: 1 processes with per_device_train_batch_size 4 take 4 rows at "
            "once",
        ),
        (
            {"rows_per_step": 16, "gradient_accumulation_steps": 2},
            "leave gradient_accumulation_steps out, which is 2",
        ),
        (
            {"max_steps": 0},
            r"max_steps is 0: nothing would be trained\. Give -1 \(by epochs\), or max_steps of 1 "
            r"or more",
        ),
        (
            {"max_steps": -1, "num_train_epochs": 0},
            "num_train_epochs is 0: nothing would be trained. Give a number",
        ),
        (
            {"max_steps": -1, "num_train_epochs": -1.5},
            "num_train_epochs is -1.5: it must be 0 or more",
        ),
        (
            {"max_length": 1025},
            r"max_length is 1025: the model has 1024 positions \(max_position_embeddings\), lower "
            r"it",
        ),
        (
            {"hub_strategy": "checkpoint"},
            "hub_strategy is 'checkpoint': .* pickled .* Use one of end, every_save",
        ),
        # of the trainer itself
        (
            {"objective": "block_diffusion", "eval_prompts": 2, "head": False},
            "eval_prompts is 2, but there is no head to decode",
        ),
        ({"head": False}, "needs a model with a head: give it a new one"),
        (
            {"dtype": torch.bfloat16},
            r"the model is torch\.bfloat16: give bf16=True, or load it with dtype=torch\.float32",
        ),
        ({"train": []}, r"train_dataset: found no records"),
        (
            {"train": [*CHATS, {"messages": [{"role": "user", "content": "Hi."}]}]},
            r"record 7, field messages: .* no assistant",
        ),
        ({"train": {"train": CHATS}}, r"has the splits train: give one of them"),
        (
            {"train": iter(CHATS)},
            "a list_iterator, which comes in order only: give a list, or a .jsonl file",
        ),
        ({"tokenizer": None}, "train_dataset holds records: give processing_class, the tokenizer"),
        (
            {"held_out": {"a": CHATS, "b": RECORDS[7:]}, "eval_prompts": 1},
            "eval_prompts is 1: give eval_dataset, with prompts",
        ),
        ({"eval_prompts": 1}, "eval_prompts is 1: give eval_dataset"),
    ],
)
def test_what_does_not_go_together(
    given: Any, message: str, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    given = {
        "train": CHATS,
        "tokenizer": tiny_tokenizer,
        "max_length": 64,
        "objective": "mrp",
        **given,
    }
    model = MRPForCausalLM.from_pretrained(TINY, dtype=given.pop("dtype", torch.float32))
    if not given.pop("head", True):
        model.detach_head()
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path / "run", model, **given)
    assert not (tmp_path / "run").exists()


def test_processes_and_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes follow from the number of processes, which also divide a run on a CPU where `use_cpu`
    says so. transformers would replicate the model on several GPUs, each copy with the forward of
    the first."""
    given: dict[str, Any] = {"objective": "mrp", "use_cpu": True}
    with mock.patch.object(TrainingArguments, "world_size", mock.PropertyMock(return_value=2)):
        assert (
            MRPTrainingArguments(
                str(tmp_path), rows_per_step=16, **given
            ).gradient_accumulation_steps
            == 2
        )
    two = mock.patch.object(TrainingArguments, "n_gpu", mock.PropertyMock(return_value=2))
    with (
        two,
        pytest.raises(
            ValueError, match=r"one process sees 2 GPUs, .* launch --multi_gpu --num_processes 2"
        ),
    ):
        MRPTrainingArguments(str(tmp_path), **given)
    with pytest.raises(ValueError, match="gradient_checkpointing drops the keys"):
        trainer_of(tmp_path, make_model().float(), gradient_checkpointing=True, **given)
    with pytest.raises(ValueError, match="model_init is given and would never be called"):
        MRPTrainer(
            make_model().float(), MRPTrainingArguments(str(tmp_path), **given), model_init=len
        )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert MRPTrainingArguments(str(tmp_path), objective="mrp").use_cpu


def test_options_reach_the_collator_the_objective_and_the_optimizer(tmp_path: Path) -> None:
    """The optimizer is of the head's parameters alone; with a rate for Muon it is of both kinds."""
    noise: dict[str, Any] = {
        "inverse_level": True,
        "noise_per": "sample",
        "seed": 5,
        "block_sizes": [2, 4],
    }
    options: dict[str, Any] = {
        "unroll": 3,
        "order_weight": 0.1,
        "reread_weight": 0.2,
        "reveal_rule": "random",
    }
    given = {"objective": "mrp", "eager_share": 0.3, "noisy_copies": 1, **noise, **options}
    for optimizer, kind in (
        ({"optim": "adagrad"}, "Adagrad"),
        ({"muon_learning_rate": 0.1}, "MuonAdamW"),
    ):
        model = make_model().float()
        trainer = trainer_of(tmp_path, model, **given, **optimizer)
        assert trainer.data_collator == DiffusionCollator(4, 60, 0, 1, **noise)
        assert trainer._head_objective == HeadObjective(
            Reveals("random", 0.3), 3, order_weight=0.1, reread_weight=0.2
        )
        made = trainer.create_optimizer()
        assert type(made).__name__ == kind
        trained = {id(p) for group in made.param_groups for p in group["params"]}
        assert trained == set(map(id, model.get_submodule("mrp_head").parameters()))


def test_the_optimizer_splits_parameters_as_documented() -> None:
    model = make_model()
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = MuonAdamW(model, lr=0.01, muon_lr=0.02, weight_decay=0.1)
    groups = {
        type(part): [names[id(p)] for g in part.param_groups for p in g["params"]]
        for part in optimizer.optimizers
    }
    frozen = {"model.layers.0.mlp.up_proj.weight"}
    matrices = {name for name in names.values() if re.search(r"layers\.\d\..*_proj\.weight$", name)}
    assert len(matrices) == 4 * 7, (
        "of the attention and the MLP of two layers each of backbone and head"
    )
    assert sorted(groups[torch.optim.Muon]) == sorted(matrices - frozen)
    assert sorted(groups[torch.optim.AdamW]) == sorted({*names.values()} - matrices)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.02, 0.1),
        (0.01, 0.0),
    ]
    # a module without layers is AdamW's alone
    assert len(MuonAdamW(nn.Linear(2, 2), 0.01, 0.02).optimizers) == 1


def test_pushed_models_load(
    hub: HubServer, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """A backbone at every save and at the end; the head alone where the backbone is on the Hub. No
    pickle arrives."""
    shared: dict[str, Any] = {
        "max_length": 64,
        "max_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "push_to_hub": True,
    }
    data = (CHATS, None, tiny_tokenizer)
    trainer = trainer_of(
        tmp_path / "whole",
        MRPForCausalLM.from_pretrained(TINY),
        *data,
        hub_model_id="org/whole",
        **shared,
    )
    trainer.train()
    trainer.save_model()
    model, head = (
        MRPForCausalLM.from_pretrained("org/whole"),
        {"hub_model_id": "org/head", "hub_private_repo": False},
    )
    trainer = trainer_of(tmp_path / "head", model, *data, objective="mrp", **shared, **head)
    trainer.train()
    trainer.push_to_hub()
    loaded = MRPForCausalLM.from_pretrained("org/head")
    assert loaded.backbone_source[0] == "org/whole"
    assert loaded.generation_config.decoding == "mrp_spec"
    assert same_tensors(loaded.mrp_head, model.mrp_head)
    for repo_id, private, title in (
        ("org/whole", True, "Model save"),
        ("org/head", False, "End of training"),
    ):
        assert hub.repository(repo_id).private == private
        assert hub.repository(repo_id).history("main")[0].title == title
        names = set(hub.files(repo_id))
        assert {
            "model.safetensors",
            "modeling_mrp.py",
            "tokenizer.json",
            "chat_template.jinja",
            "README.md",
        } <= names
        assert not [name for name in names if name.endswith((".bin", ".pt", ".pth"))]


def test_another_models_tokenizer(tiny_tokenizer: Any, tmp_path: Path) -> None:
    model, word = MRPForCausalLM.from_pretrained(TINY), tiny_tokenizer.convert_ids_to_tokens(20)
    for change, wrong in (
        (
            lambda tokenizer: tokenizer.add_tokens([f"<new {i}>" for i in range(9)]),
            "it has 1289 tokens, .* vocabulary 1280",
        ),
        (
            lambda tokenizer: setattr(tokenizer, "mask_token", "<|im_start|>"),
            "its mask has the id 1, and the model's 3",
        ),
        (
            lambda tokenizer: setattr(tokenizer, "eos_token", "<|im_start|>"),
            "its eos has the id 1, and .* texts end with 2, 0",
        ),
    ):
        tokenizer = copy.deepcopy(tiny_tokenizer)
        change(tokenizer)
        with pytest.raises(
            ValueError, match=f"^the tokenizer does not fit the model: {wrong}. Give the tokenizer"
        ):
            trainer_of(tmp_path, model, CHATS, None, tokenizer)
    unmasked = copy.deepcopy(tiny_tokenizer)
    unmasked.mask_token = None
    check_tokenizer(unmasked, model)  # its mask is an added token all the same
    model.config.mask_token_id = 20
    with pytest.raises(
        ValueError, match=f"the model's mask, id 20, is its token {re.escape(repr(word))}"
    ):
        check_tokenizer(unmasked, model)
