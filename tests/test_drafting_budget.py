"""How many states a round drafts at each head pass, and at most."""

import pytest

from modeling_mrp.rules.drafting import growth, reachable


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
