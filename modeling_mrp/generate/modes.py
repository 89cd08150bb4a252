"""Modes of decoding, each three answers: what a step reveals, what the head changes about that, and what is drafted ahead."""

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ..rules.revealing import RevealRule, best_by
from ..rules.rules import kept_reveal, least_believed
from ..rules.states import Reveal, States


class HeadSteps(Protocol):
    """The head passes and picks, on one state per row, that a refinement may ask for."""

    def head_hidden(self, states: States, hidden: Tensor) -> Tensor:
        """Compute h_C [rows, block, hidden] at states [rows], given hidden states h_A, or their estimate, of that shape."""
        ...

    def most_confident(self, states: States, reveal: Reveal, hidden: Tensor) -> Reveal:
        """Reveal the most confident position that `reveal` leaves open, up to an eos in it.

        Args:
            states: [rows] before the reveal.
            reveal: [rows] what is revealed there already.
            hidden: [rows, block, hidden] at the states behind it.
        """
        ...

    def token_confidence(self, states: States, hidden: Tensor, token: Tensor, where: Tensor) -> Tensor:
        """Compute the log-odds of given tokens under lm_head(hidden): [rows, block], -inf outside `where`."""
        ...

    def residual_magnitude(self, hidden: Tensor, token: Tensor, where: Tensor) -> Tensor:
        """Compute |C| of given tokens: [rows, block], 0 outside `where`."""
        ...


class Refinement(Protocol):
    """A change of a reveal before it counts: a frozen dataclass of its numbers.

    Attributes:
        remasks: It may take reveals back.
        asks_host: It reads from the device what to do next, so that its rounds cannot be recorded whole.
    """

    remasks: ClassVar[bool]
    asks_host: ClassVar[bool]

    def __call__(self, steps: HeadSteps, states: States, hidden: Tensor, reveal: Reveal) -> Reveal:
        """Change what is revealed at states [rows], whose hidden states are [rows, block, hidden]."""
        ...


def applied(reveal: Reveal, states: States) -> States:
    """Write a reveal's tokens into its states, for the head to read."""
    block = reveal.where.shape[-1]
    ids = torch.where(reveal.where, reveal.token, states.ids)
    return replace(states, table=torch.cat([ids, states.table[..., block:]], -1))


@dataclass(frozen=True)
class Direct:
    """`mrp_direct`: after each backbone step the head reveals one more position at a time, unverified (MRP, section 5)."""

    head_reveals: int
    remasks: ClassVar[bool] = False
    asks_host: ClassVar[bool] = False

    def __call__(self, steps: HeadSteps, states: States, hidden: Tensor, reveal: Reveal) -> Reveal:
        """See `Refinement`."""
        for _ in range(self.head_reveals):
            hidden = hidden + steps.head_hidden(applied(reveal, states), hidden)
            reveal = reveal.and_then(steps.most_confident(states, reveal, hidden))
        return reveal


def belief(steps: HeadSteps, states: States, hidden: Tensor, reveal: Reveal, given: Tensor) -> Tensor:
    """Ask the head for the log-odds of valid rows' revealed tokens under those `given`: [rows, block], -inf elsewhere.

    At a token that is itself given, a trained head says what the backbone would if this one token were still masked.

    Args:
        steps: The head.
        states: [rows] before the reveal.
        hidden: [rows, block, hidden] h_A there.
        reveal: [rows] the tokens in question.
        given: [rows, block] bool, the part of the reveal that the head sees.
    """
    corrected = hidden + steps.head_hidden(applied(reveal.only(given), states), hidden)
    return steps.token_confidence(states, corrected, reveal.token, reveal.where & states.valid[:, None])


@dataclass(frozen=True)
class ThresholdRemask:
    """The published rule of `mrp_remask`: the head is conditioned on all the fresh reveals, and a token whose corrected
    confidence falls under tau goes back to a mask (MRP, arXiv 2605.18817). At least one reveal stays, under every rule.

    Attributes:
        threshold: tau, in log-odds.
    """

    threshold: float
    remasks: ClassVar[bool] = True
    asks_host: ClassVar[bool] = False

    def __call__(self, steps: HeadSteps, states: States, hidden: Tensor, reveal: Reveal) -> Reveal:
        """See `Refinement`."""
        believed = belief(steps, states, hidden, reveal, reveal.where)
        return kept_reveal(reveal.resting_on(believed), believed >= self.threshold, believed)


@dataclass(frozen=True)
class ResidualRemask:
    """The rule `residual` of the released code: the head reads the state before the reveal, and a token whose own logit it
    moves by more than `delta` in magnitude goes back.

    Attributes:
        delta: In logits.
    """

    delta: float
    remasks: ClassVar[bool] = True
    asks_host: ClassVar[bool] = False

    def __call__(self, steps: HeadSteps, states: States, hidden: Tensor, reveal: Reveal) -> Reveal:
        """See `Refinement`."""
        residual = steps.head_hidden(states, hidden)
        moved = steps.residual_magnitude(residual, reveal.token, reveal.where)
        return kept_reveal(reveal.resting_on(moved), moved <= self.delta, reveal.confidence)


@dataclass(frozen=True)
class RereadRemask:
    """The rule `reread`: what stays is believed under all the rest of it, and is no mere echo of it.

    Under `threshold` two reveals that contradict each other both go back. Here only the least believed one under tau does;
    then the head reads again what is left, until every token is believed under the others. Tokens that are wrong together
    still speak up for each other, so the head at last reads them under the surest alone: one whose confidence there is under
    `alone` goes back as well (`benchmarks/NOTES.md`, Remasking). A row with a single reveal asks the head nothing.

    Attributes:
        threshold: tau, in log-odds.
        alone: What a token needs under the surest one alone, in log-odds: those of half of tau.
    """

    threshold: float
    alone: float
    remasks: ClassVar[bool] = True
    asks_host: ClassVar[bool] = True

    def __call__(self, steps: HeadSteps, states: States, hidden: Tensor, reveal: Reveal) -> Reveal:
        """See `Refinement`."""
        several = unsettled = states.valid & (reveal.where.sum(-1) > 1)
        while bool(unsettled.any()):  # one look at the device a pass; most rows are settled by the first
            believed = belief(steps, replace(states, valid=unsettled), hidden, reveal, reveal.where)
            back, doubted = least_believed(reveal, believed, self.threshold, unsettled)
            reveal = reveal.resting_on(believed).only(reveal.where & ~back)
            several = several & (reveal.where.sum(-1) > 1)
            unsettled = unsettled & doubted & several
        if bool(several.any()):
            surest = best_by(reveal.confidence, reveal.where)
            believed = belief(steps, replace(states, valid=several), hidden, reveal, surest)
            reveal = reveal.only(reveal.where & (surest | (believed >= self.alone) | ~several[:, None]))
        return reveal


@dataclass(frozen=True)
class Amount:
    """An amount of drafting in one round.

    Attributes:
        states: States that a row may submit; 1: it drafts nothing.
        passes: Head passes of the round; 0: drafts come from stale logits, and the head rests.
        narrow: Each row submits one state, whatever that is: behind a clean one the next block begins a round later.
    """

    states: int = 1
    passes: int = 0
    narrow: bool = False


@dataclass(frozen=True)
class Drafting:
    """The amount of drafting: states that may follow, scored together in one forward. Drafts never change the text.

    Attributes:
        states: K, the states a row may submit per round.
        branches: Followers of a state that are considered; 1 drafts a chain.
        passes: Head passes per round; with `states - 1` of them each drafted state is re-read before the next; 0: drafts come
            from the backbone's own stale logits.
        paced: `states` and `passes` are the most of both: each round has as much as measured time says pays (`Pace`).
    """

    states: int
    branches: int
    passes: int = 0
    paced: bool = False


@dataclass(frozen=True)
class Mode:
    """The meaning of one value of `decoding`.

    Attributes:
        rule: Which positions a step of the backbone reveals: this alone, with `refine`, says what the text is.
        refine: What the head changes about that; None: nothing.
        drafting: What is drafted ahead; None: nothing.
    """

    rule: RevealRule
    refine: Refinement | None = None
    drafting: Drafting | None = None

    @property
    def uses_head(self) -> bool:
        """True if the head takes part."""
        return self.refine is not None or (self.drafting is not None and self.drafting.passes > 0)

    @property
    def width(self) -> int:
        """States of a row in a round, at most: its own and the next block's, or with drafts more."""
        return max(2, 1 if self.drafting is None else self.drafting.states)


__all__ = [
    "Amount",
    "Direct",
    "Drafting",
    "HeadSteps",
    "Mode",
    "Refinement",
    "RereadRemask",
    "ResidualRemask",
    "ThresholdRemask",
]
