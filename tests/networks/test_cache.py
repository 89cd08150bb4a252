"""BlockCache: what it writes, moves, exchanges and remembers, on one device and on several."""

import torch
from torch import Tensor

from modeling_mrp.networks.cache import LEAST_BUCKET, BlockCache

CPU, META = torch.device("cpu"), torch.device("meta")
ROWS, HEADS, WIDTH, CAPACITY, SCRATCH = 3, 2, 4, 12, 8


def new_cache(devices: list[torch.device], **options: int | bool) -> BlockCache:
    return BlockCache(ROWS, HEADS, WIDTH, devices, CAPACITY, SCRATCH, torch.float64, **options)  # type: ignore[arg-type]


def numbered(first: int, length: int, rows: int = ROWS) -> Tensor:
    """[rows, heads, length, head_dim] of different numbers."""
    count = rows * HEADS * length * WIDTH
    return torch.arange(first, first + count, dtype=torch.float64).view(rows, HEADS, length, WIDTH)


def filled(devices: list[torch.device]) -> tuple[BlockCache, dict[int, Tensor]]:
    """All slots of all layers with different numbers, values the negative of keys; and the keys by layer."""
    cache, known = new_cache(devices), {}
    cache.target(0, CAPACITY + SCRATCH)
    for layer, device in enumerate(devices):
        known[layer] = numbered(10_000 * layer, CAPACITY + SCRATCH)
        cache.update(known[layer].to(device), -known[layer].to(device), layer)
    return cache, known


def shown(cache: BlockCache, layer: int) -> Tensor:
    """Keys of all slots of a layer, whose values are their negatives."""
    cache.target(0, CAPACITY + SCRATCH)
    keys, values = cache.read(layer)
    assert torch.equal(values, -keys)
    return keys.clone()


def test_what_is_written_is_what_attention_reads() -> None:
    """In place, up to the target's end; other layers, and rows that are not active, keep what they have."""
    cache, known = filled([CPU, CPU])
    cache.active = 2
    assert cache.target(5, 6) == 5
    new = numbered(-999, 6, rows=2)
    keys, values = cache.update(new, -new, 1)
    assert torch.equal(keys, torch.cat([known[1][:2, :, :5], new], 2))
    assert torch.equal(values, -keys)
    cache.deferred = True
    assert cache.update(new, new, 0)[0] is new, "attention stores them itself"
    cache.deferred, cache.active = False, ROWS
    assert torch.equal(shown(cache, 0), known[0])
    known[1][:2, :, 5:11] = new
    assert torch.equal(shown(cache, 1), known[1])
    assert cache.get_seq_length() == 0


def test_where_shapes_are_fixed_slots_come_in_powers_of_two() -> None:
    cache = new_cache([CPU], fixed=True)
    assert [cache.target(used, 4) for used in (0, 7, 255, 256, 257, 700)] == [256, 256, 256, 256, 512, 1024]
    assert (cache.begin, cache.end) == (1024, 1028)
    assert cache.target(7, 4, prefill=True) == 7
    assert cache.nbytes == ROWS * (LEAST_BUCKET + SCRATCH) * 2 * HEADS * WIDTH * 8
    big = BlockCache(1, 1, 1, [CPU], 300, 8, torch.bfloat16, fixed=True)
    assert big.nbytes == 2 * 2 * (512 + 8)
    assert new_cache([CPU] * 3, hidden_size=5).nbytes == ROWS * 8 * (
        (SCRATCH + CAPACITY) * 3 * 2 * HEADS * WIDTH + CAPACITY * 5
    )


def test_move_copies_blocks_of_some_rows_and_layers() -> None:
    """Layers on two devices in turn; `meta` stands for another device, whose numbers cannot be read."""
    devices = [CPU, META, CPU, META, CPU]
    cache, known = filled(devices)
    cache.move(range(1, 4), [(0, 12, 4), (2, 16, 0), (2, 12, 8)], 4)
    expected = known[2].clone()
    expected[0, :, 4:8] = known[2][0, :, 12:16]
    expected[2, :, 0:4] = known[2][2, :, 16:20]
    expected[2, :, 8:12] = known[2][2, :, 12:16]
    assert torch.equal(shown(cache, 2), expected)
    for layer in (0, 4):
        assert torch.equal(shown(cache, layer), known[layer])


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
    cache, known = filled([CPU, CPU])
    cache.hold([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]], [4, 4, 0], [4, 0, 0], [4, 4, 0])
    assert cache.with_room(ROWS, CAPACITY - 4, SCRATCH) is cache
    bigger = cache.with_room(2 * ROWS, 16, 4)
    assert (bigger.rows, bigger.capacity, bigger.scratch) == (6, 16, SCRATCH)
    assert bigger.held == [4, 4, 4, 4, 0, 0]
    assert bigger.head_held == [4, 4, 0, 0, 0, 0]
    assert bigger.ids[:3] == [[1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8]]
    bigger.target(0, 4)
    assert torch.equal(bigger.read(1)[0], known[1][:, :, :4].repeat_interleave(2, 0))
    assert cache.held == [4, 4, 0]
