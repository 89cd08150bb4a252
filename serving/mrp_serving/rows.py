"""The states of the engine's requests between its rounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from modeling_mrp.generate.decode_state import Counts, DecodeState, Remasked, Text, first_state
from modeling_mrp.rules.drafting import as_slots
from modeling_mrp.rules.states import Memory, Reveal, Scored, Source
from modeling_mrp.runner.runner import Held

NEVER = 1 << 40  # a position behind every text


class Name(NamedTuple):
    """The name of a request's state: its row of the engine's pool, how often that was lent, and where its block starts.

    A row that is lent anew has another name, so what a request leaves behind is never found again.
    """

    row: int
    turn: int
    start: int


@dataclass(frozen=True)
class _Kept:
    name: Name
    batch: DecodeState
    place: int


class RowStates:
    """Keeps the states of rows from round to round, while requests come, go and wait."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, names: Sequence[Name], fresh: Callable[[int], DecodeState]) -> DecodeState:
        """Join the states of rows to one batch.

        Args:
            names: The rows.
            fresh: Makes the state, of one row, of the one in this place, of which none is kept.
        """
        kept = [self._kept.get(name.row) for name in names]
        found = [each if each is not None and each.name == name else None for each, name in zip(kept, names, strict=True)]
        first = found[0]
        if first is not None and all(each is not None and each.batch is first.batch for each in found):
            places = [each.place for each in found if each is not None]
            if places == list(range(len(first.batch.current.valid))):
                return first.batch
        parts = [
            fresh(place) if each is None else tree_map(lambda t, at=each.place: t[at : at + 1], each.batch)
            for place, each in enumerate(found)
        ]
        return tree_map(lambda *tensors: torch.cat(tensors), *parts)

    def keep(self, names: Sequence[Name], batch: DecodeState) -> None:
        """Keep the states of a batch, under the names that its rows will be asked for by."""
        self._kept |= {name.row: _Kept(name, batch, place) for place, name in enumerate(names)}

    def drop(self, alive: Callable[[int, int], bool]) -> None:
        """Forget the rows that were given back: those of which `alive(row, turn)` is False."""
        self._kept = {row: kept for row, kept in self._kept.items() if alive(row, kept.name.turn)}


def fresh_state(
    ids: Sequence[int],
    start: int,
    end: int,
    capacity: int,
    block: int,
    mask_id: int,
    width: int,
    drafts: bool,
    hidden: Tensor,
) -> DecodeState:
    """Make the state of one row of which nothing was scored.

    Args:
        ids: The text so far: the prompt, and what was generated.
        start: Where its block starts; what comes before has keys and values.
        end: Where its last block ends; no state is drafted behind it.
        capacity: Positions that a text may have.
        block: Tokens of a block.
        mask_id: The mask's id.
        width: States of a row in a round.
        drafts: Whether drafts are counted.
        hidden: An empty tensor of the hidden states' size, dtype and device, [0, hidden_size].
    """
    device = hidden.device
    tokens = torch.full((1, capacity + 1), mask_id, device=device)
    tokens[0, : len(ids)] = torch.tensor(ids, device=device)
    tokens[0, max(end, len(ids)) :] = 0 if mask_id else 1
    zero = torch.zeros(1, dtype=torch.long, device=device)
    numbers = torch.zeros(1, capacity + 1, device=device)
    text = Text(tokens, numbers, torch.full_like(tokens, -1), zero.clone(), zero + NEVER)
    current = first_state(text, zero + start, block)
    no, nothing = zero.bool(), hidden.new_zeros(1, block, hidden.shape[-1])
    nowhere = current.only(no)
    odds = torch.full((1, block), -torch.inf, device=device)
    reveal = Reveal(torch.zeros_like(odds).bool(), torch.zeros_like(current.ids), odds, odds)
    scored = Scored(nowhere, reveal, nothing).map(lambda t: t[:, None])
    memory = Memory(scored, as_slots(nowhere, -1)[:, None]).map(lambda t: t.repeat_interleave(width, 1))
    held = Held(zero + start, zero + start, no, current.ids[:, :0], nothing[:, :0], zero.clone(), zero.clone())
    return DecodeState(
        text=text,
        current=current,
        seed=Source(reveal.token, odds, nothing),
        has_seed=no,
        memory=memory,
        held=held,
        counts=replace(Counts.zeros(1, width, drafts, device), verified=zero.clone()),
        remasked=Remasked(zero + start, reveal.where, current.ids),
    )


__all__ = ["NEVER", "Name", "RowStates", "fresh_state"]
