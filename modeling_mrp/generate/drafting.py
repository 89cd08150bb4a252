"""Which states a round submits: a lattice of those that may follow each row's next state, the likeliest first.

An estimate of the backbone's hidden states tells, for each masked position, a token and how sure it is. Which position is
revealed first is far less certain than which token it gets, so a state has several followers; orders that meet in one state
add up there, and a state that the last round scored needs no slot, since what follows it is known.

Estimates come from *sources*: the last accepted state and the remembered ones, at which the backbone itself spoke, and the
states of the lattice that the head has re-read. A head pass costs nearly the same for many states as for one, so a few passes
serve a round: the lattice is grown a little, the head re-reads all of it in one pass, and it is grown anew, further.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.grow import INHERITED, MORE, MOST_ODDS, ORDER_SHARPNESS, Ground
from .states import Memory, Proposal, States, whole_text

if TYPE_CHECKING:
    from .decoding import Decoder


def growth(width: int, passes: int) -> list[int]:
    """How many states of `width` the lattice holds at each head pass of a round: in even steps, up to all but the last."""
    passes = min(passes, width - 1)
    return [-(-done * (width - 1) // passes) for done in range(1, passes + 1)]


def reachable(masks: int, branches: int, enough: int) -> int:
    """How many states, up to `enough`, may follow one with so many masks, itself and the next block's included.

    The tokens of a state depend on the way to it, so that ways to reveal the same positions are counted one by one.
    """
    states = 2  # without masks: itself, and the one behind it
    for left in range(1, masks + 1):
        if states >= enough:
            break
        states = 1 + min(left, branches) * states
    return min(states, enough)


class Budget:
    """How many states a row submits in a round, by how often those of earlier rounds were come by.

    A forward over n tokens takes one unit of time up to `compute_bound_tokens` and n / `compute_bound_tokens` units beyond; a
    head pass takes its share of that. The states that make the most tokens for the time are submitted; what is not submitted
    is hoped to get better, so that it is tried again after a while. Every row of a batch has as many: a forward is a rectangle.

    Args:
        width: States at most.
        state_tokens: Tokens of one state of every row.
        compute_bound_tokens: See above; None: time does not grow.
        head_cost: Time of the round's head passes over that of the backbone's forward, at the same number of tokens.
    """

    RATE, HOPE = 0.1, 0.01

    def __init__(self, width: int, state_tokens: int, compute_bound_tokens: int | None, head_cost: float) -> None:
        self.state_tokens, self.bound, self.head_cost = state_tokens, compute_bound_tokens, head_cost
        self.right = [1.0] * width  # the chance that a row comes by the state in each slot

    def width(self) -> int:
        """States to submit."""
        if self.bound is None:
            return len(self.right)
        return max(range(1, 1 + len(self.right)), key=lambda n: (self._worth(n), -n))

    def _worth(self, states: int) -> float:
        """Tokens of a row in a unit of time: per state over per state, so that what is equal is so in floating point."""
        assert self.bound is not None
        time = max(1 / states, self.state_tokens / self.bound)
        return sum(self.right[:states]) / states / time / (1 + self.head_cost if states > 1 else 1)

    def learn(self, passed: list[int], rows: int) -> None:
        """From a round in which so many rows could draft: how many of them came by the state in each slot offered."""
        for slot in range(1, len(self.right) if rows else 1):
            if slot < len(passed):
                self.right[slot] += self.RATE * (passed[slot] / rows - self.right[slot])
            else:
                self.right[slot] += self.HOPE * (1 - self.right[slot])


class Lattice:
    """The states of one round, [rows, width], and what they are drafted from.

    A state is held as one row of integers: its ids, then start, parent, step, end, base and source. The first three things
    say which state it is; `end` is the column of its first eos, `base` the source that an estimate of it starts from, and
    `source` the one that tells its followers: its own estimate if there is one, else its base.

    Sources are numbered: 0 is the last accepted state, then come the remembered ones, then estimates by the head.

    Args:
        decoder: Whose round it is.
        width: States per row.
        drafting: Whether there are guesses among them, or only the next block's state behind a clean one.
    """

    def __init__(self, decoder: "Decoder", width: int, drafting: bool) -> None:
        self.decoder, self.width, self.drafting = decoder, width, drafting
        self.branches = min(decoder.strategy.branches, decoder.block)
        block = decoder.block
        self.start, self.parent, self.step, self.end, self.base, self.source = range(block, block + MORE)
        seed, current = decoder.seed, decoder.current()
        self.hidden, self.token, self.odds = (t[:, None] for t in (seed.hidden, seed.reveal.token, seed.reveal.confidence))
        self.valid = current.valid[:, None]
        none = torch.full_like(current.start, -1)
        first_source = torch.where(decoder.has_seed, 0, none) if drafting else none
        self.slots = self._packed(current, none, decoder.eos_column(current), first_source)[:, None]
        if width > 1:
            after = decoder.next_block(current)
            self.rider = self._packed(after, none, decoder.eos_column(after), none)
            self.rides = (after.ids == decoder.mask_id).any(-1)
        if drafting:
            self._remember(decoder.memory)

    def _remember(self, memory: Memory) -> None:
        """Takes in the states of earlier rounds: as sources, and to look up where they lead."""
        scored, exits = memory.scored, memory.exit
        self.hidden = torch.cat([self.hidden, scored.hidden], 1)
        self.token = torch.cat([self.token, scored.reveal.token], 1)
        self.odds = torch.cat([self.odds, scored.reveal.confidence], 1)
        self.has_read = False
        # States whose estimate, or whose way ahead, is known: what is looked up by ids and start, and what it leads to.
        self.known = torch.cat([scored.states.ids, scored.states.start[..., None]], -1)
        self.known_valid = scored.states.valid
        ends = self.decoder.eos_column(exits.map(lambda t: t.flatten(0, 1))).view_as(exits.start)
        self.ahead = self._packed(exits, torch.full_like(exits.start, -1), ends, 1 + memory.end)

    def _packed(self, states: States, parent: Tensor, end: Tensor, source: Tensor) -> Tensor:
        rest = torch.stack([states.start, parent, states.step, end, source, source], -1)
        return torch.cat([states.ids, rest], -1)

    def states(self) -> States:
        """[rows, n] the states grown so far."""
        rows = self.decoder.all_rows[:, None].expand_as(self.valid)
        ids = self.slots[..., : self.decoder.block]
        return States(ids, self.slots[..., self.start], self.slots[..., self.step], rows, self.valid)

    def proposal(self) -> Proposal:
        """What is submitted."""
        return Proposal(self.states(), self.slots[..., self.parent])

    def grow(self, size: int) -> None:
        """Grows the lattice from its first state to `size` of them, best first."""
        decoder = self.decoder
        if size == 1:
            self.slots, self.valid = self.slots[:, :1], self.valid[:, :1]
        elif not self.drafting:
            self._ride()
        elif decoder.drafter.sample or not decoder.one_at_a_time or not (ground := self._ground()).fits(size):
            self.slots, self.valid = self._grown_ref(size)
        else:
            self.slots, self.valid = decoder.picker.dispatch.run(
                "grow",
                lambda: ground.grown(size, decoder.width),
                lambda: self._grown_ref(size),
                *(self.slots, self.token, self.odds, self.known, self.ahead, self.rider),
            )

    def _ride(self) -> None:
        """Without drafts: the next block's state behind a clean first one, and no other."""
        first, valid = self.slots[:, 0], self.valid[:, 0]
        follows = valid & self.rides & ~(first[:, : self.start] == self.decoder.mask_id).any(-1)
        self.rider[:, self.parent] = 0
        self.slots = torch.stack([first, torch.where(follows[:, None], self.rider, first)], 1)
        self.valid = torch.stack([valid, follows], 1)

    def _ground(self) -> Ground:
        decoder = self.decoder
        return Ground(
            *(self.slots, self.valid, self.token, self.odds, self.known, self.known_valid, self.ahead),
            *(self.rider, self.rides, decoder.rows.open_end, decoder.eos, decoder.mask_id, self.branches),
        )

    def _grown_ref(self, size: int) -> tuple[Tensor, Tensor]:
        """The twin of `Ground.grown`, for everything that may be drafted."""
        rows, branches = self.decoder.all_rows, self.branches
        state, valid = self.slots[:, 0], self.valid[:, 0]
        slots, valids, reached = [state], [valid], torch.ones_like(state[:, 0], dtype=self.odds.dtype)
        # The states taken, then those that may be; no state starts at -1.
        table = state.new_full((len(rows), size * (1 + branches), state.shape[-1]), -1)
        chance = reached.new_zeros(table.shape[:2])
        held = torch.arange(table.shape[1], device=table.device) < size
        for slot in range(size - 1):
            table[:, slot] = state
            followers, odds = self._followers(state, valid, slot)
            odds = odds * reached[:, None]
            # Orders that meet in one state add up there: among these, and with those found before.
            if branches > 1:
                twins = (followers[:, :, None, : self.step] == followers[:, None, :, : self.step]).all(-1)
                odds = (twins * odds[:, None]).sum(-1) * ~twins.tril(-1).any(-1)
            met = (table[:, :, None, : self.step] == followers[:, None, :, : self.step]).all(-1)
            met &= (held | (chance > 0))[..., None]
            chance += (met & ~held[:, None]).to(chance.dtype).mul_(odds[:, None]).sum(-1)
            fresh = slice(size + slot * branches, size + (slot + 1) * branches)
            table[:, fresh] = followers
            chance[:, fresh] = odds * ~met.any(1)
            reached, place = chance.max(-1)  # where nothing is left, some state that is not valid
            valid = reached > 0
            state = table[rows, place]
            chance.scatter_(1, place[:, None], 0.0)  # as chance[rows, place] = 0, for whose number the host would wait
            slots.append(state)
            valids.append(valid)
        return torch.stack(slots, 1), torch.stack(valids, 1)

    def _followers(self, state: Tensor, valid: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """[rows, branches] followers of the states in a slot [rows], and the chance of each there; 0 for none."""
        decoder, block = self.decoder, self.decoder.block
        ids, end, source = state[:, :block], state[:, self.end], state[:, self.source]
        masked = ids == decoder.mask_id
        token, odds = self.tells(state, valid)
        candidates = masked & (decoder.offsets < end[:, None]) & ((source >= 0) & valid)[:, None]
        ranked, order = odds.where(candidates, -torch.inf).sort(dim=-1, descending=True, stable=True)
        if decoder.one_at_a_time:
            chance = (ORDER_SHARPNESS * ranked.clamp(max=MOST_ODDS)).softmax(-1)[:, : self.branches].nan_to_num(0.0)
            last = order[:, : self.branches]
            made = state[:, None].repeat(1, self.branches, 1)
        else:
            chance, last, made = self._several(state, token, candidates, ranked, order)
        picked = token.gather(1, last)
        made.scatter_(2, last[..., None], picked[..., None])
        ends = torch.where(decoder.is_eos(picked), last, block)
        made[..., self.end] = torch.minimum(made[..., self.end], ends)
        made[..., self.step] += 1
        made[..., self.base] = made[..., self.source]
        made = self._looked_up(made)
        chance = chance * ~self._done(made)  # the reveal before a state that ends the row already tells
        # Behind a clean state comes the next block, but one at a time: a given block without masks has to wait.
        clean = ~masked.any(-1)
        rider = self.rider.clone()
        rider[:, self.parent] = slot
        made[:, 0] = torch.where(clean[:, None], rider, made[:, 0])
        chance[:, 0] = torch.where(clean, self.rides, chance[:, 0])
        return made, chance * valid[:, None]

    def _several(
        self, state: Tensor, token: Tensor, candidates: Tensor, ranked: Tensor, order: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For steps that reveal several positions: all but the last are the surest, and the last one is uncertain.

        Returns the chances [rows, branches], the last position of each branch, and the states with the others revealed.
        """
        decoder, block = self.decoder, self.decoder.block
        sure = (decoder.schedule[state[:, self.step].clamp(max=block - 1)] - 1).clamp(min=0)[:, None]
        at = sure + decoder.offsets[: self.branches]
        choice = (ORDER_SHARPNESS * ranked.clamp(max=MOST_ODDS).masked_fill(decoder.offsets < sure, -torch.inf)).softmax(-1)
        chance = choice.gather(1, at.clamp(max=block - 1)).where(at < block, 0.0).nan_to_num(0.0)
        # Where a step reveals more than is left, all of it goes.
        count = candidates.sum(-1, keepdim=True)
        chance[:, :1] = torch.where((count > 0) & (count <= sure), 1.0, chance[:, :1])
        last = order.gather(1, torch.minimum(at, (count - 1).clamp(min=0)))
        rank = torch.empty_like(order).scatter_(1, order, decoder.offsets.expand_as(order))
        surest = (rank < sure) & candidates
        made = state.clone()
        made[:, :block] = torch.where(surest, token, made[:, :block])
        ends = torch.where(surest & decoder.is_eos(token), decoder.offsets, block).amin(-1)
        made[:, self.end] = torch.minimum(made[:, self.end], ends)
        return chance, last, made[:, None].repeat(1, self.branches, 1)

    def tells(self, state: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """The token [rows, block] that each masked position of states [rows] is expected to get, and its log-odds.

        Greedy picks at a source stand for all that follows; the noise of sampled ones depends on how many masks are left.
        """
        rows, source = self.decoder.all_rows, state[:, self.source]
        at = source.clamp(min=0)
        if not self.decoder.drafter.sample:
            return self.token[rows, at], self.odds[rows, at]
        ids, told = state[:, : self.decoder.block], valid & (source >= 0)
        states = States(ids, state[:, self.start], state[:, self.step], rows, told)
        reveal = self.decoder.reveal_from(states, self.hidden[rows, at], drafting=True)
        return reveal.token, reveal.confidence

    def _looked_up(self, made: Tensor) -> Tensor:
        """States [rows, n] that are remembered or re-read are replaced with what they lead to."""
        block = self.decoder.block
        same = (made[:, :, None, : block + 1] == self.known[:, None]).all(-1) & self.known_valid[:, None]
        found, place = same.any(-1), same.int().argmax(-1)
        ahead = self.ahead.gather(1, place[..., None].expand_as(made))
        base = torch.where(ahead[..., self.base] == INHERITED, made[..., self.base], ahead[..., self.base])
        ahead[..., self.base] = base
        return torch.where(found[..., None], ahead, made)

    def _done(self, made: Tensor) -> Tensor:
        """[rows, n] bool: nothing is left to reveal before the end of the text."""
        block, rows = self.decoder.block, self.decoder.rows
        limit = rows.open_end[:, None] - made[..., self.start]
        return whole_text(made[..., :block], made[..., self.end], limit, self.decoder.mask_id)

    def re_read(self) -> None:
        """One head pass over the states grown so far: an estimate of its own for each, from which it is looked up later."""
        decoder, block = self.decoder, self.decoder.block
        # The first state's estimate cannot get better; each other's starts from what its parent has by now.
        begin = 1 if self.has_read else 0
        states, bases = self.states().map(lambda t: t[:, begin:]), self.slots[:, begin:, self.base]
        masked = (states.ids == decoder.mask_id).any(-1)
        states.valid = states.valid & masked & (bases >= 0)
        hidden = self.hidden[decoder.all_rows[:, None], bases.clamp(min=0)]
        hidden = hidden + decoder.head_pass(states, hidden)
        count = states.start.shape[1]
        reveal = decoder.reveal_from(states.map(lambda t: t.flatten(0, 1)), hidden.flatten(0, 1), drafting=True)
        own = torch.arange(self.hidden.shape[1], self.hidden.shape[1] + count, device=hidden.device)
        self.hidden = torch.cat([self.hidden, hidden], 1)
        self.token = torch.cat([self.token, reveal.token.unflatten(0, (-1, count))], 1)
        self.odds = torch.cat([self.odds, reveal.confidence.unflatten(0, (-1, count))], 1)
        read = self.slots[:, begin:].clone()
        read[..., self.source] = torch.where(states.valid, own, read[..., self.source])
        if not self.has_read:
            self.slots, self.has_read = read.clone(), True
        # What leads to a state that has an estimate now leads to that; the newest is found first.
        same = (self.ahead[:, :, None, : block + 1] == read[:, None, :, : block + 1]).all(-1) & states.valid[:, None]
        newer = read.gather(1, same.int().argmax(-1)[..., None].expand_as(self.ahead))
        read[..., self.base] = INHERITED
        self.ahead = torch.cat([read, torch.where(same.any(-1, keepdim=True), newer, self.ahead)], 1)
        self.known = torch.cat([read[..., : block + 1], self.known], 1)
        self.known_valid = torch.cat([states.valid, self.known_valid], 1)


__all__ = ["ORDER_SHARPNESS", "Budget", "Lattice", "growth", "reachable"]
