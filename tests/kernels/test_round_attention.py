"""Attention of a round: the kernel (interpreted) against its twin in float64, and the way from the decoder to it."""

import random
import threading
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import close, texts
from torch import Tensor

from modeling_mrp import MRPForCausalLM
from modeling_mrp.kernels.dispatch import Dispatch, triton
from modeling_mrp.kernels.round_attention import RoundMask, round_attention, round_attention_twin
from modeling_mrp.networks.layers import IN_ROUNDS, round_attention_of, takes_round_masks

try:
    from triton.runtime.interpreter import GridExecutor, interpreter_builder
except ImportError:
    GridExecutor = None

interpreted = pytest.mark.skipif(
    triton is None or torch.cuda.is_available(), reason="kernels on CPU tensors need triton and its interpreter"
)
with_triton = pytest.mark.skipif(triton is None, reason="needs triton")
pytestmark = pytest.mark.usefixtures("new_memory_is_nan")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORCED = Dispatch(True)


def random_round(
    committed: list[int],
    parent: list[list[int]],
    width: int,
    block: int,
    used: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor, RoundMask]:
    """Queries and a buffer of keys and values whose slots are NaN where a row has nothing committed."""
    random = torch.Generator().manual_seed(head_dim + used)
    rows, tokens = len(committed), width * block
    query = torch.randn(rows, tokens, heads[0], head_dim, generator=random).to(DEVICE, dtype).transpose(1, 2)
    cache = torch.randn(2, rows, heads[1], used + tokens + 3, head_dim, generator=random).to(DEVICE, dtype)
    for row, length in enumerate(committed):
        cache[:, row, :, min(length, used) : used] = torch.nan
    cache[:, :, :, used + tokens :] = torch.nan
    key, value = cache[:, :, :, : used + tokens]
    mask = RoundMask(torch.tensor(committed), torch.tensor(parent), width, block)
    return query, key, value, mask.to(torch.device(DEVICE))


def in_float64(query: Tensor, key: Tensor, value: Tensor, mask: RoundMask) -> Tensor:
    """The twin; it multiplies what is masked by 0, so there the cache must hold numbers."""
    key, value = (t.double().nan_to_num() for t in (key, value))
    return round_attention_twin(query.double(), key, value, mask, query.shape[-1] ** -0.5)


@with_triton
@pytest.mark.parametrize(
    ("committed", "parent", "width", "block", "used", "heads", "head_dim", "splits"),
    [
        ([0], [[-1]], 1, 4, 0, (1, 1), 32, None),  # nothing but itself: fewer rows than a tile
        ([64], [[-1]], 1, 16, 64, (2, 2), 32, None),  # every tile full
        ([37], [[-1, 0]], 2, 4, 64, (4, 2), 8, 1),
        ([5, 0, 64], [[-1, 0, -1], [-1, -1, 1], [-1, -1, -1]], 3, 4, 64, (4, 1), 16, 2),  # shares with nothing in them
        ([129, 3], [[-1, 0], [-1, -1]], 2, 4, 192, (2, 1), 24, 5),  # more shares than tiles
        ([7, 0], [[-1, 0, -1]] * 2, 3, 32, 64, (2, 1), 32, None),  # more rows and scratch than a tile, which may show nothing
        ([10], [[-1, 0]], 2, 16, 64, (1, 1), 128, 2),
        ([200], [[-1, 0]], 2, 4, 64, (2, 1), 8, 2),  # committed beyond what is read
        ([4, 3], [[-1, -1, 0]] * 2, 3, 4, 8, (4, 2), 8, None),  # prefix and scratch fit one tile
    ],
)
def test_kernel_equals_its_twin(
    committed: list[int],
    parent: list[list[int]],
    width: int,
    block: int,
    used: int,
    heads: tuple[int, int],
    head_dim: int,
    splits: int | None,
) -> None:
    query, key, value, mask = random_round(committed, parent, width, block, used, heads, head_dim)
    got = round_attention(query, key, value, mask, head_dim**-0.5, splits)
    assert got.dtype == torch.float32
    close(got.double(), in_float64(query, key, value, mask), atol=2e-6)


@with_triton
@pytest.mark.parametrize(("dtype", "atol"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_half_precision(dtype: torch.dtype, atol: float) -> None:
    query, key, value, mask = random_round([70], [[-1, 0]], 2, 4, 128, (2, 1), 32, dtype)
    got = round_attention(query, key, value, mask, 32**-0.5, 2)
    assert got.dtype == dtype
    close(got.double(), in_float64(query, key, value, mask), atol)


@interpreted
def test_whoever_arrives_last_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs in five orders, of one mask whose counters they leave as they were: the same numbers to the last bit."""
    query, key, value, mask = random_round([129, 3], [[-1, 0], [-1, -1]], 2, 4, 192, (2, 1), 24)
    run, found = GridExecutor.__call__, []

    def shuffled(self: Any, *args: Any, **kwargs: Any) -> None:
        set_grid, places = interpreter_builder.set_grid_idx, list(product(*map(range, self.grid)))
        others = dict(zip(places, random.Random(len(found)).sample(places, len(places)), strict=True))
        with monkeypatch.context() as patch:
            patch.setattr(interpreter_builder, "set_grid_idx", lambda *place: set_grid(*others[place]))
            run(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", shuffled)
    for _ in range(5):
        found.append(round_attention(query, key, value, mask, 24**-0.5, 5))
        (counters,) = mask._kept.values()
        assert not counters.any()
    assert all(torch.equal(found[0], other) for other in found[1:])
    close(found[0].double(), in_float64(query, key, value, mask), atol=2e-6)


@interpreted
@pytest.mark.parametrize(("rows", "strides"), [(1, (0, 0, 1 << 30, 1)), (3, (1 << 30, 0, 16, 1))], ids=["slots", "rows"])
def test_places_beyond_the_reach_of_32_bits(rows: int, strides: tuple[int, ...], tmp_path: Path) -> None:
    """Keys of one row, or of three, 2^30 numbers apart, in a file of 8 GB that takes no room but for what is touched."""
    scored = torch.randn(rows, 1, 3, 16, generator=torch.Generator().manual_seed(1))
    sparse = torch.from_file(str(tmp_path / "sparse"), shared=True, size=(2 << 30) + 48)
    key = sparse.as_strided((rows, 1, 3, 16), strides)
    key.copy_(scored)
    query, mask = torch.ones(rows, 1, 1, 16), RoundMask(torch.tensor([2] * rows), torch.tensor([[-1]] * rows), 1, 1)
    close(round_attention(query, key, key, mask, 0.25), round_attention_twin(query, scored, scored, mask, 0.25), atol=2e-6)


@with_triton
def test_extreme_logits_and_ties() -> None:
    """Scores of 1e4, 0 and -1e4: the weight is shared by the highest that a query sees, wherever they lie."""
    mask = RoundMask(torch.tensor([6]), torch.tensor([[-1, -1]]), 2, 4).to(torch.device(DEVICE))
    query = torch.zeros(1, 1, 8, 16, device=DEVICE)
    query[..., 0] = 1.0
    key = torch.zeros(1, 1, 64 + 8, 16, device=DEVICE)
    key[0, 0, :, 0] = -1e4
    key[0, 0, [1, 4], 0] = 1e4  # two committed slots
    value = torch.arange(72.0, device=DEVICE)[None, None, :, None].repeat(1, 1, 1, 16)
    for splits in (1, 2):
        close(round_attention(query, key, value, mask, 1.0, splits).cpu(), torch.full((1, 8, 1, 16), (1 + 4) / 2))
    key[0, 0, 64 + 5, 0] = 1e4  # and one of the second state's own
    got = round_attention(query, key, value, mask, 1.0)[0, :, 0, 0].cpu()
    close(got, torch.tensor([2.5] * 4 + [(1 + 4 + 69) / 3] * 4), atol=2e-6)
    key[..., 0] = -1e4  # all alike
    own = 64 * 4 + torch.tensor([[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4).sum(1)
    close(round_attention(query, key, value, mask, 1.0)[0, :, 0, 0].cpu(), (own + sum(range(6))) / 10, atol=2e-6)


def test_mask_by_hand() -> None:
    """Two states of one token, the second behind the first, over two slots of which one is committed."""
    sees = RoundMask(torch.tensor([1]), torch.tensor([[-1, 0]]), 2, 1).dense(2)
    assert sees.tolist() == [[[[True, False, True, False], [True, False, True, True]]]]
    alone = RoundMask(torch.tensor([1]), torch.tensor([[-1, -1]]), 2, 1)
    assert alone.dense(2).tolist() == [[[[True, False, True, False], [True, False, False, True]]]]
    for used in (2, 1):
        assert alone.bias(used, torch.float64).exp().bool().tolist() == alone.dense(used).tolist()  # type: ignore[union-attr]
    assert alone.to("meta").committed.is_meta


# ------------------------------------------------------------------ from the decoder to the kernel


def a_round(model: MRPForCausalLM) -> tuple[Any, ...]:
    """Arguments of a forward of two states behind a prefix of 4, without its mask, the mask and its tensor."""
    cache = model.block_cache(1, 8, 8, with_head=False)
    first = torch.arange(4)[None]
    cache.target(0, 4, prefill=True)
    model.backbone(first + 1, first, torch.ones(1, 1, 4, 4, dtype=torch.bool), cache)
    cache.target(4, 8)
    mask = RoundMask(torch.tensor([4]), torch.tensor([[-1, 0]]), 2, 4, Dispatch(False))
    return torch.arange(8)[None] + 9, torch.arange(4, 12)[None], cache, mask


@torch.inference_mode()
@pytest.mark.parametrize("called", [False, True], ids=["fused", "called"])
def test_the_twin_is_what_runs_without_kernels(called: bool) -> None:
    """In layers that are fused, and in those that have to be called; other masks meanwhile are attended to as before."""
    model = make_model()
    if called:
        model.model.layers[0].register_forward_hook(lambda *_: None)
    ids, positions, cache, mask = a_round(model)
    expected = model.backbone(ids, positions, mask.dense(4), cache)
    with round_attention_of(model):
        torch.testing.assert_close(model.backbone(ids, positions, mask, cache), expected, rtol=0, atol=1e-12)
        assert torch.equal(model.backbone(ids, positions, mask.dense(4), cache), expected)


def test_the_last_to_leave_puts_the_name_back() -> None:
    model, other = make_model(), make_model(1)
    inside, leave = threading.Event(), threading.Event()

    def run() -> None:
        with round_attention_of(model):
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=run)
    with round_attention_of(model):
        thread.start()
        assert inside.wait(30)
        assert (model.config._attn_implementation, other.config._attn_implementation) == (IN_ROUNDS, "sdpa")
    assert model.config._attn_implementation == IN_ROUNDS
    leave.set()
    thread.join()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("change", ["another attention", "a compiled layer"])
def test_what_takes_no_round_masks(change: str) -> None:
    model = make_model().float()
    assert takes_round_masks(model, FORCED)
    assert takes_round_masks(model, Dispatch(False))
    if change == "another attention":
        model.set_attn_implementation("eager")
        remedy = "attends by 'eager'.*use attn_implementation='sdpa'"
    else:
        model.model.layers[0].compile(backend="eager")
        remedy = "has parts that were compiled.*leave it uncompiled"
    assert not takes_round_masks(model, Dispatch())
    with pytest.raises(ValueError, match=remedy):
        takes_round_masks(model, FORCED)


def test_a_compiled_model_decodes_as_it_is() -> None:
    model, options = make_model(), {"decoding": "mrp_spec", "max_new_tokens": 5, "num_draft_states": 3}
    expected, graphs = texts(model, [[1, 2, 3]], **options), list[Any]()
    for part in (model.model, model.mrp_head):
        part.compile(backend=lambda graph, _: graphs.append(graph) or graph)  # type: ignore[union-attr]
    assert texts(model, [[1, 2, 3]], **options) == expected
    assert not graphs
