"""A round's states, grown in one launch; `grow_ref` takes a hundred small ones for each state that it adds.

Which state comes next depends on all those before, so a program goes through them one by one; the rows are side by side. Its
twin, in `drafting`, also does what is rarer: sampled drafts and several reveals a step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .dispatch import MULTIPLY_ADD, power_of_two, tl, triton

# The power of a token's odds that orders drafts. Reveals follow the first power or a little more; the fourth drafts best, as a
# state passed over is remembered, so that going deeper is worth more than its chance (`benchmarks/NOTES.md`, Drafting).
ORDER_SHARPNESS = 4.0

# Log-odds above this are certain: their sums stay finite.
MOST_ODDS = 1e4

# For `base`: what the state's parent has.
INHERITED = -2

# Columns of a drafted state behind its ids: start, parent, step, end, base, source.
DRAFT_COLUMNS = 6

_LARGEST = 1 << 14  # numbers of a row's table of states, which a program holds in registers


@dataclass(frozen=True)
class DraftTable:
    """The table that the drafts of a round are read from.

    A drafted state is a row of [block + 6] integers: ids, start, parent, step and end, as in `States`; then `base`, the source
    that an estimate of it starts from, and `source`, the one that tells its followers: its own estimate if there is one, else
    its base. Sources are numbered: 0 is the last accepted state, then come the remembered ones, then the head's estimates.

    Attributes:
        first: [rows, block + 6] long, each row's next state, from which all others are grown.
        valid: [rows] bool, rows that draft.
        token: [rows, sources, block] long, what each source tells: the token of each masked position,
        odds: [rows, sources, block] float, and its log-odds.
        known: [rows, m, block + 1] long, ids and start of states that need no slot, since what follows is known.
        known_valid: [rows, m] bool.
        ahead: [rows, m, block + 6] long, the states that they lead to.
        successor: [rows, block + 6] long, the next block's first state.
        open_successor: [rows] bool, whether it may follow a clean one: it has masks.
        open_end: [rows] long, one past the last position that is not given.
        eos: [any] long, ids that end a text.
        schedule: [block] long, reveals per denoising step.
        mask_id: The mask's id.
        branches: Followers of a state, at most; no more than a block has positions.
        one_at_a_time: Whether no step of the schedule reveals more than one position.
    """

    first: Tensor
    valid: Tensor
    token: Tensor
    odds: Tensor
    known: Tensor
    known_valid: Tensor
    ahead: Tensor
    successor: Tensor
    open_successor: Tensor
    open_end: Tensor
    eos: Tensor
    schedule: Tensor
    mask_id: int
    branches: int
    one_at_a_time: bool

    def fits(self, size: int) -> bool:
        """Tell if the kernel holds what `size` states need."""
        return _entries(size, self.branches) * power_of_two(self.first.shape[-1]) <= _LARGEST


def _entries(size: int, branches: int) -> int:
    """Count the states in a row's table: those taken, then those that may be."""
    return power_of_two(size * (1 + branches))


def grow_kernel(table: DraftTable, size: int, most: int) -> tuple[Tensor, Tensor]:
    """Grow the states of a round, best first, by the kernel: greedy drafts, one reveal a step.

    Floor: what is read, some 10 KB a row: microseconds, less than its launch; the steps of a program wait for each other.

    Args:
        table: What they are grown on; `fits(size)`.
        size: How many.
        most: The most that any call of this decode asks for: one program is compiled for all of them.

    Returns:
        [rows, size, block + 6] long, and [rows, size] bool: which of them are states.
    """
    rows, width = table.first.shape
    slots = table.first.new_empty(rows, size, width)
    valid = table.valid.new_empty(rows, size)
    if not rows:
        return slots, valid
    entries = _entries(max(size, most) if table.fits(most) else size, table.branches)
    columns = power_of_two(width)
    _grow[(rows,)](
        *(table.first, table.valid.view(torch.uint8), table.token.contiguous(), table.odds.contiguous()),
        *(table.known.contiguous(), table.known_valid.contiguous().view(torch.uint8), table.ahead.contiguous()),
        *(table.successor.contiguous(), table.open_successor.contiguous().view(torch.uint8)),
        *(table.open_end.contiguous(), table.eos, slots, valid.view(torch.uint8)),
        *(table.first.stride(0), table.valid.stride(0), size, table.branches, table.token.shape[1], table.known.shape[1]),
        *(len(table.eos), table.mask_id),
        BLOCK=width - DRAFT_COLUMNS,
        COLUMNS=columns,
        ENTRIES=entries,
        TILE_KNOWN=max(1, 1024 // columns),
        SHARPNESS=ORDER_SHARPNESS,
        MOST=MOST_ODDS,
        INHERITS=INHERITED,
        num_warps=max(1, min(8, entries * columns // 1024)),
        **MULTIPLY_ADD,
    )
    return slots, valid


if triton is not None:

    @triton.jit
    def _entry(state, column, which):  # type: ignore[no-untyped-def]
        """Read one number of a state."""
        return tl.sum(tl.where(column == which, state, 0), 0)

    @triton.jit
    def _looked_up(  # type: ignore[no-untyped-def]
        made,
        known,
        known_valid,
        ahead,
        count,
        BLOCK: tl.constexpr,
        COLUMNS: tl.constexpr,
        TILE_KNOWN: tl.constexpr,
        INHERITS: tl.constexpr,
    ):
        """Replace a state by what the first known one with its ids and start leads to, if there is one."""
        column = tl.arange(0, COLUMNS)
        named = (column <= BLOCK)[None, :]
        place = count
        for begin in range(0, count, TILE_KNOWN):
            entry = begin + tl.arange(0, TILE_KNOWN)
            there = entry < count
            at = known + entry[:, None] * (BLOCK + 1) + column[None, :]
            listed = tl.load(at, mask=there[:, None] & named, other=0).to(tl.int32)
            differ = tl.sum((named & (listed != made[None, :])).to(tl.int32), 1)
            same = (tl.load(known_valid + entry, mask=there, other=0) != 0) & (differ == 0)
            place = tl.minimum(place, tl.min(tl.where(same, entry, count), 0))
        found = column < tl.where(place < count, BLOCK + 6, 0)
        leads = tl.load(ahead + place * (BLOCK + 6) + column, mask=found, other=0).to(tl.int32)
        inherits = (column == BLOCK + 4) & (leads == INHERITS)
        return tl.where(found & ~inherits, leads, made)

    @triton.jit
    def _follower(  # type: ignore[no-untyped-def]
        state, last, token, end, source, eos, eos_count, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
    ):
        """Reveal one more position of a state, `last`."""
        column = tl.arange(0, COLUMNS)
        picked = _entry(token, column, last)
        ends = picked != picked
        for i in range(eos_count):
            ends = ends | (tl.load(eos + i).to(tl.int32) == picked)
        made = tl.where(column == last, picked, state)
        made = tl.where(column == BLOCK + 2, state + 1, made)
        made = tl.where(column == BLOCK + 3, tl.minimum(end, tl.where(ends, last, BLOCK)), made)
        return tl.where(column == BLOCK + 4, source, made)

    @triton.jit
    def _done(made, open_end, mask_id, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Tell if nothing is left to reveal before the end of the text, and that lies in the block."""
        column = tl.arange(0, COLUMNS)
        end = tl.minimum(_entry(made, column, BLOCK + 3) + 1, open_end - _entry(made, column, BLOCK))
        hidden = (made == mask_id) & (column < tl.minimum(end, BLOCK))
        return (end <= BLOCK) & (tl.sum(hidden.to(tl.int32), 0) == 0)

    @triton.jit
    def _store(slots, valid, slot, state, is_valid, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
        column = tl.arange(0, COLUMNS)
        tl.store(slots + slot * WIDTH + column, state.to(tl.int64), mask=column < WIDTH)
        tl.store(valid + slot, is_valid.to(tl.uint8))

    # Sizes that change from round to round are not compiled for.
    @triton.jit(
        do_not_specialize=[
            *("slots_stride", "valid_stride", "size", "branches", "source_count", "known_count", "eos_count", "mask_id")
        ]
    )
    def _grow(  # type: ignore[no-untyped-def]
        slots,
        valid,
        token,
        odds,
        known,
        known_valid,
        ahead,
        successor,
        open_successor,
        open_end,
        eos,
        slots_out,
        valid_out,
        slots_stride,
        valid_stride,
        size,
        branches,
        source_count,
        known_count,
        eos_count,
        mask_id,
        BLOCK: tl.constexpr,
        COLUMNS: tl.constexpr,
        ENTRIES: tl.constexpr,
        TILE_KNOWN: tl.constexpr,
        SHARPNESS: tl.constexpr,
        MOST: tl.constexpr,
        INHERITS: tl.constexpr,
    ):
        """Grow all states of a row: program (row).

        A state is a vector of COLUMNS numbers, the table of those taken and those that may be is [ENTRIES, COLUMNS]; all stays
        in registers. Ids fit 32 bits.
        """
        WIDTH: tl.constexpr = BLOCK + 6
        row = tl.program_id(0).to(tl.int64)
        column, entry = tl.arange(0, COLUMNS), tl.arange(0, ENTRIES)
        in_state, in_block = column < WIDTH, column < BLOCK
        known += row * known_count * (BLOCK + 1)
        known_valid += row * known_count
        ahead += row * known_count * WIDTH
        slots_out += row * size * WIDTH
        valid_out += row * size
        state = tl.load(slots + row * slots_stride + column, mask=in_state, other=0).to(tl.int32)
        is_valid = tl.load(valid + row * valid_stride) != 0
        behind = tl.load(successor + row * WIDTH + column, mask=in_state, other=0).to(tl.int32)
        behind_chance = (tl.load(open_successor + row) != 0).to(tl.float32)
        text_end = tl.load(open_end + row).to(tl.int32)
        table = tl.full((ENTRIES, COLUMNS), -1, tl.int32)  # no state starts at -1
        chance = tl.full((ENTRIES,), 0.0, tl.float32)
        reached = tl.full((), 1.0, tl.float32)
        _store(slots_out, valid_out, 0, state, is_valid, WIDTH, COLUMNS)
        for slot in range(size - 1):
            table = tl.where((entry == slot)[:, None], state[None, :], table)
            end, source = _entry(state, column, BLOCK + 3), _entry(state, column, BLOCK + 5)
            told = (row * source_count + tl.maximum(source, 0)) * BLOCK + column
            tokens = tl.load(token + told, mask=in_block, other=0).to(tl.int32)
            surety = tl.load(odds + told, mask=in_block, other=0.0).to(tl.float32)
            masked = in_block & (state == mask_id)
            clean = tl.sum(masked.to(tl.int32), 0) == 0
            open_columns = tl.where(is_valid & (source >= 0), end, 0)
            left = tl.where(masked & (column < open_columns), surety, float("-inf"))
            bounded = tl.where(left > MOST, MOST, left)
            peak = tl.max(bounded, 0)
            weight = tl.exp(SHARPNESS * (bounded - tl.where(peak == float("-inf"), 0.0, peak)))
            total = tl.sum(weight, 0)
            for branch in range(branches):
                best = tl.max(left, 0)
                last = tl.min(tl.where(in_block & (left == best), column, COLUMNS), 0)  # of equals the first
                own = tl.sum(tl.where(column == last, weight, 0.0), 0) / tl.where(total == 0.0, 1.0, total)
                own = tl.where(best == float("-inf"), 0.0, own)  # nothing is left to reveal
                left = tl.where(column == last, float("-inf"), left)
                made = _follower(state, last, tokens, end, source, eos, eos_count, BLOCK, COLUMNS)
                made = _looked_up(made, known, known_valid, ahead, known_count, BLOCK, COLUMNS, TILE_KNOWN, INHERITS)
                # The reveal before a state that ends the row already tells; no number is no chance.
                own = tl.where((own != own) | _done(made, text_end, mask_id, BLOCK, COLUMNS), 0.0, own)
                follows_here = clean & (branch == 0)
                made = tl.where(follows_here, tl.where(column == BLOCK + 1, slot, behind), made)
                own = tl.where(follows_here, behind_chance, own)
                own = tl.where(is_valid, own, 0.0) * reached
                # Orders that meet in one state add up there.
                differ = tl.sum(((column < BLOCK + 2)[None, :] & (table != made[None, :])).to(tl.int32), 1)
                met = (differ == 0) & ((entry < size) | (chance > 0.0))
                chance += tl.where(met & (entry >= size), own, 0.0)
                fresh = entry == size + slot * branches + branch
                table = tl.where(fresh[:, None], made[None, :], table)
                chance = tl.where(fresh, tl.where(tl.max(met.to(tl.int32), 0) > 0, 0.0, own), chance)
            reached = tl.max(chance, 0)
            place = tl.min(tl.where(chance == reached, entry, ENTRIES), 0)  # where nothing is left, the first state again
            is_valid = reached > 0.0
            state = tl.sum(tl.where((entry == place)[:, None], table, 0), 0)
            chance = tl.where(entry == place, 0.0, chance)
            _store(slots_out, valid_out, slot + 1, state, is_valid, WIDTH, COLUMNS)


__all__ = ["DRAFT_COLUMNS", "INHERITED", "MOST_ODDS", "ORDER_SHARPNESS", "DraftTable", "grow_kernel"]
