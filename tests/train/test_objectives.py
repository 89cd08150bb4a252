"""The objectives against unpacked twins, the states that a training step reveals, and the attention
of packed passes."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mrp_trainer.data.samples import Sample
from mrp_trainer.train import attention
from mrp_trainer.train.losses import BLANK, cross_entropy, over_vocabulary
from mrp_trainer.train.objectives import HeadObjective, SequentialObjective, block_diffusion
from mrp_trainer.train.packed import PackedBatch, sparse_mask, uniform
from mrp_trainer.train.reveals import Reveals
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask, flex_attention

from modeling_mrp import MRPForCausalLM
from tests.support.helpers import BLOCK, MASK, VOCAB, close, collate, sample
from tests.support.random_cases import make_model


def blocks_of(
    batch: PackedBatch, rows: list[list[Sample]], sizes: dict[tuple[int, int], int] | None = None
) -> Iterator[tuple[int, list[int], list[int], int]]:
    """(row, columns of a noisy block, clean tokens before it, where it starts) for every noisy
    block of a batch. Samples, by row and place, may have block sizes of their own."""
    for row, samples in enumerate(rows):
        for place, item in enumerate(samples):
            size = sizes[row, place] if sizes else BLOCK
            for copy in range(1, int(batch.view.max()) + 1):
                columns = ((batch.view[row] == copy) & (batch.sample[row] == place)).nonzero()[:, 0]
                for begin in range(0, len(columns), size):
                    at = columns[begin : begin + size].tolist()
                    start = int(batch.position_ids[row, at[0]])
                    yield row, at, item.ids[:start].tolist(), start


def run_alone(
    model: MRPForCausalLM, ids: list[int], hidden: Tensor | None = None, size: int = BLOCK
) -> Tensor:
    """[length, hidden] of one unpacked sequence: the backbone, or the head on given hidden
    states."""
    position = torch.arange(len(ids))[None]
    mask = (position[:, None] // size <= position[:, :, None] // size)[:, None]
    tensor = torch.tensor([ids])
    return (
        model.backbone(tensor, position, mask)
        if hidden is None
        else model.residual(tensor, hidden[None], position, mask)
    )[0]


SHARE = 0.6  # of blocks that reveal eagerly
# Samples that share rows; the last two have one block each, side by side.
ROWS: Any = [
    [replace(sample(2, 16, 6), length=14), sample(3, 12, 8)],
    [sample(7, 24, 4)],
    [sample(0, BLOCK, 0), sample(1, BLOCK, 0), sample(8, 32, 0)],
]


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("sizes", [(), (2, BLOCK)])
@pytest.mark.parametrize("inverse_level", [False, True])
def test_block_diffusion_loss_equals_the_loop_over_blocks(
    inverse_level: bool, sizes: tuple[int, ...]
) -> None:
    """Where each sample draws a block size, its tokens see and are seen by blocks of that size
    alone."""
    model, rows = make_model(), [*ROWS, *([sample(index, 12, 4)] for index in range(6))]
    batch = collate(rows, inverse_level=inverse_level, block_sizes=sizes)
    drawn: dict[tuple[int, int], int] = {}
    for row, samples in enumerate(rows):
        for place in range(len(samples)):
            own = (batch.sample[row] == place) & (batch.view[row] >= 0)
            found = [
                size
                for size in sizes or (BLOCK,)
                if (batch.position_ids[row] // size == batch.block[row])[own].all()
            ]
            drawn[row, place] = found[0]
    assert {*drawn.values()} == {*sizes, BLOCK}
    total = 0.0
    for row, at, clean, start in blocks_of(batch, rows, drawn):
        ids = clean + batch.input_ids[row, at].tolist()
        logits = model.lm_head(run_alone(model, ids, size=len(at))[start:])
        for i, column in enumerate(at):
            if batch.weight[row, column] > 0:
                target = int(batch.target_ids[row, column])
                even = torch.full_like(logits[i], 1 / len(logits[i]))  # behind the end
                wanted = (
                    even
                    if target == BLANK
                    else F.one_hot(torch.tensor(target), len(logits[i])).float()
                )
                total += (
                    batch.weight[row, column].item() * F.cross_entropy(logits[i], wanted).item()
                )
    # the weights are float32
    assert block_diffusion(model, batch)[0].item() == pytest.approx(total, rel=1e-6)
    with pytest.raises(ValueError, match="block_sizes holds 3"):
        collate(rows, block_sizes=(BLOCK, 3))


def confident_model(scale: float, **options: Any) -> MRPForCausalLM:
    """Sharper logits, so that eager reveals happen: at 6 a quarter of the masked positions is above
    0.95."""
    model = make_model(**options)
    with torch.no_grad():
        model.lm_head.weight *= scale
    return model


def naive_kl(model: MRPForCausalLM, student: Tensor, teacher: Tensor) -> Tensor:
    """KL( softmax(B) || softmax(A + C) ) of one position, from hidden states [hidden]."""
    b, a = model.lm_head(teacher).log_softmax(-1), model.lm_head(student).log_softmax(-1)
    return (b.exp() * (b - a)).sum()


def naive_order(model: MRPForCausalLM, student: Tensor, teacher: Tensor) -> Tensor:
    """The divergence of which of a block's positions comes first, from hidden states [positions,
    hidden]."""
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


def revealed_by_hand(
    model: MRPForCausalLM,
    batch: PackedBatch,
    row: int,
    at: list[int],
    masked: Tensor,
    hidden: Tensor,
    random: int | None,
) -> Any:
    """What is shown of a block, tokens by place. `on_policy`: the surest masked position with the
    model's own token; and in the blocks that a lot below the share chooses also all above a
    threshold of 0.2 to 0.95; never what is behind the end. In step `random` of the random rule: the
    position of the greatest number, with its true token."""
    logits = model.lm_head(hidden).index_fill(1, torch.tensor([MASK]), -torch.inf)
    confidence, token = logits.softmax(-1).max(-1)
    places = [
        i
        for i, column in enumerate(at)
        if masked[row, column] and batch.target_ids[row, column] != BLANK
    ]
    if random is not None:
        number = uniform(batch, 16 + random, batch.position_ids)[row, at]
        return {
            i: int(batch.target_ids[row, at[i]])
            for i in sorted(places, key=lambda i: -number[i])[:1]
        }
    lot, threshold = (
        uniform(batch, purpose, batch.position_ids // BLOCK)[row, at[0]] for purpose in (1, 2)
    )
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


@pytest.mark.parametrize(
    ("rule", "copies", "order_weight"), [("random", 1, 0.0), ("on_policy", 2, 0.7)]
)
def test_mrp_loss_equals_the_loop_over_blocks(
    rule: Any, copies: int, order_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever torch's own generator does. States, value and gradients of two unrolled steps,
    though the clean half is run once: acc_0 = h_A, x^(k) shows what acc_{k-1} is surest of, acc_k =
    acc_{k-1} + Head(embed(x^(k)), acc_{k-1}) block by block, each step against the backbone at
    x^(k)."""
    # logits of five tokens
    monkeypatch.setitem(over_vocabulary.__kwdefaults__, "at_once", 5 * VOCAB)
    model = confident_model(6)
    batch = collate(ROWS, inverse_level=True, copies=copies)
    noisy = batch.view > 0
    # no two tokens share a number
    assert uniform(batch, 1, batch.position_ids)[noisy].unique().numel() == noisy.sum()
    reveals = Recorded(rule, SHARE)
    objective = HeadObjective(reveals, unroll=2, order_weight=order_weight, reread_weight=0.6)
    whole, _ = objective(model, batch)  # with a vocabulary matrix that trains
    model.requires_grad_(False)
    model.mrp_head.requires_grad_(True)
    torch.manual_seed(1)
    loss, measured = objective(model, batch)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad(set_to_none=True)
    states, left_out = reveals.states[2:], reveals.left_out[1:]
    assert all(
        torch.equal(a, b)
        for x, y in zip(states, reveals.states[:2], strict=True)
        for a, b in zip(x, y, strict=True)
    )
    assert (len(states), len(left_out)) == (2, 1)
    names = ("step 1", "step 2", "order 1", "order 2", "reread")
    names += ("kl_head", "kl_stale", "reread_kl_head", "reread_kl_stale", "ordered")
    sums = {name: torch.zeros((), dtype=torch.float64) for name in names}
    several = stale = 0
    for row, at, clean, start in blocks_of(batch, ROWS):
        h_a = acc = run_alone(model, clean + batch.input_ids[row, at].tolist()).detach()
        before = (batch.input_ids, batch.supervised)
        for step, (ids, masked) in enumerate(states):
            by_hand, random = (model, batch, row, at, before[1]), step if rule == "random" else None
            expected = revealed_by_hand(*by_hand, acc[start:].detach(), random)
            assert {
                i: int(ids[row, c])
                for i, c in enumerate(at)
                if before[1][row, c] and not masked[row, c]
            } == expected
            assert all(
                ids[row, c] == before[0][row, c] for i, c in enumerate(at) if i not in expected
            )
            several += len(expected) > 1
            stale += expected != revealed_by_hand(*by_hand, h_a[start:], random)
            before = (ids, masked)
            if step == 0:
                left = [i for i, column in enumerate(at) if left_out[0][row, column]]
                assert len(left) == min(1, len(expected))
                assert expected.keys() >= set(left)
            revealed = clean + ids[row, at].tolist()
            acc = torch.cat([h_a[:start], (acc + run_alone(model, revealed, acc))[start:]])
            h_b = run_alone(model, revealed).detach()
            shown = [
                i for i, c in enumerate(at) if masked[row, c] and batch.target_ids[row, c] != BLANK
            ]
            if shown:
                places = torch.tensor(shown) + start
                sums[f"order {step + 1}"] = sums[f"order {step + 1}"] + naive_order(
                    model, acc[places], h_b[places]
                )
                sums["ordered"] += step == 0
            for i, column in enumerate(at):
                weight = batch.weight[row, column]
                if masked[row, column]:
                    kl = naive_kl(model, acc[start + i], h_b[start + i])
                    sums[f"step {step + 1}"] = sums[f"step {step + 1}"] + weight * kl
                    sums["kl_head"] += (step == 0) * kl.detach()
                    sums["kl_stale"] += (step == 0) * naive_kl(
                        model, h_a[start + i], h_b[start + i]
                    )
                if step == 0 and left_out[0][row, column]:
                    again = list(revealed)
                    again[start + i] = MASK
                    teacher = run_alone(model, again)[start + i].detach()
                    kl = naive_kl(model, acc[start + i], teacher)
                    sums["reread"] = sums["reread"] + weight * kl
                    sums["reread_kl_head"] += kl.detach()
                    sums["reread_kl_stale"] += naive_kl(model, h_a[start + i], teacher)
    # without the one token of its reveal, a block is as it was
    zero = {"reread_kl_stale"} if rule == "random" else set()
    assert {name for name, value in sums.items() if value.item() < 1e-4} == zero, sums
    assert (min(several, stale) > 0) == (rule == "on_policy")
    order = order_weight * (sums["order 1"] + sums["order 2"])
    twin = (sums["step 1"] + 0.6 * sums["reread"] + sums["step 2"] + order) / 2
    assert loss.item() == pytest.approx(twin.item(), rel=1e-4)
    twin.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert name.startswith("mrp_head.")
            torch.testing.assert_close(
                gradients[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name
            )
    totals = {name: total.item() for name, (total, _) in measured.items()}
    expected = {
        name: sums[name].item()
        for name in ("kl_head", "kl_stale", "reread_kl_head", "reread_kl_stale")
    }
    expected |= {"kl_order": sums["order 1"].item()} if order_weight else {}
    assert {name: totals[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    counts = {name: int(count) for name, (_, count) in measured.items()}
    assert counts["kl_stale"] == counts["agreement"] == int(states[0][1].sum())
    assert counts["reread_kl_head"] == int(left_out[0].sum())
    assert not order_weight or counts["kl_order"] == sums["ordered"]


# ------------------------------------------------------------------------------------------------
# attention of packed passes


@torch.no_grad()
def state_of(item: Sample, start: int, size: int, shown: int) -> list[int]:
    """The tokens of a sample up to the end of the block at `start`, of which the first `shown` are
    shown, and others if they are the prompt's."""
    ids = item.ids[: start + size].tolist()
    for i in range(start, start + size):
        past_end = i >= (item.length or len(item.ids))
        if past_end or (item.response[i] and i >= start + shown):
            ids[i] = MASK
    return ids


def predicting(model: MRPForCausalLM, hidden: Tensor) -> Tensor:
    """The hidden states [length, hidden] that predict each position."""
    if model.model.shifted:
        hidden = torch.cat([hidden.new_zeros(1, hidden.shape[1]), hidden[:-1]])
    return hidden.detach()


@pytest.mark.parametrize("family", ["sdar", "fast_dllm_v2"])
@pytest.mark.parametrize("sizes", [(), (2, BLOCK)])
def test_the_sequential_loss_equals_the_loop_over_states(sizes: Any, family: str) -> None:
    """From each state of each block, which shows the first tokens of the text, the head follows the
    text for up to three reveals; after each, the next position alone is compared with the backbone
    at the state reached. Value, gradients and counts; prompts that end in a block, texts that do,
    samples of two block sizes."""
    model = confident_model(6, family=family)
    model.requires_grad_(False)
    model.mrp_head.requires_grad_(True)
    batch = collate(ROWS, every_state=True, block_sizes=sizes)
    loss, measured = SequentialObjective(unroll=3)(model, batch)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad(set_to_none=True)
    used = {
        (row, place): int(batch.view[row][batch.sample[row] == place].max())
        for row, samples in enumerate(ROWS)
        for place in range(len(samples))
    }
    assert set(used.values()) == set(sizes or [BLOCK])
    total = torch.zeros((), dtype=torch.float64)
    first_losses = compared = 0
    stale = torch.zeros((), dtype=torch.float64)
    for row, samples in enumerate(ROWS):
        for place, item in enumerate(samples):
            size = used[row, place]
            end = item.length or len(item.ids)
            for start in item.response_blocks(size) * size:
                learned = [bool(item.response[i]) and i < end for i in range(start, start + size)]

                states = [state_of(item, start, size, j) for j in range(size)]
                h = [predicting(model, run_alone(model, ids, size=size)) for ids in states]
                for j in range(size):
                    acc = h[j]
                    for k in range(1, min(3, size - 1 - j) + 1):
                        added = run_alone(model, states[j + k], acc, size)
                        acc = torch.cat([acc[:start], (acc + added)[start:]])
                        if learned[j + k]:
                            column = start + j + k
                            kl = naive_kl(model, acc[column], h[j + k][column])
                            total = total + kl
                            compared += 1
                            if k == 1:
                                first_losses += 1
                                stale += naive_kl(model, h[j][column], h[j + k][column])
    assert compared > 20
    assert loss.item() == pytest.approx(total.item() / 3, rel=1e-6)
    (total / 3).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(
                gradients[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name
            )
    assert measured["kl_stale"][0].item() == pytest.approx(stale.item(), rel=1e-6)
    assert int(measured["agreement"][1]) == first_losses


def test_flex_attention_sees_what_the_dense_mask_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all columns as queries and for the noisy ones alone: the mask itself, and attention of 4
    heads under it. What norms have made float32 beside bfloat16 values is as they are, as CUDA has
    no backward pass of flex attention for several types.
    """
    batch = collate([[sample(0, 8, 0), sample(1, 12, 5)]])
    rule, length = batch.rule(), batch.input_ids.shape[1]
    random = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(1, 4, length, 16, generator=random) for _ in range(3))
    for queries in (length, 8):
        dense = batch.rule().dense()[:, :, :queries]
        assert torch.equal(create_mask(rule, 1, 1, queries, length, device="cpu"), dense)
        expected = F.scaled_dot_product_attention(
            query[:, :, :queries], key, value, attn_mask=dense
        )
        close(
            flex_attention(
                query[:, :, :queries], key, value, block_mask=sparse_mask(rule, queries)
            ),
            expected,
            1e-6,
        )
    taken: list[torch.Tensor] = []

    def compiled(*states: torch.Tensor, **_: Any) -> torch.Tensor:
        taken.extend(states)
        return states[0]

    monkeypatch.setattr(attention, "compiled_flex_attention", lambda: compiled)
    views = [states.transpose(1, 2).contiguous().transpose(1, 2) for states in (query, key)]
    attention.flex_attention_of_one_type(
        torch.nn.Module(), *views, value.bfloat16(), sparse_mask(rule, length), 0.25
    )
    assert [states.dtype for states in taken] == [torch.bfloat16] * 3
    assert all(states.is_contiguous() for states in taken)


ON_CUDA = (
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="flex attention has no gradients on CPUs"
    ),
)


def test_every_token_is_a_target_and_minus_one_is_none() -> None:
    """The id -1 stands for what comes after a text: the uniform distribution."""
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = cross_entropy(logits, torch.tensor([0, 1, 2, 3, -1]))
    assert torch.allclose(
        losses[:4], F.cross_entropy(logits[:4], torch.arange(4), reduction="none")
    )
    assert torch.allclose(losses[4], -logits[4].log_softmax(0).mean())


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("chosen", [attention.TILES, pytest.param("flex_attention", marks=ON_CUDA)])
@pytest.mark.parametrize(
    "objective",
    [block_diffusion, HeadObjective(Reveals("on_policy", 0.5), unroll=2, order_weight=0.5)],
)
def test_other_attention_and_chunks_give_the_same_gradients(
    chosen: str, objective: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every parameter, the vocabulary's too; in tiles of eight queries, of rows of several
    samples with padding between, and with few logits at once. On CUDA in float32."""
    monkeypatch.setattr(attention, "_QUERIES", 8)
    flex = chosen == "flex_attention"
    batch, results = collate(ROWS), []
    if flex:
        batch = PackedBatch(**{name: value.cuda() for name, value in vars(batch).items()})
    for one in ("sdpa", chosen):
        model = make_model().float().cuda() if flex else make_model()
        with attention.attention_implementation(model, one):
            loss, _ = objective(model, batch)
        loss.backward()
        results.append(
            (
                loss.item(),
                {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
            )
        )
        monkeypatch.setitem(over_vocabulary.__kwdefaults__, "at_once", 5 * VOCAB)
    (loss, gradients), (other, of_other) = results
    assert other == pytest.approx(loss, rel=1e-4 if flex else 1e-10)
    assert gradients.keys() == of_other.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            of_other[name], gradient, rtol=1e-3 if flex else 0, atol=1e-4 if flex else 1e-10
        )
