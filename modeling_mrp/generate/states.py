"""States of a block, what is revealed at them, and the sets of states that a round proposes, scores and remembers."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor


class _Fields:
    """A dataclass whose fields are tensors of one leading shape."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The same change of shape or choice for every field."""
        return type(self)(*(change(field) for field in vars(self).values()))

    def beside(self, other: Self) -> Self:
        """[rows, a + b] of two with [rows, a] and [rows, b]."""
        return type(self)(*(torch.cat(pair, 1) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass
class States(_Fields):
    """One state per entry: a block of ids with masks, and where it stands.

    Attributes:
        ids: [..., block] long.
        start: [...] long, the absolute position of the block.
        step: [...] long, the denoising steps already taken in the block.
        row: [...] long, the batch row.
        valid: [...] bool; False for an unused slot.
    """

    ids: Tensor
    start: Tensor
    step: Tensor
    row: Tensor
    valid: Tensor

    @staticmethod
    def stack(states: list["States"]) -> "States":
        """[rows, len(states)] from states of [rows]."""
        return States(*(torch.stack([getattr(s, f) for s in states], 1) for f in ("ids", "start", "step", "row", "valid")))


@dataclass
class Reveal(_Fields):
    """What one denoising step reveals of [...] states.

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

    def applied_to(self, states: States) -> States:
        """The states after the reveal."""
        return replace(states, ids=torch.where(self.where, self.token, states.ids))

    def only(self, where: Tensor) -> "Reveal":
        """The same at fewer positions, `where` [..., block] bool."""
        return replace(self, where=where)

    def and_then(self, later: "Reveal") -> "Reveal":
        """Both reveals as one."""
        fields = ("token", "logprob", "confidence")
        return Reveal(
            self.where | later.where, *(torch.where(later.where, getattr(later, f), getattr(self, f)) for f in fields)
        )


@dataclass
class Proposal:
    """The states of one round.

    Attributes:
        states: [rows, width].
        parent: [rows, width] long, the slot of the clean state that a state looks at beyond the prefix, -1 if none.
    """

    states: States
    parent: Tensor

    @property
    def drafted(self) -> Tensor:
        """[rows, width] bool: states that are guesses; a row's next state and the block behind a clean one are not."""
        drafted = self.states.valid & (self.parent < 0)
        drafted[:, 0] = False
        return drafted

    def behind(self) -> Tensor:
        """[rows, width, block] the ids of the state that each looks at (its own where there is none)."""
        slot = torch.where(self.parent < 0, torch.arange(self.parent.shape[1], device=self.parent.device), self.parent)
        return self.states.ids.gather(1, slot[..., None].expand_as(self.states.ids))


@dataclass
class Scored:
    """States that the backbone has scored, and what it reveals there.

    Attributes:
        states: [rows, n].
        parent: [rows, n] long: see `Proposal`.
        reveal: [rows, n].
        hidden: [rows, n, block, hidden_size].
    """

    states: States
    parent: Tensor
    reveal: Reveal
    hidden: Tensor

    def beside(self, other: "Scored") -> "Scored":
        """Both, these first."""
        return Scored(
            self.states.beside(other.states),
            torch.cat([self.parent, other.parent], 1),
            self.reveal.beside(other.reveal),
            torch.cat([self.hidden, other.hidden], 1),
        )

    def at(self, rows: Tensor, place: Tensor) -> "Scored":
        """One of them per row: that at `place` [rows] long."""
        return Scored(
            self.states.map(lambda t: t[rows, place]),
            self.parent[rows, place],
            self.reveal.map(lambda t: t[rows, place]),
            self.hidden[rows, place],
        )

    def kept(self, which: Tensor) -> "Scored":
        """For later rounds: those marked in `which` [rows, n], without states that looked at a clean one, which may turn out
        not to be text."""
        return replace(self, states=replace(self.states, valid=self.states.valid & which & (self.parent < 0)))

    def edges(self, follower: States, clean: Tensor) -> Tensor:
        """[rows, n] long: where among these each one's follower is, -1 if nowhere.

        Behind a clean state comes the one that looked at it.
        """
        same = (follower.ids[:, :, None] == self.states.ids[:, None]).all(-1)
        same &= follower.start[:, :, None] == self.states.start[:, None]
        slot = torch.arange(same.shape[1], device=same.device)
        same &= self.parent[:, None] == torch.where(clean, slot, -1)[..., None]
        same &= self.states.valid[:, None] & self.states.valid[..., None]
        return torch.where(same.any(-1), same.int().argmax(-1), -1)

    def offers_behind(self, last: States, mask_token_id: int) -> Tensor:
        """[rows] bool: one of these is a denoising step behind `last` [rows] and keeps all that is revealed there."""
        agrees = ((self.states.ids == last.ids[:, None]) | (last.ids == mask_token_id)[:, None]).all(-1)
        agrees &= self.states.start == last.start[:, None]
        agrees &= self.states.step == last.step[:, None] + 1
        return (agrees & self.states.valid & (self.parent < 0)).any(-1) & last.valid


def whole_text(ids: Tensor, eos_column: Tensor, limit: Tensor, mask_id: int) -> Tensor:
    """[...] bool: nothing is left to reveal before the end of the text, and that end lies in the block.

    Args:
        ids: [..., block] long.
        eos_column: [...] long, the first column that ends the text, the block's size or more if none does.
        limit: [...] long, the column at which the text ends at the latest.
        mask_id: The mask's id.
    """
    block = ids.shape[-1]
    end = torch.minimum(eos_column + 1, limit)
    hidden = (ids == mask_id) & (torch.arange(block, device=ids.device) < end[..., None])
    return (end <= block) & ~hidden.any(-1)


def follow(onward: Tensor) -> Tensor:
    """[rows, n] the places that the links `onward` [rows, n] lead through from place 0; the last is repeated."""
    here = torch.arange(onward.shape[1], device=onward.device)
    onward = torch.where(onward < 0, here, onward)
    path = [torch.zeros_like(onward[:, :1])]
    for _ in range(onward.shape[1] - 1):
        path.append(onward.gather(1, path[-1]))
    return torch.cat(path, 1)


class Memory:
    """What the last round scored, and where each of its states leads without another forward.

    Args:
        scored: [rows, n] states, none of them clean.
        follower: [rows, n] the state that each one's reveal makes.
        onward: [rows, n] long, the place of that state among these and possibly more, -1 if nowhere.

    Attributes:
        end: [rows, n] long, the last scored state on the way from each.
        exit: [rows, n] the state behind it, which is not scored.
    """

    def __init__(self, scored: Scored, follower: States, onward: Tensor) -> None:
        self.scored = scored
        count = onward.shape[1]
        kept = (onward >= 0) & (onward < count)
        kept &= scored.states.valid.gather(1, onward.clamp(0, count - 1))
        end = torch.where(kept, onward, torch.arange(count, device=onward.device))
        for _ in range(count.bit_length()):
            end = end.gather(1, end)
        self.end = end
        self.exit = follower.map(lambda t: t.gather(1, end if t.dim() == 2 else end[..., None].expand_as(t)))

    def padded(self, width: int) -> "Memory":
        """The same with [rows, width] states: more of them that are not valid."""
        more = width - self.end.shape[1]
        if not more:
            return self

        def wider(part: Any) -> Any:
            if not isinstance(part, Tensor):
                return part.map(wider)
            return torch.cat([part, part[:, -1:].expand(-1, more, *part.shape[2:])], 1)

        memory = copy.copy(self)
        memory.scored = Scored(*(wider(part) for part in vars(self.scored).values()))
        memory.scored.states.valid[:, self.end.shape[1] :] = False
        memory.end, memory.exit = wider(self.end), wider(self.exit)
        return memory

    @staticmethod
    def empty(like: Scored) -> "Memory":
        """One that holds nothing: `like` [rows] gives shapes and has no valid states."""
        scored = Scored(
            *(part.map(lambda t: t[:, None]) if hasattr(part, "map") else part[:, None] for part in vars(like).values())
        )
        return Memory(scored, scored.states, torch.full_like(scored.parent, -1))


__all__ = ["Memory", "Proposal", "Reveal", "Scored", "States", "follow", "whole_text"]
