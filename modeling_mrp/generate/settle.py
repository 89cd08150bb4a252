"""Settle a round's scores: which states are accepted, what becomes text, and where each row stands next."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.dispatch import Dispatch
from ..kernels.settle import Known, Settlement, Written, settle_fits, settle_kernel
from ..rules.drafting import Draft
from ..rules.rules import Accepted, accept, kept_states, offered_behind, steps_on_path
from ..rules.states import PARENT, Scored, States
from .decode_state import Counts, DecodeState, Request, finished


def settle(
    state: DecodeState,
    draft: Draft,
    scored: Scored,
    successor: States,
    request: Request,
    mask_id: int,
    width: int,
    drafts: bool,
    dispatch: Dispatch,
) -> Settlement:
    """Accept, write, count, remember, and find each row's next state. Text and counts are written to in place.

    Args:
        state: Where the decode stands.
        draft: The states of the round,
        scored: [rows, n] and what was said there.
        successor: [rows] the first state of the next block.
        request: What was asked for.
        mask_id: The mask's id.
        width: States that are remembered.
        drafts: Whether any are, and drafts counted.
        dispatch: Kernel or PyTorch.
    """
    twin = lambda: settle_ref(state, draft, scored, successor, request, mask_id, width, drafts)  # noqa: E731
    count, block = scored.states.start.shape[1], scored.states.ids.shape[-1]
    if not settle_fits(count + width * drafts, block):
        return twin()
    text, counts = state.text, state.counts
    written = Written(
        *(text.tokens, text.logprob, text.reveal_step, text.total_steps, text.stop, counts.drafted, counts.accepted),
        *(counts.accepted_lengths, counts.offered_at_depth, counts.accepted_at_depth),
    )
    return dispatch.run(
        "settle",
        lambda: settle_kernel(
            known_of(scored),
            known_of(state.memory.scored) if drafts else None,
            written,
            (state.current.table, state.current.valid),
            successor.table,
            request.limit,
            request.open_end,
            request.eos,
            mask_id,
            width,
        ),
        twin,
        scored.reveal.logprob,
        text.tokens,
    )


def known_of(scored: Scored) -> Known:
    """The same as plain tensors."""
    parts = (scored.states.table, scored.states.valid, *vars(scored.reveal).values())
    return Known(*(part.contiguous() for part in parts))


def settle_ref(
    state: DecodeState,
    draft: Draft,
    scored: Scored,
    successor: States,
    request: Request,
    mask_id: int,
    width: int,
    drafts: bool,
) -> Settlement:
    """The twin of `settle_kernel`."""
    text, count = state.text, scored.states.start.shape[1]
    accepted = accept(scored, state.memory if drafts else None, successor, request.eos, mask_id)
    drafted = count_round(state.counts, draft, accepted, mask_id, drafts)
    revealing = accepted.passed & ~accepted.clean
    steps = text.total_steps[:, None] + steps_on_path(accepted, mask_id)
    text.write(accepted.known.states, accepted.known.reveal, revealing, steps)
    text.total_steps += revealing.sum(-1)
    active = accepted.passed[:, 0]
    following = accepted.at_last(accepted.follower)
    current, stop = stand_at(state, following, active, request, mask_id)
    text.stop.copy_(stop)
    reveal = accepted.at_last(accepted.known.reveal)
    keep, ahead = kept_states(accepted, count, width)
    return Settlement(
        last=accepted.last,
        at_mask=active & ~accepted.clean.gather(1, accepted.last[:, None])[:, 0],
        token=reveal.token,
        odds=reveal.confidence,
        clean_slot=clean_slot(accepted, count),
        passed=counted(accepted, count),
        drafted=drafted,
        keep=keep,
        ahead=ahead,
        table=current.table,
        valid=current.valid,
    )


def counted(accepted: Accepted, count: int) -> Tensor:
    """[rows, count] bool: the round's states that were accepted and have masks, of rows whose next state has masks: so many
    rounds it would have taken without drafts."""
    return (accepted.passed & ~accepted.clean & ~accepted.clean[:, :1])[:, :count]


def clean_slot(accepted: Accepted, count: int) -> Tensor:
    """[rows] long: the slot of the accepted clean state among the `count` of the round, -1 if none."""
    which = (accepted.passed & accepted.clean)[:, :count]
    return torch.where(which.any(-1), which.int().argmax(-1), -1)


def stand_at(
    state: DecodeState,
    following: States,
    active: Tensor,
    request: Request,
    mask_id: int,
    ask: Callable[[Tensor, Tensor, Tensor], None] | None = None,
) -> tuple[States, Tensor]:
    """Find each row's next state.

    Args:
        state: Where the decode stands.
        following: [rows] what comes next for rows that are active.
        active: [rows] bool.
        request: What was asked for.
        mask_id: The mask's id.
        ask: May end more texts, given `active`, one past their last positions and whether they are whole; or None.

    Returns:
        The states [rows], not valid where the text is whole, and one past the last token of each text that is, [rows] long.
    """
    table = torch.where(active[:, None], following.table, state.current.table)
    table[:, PARENT] = -1
    current = States(table, active)
    end, done = finished(current, request, mask_id)
    if ask is not None:
        ask(active, end, done)
    return current.only(~done), torch.where(active & done, end, state.text.stop)


def count_round(counts: Counts, draft: Draft, accepted: Accepted, mask_id: int, drafts: bool) -> Tensor:
    """Count what a round's drafts came to; returns how many each row submitted, [rows] long."""
    passed, drafted, width = accepted.passed, draft.drafted, draft.valid.shape[1]
    counts.accepted_lengths.scatter_add_(1, passed.sum(-1, keepdim=True), draft.valid[:, :1].long())
    submitted = drafted.sum(1)
    if drafts:
        counts.drafted += submitted
        depth = (passed[:, :width] & drafted).sum(-1) + passed[:, width:].sum(-1)
        counts.accepted += depth
        states = accepted.known.states
        counts.add_path(depth, offered_behind(states, accepted.at_last(states), mask_id))
    return submitted


__all__ = ["clean_slot", "count_round", "counted", "known_of", "settle", "settle_ref", "stand_at"]
