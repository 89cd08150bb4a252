"""BlockCache: its room, and what of it can be gone on from; what it writes and moves is in every decode."""

import torch

from modeling_mrp.networks.cache import BlockCache

CPU = torch.device("cpu")
ROWS, HEADS, WIDTH, CAPACITY, SCRATCH = 3, 2, 4, 12, 8


def new_cache(devices: list[torch.device], **options: int | bool) -> BlockCache:
    return BlockCache(ROWS, HEADS, WIDTH, devices, CAPACITY, SCRATCH, torch.float64, **options)  # type: ignore[arg-type]


def test_what_can_be_reused() -> None:
    """The longest common prefix in whole blocks, as far as it is held; with the head as far as that can read it, too."""
    cache = new_cache([CPU])
    text = list(range(1, 13))
    cache.hold([text, text, text], [12, 8, 12], [4, 8, 0], [8, 8, 0])
    changed = [*text[:9], 99, *text[10:], 5, 6]
    assert cache.reusable([text, text, changed], [12, 12, 12], 4, False) == [12, 8, 8]
    assert cache.reusable([text, text, changed], [12, 12, 12], 4, True) == [8, 8, 0]
    assert cache.reusable([text, text, changed], [7, 4, 12], 4, False) == [4, 4, 8]
    assert cache.reusable([text[:6], [], changed], [6, 0, 12], 4, False) == [4, 0, 8]
    cache.empty()
    assert cache.reusable([text] * 3, [12] * 3, 4, False) == [0, 0, 0]


def test_room_for_more() -> None:
    """The same cache where there is room; else a bigger one with what was held, each row so many times."""
    cache = new_cache([CPU, CPU])
    known = torch.arange(ROWS * HEADS * 4 * WIDTH, dtype=torch.float64).view(ROWS, HEADS, 4, WIDTH)
    cache.target(0, 4)
    cache.update(known, -known, 1)
    cache.hold([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]], [4, 4, 0], [4, 0, 0], [4, 4, 0])
    assert cache.with_room(ROWS, CAPACITY - 4, SCRATCH) is cache
    bigger = cache.with_room(2 * ROWS, 16, 4)
    assert (bigger.rows, bigger.capacity, bigger.scratch) == (6, 16, SCRATCH)
    assert bigger.held == [4, 4, 4, 4, 0, 0]
    assert bigger.head_held == [4, 4, 0, 0, 0, 0]
    assert bigger.ids[:3] == [[1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8]]
    bigger.target(0, 4)
    assert torch.equal(bigger.read[1][0], known.repeat_interleave(2, 0))
    assert cache.held == [4, 4, 0]
