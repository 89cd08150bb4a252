"""The losses against unpacked twins, and the Trainer: it learns, freezes, logs and resumes."""

import math
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_model
from helpers import BLOCK, MASK, collate, sample
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, set_seed

from modeling_mrp import MRPConfig, MRPForCausalLM
from modeling_mrp.diffusion_mrp import BLANK, PackedBatch, order_kl
from trainer.data import DiffusionCollator, Sample, TaskDataset
from trainer.trainer import MRPTrainer, MRPTrainingArguments

# ------------------------------------------------------------------------------------------------ losses


def new_trainer(model: MRPForCausalLM, folder: Path, dataset: Any = None, **options: Any) -> MRPTrainer:
    arguments = MRPTrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "no", "logging_strategy": "no", **options},
    )
    config = model.config
    collator = DiffusionCollator(config.block_size, config.mask_token_id, config.pad_token_id)
    return MRPTrainer(model=model, args=arguments, train_dataset=dataset, data_collator=collator)


def blocks_of(batch: PackedBatch, samples: list[Sample]) -> Iterable[tuple[int, list[int], list[int], int]]:
    """(row, columns of a noisy block, clean tokens before it, where it starts) for every noisy block of a batch."""
    for row, item in enumerate(samples):
        for copy in range(1, int(batch.view.max()) + 1):
            columns = (batch.view[row] == copy).nonzero()[:, 0]
            for begin in range(0, len(columns), BLOCK):
                at = columns[begin : begin + BLOCK].tolist()
                start = int(batch.position_ids[row, at[0]])
                yield row, at, item.ids[:start].tolist(), start


def run_alone(model: MRPForCausalLM, ids: list[int], hidden: Tensor | None = None) -> Tensor:
    """[length, hidden] of one unpacked sequence: the backbone, or the head on given hidden states."""
    position = torch.arange(len(ids))[None]
    mask = (position[:, None] // BLOCK <= position[:, :, None] // BLOCK)[:, None]
    tensor = torch.tensor([ids])
    return (model.backbone(tensor, position, mask) if hidden is None else model.residual(tensor, hidden[None], position, mask))[
        0
    ]


SAMPLES = [replace(sample(2, 16, 6), length=14), sample(3, 12, 8)]


@pytest.mark.parametrize("inverse_level", [False, True])
def test_block_diffusion_loss_equals_the_loop_over_blocks(inverse_level: bool, tmp_path: Path) -> None:
    """Qwen3's norms and the package's cross-entropy are float32, hence 1e-5."""
    model = make_model()
    batch = collate(SAMPLES, inverse_level=inverse_level)
    loss = new_trainer(model, tmp_path).compute_loss(model, vars(batch))
    total = 0.0
    for row, at, clean, start in blocks_of(batch, SAMPLES):
        logits = model.lm_head(run_alone(model, clean + batch.input_ids[row, at].tolist())[start:])
        for i, column in enumerate(at):
            if batch.weight[row, column] > 0:
                target = int(batch.target_ids[row, column])
                even = torch.full_like(logits[i], 1 / len(logits[i]))  # behind the end
                wanted = even if target == BLANK else F.one_hot(torch.tensor(target), len(logits[i])).float()
                total += batch.weight[row, column].item() * F.cross_entropy(logits[i], wanted).item()
    assert int(batch.supervised.sum()) == 14
    assert loss.item() == pytest.approx(total / 14, rel=1e-5)


def confident_model(scale: float) -> MRPForCausalLM:
    """Sharper logits, so that eager reveals happen: at 6 a quarter of the masked positions is above 0.95."""
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight *= scale
    return model


def naive_kl(model: MRPForCausalLM, student: Tensor, teacher: Tensor) -> Tensor:
    """KL( softmax(B) || softmax(A + C) ) of one position, from hidden states [hidden]."""
    b, a = model.lm_head(teacher).log_softmax(-1), model.lm_head(student).log_softmax(-1)
    return (b.exp() * (b - a)).sum()


def naive_order(model: MRPForCausalLM, student: Tensor, teacher: Tensor) -> Tensor:
    """The divergence of which of a block's positions comes first, from hidden states [positions, hidden]."""
    shares = []
    tokens = []
    for hidden in (teacher, student):
        odds = []
        for place, h in enumerate(hidden):
            logits = model.lm_head(h).index_fill(0, torch.tensor([MASK]), -torch.inf)
            if hidden is teacher:
                tokens.append(int(logits.argmax()))
            p = logits.softmax(-1)[tokens[place]]
            odds.append(p / (1 - p))
        shares.append(torch.stack(odds) / sum(odds))
    return (shares[0] * (shares[0] / shares[1]).log()).sum()


@pytest.mark.parametrize("order_weight", [0.0, 0.7])
def test_mrp_loss_equals_the_loop_over_blocks(order_weight: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Value and gradients of two unrolled steps, though the trainer runs the clean half once. The states that `_reveal`
    and the left-out tokens draw are recorded and then taken as given: acc_0 = h_A, acc_k = acc_{k-1} + Head(embed(x^(k)),
    acc_{k-1}) block by block, each step against the backbone at x^(k)."""
    model = confident_model(6)
    samples = [*SAMPLES, sample(7, 24, 4)]
    batch = collate(samples)
    trainer = new_trainer(model, tmp_path, objective="mrp", unroll=2, order_weight=order_weight)
    states: list[tuple[Tensor, Tensor]] = []
    left_out: list[Tensor] = []
    reveal, one_per_block = trainer._reveal, trainer._one_per_block

    def recorded_reveal(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        states.append(reveal(*arguments, **options))
        return states[-1]

    def recorded_lot(*arguments: Any) -> Tensor:
        left_out.append(one_per_block(*arguments))
        return left_out[-1]

    monkeypatch.setattr(trainer, "_reveal", recorded_reveal)
    monkeypatch.setattr(trainer, "_one_per_block", recorded_lot)
    torch.manual_seed(0)
    loss = trainer.compute_loss(model, vars(batch))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad(set_to_none=True)
    assert (len(states), len(left_out)) == (2, 1)
    names = ("step 1", "step 2", "order 1", "order 2", "reread", "kl_stale", "reread_kl_stale")
    sums = {name: torch.zeros((), dtype=torch.float64) for name in names}
    for row, at, clean, start in blocks_of(batch, samples):
        h_a = acc = run_alone(model, clean + batch.input_ids[row, at].tolist()).detach()
        for step, (ids, masked) in enumerate(states):
            revealed = clean + ids[row, at].tolist()
            acc = torch.cat([h_a[:start], (acc + run_alone(model, revealed, acc))[start:]])
            h_b = run_alone(model, revealed).detach()
            shown = [i for i, c in enumerate(at) if masked[row, c] and batch.target_ids[row, c] != BLANK]
            if shown:
                places = torch.tensor(shown) + start
                sums[f"order {step + 1}"] = sums[f"order {step + 1}"] + naive_order(model, acc[places], h_b[places])
            for i, column in enumerate(at):
                if masked[row, column]:
                    sums[f"step {step + 1}"] = sums[f"step {step + 1}"] + naive_kl(model, acc[start + i], h_b[start + i])
                    sums["kl_stale"] += (step == 0) * naive_kl(model, h_a[start + i], h_b[start + i])
                if step == 0 and left_out[0][row, column]:
                    again = list(revealed)
                    again[start + i] = MASK
                    teacher = run_alone(model, again)[start + i].detach()
                    sums["reread"] = sums["reread"] + naive_kl(model, acc[start + i], teacher)
                    sums["reread_kl_stale"] += naive_kl(model, h_a[start + i], teacher)
    assert min(value.item() for value in sums.values()) > 1e-4
    order = order_weight * (sums["order 1"] + sums["order 2"])
    twin = (sums["step 1"] + sums["reread"] + sums["step 2"] + order) / 2 / (14 + 20)
    assert loss.item() == pytest.approx(twin.item(), rel=1e-4)
    twin.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert name.startswith("mrp_head.")
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)
    counts = {"kl": int(states[0][1].sum()), "reread_kl": int(left_out[0].sum())}
    measured = {name: values[0].item() for name, values in trainer._measured.items() if name != "kl_order"}
    expected = {
        "kl_stale": sums["kl_stale"] / counts["kl"],
        "kl_head": sums["step 1"] / counts["kl"],
        "reread_kl_stale": sums["reread_kl_stale"] / counts["reread_kl"],
        "reread_kl_head": sums["reread"] / counts["reread_kl"],
    }
    assert measured == pytest.approx({name: value.item() for name, value in expected.items()}, rel=1e-4)


def test_order_kl_by_hand() -> None:
    """Two positions share block 3, one is alone in block 0 (where there is nothing to tell): odds of the teacher's token."""
    weight = torch.cat([torch.eye(3), torch.full((1, 3), 9.0)]).double()  # id 3 is the mask, the favourite of all
    teacher = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [5.0, 0.0, 0.0]], dtype=torch.float64)
    student = torch.tensor([[0.5, 1.0, 1.0], [1.0, 1.0, -1.0], [0.0, 2.0, 1.0]], dtype=torch.float64, requires_grad=True)

    def odds(logits: Tensor, token: int) -> float:
        p = logits.softmax(-1)[token].item()
        return p / (1 - p)

    wanted = [odds(teacher[0], 0), odds(teacher[1], 1)]
    given = [odds(student[0].detach(), 0), odds(student[1].detach(), 1)]
    p, q = ([x / sum(pair) for x in pair] for pair in (wanted, given))
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    loss = order_kl(student, teacher, weight, torch.tensor([3, 3, 0]), torch.tensor(4), 3)
    assert loss.item() == pytest.approx(expected / 4, rel=1e-5)
    loss.backward()
    assert student.grad is not None
    assert student.grad[:2].abs().min() > 1e-3
    assert student.grad[2].abs().max() < 1e-9
    assert order_kl(teacher, teacher, weight, torch.tensor([3, 3, 0]), torch.tensor(4), 3).item() == pytest.approx(0, abs=1e-7)
    empty = torch.zeros(0, 3, dtype=torch.float64)
    assert order_kl(empty, empty, weight, torch.zeros(0, dtype=torch.long), torch.tensor(0), 3).item() == 0


def test_the_order_enters_the_loss(tmp_path: Path) -> None:
    """With its weight, and nowhere behind the end of a text."""
    model = confident_model(6)
    losses, orders = [], []
    for weight in (0.0, 0.5, 2.0):
        trainer = new_trainer(model, tmp_path, objective="mrp", unroll=1, order_weight=weight)
        torch.manual_seed(0)
        losses.append(trainer.compute_loss(model, vars(collate(SAMPLES))).item())
        orders += trainer._measured.get("kl_order", [])
    assert len(orders) == 2
    assert (losses[2] - losses[0]) == pytest.approx(4 * (losses[1] - losses[0]), rel=1e-4)
    assert losses[1] - losses[0] > 1e-4


def test_what_a_training_step_reveals(tmp_path: Path) -> None:
    """The most confident masked position of every block, with the model's own token; eagerly, in about half of the blocks,
    also every position above a threshold of 0.2 to 0.95; and one of the revealed positions of each block is left out."""
    model = confident_model(6)
    samples = [replace(sample(i, 44, 4), length=42) for i in range(30)]  # two positions behind the end
    batch = collate(samples)
    trainer = new_trainer(model, tmp_path, objective="mrp")
    with torch.no_grad():
        hidden = model.backbone(batch.input_ids, batch.position_ids, batch.attention_mask(BLOCK))
        logits = model.lm_head(hidden)
    logits[..., MASK] = -torch.inf
    confidence, favourite = logits.softmax(-1).max(-1)
    torch.manual_seed(0)
    ids, masked = trainer._reveal(model, batch, batch.input_ids, batch.supervised, hidden, False)
    eager_ids, eager_masked = trainer._reveal(model, batch, batch.input_ids, batch.supervised, hidden, True)
    left_out = trainer._one_per_block(batch, batch.supervised & ~eager_masked)
    more = sure = 0
    for row, at, _, _ in blocks_of(batch, samples):
        candidates = [c for c in at if batch.supervised[row, c] and batch.target_ids[row, c] != BLANK]
        assert masked[row, [c for c in at if batch.supervised[row, c] and c not in candidates]].all()
        revealed = [column for column in candidates if not masked[row, column]]
        eager = [column for column in candidates if not eager_masked[row, column]]
        ranked = sorted(candidates, key=lambda column: -confidence[row, column])
        assert revealed == ranked[:1]
        assert sorted(eager, key=lambda column: -confidence[row, column]) == ranked[: len(eager)]
        assert all(confidence[row, column] > 0.2 for column in eager if column not in revealed)
        assert int(left_out[row, at].sum()) == min(1, len(eager))
        assert all(column in eager for column in at if left_out[row, column])
        for column in at:
            for out, chosen in ((ids, revealed), (eager_ids, eager)):
                assert out[row, column] == (favourite if column in chosen else batch.input_ids)[row, column]
        if len(ranked) > 1 and confidence[row, ranked[1]] > 0.95:  # above every threshold
            sure += 1
            more += len(eager) > 1
    clean = batch.view == 0
    assert torch.equal(eager_ids[clean], batch.target_ids[clean])
    assert sure > 50
    assert abs(more - sure / 2) < 4.5 * math.sqrt(sure) / 2  # false-alarm rate 7e-6


@pytest.mark.parametrize("kind", ["sure", "tied"])
def test_a_training_step_reveals_one_position_of_a_block(kind: str, tmp_path: Path) -> None:
    """Also where every probability rounds to 1, and where all positions say the same: of equals the left one is revealed."""
    model, samples = confident_model(60), [sample(i, 44, 4) for i in range(10)]
    if kind == "tied":
        for layer in model.model.layers:  # tokens do not look at each other, so that all masks are alike
            nn.init.zeros_(layer.self_attn.o_proj.weight)
    batch = collate(samples)
    trainer = new_trainer(model, tmp_path, objective="mrp")
    with torch.no_grad():
        hidden = model.backbone(batch.input_ids, batch.position_ids, batch.attention_mask(BLOCK))
    _, masked = trainer._reveal(model, batch, batch.input_ids, batch.supervised, hidden, False)
    for row, at, _, _ in blocks_of(batch, samples):
        candidates = [column for column in at if batch.supervised[row, column]]
        revealed = [column for column in candidates if not masked[row, column]]
        assert len(revealed) == min(1, len(candidates))
        if kind == "tied":
            assert revealed == candidates[:1]


# ------------------------------------------------------------------------------------------------ trainer


def small_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, head_layers: int = 1) -> MRPForCausalLM:
    set_seed(seed)
    return MRPForCausalLM(
        MRPConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            block_size=8,
            mask_token_id=tokenizer.mask_token_id,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            max_position_embeddings=256,
            initializer_range=0.1,
            num_nextn_predict_layers=head_layers,
        )
    )


def math_problems(tokenizer: PreTrainedTokenizerFast, size: int) -> TaskDataset:
    return TaskDataset(tokenizer, size, {"math": 1.0}, block_size=8)


RATES = {"learning_rate": 1e-2, "muon_learning_rate": 1e-2, "lr_scheduler_type": "constant"}


def test_block_diffusion_learns(word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """30 steps of 8 problems; judged on 16 others. A uniform guess costs log(vocabulary), and so does what lies behind the
    end, whatever is learned; the head is not touched."""
    model = small_model(word_tokenizer)
    before = deepcopy(model.state_dict())
    options = {"max_steps": 30, "per_device_train_batch_size": 8, "logging_strategy": "steps", "logging_steps": 1}
    trainer = new_trainer(model, tmp_path, math_problems(word_tokenizer, 240), **options, **RATES)
    unseen = TaskDataset(word_tokenizer, 16, {"math": 1.0}, "tune", block_size=8)
    batch = trainer.data_collator([unseen[i] for i in range(16)])
    with torch.no_grad():
        first = trainer.compute_loss(model, batch).item()
    assert first == pytest.approx(math.log(len(word_tokenizer)), rel=0.1)
    trainer.train()
    with torch.no_grad():
        last = trainer.compute_loss(model, batch).item()
    blank = ((batch["target_ids"] == BLANK) & (batch["weight"] > 0)).sum() / batch["response_tokens"] * first
    assert last - blank < 0.65 * (first - blank)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("mrp_head"), name


def test_mrp_trains_the_head_alone(word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """On a fixed set of 8 problems. A new head adds nothing, so the first line logs kl_head = kl_stale."""
    model = small_model(word_tokenizer)
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
    assert trainer._measured == {}


def test_log_lines_average_what_was_measured_since_the_last(word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    trainer = new_trainer(small_model(word_tokenizer), tmp_path, objective="mrp")
    for stale, head in ((1.0, 0.5), (3.0, 0.5)):
        trainer._note("kl_stale", torch.tensor(stale))
        trainer._note("kl_head", torch.tensor(head))
    trainer.log({"loss": 1.0})
    trainer.log({"loss": 2.0})
    assert trainer.state.log_history[0] == {
        "loss": 1.0,
        "kl_stale": 2.0,
        "kl_head": 0.5,
        "gap_closed": 0.75,
        "step": 0,
        "epoch": 0,
    }
    assert trainer.state.log_history[1] == {"loss": 2.0, "step": 0, "epoch": 0}


@pytest.mark.parametrize("objective", ["block_diffusion", "mrp"])
def test_a_resumed_run_ends_with_the_same_weights(
    objective: str, word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Six steps at once, against step 3's checkpoint taken up by a new trainer on other weights and another RNG state."""
    options = {
        "objective": objective,
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": 3,
        "warmup_steps": 2,
        **RATES,
        "lr_scheduler_type": "linear",
    }

    def run(seed: int, resume_from: Path | None) -> dict[str, Tensor]:
        model = small_model(word_tokenizer, seed)
        if objective == "mrp":
            nn.init.ones_(model.mrp_head.norm.weight)  # a head that answers, so that all of it learns
        trainer = new_trainer(model, tmp_path, math_problems(word_tokenizer, 24), **options)
        torch.manual_seed(seed)
        trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
        assert trainer.state.global_step == 6
        return model.state_dict()

    straight = run(0, None)
    resumed = run(1, tmp_path / "checkpoint-3")
    halfway = MRPForCausalLM.from_pretrained(tmp_path / "checkpoint-3").state_dict()
    learns = "mrp_head." if objective == "mrp" else "model."
    for name, value in straight.items():
        assert torch.equal(resumed[name], value), name
        if name.startswith(learns):
            assert not torch.equal(halfway[name], value), name


@pytest.mark.parametrize(
    ("options", "head_layers", "message"),
    [
        ({"objective": "mpr"}, 1, "objective is 'mpr': choose"),
        ({"unroll": 0}, 1, "unroll is 0: at least 1"),
        ({"order_weight": -1.0}, 1, "order_weight is -1.0: it must be 0 or more"),
        ({"objective": "mrp"}, 0, "needs a model with a head: set num_nextn_predict_layers"),
    ],
)
def test_rejected_values(
    options: dict[str, Any], head_layers: int, message: str, word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        new_trainer(small_model(word_tokenizer, head_layers=head_layers), tmp_path, **options)
