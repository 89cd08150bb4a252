"""How many states a round drafts: at each head pass, at most, and by what earlier rounds came to."""

import pytest

from modeling_mrp.rules.drafting import Budget, growth, reachable


@pytest.mark.parametrize(
    ("width", "passes", "sizes"),
    [
        (8, 1, [7]),
        (8, 2, [4, 7]),
        (8, 3, [3, 5, 7]),
        (8, 7, [1, 2, 3, 4, 5, 6, 7]),
        (8, 20, [1, 2, 3, 4, 5, 6, 7]),
        (8, 0, []),
        (1, 1, []),
        (1, 5, []),
        (2, 1, [1]),
        (2, 5, [1]),
        (3, 5, [1, 2]),
    ],
)
def test_growth(width: int, passes: int, sizes: list[int]) -> None:
    """Even steps up to all states but the last, which no estimate of its own would change; never the same size twice."""
    assert growth(width, passes) == sizes


def test_reachable() -> None:
    """One mask: the state, the clean one, the next block's. Two: the state and two ways on, each with three."""
    assert [reachable(n, 5, 1000) for n in range(4)] == [2, 3, 1 + 2 * 3, 1 + 3 * 7]
    assert [reachable(n, 1, 1000) for n in range(4)] == [2, 3, 4, 5]
    assert reachable(3, 2, 1000) == 1 + 2 * 7
    assert [reachable(3, 3, enough) for enough in (1, 8, 22, 23)] == [1, 8, 22, 22]
    assert reachable(64, 64, 7) == 7


def budget(right: list[float], bound: int | None, head_cost: float = 0.0, state_tokens: int = 10) -> Budget:
    made = Budget(len(right), state_tokens, bound, head_cost)
    made.right = right
    return made


@pytest.mark.parametrize(
    ("right", "bound", "head_cost", "width"),
    [
        ([1.0, 0.0, 0.0], None, 5.0, 3),  # time does not grow
        ([1.0, 0.1, 0.1], 30, 0.0, 3),  # three states fit
        ([1.0, 0.1, 0.1], 27, 0.0, 2),  # 1.1 of two in one unit, 1.2 of three in 30/27
        ([1.0, 0.9, 0.9], 20, 0.0, 2),  # 1.9, but 2.8 / 1.5
        ([1.0, 1.0, 1.0], 20, 0.0, 2),  # 2 either way: the fewer
        ([1.0, 0.6, 0.1], 15, 0.0, 2),  # 1, 1.6 / (4/3), 1.7 / 2
        ([1.0, 0.3, 0.1], 15, 0.0, 1),  # 1, 1.3 / (4/3)
        ([1.0, 0.2, 0.9], 15, 0.0, 3),  # 1, 0.9, 2.1 / 2
        ([1.0, 0.5, 0.4], 30, 1.0, 1),  # head passes cost as much: 1, 0.75, 0.95
        ([1.0, 0.8, 0.4], 30, 1.0, 3),  # 1.1
        ([1.0, 0.99, 0.99], 5, 0.0, 1),  # one state fills the device
        ([1.0], 5, 0.0, 1),
        ([1.0], None, 0.0, 1),
    ],
)
def test_width(right: list[float], bound: int | None, head_cost: float, width: int) -> None:
    """States of 10 tokens, by the chance that each is come by."""
    assert budget(right, bound, head_cost).width() == width


def test_a_full_device_takes_no_state_more_whatever_the_rounding() -> None:
    """Beyond what fills the device, drafts that are all right are worth the same however many there are: the fewest."""
    for tokens in range(1, 40):
        for bound in range(1, 9 * tokens + 1):
            assert budget([1.0] * 9, bound, state_tokens=tokens).width() == -(-bound // tokens)


def test_a_budget_learns_and_recovers() -> None:
    """A tenth of the way to what was seen of slots that were submitted; a hundredth of the way to 1 for the others."""
    it = budget([1.0, 0.5, 0.5, 0.5], 30)
    it.learn([4, 3, 0], 4)
    assert it.right == pytest.approx([1.0, 0.5 + 0.1 * 0.25, 0.5 - 0.1 * 0.5, 0.5 + 0.01 * 0.5])
    it.learn([2], 2)
    assert it.right == pytest.approx([1.0, 0.525 + 0.01 * 0.475, 0.45 + 0.01 * 0.55, 0.505 + 0.01 * 0.495])


def test_recovery_brings_a_width_back() -> None:
    """Two states for 3/2 units: drafts that are always wrong are given up after 0.9^n < 1/2, n = 7 rounds, and are tried again
    when 1 - 0.522 * 0.99^n > 1/2, n = 5 rounds later; one wrong round more is enough then."""
    it = Budget(2, 15, 20, 0.0)
    widths = []
    for _ in range(20):
        widths.append(it.width())
        it.learn([1, 0][: widths[-1]], 1)
    assert widths == [2] * 7 + [1] * 5 + [2] + [1] * 7
