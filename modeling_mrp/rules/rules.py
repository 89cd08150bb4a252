"""Rules of decoding: pure functions of tensors, callable without a model.

Which positions a step of the backbone reveals (`RevealRule`), the parts of the remasking rules that are in `modes`
(`kept_reveal`, `least_believed`), which scored states are accepted (`accept`), where a text ends (`whole_text`), and how many
reveals a step has (`reveal_schedule`).

A reveal rule is a function of **one scored state** and of nothing else: not of what was scored before, of other states of the
round, or of the way that led to the state. That is what makes drafting lossless: a state that was guessed and scored reveals
what it would have revealed had the text come to it step by step. A rule with a memory would need a field of `Candidates` that
only modes without drafts fill, from `DecodeState.seed`.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .constants import indices
from .states import PARENT, Memory, Reveal, Scored, States, TensorFields


@dataclass
class Candidates:
    """Candidates of [...] scored states, from which a reveal rule decides.

    Attributes:
        where: [..., block] bool, the masked positions that may be revealed.
        token: [..., block] long, the token picked at each.
        confidence: [..., block] float, log-odds of that token; -inf outside `where`. They order positions as probabilities
            do, and keep their precision where these round to 1.
        entropy: [..., block] nats, -inf outside `where`; None unless the rule says that it `needs_entropy`.
        ids: [..., block] long, the state itself.
        step: [...] long, the denoising steps taken in the block.
        quota: [...] long, how many positions the schedule reveals at this step.
    """

    where: Tensor
    token: Tensor
    confidence: Tensor
    entropy: Tensor | None
    ids: Tensor
    step: Tensor
    quota: Tensor


TensorPart = TypeVar("TensorPart", bound=TensorFields)


class RevealRule(Protocol):
    """Decides what a step of the backbone reveals: a frozen dataclass of its numbers, called with `Candidates`.

    It returns [..., block] bool, at least one where there is a candidate, and is a function of one scored state (see above).
    """

    needs_entropy: ClassVar[bool]

    def __call__(self, scored: Candidates) -> Tensor:
        """Choose the positions that are revealed."""
        ...


def ranks(score: Tensor, candidates: Tensor) -> Tensor:
    """[..., block] long: the place of each candidate by score [..., block], best first, ties to the left; the others follow."""
    order = score.masked_fill(~candidates, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    places = indices(order.shape[-1], order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def top_by(score: Tensor, candidates: Tensor, count: Tensor) -> Tensor:
    """The `count` [...] best of the candidates [..., block] by score [..., block], ties to the left; bool [..., block]."""
    return candidates & (ranks(score, candidates) < count[..., None])


def best_by(score: Tensor, candidates: Tensor) -> Tensor:
    """The best of the candidates [..., block] by score [..., block], ties to the left; bool [..., block]."""
    best = score.clamp(min=torch.finfo(score.dtype).min).masked_fill(~candidates, -torch.inf).argmax(-1, keepdim=True)
    return candidates & (indices(score.shape[-1], score.device) == best)


def logit(probability: float) -> float:
    """log p - log (1 - p), infinite at 0 and 1."""
    if probability <= 0:
        return -math.inf
    return math.inf if probability >= 1 else math.log(probability) - math.log1p(-probability)


# ---------------------------------------------------------------------------------------------------- what is revealed


@dataclass(frozen=True)
class Static:
    """Reveal the n most confident positions; n = block_size / denoising_steps, the remainder to the first steps."""

    needs_entropy: ClassVar[bool] = False

    def __call__(self, scored: Candidates) -> Tensor:
        """See `RevealRule`."""
        return top_by(scored.confidence, scored.where, scored.quota)


@dataclass(frozen=True)
class Sequential:
    """Reveal the n leftmost masked positions."""

    needs_entropy: ClassVar[bool] = False

    def __call__(self, scored: Candidates) -> Tensor:
        """See `RevealRule`."""
        return scored.where & (scored.where.cumsum(-1) <= scored.quota[..., None])


@dataclass(frozen=True)
class Dynamic:
    """Reveal every position whose confidence exceeds tau; at least the most confident one.

    Attributes:
        threshold: tau, in log-odds (`logit`).
    """

    threshold: float
    needs_entropy: ClassVar[bool] = False

    def __call__(self, scored: Candidates) -> Tensor:
        """See `RevealRule`."""
        return (scored.where & (scored.confidence > self.threshold)) | best_by(scored.confidence, scored.where)


@dataclass(frozen=True)
class EntropyBound:
    """Reveal in order of entropy while the running sum stays under a bound; at least one.

    Attributes:
        bound: In nats.
    """

    bound: float
    needs_entropy: ClassVar[bool] = True

    def __call__(self, scored: Candidates) -> Tensor:
        """See `RevealRule`."""
        assert scored.entropy is not None
        entropy = scored.entropy.masked_fill(~scored.where, torch.inf)
        ordered, order = entropy.sort(dim=-1, descending=False, stable=True)
        below = ordered.cumsum(-1) < self.bound
        under = torch.empty_like(below).scatter_(-1, order, below)
        return (scored.where & under) | best_by(-entropy, scored.where)


def reveal_schedule(block_size: int, denoising_steps: int | None) -> Tensor:
    """[block_size] long: how many positions each denoising step of a block reveals, then zeros."""
    steps = denoising_steps or block_size
    counts = torch.zeros(block_size, dtype=torch.long)
    counts[:steps] = block_size // steps
    counts[: block_size % steps] += 1
    return counts


# ------------------------------------------------------------------------------------------------- what is taken back


def kept_reveal(reveal: Reveal, passed: Tensor, belief: Tensor) -> Reveal:
    """Keep what passed [n, block] of a reveal, and its most believed token by `belief` [n, block] where nothing did."""
    kept = reveal.where & passed
    return reveal.only(kept | (best_by(belief, reveal.where) & ~kept.any(-1, keepdim=True)))


def least_believed(reveal: Reveal, belief: Tensor, threshold: float, which: Tensor) -> tuple[Tensor, Tensor]:
    """Find the one reveal of each state that its belief condemns first.

    Args:
        reveal: [n].
        belief: [n, block] log-odds of the revealed tokens under all of them.
        threshold: Those under it are doubted, but for the most believed.
        which: [n] bool, the states that are looked at.

    Returns:
        The least believed doubted position, [n, block] bool, and whether any was doubted, [n] bool.
    """
    doubted = reveal.where & ~best_by(belief, reveal.where) & (belief < threshold) & which[:, None]
    return best_by(-belief, doubted), doubted.any(-1)


# ------------------------------------------------------------------------------------------------- where a text ends


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
    hidden = (ids == mask_id) & (indices(block, ids.device) < end[..., None])
    return (end <= block) & ~hidden.any(-1)


# ------------------------------------------------------------------------------------------------- what is accepted


def stepped(states: States, reveal: Reveal, eos: Tensor) -> States:
    """Apply a reveal to [...] states: the states one denoising step later.

    Args:
        states: [...].
        reveal: [...].
        eos: [any] long, ids that end a text.
    """
    ids, block = states.ids, states.ids.shape[-1]
    hit = reveal.where & (reveal.token[..., None] == eos).any(-1)
    column = torch.where(hit, indices(block, ids.device), block).amin(-1)
    made = torch.where(reveal.where, reveal.token, ids)
    parent = torch.full_like(column, -1)
    return States.of(made, states.start, parent, states.step + 1, torch.minimum(states.end, column), states.valid)


@dataclass
class Accepted:
    """Which of the states that are known in a round the backbone's own reveals lead through.

    Known are the n states of the round, then the m remembered ones.

    Attributes:
        known: [rows, n + m].
        follower: [rows, n + m] the state that each leads to: what its reveal makes; behind a clean one the next block's.
        clean: [rows, n + m] bool, states without masks.
        next_index: [rows, n + m] long, the place of that follower among the known ones, -1 if it is not known.
        passed: [rows, n + m] bool, the accepted path; empty for a row whose first state is not valid.
        last: [rows] long, the place of the path's last state, the frontier.
    """

    known: Scored
    follower: States
    clean: Tensor
    next_index: Tensor
    passed: Tensor
    last: Tensor

    def at_last(self, part: TensorPart) -> TensorPart:
        """One of each row: that of the last accepted state, of what is [rows, n + m]."""
        rows = indices(len(self.last), self.last.device)
        return part.map(lambda t: t[rows, self.last])


def accept(scored: Scored, memory: Memory | None, successor: States, eos: Tensor, mask_id: int) -> Accepted:
    """Accept the longest verified path of each row.

    A path starts at the row's first state, which is its text. A state's own reveal makes its follower; where that was scored
    too, in this round or the last one, the path goes on there. What was drafted therefore decides how far a path leads, never
    where.

    Args:
        scored: [rows, n] the states of the round, the row's own one first.
        memory: Those that the last round scored in vain, or None.
        successor: [rows] the first state of the next block; clean states lead there.
        eos: [any] long, ids that end a text.
        mask_id: The mask's id.
    """
    known = scored if memory is None else scored.cat(memory.scored)
    clean = ~known.states.masked(mask_id).any(-1)
    after = stepped(known.states, known.reveal, eos)
    slot = indices(clean.shape[1], clean.device)
    behind = successor.table[:, None].repeat(1, len(slot), 1)
    behind[..., PARENT] = slot
    follower = replace(after, table=torch.where(clean[..., None], behind, after.table))
    same = (follower.name[:, :, None] == known.states.name[:, None]).all(-1)
    same &= known.states.valid[:, None] & known.states.valid[..., None]
    next_index = torch.where(same.any(-1), same.int().argmax(-1), -1)
    active = scored.states.valid[:, 0]
    passed, last = path_from_first(next_index)
    return Accepted(known, follower, clean, next_index, passed & active[:, None], last)


def path_from_first(next_index: Tensor) -> tuple[Tensor, Tensor]:
    """Follow links from place 0.

    Args:
        next_index: [rows, n] long, where each place leads, -1 to nowhere.

    Returns:
        Which places are on the way, [rows, n] bool, and the last of them, [rows] long.
    """
    count = next_index.shape[1]
    jump = torch.where(next_index < 0, indices(count, next_index.device), next_index)
    passed = torch.zeros_like(next_index)
    passed[:, 0] = 1
    for _ in range((count - 1).bit_length()):  # all that 1, 2, 4, ... steps reach
        passed = passed.scatter_reduce(1, jump, passed, "amax")
        jump = jump.gather(1, jump)
    return passed.bool(), jump[:, 0]


def remembered(accepted: Accepted, count: int, width: int) -> Memory:
    """Keep what a round has scored, its `count` states, for the next one, in `width` places."""
    return memory_of(accepted.known.map(lambda t: t[:, :count]), *kept_states(accepted, count, width))


def memory_of(scored: Scored, keep: Tensor, ahead: Tensor) -> Memory:
    """Remember scored states [rows, n]: those of `keep` [rows, width], and where they lead (see `Memory`)."""
    wide = scored.map(lambda t: padded(t, keep.shape[1]))
    return Memory(replace(wide, states=replace(wide.states, valid=keep)), ahead)


def kept_states(accepted: Accepted, count: int, width: int) -> tuple[Tensor, Tensor]:
    """Choose what a round has scored for the next one to remember.

    Kept are its `count` states but the clean ones, and those that looked at a clean one, which may turn out not to be text.

    Returns:
        Which of them are kept, [rows, width] bool, and where they lead, [rows, width, block + 6] long: see `Memory`.
    """
    states = accepted.known.states.map(lambda t: t[:, :count])
    keep = states.valid & ~accepted.clean[:, :count] & (states.parent < 0)
    next_index = accepted.next_index[:, :count]
    known = (next_index >= 0) & (next_index < count)
    known &= keep.gather(1, next_index.clamp(0, count - 1))
    frontier = torch.where(known, next_index, indices(count, next_index.device))
    for _ in range(count.bit_length()):
        frontier = frontier.gather(1, frontier)
    table = accepted.follower.table
    ahead = table.gather(1, frontier[..., None].expand(-1, -1, table.shape[-1]))
    source = (1 + frontier)[..., None]
    return padded(keep, width), padded(torch.cat([ahead, source, source], -1), width)


def padded(values: Tensor, width: int) -> Tensor:
    """[rows, width, ...] of [rows, n, ...]: zeros behind the n."""
    more = width - values.shape[1]
    return F.pad(values, (0, 0) * (values.dim() - 2) + (0, more)) if more else values


def offered_behind(states: States, last: States, mask_id: int) -> Tensor:
    """[rows] bool: one of states [rows, n] is a denoising step behind `last` [rows] and keeps all that is revealed there."""
    revealed = last.ids[:, None]
    agrees = ((states.ids == revealed) | (revealed == mask_id)).all(-1)
    agrees &= (states.start == last.start[:, None]) & (states.step == last.step[:, None] + 1)
    return (agrees & states.valid & (states.parent < 0)).any(-1) & last.valid


def steps_on_path(accepted: Accepted, current: States) -> Tensor:
    """[rows, n] long: the denoising steps between a row's next state `current` and each state on its accepted path."""
    states = accepted.known.states
    steps = states.step - current.step[:, None]
    here = states.start == current.start[:, None]
    in_block = (steps * (here & accepted.passed)).amax(1, keepdim=True)  # those of a block that became clean
    return torch.where(here, steps, in_block + states.step)


__all__ = [
    "Accepted",
    "Candidates",
    "Dynamic",
    "EntropyBound",
    "RevealRule",
    "Sequential",
    "Static",
    "accept",
    "best_by",
    "kept_reveal",
    "kept_states",
    "least_believed",
    "logit",
    "memory_of",
    "offered_behind",
    "padded",
    "path_from_first",
    "ranks",
    "remembered",
    "reveal_schedule",
    "stepped",
    "steps_on_path",
    "top_by",
    "whole_text",
]
