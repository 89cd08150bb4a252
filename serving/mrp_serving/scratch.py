"""Rows and pages that a round borrows from the engine's pools, for the states that a row has beyond
its first one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class BorrowedSlots:
    """The rows and slots that a round has borrowed from the engine's pools. They give each row of a
    batch room for `width` more states than its first one.

    Attributes:
        rows: For each row of the batch, `width` rows of the pool that maps positions to slots.
        slots: int64 [rows * width, block], slots of the KV pool, in whole pages.
        swapped: For each borrowed block that a request keeps: maps its index in `slots` to the
            slots that the request gives back in its place, int64 [block].
    """

    rows: list[list[int]]
    slots: Tensor
    swapped: dict[int, Tensor] = field(default_factory=dict, init=False)

    @property
    def width(self) -> int:
        """The number of states per row, beyond the row's first one, for which room is borrowed."""
        return len(self.rows[0]) if self.rows else 0

    def returned_slots(self) -> Tensor:
        """Return the slots that go back to the engine's pool when the round is over, [rows * width
        * block]."""
        if not self.swapped:
            return self.slots.flatten()
        blocks = []
        for index, slots in enumerate(self.slots.unbind()):
            blocks.append(self.swapped.get(index, slots))
        return torch.cat(blocks)


@contextmanager
def borrow_slots(
    pool: Any, allocator: Any, evict: Callable[[int], Any], batch: int, width: int, block: int
) -> Iterator[BorrowedSlots]:
    """Context manager for one round: borrow rows and slots of the engine's pools for up to `width`
    more states per row, as many as are free, and yield them. At the end of the context, they go
    back to the pools.

    If too few are free for one more state per row, nothing is borrowed, and the `width` of the
    yielded object is 0. The round then scores one state per row, on the row's own slots.

    Args:
        pool: The engine's map of positions to slots (`alloc_rows`, `free_rows`, `available_size`).
        allocator: The allocator of slots (`alloc`, `free_segment`, `available_size`).
        evict: Called with a number of slots; frees this many slots of cached prefixes that are not
            in use.
        batch: The number of rows of the batch.
        width: The number of states wanted per row beyond its first one.
        block: The number of slots of a state.
    """
    width = min(width, pool.available_size() // batch)
    if width and allocator.available_size() < batch * width * block:
        evict(batch * width * block)
    width = min(width, allocator.available_size() // (batch * block)) if width else 0
    rows = pool.alloc_rows(batch * width) if width else []
    loan = BorrowedSlots(
        [[] for _ in range(batch)], torch.empty(0, block, dtype=torch.long, device=pool.device)
    )
    try:
        if rows and (slots := allocator.alloc(batch * width * block)) is not None:
            loan = BorrowedSlots(
                [rows[row_index * width : (row_index + 1) * width] for row_index in range(batch)],
                slots.long().view(-1, block),
            )
        yield loan
    finally:
        if loan.width:
            # whole pages in order, so the pool need not sort them
            allocator.free_segment(loan.returned_slots(), start_pos=0)
        if rows:
            pool.free_rows(rows)
