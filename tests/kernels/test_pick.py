"""The row kernel of the pick against its twin: interpreted on a CPU, compiled where there is a
GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from modeling_mrp.kernels import pick
from modeling_mrp.kernels.dispatch import tl, triton
from modeling_mrp.kernels.pick import PICK, Unembedding
from modeling_mrp.rules.draft import noise_key

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton is None, reason="needs triton"),
    # numpy's, of infinities, where a kernel is interpreted
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.usefixtures("new_memory_is_nan"),  # integers are their largest
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")


def logits_of(rows: int, vocab: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 4).to(
        DEVICE, dtype
    )


def keys_of(count: int) -> Tensor:
    n = torch.arange(count, device=DEVICE)
    return noise_key(n * 7_000_000_007, n, 1 + n % 4)


def vocabulary(size: int, temperature: float = 1.0) -> Unembedding:
    return Unembedding(torch.zeros(size, 1, device=DEVICE), 0, temperature)


def picked(
    unembedding: Unembedding,
    logits: Tensor,
    least: Tensor | None = None,
    keys: Tensor | None = None,
) -> Any:
    """What the kernel picks, and its twin in float64."""
    wide = None if least is None else least.double()
    return PICK.launch(unembedding, logits, least, keys), PICK.twin(
        unembedding, logits.double(), wide, keys
    )


def same(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], atol: float = 2e-5) -> None:
    assert got[0].dtype == torch.long
    assert got[1].dtype == torch.float32
    assert torch.equal(got[0], wanted[0])
    torch.testing.assert_close(
        got[1].double(), wanted[1].double(), rtol=1e-5, atol=atol, equal_nan=True
    )


if triton is not None:
    from modeling_mrp.kernels.pick import gumbel_of_bits

    @triton.jit
    def write_gumbel(bits, out, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
        n = tl.arange(0, COUNT)
        tl.store(out + n, gumbel_of_bits(tl.load(bits + n).to(tl.uint32)))


def test_the_noise_at_its_ends() -> None:
    """-log(-log(u)) at u = (bits + 1/2) / 2^32, where float32 cannot hold u, or 1 - u, or both are
    a half."""
    near_one = [(1 << 32) - (1 << k) for k in (0, 1, 7, 10, 15, 20, 25, 28)]
    bits = torch.tensor([0, 1, 2, 255, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, 3 << 30, *near_one])
    u = (bits.double() + 0.5) / 2**32
    noise = torch.zeros(16, device=DEVICE)
    write_gumbel[(1,)](bits.to(DEVICE), noise, 16)
    torch.testing.assert_close(noise.cpu().double(), -(-u.log()).log(), rtol=3e-7, atol=3e-7)


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs read several tiles of the vocabulary, one after the other, as they do of many
    rows."""
    monkeypatch.setattr(pick, "processors", lambda _: 1)


@pytest.mark.usefixtures("small_gpu")
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(
    ("rows", "vocab", "dtype"),
    [
        (1, 17, torch.float16),
        (3, 512, torch.bfloat16),
        (2, 5000, torch.float32),
        (16, 1300, torch.float32),
    ],
)
def test_kernel_equals_its_twin(rows: int, vocab: int, dtype: torch.dtype, sampled: bool) -> None:
    """Of all tokens; of those of 9 or more logits alone. Where all logits are equal, noise
    decides."""
    logits, keys = logits_of(rows, vocab, vocab, dtype), keys_of(rows) if sampled else None
    logits[rows // 2] = 0
    logits[:, 0] = -INF  # the mask id
    least = logits.topk(9).values[:, -1].contiguous()
    same(*picked(vocabulary(vocab, 0.7 if sampled else 1.0), logits, None, keys))
    got, wanted = picked(vocabulary(vocab, 3.0), logits, least, keys)
    same(got, wanted)
    assert (logits.gather(1, got[0][:, None])[:, 0] >= least).all()


def test_of_equals_the_first_is_picked(small_gpu: None) -> None:
    """In one tile, in two of a program, and of two programs."""
    logits = torch.zeros(4, 8000, device=DEVICE)
    for row, places in enumerate(([7, 900], [600, 1900], [600, 7000]), 1):
        logits[row, places] = 5.0
    (token, _), _ = picked(vocabulary(8000), logits)
    assert token.tolist() == [0, 7, 600, 600]


@pytest.mark.usefixtures("small_gpu")
def test_extremes() -> None:
    """Certain tokens keep their log-odds; where the best score is not finite there is nothing to
    pick."""
    logits = torch.full((5, 700), -INF, device=DEVICE)
    logits[0, 3] = 2.0  # all others barred
    logits[1, :] = 0.0
    logits[1, 9] = 60.0  # its probability rounds to 1
    logits[3, 5] = NAN
    logits[4, 5] = INF
    got, wanted = picked(vocabulary(700), logits)
    same(got, wanted)
    assert got[1].tolist()[0] == INF
    assert got[1][1].item() == pytest.approx(60 - torch.tensor(699.0).log().item())
    assert got[1][2:].isnan().all()
