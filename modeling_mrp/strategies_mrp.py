"""Decoding strategies: which positions a step reveals, what the head adds to it, and what is drafted ahead.

A strategy has two methods. `reveal` chooses among the masked positions of a state the ones a denoising step commits.
`refine` may change that choice before it counts (more reveals, or some taken back). Its numbers say what is drafted: states
that may follow, scored together in one forward; a wrong guess is not walked through, so drafts never change the text.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from .states_mrp import Reveal, States


class HeadSteps(Protocol):
    """What a strategy may ask of the decoder: head passes and picks on one state per row."""

    def head_hidden(self, states: States, hidden: Tensor) -> Tensor:
        """h_C at the states, given hidden states h_A (or their estimate) [rows, block, hidden]."""
        ...

    def reveal_from(self, states: States, hidden: Tensor, count: Tensor | None = None) -> Reveal:
        """Picks from hidden states at the states, and what the strategy reveals of them."""
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


def log_odds(probability: float) -> float:
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
        """Changes a reveal before it counts; by default it stands."""
        return reveal


class Sequential(Static):
    """Reveal the n leftmost masked positions."""

    def reveal(self, confidence: Tensor, entropy: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
        """See `Static.reveal`."""
        return candidates & (candidates.cumsum(-1) <= count[:, None])


class Dynamic(Static):
    """Reveal every position whose confidence exceeds tau; at least the most confident one."""

    def __init__(self, threshold: float) -> None:
        self.threshold = log_odds(threshold)

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
        under = (ordered.cumsum(-1) < self.bound).scatter(1, order, ordered.cumsum(-1) < self.bound)
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

    Args:
        threshold: tau of the reveal and of the second reading.
        rule: `threshold` (published): the head is conditioned on the fresh reveals, and a token whose corrected
            confidence falls under tau goes back to a mask. `residual` (released code): the head reads the
            state before the reveal, and a token whose residual logit exceeds `residual_delta` in magnitude goes back.
        residual_delta: In logits.
    """

    uses_head = True

    def __init__(self, threshold: float, rule: str, residual_delta: float) -> None:
        super().__init__(threshold)
        self.rule = rule
        self.residual_delta = residual_delta

    def refine(self, steps: HeadSteps, states: States, hidden: Tensor, reveal: Reveal) -> Reveal:
        """See `Static.refine`."""
        if self.rule == "threshold":
            after = reveal.applied_to(states)
            corrected = hidden + steps.head_hidden(after, hidden)
            belief = steps.token_confidence(states, corrected, reveal.token, reveal.where)
            kept = reveal.where & (belief >= self.threshold)
        else:
            residual = steps.head_hidden(states, hidden)
            belief = reveal.confidence
            kept = reveal.where & (steps.residual_magnitude(residual, reveal.token, reveal.where) <= self.residual_delta)
        surest = top_by(belief, reveal.where, torch.ones_like(states.start))
        return reveal.only(kept | (surest & ~kept.any(-1, keepdim=True)))


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
    "SelfSpec",
    "Sequential",
    "Spec",
    "Static",
    "log_odds",
    "ranks",
    "top_by",
]
