"""Noise, picks and their confidence against pure Python, and the distribution of samples.

A statistical test has fixed seeds, so it always gives the same answer; its false-alarm rate says how often another choice of
seeds would have failed.
"""

import math
from decimal import Decimal, localcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import ALPHA, chi_square_p
from torch import Tensor
from transformers.generation import (
    EtaLogitsWarper,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import modeling_mrp.kernels.pick as pick_file
from modeling_mrp.kernels.pick import gumbel_noise, noise_bits
from modeling_mrp.networks.picker import Picker, Spots
from modeling_mrp.rules.draft import gumbel, mix_bits, noise_key
from modeling_mrp.rules.state import State


def exact_gumbel(bits: int) -> float:
    """-log(-log((bits + 1/2) / 2^32)) to 40 digits."""
    with localcontext() as context:
        context.prec = 40
        return float(-(-((Decimal(bits) + Decimal("0.5")) / 2**32).ln()).ln())


def test_the_noise_is_pinned() -> None:
    """A change of the hash changes every seeded sample. Of ints as of tensors, on the host as on the device."""
    assert mix_bits(torch.tensor([0, 1])).tolist() == [0, 0x688990C0]
    cases = [(0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2), (1 << 32, 0, 1), ((1 << 62) - 1, 32767, 64), (12345678901234, 77, 5)]
    keys = [0xA4F7896C, 0xBD81986E, 0xE417F9D8, 0x079F4ECE, 0x9945F562, 0x3CBB0A0F, 0x583A0577]
    assert noise_key(*torch.tensor(cases).unbind(1)).tolist() == [noise_key(*case) for case in cases] == keys
    tokens = torch.tensor([0, 1, 151_936])
    bits = noise_bits(torch.tensor(keys), tokens).tolist()
    assert bits[-1] == [0x2467F668, 0x265EE787, 0x45C16ED0]
    expected = torch.tensor([[exact_gumbel(one) for one in row] for row in bits], dtype=torch.float64)
    torch.testing.assert_close(gumbel_noise(torch.tensor(keys), tokens, torch.float64), expected)
    torch.testing.assert_close(torch.from_numpy(gumbel(keys, tokens.expand(7, -1).numpy())), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gumbel_noise_at_the_extreme_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the hash switched off, the bits of token 0 are the key."""
    monkeypatch.setattr(pick_file, "mix_bits", lambda x: x)
    half, most = 1 << 31, (1 << 32) - 1
    bits = [0, 1, 2, 1000, half - 1000, half - 1, half, half + 1000, most - 1000, most - 2, most - 1, most]
    noise = gumbel_noise(torch.tensor(bits), 1, dtype)[:, 0]
    assert noise.isfinite().all()
    assert noise.tolist() == pytest.approx([exact_gumbel(b) for b in bits], abs=1e-5 if dtype == torch.float32 else 1e-12)
    assert noise[-1].item() == pytest.approx(33 * math.log(2), abs=1e-5)  # u = 1 - 2^-33
    distinct = noise[[0, 1, 2, 3, 4, 7, 8, 9, 10, 11]]
    assert (distinct.diff() > 0).all()


def spots(n: int, early: int = 0) -> Spots:
    """So many positions of different seeds, each the one mask of its state; of the first `early` no text may end."""
    made = []
    for i in range(n):
        row: Any = SimpleNamespace(seed=i, no_eos_before=10 * (i < early), prompt=0, text=[1, 2], given_end=0, mask_id=17)
        made.append((row, State((5, (17,)), (0,), 1, 1 + i % 4, 0)))
    return Spots(made, torch.device("cpu"))


def listed(likeliest: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids and log-odds of the likeliest tokens; none."""
    ids, odds = (torch.zeros(0, 2) if likeliest is None else likeliest).chunk(2, 1)
    return ids.long(), odds


def noise_of(n: int, vocab: int) -> Tensor:
    at = torch.arange(n)
    return gumbel_noise(noise_key(at, torch.full((n,), 5), 1 + at % 4), vocab, torch.float64)


def random_picker(n: int = 10, **options: Any) -> tuple[Picker, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(31, 6, dtype=torch.float64, generator=generator)
    return Picker(weight, 17, **options), torch.randn(n, 6, dtype=torch.float64, generator=generator)


def identity_picker(vocab: int, dtype: torch.dtype = torch.float64, **options: Any) -> Picker:
    """Its logits are the hidden states; the mask id is the last one."""
    return Picker(torch.eye(vocab, dtype=dtype), vocab - 1, **options)


@pytest.mark.parametrize("at_once", [1 << 24, 3 * 31 + 30, 1])
@pytest.mark.parametrize(("sample", "temperature"), [(False, 3.0), (True, 0.7)])
def test_picks_by_the_formulas(sample: bool, temperature: float, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask id is neither picked nor counted. Noise is added to logits over temperature; confidence is without it. All at
    once, three positions, or less than one."""
    monkeypatch.setattr(pick_file, "_LOGITS_AT_ONCE", at_once)
    picker, hidden = random_picker(sample=sample, temperature=temperature, entropy=True, likeliest=True)
    scores = hidden @ picker.lm_head_weight.T / temperature
    scores[:, 17] = -torch.inf
    token = (scores + noise_of(10, 31) * sample).argmax(-1)
    picks, p = picker(hidden, spots(10)), scores.softmax(-1)
    assert torch.equal(picks.token, token)
    assert torch.equal(token, scores.argmax(-1)) != sample
    torch.testing.assert_close(picks.odds, p.gather(1, token[:, None])[:, 0].logit())
    torch.testing.assert_close(picks.entropy, torch.special.entr(p).sum(-1))
    torch.testing.assert_close(picker.token_odds(hidden, token, spots(10)), picks.odds)
    assert picks.likeliest is not None
    ids, odds = listed(picks.likeliest)
    assert torch.equal(ids[:, :30], scores.argsort(-1, descending=True)[:, :30])
    torch.testing.assert_close(odds[:, :30], p.gather(1, ids).logit()[:, :30])
    assert (odds[:, 30] == -torch.inf).all(), "the mask id"


@pytest.mark.parametrize(
    ("dtype", "tops"), [(torch.float64, (59.0, 60.0, 61.0, 300.0)), (torch.float32, (39.0, 40.0, 41.0, 88.0))]
)
def test_confidence_where_the_probability_rounds_to_1(dtype: torch.dtype, tops: tuple[float, ...]) -> None:
    """One logit far above six zeros: the log-odds are exactly that logit less log 6."""
    logits = torch.zeros(len(tops), 8, dtype=dtype)
    logits[:, 2] = torch.tensor(tops, dtype=dtype)
    assert logits[:, :7].softmax(-1)[:, 2].eq(1).all()
    for sample in (False, True):
        picks = identity_picker(8, dtype, sample=sample, likeliest=True)(logits, spots(len(tops)))
        assert picks.odds.dtype == dtype
        assert picks.likeliest is not None
        for odds in (picks.odds, listed(picks.likeliest)[1][:, 0]):
            assert odds.tolist() == pytest.approx([top - math.log(6) for top in tops], rel=1e-6)


class SparesTheLast(TopPLogitsWarper):
    """A user's own: the last id may always be sampled."""

    def __call__(self, input_ids: Any, scores: Tensor) -> Any:
        last = scores[:, -1:]
        return torch.cat([super().__call__(input_ids, scores)[:, :-1], last], 1)


WARPERS: dict[str, list[LogitsProcessor]] = {
    "k": [TopKLogitsWarper(5)],
    "k of all": [TopKLogitsWarper(50)],
    "k, p": [TopKLogitsWarper(7), TopPLogitsWarper(0.7)],
    "k, k": [TopKLogitsWarper(7), TopKLogitsWarper(3)],
    "all": [TopKLogitsWarper(20), TopPLogitsWarper(0.97), MinPLogitsWarper(0.01), EtaLogitsWarper(0.05)],
    "p, k": [TopPLogitsWarper(0.7), TopKLogitsWarper(7)],
    "k, typical": [TopKLogitsWarper(7), TypicalLogitsWarper(0.7)],
    "k, a subclass": [TopKLogitsWarper(20), SparesTheLast(0.3)],
    "k to another value": [TopKLogitsWarper(7, filter_value=-5.0)],
}


@pytest.mark.parametrize("warpers", WARPERS)
def test_truncations_are_transformers_own(warpers: str) -> None:
    """In their order on all logits, over the temperature; of the likeliest tokens those that they leave."""
    picker, hidden = random_picker(
        300,
        temperature=0.7,
        sample=True,
        eos_token_ids=(3, 30),
        truncation=LogitsProcessorList(WARPERS[warpers]),
        likeliest=True,
    )
    scores = hidden @ picker.lm_head_weight.T
    scores[:, 17] = -torch.inf
    scores[:150, [3, 30]] = -torch.inf
    scores = scores / 0.7
    shown = scores.clone()
    for warper in WARPERS[warpers]:
        shown = warper(torch.zeros(300, 1, dtype=torch.long), shown)
    shown = torch.where(shown == -torch.inf, shown, scores)  # what they leave may be sampled, at its own score
    token = (shown + noise_of(300, 31)).argmax(-1)
    picks = picker(hidden, spots(300, early=150))
    assert torch.equal(picks.token, token)
    torch.testing.assert_close(picks.odds, scores.softmax(-1).gather(1, token[:, None])[:, 0].logit())
    assert picks.likeliest is not None
    ids, odds = listed(picks.likeliest)
    for row in range(300):
        left = set((shown[row] > -torch.inf).nonzero()[:, 0].tolist())
        assert set(ids[row][odds[row] > -torch.inf].tolist()) == left


@pytest.mark.parametrize("at_once", [1 << 30, 20])
@pytest.mark.parametrize("sample", [False, True])
def test_picks_among_a_few(sample: bool, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the five likeliest tokens at an earlier state, of which a truncation leaves three, those of the state itself; all
    others keep their share. No end before the minimum length."""
    monkeypatch.setattr(pick_file, "_LOGITS_AT_ONCE", at_once)
    options = {"temperature": 0.7, "sample": sample, "shortlist": 5, "eos_token_ids": (3, 30), "likeliest": sample}
    picker, hidden = random_picker(300, truncation=LogitsProcessorList([TopKLogitsWarper(3)]), **options)
    before, now = picker(hidden, spots(300)), hidden.flip(0)
    shortlist = before.shortlist
    assert shortlist is not None
    assert before.likeliest is None or before.likeliest.shape[1] == 62, "sampled drafts choose among more"
    stale, fresh = (states @ picker.lm_head_weight.T / 0.7 for states in (hidden, now))
    stale[:, 17] = -torch.inf
    kept = stale.topk(3).indices
    own = fresh.gather(1, kept)
    own[:150].masked_fill_(torch.isin(kept[:150], torch.tensor([3, 30])), -torch.inf)
    scores = stale.scatter(1, kept, own)
    place = own.argmax(-1, keepdim=True)
    picks = picker.among(now, shortlist, spots(300, early=150))
    assert torch.equal(picks.token, kept.gather(1, place)[:, 0])
    told = scores.softmax(-1).gather(1, kept)
    torch.testing.assert_close(picks.odds, told.gather(1, place)[:, 0].logit())
    assert (picks.likeliest is not None) is sample
    for ids, odds, tokens, p in zip(*listed(picks.likeliest), kept.tolist(), told.logit(), strict=False):
        found = {token: one for token, one in zip(ids.tolist(), odds.tolist(), strict=True) if one > -torch.inf}
        assert found == pytest.approx({token: one for token, one in zip(tokens, p.tolist(), strict=True) if one > -torch.inf})


def test_samples_follow_the_softmax() -> None:
    """Of 20,000 positions with one distribution, and of pairs of them: chi-square with a false-alarm rate of 1e-4 each."""
    picker, hidden = random_picker(1, sample=True, temperature=2.0)
    token, p = picker(hidden.expand(20_000, -1), spots(20_000)).token, hidden[0] @ picker.lm_head_weight.T / 2
    p = p.index_fill(0, torch.tensor(17), -torch.inf).softmax(-1)
    assert chi_square_p(token.bincount(minlength=31), p) > ALPHA
    assert chi_square_p((31 * token[::2] + token[1::2]).bincount(minlength=31 * 31), p.outer(p).flatten()) > ALPHA
    assert chi_square_p(token.bincount(minlength=31), p.square() / p.square().sum()) < 1e-12, "the test can tell"
