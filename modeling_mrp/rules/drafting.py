"""Drafts: which states a round submits, the likeliest followers of each row's next state first.

An estimate of the backbone's hidden states tells, for each masked position, a token and how sure it is. Which position is
revealed first is far less certain than which token it gets, so a state has several followers; orders that meet in one state
add up there, and a state that the last round scored needs no slot, since what follows it is known.

Estimates come from *sources*: the last accepted state and the remembered ones, at which the backbone itself spoke, and the
drafted states that the head has re-read. A head pass costs nearly the same for many states as for one, so a few passes serve a
round: the draft is grown a little, the head re-reads all of it in one pass, and it is grown anew, further.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.dispatch import Dispatch
from ..kernels.grow import DRAFT_COLUMNS, INHERITED, DraftTable, grow_kernel
from ..kernels.noise import gumbel_noise, noise_keys
from .constants import indices
from .revealing import Candidates
from .rules import whole_text
from .states import STATE_COLUMNS, States

# Columns of a drafted state (see `DraftTable`), counted from its end: those of a state, then two more.
DRAFT_START, DRAFT_PARENT, DRAFT_STEP, DRAFT_END, BASE, SOURCE = range(-DRAFT_COLUMNS, 0)


def growth(width: int, passes: int) -> list[int]:
    """Count the states of `width` drafted at each head pass of a round: in even steps, up to all but the last."""
    passes = min(passes, width - 1)
    return [-(-done * (width - 1) // passes) for done in range(1, passes + 1)]


@cache
def reachable(masks: int, branches: int, enough: int) -> int:
    """Count the states, up to `enough`, that may follow one with so many masks, itself and the next block's included.

    The tokens of a state depend on the way to it, so that ways to reveal the same positions are counted one by one.
    """
    states = 2  # without masks: itself, and the one behind it
    for left in range(1, masks + 1):
        if states >= enough:
            break
        states = 1 + min(left, branches) * states
    return min(states, enough)


@dataclass(frozen=True)
class Draft:
    """The states of a round.

    Attributes:
        slots: [rows, n, block + 6] long: see `DraftTable`.
        valid: [rows, n] bool.
        table: What it was grown on; None where nothing is drafted.
    """

    slots: Tensor
    valid: Tensor
    table: DraftTable | None = None

    @property
    def states(self) -> States:
        """[rows, n], as they are scored."""
        return States(self.slots[..., : STATE_COLUMNS - DRAFT_COLUMNS], self.valid)

    @property
    def drafted(self) -> Tensor:
        """[rows, n] bool: states that are guesses; a row's next state and the block behind a clean one are not."""
        drafted = self.valid & (self.slots[..., DRAFT_PARENT] < 0)
        drafted[:, 0] = False
        return drafted


def as_slots(states: States, source: Tensor | int) -> Tensor:
    """Append to states the number of the source that tells of them, [...] or one for all: [..., block + 6] long."""
    column = torch.full_like(states.start, source) if isinstance(source, int) else source
    return torch.cat([states.table, column[..., None], column[..., None]], -1)


def undrafted(current: States, successor: States, mask_id: int, room: int) -> Draft:
    """Make the states of a round without drafts: each row's own, and with room for two the next block's behind a clean one."""
    slots = as_slots(current, -1)[:, None]
    if room == 1:
        return Draft(slots, current.valid[:, None])
    behind = as_slots(successor, -1)
    behind[:, DRAFT_PARENT] = 0
    follows = current.valid & successor.masked(mask_id).any(-1) & ~current.masked(mask_id).any(-1)
    second = torch.where(follows[:, None], behind, slots[:, 0])
    return Draft(torch.stack([slots[:, 0], second], 1), torch.stack([current.valid, follows], 1))


def grow(table: DraftTable, size: int, most: int, dispatch: Dispatch) -> Draft:
    """Grow the draft of a round from each row's next state.

    Args:
        table: What it is grown on.
        size: States of it.
        most: The most that any call of this decode asks for.
        dispatch: Kernel or PyTorch.
    """
    if size == 1:
        return Draft(table.first[:, None], table.valid[:, None], table)
    if not table.fits(size):
        return Draft(*grow_ref(table, size), table)
    tensors = (table.first, table.token, table.odds, table.known, table.ahead, table.successor)
    grown = dispatch.run("grow", lambda: grow_kernel(table, size, most), lambda: grow_ref(table, size), *tensors)
    return Draft(*grown, table)


def grow_ref(table: DraftTable, size: int) -> tuple[Tensor, Tensor]:
    """Grow the draft of a round as `grow_kernel` does: its twin, which takes any reveal rule."""
    branches, named = table.branches, slice(None, DRAFT_STEP)
    state, valid = table.first, table.valid
    rows = torch.arange(len(state), device=state.device)
    slots, valids, reached = [state], [valid], torch.ones_like(state[:, 0], dtype=table.odds.dtype)
    # The states taken, then those that may be; no state starts at -1.
    entries = state.new_full((len(rows), size * (1 + branches), state.shape[-1]), -1)
    chance = reached.new_zeros(entries.shape[:2])
    held = torch.arange(entries.shape[1], device=entries.device) < size
    for slot in range(size - 1):
        entries[:, slot] = state
        followers, odds = followers_of(table, state, valid, slot)
        odds = odds * reached[:, None]
        # Orders that meet in one state add up there: among these, and with those found before.
        if branches > 1:
            twins = (followers[:, :, None, named] == followers[:, None, :, named]).all(-1)
            odds = (twins * odds[:, None]).sum(-1) * ~twins.tril(-1).any(-1)
        met = (entries[:, :, None, named] == followers[:, None, :, named]).all(-1)
        met &= (held | (chance > 0))[..., None]
        chance += (met & ~held[:, None]).to(chance.dtype).mul_(odds[:, None]).sum(-1)
        fresh = slice(size + slot * branches, size + (slot + 1) * branches)
        entries[:, fresh] = followers
        chance[:, fresh] = odds * ~met.any(1)
        reached, place = chance.max(-1)  # where nothing is left, some state that is not valid
        valid = reached > 0
        state = entries[rows, place]
        chance.scatter_(1, place[:, None], 0.0)  # as chance[rows, place] = 0, for whose number the host would wait
        slots.append(state)
        valids.append(valid)
    return torch.stack(slots, 1), torch.stack(valids, 1)


def followers_of(table: DraftTable, state: Tensor, valid: Tensor, slot: int) -> tuple[Tensor, Tensor]:
    """Find the followers [rows, branches] of the states [rows] in a slot, and the chance of each there; 0 for none."""
    block = state.shape[-1] - DRAFT_COLUMNS
    offsets = torch.arange(block, device=state.device)
    ids, step = state[:, :block], state[:, DRAFT_STEP]
    masked = ids == table.mask_id
    token, odds = told(table, state)
    candidates = masked & (offsets < state[:, DRAFT_END, None]) & ((state[:, SOURCE] >= 0) & valid)[:, None]
    quota = table.schedule[step.clamp(max=block - 1)]
    guessed = Candidates(candidates, token, odds.where(candidates & ~odds.isnan(), -torch.inf), None, ids, step, quota)
    shown, chance = table.rule.likely(guessed, table.branches)
    made = state[:, None].repeat(1, table.branches, 1)
    made[..., :block] = torch.where(shown, token[:, None], made[..., :block])
    ends = shown & (token[..., None] == table.eos).any(-1)[:, None]
    made[..., DRAFT_END] = torch.minimum(made[..., DRAFT_END], torch.where(ends, offsets, block).amin(-1))
    made[..., DRAFT_STEP] += 1
    made[..., BASE] = made[..., SOURCE]
    made = led_ahead(table, made)
    # The reveal before a state that ends the row already tells.
    limit = table.open_end[:, None] - made[..., DRAFT_START]
    chance = chance * ~whole_text(made[..., :block], made[..., DRAFT_END], limit, table.mask_id)
    # Behind a clean state comes the next block, but one at a time: a given block without masks has to wait.
    clean = ~masked.any(-1)
    successor = table.successor.clone()
    successor[:, DRAFT_PARENT] = slot
    made[:, 0] = torch.where(clean[:, None], successor, made[:, 0])
    chance[:, 0] = torch.where(clean, table.open_successor, chance[:, 0])
    return made, chance * valid[:, None]


def told(table: DraftTable, state: Tensor) -> tuple[Tensor, Tensor]:
    """Tell token and log-odds [rows, block] of the masked positions of states [rows], by their sources.

    Where tokens are sampled it is the likeliest of a source with the noise of these states, which the number of masks tells.
    """
    rows, block = indices(len(state), state.device), state.shape[-1] - DRAFT_COLUMNS
    at = state[:, SOURCE].clamp(min=0)
    token, odds = table.token[rows, at], table.odds[rows, at]
    if table.seed is None:
        return token[..., 0], odds[..., 0]
    position = state[:, DRAFT_START, None] + indices(block, state.device)
    masks = (state[:, :block] == table.mask_id).sum(-1, keepdim=True)
    keys = noise_keys(table.seed[:, None], position, masks).flatten()
    noise = gumbel_noise(keys, token.flatten(0, 1), odds.dtype).view_as(odds)
    best = (F.logsigmoid(odds) + noise).argmax(-1, keepdim=True)
    return token.gather(-1, best)[..., 0], odds.gather(-1, best)[..., 0]


def led_ahead(table: DraftTable, made: Tensor) -> Tensor:
    """Replace states [rows, n] that are remembered or re-read with what they lead to."""
    named = table.known.shape[-1]
    same = (made[:, :, None, :named] == table.known[:, None]).all(-1) & table.known_valid[:, None]
    found, place = same.any(-1), same.int().argmax(-1)
    ahead = table.ahead.gather(1, place[..., None].expand_as(made))
    ahead[..., BASE] = torch.where(ahead[..., BASE] == INHERITED, made[..., BASE], ahead[..., BASE])
    return torch.where(found[..., None], ahead, made)


def with_estimates(table: DraftTable, slots: Tensor, which: Tensor, token: Tensor, odds: Tensor, begin: int = 0) -> DraftTable:
    """Add the head's estimates of drafted states: from now on these are looked up, and told of by them.

    Args:
        table: What they were grown on.
        slots: [rows, n, block + 6] long, the states, from the draft's `begin`-th on.
        which: [rows, n] bool, those that have an estimate.
        token: [rows, n, block, m] long, what each tells,
        odds: [rows, n, block, m] float, and its log-odds.
        begin: 0, or 1 where each row's next state has an estimate already, which does not get better.
    """
    named, before = table.known.shape[-1], table.token.shape[1]
    read = slots.clone()
    own = torch.arange(before, before + slots.shape[1], device=slots.device)
    read[..., SOURCE] = torch.where(which, own, slots[..., SOURCE])
    first = table.first if begin else read[:, 0].clone()
    # What leads to a state that has an estimate now leads to that; the newest is found first.
    same = (table.ahead[:, :, None, :named] == read[:, None, :, :named]).all(-1) & which[:, None]
    newer = read.gather(1, same.int().argmax(-1)[..., None].expand_as(table.ahead))
    read[..., BASE] = INHERITED
    return replace(
        table,
        first=first,
        token=torch.cat([table.token, token], 1),
        odds=torch.cat([table.odds, odds], 1),
        known=torch.cat([read[..., :named], table.known], 1),
        known_valid=torch.cat([which, table.known_valid], 1),
        ahead=torch.cat([read, torch.where(same.any(-1, keepdim=True), newer, table.ahead)], 1),
    )


__all__ = [
    "BASE",
    "DRAFT_END",
    "DRAFT_PARENT",
    "DRAFT_START",
    "DRAFT_STEP",
    "SOURCE",
    "Draft",
    "as_slots",
    "followers_of",
    "grow",
    "grow_ref",
    "growth",
    "reachable",
    "told",
    "undrafted",
    "with_estimates",
]
