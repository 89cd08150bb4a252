"""Rows and pages that a round borrows from the engine's pools, for the states beside each row's own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Borrowed:
    """Room for `width` more states of each of a batch's rows.

    Attributes:
        rows: [rows, width] long, rows of the pool that maps positions to slots.
        slots: [rows, width, block] long, slots of the KV pool: whole pages.
    """

    rows: Tensor
    slots: Tensor

    @property
    def width(self) -> int:
        """States of a row, beside its own."""
        return self.rows.shape[1]

    def swap(self, row: Tensor, place: Tensor, slots: Tensor) -> Tensor:
        """Take the slots of some states over, and give others back in their place.

        Args:
            row: [n] long, of the batch.
            place: [n] long, of the row's borrowed states.
            slots: [n, block] long, what is given back.

        Returns:
            [n, block] long, what is taken over.
        """
        taken = self.slots[row, place]
        self.slots[row, place] = slots
        return taken


def affordable(width: int, batch: int, free_rows: int) -> int:
    """Count the states, beside its own, for which each of a batch's rows finds a free row of the pool.

    This is how drafting follows load: what requests leave of `--max-running-requests` is drafted in.
    """
    return max(0, min(width, free_rows // batch)) if batch else 0


@contextmanager
def borrowed(pool: Any, allocator: Any, evict: Callable[[int], Any], batch: int, width: int, block: int) -> Iterator[Borrowed]:
    """Lend rows and slots for a round, fewer than `width` a row where not so many are free, and give them back.

    Without any a round scores one state of each row, on the row's own slots: drafts are then verified one after the other.

    Args:
        pool: The engine's map of positions to slots (`alloc_rows`, `free_rows`, `available_size`).
        allocator: Of slots (`alloc`, `free`, `available_size`).
        evict: Asked to free so many slots of cached prefixes, as far as they are not in use.
        batch: Rows of the batch.
        width: States wanted of each, beside its own.
        block: Slots of a state.
    """
    width = affordable(width, batch, pool.available_size())
    if width and allocator.available_size() < batch * width * block:
        evict(batch * width * block)
    width = min(width, allocator.available_size() // (batch * block)) if width else 0
    rows = pool.alloc_rows(batch * width) if width else []
    slots = None
    try:
        slots = allocator.alloc(batch * width * block) if rows else None
        if slots is None:
            width, empty = 0, torch.zeros(0, dtype=torch.long, device=pool.device)
            lent = Borrowed(empty.view(batch, 0), empty.view(batch, 0, block))
        else:
            table = torch.tensor(rows, device=pool.device).view(batch, width)
            lent = Borrowed(table, slots.long().view(batch, width, block).clone())
        yield lent
    finally:
        if slots is not None:
            allocator.free(lent.slots.flatten())
        if rows:
            pool.free_rows(rows)


__all__ = ["Borrowed", "affordable", "borrowed"]
