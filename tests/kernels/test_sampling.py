"""Noise, picks and their confidence against pure Python."""

import math
from decimal import Decimal, localcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
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
from modeling_mrp.kernels.pick import gumbel_noise, odds_of
from modeling_mrp.networks.picker import Picker, Spots
from modeling_mrp.rules.draft import gumbel, mix_bits, noise_key
from modeling_mrp.rules.state import State


def exact_gumbel(bits: int) -> float:
    """-log(-log((bits + 1/2) / 2^32)) to 40 digits."""
    with localcontext() as context:
        context.prec = 40
        return float(-(-((Decimal(bits) + Decimal("0.5")) / 2**32).ln()).ln())


def test_the_noise_is_pinned() -> None:
    """A change of the hash changes every seeded sample. Of ints as of tensors, on the host as on
    the device."""
    assert mix_bits(torch.tensor([0, 1])).tolist() == [0, 0x688990C0]
    cases = [
        (0, 0, 1),
        (1, 0, 1),
        (0, 1, 1),
        (0, 0, 2),
        (1 << 32, 0, 1),
        ((1 << 62) - 1, 32767, 64),
        (12345678901234, 77, 5),
    ]
    keys = [0xA4F7896C, 0xBD81986E, 0xE417F9D8, 0x079F4ECE, 0x9945F562, 0x3CBB0A0F, 0x583A0577]
    assert (
        noise_key(*torch.tensor(cases).unbind(1)).tolist()
        == [noise_key(*case) for case in cases]
        == keys
    )
    tokens = torch.tensor([0, 1, 151_936])
    noise = gumbel_noise(torch.tensor(keys), 151_937, torch.float64)[:, tokens]
    expected = [exact_gumbel(bits) for bits in (0x2467F668, 0x265EE787, 0x45C16ED0)]
    assert noise[-1].tolist() == pytest.approx(expected, rel=1e-7)
    torch.testing.assert_close(torch.from_numpy(gumbel(keys, tokens.expand(7, -1).numpy())), noise)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_gumbel_noise_at_the_extreme_bits(
    dtype: torch.dtype, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the hash switched off, the bits of token 0 are the key."""
    monkeypatch.setattr(pick_file, "mix_bits", lambda x: x)
    half, most = 1 << 31, (1 << 32) - 1
    bits = [
        0,
        1,
        2,
        1000,
        half - 1000,
        half - 1,
        half,
        half + 1000,
        most - 1000,
        most - 2,
        most - 1,
        most,
    ]
    noise = gumbel_noise(torch.tensor(bits), 1, dtype)[:, 0]
    assert noise.tolist() == pytest.approx([exact_gumbel(b) for b in bits], abs=atol)
    assert (noise[[0, 1, 2, 3, 4, 7, 8, 9, 10, 11]].diff() > 0).all()


def spots(n: int, early: int = 0) -> Spots:
    """So many positions of different seeds, each the one mask of its state; of the first `early` no
    text may end."""
    made = []
    for i in range(n):
        row: Any = SimpleNamespace(
            constraint=None,
            seed=i,
            no_eos_before=10 * (i < early),
            prompt=0,
            text=[1, 2],
            given_end=0,
            mask_id=17,
        )
        made.append((row, State((5, (17,)), (0,), 1, 1 + i % 4, 0)))
    return Spots(made, torch.device("cpu"))


def listed(candidates: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ids and log-odds of candidates."""
    assert candidates is not None
    count = candidates.shape[1] // 2
    ids, scores = candidates.split([count, count + 1], 1)
    places = torch.arange(count).expand_as(ids)
    return ids.long(), odds_of(scores, places)


def noise_of(n: int, vocab: int) -> Tensor:
    at = torch.arange(n)
    return gumbel_noise(noise_key(at, torch.full((n,), 5), 1 + at % 4), vocab, torch.float64)


def random_picker(n: int = 10, **options: Any) -> tuple[Picker, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(31, 6, dtype=torch.float64, generator=generator)
    return Picker(weight, 17, **options), torch.randn(
        n, 6, dtype=torch.float64, generator=generator
    )


class SparesTheLast(TopPLogitsWarper):
    """A user's own: the last id may always be sampled."""

    def __call__(self, input_ids: Any, scores: Tensor) -> Any:
        last = scores[:, -1:]
        return torch.cat([super().__call__(input_ids, scores)[:, :-1], last], 1)


# By case: the temperature, and what truncates; None: the likeliest token is picked.
PICKS: dict[str, tuple[float, list[LogitsProcessor] | None]] = {
    "greedy": (3.0, None),
    "sampled": (0.7, []),
    "k": (0.7, [TopKLogitsWarper(5)]),
    "all": (
        0.7,
        [
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.97),
            MinPLogitsWarper(0.01),
            EtaLogitsWarper(0.05),
        ],
    ),
    "p, k": (0.7, [TopPLogitsWarper(0.7), TopKLogitsWarper(7)]),
    "k, typical": (0.7, [TopKLogitsWarper(7), TypicalLogitsWarper(0.7)]),
    "k, a subclass": (0.7, [TopKLogitsWarper(20), SparesTheLast(0.3)]),
    "k to another value": (0.7, [TopKLogitsWarper(7, filter_value=-5.0)]),
}


@pytest.mark.parametrize("at_once", [1 << 24, 3 * 31 + 30, 1])
@pytest.mark.parametrize("case", PICKS)
def test_picks_by_the_formulas(case: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask id is neither picked nor counted, nor an eos before the minimum length. Noise is
    added to logits over their temperature where transformers' own truncations leave them;
    confidence is without it. All at once, three positions, or less than one."""
    monkeypatch.setattr(pick_file, "_LOGITS_AT_ONCE", at_once)
    temperature, warpers = PICKS[case]
    truncation = LogitsProcessorList(warpers) if warpers else None
    options = {
        "temperature": temperature,
        "sample": warpers is not None,
        "truncation": truncation,
        "eos_token_ids": (3, 30),
    }
    picker, hidden = random_picker(100, entropy=True, candidates=64, **options)
    scores = hidden @ picker.lm_head_weight.T / temperature
    scores[:, 17] = -torch.inf
    scores[:50, [3, 30]] = -torch.inf
    shown = scores.clone()
    for warper in warpers or ():
        shown = warper(torch.zeros(100, 1, dtype=torch.long), shown)  # type: ignore[arg-type]
    # what they leave may be sampled, at its own score
    shown = torch.where(shown == -torch.inf, shown, scores)
    token = (shown + noise_of(100, 31) * (warpers is not None)).argmax(-1)
    picks, p = picker(hidden, spots(100, early=50)), scores.softmax(-1)
    assert torch.equal(picks.token, token)
    assert torch.equal(token, scores.argmax(-1)) is (warpers is None)
    torch.testing.assert_close(picks.log_odds, p.gather(1, token[:, None])[:, 0].logit())
    torch.testing.assert_close(picks.entropy, torch.special.entr(p).sum(-1))
    torch.testing.assert_close(
        picker.token_odds(hidden, token, spots(100, early=50)), picks.log_odds
    )
    for ids, odds, left, own in zip(*listed(picks.candidates), shown, p.logit(), strict=True):
        there = odds > -torch.inf
        assert set(ids[there].tolist()) == set((left > -torch.inf).nonzero()[:, 0].tolist())
        torch.testing.assert_close(odds[there], own[ids[there]])


@pytest.mark.parametrize(
    ("dtype", "tops"),
    [(torch.float64, (59.0, 60.0, 61.0, 300.0)), (torch.float32, (39.0, 40.0, 41.0, 88.0))],
)
def test_confidence_where_the_probability_rounds_to_1(
    dtype: torch.dtype, tops: tuple[float, ...]
) -> None:
    """One logit far above six zeros: the log-odds are exactly that logit less log 6."""
    logits = torch.zeros(len(tops), 8, dtype=dtype)
    logits[:, 2] = torch.tensor(tops, dtype=dtype)
    assert logits[:, :7].softmax(-1)[:, 2].eq(1).all()
    for sample in (False, True):
        # its logits are the hidden states
        picker = Picker(torch.eye(8, dtype=dtype), 7, sample=sample, candidates=64)
        picks = picker(logits, spots(len(tops)))
        assert picks.log_odds.dtype == dtype
        for odds in (picks.log_odds, listed(picks.candidates)[1][:, 0]):
            assert odds.tolist() == pytest.approx([top - math.log(6) for top in tops], rel=1e-6)


@pytest.mark.parametrize("at_once", [1 << 30, 20])
@pytest.mark.parametrize("sample", [False, True])
def test_picks_among_a_few(sample: bool, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the five likeliest tokens at an earlier state, of which a truncation leaves three, those
    of the state itself; all others keep their share. No end before the minimum length."""
    monkeypatch.setattr(pick_file, "_LOGITS_AT_ONCE", at_once)
    options = {
        "temperature": 0.7,
        "sample": sample,
        "shortlist": 5,
        "eos_token_ids": (3, 30),
        "candidates": 31 if sample else 5,  # sampled drafts choose among more
    }
    picker, hidden = random_picker(
        300, truncation=LogitsProcessorList([TopKLogitsWarper(3)]), **options
    )
    before, now = picker(hidden, spots(300)), hidden.flip(0)
    assert before.candidates is not None
    stale, fresh = (states @ picker.lm_head_weight.T / 0.7 for states in (hidden, now))
    stale[:, 17] = -torch.inf
    kept = stale.topk(3).indices
    own = fresh.gather(1, kept)
    own[:150].masked_fill_(torch.isin(kept[:150], torch.tensor([3, 30])), -torch.inf)
    scores = stale.scatter(1, kept, own)
    place = own.argmax(-1, keepdim=True)
    picks = picker.for_drafts.among(now, before.candidates, spots(300, early=150))
    assert torch.equal(picks.token, kept.gather(1, place)[:, 0])
    told = scores.softmax(-1).gather(1, kept)
    torch.testing.assert_close(picks.log_odds, told.gather(1, place)[:, 0].logit())
    assert (picks.candidates is not None) is sample
    if not sample:
        return
    for ids, odds, tokens, p in zip(
        *listed(picks.candidates), kept.tolist(), told.logit(), strict=True
    ):
        found = {
            token: one
            for token, one in zip(ids.tolist(), odds.tolist(), strict=True)
            if one > -torch.inf
        }
        assert found == pytest.approx(
            {token: one for token, one in zip(tokens, p.tolist(), strict=True) if one > -torch.inf}
        )


def test_the_weight_is_read_once_where_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 positions, as of four rows with K = 4: in three slices of 64 MB of logits, or in one,
    by memory that is asked for once, and not at all for what fits anyway."""
    asked = []

    def at_once(device: torch.device) -> int:
        asked.append(device)
        return 1 << 29

    unembedding = pick_file.Unembedding(torch.empty(151936, 1), 0)
    assert unembedding.chunks(110) == [slice(0, 110)]
    assert len(unembedding.chunks(256)) == 3
    monkeypatch.setattr(pick_file, "logits_at_once", at_once)
    unembedding = pick_file.Unembedding(torch.empty(151936, 1), 0)
    assert unembedding.chunks(110) == [slice(0, 110)]
    assert asked == []
    assert len(unembedding.chunks(256)) == len(unembedding.chunks(1024)) == 1
    assert len(asked) == 1
