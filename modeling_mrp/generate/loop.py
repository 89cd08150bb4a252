"""The one decoding loop: rounds of states side by side, over rows that never wait for each other.

A row (one sequence of the batch) is a little state machine. Its *next* state is known: the backbone itself revealed it from the
last state scored. A round (`decode_round`) goes

1. **draft**: each row submits its next state, the likeliest ones to follow it and, behind a clean state (no masks left), the
   all-mask state of the next block, which looks at the clean one;
2. **verify**: one backbone forward scores all of them, [rows, states * block_size] tokens, and the reveal rule says what it
   reveals at each;
3. **accept**: these reveals lead from state to state; as far as they meet what this round or the one before scored, that is
   accepted. The reveal at the last accepted state, refined by the mode, makes the row's next state;
4. **commit**: what was revealed becomes text, and the KV of accepted clean blocks becomes prefix.

A mode that drafts nothing submits one state a round (two where a block ends) and is otherwise the same code.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from ..kernels.grow import DraftTable
from ..rules.constants import indices
from ..rules.drafting import BASE, Draft, as_slots, grow, growth, undrafted, with_estimates
from ..rules.rules import Accepted, accept, memory_of, remembered, stepped, steps_on_path
from ..rules.states import PARENT, Memory, Reveal, Scored, Source, States
from ..runner.runner import Held, RoundRunner, Runner
from .active_rows import ActiveRows
from .decode_state import Counts, DecodeState, Remasked, RoundPlan, Text, first_state, summary
from .modes import Mode
from .pace import Fixed, Pace
from .scoring import Reader, unscored_error
from .settle import clean_slot, count_round, counted, settle, stand_at
from .stopping import Stopping


@dataclass(frozen=True)
class Task:
    """Task of one decode; nothing of it changes.

    Attributes:
        mode: What is revealed, refined and drafted.
        reader: How hidden states become reveals; it holds the `Request`.
        block_size: Tokens of a block.
        mask_token_id: The mask's id.
        stopping: Asks the stopping criteria; or None.
    """

    mode: Mode
    reader: Reader
    block_size: int
    mask_token_id: int
    stopping: Stopping | None = None

    def successor(self, state: DecodeState) -> States:
        """[rows] the first state of the block behind each row's current one."""
        return first_state(state.text, state.current.start + self.block_size, self.block_size)


# A round: the state behind it, the numbers of its summary, and whether it took the time that such rounds will take.
Step = Callable[[DecodeState, RoundPlan], tuple[DecodeState, list[int], bool]]


@dataclass(frozen=True)
class Decoded:
    """A decode that has come to its end.

    Attributes:
        state: The last state.
        remasked: What each step remasked.
        slots: Rows of all rounds added up, those included that had ended while the batch went on.
    """

    state: DecodeState
    remasked: list[Remasked]
    slots: int


def decode(
    task: Task,
    runner: Runner,
    state: DecodeState,
    pace: Pace | Fixed,
    steps: Callable[[Task, DecodeState], Step] | None = None,
    on_round: Callable[[DecodeState, list[int]], None] | None = None,
    least_rows: int = 1,
) -> Decoded:
    """Decode every row to its end.

    Args:
        task: What to do.
        runner: Runs the model.
        state: As `begin` gave it.
        pace: Chooses how much each round drafts.
        steps: Gives what runs a round from a state on and reads its summary, from a recording for instance; by default
            `decode_round` as it is.
        on_round: Called after every round (for streamers) with the state, and which rows it holds; or None.
        least_rows: Rows that have ended leave the batch by halves, but not below so many.

    Raises:
        ValueError: for a position at which no token has a finite score.
    """
    try:
        return _decode_rows(task, runner, state, ActiveRows(state, least_rows), pace, steps, on_round)
    finally:
        runner.widen()


def unrecorded(runner: Runner, task: Task, state: DecodeState) -> Step:
    """Run rounds as they are."""

    def step(state: DecodeState, plan: RoundPlan) -> tuple[DecodeState, list[int], bool]:
        state, accepted = decode_round(task, runner, state, plan)
        return state, summary(state, task.mask_token_id, accepted).tolist(), True

    return step


def _decode_rows(
    task: Task,
    runner: Runner,
    state: DecodeState,
    rows: ActiveRows,
    pace: Pace | Fixed,
    steps: Callable[[Task, DecodeState], Step] | None,
    on_round: Callable[[DecodeState, list[int]], None] | None,
) -> Decoded:
    def seen(state: DecodeState, numbers: list[int]) -> RoundPlan:
        if (plan := RoundPlan.read(numbers, len(rows.rows))).unscored:
            runner.widen()
            runner.cache.empty()  # what is not finite there is not gone on from
            raise unscored_error(task.reader, runner.model, state.text)
        runner.reach = max(runner.reach, (plan.used or 0) + task.block_size)  # a round commits a block of a row, or none
        return plan

    branches = None if steps else task.mode.drafting.branches if task.mode.drafting else 1
    steps = steps or partial(unrecorded, runner)
    pace.begin()
    step, after = steps(task, state), seen(state, summary(state, task.mask_token_id).tolist())
    remasked: list[Remasked] = []
    behind = runner.rests  # the head has texts to read
    while True:
        plan = after.with_slots(pace.choose(after, len(rows.rows), branches, behind), branches)
        if task.mode.refine is not None and task.mode.refine.remasks:
            remasked.append(rows.all_remasked(state.remasked))
        if not plan.active:
            return Decoded(rows.all_of(state), remasked, rows.slots)
        rows.slots += (size := len(rows.rows))
        begun = ready = perf_counter()
        if behind and plan.amount.passes:
            state = replace(state, held=runner.catch_up(state.text.tokens, state.held))
            plan, behind = replace(plan, head_used=plan.used, late=False, blocked=False), False
            ready = perf_counter()
        behind = behind or (runner.rests and not plan.amount.passes)
        state, numbers, usual = step(state, plan)
        after = seen(state, numbers)
        pace.learn(plan, after.accepted, size, perf_counter() - ready, ready - begun, usual)
        if on_round is not None:
            on_round(state, rows.rows)
        if (size := rows.smaller(after.active)) < len(rows.rows) and after.active:
            state, request = rows.shrink(state, task.reader.request, runner, after.going, size)
            task = replace(task, reader=replace(task.reader, request=request))
            step = steps(task, state)


def decode_round(task: Task, runner: RoundRunner, state: DecodeState, plan: RoundPlan) -> tuple[DecodeState, Tensor]:
    """Run one round.

    It takes the state over: tensors of the text and the counts are written to in place, all others are made anew.

    Returns:
        The state behind it, and how many rows accepted each of its states, [states] long, of those that had masks left.
    """
    successor = task.successor(state)
    head = HeadPasses(runner, state.held, plan.head_used, plan.late and head_reads(runner, plan))
    draft = draft_states(task, head, state, successor, plan)
    return verify_draft(task, runner, state, successor, head, draft, plan)


def verify_draft(
    task: Task, runner: RoundRunner, state: DecodeState, successor: States, head: "HeadPasses", draft: Draft, plan: RoundPlan
) -> tuple[DecodeState, Tensor]:
    """Run the rest of a round, whoever drafted: verify, accept, commit.

    Arguments and results are those of `decode_round`, and:

    Args:
        successor: [rows] the first state of each row's next block.
        head: The head's passes so far.
        draft: The states to score, each row's next one first. A state behind a clean one names it as its parent; none is
            drafted of which nothing is left to reveal before the end of the row.
    """
    drafts, reads = task.mode.drafting is not None and plan.amount.states > 1, head_reads(runner, plan)
    scratch, held = runner.score(draft.states, head.held, plan.used, state.current.valid)
    reveal = task.reader.reveal(scratch.states, scratch.hidden, state.text)
    scored = Scored(scratch.states, reveal, scratch.hidden)

    # Where nothing is drafted and no row was clean, no clean state was scored.
    commit = partial(runner.commit_clean, scratch, for_head=reads) if drafts or plan.clean else None
    if task.mode.refine is not None or task.stopping is not None:
        accepted = accept(scored, state.memory if drafts else None, successor, task.reader.request.eos, task.mask_token_id)
        return refined_round(task, runner, state, head, draft, accepted, held, commit, plan)

    settled = settle(
        state,
        draft,
        scored,
        successor,
        task.reader.request,
        task.mask_token_id,
        task.mode.width,
        drafts,
        task.reader.sampler.dispatch,
    )

    held = commit(settled.clean_slot, held=held) if commit else held
    hidden = torch.cat([scored.hidden, state.memory.scored.hidden], 1) if drafts else scored.hidden
    rows = indices(len(hidden), hidden.device)
    state = replace(
        state,
        current=States(settled.table, settled.valid),
        seed=Source(settled.token, settled.odds, hidden[rows, settled.last]),
        has_seed=settled.at_mask,
        held=replace(held, late=held.late & settled.valid if reads else torch.zeros_like(held.late)),
    )
    if drafts:
        state.counts.verified += (settled.drafted > 0).any()
        state = replace(state, memory=memory_of(scored, settled.keep, settled.ahead))
    return state, settled.passed.sum(0)


def head_reads(runner: RoundRunner, plan: RoundPlan) -> bool:
    """Tell if the head reads along in a round: it drafts there, or never rests."""
    return plan.amount.passes > 0 or not runner.rests


def refined_round(
    task: Task,
    runner: RoundRunner,
    state: DecodeState,
    head: "HeadPasses",
    draft: Draft,
    accepted: Accepted,
    held: Held,
    commit: Callable[..., Held] | None,
    plan: RoundPlan,
) -> tuple[DecodeState, Tensor]:
    """Run the second half of a round whose reveals are refined by the head, or whose texts stopping criteria may end."""
    drafts, count = task.mode.drafting is not None and plan.amount.states > 1, draft.valid.shape[1]
    submitted = count_round(state.counts, draft, accepted, task.mask_token_id, drafts)
    held = commit(clean_slot(accepted, count), held=held) if commit else held
    if drafts:
        state.counts.verified += (submitted > 0).any()
        state = replace(state, memory=remembered(accepted, count, task.mode.width))
    # Where drafts are made, the next plan tells.
    late = head.late or (plan.clean > 0 and task.mode.drafting is None)
    state = advance(task, HeadPasses(runner, held, head.used, late), state, accepted)
    return state, counted(accepted, count).sum(0)


class HeadPasses:
    """The head's passes within a round.

    Args:
        runner: Runs the head.
        held: What is held.
        used: The longest committed text of the head; None: all slots are read.
        late: Whether some row's head KV is late; the next pass computes it.
    """

    def __init__(self, runner: RoundRunner, held: Held, used: int | None, late: bool) -> None:
        self.runner, self.held, self.used, self.late = runner, held, used, late

    def __call__(self, states: States, hidden: Tensor, blocked: Tensor | None = None) -> Tensor:
        """Compute h_C at states [rows, n] from hidden states [rows, n, block, hidden_size]; `blocked` as in `head_pass`."""
        blocked = blocked if self.late else None
        residual, self.held = self.runner.head_pass(states, hidden, self.held, self.used, self.late, blocked)
        if self.late:
            self.late, self.used = False, None if self.used is None else self.used + self.runner.block
        return residual


def draft_states(task: Task, head: HeadPasses, state: DecodeState, successor: States, plan: RoundPlan) -> Draft:
    """Choose the states of the round: each row's next one, the likeliest to follow it, the next block's behind a clean one."""
    current, drafting = state.current, task.mode.drafting
    blocked = state.held.late & current.valid & ~current.masked(task.mask_token_id).any(-1) if plan.blocked else None
    if drafting is None or plan.per_row == 1:
        if plan.blocked and head.late:  # no other pass catches up
            head(current.only(torch.zeros_like(current.valid)).map(lambda t: t[:, None]), state.seed.hidden[:, None], blocked)
        return undrafted(current, successor, task.mask_token_id, plan.room)
    table, hidden = sources(task, state, successor)
    dispatch = task.reader.sampler.dispatch
    sizes = growth(plan.per_row, plan.amount.passes)
    for turn, size in enumerate(sizes if plan.masks > 1 else sizes[:1]):  # behind a single mask nothing is read twice
        draft = grow(table, min(size, plan.room), task.mode.width, dispatch)
        table, hidden = re_read(task, head, state.text, table, hidden, draft, min(turn, 1), blocked)
    if plan.blocked and head.late:
        head(current.only(torch.zeros_like(current.valid)).map(lambda t: t[:, None]), state.seed.hidden[:, None], blocked)
    return grow(table, plan.room, task.mode.width, dispatch)


def sources(task: Task, state: DecodeState, successor: States) -> tuple[DraftTable, Tensor]:
    """Lay out what drafts are read from: the last accepted state and the remembered ones.

    Returns:
        The table, and the sources' hidden states [rows, sources, block, hidden_size].
    """
    assert task.mode.drafting is not None
    seed, scored, reader = state.seed, state.memory.scored, task.reader
    hidden = torch.cat([seed.hidden[:, None], scored.hidden], 1)
    if reader.drafter.sample:  # what they say depends on the state that is drafted
        at = state.current.only(state.has_seed).map(lambda t: t[:, None]).cat(scored.states)
        token, odds = reader.estimates(at, hidden, state.text)
    else:
        token = torch.cat([seed.token[:, None], scored.reveal.token], 1)[..., None]
        odds = torch.cat([seed.odds[:, None], scored.reveal.confidence], 1)[..., None]
    request, block = reader.request, task.block_size
    table = DraftTable(
        first=as_slots(state.current, state.has_seed.long() - 1),
        valid=state.current.valid,
        token=token,
        odds=odds,
        known=scored.states.table[..., : block + 1],
        known_valid=scored.states.valid,
        ahead=state.memory.ahead,
        successor=as_slots(successor, -1),
        open_successor=successor.masked(task.mask_token_id).any(-1),
        open_end=request.open_end,
        eos=request.eos,
        schedule=request.schedule,
        seed=request.seed if reader.drafter.sample else None,
        rule=task.mode.rule,
        mask_id=task.mask_token_id,
        branches=min(task.mode.drafting.branches, block),
    )
    return table, hidden


def re_read(
    task: Task,
    head: HeadPasses,
    text: Text,
    table: DraftTable,
    hidden: Tensor,
    draft: Draft,
    begin: int,
    blocked: Tensor | None,
) -> tuple[DraftTable, Tensor]:
    """Let the head read a draft in one pass: an estimate of its own for each state, from which it is looked up later.

    Args:
        task: What is done.
        head: The head.
        text: The rows' texts.
        table: What the draft was grown on.
        hidden: [rows, sources, block, hidden_size] of the sources so far.
        draft: What is read, from its `begin`-th state on: the first one's estimate cannot get better.
        begin: See `draft`.
        blocked: As in `Runner.head_pass`.

    Returns:
        The table and the hidden states with the new sources. Each estimate starts from what the state's parent has by now.
    """
    slots, base = draft.slots[:, begin:], draft.slots[:, begin:, BASE]
    states = draft.states.map(lambda t: t[:, begin:])
    states = states.only(states.masked(task.mask_token_id).any(-1) & (base >= 0))
    rows = indices(len(slots), slots.device)[:, None]
    estimate = hidden[rows, base.clamp(min=0)]
    estimate = estimate + head(states, estimate, blocked)
    token, odds = task.reader.estimates(states, estimate, text)
    return with_estimates(table, slots, states.valid, token, odds, begin), torch.cat([hidden, estimate], 1)


def advance(task: Task, head: HeadPasses, state: DecodeState, accepted: Accepted) -> DecodeState:
    """From the last accepted states: reveal, refine, write what was revealed, and stand at the next state."""
    refine, text, request = task.mode.refine, state.text, task.reader.request
    active = accepted.passed[:, 0]
    last = accepted.at_last(accepted.known)
    at_mask = active & last.states.masked(task.mask_token_id).any(-1)
    revealing = accepted.passed & ~accepted.clean
    following = accepted.at_last(accepted.follower)
    if refine is None:
        steps = text.total_steps[:, None] + steps_on_path(accepted, task.mask_token_id)
        text.write(accepted.known.states, accepted.known.reveal, revealing, steps)
    else:
        last.states.table[:, PARENT] = -1  # what it looked at is text by now
        asked = HeadQuestions(task, head, text)
        refined = refine(asked, replace(last.states, valid=at_mask), last.hidden, last.reveal)
        if refine.remasks:
            back = last.reveal.where & ~refined.where & at_mask[:, None]
            state.counts.revoked += back.sum(-1)
            state = replace(state, remasked=Remasked(last.states.start, back, last.reveal.token))
        one, shown = last.states.map(lambda t: t[:, None]), refined.map(lambda t: t[:, None])
        text.write(one, shown, at_mask[:, None], text.total_steps[:, None])
        after = stepped(last.states, refined, request.eos)
        following = replace(following, table=torch.where(at_mask[:, None], after.table, following.table))
    text.total_steps += revealing.sum(-1)
    ask = None if task.stopping is None else partial(task.stopping.ask, text, request)
    current, stop = stand_at(state, following, active, request, task.mask_token_id, ask)
    return replace(
        state,
        text=replace(text, stop=stop),
        current=current,
        seed=Source(last.reveal.token, last.reveal.confidence, last.hidden),
        has_seed=at_mask,
        held=replace(head.held, late=head.held.late & current.valid),
    )


@dataclass(frozen=True)
class HeadQuestions:
    """Answer what a refinement asks (`HeadSteps`), on one state per row."""

    task: Task
    head: HeadPasses
    text: Text

    def head_hidden(self, states: States, hidden: Tensor) -> Tensor:
        """See `HeadSteps`."""
        return self.head(states.map(lambda t: t[:, None]), hidden[:, None])[:, 0]

    def most_confident(self, states: States, reveal: Reveal, hidden: Tensor) -> Reveal:
        """See `HeadSteps`."""
        after = stepped(states, reveal, self.task.reader.request.eos).map(lambda t: t[:, None])
        best = self.task.reader.reveal(after, hidden[:, None], self.text, torch.ones_like(after.start))
        return best.map(lambda t: t[:, 0])

    def token_confidence(self, states: States, hidden: Tensor, token: Tensor, where: Tensor) -> Tensor:
        """See `HeadSteps`."""
        one = states.map(lambda t: t[:, None])
        return self.task.reader.token_confidence(one, hidden[:, None], token[:, None], where[:, None], self.text)[:, 0]

    def residual_magnitude(self, hidden: Tensor, token: Tensor, where: Tensor) -> Tensor:
        """See `HeadSteps`."""
        return self.task.reader.residual_magnitude(hidden, token, where)


def begin(task: Task, runner: Runner, text: Text, current: States, reused: Tensor) -> DecodeState:
    """Prefill, and take the first step: the state before the first round.

    Args:
        task: What to do.
        runner: Runs the model.
        text: The rows' texts, laid out.
        current: [rows] their first states.
        reused: [rows] long, so many first tokens have their keys and values already.
    """
    drafts, width = task.mode.drafting is not None, task.mode.width
    held = runner.start(current.start, reused.minimum(runner.cache.head_held.to(reused.device)))
    hidden, held = runner.prefill(text.tokens, current.start, reused, held)
    states = current.map(lambda t: t[:, None])
    reveal = task.reader.reveal(states, hidden[:, None], text)
    scored = Scored(states, reveal, hidden[:, None])
    nowhere = current.only(torch.zeros_like(current.valid))
    memory = Memory(Scored(nowhere.map(lambda t: t[:, None]), reveal, hidden[:, None]), as_slots(nowhere, -1)[:, None])
    state = DecodeState(
        text=text,
        current=current,
        seed=Source(reveal.token[:, 0], reveal.confidence[:, 0], hidden),
        has_seed=current.valid,
        memory=memory.map(lambda t: t.expand(-1, width, *t.shape[2:])),
        held=held,
        counts=Counts.zeros(len(current.start), width, drafts, current.start.device),
        remasked=Remasked(current.start, torch.zeros_like(reveal.where[:, 0]), current.ids),
    )
    successor = task.successor(state)
    accepted = accept(scored, None, successor, task.reader.request.eos, task.mask_token_id)
    used = int(held.committed.max())
    return advance(task, HeadPasses(runner, held, used, False), state, accepted)


__all__ = [
    "Decoded",
    "HeadPasses",
    "HeadQuestions",
    "Task",
    "advance",
    "begin",
    "decode",
    "decode_round",
    "draft_states",
    "verify_draft",
]
