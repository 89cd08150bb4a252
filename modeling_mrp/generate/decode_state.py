"""One decode in tensors: what was asked, what a round changes, and what the host reads of it once a round."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.utils._pytree import register_dataclass

from ..rules.constants import constant, indices
from ..rules.drafting import reachable
from ..rules.rules import whole_text
from ..rules.states import Memory, Reveal, Source, States
from ..runner.runner import Held
from .modes import Amount


@dataclass
class Request:
    """Request of one decode, row by row: tensors that no round changes.

    Attributes:
        row: [rows] long, which of the call's rows each is.
        prompt_length: [rows] long.
        given_end: [rows] long, one past the last token that was given: of the prompt, or of what is to be filled in.
        limit: [rows] long, one past the last position the user wants.
        open_end: [rows] long, one past the last position before `limit` that is not given.
        no_eos_before: [rows] long, positions before it take no eos.
        seed: [rows] long.
        schedule: [block] long, reveals per denoising step, then zeros.
        eos: [any] long, ids that end a row.
    """

    row: Tensor
    prompt_length: Tensor
    given_end: Tensor
    limit: Tensor
    open_end: Tensor
    no_eos_before: Tensor
    seed: Tensor
    schedule: Tensor
    eos: Tensor


@dataclass
class Text:
    """The rows' texts by absolute position, without padding.

    One more column, behind the capacity, takes what is not to be kept, so that writing needs no count of what is.

    Attributes:
        tokens: [rows, capacity + 1] long: prompt, given and revealed tokens, masks.
        logprob: [rows, capacity + 1] float32 log-confidence of generated tokens when committed.
        reveal_step: [rows, capacity + 1] long index of the denoising step that committed them, -1 elsewhere.
        total_steps: [rows] long, denoising steps taken in all.
        stop: [rows] long, one past the last token of the text once it is known, else a large number.
    """

    tokens: Tensor
    logprob: Tensor
    reveal_step: Tensor
    total_steps: Tensor
    stop: Tensor

    @property
    def capacity(self) -> int:
        """Positions, without the column behind them."""
        return self.tokens.shape[1] - 1

    def with_room(self, capacity: int) -> "Text":
        """The same texts with masks up to so many positions."""

        def longer(tensor: Tensor) -> Tensor:  # its last column holds what nothing was written to
            return torch.cat([tensor, tensor[:, -1:].expand(-1, capacity - self.capacity)], 1)

        return replace(self, tokens=longer(self.tokens), logprob=longer(self.logprob), reveal_step=longer(self.reveal_step))

    def block(self, start: Tensor, block_size: int) -> Tensor:
        """[rows, block] long: the tokens from `start` [rows] on; masks behind the capacity."""
        offsets = indices(block_size, start.device)
        return self.tokens.gather(1, (start[:, None] + offsets).clamp(max=self.capacity))

    def write(self, states: States, reveal: Reveal, which: Tensor, step: Tensor) -> None:
        """Write what states [rows, n] reveal, where `which` [rows, n] says so, at denoising steps `step` [rows, n]."""
        written = reveal.where & which[..., None]
        offsets = indices(written.shape[-1], written.device)
        position = torch.where(written, states.start[..., None] + offsets, self.capacity).flatten(1)
        self.tokens.scatter_(1, position, reveal.token.flatten(1))
        self.logprob.scatter_(1, position, reveal.logprob.float().flatten(1))
        self.reveal_step.scatter_(1, position, step[..., None].expand_as(written).flatten(1))


@dataclass
class Counts:
    """Counts of what drafts came to.

    Attributes:
        verified: [] long: forwards that scored drafts.
        drafted, accepted, revoked: [rows] long: drafted states submitted, drafts that were right, reveals remasked.
        accepted_lengths: [rows, n] long: how many rounds accepted 0, 1, 2, ... states; remembered ones count.
        offered_at_depth: [rows, n] long, by depth 1, 2, ...: rounds that accepted k - 1 drafts and had one that may follow the
            last of them (or, for the first, the row's next state); remembered ones count. No columns without drafts.
        accepted_at_depth: [rows, n] long: of these, rounds that accepted a k-th draft.
    """

    verified: Tensor
    drafted: Tensor
    accepted: Tensor
    revoked: Tensor
    accepted_lengths: Tensor
    offered_at_depth: Tensor
    accepted_at_depth: Tensor

    @classmethod
    def zeros(cls, rows: int, width: int, drafts: bool, device: torch.device) -> "Counts":
        """Before the first forward of a decode whose rounds submit up to `width` states a row, with drafts or without."""
        by_row = torch.zeros(rows, dtype=torch.long, device=device)
        depths = 2 * width - 1 if drafts else 0  # a path goes on through what the round before scored
        return cls(
            verified=by_row.new_zeros(()),
            drafted=by_row.clone(),
            accepted=by_row.clone(),
            revoked=by_row.clone(),
            accepted_lengths=by_row.new_zeros(rows, (1 + drafts) * width + 1),
            offered_at_depth=by_row.new_zeros(rows, depths),
            accepted_at_depth=by_row.new_zeros(rows, depths),
        )

    def add_path(self, depth: Tensor, offered: Tensor) -> None:
        """Add a round of paths: how many drafts each accepted [rows], and whether there was one behind the last [rows]."""
        depths = torch.arange(1, 1 + self.accepted_at_depth.shape[1], device=depth.device)
        self.accepted_at_depth += depths <= depth[:, None]
        self.offered_at_depth += depths <= (depth + offered)[:, None]


@dataclass
class Remasked:
    """Reveals that the last step put back to a mask.

    Attributes:
        start: [rows] long, the block.
        where: [rows, block] bool.
        token: [rows, block] long.
    """

    start: Tensor
    where: Tensor
    token: Tensor


@dataclass
class DecodeState:
    """All that a round changes.

    Attributes:
        text: The rows' texts so far.
        current: [rows] each row's next state, which the backbone revealed; not valid for a row that has ended.
        seed: What was said at the last accepted states, from which drafts start,
        has_seed: [rows] bool, and whether it is there: not right behind a clean block whose successor has not been scored.
        memory: What the last round scored in vain.
        held: What the runner's cache holds of each row.
        counts: What drafts came to.
        remasked: What the last step put back.
    """

    text: Text
    current: States
    seed: Source
    has_seed: Tensor
    memory: Memory
    held: Held
    counts: Counts
    remasked: Remasked


for _kind in (Request, Text, Counts, Remasked, DecodeState):
    register_dataclass(_kind)


def laid_out(
    prompts: list[Tensor], infill: Tensor | None, max_new_tokens: int, block_size: int, mask_token_id: int, device: torch.device
) -> tuple[Text, dict[str, Tensor], States]:
    """Lay out every row's text before the first step; a row starts in the block of its first mask.

    Args:
        prompts: One 1-D long tensor of ids per row.
        infill: [rows, n] long, what continues each prompt, or None.
        max_new_tokens: Tokens behind the prompt, at most.
        block_size: Tokens in a block.
        mask_token_id: What stands where a token is to be generated.
        device: Where everything is.

    Returns:
        The texts; `row`, `prompt_length`, `given_end`, `limit` and `open_end` of the `Request`; and [rows] the first states.
    """
    rows = len(prompts)
    lengths = torch.tensor([len(p) for p in prompts], device=device)
    limit, given_end = lengths + max_new_tokens, lengths
    width = -(-int(limit.max()) // block_size) * block_size + 1
    tokens = torch.full((rows, width), mask_token_id, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    if infill is not None:
        count = torch.arange(1, 1 + infill.shape[1], device=device)
        tokens.scatter_(1, lengths[:, None] + count - 1, infill)
        given_end = lengths + torch.where(infill == mask_token_id, 0, count).amax(1)
    position = torch.arange(width, device=device)
    masked = (tokens == mask_token_id) & (position < limit[:, None])
    first = torch.where(masked.any(1), masked.int().argmax(1), limit).minimum(limit - 1)
    text = Text(
        tokens=tokens,
        logprob=torch.zeros(rows, width, device=device),
        reveal_step=torch.full((rows, width), -1, device=device),
        total_steps=torch.zeros_like(lengths),
        stop=torch.full_like(lengths, torch.iinfo(torch.long).max),
    )
    ends = {
        "row": torch.arange(rows, device=device),
        "prompt_length": lengths,
        "given_end": given_end,
        "limit": limit,
        "open_end": torch.where(masked, position + 1, 0).amax(1),
    }
    return text, ends, first_state(text, first // block_size * block_size, block_size)


def first_state(text: Text, start: Tensor, block_size: int) -> States:
    """[rows] the states of blocks of which nothing was generated: masks, and given tokens, none of which ends the text."""
    rest = constant((-1, 0, block_size), start.device).expand(len(start), -1)  # parent, step, end
    table = torch.cat([text.block(start, block_size), start[:, None], rest], 1)
    return States(table, torch.ones_like(start, dtype=torch.bool))


def finished(current: States, request: Request, mask_token_id: int) -> tuple[Tensor, Tensor]:
    """Find the rows whose text is complete.

    Args:
        current: [rows] their next states.
        request: What was asked for.
        mask_token_id: The mask's id.

    Returns:
        One past the last position of each text as far as eos and limit tell, [rows] long, and whether all before is revealed or
        given, [rows] bool.
    """
    block = current.ids.shape[-1]
    end = torch.where(current.end < block, current.start + current.end + 1, request.limit).minimum(request.limit)
    return end, whole_text(current.ids, current.end, request.open_end - current.start, mask_token_id)


@dataclass(frozen=True)
class RoundPlan:
    """Plan of the round to come: what the host knows of it, read from the device once, at the end of the round before.

    Attributes:
        active: Rows that are not finished.
        used: Committed tokens of the longest active row, as many as attention has to read; None: those of the whole cache.
        head_used: The same for the head's KV.
        clean: Rows whose next state has no masks.
        masks: The most masks in a row's next state.
        drafting: Some row can draft.
        late: Some row's last clean block has no KV of the head yet.
        blocked: One of them is about to commit another block.
        going: Of each row, whether it is active.
        accepted: How many rows accepted the state in each slot of the round before, of those that had masks left.
        unscored: Some token of a text has no log-probability: no token had a finite score there.
        amount: What was chosen to be drafted.
        per_row: States that a row may submit.
        room: Places that the forward has for them: no more than any row can fill.
    """

    active: int
    used: int | None
    head_used: int | None
    clean: int
    masks: int
    drafting: bool
    late: bool
    blocked: bool
    going: tuple[bool, ...] = ()
    accepted: tuple[int, ...] = ()
    unscored: bool = False
    amount: Amount = field(default_factory=Amount)
    per_row: int = 1
    room: int = 1

    @classmethod
    def read(cls, numbers: list[int], rows: int) -> "RoundPlan":
        """Read what `summary` stacked of so many rows, before it is decided how much to draft."""
        active, used, head_used, clean, masks, *flags = numbers[:SUMMARY]
        drafting, late, blocked, unscored = (flag > 0 for flag in flags)
        going, accepted = numbers[SUMMARY : SUMMARY + rows], numbers[SUMMARY + rows :]
        per_row = tuple(flag > 0 for flag in going), tuple(accepted)
        return cls(active, used, head_used, clean, masks, drafting, late, blocked, *per_row, unscored)

    def with_slots(self, amount: Amount, branches: int | None) -> "RoundPlan":
        """The same with room for up to so many states a row.

        What a row drafts must not depend on its neighbours: room that none of them can fill is left out, no other.

        Args:
            amount: What is drafted.
            branches: Followers of a state that are considered; None: room that none can fill stays, as in what is recorded.
        """
        per_row = amount.states if self.drafting else 1
        return replace(self, amount=amount, per_row=per_row, room=1 if amount.narrow else self.room_for(per_row, branches))

    def room_for(self, states: int, branches: int | None) -> int:
        """Count the places that a forward has for up to so many states a row."""
        filled = states if branches is None else reachable(self.masks, branches, states)
        return max(filled, 2 if self.clean else 1)


# Numbers of a `RoundPlan` before `going`.
SUMMARY = 9


def summary(state: DecodeState, mask_token_id: int, accepted: Tensor | None = None) -> Tensor:
    """[SUMMARY + rows + n] long: the numbers of a `RoundPlan`, which rows go on, and `accepted` [n], on the device."""
    active, held = state.current.valid, state.held
    masks = state.current.masked(mask_token_id).sum(-1) * active
    clean = active & (masks == 0)
    late = held.late & active
    each = torch.stack(
        [
            active,
            held.committed * active,
            held.head_committed * active,
            clean,
            masks,
            state.has_seed & (masks > 0),
            late,
            late & clean,
            state.text.logprob[:, :-1].isnan().any(1),
        ]
    )
    total, most = each.sum(1), each.amax(1)
    numbers = torch.cat([total[:1], most[1:3], total[3:4], most[4:], active.long()])
    return numbers if accepted is None else torch.cat([numbers, accepted])


__all__ = [
    "SUMMARY",
    "Counts",
    "DecodeState",
    "Remasked",
    "Request",
    "RoundPlan",
    "Text",
    "finished",
    "first_state",
    "laid_out",
    "summary",
]
