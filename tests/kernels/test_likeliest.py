"""The kernel that lists the likeliest tokens beside a pick, against its twin and a slow definition:
interpreted on a CPU, compiled where there is a GPU."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from modeling_mrp.kernels import pick
from modeling_mrp.kernels.dispatch import Dispatch, triton
from modeling_mrp.kernels.pick import LIST, MOST_LISTED, Unembedding
from modeling_mrp.networks.picker import Picker
from modeling_mrp.rules.draft import gumbel, noise_key

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton is None, reason="needs triton"),
    # numpy's, of infinities, where a kernel is interpreted
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.usefixtures("new_memory_is_nan"),  # integers are their largest
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")


def logits_of(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return (torch.randn(rows, vocab, generator=generator) * 4).to(DEVICE, dtype)


def keys_of(count: int) -> Tensor:
    n = torch.arange(count, device=DEVICE)
    return noise_key(n * 7_000_000_007, n, 1 + n % 4)


def vocabulary(size: int, temperature: float = 1.0) -> Unembedding:
    return Unembedding(torch.zeros(size, 1, device=DEVICE), 0, temperature)


def defined(
    logits: list[float],
    temperature: float,
    least: float,
    key: int | None,
    count: int,
) -> dict[str, Any]:
    """One row by its definition, in float64: what it lists, and what it picks."""
    ids = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    scores = torch.tensor(logits, dtype=torch.float64) / temperature
    kept = [logits[token] >= least and logits[token] > -INF for token in range(len(logits))]
    listed = ids[:count]

    def beside(token: int) -> float:
        others = scores.clone()
        others[token] = -INF
        return (scores[token] - others.logsumexp(0)).item()

    others = scores.clone()
    others[[token for token in listed if kept[token]]] = -INF
    candidates = torch.where(torch.tensor(kept), scores, -INF)
    if key is not None:
        candidates += torch.from_numpy(gumbel([key], torch.arange(len(logits)).numpy()[None])[0])
    token = int(candidates.argmax())
    return {
        "token": token,
        "log_odds": beside(token),
        "ids": listed,
        "scores": [scores[token].item() if kept[token] else -INF for token in listed],
        "other_logsumexp": [others.logsumexp(0).item()],
    }


class Listed(NamedTuple):
    """What the kernel returns, its candidates taken apart."""

    token: Tensor
    log_odds: Tensor
    ids: Tensor
    scores: Tensor
    other_logsumexp: Tensor


def taken_apart(token: Tensor, odds: Tensor, candidates: Tensor) -> Listed:
    count = candidates.shape[1] // 2
    return Listed(token, odds, *candidates.split([count, count, 1], 1))


def close(found: Listed, wanted: Listed) -> None:
    """Two results are one, but for rounding."""
    assert found.token.tolist() == wanted.token.tolist()
    assert found.ids.tolist() == wanted.ids.tolist()
    close_numbers = {"rtol": 1e-5, "atol": 3e-5, "equal_nan": True}
    for result, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(result.double(), expected.double(), **close_numbers)


@pytest.fixture
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs read several tiles of the vocabulary, one after the other, as they do of many
    rows."""
    monkeypatch.setattr(pick, "processors", lambda _: 1)


@pytest.mark.usefixtures("small_gpu")
@pytest.mark.parametrize("way", ["greedy", "sampled", "truncated"])
@pytest.mark.parametrize(
    ("rows", "vocab", "count", "dtype"),
    [
        (1, 17, 16, torch.float32),
        (2, 9, 64, torch.float32),  # all, where there are fewer
        (2, 1030, 64, torch.float32),  # of which a slice has but six
        (3, 5000, 5, torch.float32),
        (3, 2600, 24, torch.float32),
        (2, 300, 7, torch.float16),
    ],
)
def test_lists_by_their_definition(
    rows: int, vocab: int, count: int, dtype: torch.dtype, way: str
) -> None:
    """The kernel and its twin, in float64."""
    logits = logits_of(rows, vocab, dtype)
    logits[:, 0] = -INF  # the mask id
    keys = None if way == "greedy" else keys_of(rows)
    least = logits.topk(4).values[:, -1].contiguous() if way == "truncated" else None
    unembedding = vocabulary(vocab, 1.0 if way == "greedy" else 0.7)
    found = taken_apart(*LIST.launch(unembedding, logits, least, keys, count))
    wide = None if least is None else least.double()
    twin = taken_apart(*LIST.twin(unembedding, logits.double(), wide, keys, count))
    assert found.token.dtype == torch.long
    assert {value.dtype for value in found[1:]} == {torch.float32}
    if dtype == torch.float32:
        close(found, twin)
    for row in range(rows):
        wanted = defined(
            logits[row].double().tolist(),
            unembedding.temperature,
            -INF if least is None else least[row].item(),
            None if keys is None else int(keys[row]),
            count,
        )
        assert found.token[row] == twin.token[row] == wanted["token"]
        assert found.ids[row].tolist() == wanted["ids"]
        for name in ("log_odds", "scores", "other_logsumexp"):
            value = getattr(found, name)[row].tolist()
            assert value == pytest.approx(wanted[name], rel=1e-5, abs=3e-5), name


def test_a_published_vocabulary() -> None:
    """As a program reads it on a GPU: slices of one tile, 64 tokens of each."""
    logits = logits_of(3, 151_936)
    logits[1] *= 4  # nearly certain
    for keys, count in ((None, 16), (keys_of(1), 64)):
        rows = logits[:2] if keys is None else logits[2:]
        found = taken_apart(*LIST.launch(vocabulary(151_936), rows, None, keys, count))
        twin = LIST.twin(vocabulary(151_936), rows.double(), None, keys, count)
        close(found, taken_apart(*twin))
        assert found.ids.equal(rows.topk(count).indices.float())


@pytest.mark.usefixtures("small_gpu")
@pytest.mark.parametrize("count", [16, 64])
def test_of_equals_the_first_are_listed(count: int) -> None:
    """Within a tile, over tiles of a program and over programs; zeros of both signs are equal. What
    is barred comes last, the first of it first."""
    logits = torch.full((4, 8000), -INF, device=DEVICE)
    logits[0] = 0.0
    logits[1, [7, 900, 600, 1900, 7000]] = 5.0
    logits[2, [4000, 40, 2]] = torch.tensor([0.0, -0.0, 1.0], device=DEVICE)
    found = taken_apart(*LIST.launch(vocabulary(8000), logits, None, None, count))
    assert found.token.tolist() == [0, 7, 2, 0]
    barred = list(range(count + 5))
    assert found.ids[0].tolist() == barred[:count]
    places = [7, 600, 900, 1900, 7000]
    others = [token for token in barred if token != 7]
    assert found.ids[1].tolist() == (places + others)[:count]
    others = [token for token in barred if token not in (2, 40)]
    assert found.ids[2].tolist() == [2, 40, 4000, *others][:count]
    assert found.ids[3].tolist() == barred[:count]
    assert found.scores[3].eq(-INF).all()
    assert found.log_odds[3].isnan()
    nothing = logits[3:].repeat(2, 1)
    assert LIST.launch(vocabulary(8000), nothing, None, keys_of(2), count)[0].tolist() == [0, 0]
    twin = taken_apart(*LIST.twin(vocabulary(8000), logits, None, None, count))
    close(
        Listed._make(part[1:] for part in found),
        Listed._make(part[1:] for part in twin),
    )


@pytest.mark.usefixtures("small_gpu")
def test_extremes() -> None:
    """As the twin: where all others are barred, the odds are infinite; one logit far above all;
    NaN and infinity, of which NaN is more."""
    logits = torch.full((6, 700), -INF, device=DEVICE)
    logits[0, 3] = 2.0
    logits[1:] = torch.arange(700, device=DEVICE) / 700
    logits[1, 9] = 60.0
    logits[2, 5] = NAN
    logits[3, 5] = INF
    logits[4, 5], logits[4, 6] = INF, NAN
    logits[5, 5], logits[5, 6] = INF, INF
    found = taken_apart(*LIST.launch(vocabulary(700), logits, None, None, 8))
    close(found, taken_apart(*LIST.twin(vocabulary(700), logits.double(), None, None, 8)))
    assert found.log_odds.tolist()[0] == INF
    assert found.log_odds[2:].isnan().all()
    assert found.token.tolist() == [3, 9, 5, 5, 6, 5]
    assert found.other_logsumexp[0] == -INF


def test_a_picker_lists_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same picks with it and without; lists that are longer than it makes are made in
    PyTorch."""
    weight = torch.randn(300, 6, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    hidden = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    launched: list[int] = []
    launch = LIST.launch

    def noted(*given: Any) -> Any:
        launched.append(given[-1])
        return launch(*given)

    monkeypatch.setattr(LIST, "launch", noted)
    for count in (16, MOST_LISTED + 1):
        options: dict[str, Any] = {"candidates": count, "entropy": True}
        fused, plain = (
            Picker(weight, 17, 0.7, dispatch=Dispatch(forced), **options)(hidden)
            for forced in (True, False)
        )
        for found, wanted in zip(fused, plain, strict=True):
            assert (found is None) is (wanted is None)
            if found is not None:
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=3e-5)
    assert launched == [16]
