"""States of a block, their reveals, and sets of scored states: tensors with names, and nothing that decides."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

# Columns of a state behind its ids, counted from its end.
STATE_COLUMNS = 4
START, PARENT, STEP, END = range(-STATE_COLUMNS, 0)


class TensorFields:
    """A dataclass whose fields are tensors, or such dataclasses, of one leading shape."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Apply one change of shape or choice to every field."""
        fields = vars(self).values()
        return type(self)(*(field.map(change) if isinstance(field, TensorFields) else change(field) for field in fields))

    def cat(self, other: Self) -> Self:
        """Concatenate [rows, a] and [rows, b] to [rows, a + b]."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return type(self)(*(a.cat(b) if isinstance(a, TensorFields) else torch.cat([a, b], 1) for a, b in pairs))


@dataclass
class States(TensorFields):
    """States of blocks, each a row of integers: its ids with masks, then where it stands.

    A state is named by its ids, its start and its parent.

    Attributes:
        table: [..., block + 4] long, in these columns: ids [block]; start, the absolute position of the block; parent, the
            slot in the round of the clean state that this one looks at beyond the prefix, -1 if none; step, the denoising steps
            taken in the block; end, the column of the first eos that was revealed in it, the block's size if none was.
        valid: [...] bool; False for an unused slot.
    """

    table: Tensor
    valid: Tensor

    @staticmethod
    def of(ids: Tensor, start: Tensor, parent: Tensor, step: Tensor, end: Tensor, valid: Tensor) -> "States":
        """Make states from their columns."""
        return States(torch.cat([ids, *(column[..., None] for column in (start, parent, step, end))], -1), valid)

    @property
    def ids(self) -> Tensor:
        """[..., block] long."""
        return self.table[..., :-STATE_COLUMNS]

    @property
    def name(self) -> Tensor:
        """[..., block + 2] long: ids, start and parent."""
        return self.table[..., :STEP]

    @property
    def start(self) -> Tensor:
        """[...] long."""
        return self.table[..., START]

    @property
    def parent(self) -> Tensor:
        """[...] long."""
        return self.table[..., PARENT]

    @property
    def step(self) -> Tensor:
        """[...] long."""
        return self.table[..., STEP]

    @property
    def end(self) -> Tensor:
        """[...] long."""
        return self.table[..., END]

    def masked(self, mask_token_id: int) -> Tensor:
        """Find the positions that are not revealed: [..., block] bool."""
        return self.ids == mask_token_id

    def only(self, which: Tensor) -> "States":
        """Make the states outside `which` [...] invalid."""
        return replace(self, valid=self.valid & which)


@dataclass
class Reveal(TensorFields):
    """The reveal of one denoising step at [...] states.

    Attributes:
        where: [..., block] bool.
        token: [..., block] long, meaningful where revealed.
        logprob: [..., block] float, the token's log-probability when picked.
        confidence: [..., block] float, its log-odds.
    """

    where: Tensor
    token: Tensor
    logprob: Tensor
    confidence: Tensor

    def only(self, where: Tensor) -> "Reveal":
        """Keep the reveal at fewer positions, `where` [..., block] bool."""
        return replace(self, where=where)

    def resting_on(self, number: Tensor) -> "Reveal":
        """The same, but without a log-probability where a number [..., block] that it was judged by is NaN."""
        return replace(self, logprob=number.to(self.logprob.dtype).where(number.isnan(), self.logprob))

    def and_then(self, later: "Reveal") -> "Reveal":
        """Join both reveals."""
        fields = ("token", "logprob", "confidence")
        return Reveal(
            self.where | later.where, *(torch.where(later.where, getattr(later, f), getattr(self, f)) for f in fields)
        )


@dataclass
class Scored(TensorFields):
    """States that the backbone has scored, and their reveals.

    Attributes:
        states: [rows, n].
        reveal: [rows, n].
        hidden: [rows, n, block, hidden_size].
    """

    states: States
    reveal: Reveal
    hidden: Tensor


@dataclass
class Source(TensorFields):
    """Source of drafts: what the backbone said at one state of each row.

    Attributes:
        token: [rows, block] long, the token of each masked position,
        odds: [rows, block] float, and its log-odds.
        hidden: [rows, block, hidden_size].
    """

    token: Tensor
    odds: Tensor
    hidden: Tensor


@dataclass
class Memory(TensorFields):
    """States that the last round scored in vain, and where each of its states leads without another forward.

    Attributes:
        scored: [rows, n], none of them clean.
        ahead: [rows, n, block + 6] long: the state that each leads to, which is not scored; a state's columns, then twice the
            number of the source that tells of it (see `DraftTable`).
    """

    scored: Scored
    ahead: Tensor


for _kind in (States, Reveal, Scored, Source, Memory):
    register_dataclass(_kind)

__all__ = ["END", "PARENT", "START", "STATE_COLUMNS", "STEP", "Memory", "Reveal", "Scored", "Source", "States", "TensorFields"]
