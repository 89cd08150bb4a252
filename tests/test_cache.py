"""BlockCache: what it writes, commits and weighs, and a model that reads it, packed and compiled."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import BLOCK, MASK, close, random_ids
from torch import Tensor

from modeling_mrp import MRPForCausalLM
from modeling_mrp.networks.cache import BlockCache

CPU, META = torch.device("cpu"), torch.device("meta")
ROWS, KV_HEADS, WIDTH, CAPACITY, SCRATCH = 3, 2, 5, 12, 8


def new_cache(layer_devices: list[torch.device]) -> BlockCache:
    cache = BlockCache(ROWS, KV_HEADS, WIDTH, layer_devices, CAPACITY, SCRATCH, torch.float64)
    cache.clear(range(len(layer_devices)), 0)
    return cache


def numbered(first: int, length: int) -> Tensor:
    """[rows, heads, length, head_dim] of different numbers."""
    count = ROWS * KV_HEADS * length * WIDTH
    return torch.arange(first, first + count, dtype=torch.float64).view(ROWS, KV_HEADS, length, WIDTH)


def slots_of(cache: BlockCache, layer: int) -> tuple[Tensor, Tensor]:
    """Copies of all committed slots of a layer, read without writing."""
    cache.target_slots(CAPACITY, 0)
    nothing = numbered(0, 0)
    keys, values = cache.update(nothing, nothing, layer)
    return keys.clone(), values.clone()


def test_update_writes_in_place_what_attention_reads() -> None:
    cache = new_cache([CPU, CPU])
    cache.target_slots(4, 4)
    slots = numbered(1000, 4), numbered(2000, 4)
    keys, values = cache.update(*slots, 1)
    for read, written in zip((keys, values), slots, strict=True):
        close(read, torch.cat([torch.zeros_like(written), written], 2), atol=0)  # slots 0 to 7
    cache.target_scratch(6, 7)
    scratch = numbered(3000, 6), numbered(4000, 6)
    again_keys, again_values = cache.update(*scratch, 1)
    for read, new, old in zip((again_keys, again_values), scratch, slots, strict=True):
        close(read, torch.cat([new, torch.zeros_like(new[:, :, :4]), old[:, :, :3]], 2), atol=0)
    storage = keys.untyped_storage().data_ptr()
    assert {t.untyped_storage().data_ptr() for t in (keys, values, again_keys, again_values)} == {storage}
    assert again_keys[:, :, 6:].data_ptr() == keys.data_ptr()  # the scratch ends where the slots begin
    cache.target_slots(4, 4)
    cache.update(-slots[0], -slots[1], 1)
    close(keys[:, :, 4:], -slots[0], atol=0)  # the view handed out before shows it
    assert slots_of(cache, 0)[0].eq(0).all()  # the other layer is untouched


def test_commit_copies_one_block_of_some_rows_and_layers() -> None:
    """Layers on two devices in turn; `meta` stands for another device, whose numbers cannot be read."""
    devices = [CPU, META, CPU, META, CPU]
    cache = new_cache(devices)
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    for layer in range(5):
        cache.target_slots(0, CAPACITY)
        kept[layer] = numbered(10_000 * layer, CAPACITY), numbered(10_000 * layer + 5000, CAPACITY)
        cache.update(*(t.to(devices[layer]) for t in kept[layer]), layer)
    cache.target_scratch(SCRATCH, CAPACITY)
    fresh = {layer: (-numbered(10_000 * layer + 1, SCRATCH), -numbered(10_000 * layer + 5001, SCRATCH)) for layer in range(5)}
    for layer in range(5):
        cache.update(*(t.to(devices[layer]) for t in fresh[layer]), layer)
    which = torch.tensor([row in (0, 2) for row in range(ROWS)])
    source, start = torch.zeros(ROWS, dtype=torch.long), torch.full((ROWS,), 4)
    source[2], source[0], start[2], start[0] = 4, 1, 8, 0
    cache.commit(SCRATCH, source, start, which, 4, range(1, 4))
    for layer in (0, 2, 4):
        for got, before, new in zip(slots_of(cache, layer), kept[layer], fresh[layer], strict=True):
            expected = before.clone()
            if layer == 2:
                expected[2, :, 8:12] = new[2, :, 4:8]
                expected[0, :, 0:4] = new[0, :, 1:5]
            close(got, expected, atol=0)


def test_commit_counts_from_the_scratch_of_the_last_forward() -> None:
    """A forward of 4 of the 8 scratch tokens uses the last 4."""
    cache = new_cache([CPU])
    cache.target_scratch(4, 0)
    new = numbered(1, 4)
    keys, _ = cache.update(new, -new, 0)
    close(keys, new, atol=0)
    which = torch.arange(ROWS) == 1
    cache.commit(4, torch.zeros(ROWS, dtype=torch.long), torch.full((ROWS,), 4), which, 4, range(1))
    expected = torch.zeros(ROWS, KV_HEADS, CAPACITY, WIDTH, dtype=torch.float64)
    expected[1, :, 4:8] = new[1]
    keys, values = slots_of(cache, 0)
    close(keys, expected, atol=0)
    close(values, -expected, atol=0)


def test_nbytes() -> None:
    per_layer = 2 * ROWS * KV_HEADS * (SCRATCH + CAPACITY) * WIDTH * 8
    assert new_cache([CPU] * 3).nbytes == 3 * per_layer
    assert new_cache([CPU, META, META]).nbytes == 3 * per_layer
    half = BlockCache(1, 1, 1, [CPU], 4, 4, torch.bfloat16)
    assert half.nbytes == 2 * 8 * 2


@pytest.mark.usefixtures("exact_norms")
@torch.no_grad()
def test_packed_scoring_equals_separate_forwards(random_model: MRPForCausalLM) -> None:
    """Two rows with prefixes of 2 blocks and 1, three states side by side: two of the same block and, behind the second,
    the block after it. Then the second state is committed in row 0 alone, and three states follow in the next block."""
    model, width = random_model, 3
    prefix = [random_ids(20, 8).tolist(), random_ids(21, 4).tolist()]
    cache = model.block_cache(2, 16, width * BLOCK, with_head=True)
    cache.clear(range(len(cache.layer_devices)), 0)
    positions = torch.arange(8).expand(2, 8)
    mask = (positions[:, None] // BLOCK <= positions[:, :, None] // BLOCK)[:, None]
    cache.target_slots(0, 8)
    ids = torch.tensor([prefix[0], prefix[1] + [MASK] * 4])  # row 1's second block is not committed: it must not be read
    model.residual(ids, model.backbone(ids, positions, mask, cache), positions, mask, cache)

    def check(states: list[list[list[int]]], offsets: list[int]) -> None:
        """Scores `states` [row][state], each `offsets[state]` blocks behind its row's prefix, packed and one by one."""
        used = max(map(len, prefix))
        sees = torch.zeros(2, 1, width * BLOCK, width * BLOCK + used, dtype=torch.bool)
        where = torch.zeros(2, width * BLOCK, dtype=torch.long)
        for row in range(2):
            sees[row, 0, :, width * BLOCK : width * BLOCK + len(prefix[row])] = True
            for state, offset in enumerate(offsets):
                own = slice(state * BLOCK, (state + 1) * BLOCK)
                sees[row, 0, own, own] = True
                if offset:
                    sees[row, 0, own, own.start - BLOCK : own.start] = True
                where[row, own] = len(prefix[row]) + offset * BLOCK + torch.arange(BLOCK)
        ids = torch.tensor(states).flatten(1)
        cache.target_scratch(width * BLOCK, used)
        hidden = model.backbone(ids, where, sees, cache)
        residual = model.residual(ids, hidden, where, sees, cache)
        for row in range(2):
            for state, offset in enumerate(offsets):
                alone = torch.tensor([prefix[row] + (states[row][state - 1] if offset else []) + states[row][state]])
                at = torch.arange(alone.shape[1])[None]
                causal = (at[:, None] // BLOCK <= at[:, :, None] // BLOCK)[:, None]
                h_a = model.backbone(alone, at, causal)
                own = slice(state * BLOCK, (state + 1) * BLOCK)
                close(hidden[row, own], h_a[0, -BLOCK:])
                close(residual[row, own], model.residual(alone, h_a, at, causal)[0, -BLOCK:])

    first = [random_ids(22 + row, 3, BLOCK).tolist() for row in range(2)]
    first[0][0][1] = first[1][0][3] = MASK
    check(first, [0, 0, 1])
    layers = range(model.config.num_hidden_layers + model.config.num_nextn_predict_layers)
    which = torch.tensor([True, False])
    cache.commit(width * BLOCK, torch.tensor([BLOCK, 0]), torch.tensor([8, 0]), which, BLOCK, layers)
    prefix[0] += first[0][1]
    check([random_ids(24 + row, 3, BLOCK).tolist() for row in range(2)], [0, 0, 0])


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
@torch.no_grad()
def test_compiled_backbone_with_a_block_cache(random_model: MRPForCausalLM) -> None:
    """One graph without breaks, and no second one for the next round of the same shape."""
    graphs = []

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # as backend="eager" does

    compiled = torch.compile(random_model.backbone, fullgraph=True, dynamic=False, backend=counted)
    caches = [random_model.block_cache(2, 16, 8, with_head=False) for _ in range(2)]
    positions = torch.arange(8).expand(2, 8)
    mask = (positions[:, None] // BLOCK <= positions[:, :, None] // BLOCK)[:, None]
    for cache in caches:
        cache.target_slots(0, 8)
        random_model.backbone(random_ids(30, 2, 8), positions, mask, cache)
    sees = torch.ones(2, 1, 8, 16, dtype=torch.bool)
    sees[0, 0, :, 12:] = False
    for turn in range(3):
        ids = random_ids(31 + turn, 2, 8)
        results = []
        for cache, backbone in zip(caches, (random_model.backbone, compiled), strict=True):
            cache.target_scratch(8, 8)
            results.append(backbone(ids, positions + 4 * turn, sees, cache))
            cache.commit(8, torch.tensor([0, 4]), torch.tensor([4, 4]), torch.tensor([False, True]), BLOCK, range(2))
        close(results[1], results[0])
    assert len(graphs) == 1
