"""The objectives against unpacked twins, and the states that a training step reveals."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import repeat
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_model
from helpers import ALPHA, BLOCK, MASK, chi_square_p, collate, sample
from mrp_trainer.data.samples import Sample
from mrp_trainer.train.losses import BLANK
from mrp_trainer.train.objectives import HeadObjective, block_diffusion
from mrp_trainer.train.packed import PackedBatch, uniform
from mrp_trainer.train.reveals import Reveals
from torch import Tensor

from modeling_mrp import MRPForCausalLM
from modeling_mrp.networks.picker import Picker


def blocks_of(
    batch: PackedBatch, samples: list[Sample], sizes: Iterable[int] = repeat(BLOCK)
) -> Iterable[tuple[int, list[int], list[int], int]]:
    """(row, columns of a noisy block, clean tokens before it, where it starts) for every noisy block of a batch."""
    for row, (item, size) in enumerate(zip(samples, sizes, strict=False)):
        for copy in range(1, int(batch.view.max()) + 1):
            columns = (batch.view[row] == copy).nonzero()[:, 0]
            for begin in range(0, len(columns), size):
                at = columns[begin : begin + size].tolist()
                start = int(batch.position_ids[row, at[0]])
                yield row, at, item.ids[:start].tolist(), start


def run_alone(model: MRPForCausalLM, ids: list[int], hidden: Tensor | None = None, size: int = BLOCK) -> Tensor:
    """[length, hidden] of one unpacked sequence: the backbone, or the head on given hidden states."""
    position = torch.arange(len(ids))[None]
    mask = (position[:, None] // size <= position[:, :, None] // size)[:, None]
    tensor = torch.tensor([ids])
    return (model.backbone(tensor, position, mask) if hidden is None else model.residual(tensor, hidden[None], position, mask))[
        0
    ]


SHARE = 0.6  # of blocks that reveal eagerly
SAMPLES = [replace(sample(2, 16, 6), length=14), sample(3, 12, 8)]


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("sizes", [(), (2, BLOCK)])
@pytest.mark.parametrize("inverse_level", [False, True])
def test_block_diffusion_loss_equals_the_loop_over_blocks(inverse_level: bool, sizes: tuple[int, ...]) -> None:
    """Where each sample draws a block size, its tokens see and are seen by blocks of that size alone."""
    model, samples = make_model(), [*SAMPLES, *(sample(index, 12, 4) for index in range(6))]
    batch = collate(samples, inverse_level=inverse_level, block_sizes=sizes)
    drawn: list[int] = []
    for block, position, view in zip(batch.block, batch.position_ids, batch.view, strict=True):
        drawn += [size for size in sizes or (BLOCK,) if bool((position // size == block)[view >= 0].all())]
    assert len(drawn) == 8
    assert {*drawn} == {*sizes, BLOCK}
    begins = batch.position_ids % torch.tensor(drawn)[:, None] == 0
    assert torch.equal(batch.begins[batch.view >= 0], begins[batch.view >= 0])
    beside = collate([[sample(0, BLOCK, 0), sample(1, BLOCK, 0)]], copies=1)  # type: ignore[list-item]
    assert beside.begins.nonzero()[:, 1].tolist() == [0, BLOCK, 2 * BLOCK, 3 * BLOCK]
    total = 0.0
    for row, at, clean, start in blocks_of(batch, samples, drawn):
        logits = model.lm_head(run_alone(model, clean + batch.input_ids[row, at].tolist(), size=drawn[row])[start:])
        for i, column in enumerate(at):
            if batch.weight[row, column] > 0:
                target = int(batch.target_ids[row, column])
                even = torch.full_like(logits[i], 1 / len(logits[i]))  # behind the end
                wanted = even if target == BLANK else F.one_hot(torch.tensor(target), len(logits[i])).float()
                total += batch.weight[row, column].item() * F.cross_entropy(logits[i], wanted).item()
    assert block_diffusion(model, batch)[0].item() == pytest.approx(total, rel=1e-6)  # the weights are float32
    with pytest.raises(ValueError, match="block_sizes holds 3"):
        collate(samples, block_sizes=(BLOCK, 3))


def confident_model(scale: float, **options: Any) -> MRPForCausalLM:
    """Sharper logits, so that eager reveals happen: at 6 a quarter of the masked positions is above 0.95."""
    model = make_model(**options)
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


def revealed_by_hand(model: MRPForCausalLM, batch: PackedBatch, row: int, at: list[int], masked: Tensor, hidden: Tensor) -> Any:
    """What `on_policy` shows of a block, tokens by place: the surest masked position with the model's own token; and in the
    blocks that a lot below the share chooses also all above a threshold of 0.2 to 0.95; never what is behind the end."""
    logits = model.lm_head(hidden).index_fill(1, torch.tensor([MASK]), -torch.inf)
    confidence, token = logits.softmax(-1).max(-1)
    places = [i for i, column in enumerate(at) if masked[row, column] and batch.target_ids[row, column] != BLANK]
    lot, threshold = (uniform(batch, purpose, batch.position_ids // BLOCK)[row, at[0]] for purpose in (1, 2))
    shown = [i for i in places if lot < SHARE and confidence[i] > 0.2 + 0.75 * threshold]
    return {i: int(token[i]) for i in [*shown, *sorted(places, key=lambda i: -confidence[i])[:1]]}


class Recorded(Reveals):
    """Remembers the states it drew."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        vars(self).update(states=[], left_out=[])

    def __call__(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        self.states.append(super().__call__(*arguments))
        return self.states[-1]

    def one_per_block(self, *arguments: Any) -> Tensor:
        self.left_out.append(super().one_per_block(*arguments))
        return self.left_out[-1]


@pytest.mark.parametrize("order_weight", [0.0, 0.7])
def test_mrp_loss_equals_the_loop_over_blocks(order_weight: float) -> None:
    """States, value and gradients of two unrolled steps, though the clean half is run once: acc_0 = h_A, x^(k) shows what
    acc_{k-1} is surest of, acc_k = acc_{k-1} + Head(embed(x^(k)), acc_{k-1}) block by block, each step against the backbone at
    x^(k)."""
    model = confident_model(6)
    samples = [*SAMPLES, sample(7, 24, 4), sample(8, 32, 0)]
    batch = collate(samples, inverse_level=True)
    reveals = Recorded("on_policy", SHARE)
    objective = HeadObjective(reveals, unroll=2, order_weight=order_weight, reread_weight=0.6)
    whole, _ = objective(model, batch)  # with a vocabulary matrix that trains
    model.requires_grad_(False)
    model.mrp_head.requires_grad_(True)
    loss, measured = objective(model, batch)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad(set_to_none=True)
    states, left_out = reveals.states[2:], reveals.left_out[1:]
    assert all(torch.equal(a, b) for x, y in zip(states, reveals.states[:2], strict=True) for a, b in zip(x, y, strict=True))
    assert (len(states), len(left_out)) == (2, 1)
    names = ("step 1", "step 2", "order 1", "order 2", "reread")
    names += ("kl_head", "kl_stale", "reread_kl_head", "reread_kl_stale", "ordered")
    sums = {name: torch.zeros((), dtype=torch.float64) for name in names}
    several = stale = 0
    for row, at, clean, start in blocks_of(batch, samples):
        h_a = acc = run_alone(model, clean + batch.input_ids[row, at].tolist()).detach()
        before = (batch.input_ids, batch.supervised)
        for step, (ids, masked) in enumerate(states):
            expected = revealed_by_hand(model, batch, row, at, before[1], acc[start:].detach())
            assert {i: int(ids[row, c]) for i, c in enumerate(at) if before[1][row, c] and not masked[row, c]} == expected
            assert all(ids[row, c] == before[0][row, c] for i, c in enumerate(at) if i not in expected)
            several += len(expected) > 1
            stale += expected != revealed_by_hand(model, batch, row, at, before[1], h_a[start:])
            before = (ids, masked)
            if step == 0:
                left = [i for i, column in enumerate(at) if left_out[0][row, column]]
                assert len(left) == min(1, len(expected))
                assert expected.keys() >= set(left)
            revealed = clean + ids[row, at].tolist()
            acc = torch.cat([h_a[:start], (acc + run_alone(model, revealed, acc))[start:]])
            h_b = run_alone(model, revealed).detach()
            shown = [i for i, c in enumerate(at) if masked[row, c] and batch.target_ids[row, c] != BLANK]
            if shown:
                places = torch.tensor(shown) + start
                sums[f"order {step + 1}"] = sums[f"order {step + 1}"] + naive_order(model, acc[places], h_b[places])
                sums["ordered"] += step == 0
            for i, column in enumerate(at):
                weight = batch.weight[row, column]
                if masked[row, column]:
                    kl = naive_kl(model, acc[start + i], h_b[start + i])
                    sums[f"step {step + 1}"] = sums[f"step {step + 1}"] + weight * kl
                    sums["kl_head"] += (step == 0) * kl.detach()
                    sums["kl_stale"] += (step == 0) * naive_kl(model, h_a[start + i], h_b[start + i])
                if step == 0 and left_out[0][row, column]:
                    again = list(revealed)
                    again[start + i] = MASK
                    teacher = run_alone(model, again)[start + i].detach()
                    kl = naive_kl(model, acc[start + i], teacher)
                    sums["reread"] = sums["reread"] + weight * kl
                    sums["reread_kl_head"] += kl.detach()
                    sums["reread_kl_stale"] += naive_kl(model, h_a[start + i], teacher)
    assert min(value.item() for value in sums.values()) > 1e-4, sums
    assert min(several, stale) > 0
    order = order_weight * (sums["order 1"] + sums["order 2"])
    twin = (sums["step 1"] + 0.6 * sums["reread"] + sums["step 2"] + order) / 2
    assert loss.item() == pytest.approx(twin.item(), rel=1e-4)
    twin.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert name.startswith("mrp_head.")
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)
    totals = {name: total.item() for name, (total, _) in measured.items()}
    expected = {name: sums[name].item() for name in ("kl_head", "kl_stale", "reread_kl_head", "reread_kl_stale")}
    expected |= {"kl_order": sums["order 1"].item()} if order_weight else {}
    assert {name: totals[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    counts = {name: int(count) for name, (_, count) in measured.items()}
    assert counts["kl_stale"] == counts["agreement"] == int(states[0][1].sum())
    assert counts["reread_kl_head"] == int(left_out[0].sum())
    assert not order_weight or counts["kl_order"] == sums["ordered"]


def test_random_reveals() -> None:
    """True tokens, one of each block, at uniform places: chi-square over blocks of four masked positions."""
    samples = [sample(i, 44, 0) for i in range(120)]
    batch = collate(samples, copies=1)
    batch.input_ids[batch.view == 1] = MASK  # all four of every block are hidden
    batch.weight[batch.view == 1] = 1
    reveals, unused = Reveals("random", 0.5), torch.zeros(*batch.input_ids.shape, 1)
    sampler = Picker(torch.zeros(64, 1), MASK)
    own = uniform(batch, 1, batch.position_ids)
    assert own[batch.view == 1].unique().numel() == 120 * 44
    assert not torch.equal(uniform(replace(batch, view=batch.view * 2), 1, batch.position_ids), own)  # nor do copies share them
    draws = [reveals(batch, batch.input_ids, batch.supervised, unused, sampler, step) for step in (0, 1)]
    assert not torch.equal(draws[0][1], draws[1][1])  # each step draws anew
    for ids, masked in draws:
        revealed = batch.supervised & ~masked
        assert torch.equal(ids, torch.where(revealed, batch.target_ids, batch.input_ids))
        per_block = revealed[batch.view == 1].view(-1, BLOCK)
        places, counts = per_block.sum(0), per_block.sum(1).bincount(minlength=5)[1:]
        assert counts.tolist() == [len(per_block), 0, 0, 0]
        assert chi_square_p(places, torch.full((4,), 0.25)) > ALPHA


@pytest.mark.parametrize("objective", ["block_diffusion", "mrp"])
def test_packing_is_invisible(objective: str) -> None:
    """Losses and gradients of samples that share rows, and of the same samples alone, whatever torch's own generator does; with
    another seed they are others."""
    samples = [sample(0, 12, 6), replace(sample(1, 24, 9), length=22), sample(2, 8, 0), sample(3, 16, 5), sample(4, 4, 1)]
    packings: list[Any] = [[[item] for item in samples], [samples[:2], samples[2:]], [samples[::-1]]]
    results = []
    for number, rows in enumerate(packings):
        model = confident_model(6)
        torch.manual_seed(number)
        head = HeadObjective(Reveals("on_policy", 0.5), unroll=2, order_weight=0.5)
        if objective == "mrp":
            model.requires_grad_(False)
            model.mrp_head.requires_grad_(True)
        computed = head if objective == "mrp" else block_diffusion
        total, _ = computed(model, collate(rows))
        total.backward()
        assert total.item() != pytest.approx(computed(model, collate(rows, seed=1))[0].item(), rel=1e-3)
        results.append((total.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    for total, gradients in results[1:]:
        assert total == pytest.approx(results[0][0], rel=1e-6)
        for name, gradient in results[0][1].items():
            assert gradient.norm() > 0
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5 * gradient.norm().item())
