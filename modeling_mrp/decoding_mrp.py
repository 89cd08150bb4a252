"""The one decoding loop: rounds of packed states over rows that never wait for each other.

A row (one sequence of the batch) is a little state machine. Its *next* state is known: the backbone itself revealed it from
the last state scored. A round goes

1. **propose**: each row submits its next state, the likeliest ones to follow it and, behind a clean state (no
   masks left), the all-mask state of the next block, which looks at the clean one;
2. **score**: one backbone forward over all of them, [rows, states * block_size] tokens;
3. **walk**: the backbone's own reveals lead from state to state; as far as they meet what this round or the one before
   scored, that is accepted. The reveal at the last accepted state, refined by the strategy, makes the row's next state;
4. **commit**: what was revealed becomes text, and the KV of accepted clean blocks becomes prefix.

A strategy that drafts nothing submits one state a round (two where a block ends) and is otherwise the same code.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache_mrp import BlockCache
from .diffusion_mrp import block_causal_mask
from .sampling_mrp import Picker, noise_keys
from .states_mrp import Frontier, Memory, Proposal, Reveal, Scored, States
from .strategies_mrp import Static, ranks

if TYPE_CHECKING:
    from .modeling_mrp import MRPForCausalLM

# The power of a token's odds that orders drafts. Reveals follow the first power or a little more; the third drafts best, as a
# state passed over is remembered, so that going deeper is worth more than its chance (`benchmarks/NOTES.md`, Drafting).
ORDER_SHARPNESS = 3.0
# Prompt tokens per prefill forward, at most, in whole blocks.
PREFILL_CHUNK = 2048


@dataclass
class Rows:
    """What is known of every row; `tokens` is laid out by absolute position, without padding.

    Attributes:
        tokens: [rows, capacity] long: prompt, given and revealed tokens, masks.
        logprob: [rows, capacity] float32 log-confidence of generated tokens when committed.
        reveal_step: [rows, capacity] long index of the denoising step that committed them, -1 elsewhere.
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


@dataclass
class Counts:
    """What a decode cost.

    Attributes:
        forwards: Forwards by role: `prefill`, `denoise`, `verify` (those of the backbone) and `head`.
        row_forwards: [rows] long, backbone forwards in which a row took part.
        row_head_forwards: [rows] long, the same for the head.
        drafted, accepted, revoked: [rows] long: drafted states submitted, drafts that were right, reveals taken back.
        accepted_lengths: [rows, n] long: how many rounds accepted 0, 1, 2, ... states; remembered ones count.
    """

    forwards: dict[str, int]
    row_forwards: Tensor
    row_head_forwards: Tensor
    drafted: Tensor
    accepted: Tensor
    revoked: Tensor
    accepted_lengths: Tensor


class Decoder:
    """Runs one `generate` call; nothing of it stays on the model.

    Args:
        model: An `MRPForCausalLM` in evaluation mode.
        strategy: Which positions are revealed, and what is drafted.
        picker: How tokens are picked.
        prompts: One 1-D long tensor of ids per row, without padding.
        max_new_tokens: At most so many tokens are generated per row.
        schedule: [block] long, reveals per denoising step, then zeros.
        eos_token_ids: Ids that end a row.
        seeds: [rows] long.
        min_new_tokens: No eos is picked for so many tokens.
        stops_at: Given a row and the length of its text, whether a stopping criterion ends it there; or None.
        on_round: Called after every round (for streamers); or None.
        infill: [rows, n] long, what continues each prompt: given tokens, and masks where one is to be generated; or None.
        past_key_values: A cache of an earlier decode of the same model, with as many rows or a divisor of it; or None. It is
            taken over if it has the room.
    """

    def __init__(
        self,
        model: "MRPForCausalLM",
        strategy: Static,
        picker: Picker,
        prompts: list[Tensor],
        max_new_tokens: int,
        schedule: Tensor,
        eos_token_ids: list[int],
        seeds: Tensor,
        min_new_tokens: int = 0,
        stops_at: Callable[[Tensor], bool] | None = None,
        on_round: Callable[[Rows], None] | None = None,
        infill: Tensor | None = None,
        past_key_values: BlockCache | None = None,
    ) -> None:
        config = model.config
        self.model, self.strategy, self.picker = model, strategy, picker
        self.schedule, self.stops_at, self.on_round = schedule, stops_at, on_round
        self.block, self.mask_id = config.block_size, config.mask_token_id
        self.device = seeds.device
        self.eos = torch.tensor(eos_token_ids, dtype=torch.long, device=self.device)
        rows = len(prompts)
        self.rows = self._lay_out(prompts, infill, max_new_tokens, seeds)
        lengths, capacity = self.rows.prompt_length, self.rows.tokens.shape[1]
        self.asked = lengths.tolist()  # how much of each row's text the stopping criteria have seen
        # Given tokens are kept, so that no text ends before the last of them.
        self.no_eos_before = torch.maximum(lengths + min_new_tokens, self.rows.given_end)
        self.bars_eos = bool((self.no_eos_before > lengths).any())
        self.width = max(2, strategy.width)
        zeros = torch.zeros_like(lengths)
        self.counts = Counts(
            {"prefill": 0, "denoise": 0, "verify": 0, "head": 0},
            row_forwards=zeros.clone(),
            row_head_forwards=zeros.clone(),
            drafted=zeros.clone(),
            accepted=zeros.clone(),
            revoked=zeros.clone(),
            accepted_lengths=torch.zeros(rows, (1 + strategy.drafts) * self.width + 1, dtype=torch.long, device=self.device),
        )
        self.offsets = torch.arange(self.block, device=self.device)
        self.all_rows = torch.arange(rows, device=self.device)
        depth = config.num_hidden_layers
        self.backbone_layers, self.head_layers = range(depth), range(depth, depth)
        if strategy.uses_head:
            self.head_layers = range(depth, depth + config.num_nextn_predict_layers)
        scratch, with_head = self.width * self.block, strategy.uses_head
        if past_key_values is None or (with_head and not past_key_values.head_layers):
            past_key_values = model.block_cache(rows, capacity, scratch, with_head=with_head)
        self.cache = past_key_values.with_room(rows, capacity, scratch)
        self.reused = self.cache.reusable(self.rows.tokens, self.rows.start, self.block, with_head)
        # From here on the slots behind are overwritten, also by a call that does not come to its end.
        self.cache.hold(self.rows.tokens, self.reused, self.reused.minimum(self.cache.head_held.to(self.device)))
        # The last scored state's hidden states, from which the head reads; `has_seed` is False right after a clean
        # block whose successor has not been scored. `pending` is a clean block whose head KV is still to be computed.
        self.seed_hidden = torch.zeros(rows, self.block, config.hidden_size, dtype=model.dtype, device=self.device)
        self.has_seed = torch.zeros_like(self.rows.active)
        self.committed = self.rows.start.clone()
        self.head_committed = self.rows.start.clone()
        self.pending = torch.zeros_like(self.rows.active)
        self.pending_ids = torch.zeros(rows, self.block, dtype=torch.long, device=self.device)
        self.pending_hidden = torch.zeros_like(self.seed_hidden)
        nothing = replace(self.current(), valid=torch.zeros_like(self.rows.active)).map(lambda t: t[:, None])
        no_reveal = Reveal(nothing.ids.bool(), nothing.ids, nothing.ids.float(), nothing.ids.float())
        self.memory = Memory(Scored(nothing, nothing.start, no_reveal, self.seed_hidden[:, None]), nothing)

    def _lay_out(self, prompts: list[Tensor], infill: Tensor | None, max_new_tokens: int, seeds: Tensor) -> Rows:
        """Every row's text before the first step; a row starts in the block of its first mask."""
        rows = len(prompts)
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        limit, given_end = lengths + max_new_tokens, lengths
        capacity = -(-int(limit.max()) // self.block) * self.block
        tokens = torch.full((rows, capacity), self.mask_id, device=self.device)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        if infill is not None:
            count = torch.arange(1, 1 + infill.shape[1], device=self.device)
            tokens.scatter_(1, lengths[:, None] + count - 1, infill)
            given_end = lengths + torch.where(infill == self.mask_id, 0, count).amax(1)
        position = torch.arange(capacity, device=self.device)
        masked = (tokens == self.mask_id) & (position < limit[:, None])
        first = torch.where(masked.any(1), masked.int().argmax(1), limit).minimum(limit - 1)
        return Rows(
            tokens=tokens,
            logprob=torch.zeros(rows, capacity, device=self.device),
            reveal_step=torch.full((rows, capacity), -1, device=self.device),
            prompt_length=lengths,
            given_end=given_end,
            limit=limit,
            open_end=torch.where(masked, position + 1, 0).amax(1),
            stop=torch.full_like(lengths, torch.iinfo(torch.long).max),
            start=first // self.block * self.block,
            step=torch.zeros_like(lengths),
            clock=torch.zeros_like(lengths),
            active=torch.ones(rows, dtype=torch.bool, device=self.device),
            seed=seeds,
        )

    # ------------------------------------------------------------------ the outline

    def run(self) -> tuple[Rows, Counts]:
        """Decodes every row to its end."""
        self.prefill()
        while bool(self.rows.active.any()):
            proposal = self.propose()
            self.walk(proposal, self.score(proposal))
            if self.on_round is not None:
                self.on_round(self.rows)
        head_held = self.head_committed if self.head_layers else self.cache.head_held
        self.cache.hold(self.rows.tokens, self.committed, head_held)
        return self.rows, self.counts

    def prefill(self) -> None:
        """One pass over the whole blocks before each row's first mask and, in the same forward, the row's first state.

        It starts where the first row's reused keys and values end.
        """
        first = self.rows.start
        length = int(first.max()) + self.block
        positions = torch.arange(length, device=self.device).expand(len(first), length)
        valid = torch.ones_like(positions, dtype=torch.bool)
        chunk = max(1, PREFILL_CHUNK // self.block) * self.block
        for begin in range(int(self.reused.min()), length, chunk):
            end = min(length, begin + chunk)
            here = positions[:, begin:end]
            ids = self.rows.tokens[:, begin:end]
            mask = block_causal_mask(here, positions[:, :end], valid[:, :end], self.block)
            self.cache.target_slots(begin, end - begin)
            hidden = self.model.backbone(ids, here, mask, self.cache).to(self.device)
            takes_part = (first >= begin) & (self.reused < end)
            self.counts.forwards["prefill"] += 1
            self.counts.row_forwards += takes_part
            if self.head_layers:
                self.model.residual(ids, hidden, here, mask, self.cache)
                self._count_head(takes_part)
            inside = (first >= begin) & (first < end)
            at = (first - begin).clamp(0, end - begin - self.block)[:, None] + self.offsets
            seeds = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
            self.seed_hidden = torch.where(inside[:, None, None], seeds, self.seed_hidden)
        self.has_seed[:] = True
        self._advance(self.current(), self.seed_hidden, self.rows.active)

    def propose(self) -> Proposal:
        """The states of the round: each row's next one, then the likeliest of those that may follow, best first.

        What may follow a state is told by an estimate of the backbone's hidden states there; which position comes first
        is far less certain than which token it gets, so a state has several followers, and orders that meet in one state
        add up there. A state that the last round scored needs no slot: what follows it is known.
        """
        current = self.current()
        slots, parents = [current], [torch.full_like(current.start, -1)]
        # What estimates start from: the last scored state, the remembered ones, then the estimates themselves.
        known = torch.cat([self.seed_hidden[:, None], self.memory.scored.hidden], 1)
        bank = F.pad(known, (0, 0, 0, 0, 0, self.strategy.width - 1))
        base = torch.where(self.has_seed, 0, -1)
        frontier = Frontier(current, (self.width - 1) * (self.strategy.branches + 1))
        for k in range(1, self.width):
            last = slots[-1]
            clean = last.valid & self._clean(last)
            drafting = last.valid & ~clean & (base >= 0) & (k < self.strategy.width)
            rider = replace(self._next_block(last), valid=clean)
            frontier.add(rider, torch.ones_like(frontier.reached), torch.full_like(base, -1), parent=k - 1)
            if bool(drafting.any()):
                at_draft = replace(last, valid=drafting)
                estimate = known.shape[1] + k - 1
                hidden = bank[:, estimate] = self.strategy.draft_hidden(self, at_draft, bank[self.all_rows, base.clamp(min=0)])
                self._branch(frontier, at_draft, self.reveal_from(at_draft, hidden), estimate)
            if not bool(frontier.open.any()):
                break
            state, parent, base = frontier.best()
            slots.append(state)
            parents.append(parent)
        return Proposal(States.stack(slots), torch.stack(parents, 1))

    def _branch(self, frontier: Frontier, states: States, reveal: Reveal, estimate: int) -> None:
        """Adds the followers of [rows] states to the frontier: the expected one, and those that reveal another last position.

        The chance that the backbone puts a position first goes with a power of the odds of its token.
        """
        count = self.schedule[states.step.clamp(max=self.block - 1)]
        candidates = reveal.confidence > -torch.inf
        rank = ranks(reveal.confidence, candidates)
        odds = reveal.confidence.clamp(max=1e4).masked_fill(rank < count[:, None] - 1, -torch.inf)
        choice = (ORDER_SHARPNESS * odds).softmax(-1).nan_to_num(0)
        for branch in range(self.strategy.branches):
            last = rank == (count - 1 + branch)[:, None]
            where = ((rank < count[:, None] - 1) | last) & candidates
            chance = torch.where(last, choice, 0).sum(-1)
            if branch == 0:  # all that is left, where it is less than the schedule asks for
                chance = torch.where(where.any(-1) & (last & where).any(-1).logical_not(), 1.0, chance)
            follower = self._stepped(states, reveal.only(where))
            follower, base = self.memory.skip(follower, estimate)
            # A state that ends the row needs no forward: the reveal before it already tells.
            frontier.add(replace(follower, valid=states.valid & (chance > 0) & ~self._done(follower)), chance, base)

    def score(self, proposal: Proposal) -> Tensor:
        """The backbone's hidden states [rows, width, block, hidden] of all states, in one forward."""
        hidden = self._packed_forward(proposal.states, proposal.parent, self.committed, self.model.backbone)
        verify = bool(proposal.drafted.any())
        self.counts.forwards["verify" if verify else "denoise"] += 1
        self.counts.row_forwards += self.rows.active
        self.counts.drafted += proposal.drafted.sum(1)
        return hidden

    def walk(self, proposal: Proposal, hidden: Tensor) -> None:
        """Goes from state to state where the backbone's reveals lead, and takes each row's next state from the last one."""
        rows, width = proposal.parent.shape
        behind = proposal.behind().flatten(0, 1)
        reveals = self.reveal_from(proposal.states.map(lambda t: t.flatten(0, 1)), hidden.flatten(0, 1), behind=behind)
        scored = Scored(proposal.states, proposal.parent, reveals.map(lambda t: t.unflatten(0, (rows, width))), hidden)
        known = scored.beside(self.memory.scored)
        clean = self._clean(known.states)
        onward = known.edges(
            self._where(clean, self._next_block(known.states), self._stepped(known.states, known.reveal)), clean
        )
        place, active = torch.zeros_like(self.rows.start), proposal.states.valid[:, 0]
        tick = torch.full_like(onward, -1)  # denoising steps before a state on the way; -1 off it
        ticks = torch.zeros_like(place)
        moving = active
        for _ in range(onward.shape[1]):
            tick[self.all_rows, place] = torch.where(moving, ticks, tick[self.all_rows, place])
            ticks = ticks + (moving & ~clean[self.all_rows, place])
            following = onward[self.all_rows, place]
            moving = moving & (following >= 0)
            place = torch.where(moving, following, place)
        passed = tick >= 0
        before = passed.clone()
        before[self.all_rows, place] = False
        self._record(known.states, known.reveal, before & ~clean, tick)
        self.rows.clock += (before & ~clean).sum(-1)
        self._commit_clean(proposal.states, hidden, (passed & clean)[:, :width])
        self.counts.accepted += (passed[:, :width] & proposal.drafted).sum(-1) + passed[:, width:].sum(-1)
        self.counts.accepted_lengths[self.all_rows, passed.sum(-1)] += active
        if self.strategy.drafts:
            self.memory = Memory(scored.kept(~clean[:, :width]), self._stepped(scored.states, scored.reveal))
        final = known.at(self.all_rows, place)
        self._advance(final.states, final.hidden, active, final.reveal)

    # ------------------------------------------------------------------ parts of a round

    def current(self) -> States:
        """Each row's next state [rows], as its tokens show it."""
        ids = self.rows.tokens.gather(1, (self.rows.start[:, None] + self.offsets).clamp(max=self.rows.tokens.shape[1] - 1))
        return States(ids, self.rows.start, self.rows.step, self.all_rows, self.rows.active)

    def _advance(self, states: States, hidden: Tensor, moved: Tensor, reveal: Reveal | None = None) -> None:
        """From the last accepted states [rows]: reveal, refine, write, and stand at the next state."""
        clean = self._clean(states)
        at_mask = moved & ~clean
        if reveal is None:
            reveal = self.reveal_from(replace(states, valid=at_mask), hidden)
        self.seed_hidden = torch.where(moved[:, None, None], hidden, self.seed_hidden)
        self.has_seed = torch.where(moved, ~clean, self.has_seed)
        refined = self.strategy.refine(self, replace(states, valid=at_mask), hidden, reveal)
        self.counts.revoked += ((reveal.where & ~refined.where).sum(-1)) * at_mask
        self._record(states, refined, at_mask, torch.zeros_like(self.rows.clock))
        self.rows.clock += at_mask & refined.where.any(-1)
        following = self._where(clean, self._next_block(states), replace(states, step=states.step + 1))
        self.rows.start = torch.where(moved, following.start, self.rows.start)
        self.rows.step = torch.where(moved, following.step, self.rows.step)
        self._stop_finished()

    def _record(self, states: States, reveal: Reveal, which: Tensor, tick: Tensor) -> None:
        """Writes what states [rows, ...] revealed: text, log-confidence and step, `tick` steps after the row's clock."""
        *entry, column = (reveal.where & which[..., None]).nonzero(as_tuple=True)
        at = tuple(entry)
        row, position = states.row[at], states.start[at] + column
        self.rows.tokens[row, position] = reveal.token[(*at, column)]
        self.rows.logprob[row, position] = reveal.logprob[(*at, column)].float()
        self.rows.reveal_step[row, position] = self.rows.clock[row] + tick[at]

    def _commit_clean(self, states: States, hidden: Tensor, which: Tensor) -> None:
        """Keeps the KV that the round just computed for accepted clean states, and leaves the head's share pending.

        `which` [rows, width] marks, in a row, a block and given blocks right behind it.
        """
        row, slot = which.nonzero(as_tuple=True)
        if len(row) == 0:
            return
        self.cache.commit(row, slot * self.block, states.start[row, slot], self.block, self.backbone_layers)
        order = which.cumsum(1)
        self.committed += order[:, -1] * self.block
        for nth in range(1, 1 + int(order[:, -1].max()) if self.head_layers else 1):
            row, slot = (which & (order == nth)).nonzero(as_tuple=True)
            rows = order[:, -1] >= nth
            if bool((self.pending & rows).any()):
                idle = states.map(lambda t: t[:, 0])
                self._head_pass(replace(idle, valid=torch.zeros_like(rows)), hidden[:, 0], self.pending & rows)
            self.pending |= rows
            self.pending_ids[row] = states.ids[row, slot]
            self.pending_hidden[row] = hidden[row, slot]

    def _stop_finished(self) -> None:
        """Rows whose text is complete leave; a stopping criterion is asked at every newly final token."""
        states = self.current()
        eos = self._eos_column(states)
        end = torch.where(eos < self.block, states.start + eos + 1, self.rows.limit).minimum(self.rows.limit)
        done = self._done(states)
        if self.stops_at is not None:
            self._ask_criteria(end, done)
        self.rows.stop = torch.where(self.rows.active & done, end, self.rows.stop)
        self.rows.active = self.rows.active & ~done

    def _ask_criteria(self, end: Tensor, done: Tensor) -> None:
        """Extends each row's final text (no mask before it) token by token and asks whether it ends there."""
        assert self.stops_at is not None
        for row in self.rows.active.nonzero()[:, 0].tolist():
            masked = (self.rows.tokens[row] == self.mask_id).nonzero()
            final = min(int(masked[0]) if len(masked) else self.rows.tokens.shape[1], int(end[row]))
            for length in range(self.asked[row] + 1, final + 1):
                if self.stops_at(self.rows.tokens[row : row + 1, :length]):
                    end[row], done[row] = length, True
                    break
            self.asked[row] = max(self.asked[row], final)

    # ------------------------------------------------------------------ states

    def _clean(self, states: States) -> Tensor:
        return ~(states.ids == self.mask_id).any(-1)

    def _eos_column(self, states: States) -> Tensor:
        """[n] the first column of an eos that ends the text, `block_size` if the block has none."""
        ends = states.start[:, None] + self.offsets >= self.rows.given_end[states.row, None]
        found = torch.isin(states.ids, self.eos) & ends
        return torch.where(found, self.offsets, self.block).amin(-1)

    def _done(self, states: States) -> Tensor:
        """[n] bool: everything before the eos, or before the limit, is revealed or given."""
        end = torch.minimum(self._eos_column(states) + 1, self.rows.open_end[states.row] - states.start)
        hidden = (states.ids == self.mask_id) & (self.offsets < end[:, None])
        return (end <= self.block) & ~hidden.any(-1)

    def _next_block(self, states: States) -> States:
        """The first state of the block that follows: masks and given tokens."""
        start = states.start + self.block
        at = start[..., None] + self.offsets
        capacity = self.rows.tokens.shape[1]
        ids = self.rows.tokens[states.row[..., None], at.clamp(max=capacity - 1)]
        return replace(
            states, ids=torch.where(at < capacity, ids, self.mask_id), start=start, step=torch.zeros_like(states.step)
        )

    @staticmethod
    def _stepped(states: States, reveal: Reveal) -> States:
        return replace(reveal.applied_to(states), step=states.step + 1)

    @staticmethod
    def _where(condition: Tensor, a: States, b: States) -> States:
        return replace(
            b,
            ids=torch.where(condition[..., None], a.ids, b.ids),
            start=torch.where(condition, a.start, b.start),
            step=torch.where(condition, a.step, b.step),
        )

    # ------------------------------------------------------------------ picks

    def reveal_from(self, states: States, hidden: Tensor, count: Tensor | None = None, behind: Tensor | None = None) -> Reveal:
        """Picks at the masked positions of [n] states from hidden states [n, block, hidden], and what the strategy reveals.

        `count` overrides the strategy and the schedule: so many of the most confident positions. `behind` [n, block] are the
        ids of the clean state of the row's block, not text yet, that each may follow in this round.
        """
        masked = states.ids == self.mask_id
        candidates = masked & (self.offsets < self._eos_column(states)[:, None]) & states.valid[:, None]
        state, column = candidates.nonzero(as_tuple=True)
        row = states.row[state]
        position = states.start[state] + column
        keys = noise_keys(self.rows.seed[row], position, masked.sum(-1)[state])
        picks = self.picker(
            hidden[state, column], keys, lambda at: self._contexts(states, state[at], behind), self._no_eos(row, position)
        )
        shape = states.ids.shape
        token = torch.zeros(shape, dtype=torch.long, device=self.device).index_put_((state, column), picks.token)

        def spread(values: Tensor) -> Tensor:
            return values.new_full(shape, -torch.inf).index_put_((state, column), values)

        confidence, logprob, entropy = map(spread, (picks.confidence, picks.logprob, picks.entropy))
        if count is None:
            count = self.schedule[states.step.clamp(max=self.block - 1)]
            where = self.strategy.reveal(confidence, entropy, candidates, count)
        else:
            where = Static.reveal(self.strategy, confidence, entropy, candidates, count)
        return Reveal(where, token, logprob, confidence)

    def token_confidence(self, states: States, hidden: Tensor, token: Tensor, where: Tensor) -> Tensor:
        """[n, block] log-odds of given tokens under lm_head(hidden), -inf outside `where`."""
        state, column = where.nonzero(as_tuple=True)
        odds = self.picker.token_log_odds(
            hidden[state, column],
            token[state, column],
            lambda at: self._contexts(states, state[at], None),
            self._no_eos(states.row[state], states.start[state] + column),
        )
        return odds.new_full(where.shape, -torch.inf).index_put_((state, column), odds)

    def _no_eos(self, row: Tensor, position: Tensor) -> Tensor | None:
        """[n] bool: positions before the minimum length, or before the last given token."""
        return position < self.no_eos_before[row] if self.bars_eos else None

    def residual_magnitude(self, hidden: Tensor, token: Tensor, where: Tensor) -> Tensor:
        """[n, block] |C| of given tokens: one dot product each; 0 outside `where`."""
        state, column = where.nonzero(as_tuple=True)
        weight = self.picker.lm_head_weight[token[state, column]]
        logit = (hidden[state, column] * weight).sum(-1).abs()
        return logit.new_zeros(where.shape).index_put_((state, column), logit)

    def _contexts(self, states: States, state: Tensor, behind: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """For logits processors: which of the positions belong to which committed ids."""
        contexts = []
        for s in state.unique().tolist():
            row, start = int(states.row[s]), int(states.start[s])
            committed = self.rows.tokens[row : row + 1, :start].clone()
            if behind is not None and start > int(self.rows.start[row]):
                at = int(self.rows.start[row])
                committed[:, at : at + self.block] = behind[s]
            contexts.append(((state == s).nonzero()[:, 0], committed))
        return contexts

    # ------------------------------------------------------------------ forwards

    def head_hidden(self, states: States, hidden: Tensor) -> Tensor:
        """h_C at [rows] states, given hidden states [rows, block, hidden]; catches up with the head's KV on the way."""
        return self._head_pass(states, hidden, self.pending & states.valid)

    def _head_pass(self, states: States, hidden: Tensor, behind: Tensor) -> Tensor:
        """As `head_hidden`; the rows `behind` [rows] also store the head's KV of their last clean block."""
        if not bool(behind.any()):
            packed = states.map(lambda t: t[:, None])
            return self._head_packed(packed, hidden[:, None], None)[:, 0]
        clean = States(self.pending_ids, self.head_committed, torch.zeros_like(states.step), self.all_rows, behind)
        packed = States.stack([clean, states])
        parent = torch.full_like(packed.start, -1)
        parent[:, 1] = torch.where(behind, 0, -1)
        residual = self._head_packed(packed, torch.stack([self.pending_hidden, hidden], 1), parent)[:, 1]
        row = behind.nonzero()[:, 0]
        self.cache.commit(row, torch.zeros_like(row), self.head_committed[row], self.block, self.head_layers)
        self.head_committed[row] += self.block
        self.pending = self.pending & ~behind
        return residual

    def _head_packed(self, states: States, hidden: Tensor, parent: Tensor | None) -> Tensor:
        def forward(ids: Tensor, positions: Tensor, mask: Tensor, cache: BlockCache) -> Tensor:
            return self.model.residual(ids, hidden.flatten(1, 2), positions, mask, cache)

        self._count_head(states.valid.any(1))
        return self._packed_forward(states, parent, self.head_committed, forward)

    def _count_head(self, rows: Tensor) -> None:
        self.counts.forwards["head"] += 1
        self.counts.row_head_forwards += rows

    def _packed_forward(
        self,
        states: States,
        parent: Tensor | None,
        committed: Tensor,
        forward: Callable[[Tensor, Tensor, Tensor, BlockCache], Tensor],
    ) -> Tensor:
        """Scores [rows, width] states side by side: each sees its prefix, itself and, with a state in slot `parent`, what that
        one sees.
        """
        rows, width = states.start.shape
        used = int(committed.max())
        self.cache.target_scratch(width * self.block, used)
        sees = torch.eye(width, dtype=torch.bool, device=self.device).repeat(rows, 1, 1)
        if parent is not None:
            sees |= (parent[..., None] == torch.arange(width, device=self.device)) & (parent >= 0)[..., None]
            for _ in range((width - 2).bit_length()):  # given blocks can follow each other
                sees |= (sees.float() @ sees.float()) > 0
        scratch = sees.repeat_interleave(self.block, 1).repeat_interleave(self.block, 2)
        prefix = torch.arange(used, device=self.device) < committed[:, None]
        mask = torch.cat([scratch, prefix[:, None].expand(-1, width * self.block, -1)], -1)[:, None]
        positions = (states.start[..., None] + self.offsets).flatten(1)
        hidden = forward(states.ids.flatten(1), positions, mask, self.cache).to(self.device)
        return hidden.unflatten(1, (width, self.block))


__all__ = ["Counts", "Decoder", "Rows"]
