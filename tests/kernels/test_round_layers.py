"""What lies between the products of a layer in a round: each kernel (interpreted) against its twin,
attention in float64."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from modeling_mrp.kernels import round_layers
from modeling_mrp.kernels.dispatch import triton
from modeling_mrp.kernels.round_layers import (
    GATED,
    ROTATED,
    SUM_AND_NORM,
    RoundMask,
    round_attention,
    round_attention_ref,
)
from modeling_mrp.networks.cache import BlockCache
from tests.support.helpers import close
from tests.support.random_cases import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton is None, reason="needs triton"),
    # numpy's, of infinities, where a kernel is interpreted
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.usefixtures("new_memory_is_nan", "wide_programs"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def alike(got: Tensor, wanted: Tensor) -> None:
    """Up to a last bit of 16; where a GPU rounds to bfloat16 the interpreter cuts off, a few times
    one after the other."""
    assert got.dtype == wanted.dtype
    cut = wanted.dtype == torch.bfloat16 and DEVICE == "cpu"
    relative = (
        2**-5
        if cut
        else {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}[wanted.dtype]
    )
    torch.testing.assert_close(
        got, wanted, rtol=relative, atol=relative * float(wanted.abs().nan_to_num().max()) / 8
    )


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def norm_of(size: int, dtype: torch.dtype, epsilon: float = 1e-5) -> Qwen3RMSNorm:
    norm = Qwen3RMSNorm(size, eps=epsilon).to(DEVICE, dtype).requires_grad_(False)
    norm.weight.copy_(1 + numbers(size, size) / 4)
    return norm


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(
    ("rows", "size", "dtype"), [(3, 40, DTYPES[0]), (17, 127, DTYPES[1]), (33, 1, DTYPES[2])]
)
def test_a_sum_and_its_norm(rows: int, size: int, adds: bool, dtype: torch.dtype) -> None:
    """Of strided numbers, too. Squares of 1e4 sum up in float32 also for float16, whose largest is
    65,504."""
    norm, hidden = (
        norm_of(size, dtype),
        (numbers(1, 1, size, rows, dtype=dtype) * 1e4).clamp(-3e4, 3e4).transpose(1, 2),
    )
    hidden[0, 0] = 0
    added = numbers(2, 1, size, rows, dtype=dtype).transpose(1, 2) if adds else None
    got, wanted = SUM_AND_NORM.launch(hidden, added, norm), SUM_AND_NORM.twin(hidden, added, norm)
    for ours, theirs in zip(got, wanted, strict=True):
        alike(ours, theirs)
        assert ours.isfinite().all()


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize(
    ("tokens", "size", "dtype"), [(3, 40, DTYPES[0]), (2, 2049, DTYPES[1]), (5, 1024, DTYPES[2])]
)
def test_a_gate(tokens: int, size: int, joined: bool, dtype: torch.dtype) -> None:
    """Of one product or of two. Gates that SiLU takes to 0 and infinities pass; NaN stays."""
    both = numbers(size, 2, tokens, 2 * size, dtype=dtype) * 6
    both[0, 0, :5] = torch.tensor([-1e4, 1e4, 0, torch.inf, torch.nan], device=DEVICE)
    gate, up = both.chunk(2, -1)
    if not joined:
        gate = gate.contiguous()
        up = up.contiguous()
    before = both.clone()
    found = GATED.launch(gate, up)
    assert both.equal(before) or both.isnan().equal(before.isnan())
    wanted = GATED.twin(gate.clone(), up)
    assert found.shape == wanted.shape
    torch.testing.assert_close(
        found[0, 0, :5], wanted[0, 0, :5], rtol=2**-6, atol=0, equal_nan=True
    )
    found[0, 0, :5] = wanted[0, 0, :5] = 0
    alike(found, wanted)
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    exact[0, 0, :5] = 0
    alike(found, exact.to(dtype))


@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "kv_heads", "head_dim", "dtype"),
    [
        (1, 1, 1, 1, 2, DTYPES[0]),
        (1, 16, 4, 2, 8, DTYPES[1]),
        (2, 8, 8, 1, 32, DTYPES[2]),
        (3, 5, 6, 3, 24, DTYPES[0]),
    ],
)
def test_queries_keys_and_values(
    rows: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In programs of many heads, as interpreted, and of eight, as on a GPU; what is not the target
    of the cache stays."""
    norms = norm_of(head_dim, dtype), norm_of(head_dim, dtype)
    norms[1].weight.mul_(-1.5)
    parts = [
        numbers(seed, rows, tokens, many * head_dim, dtype=dtype) * 5
        for seed, many in enumerate((heads, kv_heads, kv_heads))
    ]
    parts[0][0, 0, :head_dim] = 0  # which the norm leaves as it is
    positions = torch.arange(rows * tokens, device=DEVICE).view(rows, tokens, 1) * 7 % 1000
    angles = (positions / 10 ** (torch.arange(head_dim // 2, device=DEVICE) * 8 / head_dim)).repeat(
        1, 1, 2
    )
    rotary = angles.cos().to(dtype), angles.sin().to(dtype)

    def written(run: Any, given: Any) -> tuple[Tensor, Tensor]:
        """Queries, and three layers of a cache whose second layer's slots 3 to 3 + tokens are the
        target."""
        sizes = {"num_hidden_layers": 3, "num_key_value_heads": kv_heads, "head_dim": head_dim}
        model = make_model(num_attention_heads=kv_heads, **sizes).to(DEVICE, dtype)
        cache = BlockCache(model, rows, 6, tokens + 3, with_head=False)
        (buffer,) = cache._buffers.values()
        buffer.fill_(torch.nan)
        cache.target(3, tokens)
        return run(given, norms, rotary, cache.written[1])[0], buffer

    wanted, theirs = written(ROTATED.twin, parts)
    assert not theirs[:, 3 : 3 + tokens, 1].isnan().any()
    for tile, given in ((8, torch.cat(parts, -1)), (64, parts)):
        monkeypatch.setattr(round_layers, "_HEADS", tile)
        got, ours = written(ROTATED.launch, given)
        alike(got, wanted)
        assert torch.equal(ours.isnan(), theirs.isnan())
        alike(ours.nan_to_num(), theirs.nan_to_num())
        assert torch.equal(ours[:, 3 : 3 + tokens, 1, 1].flatten(2), parts[2]), "values as they are"


def random_round(
    committed: list[Any],
    parent: list[list[int]],
    width: int,
    block: int,
    used: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, RoundMask]:
    """Queries and a buffer of keys and values whose slots are NaN where a row has nothing
    committed."""
    random = torch.Generator().manual_seed(head_dim + used)
    rows, tokens = len(committed), width * block
    query = (
        torch.randn(rows, tokens, heads[0], head_dim, generator=random)
        .to(DEVICE, dtype)
        .transpose(1, 2)
    )
    cache = torch.randn(2, rows, heads[1], used + tokens + 3, head_dim, generator=random).to(
        DEVICE, dtype
    )
    limits = [[length] * width if isinstance(length, int) else length for length in committed]
    for row, lengths in enumerate(limits):
        cache[:, row, :, min(max(lengths), used) : used] = torch.nan
    cache[:, :, :, used + tokens :] = torch.nan
    key, value = cache[:, :, :, : used + tokens]
    mask = RoundMask(
        torch.tensor(limits, device=DEVICE), torch.tensor(parent, device=DEVICE), block
    )
    return query, key, value, mask


def in_float64(query: Tensor, key: Tensor, value: Tensor, mask: RoundMask) -> Tensor:
    """The twin; it multiplies what is masked by 0, so there the cache must hold numbers."""
    key, value = (t.double().nan_to_num() for t in (key, value))
    return round_attention_ref(query.double(), key, value, mask, query.shape[-1] ** -0.5)


# By case: committed slots of each row, or of each of its states; parents of each row, states,
# block, slots read, heads of queries and keys, their size, splits.
ROUNDS: list[tuple[list[Any], list[list[int]], int, int, int, tuple[int, int], int, int | None]] = [
    ([0], [[-1]], 1, 4, 0, (1, 1), 32, None),  # nothing but itself: fewer rows than a tile
    ([64], [[-1]], 1, 16, 64, (2, 2), 32, None),  # every tile full
    ([37], [[-1, 0]], 2, 4, 64, (4, 2), 8, 1),
    # shares with nothing in them
    ([5, 0, 64], [[-1, 0, -1], [-1, -1, 1], [-1, -1, -1]], 3, 4, 64, (4, 1), 16, 2),
    ([129, 3], [[-1, 0], [-1, -1]], 2, 4, 192, (2, 1), 24, 5),  # more shares than tiles
    # more rows and scratch than a tile, which may show nothing
    ([7, 0], [[-1, 0, -1]] * 2, 3, 32, 64, (2, 1), 32, None),
    ([10], [[-1, 0]], 2, 16, 64, (1, 1), 128, 2),
    ([200], [[-1, 0]], 2, 4, 64, (2, 1), 8, 2),  # committed beyond what is read
    ([4, 3], [[-1, -1, 0]] * 2, 3, 4, 8, (4, 2), 8, None),  # prefix and scratch fit one tile
    # states apart in the text, some of which see nothing of a tile or a share
    ([[8, 0, 190, 64], [3, 16, 12, 0]], [[-1] * 4] * 2, 4, 16, 192, (2, 1), 16, 3),
    ([[0, 130], [5, 9]], [[-1, -1]] * 2, 2, 4, 192, (4, 2), 8, 1),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*product(range(len(ROUNDS)), DTYPES[:1]), *product((2, 4), DTYPES[1:])],
    ids=lambda value: str(value),
)
def test_attention(case: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    *shape, head_dim, splits = ROUNDS[case]
    if splits is not None:
        monkeypatch.setattr(round_layers, "_KEYS_PER_PROGRAM", triton.cdiv(shape[4], splits))
    query, key, value, mask = random_round(*shape, head_dim, dtype)  # type: ignore[arg-type]
    got, again = (round_attention(query, key, value, mask, head_dim**-0.5) for _ in range(2))
    assert got.dtype == dtype
    assert torch.equal(got, again), "the mask's counters are as they were"
    atol = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    close(got.double(), in_float64(query, key, value, mask), atol)


@pytest.mark.parametrize(
    ("rows", "strides"), [(1, (0, 0, 1 << 30, 1)), (3, (1 << 30, 0, 16, 1))], ids=["slots", "rows"]
)
def test_places_beyond_the_reach_of_32_bits(
    rows: int, strides: tuple[int, ...], tmp_path: Path
) -> None:
    """Keys of one row, or of three, 2^30 numbers apart: on a CPU in a file of 8 GB that takes no
    room but for what is touched."""
    scored = torch.randn(rows, 1, 3, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    size = (2 << 30) + 48
    if DEVICE == "cuda":
        if torch.cuda.mem_get_info()[0] < 6 * size:
            pytest.skip("12 GiB of memory are needed")
        torch.use_deterministic_algorithms(False)  # which would fill all of it
        sparse = torch.empty(size, device=DEVICE)
    else:
        sparse = torch.from_file(str(tmp_path / "sparse"), shared=True, size=size)
    key = sparse.as_strided((rows, 1, 3, 16), strides)
    key.copy_(scored)
    query = torch.ones(rows, 1, 1, 16, device=DEVICE)
    committed = torch.tensor([[2]] * rows, device=DEVICE)
    mask = RoundMask(committed, torch.tensor([[-1]] * rows, device=DEVICE), 1)
    close(
        round_attention(query, key, key, mask, 0.25),
        round_attention_ref(query, scored, scored, mask, 0.25),
        atol=2e-6,
    )


def test_mask_by_hand() -> None:
    """Two states of one token, the second behind the first, over two slots of which one is
    committed."""
    sees = RoundMask(torch.tensor([[1, 1]]), torch.tensor([[-1, 0]]), 1).dense(2)
    assert sees.tolist() == [[[[True, False, True, False], [True, False, True, True]]]]
    alone = RoundMask(torch.tensor([[1, 1]]), torch.tensor([[-1, -1]]), 1)
    assert alone.dense(2).tolist() == [[[[True, False, True, False], [True, False, False, True]]]]
    for used in (2, 1):
        assert alone.bias(used, torch.float64).exp().bool().tolist() == alone.dense(used).tolist()  # type: ignore[union-attr]
    apart = RoundMask(torch.tensor([[0, 2]]), torch.tensor([[-1, -1]]), 1)
    assert apart.dense(2).tolist() == [[[[False, False, True, False], [True, True, False, True]]]]
