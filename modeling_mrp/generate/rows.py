"""What a decode knows of its rows, what the host knows of the next round, and what it all cost."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

# Numbers of an `Outlook` before `passed`.
SUMMARY = 8


@dataclass
class Rows:
    """What is known of every row; `tokens` is laid out by absolute position, without padding.

    One more column, behind the capacity, takes what is not to be kept, so that writing needs no count of what is.

    Attributes:
        tokens: [rows, capacity + 1] long: prompt, given and revealed tokens, masks.
        logprob: [rows, capacity + 1] float32 log-confidence of generated tokens when committed.
        reveal_step: [rows, capacity + 1] long index of the denoising step that committed them, -1 elsewhere.
        prompt_length: [rows] long.
        given_end: [rows] long, one past the last token that was given: of the prompt, or of what is to be filled in.
        limit: [rows] long, one past the last position the user wants.
        open_end: [rows] long, one past the last position before `limit` that is not given.
        stop: [rows] long, one past the last token of the text once it is known, else a large number.
        start: [rows] long, the current block.
        step: [rows] long, denoising steps taken in it.
        clock: [rows] long, denoising steps taken in all.
        active: [rows] bool.
        seed: [rows] long.
    """

    tokens: Tensor
    logprob: Tensor
    reveal_step: Tensor
    prompt_length: Tensor
    given_end: Tensor
    limit: Tensor
    open_end: Tensor
    stop: Tensor
    start: Tensor
    step: Tensor
    clock: Tensor
    active: Tensor
    seed: Tensor

    @staticmethod
    def laid_out(
        prompts: list[Tensor], infill: Tensor | None, max_new_tokens: int, block_size: int, mask_token_id: int, seed: Tensor
    ) -> "Rows":
        """Every row's text before the first step; a row starts in the block of its first mask.

        Args:
            prompts: One 1-D long tensor of ids per row.
            infill: [rows, n] long, what continues each prompt, or None.
            max_new_tokens: Tokens behind the prompt, at most.
            block_size: Tokens in a block.
            mask_token_id: What stands where a token is to be generated.
            seed: [rows] long; it says on which device everything is.
        """
        rows, device = len(prompts), seed.device
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
        return Rows(
            tokens=tokens,
            logprob=torch.zeros(rows, width, device=device),
            reveal_step=torch.full((rows, width), -1, device=device),
            prompt_length=lengths,
            given_end=given_end,
            limit=limit,
            open_end=torch.where(masked, position + 1, 0).amax(1),
            stop=torch.full_like(lengths, torch.iinfo(torch.long).max),
            start=first // block_size * block_size,
            step=torch.zeros_like(lengths),
            clock=torch.zeros_like(lengths),
            active=torch.ones(rows, dtype=torch.bool, device=device),
            seed=seed,
        )

    def with_room(self, capacity: int) -> "Rows":
        """The same rows with masks up to so many positions."""

        def longer(tensor: Tensor) -> Tensor:  # its last column holds what nothing was written to
            return torch.cat([tensor, tensor[:, -1:].expand(-1, capacity - self.capacity)], 1)

        return replace(self, tokens=longer(self.tokens), logprob=longer(self.logprob), reveal_step=longer(self.reveal_step))

    @property
    def capacity(self) -> int:
        """Positions, without the column behind them."""
        return self.tokens.shape[1] - 1


@dataclass
class Counts:
    """What a decode cost.

    Attributes:
        forwards: Forwards by role: `prefill`, `denoise`, `verify` (those of the backbone) and `head`.
        row_forwards: [rows] long, backbone forwards in which a row took part.
        row_head_forwards: [rows] long, the same for the head.
        drafted, accepted, revoked: [rows] long: drafted states submitted, drafts that were right, reveals taken back.
        accepted_lengths: [rows, n] long: how many rounds accepted 0, 1, 2, ... states; remembered ones count.
        offered_at_depth: [rows, n] long, by depth 1, 2, ...: rounds whose walk came by k - 1 drafts and had a draft that may
            follow the last of them (or, for the first, the row's next state); remembered ones count. No columns without drafts.
        accepted_at_depth: [rows, n] long: of these, rounds whose walk came by a k-th draft.
        revocations: [n, 3] long: row, column of the generated text and token of each reveal taken back, in order.
    """

    forwards: dict[str, int]
    row_forwards: Tensor
    row_head_forwards: Tensor
    drafted: Tensor
    accepted: Tensor
    revoked: Tensor
    accepted_lengths: Tensor
    offered_at_depth: Tensor
    accepted_at_depth: Tensor
    revocations: Tensor

    @classmethod
    def zeros(cls, rows: int, width: int, drafts: bool, device: torch.device) -> "Counts":
        """Before the first forward of a decode whose rounds submit up to `width` states a row, with drafts or without."""
        by_row = torch.zeros(rows, dtype=torch.long, device=device)
        depths = 2 * width - 1 if drafts else 0  # a walk goes on through what the round before scored
        return cls(
            {"prefill": 0, "denoise": 0, "verify": 0, "head": 0},
            row_forwards=by_row.clone(),
            row_head_forwards=by_row.clone(),
            drafted=by_row.clone(),
            accepted=by_row.clone(),
            revoked=by_row.clone(),
            accepted_lengths=by_row.new_zeros(rows, (1 + drafts) * width + 1),
            offered_at_depth=by_row.new_zeros(rows, depths),
            accepted_at_depth=by_row.new_zeros(rows, depths),
            revocations=by_row.new_zeros(0, 3),
        )

    def add_walk(self, depth: Tensor, offered: Tensor) -> None:
        """Adds a round of walks: how many drafts each came by [rows], and whether there was one behind the last [rows]."""
        depths = torch.arange(1, 1 + self.accepted_at_depth.shape[1], device=depth.device)
        self.accepted_at_depth += depths <= depth[:, None]
        self.offered_at_depth += depths <= (depth + offered)[:, None]


@dataclass
class Outlook:
    """What the host knows of the round to come, read from the device once, at the end of the round before.

    Within the round the head's part is kept up to date without asking again.

    Attributes:
        active: Rows that are not finished.
        used: Committed tokens of the longest active row.
        head_used: The same for the head's KV.
        clean: Rows whose next state has no masks.
        masks: The most masks in a row's next state.
        drafting: Some row can draft.
        pending: Some row's last clean block has no KV of the head yet.
        blocked: One of them is about to commit another block.
        passed: How many rows came by the state in each slot of the round before, of those that had masks left.
    """

    active: int
    used: int
    head_used: int
    clean: int
    masks: int
    drafting: bool
    pending: bool
    blocked: bool
    passed: list[int]

    @classmethod
    def of(cls, numbers: list[int], submitted: int) -> "Outlook":
        """From what `Decoder.summary` stacked, behind a round in which a row may have submitted so many states."""
        active, used, head_used, clean, masks, drafting, pending, blocked = numbers[:SUMMARY]
        passed = numbers[SUMMARY : SUMMARY + submitted]
        return cls(active, used, head_used, clean, masks, drafting > 0, pending > 0, blocked > 0, passed)


class Slots(NamedTuple):
    """States of a round.

    Attributes:
        per_row: How many a row may submit.
        room: How many places the forward has for them: no more than any row can fill.
    """

    per_row: int
    room: int


__all__ = ["SUMMARY", "Counts", "Outlook", "Rows", "Slots"]
