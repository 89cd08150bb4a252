"""The kernels of the vocabulary-wide step against their twins: interpreted on a CPU, compiled where there is a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import modeling_mrp.kernels.pick as pick_file
from modeling_mrp.kernels.dispatch import Dispatch, tl, triton
from modeling_mrp.kernels.noise import gumbel_noise, noise_bits, noise_keys
from modeling_mrp.kernels.pick import (
    Plan,
    _pick_above_kernel,
    _pick_kernel,
    pick,
    pick_above,
    pick_above_ref,
    pick_ref,
    residual_magnitude,
    token_log_odds,
    token_log_odds_ref,
)
from modeling_mrp.kernels.unembedding import Picked, Unembedding

pytestmark = [
    pytest.mark.skipif(triton is None, reason="needs triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of infinities, where a kernel is interpreted
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORCED = Dispatch(True)
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is allocated without values holds NaN, or a number far off."""
    empty = torch.empty

    def poisoned(*sizes: Any, **options: Any) -> Tensor:
        result = empty(*sizes, **options)
        return result.fill_(NAN if result.is_floating_point() else -77_777)

    monkeypatch.setattr(torch, "empty", poisoned)


def rows_of(count: int, vocab: int, size: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(count, size, generator=generator), torch.randn(vocab, size, generator=generator)
    return hidden.to(DEVICE, dtype), (weight / size**0.5 * 4).to(DEVICE, dtype)


def keys_of(count: int) -> Tensor:
    n = torch.arange(count, device=DEVICE)
    return noise_keys(n * 7_000_000_007, n, 1 + n % 4)


def exactly(unembedding: Unembedding, hidden: Tensor, *others: Any) -> Picked:
    """The twin in float64, given the noise's float32 bits."""
    wide = Unembedding(
        unembedding.weight.double(),
        unembedding.mask_token_id,
        unembedding.temperature,
        unembedding.eos_token_ids,
        unembedding.token_ids,
    )
    return pick_ref(wide, hidden.double(), *others)


def same(got: Picked, wanted: Picked, atol: float = 2e-5) -> None:
    assert got.token.dtype == torch.long
    assert torch.equal(got.token, wanted.token)
    for ours, theirs in zip(got[1:], wanted[1:], strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-5, atol=atol, equal_nan=True)


# ------------------------------------------------------------------------------------------------ noise

if triton is not None:
    from modeling_mrp.kernels.noise import gumbel_of_bits, token_noise_bits

    @triton.jit
    def write_noise(keys, tokens, bits_out, noise_out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
        n = tl.arange(0, COUNT)
        bits = token_noise_bits(tl.load(keys + n), tl.load(tokens + n))
        at = n[None, :] * COUNT + n[:, None]
        tl.store(bits_out + at, bits.to(tl.int64))
        tl.store(noise_out + at, gumbel_of_bits(bits))

    @triton.jit
    def write_gumbel(bits, out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
        n = tl.arange(0, COUNT)
        tl.store(out + n, gumbel_of_bits(tl.load(bits + n).to(tl.uint32)))


def test_the_noise_has_the_same_bits() -> None:
    """Integers equal, also from large ids and keys; float32 noise to 2e-6 of float64's."""
    n = 64
    tokens = torch.cat([torch.arange(32), torch.arange(151_936 - 31, 151_937)]).to(DEVICE)
    bits, noise = torch.zeros(n, n, dtype=torch.long, device=DEVICE), torch.zeros(n, n, device=DEVICE)
    write_noise[(1,)](keys_of(n), tokens.int(), bits, noise, n)
    assert torch.equal(bits, noise_bits(keys_of(n), tokens))
    assert (bits >= 1 << 31).any()
    torch.testing.assert_close(noise.double(), gumbel_noise(keys_of(n), tokens, torch.float64), rtol=3e-7, atol=3e-7)


def test_the_noise_at_its_ends() -> None:
    """-log(-log(u)) at u = (bits + 1/2) / 2^32, where float32 cannot hold u, or 1 - u, or both are a half."""
    bits = torch.tensor(
        [0, 1, 2, 255, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, 3 << 30, *((1 << 32) - (1 << k) for k in range(8))]
    )
    u = (bits.double() + 0.5) / 2**32
    noise = torch.zeros(16, device=DEVICE)
    write_gumbel[(1,)](bits.to(DEVICE), noise, 16)
    torch.testing.assert_close(noise.cpu().double(), -(-u.log()).log(), rtol=3e-7, atol=3e-7)


# ------------------------------------------------------------------------------------------------ pick


@pytest.mark.parametrize(
    ("rows", "vocab", "size", "processors"),
    [(1, 128, 64, 1), (1, 131, 40, 2), (5, 300, 70, 2), (16, 64, 32, 1), (17, 97, 33, 3), (70, 131, 64, 1)],
)
def test_pick_at_and_off_the_tile_sizes(rows: int, vocab: int, size: int, processors: int) -> None:
    """Greedy and sampled at temperature 0.7, with everything that a row may ask for."""
    hidden, weight = rows_of(rows, vocab, size)
    unembedding = Unembedding(weight, 3, 0.7, (5, 11))
    plan = Plan.of(rows, vocab, processors)
    n = torch.arange(rows, device=DEVICE)
    no_eos, active = n % 2 == 0, n % 3 != 1
    same(_pick_kernel(unembedding, hidden, None, None, None, None, plan), exactly(unembedding, hidden))
    sampled = _pick_kernel(unembedding, hidden, keys_of(rows), None, no_eos, active, plan)
    same(sampled, exactly(unembedding, hidden, keys_of(rows), no_eos, active))
    assert sampled.token[~active].eq(0).all()
    assert sampled.logprob[~active].eq(-INF).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_are_summed_in_float32(dtype: torch.dtype) -> None:
    hidden, weight = rows_of(3, 150, 72, dtype=dtype)
    unembedding = Unembedding(weight, 3)
    same(pick(unembedding, hidden, keys_of(3), dispatch=FORCED), exactly(unembedding, hidden, keys_of(3)))


def test_a_draft_vocabulary_has_the_noise_and_the_names_of_its_ids() -> None:
    hidden, weight = rows_of(6, 200, 32)
    ids = torch.tensor([199, 3, 150, 7, 8, 12, 100, 101, 5], device=DEVICE)  # 3 is no mask here: the caller left that out
    unembedding = Unembedding(weight[ids], 3, 0.8, (7, 150), ids)
    no_eos = torch.tensor([True, False] * 3, device=DEVICE)
    picked = pick(unembedding, hidden, keys_of(6), no_eos, dispatch=FORCED)
    same(picked, exactly(unembedding, hidden, keys_of(6), no_eos))
    whole = Unembedding(weight, 3, 0.8).shown(Unembedding(weight, 3, 0.8).logits(hidden) / 0.8, keys_of(6))
    assert torch.equal(picked.token[1::2], ids[whole[:, ids].argmax(-1)][1::2]) or bool((picked.token == 3).any())


def identity(logits: Tensor, mask: int, **options: Any) -> tuple[Unembedding, Tensor]:
    """A unembedding and hidden states with these logits [n, vocab], to the bit."""
    eye = torch.eye(logits.shape[1], dtype=torch.float16, device=DEVICE)
    assert torch.equal(logits.half().float(), logits)
    return Unembedding(eye, mask, **options), logits.half().to(DEVICE)


def test_extreme_logits() -> None:
    """Ties go to the lower id, in a slice, across slices and everywhere; log-odds of 2e4 keep their value."""
    vocab, mask = 70, 69
    logits = torch.zeros(6, vocab)
    logits[0, [50, 20, 33]] = 5.0  # a tie across slices
    logits[1, 40] = 1e4
    logits[2] = -1e4
    logits[2, 66] = 1e4
    logits[3] = 1e4  # all tied, at an extreme
    logits[4, [0, 1]] = torch.tensor([200.0, 100.0])  # 1 - p underflows, the log-odds do not
    unembedding, hidden = identity(logits, mask)
    got = _pick_kernel(unembedding, hidden, None, None, None, None, Plan.of(6, vocab, 2))
    same(got, exactly(unembedding, hidden), atol=3e-3)
    assert got.token.tolist() == [20, 40, 66, 0, 0, 0]
    assert got.log_odds[4].item() == pytest.approx(100)
    assert got.log_odds[2].item() == pytest.approx(2e4 - torch.tensor(68.0).log().item())
    assert got.log_odds[5].item() == pytest.approx(-torch.tensor(68.0).log().item())


def test_infinite_logits() -> None:
    """Products of -inf: rows with some, and with nothing else than -inf; and one +inf, which is no score to pick."""
    weight = torch.zeros(30, 16, dtype=torch.bfloat16)
    weight[:, 0] = torch.arange(30) + 10.0
    hidden = torch.zeros(3, 16, dtype=torch.bfloat16, device=DEVICE)
    hidden[:, 0] = torch.tensor([-3e38, 3e38, 1.0])  # products beyond float32, of either sign
    unembedding = Unembedding(weight.to(DEVICE), 4)
    same(_pick_kernel(unembedding, hidden, None, None, None, None, Plan.of(3, 30, 1)), pick_ref(unembedding, hidden))
    weight[2] = 0
    weight[2, 1] = 1
    hidden[:, 1] = 3.0
    some = Unembedding(weight[:3].to(DEVICE), 0)  # logits: the mask's, -inf or inf or 11 by the row, 3
    got = pick(some, hidden, dispatch=FORCED)
    same(got, pick_ref(some, hidden))
    assert got.token.tolist() == [2, 1, 1]
    assert got.log_odds[[0, 2]].tolist() == [INF, 8.0]
    assert got.logprob[1].isnan()
    assert got.log_odds[1].isnan()


def test_only_one_token_is_left() -> None:
    """The others are barred: log-odds of inf; and all of them are: no number, token 0, as in PyTorch."""
    hidden, weight = rows_of(2, 3, 8)
    no_eos = torch.tensor([True, False], device=DEVICE)
    for barred in ((0,), (0, 1)):
        unembedding = Unembedding(weight, 2, 1.0, barred)
        same(pick(unembedding, hidden, None, no_eos, dispatch=FORCED), exactly(unembedding, hidden, None, no_eos))
    assert pick(Unembedding(weight, 2, 1.0, (0,)), hidden, None, no_eos, dispatch=FORCED).log_odds[0] == INF


def test_nan_stays_in_its_row() -> None:
    """NaN counts as the largest number, of equals the first; its probability is none. Other rows do not notice."""
    hidden, weight = rows_of(4, 90, 32)
    hidden[1, 5] = NAN
    unembedding = Unembedding(weight, 0)
    got = pick(unembedding, hidden, keys_of(4), dispatch=FORCED)
    same(got, exactly(unembedding, hidden, keys_of(4)))
    assert got.logprob[1].isnan()
    assert got.token[1] == 1  # 0 is the mask
    weight[77, 3] = NAN  # of one token only
    same(pick(unembedding, hidden, dispatch=FORCED), exactly(unembedding, hidden))


def test_log_odds_of_given_tokens() -> None:
    """What `pick` says of a token it picks; those of the mask and of barred tokens are -inf; -inf where nothing is asked."""
    hidden, weight = rows_of(9, 150, 40)
    unembedding = Unembedding(weight, 3, 0.7, (5,))
    n = torch.arange(9, device=DEVICE)
    no_eos, active = n < 5, n != 7
    token = torch.tensor([3, 5, 0, 149, 64, 5, 63, 1, 100], device=DEVICE)
    got = _pick_kernel(unembedding, hidden, None, token, no_eos, active, Plan.of(9, 150, 2)).log_odds
    wide = Unembedding(weight.double(), 3, 0.7, (5,))
    wanted = token_log_odds_ref(wide, hidden.double(), token, no_eos, active)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    assert got[[0, 1, 7]].eq(-INF).all()
    picked = pick(unembedding, hidden, None, no_eos, dispatch=FORCED)
    again = token_log_odds(unembedding, hidden, picked.token, no_eos, dispatch=FORCED)
    torch.testing.assert_close(again, picked.log_odds, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residual_magnitudes(dtype: torch.dtype) -> None:
    hidden, weight = rows_of(3, 20, 1100, dtype=dtype)
    token = torch.tensor([19, 0, 7], device=DEVICE)
    got = residual_magnitude(weight, hidden, token)
    assert got.dtype == torch.float32
    wanted = (hidden.double() * weight.double()[token]).sum(-1).abs()
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_no_rows() -> None:
    hidden, weight = rows_of(0, 20, 16)
    assert [len(part) for part in pick(Unembedding(weight, 3), hidden, dispatch=FORCED)] == [0, 0, 0]
    assert [len(part) for part in pick(Unembedding(weight, 3), hidden, dispatch=Dispatch(False))] == [0, 0, 0]


def test_strides() -> None:
    """Rows of a larger matrix are read in place; hidden states are copied; weights by columns are refused, or go to PyTorch."""
    hidden, weight = rows_of(4, 60, 48)
    wanted = exactly(Unembedding(weight[::2, :32], 3), hidden[:, :32])
    same(pick(Unembedding(weight[::2, :32], 3), hidden[:, :32], dispatch=FORCED), wanted)
    same(pick(Unembedding(weight[::2, :32], 3), hidden[:, :32].T.contiguous().T, dispatch=FORCED), wanted)
    columns = Unembedding(weight[::2, :32].T.contiguous().T, 3)
    assert torch.equal(pick(columns, hidden[:, :32]).log_odds, pick_ref(columns, hidden[:, :32]).log_odds)
    with pytest.raises(ValueError, match=r"strides \(1, 30\): pass rows that are contiguous, or use kernels=None"):
        pick(columns, hidden[:, :32], dispatch=FORCED)


@pytest.mark.parametrize("dispatch", [Dispatch(), FORCED], ids=["automatic", "forced"])
def test_what_does_not_fit_together_is_refused(dispatch: Dispatch) -> None:
    hidden, weight = rows_of(4, 20, 16)
    unembedding = Unembedding(weight, 3)
    with pytest.raises(ValueError, match=r"hidden has shape \[4, 8\] and weight \[20, 16\]"):
        pick(unembedding, hidden[:, :8], dispatch=dispatch)
    with pytest.raises(ValueError, match=r"hidden has shape \[2, 2, 16\]"):
        pick(unembedding, hidden.view(2, 2, 16), dispatch=dispatch)
    for name in ("keys", "no_eos", "active"):
        with pytest.raises(ValueError, match=rf"{name} has shape \[3\] for 4 rows of hidden: pass \[4\]"):
            pick(unembedding, hidden, dispatch=dispatch, **{name: torch.ones(3, device=DEVICE).bool()})
    with pytest.raises(ValueError, match=r"token has shape \[3\]"):
        token_log_odds(unembedding, hidden, keys_of(3), dispatch=dispatch)


@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize(("rows", "vocab", "processors"), [(1, 700, 1), (5, 1300, 2), (9, 512, 1)])
def test_picks_above_a_threshold(rows: int, vocab: int, processors: int, count: int) -> None:
    """Of given logits, greedy and sampled, at a temperature, with rows that need nothing, and with names of their own."""
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(2)) * 3).to(DEVICE, torch.bfloat16)
    logits[:, 3] = -INF
    ids = torch.arange(vocab, device=DEVICE).flip(0)
    active = torch.arange(rows, device=DEVICE) % 3 != 1
    least = logits.topk(count).values[:, -1]
    plan = Plan.of_logits(rows, vocab, processors)
    whole = Unembedding(logits.new_zeros(vocab, 8), 3, 0.7)
    for unembedding in (whole, replace(whole, token_ids=ids)):
        wide = replace(unembedding, weight=unembedding.weight.double())
        for keys in (None, keys_of(rows)):
            wanted = pick_above_ref(wide, logits.double(), least.double(), keys, active)
            same(_pick_above_kernel(unembedding, logits, least, keys, active, plan), wanted)
            same(pick_above(unembedding, logits, least, keys, active, FORCED), wanted)
            assert [*wanted[0][~active].tolist(), *wanted[1][~active].exp().tolist()] == [0] * (2 * int((~active).sum()))
    among = torch.stack([pick_above(whole, logits, least, keys_of(rows) + k, dispatch=FORCED).token for k in range(4)], 1)
    assert (logits.gather(1, among) >= least[:, None]).all()
    assert (among != logits.argmax(-1)[:, None]).any()


def test_a_threshold_that_is_no_number_or_that_nothing_reaches() -> None:
    """Of NaN, the largest, nothing is under it; where all are, the first of all tokens is taken."""
    logits = torch.tensor([[1.0, NAN, 2.0], [1.0, 5.0, 2.0], [1.0, 5.0, 2.0]], dtype=torch.float16, device=DEVICE)
    least = torch.tensor([NAN, INF, 2.0], dtype=torch.float16, device=DEVICE)
    unembedding = Unembedding(logits.new_zeros(3, 4), 0)
    logits[:, 0] = -INF
    got = pick_above(unembedding, logits, least, dispatch=FORCED)
    same(got, pick_above_ref(unembedding, logits, least))
    assert got.token.tolist() == [1, 0, 1]


def test_float32_takes_pytorch_also_where_kernels_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """By design: nothing is said, and nothing is launched."""
    hidden, weight = rows_of(4, 20, 16, dtype=torch.float32)
    unembedding, token = Unembedding(weight, 3), torch.arange(4, device=DEVICE)
    monkeypatch.setattr(pick_file, "_pick_in_slices", lambda *_: 1 / 0)
    for got, wanted in zip(pick(unembedding, hidden, dispatch=FORCED), pick_ref(unembedding, hidden), strict=True):
        assert torch.equal(got, wanted)
    odds = token_log_odds(unembedding, hidden, token, dispatch=FORCED)
    assert torch.equal(odds, token_log_odds_ref(unembedding, hidden, token))
    logits, least = unembedding.product(hidden), torch.zeros(4, device=DEVICE)
    assert pick_above(unembedding, logits, least, dispatch=FORCED).token.shape == (4,)
    with pytest.raises(RuntimeError, match="'pick' failed"):
        pick(Unembedding(weight.half(), 3), hidden.half(), dispatch=FORCED)


def test_float64_takes_pytorch() -> None:
    hidden, weight = rows_of(4, 20, 16, dtype=torch.float64)
    assert pick(Unembedding(weight, 3), hidden).logprob.dtype == torch.float64
    with pytest.raises(ValueError, match=r"'pick' cannot be used: there are no kernels for torch.float64: load the model in"):
        pick(Unembedding(weight, 3), hidden, dispatch=FORCED)


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 128, 129, 512])
@pytest.mark.parametrize("tensor_memory", [False, True])
def test_plans(rows: int, tensor_memory: bool) -> None:
    """An H200 is filled, every token is in one slice, and what is written does not grow with the vocabulary."""
    for vocab in (1, 17, 32_000, 151_936):
        plan = Plan.of(rows, vocab, 132, tensor_memory)
        assert (plan.slices - 1) * plan.slice_length < vocab <= plan.slices * plan.slice_length
        assert plan.rows >= min(rows, 64)
        assert rows * plan.slices <= 264 * 512  # partial results, 16 bytes each: the only memory beside the result
        assert plan.num_stages * (plan.rows + plan.vocab) * plan.hidden * 2 <= 99 * 1024
    assert plan.slices * -(-rows // plan.rows) >= 132  # programs for every multiprocessor
