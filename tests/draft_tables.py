"""What drafts are grown on, made up by hand: predictions, a memory, a head that says what a test wants. No model."""

from collections.abc import Callable, Sequence
from math import log
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from modeling_mrp.generate.loop import re_read
from modeling_mrp.kernels.dispatch import PYTORCH
from modeling_mrp.kernels.grow import DraftTable
from modeling_mrp.rules.drafting import Draft, as_slots, grow
from modeling_mrp.rules.revealing import ORDER_SHARPNESS, RevealRule, Static
from modeling_mrp.rules.rules import Accepted, remembered
from modeling_mrp.rules.states import Memory, Reveal, Scored, States

M = 60  # the mask
A, B, C, D = 10, 11, 12, 13  # what the positions of a block get
Prediction = tuple[list[int], list[float]]  # the token of each position, and its log-odds
Entry = tuple[list[int], list[int], Prediction]  # a scored state, its follower, and what was predicted there


def states(*ids: list[int], start: int = 0, valid: list[bool] | None = None, eos: Sequence[int] = ()) -> States:
    """[n] without parents, at the step that reveals one position at a time lead to."""
    block = len(ids[0])
    steps = torch.tensor([block - i.count(M) for i in ids])
    ends = torch.tensor([next((column for column, token in enumerate(i) if token in eos), block) for i in ids])
    where = torch.full_like(steps, start)
    return States.of(
        torch.tensor(ids), where, torch.full_like(steps, -1), steps, ends, torch.tensor(valid or [True] * len(ids))
    )


def weights(*values: float) -> list[float]:
    """Log-odds whose power `ORDER_SHARPNESS` is in these proportions."""
    return [log(value) / ORDER_SHARPNESS for value in values]


def hidden_of(predictions: Sequence[Prediction]) -> Tensor:
    """[n, block, 2] made-up hidden states: those of a position are its token and its log-odds."""
    return torch.tensor([list(zip(*prediction, strict=True)) for prediction in predictions], dtype=torch.float64)


def scored_by(at: States, predictions: Sequence[Prediction]) -> Scored:
    """States [n] with what the backbone said there."""
    hidden = hidden_of(predictions)
    token, odds = hidden[..., 0].long(), hidden[..., 1]
    return Scored(at, Reveal(at.masked(M), token, odds, odds), hidden)


def memory_of(
    *entries: Entry, lost: Sequence[int] = (), width: int | None = None, start: int = 0, eos: Sequence[int] = ()
) -> Memory:
    """What one row remembers in a block, in `width` places; `lost` entries are gone."""
    known = [ids for ids, _, _ in entries]
    line, follower = (states(*each, start=start, eos=eos) for each in (known, [after for _, after, _ in entries]))
    scored = scored_by(line, [said for _, _, said in entries]).map(lambda t: t[None])
    next_index = torch.tensor([[known.index(after) if after in known else -1 for _, after, _ in entries]])
    gone = torch.tensor([[i in lost for i in range(len(entries))]])
    accepted = Accepted(scored, follower.map(lambda t: t[None]), gone, next_index, ~gone, torch.zeros(1, dtype=torch.long))
    return remembered(accepted, len(entries), width or len(entries))


def of_rows(memories: Sequence[Memory]) -> Memory:
    """One batch of several, which are equally wide."""
    joined: Memory = tree_map(lambda *parts: torch.cat(parts), *memories)
    return joined


def draft_table(
    *predictions: Prediction,
    branches: int = 3,
    schedule: Sequence[int] | None = None,
    eos: Sequence[int] = (),
    new_tokens: int | None = None,
    following: list[int] | None = None,
    memory: Memory | None = None,
    rule: RevealRule = Static(),  # noqa: B008
) -> DraftTable:
    """What rows draft from that stand in their second block, of which nothing is revealed.

    Each row's last accepted state, source 0, made one of the predictions; then come the places of the memory, of which there is
    one that is not used where none is given.
    """
    rows, block = len(predictions), len(predictions[0][0])
    if memory is None:
        memory = of_rows([memory_of(([M] * block, [M] * block, predictions[0]), lost=[0])] * rows)
    after = states(*[following or [M] * block] * rows, start=2 * block)
    said = torch.cat([hidden_of(predictions)[:, None], memory.scored.hidden], 1)
    return DraftTable(
        first=as_slots(states(*[[M] * block] * rows, start=block), 0),
        valid=torch.ones(rows, dtype=torch.bool),
        token=said[..., 0].long()[..., None],
        odds=said[..., 1][..., None],
        known=memory.scored.states.table[..., : block + 1],
        known_valid=memory.scored.states.valid,
        ahead=memory.ahead,
        successor=as_slots(after, -1),
        open_successor=after.masked(M).any(-1),
        open_end=torch.full((rows,), block + (new_tokens or 3 * block)),
        eos=torch.tensor(eos, dtype=torch.long),
        schedule=torch.tensor(schedule or [1] * block),
        seed=None,
        rule=rule,
        mask_id=M,
        branches=min(branches, block),
    )


def grown(table: DraftTable, size: int) -> Draft:
    return grow(table, size, size, PYTORCH)


def ids_of(draft: Draft, row: int = 0) -> list[list[int]]:
    """The valid states of a row; none is behind one that is not."""
    valid = draft.valid[row].tolist()
    assert valid == sorted(valid, reverse=True)
    return draft.states.ids[row, : sum(valid)].tolist()


def column(draft: Draft, which: int, row: int = 0) -> list[int]:
    return draft.slots[row, : int(draft.valid[row].sum()), which].tolist()


class Head:
    """Stands for the head: tells of each state what a function of its row, its ids and the number of the pass says.

    It is the reader of its hidden states, too.
    """

    def __init__(self, says: Callable[[int, tuple[int, ...], int], Prediction]) -> None:
        self.says, self.passes = says, 0
        self.read: list[tuple[States, Tensor]] = []

    def __call__(self, at: States, hidden: Tensor, blocked: Tensor | None) -> Tensor:
        self.read.append((at, hidden))
        rows = [[self.says(r, tuple(ids), self.passes) for ids in row] for r, row in enumerate(at.ids.tolist())]
        self.passes += 1
        return torch.stack([hidden_of(row) for row in rows]) - hidden

    def estimates(self, at: States, hidden: Tensor, text: Any) -> tuple[Tensor, Tensor]:
        return hidden[..., 0].round().long()[..., None], hidden[..., 1][..., None]


class Reading:
    """A table, and the hidden states of its sources, which a head's passes add to."""

    def __init__(self, table: DraftTable, head: Head) -> None:
        self.table, self.head = table, head
        self.hidden = torch.cat([table.token.double(), table.odds], -1)

    def grown(self, size: int) -> Draft:
        return grown(self.table, size)

    def re_read(self, draft: Draft) -> None:
        task: Any = SimpleNamespace(reader=self.head, mask_token_id=M)
        head, text, begin = self.head, None, min(self.head.passes, 1)
        self.table, self.hidden = re_read(task, head, text, self.table, self.hidden, draft, begin, None)  # type: ignore[arg-type]
