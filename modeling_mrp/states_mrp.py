"""States of a block, what is revealed at them, and the sets of states that a round proposes, scores and remembers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

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
        """The part of the reveal that stays."""
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
        """[rows, width, block] the ids of the first state on the way from parent to parent (its own without a parent)."""
        width = self.parent.shape[1]
        slot = torch.where(self.parent < 0, torch.arange(width, device=self.parent.device), self.parent)
        for _ in range((width - 1).bit_length()):
            slot = slot.gather(1, slot)
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
        """One of them per row."""
        return Scored(
            self.states.map(lambda t: t[rows, place]),
            self.parent[rows, place],
            self.reveal.map(lambda t: t[rows, place]),
            self.hidden[rows, place],
        )

    def kept(self, which: Tensor) -> "Scored":
        """For later rounds: those marked, without states that looked at a clean one, which may turn out not to be text."""
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


class Memory:
    """What the last round scored, and where each of its states leads without another forward.

    Args:
        scored: [rows, n] states, none of them clean.
        follower: [rows, n] the state that each one's reveal makes.
    """

    def __init__(self, scored: Scored, follower: States) -> None:
        self.scored = scored
        onward = scored.edges(follower, torch.zeros_like(scored.states.valid))
        end = torch.where(onward < 0, torch.arange(onward.shape[1], device=onward.device), onward)
        for _ in range(onward.shape[1].bit_length()):
            end = end.gather(1, end)
        self.end = end
        self.exit = follower.map(lambda t: t.gather(1, end if t.dim() == 2 else end[..., None].expand_as(t)))

    def skip(self, state: States, base: int) -> tuple[States, Tensor]:
        """For [rows] states: the first one on the way that is not scored yet, and what an estimate there starts from.

        That is `base` if the state itself is not scored, and 1 + the place of the last scored one otherwise.
        """
        scored = self.scored.states
        same = (scored.ids == state.ids[:, None]).all(-1) & (scored.start == state.start[:, None]) & scored.valid
        found, place = same.any(-1), same.int().argmax(-1)
        ahead = self.exit.map(lambda t: t[torch.arange(len(place), device=place.device), place])
        return (
            replace(
                state,
                ids=torch.where(found[:, None], ahead.ids, state.ids),
                step=torch.where(found, ahead.step, state.step),
            ),
            torch.where(found, 1 + self.end.gather(1, place[:, None])[:, 0], base),
        )


class Frontier:
    """States that may follow those already in a round, with the chance that the backbone gets there.

    Args:
        like: [rows] states, for shapes.
        size: How many may be added per row.
    """

    def __init__(self, like: States, size: int) -> None:
        self.states = like.map(lambda t: torch.zeros_like(t)[:, None].repeat(1, size, *[1] * (t.dim() - 1)))
        self.states.row = like.row[:, None].expand(-1, size)
        self.chance = torch.zeros(len(like.start), size, device=like.start.device)
        self.parent, self.base = torch.full_like(self.states.start, -1), torch.full_like(self.states.start, -1)
        self.taken = torch.zeros_like(self.states.valid)
        self.reached = torch.ones_like(self.chance[:, 0])  # the chance of the state last taken
        self.used = 0

    @property
    def open(self) -> Tensor:
        """[rows, size] bool: what may still be taken."""
        return self.states.valid & ~self.taken

    def add(self, state: States, chance: Tensor, base: Tensor, parent: int = -1) -> None:
        """Adds [rows] followers of the states last taken, each of which comes with a chance [rows] once there.

        Args:
            state: The followers; those that are not valid are left out.
            chance: [rows].
            base: [rows] long, what an estimate at the follower starts from.
            parent: The slot of the clean state it looks at.
        """
        old = slice(0, self.used)
        same = (self.states.ids[:, old] == state.ids[:, None]).all(-1) & (self.states.start[:, old] == state.start[:, None])
        same &= (self.parent[:, old] == parent) & self.states.valid[:, old] & state.valid[:, None]
        chance = chance * self.reached
        self.chance[:, old] += same * chance[:, None]
        for held, new in zip(vars(self.states).values(), vars(state).values(), strict=True):
            if held is not self.states.row:
                held[:, self.used] = new
        self.states.valid[:, self.used] &= ~same.any(-1)
        self.chance[:, self.used], self.base[:, self.used], self.parent[:, self.used] = chance, base, parent
        self.used += 1

    def best(self) -> tuple[States, Tensor, Tensor]:
        """Takes the likeliest state of each row: [rows] states (not valid where there is none), their parents and bases."""
        rows = torch.arange(len(self.chance), device=self.chance.device)
        self.reached, place = self.chance.masked_fill(~self.open, -1).max(-1)
        found = self.reached >= 0
        taken = self.states.map(lambda t: t[rows, place])
        parent = torch.where(found, self.parent[rows, place], -1)
        base = torch.where(found, self.base[rows, place], -1)
        self.taken[rows, place] |= found
        return replace(taken, valid=found), parent, base


__all__ = ["Frontier", "Memory", "Proposal", "Reveal", "Scored", "States"]
