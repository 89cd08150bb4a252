"""A round's states, grown in one launch; `grow_ref` takes a hundred small ones for each state that it adds.

Which state comes next depends on all those before, so a program goes through them one by one; the rows are side by side. Its
twin, in `drafting`, also takes reveal rules that are not this package's.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..rules.revealing import (
    EACH_MORE,
    MOST_ODDS,
    ORDER_SHARPNESS,
    TAIL_NATS,
    THRESHOLD_SHARPNESS,
    Dynamic,
    EntropyBound,
    RevealRule,
    Sequential,
    Static,
)
from .dispatch import MULTIPLY_ADD, power_of_two, tl, triton

if triton is not None:
    from .noise import gumbel_of_bits, token_noise_key, token_noise_of

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
        token: [rows, sources, block, m] long, what each source tells: the likeliest tokens of each masked position, one where
            picks are greedy,
        odds: [rows, sources, block, m] float, and their log-odds; -inf for those that are never sampled.
        known: [rows, m, block + 1] long, ids and start of states that need no slot, since what follows is known.
        known_valid: [rows, m] bool.
        ahead: [rows, m, block + 6] long, the states that they lead to.
        successor: [rows, block + 6] long, the next block's first state.
        open_successor: [rows] bool, whether it may follow a clean one: it has masks.
        open_end: [rows] long, one past the last position that is not given.
        eos: [any] long, ids that end a text.
        schedule: [block] long, reveals per denoising step.
        seed: [rows] long, of the noise by which tokens are sampled; None: picks are greedy.
        rule: What a step reveals.
        mask_id: The mask's id.
        branches: Followers of a state, at most; no more than a block has positions.
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
    seed: Tensor | None
    rule: RevealRule
    mask_id: int
    branches: int

    def fits(self, size: int) -> bool:
        """Tell if the kernel knows the rule, and holds what `size` states need."""
        return (
            type(self.rule) in _KERNEL_RULES and _entries(size, self.branches) * power_of_two(self.first.shape[-1]) <= _LARGEST
        )


# By number, the rules that the kernel knows, and what each is given.
_KERNEL_RULES: dict[type[RevealRule], int] = {Static: 0, Sequential: 1, Dynamic: 2, EntropyBound: 3}


def _bound(rule: RevealRule) -> float:
    if isinstance(rule, Dynamic):
        return min(max(rule.threshold, -2 * MOST_ODDS), 2 * MOST_ODDS)
    return min(rule.bound, 2 * MOST_ODDS) if isinstance(rule, EntropyBound) else 0.0


def _entries(size: int, branches: int) -> int:
    """Count the states in a row's table: those taken, then those that may be."""
    return power_of_two(size * (1 + branches))


def grow_kernel(table: DraftTable, size: int, most: int) -> tuple[Tensor, Tensor]:
    """Grow the states of a round, best first, by the kernel.

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
    seed = table.first[:, 0] if table.seed is None else table.seed.contiguous()
    entries = _entries(max(size, most) if table.fits(most) else size, table.branches)
    columns = power_of_two(width)
    _grow[(rows,)](
        *(table.first, table.valid.view(torch.uint8), table.token.contiguous(), table.odds.contiguous()),
        *(table.known.contiguous(), table.known_valid.contiguous().view(torch.uint8), table.ahead.contiguous()),
        *(table.successor.contiguous(), table.open_successor.contiguous().view(torch.uint8)),
        *(table.open_end.contiguous(), table.eos, table.schedule, seed, slots, valid.view(torch.uint8)),
        *(table.first.stride(0), table.valid.stride(0), size, table.branches, table.token.shape[1], table.known.shape[1]),
        *(len(table.eos), table.mask_id, _bound(table.rule)),
        BLOCK=width - DRAFT_COLUMNS,
        COLUMNS=columns,
        ENTRIES=entries,
        TILE_KNOWN=max(1, 1024 // columns),
        RULE=_KERNEL_RULES[type(table.rule)],
        SAMPLED=table.seed is not None,
        LIKELIEST=table.token.shape[-1],
        ORDER=ORDER_SHARPNESS,
        THRESHOLD=THRESHOLD_SHARPNESS,
        LOG_MORE=math.log(EACH_MORE),
        TAIL=TAIL_NATS,
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
    def _log_sigmoid(x):  # type: ignore[no-untyped-def]
        return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))

    @triton.jit
    def _chances(level, which, ORDER: tl.constexpr):  # type: ignore[no-untyped-def]
        """Compute the softmax of ORDER times `level` over the columns that `which` marks; 0 elsewhere."""
        level = tl.where(which, level, float("-inf"))
        peak = tl.max(level, 0)
        weight = tl.exp(ORDER * (level - tl.where(peak == float("-inf"), 0.0, peak)))
        total = tl.sum(weight, 0)
        return weight / tl.where(total == 0.0, 1.0, total)

    @triton.jit
    def _places(score, which, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Rank by score those columns that `which` marks, best first, of equals the first."""
        column = tl.arange(0, COLUMNS)
        earlier = column[None, :] < column[:, None]
        before = (score[None, :] > score[:, None]) | ((score[None, :] == score[:, None]) & earlier)
        return tl.sum((before & which[None, :]).to(tl.int32), 1)

    @triton.jit
    def _told(  # type: ignore[no-untyped-def]
        token, odds, at, in_block, seed, start, masks, COLUMNS: tl.constexpr, SAMPLED: tl.constexpr, LIKELIEST: tl.constexpr
    ):
        """Read what a source tells: the likeliest token of each position and its log-odds, or a sample with its own noise."""
        column = tl.arange(0, COLUMNS)
        at = at * LIKELIEST
        tokens = tl.load(token + at, mask=in_block, other=0).to(tl.int32)
        surety = tl.load(odds + at, mask=in_block, other=0.0).to(tl.float32)
        if SAMPLED:
            keys = token_noise_key(seed, start + column, masks)
            score = _log_sigmoid(surety) + gumbel_of_bits(token_noise_of(keys, tokens))
            for i in range(1, LIKELIEST):
                other = tl.load(token + at + i, mask=in_block, other=0).to(tl.int32)
                its_odds = tl.load(odds + at + i, mask=in_block, other=float("-inf")).to(tl.float32)
                its_score = _log_sigmoid(its_odds) + gumbel_of_bits(token_noise_of(keys, other))
                better = its_score > score
                tokens = tl.where(better, other, tokens)
                surety = tl.where(better, its_odds, surety)
                score = tl.where(better, its_score, score)
        return tokens, surety

    @triton.jit
    def _follower(  # type: ignore[no-untyped-def]
        state, shown, token, end, source, eos, eos_count, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
    ):
        """Reveal more positions of a state, those of `shown`."""
        column = tl.arange(0, COLUMNS)
        ends = column < 0
        for i in range(eos_count):
            ends = ends | (tl.load(eos + i).to(tl.int32) == token)
        made = tl.where(shown, token, state)
        made = tl.where(column == BLOCK + 2, state + 1, made)
        last = tl.min(tl.where(shown & ends, column, BLOCK), 0)
        made = tl.where(column == BLOCK + 3, tl.minimum(end, last), made)
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
            *(
                "slots_stride",
                "valid_stride",
                "size",
                "branches",
                "source_count",
                "known_count",
                "eos_count",
                "mask_id",
                "bound",
            )
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
        schedule,
        seeds,
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
        bound,
        BLOCK: tl.constexpr,
        COLUMNS: tl.constexpr,
        ENTRIES: tl.constexpr,
        TILE_KNOWN: tl.constexpr,
        RULE: tl.constexpr,
        SAMPLED: tl.constexpr,
        LIKELIEST: tl.constexpr,
        ORDER: tl.constexpr,
        THRESHOLD: tl.constexpr,
        LOG_MORE: tl.constexpr,
        TAIL: tl.constexpr,
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
        seed = tl.load(seeds + row)
        table = tl.full((ENTRIES, COLUMNS), -1, tl.int32)  # no state starts at -1
        chance = tl.full((ENTRIES,), 0.0, tl.float32)
        reached = tl.full((), 1.0, tl.float32)
        _store(slots_out, valid_out, 0, state, is_valid, WIDTH, COLUMNS)
        for slot in range(size - 1):
            table = tl.where((entry == slot)[:, None], state[None, :], table)
            end, source = _entry(state, column, BLOCK + 3), _entry(state, column, BLOCK + 5)
            masked = in_block & (state == mask_id)
            masks = tl.sum(masked.to(tl.int32), 0)
            clean = masks == 0
            start = _entry(state, column, BLOCK)
            told = (row * source_count + tl.maximum(source, 0)) * BLOCK + column
            tokens, surety = _told(token, odds, told, in_block, seed, start, masks, COLUMNS, SAMPLED, LIKELIEST)
            open_columns = tl.where(is_valid & (source >= 0), end, 0)
            candidate = masked & (column < open_columns)
            count = tl.sum(candidate.to(tl.int32), 0)
            # As the rules say in `likely`: an order of the candidates, from which each branch takes its set.
            step = _entry(state, column, BLOCK + 2)
            quota = tl.load(schedule + tl.minimum(step, BLOCK - 1)).to(tl.int32)
            surety = tl.where(candidate & (surety == surety), surety, float("-inf"))  # no number is no chance
            level = tl.where(candidate, tl.minimum(tl.maximum(surety, -MOST), MOST), 0.0)
            place = _places(surety, candidate, COLUMNS)
            if RULE == 0:
                sure = tl.maximum(quota - 1, 0)
                weight = _chances(tl.minimum(surety, MOST), candidate & (place >= sure), ORDER)
                base = candidate & (place < sure)
                first = tl.where((count > 0) & (count <= sure), 1.0, 0.0)
            if RULE == 1:
                place = tl.sum(((column[None, :] < column[:, None]) & candidate[None, :]).to(tl.int32), 1)
                base = candidate & (place < quota)
                first = tl.exp(tl.sum(tl.where(base, _log_sigmoid(surety), 0.0), 0))
            if RULE == 2:
                free = candidate & (place > 0)
                gap = THRESHOLD * (level - bound)
                base = candidate & ((place == 0) | (gap > 0.0))
                doubt = tl.abs(gap)
                log_first = tl.sum(tl.where(free, _log_sigmoid(doubt), 0.0), 0)
                place = _places(-doubt, free, COLUMNS)
                one = tl.sum(base.to(tl.int32), 0) == 1
                weight = _chances(level, candidate, ORDER)
            if RULE == 3:
                p = tl.sigmoid(level)
                nats = (1.0 - p) * (TAIL - _log_sigmoid(-level)) - p * _log_sigmoid(level)
                nats = tl.where(candidate, nats, 0.0)
                running = tl.sum(tl.where(place[None, :] <= place[:, None], nats[None, :], 0.0), 1)
                room = tl.maximum(tl.sum((candidate & (running < bound)).to(tl.int32), 0), 1)
                weight = _chances(level, candidate, ORDER)
            for branch in range(branches):
                if RULE == 0:
                    shown = base | (candidate & (place == sure + branch))
                    own = tl.sum(tl.where(candidate & (place == sure + branch), weight, 0.0), 0)
                    own = tl.where(branch == 0, tl.maximum(own, first), own)
                if RULE == 1:
                    shown = base
                    own = tl.where(branch == 0, first, 0.0)
                if RULE == 2:
                    other = free & (place == tl.where(one, (branch + 1) // 2, branch) - 1)
                    alone = one & (branch % 2 == 0)
                    shown = other ^ (base & ((branch == 0) | ~alone))
                    cost = tl.sum(tl.where(other, doubt, 0.0), 0)
                    own = tl.exp(log_first - tl.where(alone, 0.0, cost))
                    own = own * tl.where(alone, tl.sum(tl.where(shown, weight, 0.0), 0), 1.0)
                    own = tl.where((branch == 0) | (tl.sum(other.to(tl.int32), 0) > 0), own, 0.0)
                if RULE == 3:
                    more = (branch + 1) // 2
                    size_here = room + tl.where(branch % 2 == 1, more, -more)
                    alone = (room == 1) & (branch % 2 == 0)
                    shown = candidate & tl.where(alone, place == more, place < size_here)
                    own = tl.exp(more * LOG_MORE) * tl.where(room == 1, tl.max(weight, 0), 1.0)
                    own = tl.where((size_here >= 1) & (size_here <= count), own, 0.0)
                    own = tl.where(alone, tl.sum(tl.where(shown, weight, 0.0), 0), own)
                own = tl.where(count == 0, 0.0, own)  # nothing is left to reveal
                made = _follower(state, shown, tokens, end, source, eos, eos_count, BLOCK, COLUMNS)
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


__all__ = ["DRAFT_COLUMNS", "INHERITED", "DraftTable", "grow_kernel"]
