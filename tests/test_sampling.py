"""Noise, picks and their confidence against pure Python, and the distribution that `static` sampling draws from.

Every statistical test has fixed seeds, so it always gives the same answer; its false-alarm rate says how often another
choice of seeds would have failed.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal, localcontext
from itertools import product
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import ALPHA, chi_square_p
from torch import Tensor
from transformers.generation import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import modeling_mrp.kernels.noise as noise_module
import modeling_mrp.kernels.unembedding as unembedding_file
from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.sampling import Picks, Sampler
from modeling_mrp.kernels.noise import gumbel_noise, mix32, noise_keys
from modeling_mrp.kernels.unembedding import Unembedding

FIELDS = ("token", "logprob", "confidence", "entropy")


def test_chi_square_p_at_tabled_values() -> None:
    """The 5 % and 0.1 % points of 1 and 4 degrees of freedom are 3.841, 10.828, 9.488, 18.467."""
    half = torch.tensor([0.5, 0.5])
    for statistic, p in ((3.841, 0.05), (10.828, 0.001)):
        off = math.sqrt(statistic * 100) / 2  # counts 50 +- off: 2 off^2 / 50 = statistic
        assert chi_square_p(torch.tensor([50 + off, 50 - off]), half) == pytest.approx(p, rel=1e-2)
    for statistic, p in ((9.488, 0.05), (18.467, 0.001)):
        off = math.sqrt(statistic * 50)
        counts = torch.tensor([100 + off, 100 - off, 100, 100, 100])
        assert chi_square_p(counts, torch.full((5,), 0.2)) == pytest.approx(p, rel=1e-2)
    # 1 + 3 + 4 expected of 200 become one cell of 8: (13 - 8)^2 / 8 + (187 - 192)^2 / 192 = 3.255, p = 0.0712
    rare = torch.tensor([0.005, 0.96, 0.015, 0.02])
    assert chi_square_p(torch.tensor([6, 187, 0, 7]), rare) == pytest.approx(0.0712, abs=1e-4)


# ------------------------------------------------------------------------------------------------ noise


def python_mix32(x: int) -> int:
    x ^= x >> 16
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x ^= x >> 15
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def python_key(seed: int, position: int, masks_left: int) -> int:
    key = python_mix32(seed & 0xFFFFFFFF)
    key = python_mix32(key ^ (seed >> 32 & 0xFFFFFFFF))
    key = python_mix32(key ^ position)
    return python_mix32(key ^ masks_left ^ 0x9E3779B9)


def exact_gumbel(bits: int) -> float:
    """-log(-log((bits + 1/2) / 2^32)) to 40 digits."""
    with localcontext() as context:
        context.prec = 40
        return float(-(-((Decimal(bits) + Decimal("0.5")) / 2**32).ln()).ln())


def inverse_xorshift(x: int, shift: int) -> int:
    """y with y ^ (y >> shift) == x, for 32-bit numbers and a shift of 11 or more."""
    return x ^ (x >> shift) ^ (x >> 2 * shift)


def python_unmix32(x: int) -> int:
    """The inverse of `python_mix32`, which shows that both are bijections of the 32-bit numbers."""
    x = inverse_xorshift(x, 16)
    x = x * pow(0x846CA68B, -1, 1 << 32) & 0xFFFFFFFF
    x = inverse_xorshift(x, 15)
    x = x * pow(0x7FEB352D, -1, 1 << 32) & 0xFFFFFFFF
    return inverse_xorshift(x, 16)


def test_mix32_equals_pure_python() -> None:
    numbers = [0, 1, 2, 3, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, 0xFFFFFFFE, 0xFFFFFFFF, *range(1, 1 << 32, 4_000_037)]
    hashed = mix32(torch.tensor(numbers)).tolist()
    assert hashed == [python_mix32(n) for n in numbers]
    assert [python_unmix32(h) for h in hashed] == numbers
    assert hashed[:2] == [0, 0x688990C0]  # pinned: a change of the hash changes every seeded sample


@pytest.mark.parametrize("begin", [0, 1 << 31, (1 << 32) - (1 << 16)])
def test_mix32_does_not_collide(begin: int) -> None:
    hashed = mix32(torch.arange(begin, begin + (1 << 16)))
    assert len(hashed.unique()) == 1 << 16
    assert hashed.min() >= 0
    assert hashed.max() < 1 << 32
    bits = hashed[:, None] >> torch.arange(32) & 1
    # Each bit is set in half of the numbers: 32768 +- 6 standard deviations of 128 (false-alarm rate 32 * 2e-9).
    assert (bits.sum(0) - (1 << 15)).abs().max() < 6 * 128


def test_noise_keys_equal_pure_python() -> None:
    cases = [(0, 0, 1), (1, 0, 1), (0, 1, 1), (0, 0, 2), (1 << 32, 0, 1), ((1 << 62) - 1, 32767, 64), (12345678901234, 77, 5)]
    keys = noise_keys(*torch.tensor(cases).unbind(1))
    assert keys.tolist() == [python_key(*case) for case in cases]
    assert len(set(keys.tolist())) == len(cases)


def test_every_argument_changes_the_keys() -> None:
    """32 low and 32 high halves of seeds, 64 positions and 16 counts: 2^20 keys of 32 bits share about 2^39 / 2^32 = 128."""
    low, high, position, masks = torch.meshgrid(*(torch.arange(n) for n in (32, 32, 64, 16)), indexing="ij")
    grid = noise_keys(*(t.flatten() for t in (low + (high << 32), position, masks))).view(32, 32, 64, 16)
    for axis in range(4):
        assert (grid.diff(dim=axis) != 0).float().mean() > 0.999
    collisions = grid.numel() - len(grid.unique())
    assert collisions < 128 + 6 * math.sqrt(128)  # Poisson: false-alarm rate below 1e-7
    assert noise_keys(torch.tensor(5), torch.tensor(3), torch.tensor(2)) != noise_keys(*map(torch.tensor, (5, 2, 3)))


def test_gumbel_noise_equals_pure_python() -> None:
    keys = [python_key(seed, 7, 3) for seed in range(4)]
    expected = [
        [exact_gumbel(python_mix32(python_mix32(token * 0x9E3779B1 & 0xFFFFFFFF) ^ key)) for token in range(50)] for key in keys
    ]
    torch.testing.assert_close(gumbel_noise(torch.tensor(keys), 50, torch.float64), torch.tensor(expected, dtype=torch.float64))


def test_gumbel_noise_is_a_pure_function() -> None:
    keys = noise_keys(torch.arange(64), torch.arange(64), torch.ones(64, dtype=torch.long))
    noise = gumbel_noise(keys, 100, torch.float32)
    torch.manual_seed(1)
    assert torch.equal(gumbel_noise(keys, 100, torch.float32), noise)
    order = torch.randperm(64)
    assert torch.equal(gumbel_noise(keys[order], 100, torch.float32), noise[order])
    assert torch.equal(gumbel_noise(keys[:3], 40, torch.float32), noise[:3, :40])  # nor of how many tokens there are
    assert len(noise.unique(dim=0)) == 64


def test_gumbel_noise_has_one_value_in_both_precisions() -> None:
    keys = noise_keys(torch.arange(2000), torch.zeros(2000, dtype=torch.long), torch.ones(2000, dtype=torch.long))
    single, double = (gumbel_noise(keys, 512, dtype) for dtype in (torch.float32, torch.float64))
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    assert (single - double).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gumbel_noise_at_the_extreme_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the hash switched off, the bits of token 0 are the key."""
    monkeypatch.setattr(noise_module, "mix32", lambda x: x)
    half, most = 1 << 31, (1 << 32) - 1
    bits = [0, 1, 2, 1000, half - 1000, half - 1, half, half + 1000, most - 1000, most - 2, most - 1, most]
    noise = gumbel_noise(torch.tensor(bits), 1, dtype)[:, 0]
    assert noise.isfinite().all()
    assert noise.tolist() == pytest.approx([exact_gumbel(b) for b in bits], abs=1e-5 if dtype == torch.float32 else 1e-12)
    assert noise[-1].item() == pytest.approx(33 * math.log(2), abs=1e-5)  # u = 1 - 2^-33
    distinct = noise[[0, 1, 2, 3, 4, 7, 8, 9, 10, 11]]
    assert (distinct.diff() > 0).all()


def gumbel_draws() -> Tensor:
    """2^20 draws: 2048 consecutive seeds, 512 tokens."""
    keys = noise_keys(torch.arange(2048), torch.full((2048,), 11), torch.full((2048,), 4))
    return gumbel_noise(keys, 512, torch.float64).flatten()


def test_gumbel_moments() -> None:
    """Mean Euler's gamma, variance pi^2 / 6, each within 5 standard errors (false-alarm rate 6e-7 each).

    The variance of a sample variance is sigma^4 (excess kurtosis + 2) / n, and a Gumbel's excess kurtosis is 12 / 5.
    """
    draws, variance = gumbel_draws(), math.pi**2 / 6
    n = len(draws)
    assert draws.mean().item() == pytest.approx(0.5772156649, abs=5 * math.sqrt(variance / n))
    assert draws.var().item() == pytest.approx(variance, abs=5 * variance * math.sqrt(4.4 / n))


def test_gumbel_distribution() -> None:
    """Kolmogorov-Smirnov against exp(-exp(-x)), by the DKW bound: P(distance > e) <= 2 exp(-2 n e^2) = 1e-6."""
    draws = gumbel_draws().sort().values
    n = len(draws)
    cdf, below = (-(-draws).exp()).exp(), torch.arange(n) / n
    assert max((cdf - below).abs().max(), (cdf - below - 1 / n).abs().max()) < math.sqrt(math.log(2e6) / (2 * n))


@pytest.mark.parametrize("varied", ["seed", "position"])
def test_gumbel_max_follows_the_softmax(varied: str) -> None:
    n, fixed = 30_000, torch.full((30_000,), 2)
    numbers = torch.arange(n)
    keys = noise_keys(numbers, fixed, fixed) if varied == "seed" else noise_keys(fixed, numbers, fixed)
    logits = torch.tensor([2.0, 0.5, 0.0, -0.5, 1.5, -1.0, -2.0, 1.0], dtype=torch.float64)
    picks = identity_sampler(9, sample=True)(with_mask(logits).expand(n, -1), keys)
    assert chi_square_p(picks.token.bincount(minlength=8), logits.softmax(0)) > ALPHA


def test_noise_at_two_counts_of_masks_is_independent() -> None:
    """A token is drawn afresh after a reveal: the pairs of picks of 40,000 seeds follow the product of two softmaxes."""
    n = 40_000
    seeds, position = torch.arange(n), torch.full((n,), 6)
    logits = torch.tensor([0.7, 0.0, -0.7, 0.3], dtype=torch.float64)
    pair = [
        (logits + gumbel_noise(noise_keys(seeds, position, torch.full((n,), masks)), 4, torch.float64)).argmax(-1)
        for masks in (2, 1)
    ]
    p = logits.softmax(0)
    assert chi_square_p((4 * pair[0] + pair[1]).bincount(minlength=16), torch.outer(p, p).flatten()) > ALPHA


# ------------------------------------------------------------------------------------------------ picks


def identity_sampler(vocab: int, **options: Any) -> Sampler:
    """Its logits are the hidden states; the mask id is the last one."""
    return Sampler(torch.eye(vocab, dtype=options.pop("dtype", torch.float64)), vocab - 1, **options)


def with_mask(logits: Tensor, mask_logit: float = 3.0) -> Tensor:
    """Appends a logit of the mask id, which nothing may depend on."""
    return torch.cat([logits, torch.full_like(logits[..., :1], mask_logit)], -1)


def no_keys(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.long)


def some_keys(n: int) -> Tensor:
    return noise_keys(torch.arange(n), torch.arange(n) + 5, torch.arange(n) % 4)


def random_sampler(**options: Any) -> tuple[Sampler, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(31, 6, dtype=torch.float64, generator=generator)
    return Sampler(weight, 17, **options), torch.randn(10, 6, dtype=torch.float64, generator=generator)


def naive_picks(sampler: Sampler, hidden: Tensor) -> list[tuple[int, float, float, float]]:
    """Greedy picks by the formulas, one position at a time, in pure Python."""
    rows = []
    for h in hidden.tolist():
        scores = {
            token: sum(a * b for a, b in zip(h, w, strict=True)) / sampler.temperature
            for token, w in enumerate(sampler.lm_head_weight.tolist())
            if token != sampler.mask_token_id
        }
        total = math.fsum(math.exp(s) for s in scores.values())
        p = {token: math.exp(s) / total for token, s in scores.items()}
        best = max(p, key=lambda token: p[token])
        odds = math.log(p[best] / math.fsum(q for token, q in p.items() if token != best))
        rows.append((best, math.log(p[best]), odds, -math.fsum(q * math.log(q) for q in p.values())))
    return rows


def rows_of(picks: Picks) -> list[tuple[Any, ...]]:
    return list(zip(*(getattr(picks, field).tolist() for field in FIELDS), strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.0])
def test_greedy_picks_by_the_formulas(temperature: float) -> None:
    sampler, hidden = random_sampler(temperature=temperature)
    for got, expected in zip(rows_of(sampler(hidden, no_keys(10))), naive_picks(sampler, hidden), strict=True):
        assert got == pytest.approx(expected, abs=1e-12)


def test_the_mask_id_is_neither_picked_nor_counted() -> None:
    logits = torch.tensor([[0.2, 1.0, -0.5], [2.0, 0.0, 0.0]], dtype=torch.float64)
    results = [
        rows_of(identity_sampler(4, sample=sample)(with_mask(logits, mask), some_keys(2)))
        for sample in (False, True)
        for mask in (-5.0, 100.0)
    ]
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert [row[0] for row in results[0]] == [1, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
def test_sampled_picks_are_the_gumbel_max(temperature: float) -> None:
    """The noise is added to logits over temperature; log-probability and confidence are those of the softmax without noise."""
    sampler, hidden = random_sampler(temperature=temperature, sample=True)
    keys = some_keys(10)
    scores = hidden @ sampler.lm_head_weight.T / temperature
    scores[:, 17] = -torch.inf
    token = (scores + gumbel_noise(keys, 31, torch.float64)).argmax(-1)
    picks = sampler(hidden, keys)
    assert torch.equal(picks.token, token)
    assert not torch.equal(token, scores.argmax(-1))
    p = scores.softmax(-1).gather(1, token[:, None])[:, 0]
    torch.testing.assert_close(picks.logprob, p.log())
    torch.testing.assert_close(picks.confidence, torch.logit(p))


@pytest.mark.parametrize(
    ("dtype", "tops"), [(torch.float64, (59.0, 60.0, 61.0, 300.0)), (torch.float32, (39.0, 40.0, 41.0, 88.0))]
)
def test_confidence_where_the_probability_rounds_to_1(dtype: torch.dtype, tops: tuple[float, ...]) -> None:
    """One logit far above six zeros: the log-odds are exactly that logit less log 6."""
    logits = torch.zeros(len(tops), 7, dtype=dtype)
    logits[:, 2] = torch.tensor(tops, dtype=dtype)
    assert logits.softmax(-1)[:, 2].eq(1).all()
    picks = identity_sampler(8, dtype=dtype)(with_mask(logits), no_keys(len(tops)))
    assert picks.confidence.dtype == dtype
    assert picks.confidence.tolist() == pytest.approx([top - math.log(6) for top in tops], rel=1e-6)
    assert (picks.confidence.diff() > 0).all()
    assert (picks.logprob <= 0).all()
    assert picks.logprob[1].item() == pytest.approx(-6 * math.exp(-tops[1]), rel=1e-5, abs=0)  # not the 0 of log(1)


def test_entropy_at_its_ends() -> None:
    logits = torch.tensor([[0.0, 0, 0, 0], [1000, 0, 0, 0], [0, -1e4, 0, -1e4]], dtype=torch.float64)
    entropy = identity_sampler(5)(with_mask(logits), no_keys(3)).entropy
    assert entropy.tolist() == pytest.approx([math.log(4), 0, math.log(2)], abs=1e-12)


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [(TopKLogitsWarper(2), {1, 3}), (TopPLogitsWarper(0.8), {1, 3}), (TopPLogitsWarper(0.97), {1, 3, 4})],
    ids=["top_k", "top_p", "top_p_wider"],
)
def test_truncation_chooses_the_token_but_not_its_confidence(truncation: Any, kept: set[int]) -> None:
    """p = (.01, .5, .02, .35, .12) at temperature 1; 20,000 picks follow the renormalised p of the tokens kept."""
    p = torch.tensor([0.01, 0.5, 0.02, 0.35, 0.12], dtype=torch.float64)
    n = 20_000
    sampler = identity_sampler(6, sample=True, truncation=LogitsProcessorList([truncation]))
    picks = sampler(with_mask(p.log()).expand(n, -1), some_keys(n))
    inside = sorted(kept)
    counts = picks.token.bincount(minlength=5)
    assert counts[inside].sum() == n
    assert chi_square_p(counts[inside], p[inside] / p[inside].sum()) > ALPHA
    torch.testing.assert_close(picks.logprob, p.log()[picks.token])
    torch.testing.assert_close(picks.confidence, p.logit()[picks.token])
    assert picks.entropy[0].item() == pytest.approx(-(p * p.log()).sum().item())


class AddLength(LogitsProcessor):
    """Adds the number of committed ids to token 0, the last of them to token 1, and tempts with the mask id."""

    def __init__(self, mask_id: int) -> None:
        self.mask_id = mask_id

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == scores.shape[0]
        scores = scores.clone()
        scores[:, 0] += input_ids.shape[1]
        scores[:, 1] += input_ids[:, -1]
        scores[:, 2] = torch.nan  # what 0 * -inf gives in some processors
        scores[:, self.mask_id] = 1e6
        return scores


def committed_at(at: slice) -> list[tuple[Tensor, Tensor]]:
    """Positions 0, 2, 4, ... have 3 committed ids that end in 6; positions 1, 5, 9, ... have 2 that end in 9."""
    here = torch.arange(10)[at]
    pairs = [(here % 2 == 0, [4, 5, 6]), (here % 4 == 1, [8, 9])]
    return [(where.nonzero()[:, 0], torch.tensor([ids])) for where, ids in pairs]


def test_processors_come_before_the_temperature() -> None:
    sampler, hidden = random_sampler(temperature=0.5, processors=LogitsProcessorList([AddLength(17)]))
    scores = hidden @ sampler.lm_head_weight.T
    for position in range(10):
        if position % 2 == 0 or position % 4 == 1:
            scores[position, 0] += 3 if position % 2 == 0 else 2
            scores[position, 1] += 6 if position % 2 == 0 else 9
            scores[position, 2] = -torch.inf
    scores[:, 17] = -torch.inf
    expected = (scores / 0.5).log_softmax(-1)
    picks = sampler(hidden, no_keys(10), committed_at)
    assert torch.equal(picks.token, expected.argmax(-1))
    torch.testing.assert_close(picks.logprob, expected.amax(-1))
    token = torch.full((10,), 3)
    odds = sampler.token_log_odds(hidden, token, committed_at)
    torch.testing.assert_close(odds, expected[:, 3].exp().logit())


@pytest.mark.parametrize("sample", [False, True])
def test_no_eos_before_the_minimum_length(sample: bool) -> None:
    """At such positions the eos ids leave the softmax, as the mask id does; elsewhere nothing changes."""
    sampler, hidden = random_sampler(sample=sample, eos_token_ids=(3, 30))
    early = torch.arange(10) % 3 != 0
    scores = hidden @ sampler.lm_head_weight.T
    scores[:, 17] = -torch.inf
    scores[early.nonzero(), torch.tensor([3, 30])] = -torch.inf
    p = scores.softmax(-1)
    token = (scores + (gumbel_noise(some_keys(10), 31, torch.float64) if sample else 0)).argmax(-1)
    picks = sampler(hidden, some_keys(10), no_eos=early)
    assert torch.equal(picks.token, token)
    torch.testing.assert_close(picks.confidence, p.gather(1, token[:, None])[:, 0].logit())
    torch.testing.assert_close(picks.entropy, torch.special.entr(p).sum(-1))
    assert rows_of(picks) != rows_of(sampler(hidden, some_keys(10)))
    assert rows_of(sampler(hidden, some_keys(10), no_eos=torch.zeros_like(early))) == rows_of(sampler(hidden, some_keys(10)))


def test_a_minimum_length_without_eos_ids_changes_nothing() -> None:
    sampler, hidden = random_sampler()
    picks = sampler(hidden, no_keys(10), no_eos=torch.ones(10, dtype=torch.bool))
    assert rows_of(picks) == rows_of(sampler(hidden, no_keys(10)))


@pytest.mark.parametrize("options", [{}, {"sample": True, "temperature": 0.8}, {"processors": True}], ids=str)
def test_chunks_change_nothing(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if "processors" in options:
        options = {"processors": LogitsProcessorList([AddLength(17)])}
    sampler, hidden = random_sampler(eos_token_ids=(3, 30), **options)
    early = torch.arange(10) > 4
    shapes: list[int] = []
    product = Unembedding.product

    def counted(unembedding: Unembedding, hidden: Tensor) -> Tensor:
        shapes.append(len(hidden))
        return product(unembedding, hidden)

    monkeypatch.setattr(Unembedding, "product", counted)
    whole, token = sampler(hidden, some_keys(10), committed_at, early), torch.arange(10)
    whole_odds = sampler.token_log_odds(hidden, token, committed_at)
    assert shapes == [10, 10]
    shapes.clear()
    monkeypatch.setattr(unembedding_file, "_LOGITS_AT_ONCE", 3 * 31 + 30)
    parts = sampler(hidden, some_keys(10), committed_at, early)
    assert shapes == [3, 3, 3, 1]
    assert torch.equal(parts.token, whole.token)
    for field in FIELDS[1:]:
        torch.testing.assert_close(getattr(parts, field), getattr(whole, field), rtol=0, atol=1e-12)
    torch.testing.assert_close(sampler.token_log_odds(hidden, token, committed_at), whole_odds, rtol=0, atol=1e-12)
    monkeypatch.setattr(unembedding_file, "_LOGITS_AT_ONCE", 1)  # less than one position: still one at a time
    assert torch.equal(sampler(hidden, some_keys(10), committed_at, early).token, whole.token)


WARPERS: dict[str, list[LogitsProcessor]] = {
    "k": [TopKLogitsWarper(5)],
    "k of all": [TopKLogitsWarper(50)],
    "k, p": [TopKLogitsWarper(7), TopPLogitsWarper(0.7)],
    "k, min_p": [TopKLogitsWarper(7), MinPLogitsWarper(0.2)],
    "k, k": [TopKLogitsWarper(7), TopKLogitsWarper(3)],
    "all": [TopKLogitsWarper(20), TopPLogitsWarper(0.97), MinPLogitsWarper(0.01), EpsilonLogitsWarper(0.02)],
    "k, eta": [TopKLogitsWarper(20), EtaLogitsWarper(0.05)],
}


@pytest.mark.parametrize("warpers", WARPERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("restricted", [False, True], ids=["all ids", "some ids"])
def test_a_top_k_is_what_its_warpers_do_to_all_logits(
    warpers: str, dtype: torch.dtype, restricted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens and confidences; what follows the top-k sees its logits only."""
    options = {"temperature": 0.7, "sample": True, "entropy": False, "eos_token_ids": (3, 30)}
    sampler, _ = random_sampler(truncation=LogitsProcessorList(WARPERS[warpers]), **options)
    sampler = replace(sampler, lm_head_weight=sampler.lm_head_weight.to(dtype))
    some = torch.tensor([30, 2, 9, 11, 3, 21, 25, 8, 1])
    sampler = sampler.restricted(some, sampler.lm_head_weight[some]) if restricted else sampler
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(300, 6, dtype=torch.float64, generator=generator).to(dtype)
    early = torch.arange(300) % 2 == 0
    got = sampler(hidden, some_keys(300), no_eos=early)
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "_pick_top", lambda *_: 1 / 0)
        patch.setattr(Sampler, "_top_k", lambda _: None)
        wanted = sampler(hidden, some_keys(300), no_eos=early)
    assert rows_of(got) == rows_of(wanted)
    assert not bool(((got.token == 3) | (got.token == 30))[early].any())
    assert len(got.token.unique()) > 4


@pytest.mark.parametrize(
    ("warpers", "entropy"),
    [
        ([TopPLogitsWarper(0.7), TopKLogitsWarper(7)], False),
        ([TopKLogitsWarper(7), TypicalLogitsWarper(0.7)], False),
        ([TopKLogitsWarper(7, filter_value=-5.0)], False),
        ([TopKLogitsWarper(7)], True),
    ],
    ids=["top-p first", "typical behind", "another filter value", "entropy"],
)
def test_what_a_few_logits_do_not_suffice_for(
    warpers: list[LogitsProcessor], entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, hidden = random_sampler(truncation=LogitsProcessorList(warpers), sample=True, entropy=entropy)
    monkeypatch.setattr(Sampler, "_pick_top", lambda *_: 1 / 0)
    assert bool((sampler(hidden, some_keys(10)).entropy > 0).all()) is entropy


def test_ties_at_the_k_th_place_all_stay() -> None:
    """As under transformers' warper; of 16-bit logits there are many."""
    weight = torch.eye(8, dtype=torch.bfloat16)
    hidden = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 9.0]], dtype=torch.bfloat16).expand(400, 8)
    sampler = Sampler(weight, 7, sample=True, entropy=False, truncation=LogitsProcessorList([TopKLogitsWarper(2)]))
    assert set(sampler(hidden, some_keys(400)).token.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("options", [{}, {"sample": True, "truncation": LogitsProcessorList([TopKLogitsWarper(3)])}], ids=len)
def test_no_positions(options: dict[str, Any]) -> None:
    sampler, hidden = random_sampler(**options)
    picks = sampler(hidden[:0], no_keys(0))
    assert rows_of(picks) == []
    assert picks.token.dtype == torch.long
    assert sampler.token_log_odds(hidden[:0], no_keys(0)).tolist() == []


@pytest.mark.parametrize("options", [{}, {"temperature": 0.4}, {"sample": True}], ids=str)
def test_token_log_odds_equal_the_confidence_of_a_pick(options: dict[str, Any]) -> None:
    sampler, hidden = random_sampler(**options)
    picks = sampler(hidden, some_keys(10))
    assert torch.equal(sampler.token_log_odds(hidden, picks.token), picks.confidence)


def test_precision_of_the_results() -> None:
    """bfloat16 weights give bfloat16 logits, and all that follows is float32; float64 stays float64."""
    generator = torch.Generator().manual_seed(1)
    weight, hidden = torch.randn(9, 4, generator=generator), torch.randn(5, 4, generator=generator)
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)):
        sampler = Sampler(weight.to(dtype), 8)
        picks = sampler(hidden.to(dtype), no_keys(5))
        assert {getattr(picks, field).dtype for field in FIELDS[1:]} == {wide}
        assert sampler.token_log_odds(hidden.to(dtype), picks.token).dtype == wide
        logits = (hidden.to(dtype) @ weight.to(dtype).T).to(wide)[:, :8]
        torch.testing.assert_close(picks.logprob, logits.log_softmax(-1).amax(-1))


# ------------------------------------------------------------------------------------------------ distribution of `static`

PROMPT, MASK = [1, 3], 5


def tiny_model(seed: int) -> MRPForCausalLM:
    """Blocks of 2 and tokens 0 to 4: 25 texts can be generated."""
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    head = {"num_key_value_heads": 1, "num_nextn_predict_layers": 1, "max_position_embeddings": 16}
    return make_model(seed, vocab_size=6, mask_token_id=MASK, block_size=2, **shape, **head)


@torch.no_grad()
def exact_distribution(probabilities_at: Callable[[list[int]], Tensor]) -> Tensor:
    """[25] probability of the text (x, y), at 5 x + y, under `static` with one reveal a step at temperature 1.

    At the all-mask state each position draws its token; the one whose token has the higher log-odds is revealed, of equals
    the left one; the other then draws afresh from its distribution given the reveal.
    """
    first = probabilities_at([MASK, MASK])
    text = torch.zeros(5, 5, dtype=torch.float64)
    for x, y in product(range(5), repeat=2):
        p = first[0, x] * first[1, y]
        if first[0, x].logit() >= first[1, y].logit():
            text[x] += p * probabilities_at([x, MASK])[1]
        else:
            text[:, y] += p * probabilities_at([MASK, y])[0]
    return text.flatten()


def probabilities(model: MRPForCausalLM, block: list[int]) -> Tensor:
    """[2, 5]: the softmax of both positions over all tokens but the mask."""
    return model(torch.tensor([PROMPT + block])).logits[0, 2:, :MASK].softmax(-1)


@pytest.mark.parametrize("seed", [0, 1])
def test_static_samples_the_exact_distribution(seed: int) -> None:
    """20,000 rows in one batch, chi-square with a false-alarm rate of 1e-4; `mrp_spec` gives the same rows, every one."""
    model, n = tiny_model(seed), 20_000
    exact = exact_distribution(lambda block: probabilities(model, block))
    assert exact.sum().item() == pytest.approx(1)
    prompts = torch.tensor([PROMPT]).expand(n, -1)
    options: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 1.0, "max_new_tokens": 2, "seed": 1000}
    rows = model.generate(prompts, decoding="static", **options)
    counts = (5 * rows[:, 2] + rows[:, 3]).bincount(minlength=25)
    assert chi_square_p(counts, exact) > ALPHA
    # The test can tell: independent draws from the all-mask state are another distribution.
    with torch.no_grad():
        at_once = torch.outer(*probabilities(model, [MASK, MASK])).flatten()
    assert chi_square_p(counts, at_once) < 1e-12
    drafted = model.generate(prompts, decoding="mrp_spec", num_draft_states=3, **options)
    assert torch.equal(drafted, rows)


def test_the_minimum_length_holds_for_given_tokens_too() -> None:
    """`token_log_odds` is the confidence that a pick has, with the ends of a text ruled out where they are too early."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(9, 6, generator=generator, dtype=torch.float64)
    hidden = torch.randn(7, 6, generator=generator, dtype=torch.float64)
    sampler = Sampler(weight, 8, eos_token_ids=(2, 5))
    early = torch.tensor([True, False, True, False, True, True, False])
    picks = sampler(hidden, torch.zeros(7, dtype=torch.long), no_eos=early)
    odds = sampler.token_log_odds(hidden, picks.token, no_eos=early)
    torch.testing.assert_close(odds, picks.confidence)
    free = sampler.token_log_odds(hidden, picks.token)
    assert torch.equal(free[~early], odds[~early])
    assert (free[early] < odds[early]).all()
