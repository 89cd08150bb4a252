"""Loss and gradients of a forward with labels, against one sequence and one block at a time, and
stock trainers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Trainer, TrainingArguments

from modeling_mrp import MRPForCausalLM
from modeling_mrp.model.diffusion import noise_of
from tests.support.helpers import BLOCK, MASK, chi_square_p, close, random_ids
from tests.support.random_cases import make_model


def naive_loss(
    model: MRPForCausalLM,
    ids: Tensor,
    labels: Tensor,
    lengths: list[int],
    level: Tensor,
    noise: Tensor,
) -> Tensor:
    """Equation 3 of SDAR, block by block: [clean earlier blocks | noisy block] through the model,
    nothing packed."""
    total, learned = torch.zeros((), dtype=torch.float64), 0
    for row, length in enumerate(lengths):
        clean = ids[row, :length].tolist()
        response = [label != -100 for label in labels[row, :length].tolist()]
        learned += sum(response)
        for start in range(0, length, BLOCK):
            block = range(start, min(start + BLOCK, length))
            hidden = [i for i in block if response[i] and noise[row, i]]
            noisy = clean[:start] + [MASK if i in hidden else clean[i] for i in block]
            logp = model(torch.tensor([noisy])).logits[0].log_softmax(-1)
            total = total - sum(logp[i, clean[i]] for i in hidden) / level[row]
    return total / learned


def training_example() -> dict[str, Tensor]:
    """Rows of 11, 6 and 8 real tokens; the prompts end inside a block, at a block's start and
    nowhere."""
    ids, labels, mask = (
        random_ids(11, 3, 11),
        torch.full((3, 11), -100),
        torch.ones(3, 11, dtype=torch.long),
    )
    for row, (prompt, length) in enumerate(((5, 11), (4, 6), (0, 8))):
        labels[row, prompt:length] = ids[row, prompt:length]
        mask[row, length:] = 0
    noise = torch.rand(3, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noise[:, 0] = torch.tensor([0.1, 0.65, 0.4])
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "text_noise": noise}


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize(
    "before", [[0, 0, 0], [0, 5, 3], [0, 2, 3]], ids=["right", "left", "both sides"]
)
def test_loss_and_gradients_equal_the_loop_over_blocks(before: list[int]) -> None:
    """With so much of each row's padding before its tokens. The package takes its cross-entropy in
    float32, hence 1e-6."""
    example = training_example()
    level, columns = 1 - example["text_noise"][:, 0], example.pop("text_noise")[:, 1:]
    packed, naive, noise = make_model(), make_model(), columns < level[:, None]
    moved = {
        name: torch.stack([row.roll(shift) for row, shift in zip(value, before, strict=True)])
        for name, value in {**example, "text_noise": columns}.items()
    }
    moved["text_noise"] = torch.cat([1 - level[:, None], moved["text_noise"]], 1)
    loss = packed(**moved).loss
    expected = naive_loss(naive, example["input_ids"], example["labels"], [11, 6, 8], level, noise)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    for (name, parameter), twin in zip(packed.named_parameters(), naive.parameters(), strict=True):
        if name.startswith("mrp_head"):
            assert parameter.grad is None
        else:
            assert twin.grad.norm() > 1e-4, name
            assert (parameter.grad - twin.grad).norm() < 1e-6 * twin.grad.norm(), name


@pytest.mark.parametrize("training", [True, False])
def test_the_noise_is_drawn_per_sequence_and_weighted_by_its_level(training: bool) -> None:
    """In eval mode from the text. Of 4000 sequences of 4 learned tokens the level is uniform in (0,
    1], so that the number of masks in a sequence is uniform on 0..4: chi-square at a false-alarm
    rate of 1e-6, and the seed is fixed."""
    seen: list[Tensor] = []
    ids = random_ids(12, 4000, 4)
    model = make_model(num_hidden_layers=1).train(training)
    model.model.embed_tokens.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0])
    )
    torch.manual_seed(0)
    with torch.no_grad():
        loss, logits = (out := model(ids, labels=ids)).loss, out.logits
    torch.manual_seed(0)
    masked, level = (
        seen[0][:, :4] == MASK,
        1 - noise_of(ids, torch.ones_like(ids, dtype=torch.bool), training)[:, :1],
    )
    losses = F.cross_entropy(logits.float().mT, ids, reduction="none") * masked / level
    close(losses.sum().double() / ids.numel(), loss.double(), 1e-5)
    assert chi_square_p(masked.sum(1).bincount(minlength=5), torch.full((5,), 0.2)) > 1e-6


@pytest.mark.usefixtures("exact_norms")
@torch.no_grad()
def test_in_eval_mode_a_text_has_one_loss(random_model: MRPForCausalLM) -> None:
    """Whatever the state of torch's generator, which is left alone, its neighbours, and the padding
    beside it."""
    example = {
        name: value
        for name, value in training_example().items()
        if not name.startswith("text_noise")
    }
    state = torch.get_rng_state()
    alone = [
        random_model(
            **{name: value[row : row + 1, :length] for name, value in example.items()}
        ).loss.item()
        for row, length in enumerate((11, 6, 8))
    ]
    learned = (example["labels"] != -100).sum(1)
    together = float(torch.tensor(alone) @ learned.float() / learned.sum())
    assert [random_model(**example).loss.item() for _ in range(2)] == pytest.approx(
        [together] * 2, rel=1e-6
    )
    assert torch.equal(torch.get_rng_state(), state)
    model = copy.deepcopy(random_model).train()
    assert len({model(**example).loss.item() for _ in range(3)}) == 3


QUIET: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "max_steps": 1,
    "disable_tqdm": True,
    "save_strategy": "no",
}


def stock_trainer(folder: Path, size: int = 1, of_trainer: Any = None, **options: Any) -> Trainer:
    """transformers' own, whose step takes two rows; every learned token is masked."""
    ids = random_ids(13, 2, 8)
    rows = [{"input_ids": row, "labels": row, "text_noise": torch.zeros(9)} for row in ids]
    options |= {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": 2 // size,
        "logging_steps": 1,
    }
    arguments = TrainingArguments(str(folder), **QUIET, **options)
    return Trainer(
        make_model(num_nextn_predict_layers=0), arguments, train_dataset=rows, **(of_trainer or {})
    )


def test_gradient_accumulation_in_transformers_trainer(tmp_path: Path) -> None:
    """Two micro-batches of one row give the step that one batch of the two rows gives."""
    norms = []
    for size in (1, 2):
        trainer = stock_trainer(tmp_path, size)
        trainer.train()
        norms.append(trainer.state.log_history[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_without_learned_tokens_is_refused(size: int, tmp_path: Path) -> None:
    """In a stock trainer, which would go on with a loss of 0; a micro-batch without any is part of
    a step that has some."""
    trainer = stock_trainer(tmp_path, size)
    unlearned = torch.full((8,), -100)
    trainer.train_dataset[0]["labels"] = unlearned
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0
    trainer.train_dataset[1]["labels"] = unlearned
    for compute in (trainer.train, lambda: trainer.evaluate(trainer.train_dataset[:1])):
        with pytest.raises(ValueError, match="labels: none is learned, each is -100 or padding"):
            compute()
    padded = {"labels": torch.tensor([[5, -100]]), "attention_mask": torch.tensor([[0, 1]])}
    with pytest.raises(ValueError, match="labels: none is learned"):
        make_model()(torch.tensor([[5, 6]]), **padded)


@pytest.mark.parametrize(
    "given",
    [
        {"label_smoothing_factor": 0.1},
        {"of_trainer": {"compute_loss_func": lambda outputs, labels, **_: outputs.logits.sum()}},
    ],
    ids=["label_smoothing_factor", "compute_loss_func"],
)
def test_the_stock_trainer_keeps_no_labels_for_itself(
    given: dict[str, Any], tmp_path: Path
) -> None:
    """Either would score clean text, of which every position sees what it predicts."""
    with pytest.raises(
        ValueError, match=r"A Trainer keeps labels for a loss of its own .*: leave that option out"
    ):
        stock_trainer(tmp_path, **given).train()


def test_a_backbone_is_not_called_with_a_mask_of_its_own(random_model: MRPForCausalLM) -> None:
    """So TRL's trainers call it, which put a loss of their own in place of block diffusion."""
    refused = (
        r"TRL's trainers do so for a next-token loss, .* train with mrp_trainer\.MRPTrainer, which "
        r"takes the same records"
    )
    with pytest.raises(ValueError, match=refused):
        random_model.base_model(torch.tensor([[5, 6, 7]]), attention_mask=torch.ones(1, 1, 3, 3))
