"""The Trainer: it learns, freezes, logs, and has the optimizer that is asked for."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import make_model
from helpers import word_model
from mrp_trainer.data.chat import RecordEncoder
from mrp_trainer.data.rows import RecordRows
from mrp_trainer.data.sources import Source
from mrp_trainer.data.tasks import Split, training_lines
from mrp_trainer.evaluate.acceptance import measure_acceptance
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.attention import TRAINING_FLEX
from mrp_trainer.train.optimizer import MuonAdamW
from mrp_trainer.train.packed import PackedBatch
from mrp_trainer.train.trainer import MRPTrainer
from torch import nn
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from modeling_mrp import MRPForCausalLM


def new_trainer(model: MRPForCausalLM, folder: Path, dataset: Any = None, **options: Any) -> MRPTrainer:
    of_trainer = ("model_init", "eval_dataset", "processing_class")
    rest = {name: options.pop(name) for name in of_trainer if name in options}
    arguments = MRPTrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{"objective": "block_diffusion", "save_strategy": "no", "logging_strategy": "no", **options},
    )
    return MRPTrainer(model=model, args=arguments, train_dataset=dataset, **rest)


def math_problems(tokenizer: PreTrainedTokenizerFast, size: int, split: Split = "train", seed: int = 0) -> RecordRows:
    rows = [json.loads(line) for line in training_lines("math", split, size, seed)]
    encoder = RecordEncoder(tokenizer, 8, 128, tokenizer.mask_token_id)
    return RecordRows(Source({"math": rows}), encoder, packed=False, shuffle=False)


RATES = {"learning_rate": 1e-2, "muon_learning_rate": 1e-2, "lr_scheduler_type": "constant"}


def test_mrp_trains_the_head_alone(word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """On a fixed set of 8 problems. A new head adds nothing, so the first line logs kl_head = kl_stale."""
    model = word_model(word_tokenizer)
    with torch.no_grad():  # a random backbone whose tokens look at each other and that is sure of something
        for parameter in model.model.parameters():
            parameter *= 3 if parameter.dim() == 2 else 1
        model.lm_head.weight *= 10
    before = deepcopy(model.state_dict())
    options = {"max_steps": 40, "per_device_train_batch_size": 8, "logging_strategy": "steps", "logging_steps": 1}
    trainer = new_trainer(model, tmp_path, math_problems(word_tokenizer, 8), objective="mrp", unroll=2, **options, **RATES)
    trainer.train()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (not name.startswith("mrp_head")), name
    lines = [line for line in trainer.state.log_history if "kl_head" in line]
    assert len(lines) == 40
    for line in lines:
        assert line["gap_closed"] == pytest.approx(1 - line["kl_head"] / line["kl_stale"])
    for name in ("kl", "reread_kl"):
        assert lines[0][f"{name}_stale"] > 1e-4
        assert lines[0][f"{name}_head"] == pytest.approx(lines[0][f"{name}_stale"], rel=1e-6)
    assert all(line["kl_head"] < line["kl_stale"] for line in lines[-8:])
    assert sum(line["gap_closed"] for line in lines[-8:]) / 8 > 0.25
    assert all(0 < line["agreement"] <= 1 for line in lines)


def test_log_lines_average_what_was_measured_since_the_last(word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Per token, over all batches between two lines."""
    model = word_model(word_tokenizer)
    nn.init.ones_(model.get_submodule("mrp_head.norm").weight)
    options = {"max_steps": 4, "per_device_train_batch_size": 2, "logging_strategy": "steps", "logging_steps": 2}
    options |= {"objective": "mrp", "learning_rate": 0.0, "weight_decay": 0.0}
    trainer = new_trainer(model, tmp_path, math_problems(word_tokenizer, 8), **options)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "kl_head" in line]
    assert len(lines) == 2
    trainer.state.epoch = 0  # nothing was learned, so a batch of this epoch still measures what it did
    counts = [trainer._head_objective(model, PackedBatch(**batch))[1] for batch in trainer.get_train_dataloader()]
    for first, line in enumerate(lines):
        for name in ("kl_head", "kl_stale", "agreement", "reread_kl_head"):
            sums, numbers = zip(*(counts[2 * first + k][name] for k in (0, 1)), strict=True)
            assert line[name] == pytest.approx(float(sum(sums) / sum(numbers)), rel=1e-5)


def test_evaluation_measures_held_out_samples(word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """The loss per response token over all batches, and the same measures as in training; the model is left as it
    was."""
    model = word_model(word_tokenizer)
    held_out = math_problems(word_tokenizer, 6, "tune")
    trainer = new_trainer(model, tmp_path, objective="mrp", eval_dataset=held_out, per_device_eval_batch_size=3)
    before = deepcopy(model.state_dict())
    metrics = trainer.evaluate()
    losses = []
    for begin in (0, 3):
        batch = PackedBatch(**trainer.data_collator([held_out[i] for i in range(begin, begin + 3)]))
        with torch.no_grad():
            total, _ = trainer._head_objective(model, batch)
        losses.append((total.item(), int(batch.response_tokens)))
    assert losses[0][1] != losses[1][1]  # a mean of the batches' would be another
    total, tokens = (sum(column) for column in zip(*losses, strict=True))
    assert metrics["eval_loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert metrics["eval_kl_head"] == pytest.approx(metrics["eval_kl_stale"], rel=1e-6)  # a new head adds nothing
    assert metrics["eval_gap_closed"] == pytest.approx(0, abs=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_evaluation_decodes_held_out_prompts(word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """What `mrp_spec` does with the prompts of the first samples, with the attention of decoding; and training goes on."""
    model, held_out = word_model(word_tokenizer), math_problems(word_tokenizer, 6, "tune")
    given = {"objective": "mrp", "eval_dataset": held_out, "processing_class": word_tokenizer, "max_steps": 2}
    watched = {"eval_strategy": "steps", "eval_steps": 1, "eval_prompts": 3, "eval_new_tokens": 12, "packed_attention": "tiles"}
    trainer = new_trainer(model, tmp_path, math_problems(word_tokenizer, 16), **given, **watched)
    seen = set()
    model.get_submodule("mrp_head").register_forward_pre_hook(
        lambda module, inputs: seen.add((module.training, model.config._attn_implementation))
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert len(lines) == 2
    prompts = [held_out[i][0].ids[: int(held_out[i][0].response.argmax())].tolist() for i in range(3)]
    expected = measure_acceptance(model, word_tokenizer, prompts, 12)
    assert {name: lines[-1][f"eval_{name}"] for name in expected} == pytest.approx(expected)
    assert {attention for training, attention in seen if training} == {"tiles"}
    assert model.config._attn_implementation == "sdpa"
    assert lines[-1]["eval_stale_tokens_per_forward"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": None}, "objective is not given: 'mrp' trains the head on a frozen backbone, 'block_diffusion' trains"),
        ({"objective": "mpr"}, "objective is 'mpr': choose 'block_diffusion' or 'mrp'"),
        ({"noisy_copies": 3}, "noisy_copies is 3: it must be from 1 to 2"),
        ({"torch_compile": True}, "torch_compile is True, which does nothing here: the objectives run in place of the forward"),
        ({"rows_per_step": 10}, "rows_per_step is 10: 1 processes with per_device_train_batch_size 4 take 4 rows at once"),
        ({"rows_per_step": 16, "gradient_accumulation_steps": 2}, "leave gradient_accumulation_steps out, which is 2"),
        ({"hub_strategy": "checkpoint"}, r"hub_strategy is 'checkpoint', which does nothing here: .* pickled, .* mrp push"),
        # of the trainer itself
        ({"gradient_checkpointing": True, "objective": "mrp"}, "gradient_checkpointing drops the keys"),
        ({"eval_prompts": 2, "without": "head"}, "eval_prompts is 2, but there is no head to decode them with"),
        ({"objective": "mrp", "without": "head"}, "needs a model with a head: give it a new one"),
        ({"model_init": len}, "model_init is given and would never be called"),
    ],
)
def test_rejected_values(
    options: dict[str, Any], message: str, word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    options = dict(options)
    model = word_model(word_tokenizer, head_layers=0 if options.pop("without", "") else 1)
    with pytest.raises(ValueError, match=message):
        new_trainer(model, tmp_path, **options)


def test_processes_and_devices(word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Passes follow from the number of processes. transformers would replicate the model on several GPUs, each copy with the
    forward of the first; and what was never run is not left to chance."""
    given: dict[str, Any] = {"objective": "mrp", "use_cpu": True}
    with mock.patch.object(TrainingArguments, "world_size", mock.PropertyMock(return_value=2)):
        assert MRPTrainingArguments(str(tmp_path), rows_per_step=16, **given).gradient_accumulation_steps == 2
    two = mock.patch.object(TrainingArguments, "n_gpu", mock.PropertyMock(return_value=2))
    with two, pytest.raises(ValueError, match=r"one process sees 2 GPUs, .* launch --multi_gpu --num_processes 2"):
        MRPTrainingArguments(str(tmp_path), **given)
    started = mock.patch.object(TrainingArguments, "__post_init__", lambda args: setattr(args, "deepspeed_plugin", "plugin"))
    with started, pytest.raises(ValueError, match="deepspeed was never run with this trainer: use FSDP2"):
        MRPTrainingArguments(str(tmp_path), **given)
    args = MRPTrainingArguments(str(tmp_path), muon_learning_rate=0.1, **given)
    sharded = mock.patch.object(Trainer, "__init__", lambda trainer, *a, **k: setattr(trainer, "is_fsdp_enabled", True))
    with (
        sharded,
        pytest.raises(ValueError, match="muon_learning_rate is set, but Muon needs whole matrices"),
    ):
        MRPTrainer(word_model(word_tokenizer), args)


def test_flex_attention_trains_with_values_of_one_type(word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """There is no backward pass of it on CPUs."""
    trainer, seen = new_trainer(word_model(word_tokenizer), tmp_path, packed_attention="flex_attention"), []
    with mock.patch.object(Trainer, "train", lambda self, **_: seen.append(self.model.config._attn_implementation)):
        trainer.train()
    assert (*seen, trainer.model.config._attn_implementation) == (TRAINING_FLEX, "sdpa")


def test_the_options_reach_the_collator_and_the_objective(word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    options: dict[str, Any] = {"noisy_copies": 1, "inverse_level": True, "noise_per": "sample", "seed": 5}
    options |= {"unroll": 3, "order_weight": 0.1, "reread_weight": 0.2}
    options |= {"reveal_rule": "random", "eager_share": 0.3, "block_sizes": [2, 8]}
    trainer = new_trainer(word_model(word_tokenizer), tmp_path, objective="mrp", **options)
    collator, objective = trainer.data_collator, trainer._head_objective
    assert (collator.copies, collator.inverse_level, collator.noise_per, collator.seed) == (1, True, "sample", 5)
    assert (collator.block_size, collator.block_sizes, collator.mask_token_id) == (8, [2, 8], word_tokenizer.mask_token_id)
    assert objective.unroll == 3
    assert (objective.order_weight, objective.reread_weight) == (0.1, 0.2)
    assert (objective.reveals.rule, objective.reveals.eager_share) == ("random", 0.3)


def test_the_optimizer_is_the_one_asked_for(word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Of the head's parameters alone; with a rate for Muon it is of both kinds."""
    head = len(list(word_model(word_tokenizer).get_submodule("mrp_head").parameters()))
    for options, kind in (({"optim": "adagrad"}, "Adagrad"), ({"muon_learning_rate": 0.1}, "MuonAdamW")):
        made = new_trainer(word_model(word_tokenizer), tmp_path, objective="mrp", **options).create_optimizer()
        assert type(made).__name__ == kind
        assert len({id(p) for group in made.param_groups for p in group["params"]}) == head


def test_the_optimizer_splits_parameters_as_documented() -> None:
    model = make_model()
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = MuonAdamW(model, lr=0.01, muon_lr=0.02, weight_decay=0.1)
    groups = {type(part): [names[id(p)] for g in part.param_groups for p in g["params"]] for part in optimizer.parts}
    projections = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    matrices = {f"{m}.layers.{i}.{x}.weight" for m in ("model", "mrp_head") for i in (0, 1) for x in projections}
    frozen = {"model.layers.0.mlp.up_proj.weight"}
    assert set(groups[torch.optim.Muon]) == matrices - frozen
    assert set(groups[torch.optim.AdamW]) == set(names.values()) - matrices
    assert sorted(sum(groups.values(), [])) == sorted(set(names.values()) - frozen)  # noqa: RUF017 - none twice
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.02, 0.1), (0.01, 0.0)]
    assert len(MuonAdamW(nn.Linear(2, 2), 0.01, 0.02).parts) == 1  # a module without layers is AdamW's alone
