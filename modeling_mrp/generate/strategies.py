"""Decoding strategies: which positions a step reveals, what the head adds to it, and what is drafted ahead.

A strategy has two methods. `reveal` chooses among the masked positions of a state the ones a denoising step commits.
`refine` may change that choice before it counts (more reveals, or some taken back). Its numbers say what is drafted: states
that may follow, scored together in one forward; a wrong guess is not walked through, so drafts never change the text.
"""

import math
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from .states import Reveal, States


class HeadSteps(Protocol):
    """What a strategy may ask of the decoder: head passes and picks on one state per row."""

    def head_hidden(self, states: States, hidden: Tensor) -> Tensor:
        """h_C [rows, block, hidden] at states [rows], given hidden states h_A, or their estimate, of the same shape."""
        ...

    def reveal_from(self, states: States, hidden: Tensor, count: Tensor | None = None) -> Reveal:
        """Picks at states [rows] from hidden states [rows, block, hidden], and what is revealed of them: the `count` [rows]
        most confident, or what the strategy says."""
        ...

    def token_confidence(self, states: States, hidden: Tensor, token: Tensor, where: Tensor) -> Tensor:
        """[rows, block] log-odds of given tokens under lm_head(hidden), -inf outside `where`."""
        ...

    def residual_magnitude(self, hidden: Tensor, token: Tensor, where: Tensor) -> Tensor:
        """[rows, block] |C| of given tokens, 0 outside `where`."""
        ...


def ranks(score: Tensor, candidates: Tensor) -> Tensor:
    """[n, block] long: the place of each candidate by score [n, block], best first, ties to the left; the others follow."""
    order = score.masked_fill(~candidates, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def top_by(score: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
    """The `count` [n] best of the candidates [n, block] by score [n, block], ties to the left; bool [n, block]."""
    return candidates & (ranks(score, candidates) < count[:, None])


def logit(probability: float) -> float:
    """log p - log (1 - p), infinite at 0 and 1."""
    if probability <= 0:
        return -math.inf
    return math.inf if probability >= 1 else math.log(probability) - math.log1p(-probability)


class Static:
    """Reveal the n most confident positions; n = block_size / denoising_steps, the remainder to the first steps."""

    uses_head = False
    drafts = False
    width = 1  # states a row may submit in a round
    branches = 1  # followers of a drafted state that are considered
    passes = 0  # of the head, in which drafted states are re-read
    compute_bound_tokens: int | None = None  # see `SelfSpec`
    uses_entropy = False
    revokes = False  # whether `refine` may take reveals back
    looks = False  # whether `refine` asks the device for what to do next

    def reveal(self, confidence: Tensor, entropy: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
        """Which candidates a step commits.

        Args:
            confidence: [n, block] log-odds of the picked tokens.
            entropy: [n, block] nats.
            candidates: [n, block] bool, the masked positions that may be revealed.
            count: [n] long, how many the schedule reveals at this step.

        Returns:
            [n, block] bool, at least one where there is a candidate.
        """
        return top_by(confidence, candidates, count)

    def refine(self, steps: HeadSteps, states: States, hidden: Tensor, reveal: Reveal) -> Reveal:
        """Changes what is revealed at states [rows], whose hidden states are [rows, block, hidden]; by default it stands."""
        return reveal


class Sequential(Static):
    """Reveal the n leftmost masked positions."""

    def reveal(self, confidence: Tensor, entropy: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
        """See `Static.reveal`."""
        return candidates & (candidates.cumsum(-1) <= count[:, None])


class Dynamic(Static):
    """Reveal every position whose confidence exceeds tau; at least the most confident one."""

    def __init__(self, threshold: float) -> None:
        self.threshold = logit(threshold)

    def reveal(self, confidence: Tensor, entropy: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
        """See `Static.reveal`."""
        return (candidates & (confidence > self.threshold)) | top_by(confidence, candidates, torch.ones_like(count))


class EntropyBound(Static):
    """Reveal in order of entropy while the running sum stays under a bound; at least one."""

    uses_entropy = True

    def __init__(self, bound: float) -> None:
        self.bound = bound

    def reveal(self, confidence: Tensor, entropy: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
        """See `Static.reveal`."""
        entropy = entropy.masked_fill(~candidates, torch.inf)
        ordered, order = entropy.sort(dim=-1, descending=False, stable=True)
        below = ordered.cumsum(-1) < self.bound
        under = torch.empty_like(below).scatter_(1, order, below)
        return (candidates & under) | top_by(-entropy, candidates, torch.ones_like(count))


class Direct(Static):
    """`mrp_direct`: after each backbone step the head reveals one more position at a time, unverified (MRP, section 5)."""

    uses_head = True

    def __init__(self, head_reveals: int) -> None:
        self.head_reveals = head_reveals

    def refine(self, steps: HeadSteps, states: States, hidden: Tensor, reveal: Reveal) -> Reveal:
        """See `Static.refine`."""
        one = torch.ones_like(states.start)
        for _ in range(self.head_reveals):
            after = reveal.applied_to(states)
            hidden = hidden + steps.head_hidden(after, hidden)
            reveal = reveal.and_then(steps.reveal_from(after, hidden, one))
        return reveal


class Remask(Dynamic):
    """`mrp_remask`: reveal eagerly, let the head re-read the reveals, take back the ones it no longer believes in.

    This is the published rule, `threshold`: the head is conditioned on all the fresh reveals, and a token whose corrected
    confidence falls under tau goes back to a mask (MRP, arXiv 2605.18817). At least one reveal stays, under every rule.

    Args:
        threshold: tau of the reveal and of the second reading, a probability.
    """

    uses_head = True
    revokes = True

    def refine(self, steps: HeadSteps, states: States, hidden: Tensor, reveal: Reveal) -> Reveal:
        """See `Static.refine`."""
        belief = self.belief(steps, states, hidden, reveal, reveal.where)
        return self.kept(reveal, belief >= self.threshold, belief)

    def belief(self, steps: HeadSteps, states: States, hidden: Tensor, reveal: Reveal, given: Tensor) -> Tensor:
        """[rows, block] log-odds that the head gives the revealed tokens of valid rows under those `given`, -inf elsewhere.

        At a token that is itself given, a trained head says what the backbone would if this one token were still masked.

        Args:
            steps: The decoder.
            states: [rows] before the reveal.
            hidden: [rows, block, hidden] h_A there.
            reveal: [rows] the tokens in question.
            given: [rows, block] bool, the part of the reveal that the head sees.
        """
        corrected = hidden + steps.head_hidden(reveal.only(given).applied_to(states), hidden)
        return steps.token_confidence(states, corrected, reveal.token, reveal.where & states.valid[:, None])

    @staticmethod
    def kept(reveal: Reveal, passed: Tensor, belief: Tensor) -> Reveal:
        """What passed [rows, block] of a reveal; the most believed token where nothing did."""
        kept = reveal.where & passed
        best = top_by(belief, reveal.where, torch.ones_like(reveal.where[:, 0], dtype=torch.long))
        return reveal.only(kept | (best & ~kept.any(-1, keepdim=True)))


class ResidualRemask(Remask):
    """The rule `residual` of the released code: the head reads the state before the reveal, and a token whose own logit it
    moves by more than `delta` in magnitude goes back.

    Args:
        threshold: tau of the reveal, a probability.
        delta: In logits.
    """

    def __init__(self, threshold: float, delta: float) -> None:
        super().__init__(threshold)
        self.delta = delta

    def refine(self, steps: HeadSteps, states: States, hidden: Tensor, reveal: Reveal) -> Reveal:
        """See `Static.refine`."""
        residual = steps.head_hidden(states, hidden)
        moved = steps.residual_magnitude(residual, reveal.token, reveal.where)
        return self.kept(reveal, moved <= self.delta, reveal.confidence)


class RereadRemask(Remask):
    """The rule `reread`: what stays is believed under all the rest of it, and is no mere echo of it.

    Under `threshold` two reveals that contradict each other both go back. Here only the least believed one under tau does;
    then the head reads again what is left, until every token is believed under the others. Tokens that are wrong together
    still speak up for each other, so the head at last reads them under the surest alone: one whose confidence there is under
    `ALONE` * tau goes back as well (`benchmarks/NOTES.md`, Remasking). A row with a single reveal asks the head nothing.
    """

    looks = True
    ALONE = 0.5  # one token says less than all: under it the others need this share of tau

    def __init__(self, threshold: float) -> None:
        super().__init__(threshold)
        self.alone = logit(self.ALONE * threshold)

    def refine(self, steps: HeadSteps, states: States, hidden: Tensor, reveal: Reveal) -> Reveal:
        """See `Static.refine`."""
        one = torch.ones_like(states.start)
        several = unsettled = states.valid & (reveal.where.sum(-1) > 1)
        while bool(unsettled.any()):  # one look at the device a pass; most rows are settled by the first
            belief = self.belief(steps, replace(states, valid=unsettled), hidden, reveal, reveal.where)
            best = top_by(belief, reveal.where, one)
            doubted = reveal.where & ~best & (belief < self.threshold) & unsettled[:, None]
            reveal = reveal.only(reveal.where & ~top_by(-belief, doubted, one))
            several = several & (reveal.where.sum(-1) > 1)
            unsettled = unsettled & doubted.any(-1) & several
        if bool(several.any()):
            surest = top_by(reveal.confidence, reveal.where, one)
            belief = self.belief(steps, replace(states, valid=several), hidden, reveal, surest)
            reveal = reveal.only(reveal.where & (surest | (belief >= self.alone) | ~several[:, None]))
        return reveal


class SelfSpec(Static):
    """`self_spec`: `static`, with the following states drafted from the backbone's own stale logits. Needs no head.

    Args:
        num_draft_states: K, the states a row may submit per round.
        draft_branches: Followers of a state that are considered; 1 drafts a chain.
        compute_bound_tokens: Tokens in a forward up to which its time hardly grows; None: it never does.
    """

    drafts = True

    def __init__(self, num_draft_states: int, draft_branches: int, compute_bound_tokens: int | None = None) -> None:
        self.width = num_draft_states
        self.branches = draft_branches
        self.compute_bound_tokens = compute_bound_tokens


class Spec(SelfSpec):
    """`mrp_spec`: `static`, with the following states drafted by the head: acc_k = acc_{k-1} + Head(x^(k), acc_{k-1}).

    Args:
        num_draft_states: As in `SelfSpec`.
        draft_branches: As in `SelfSpec`.
        draft_passes: Head passes per round; with `num_draft_states - 1` of them each drafted state is re-read before the next.
        compute_bound_tokens: As in `SelfSpec`.
    """

    def __init__(
        self, num_draft_states: int, draft_branches: int, draft_passes: int, compute_bound_tokens: int | None = None
    ) -> None:
        super().__init__(num_draft_states, draft_branches, compute_bound_tokens)
        self.passes = min(draft_passes, num_draft_states - 1)
        self.uses_head = self.passes > 0


__all__ = [
    "Direct",
    "Dynamic",
    "EntropyBound",
    "HeadSteps",
    "Remask",
    "RereadRemask",
    "ResidualRemask",
    "SelfSpec",
    "Sequential",
    "Spec",
    "Static",
    "logit",
    "ranks",
    "top_by",
]
