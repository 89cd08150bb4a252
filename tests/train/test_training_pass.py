"""Loss and gradients of a forward with labels, and the packed pass, against one sequence and one block at a time."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_model
from helpers import BLOCK, MASK, chi_square_p, close, collate, random_ids, sample
from mrp_trainer.train import attention
from mrp_trainer.train.collator import DiffusionCollator
from mrp_trainer.train.objectives import HeadObjective, block_diffusion
from mrp_trainer.train.packed import PackedBatch, sparse_mask
from mrp_trainer.train.reveals import Reveals
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask, flex_attention
from transformers import Trainer, TrainingArguments

from modeling_mrp import MRPForCausalLM
from modeling_mrp.model.diffusion import noise_of


def naive_loss(model: MRPForCausalLM, ids: Tensor, labels: Tensor, lengths: list[int], level: Tensor, noise: Tensor) -> Tensor:
    """Equation 3 of SDAR, block by block: [clean earlier blocks | noisy block] through the model, nothing packed."""
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


# ------------------------------------------------------------------------------------------------ training pass


def training_example() -> dict[str, Tensor]:
    """Rows of 11, 6 and 8 real tokens; the prompts end inside a block, at a block's start and nowhere."""
    ids, labels, mask = random_ids(11, 3, 11), torch.full((3, 11), -100), torch.ones(3, 11, dtype=torch.long)
    for row, (prompt, length) in enumerate(((5, 11), (4, 6), (0, 8))):
        labels[row, prompt:length] = ids[row, prompt:length]
        mask[row, length:] = 0
    noise = torch.rand(3, 11, generator=torch.Generator().manual_seed(1)) < 0.6
    level = torch.tensor([0.9, 0.35, 0.6], dtype=torch.float64)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "noise_level": level, "noise_mask": noise}


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("before", [[0, 0, 0], [0, 5, 3], [0, 2, 3]], ids=["right", "left", "both sides"])
def test_loss_and_gradients_equal_the_loop_over_blocks(before: list[int]) -> None:
    """With so much of each row's padding before its tokens. The package takes its cross-entropy in float32, hence 1e-6."""
    example = training_example()
    level, noise = example["noise_level"], example["noise_mask"]
    packed, naive = make_model(), make_model()
    moved = {
        name: torch.stack([row.roll(shift) for row, shift in zip(value, before, strict=True)]) if value.dim() > 1 else value
        for name, value in example.items()
    }
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
    """In eval mode from the text. Of 4000 sequences of 4 learned tokens the level is uniform in (0, 1], so that the number of
    masks in a sequence is uniform on 0..4: chi-square at a false-alarm rate of 1e-6, and the seed is fixed."""
    seen: list[Tensor] = []
    ids = random_ids(12, 4000, 4)
    model = make_model(num_hidden_layers=1).train(training)
    model.model.embed_tokens.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    torch.manual_seed(0)
    with torch.no_grad():
        loss, logits = (out := model(ids, labels=ids)).loss, out.logits
    torch.manual_seed(0)
    masked, level = seen[0][:, :4] == MASK, 1 - noise_of(ids, torch.ones_like(ids, dtype=torch.bool), training)[:, :1]
    losses = F.cross_entropy(logits.float().mT, ids, reduction="none") * masked / level
    close(losses.sum().double() / ids.numel(), loss.double(), 1e-5)
    assert chi_square_p(masked.sum(1).bincount(minlength=5), torch.full((5,), 0.2)) > 1e-6


@pytest.mark.usefixtures("exact_norms")
@torch.no_grad()
def test_in_eval_mode_a_text_has_one_loss(random_model: MRPForCausalLM) -> None:
    """Whatever the state of torch's generator, which is left alone, its neighbours, and the padding beside it."""
    example = {name: value for name, value in training_example().items() if not name.startswith("noise")}
    state = torch.get_rng_state()
    alone = [
        random_model(**{name: value[row : row + 1, :length] for name, value in example.items()}).loss.item()
        for row, length in enumerate((11, 6, 8))
    ]
    learned = (example["labels"] != -100).sum(1)
    together = float(torch.tensor(alone) @ learned.float() / learned.sum())
    assert [random_model(**example).loss.item() for _ in range(2)] == pytest.approx([together] * 2, rel=1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    model = copy.deepcopy(random_model).train()
    assert len({model(**example).loss.item() for _ in range(3)}) == 3


def test_gradient_accumulation_in_transformers_trainer(tmp_path: Any) -> None:
    """Two micro-batches of one row give the step that one batch of the two rows gives; every learned token is masked."""
    ids = random_ids(13, 2, 8)
    rows = [{"input_ids": row, "labels": row, "noise_level": torch.tensor(1.0), "noise_mask": row > 0} for row in ids]
    norms = []
    for size in (1, 2):
        options = {"report_to": [], "use_cpu": True, "max_steps": 1, "logging_steps": 1, "save_strategy": "no"}
        arguments = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=size, gradient_accumulation_steps=2 // size, **options
        )
        trainer = Trainer(model=make_model(num_nextn_predict_layers=0), args=arguments, train_dataset=rows)
        trainer.train()
        norms.append(trainer.state.log_history[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


# ------------------------------------------------------------------------------------------------ packed pass


def flex_twin(model: MRPForCausalLM) -> MRPForCausalLM:
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("flex_attention")
    return twin


@torch.no_grad()
def test_flex_attention_sees_what_the_dense_mask_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all columns as queries and for the noisy ones alone: the mask itself, and attention of 4 heads under it. What norms
    have made float32 beside bfloat16 values is as they are, as CUDA has no backward pass of flex attention for several types.
    """
    batch = PackedBatch(**DiffusionCollator(BLOCK, MASK, 0)([[sample(0, 8, 0), sample(1, 12, 5)]]))
    rule, length = batch.rule(), batch.input_ids.shape[1]
    random = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, 4, length, 16, generator=random) for _ in range(3))
    for queries in (length, 8):
        dense = batch.rule().dense()[:, :, :queries]
        assert torch.equal(create_mask(rule, 1, 1, queries, length, device="cpu"), dense)
        expected = F.scaled_dot_product_attention(query[:, :, :queries], key, value, attn_mask=dense)
        close(flex_attention(query[:, :, :queries], key, value, block_mask=sparse_mask(rule, queries)), expected, 1e-6)
    monkeypatch.setattr(attention, "flex_attention_forward", lambda module, *states, **_: [state.dtype for state in states[:3]])
    of_one_type = attention.flex_attention_of_one_type(torch.nn.Module(), query, key, value.bfloat16(), None)
    assert of_one_type == [torch.bfloat16] * 3


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("objective", [block_diffusion, HeadObjective(Reveals("on_policy", 0.5), unroll=2, order_weight=0.5)])
def test_tiles_give_the_same_gradients(objective: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every parameter that trains, in tiles of eight queries, of rows of several samples with padding between."""
    monkeypatch.setattr(attention, "_QUERIES", 8)
    batch = PackedBatch(**DiffusionCollator(BLOCK, MASK, 0)([[sample(0, 16, 2), sample(1, 12, 5)], [sample(2, 24, 9)]]))
    results = []
    for chosen in ("sdpa", attention.TILES):
        model = make_model()
        with attention.attending(model, chosen):
            loss, _ = objective(model, batch)
        loss.backward()
        results.append((loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (loss, gradients), (tiled, of_tiles) = results
    assert tiled == pytest.approx(loss, rel=1e-10)
    assert gradients.keys() == of_tiles.keys()
    for name, gradient in gradients.items():
        close(of_tiles[name], gradient)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex attention has gradients on CUDA only")
def test_flex_attention_gives_the_same_gradients() -> None:
    """The head's loss in float32, compiled, against SDPA with a dense mask."""
    batch = PackedBatch(**{name: value.cuda() for name, value in vars(collate([sample(i, 64, 8) for i in range(4)])).items()})
    plain = make_model().float().cuda()
    results = []
    for model in (plain, flex_twin(plain)):
        loss, _ = HeadObjective(Reveals("random", 0.0), unroll=2)(model, batch)
        loss.backward()
        results.append((loss.item(), [p.grad for p in model.get_submodule("mrp_head").parameters()]))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-4)
    for actual, expected in zip(results[1][1], results[0][1], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)
