"""Settle a round's scores in one launch: which states are accepted, what becomes text, where each row stands next.

Rows have nothing to do with each other, so a program takes one, and walks its path state by state, as one would by hand. Its
twin is `settle_ref`, some hundred and eighty small operations.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .dispatch import MULTIPLY_ADD, power_of_two, tl, triton

_LARGEST_TABLE = 1 << 13  # numbers of a row's known states, of which a program holds a few tables


@dataclass(frozen=True)
class Known:
    """States that are scored, and what was said there: those of a round, or the remembered ones.

    Attributes:
        table: [rows, n, block + 4] long: see `States`.
        valid: [rows, n] bool.
        where: [rows, n, block] bool, what each reveals,
        token: [rows, n, block] long, and which tokens,
        logprob: [rows, n, block] float, with their log-probabilities,
        odds: [rows, n, block] float, and log-odds.
    """

    table: Tensor
    valid: Tensor
    where: Tensor
    token: Tensor
    logprob: Tensor
    odds: Tensor


@dataclass(frozen=True)
class Written:
    """Text and counts, which a round writes to in place.

    Attributes:
        tokens, logprob, reveal_step: [rows, capacity + 1]: see `Text`.
        total_steps, stop: [rows] long: see `Text`.
        drafted, accepted: [rows] long: see `Counts`.
        accepted_lengths, offered_at_depth, accepted_at_depth: [rows, any] long: see `Counts`.
    """

    tokens: Tensor
    logprob: Tensor
    reveal_step: Tensor
    total_steps: Tensor
    stop: Tensor
    drafted: Tensor
    accepted: Tensor
    accepted_lengths: Tensor
    offered_at_depth: Tensor
    accepted_at_depth: Tensor


@dataclass(frozen=True)
class Settlement:
    """The rest of what a round comes to.

    Attributes:
        last: [rows] long, the place of the last accepted state among those of the round and the remembered ones.
        at_mask: [rows] bool, whether a row is active and that state has masks.
        token, odds: [rows, block]: what was said there.
        clean_slot: [rows] long, the slot of the round's clean state that was accepted, -1 if none.
        passed: [rows, n] bool, which states of the round were accepted and have masks, of rows whose next state had masks.
        drafted: [rows] long, drafted states of the round.
        keep: [rows, width] bool, states to remember,
        ahead: [rows, width, block + 6] long, and where they lead: see `Memory`.
        table: [rows, block + 4] long, each row's next state; valid: [rows] bool, rows that have not ended.
    """

    last: Tensor
    at_mask: Tensor
    token: Tensor
    odds: Tensor
    clean_slot: Tensor
    passed: Tensor
    drafted: Tensor
    keep: Tensor
    ahead: Tensor
    table: Tensor
    valid: Tensor


def settle_fits(states: int, block_size: int) -> bool:
    """Tell whether the kernel holds so many known states of a row."""
    return power_of_two(states) * power_of_two(block_size + 6) <= _LARGEST_TABLE


def settle_kernel(
    scored: Known,
    memory: Known | None,
    written: Written,
    current: tuple[Tensor, Tensor],
    successor: Tensor,
    limit: Tensor,
    open_end: Tensor,
    eos: Tensor,
    mask_id: int,
    width: int,
) -> Settlement:
    """Settle a round.

    Floor: some ten KB a row read and written: microseconds, less than its launch; the steps of a program wait for each other.

    Args:
        scored: The round's states, each row's own first.
        memory: Those that the last round scored in vain; None: nothing is drafted or remembered.
        written: What is written to in place.
        current: Each row's next state, [rows, block + 4] long, and whether it is active, [rows] bool.
        successor: [rows, block + 4] long, the first state of the next block.
        limit: [rows] long, one past the last position that is wanted.
        open_end: [rows] long, one past the last of these that is not given.
        eos: [any] long, ids that end a text.
        mask_id: The mask's id.
        width: States that are remembered.
    """
    rows, count, columns = scored.table.shape
    block, drafts = columns - 4, memory is not None
    memory = memory or scored
    others = memory.table.shape[1] if drafts else 0
    table, device = current[0], scored.table.device
    longs = partial(torch.empty, dtype=torch.long, device=device)
    flags = partial(torch.empty, dtype=torch.bool, device=device)
    made = Settlement(
        last=longs(rows),
        at_mask=flags(rows),
        token=longs(rows, block),
        odds=scored.odds.new_empty(rows, block),
        clean_slot=longs(rows),
        passed=flags(rows, count),
        drafted=longs(rows),
        keep=flags(rows, width),
        ahead=longs(rows, width, columns + 2),
        table=torch.empty_like(table, memory_format=torch.contiguous_format),
        valid=flags(rows),
    )
    given = [scored, memory]
    states = [
        each
        for known in given
        for each in (known.table, _u8(known.valid), _u8(known.where), known.token, known.logprob, known.odds)
    ]
    assert all(each.is_contiguous() for each in (*states, *vars(written).values()))
    if rows:
        _settle[(rows,)](
            *states,
            *vars(written).values(),
            *(table.contiguous(), _u8(current[1]), successor.contiguous(), limit, open_end, eos),
            *(_u8(part) if part.dtype == torch.bool else part for part in vars(made).values()),
            *(count, others, len(eos), mask_id, width, written.tokens.shape[1], written.accepted_lengths.shape[1]),
            written.accepted_at_depth.shape[1],
            BLOCK=block,
            COLUMNS=power_of_two(columns + 2),
            ENTRIES=power_of_two(max(count + others, width)),
            DEPTHS=power_of_two(max(1, written.accepted_at_depth.shape[1])),
            DRAFTS=drafts,
            num_warps=4,
            **MULTIPLY_ADD,
        )
    return made


def _u8(flags: Tensor) -> Tensor:
    return flags.contiguous().view(torch.uint8)


if triton is not None:

    @triton.jit
    def _known(own, other, row, count, others, width, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
        """[ENTRIES, COLUMNS] of [rows, count, width] and [rows, others, width], one behind the other; 0 elsewhere."""
        entry, column = tl.arange(0, ENTRIES)[:, None], tl.arange(0, COLUMNS)[None, :]
        inside = column < width
        first = tl.load(own + (row * count + entry) * width + column, mask=inside & (entry < count), other=0)
        there = inside & (entry >= count) & (entry < count + others)
        second = tl.load(other + (row * others + entry - count) * width + column, mask=there, other=0)
        return tl.where(entry < count, first, second)

    @triton.jit
    def _at(values, which):  # type: ignore[no-untyped-def]
        """The one of [n] numbers where `which` is."""
        return tl.sum(tl.where(which, values, 0), 0)

    @triton.jit
    def _row_at(values, which):  # type: ignore[no-untyped-def]
        """The one row of [n, m] numbers where `which` [n] is."""
        return tl.sum(tl.where(which[:, None], values, 0), 0)

    @triton.jit
    def _number_at(values, column, which: tl.constexpr):  # type: ignore[no-untyped-def]
        """One column of [n, m] numbers."""
        return tl.sum(tl.where((column == which)[None, :], values, 0), 1)

    @triton.jit(do_not_specialize=["count", "others", "eos_count", "mask_id", "width", "room", "lengths", "depths"])
    def _settle(  # type: ignore[no-untyped-def]
        table,
        valid,
        where,
        token,
        logprob,
        odds,
        other_table,
        other_valid,
        other_where,
        other_token,
        other_logprob,
        other_odds,
        text,
        text_logprob,
        text_step,
        total_steps,
        stop,
        drafted_sum,
        accepted_sum,
        accepted_lengths,
        offered_at_depth,
        accepted_at_depth,
        current,
        active,
        successor,
        limit,
        open_end,
        eos,
        last_out,
        at_mask_out,
        token_out,
        odds_out,
        clean_out,
        passed_out,
        drafted_out,
        keep_out,
        ahead_out,
        table_out,
        valid_out,
        count,
        others,
        eos_count,
        mask_id,
        width,
        room,
        lengths,
        depths,
        BLOCK: tl.constexpr,
        COLUMNS: tl.constexpr,
        ENTRIES: tl.constexpr,
        DEPTHS: tl.constexpr,
        DRAFTS: tl.constexpr,
    ):
        """Program (row). Ids, positions and steps fit 32 bits."""
        WIDTH: tl.constexpr = BLOCK + 4
        row = tl.program_id(0).to(tl.int64)
        entry, column = tl.arange(0, ENTRIES), tl.arange(0, COLUMNS)
        in_block, in_round = column < BLOCK, entry < count
        states = _known(table, other_table, row, count, others, WIDTH, ENTRIES, COLUMNS).to(tl.int32)
        own = tl.load(valid + row * count + entry, mask=in_round, other=0)
        kept = in_round == (entry < 0)
        is_valid = own != 0
        if DRAFTS:
            kept = (entry >= count) & (entry < count + others)
            is_valid = is_valid | (tl.load(other_valid + row * others + entry - count, mask=kept, other=0) != 0)
        reveals = _known(where, other_where, row, count, others, BLOCK, ENTRIES, COLUMNS) != 0
        tokens = _known(token, other_token, row, count, others, BLOCK, ENTRIES, COLUMNS).to(tl.int32)
        going = tl.load(active + row) != 0
        masked = in_block[None, :] & (states == mask_id)
        clean = tl.sum(masked.to(tl.int32), 1) == 0
        start, parent = _number_at(states, column, BLOCK), _number_at(states, column, BLOCK + 1)
        step, end = _number_at(states, column, BLOCK + 2), _number_at(states, column, BLOCK + 3)

        # What each state leads to: its reveal, or behind a clean one the next block.
        hit = tokens != tokens
        for i in range(eos_count):
            hit = hit | (tokens == tl.load(eos + i).to(tl.int32))
        ends = tl.min(tl.where(hit & reveals & in_block[None, :], column[None, :], BLOCK), 1)
        after = tl.where(reveals & in_block[None, :], tokens, states)
        after = tl.where((column == BLOCK + 1)[None, :], -1, after)
        after = tl.where((column == BLOCK + 2)[None, :], (step + 1)[:, None], after)
        after = tl.where((column == BLOCK + 3)[None, :], tl.minimum(end, ends)[:, None], after)
        behind = tl.load(successor + row * WIDTH + column, mask=column < WIDTH, other=0).to(tl.int32)
        behind = tl.where((column == BLOCK + 1)[None, :], entry[:, None], behind[None, :])
        after = tl.where(clean[:, None], behind, after)

        # Where that is among the known states: the first of its name.
        following = tl.full((ENTRIES,), -1, tl.int32)
        named = (column < BLOCK + 2)[None, :]
        for i in range(count + others):
            other = count + others - 1 - i
            state = _row_at(states, entry == other)
            differ = tl.sum((named & (after != state[None, :])).to(tl.int32), 1)
            same = (differ == 0) & is_valid & (_at(is_valid.to(tl.int32), entry == other) != 0)
            following = tl.where(same, other, following)

        # The path, and what is revealed on it.
        is_active, at_first_clean = going, _at(clean.to(tl.int32), entry == 0) != 0
        taken = tl.load(total_steps + row)
        passed = tl.full((ENTRIES,), 0, tl.int32)
        here = tl.full((), 0, tl.int32)
        last, clean_slot = here, here - 1
        for _ in range(count + others):
            at = entry == here
            passed = tl.where(at & going, 1, passed)
            last = tl.where(going, here, last)
            reveals_here = going & (_at(clean.to(tl.int32), at) == 0)
            clean_slot = tl.where(going & (_at(clean.to(tl.int32), at) != 0) & (here < count), here, clean_slot)
            shows = tl.where(reveals_here, tl.where(in_block, _row_at(reveals.to(tl.int32), at), 0), 0)
            shown, near = shows != 0, tl.where(here < count, shows, 0) != 0
            place = row * room + _at(start, at) + column
            said = tl.load(logprob + (row * count + here) * BLOCK + column, mask=near, other=0.0)
            if DRAFTS:
                far = (row * others + here - count) * BLOCK + column
                said += tl.load(other_logprob + far, mask=tl.where(here < count, 0, shows) != 0, other=0.0)
            tl.store(text + place, _row_at(tokens, at).to(tl.int64), mask=shown)
            tl.store(text_logprob + place, said.to(tl.float32), mask=shown)
            tl.store(text_step + place, tl.full((COLUMNS,), 0, tl.int64) + taken, mask=shown)
            taken += reveals_here.to(tl.int64)
            onward = _at(following, at)
            going = going & (onward >= 0)
            here = tl.where(onward >= 0, onward, here)
        tl.store(total_steps + row, taken)
        at_last = entry == last
        at_mask = is_active & (_at(clean.to(tl.int32), at_last) == 0)
        tl.store(last_out + row, tl.full((), 0, tl.int64) + last)
        tl.store(at_mask_out + row, at_mask.to(tl.uint8))
        tl.store(clean_out + row, tl.full((), 0, tl.int64) + clean_slot)
        counts = (passed != 0) & (clean == 0) & (not at_first_clean)
        tl.store(passed_out + row * count + entry, counts.to(tl.uint8), mask=in_round)
        tl.store(token_out + row * BLOCK + column, _row_at(tokens, at_last).to(tl.int64), mask=in_block)
        inside = in_block.to(tl.int32)
        near = tl.where(last < count, inside, 0) != 0
        told = tl.load(odds + (row * count + last) * BLOCK + column, mask=near, other=0.0)
        if DRAFTS:
            far = (row * others + last - count) * BLOCK + column
            told += tl.load(other_odds + far, mask=tl.where(last < count, 0, inside) != 0, other=0.0)
        tl.store(odds_out + row * BLOCK + column, told, mask=in_block)

        # What is counted, and what is remembered.
        length = accepted_lengths + row * lengths + tl.sum(passed, 0)
        tl.store(length, tl.load(length) + is_active.to(tl.int64))
        drafted = in_round & is_valid & (parent < 0) & (entry > 0)
        tl.store(drafted_out + row, tl.sum(drafted.to(tl.int64), 0))
        if DRAFTS:
            tl.store(drafted_sum + row, tl.load(drafted_sum + row) + tl.sum(drafted.to(tl.int64), 0))
            depth = tl.sum(tl.where(drafted | kept, passed, 0), 0)
            tl.store(accepted_sum + row, tl.load(accepted_sum + row) + depth)
            final = _row_at(states, at_last)
            against = in_block[None, :] & (states != final[None, :]) & (final != mask_id)[None, :]
            agrees = (tl.sum(against.to(tl.int32), 1) == 0) & is_valid & (parent < 0)
            agrees = agrees & (start == _at(start, at_last)) & (step == _at(step, at_last) + 1)
            offered = (tl.sum(agrees.to(tl.int32), 0) > 0) & (_at(is_valid.to(tl.int32), at_last) != 0)
            deep = tl.arange(0, DEPTHS)
            counted = accepted_at_depth + row * depths + deep
            tl.store(counted, tl.load(counted, mask=deep < depths) + (deep < depth).to(tl.int64), mask=deep < depths)
            counted = offered_at_depth + row * depths + deep
            reached = (deep < depth + offered.to(tl.int32)).to(tl.int64)
            tl.store(counted, tl.load(counted, mask=deep < depths) + reached, mask=deep < depths)
            keep = in_round & is_valid & (clean == 0) & (parent < 0)
            tl.store(keep_out + row * width + entry, keep.to(tl.uint8), mask=entry < width)
            frontier = entry
            for _ in range(count):  # from each, as far as what is kept leads
                ahead = tl.sum(tl.where(frontier[:, None] == entry[None, :], following[None, :], 0), 1)
                leads = tl.sum(tl.where(ahead[:, None] == entry[None, :], keep.to(tl.int32)[None, :], 0), 1) != 0
                frontier = tl.where((ahead >= 0) & leads, ahead, frontier)
            exits = after
            for other in range(count):
                exits = tl.where((frontier == other)[:, None], _row_at(after, entry == other)[None, :], exits)
            exits = tl.where((column >= WIDTH)[None, :], (1 + frontier)[:, None], exits)
            ahead_at = ahead_out + (row * width + entry)[:, None] * (WIDTH + 2) + column[None, :]
            tl.store(ahead_at, exits.to(tl.int64), mask=(entry < width)[:, None] & (column < WIDTH + 2)[None, :])

        # Where the row stands next, and whether its text is whole.
        now = tl.load(current + row * WIDTH + column, mask=column < WIDTH, other=0).to(tl.int32)
        now = tl.where(is_active, _row_at(after, at_last), now)
        now = tl.where(column == BLOCK + 1, -1, now)
        begins, first_eos = _at(now, column == BLOCK), _at(now, column == BLOCK + 3)
        upto = tl.load(limit + row).to(tl.int32)
        stops = tl.minimum(tl.where(first_eos < BLOCK, begins + first_eos + 1, upto), upto)
        reach = tl.minimum(first_eos + 1, tl.load(open_end + row).to(tl.int32) - begins)
        hidden = in_block & (now == mask_id) & (column < reach)
        done = (reach <= BLOCK) & (tl.sum(hidden.to(tl.int32), 0) == 0)
        tl.store(stop + row, tl.where(is_active & done, stops.to(tl.int64), tl.load(stop + row)))
        tl.store(table_out + row * WIDTH + column, now.to(tl.int64), mask=column < WIDTH)
        tl.store(valid_out + row, (is_active & (done == 0)).to(tl.uint8))


__all__ = ["Known", "Settlement", "Written", "settle_fits", "settle_kernel"]
