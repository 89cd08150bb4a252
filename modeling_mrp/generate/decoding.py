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
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.noise import noise_keys
from ..kernels.pick import residual_magnitude
from ..model.diffusion import block_causal_mask
from ..runner.cache import BlockCache
from ..runner.forwards import READ_BUCKET, Forwards
from ..runner.graphs import Recorder
from ..runner.recorded import bucket
from ..runner.replay import Replay, replayable
from ..runner.round_layers import takes_round_masks
from .drafting import Budget, Lattice, growth, reachable
from .rows import Counts, Outlook, Rows, Slots
from .sampling import Sampler
from .states import Memory, Proposal, Reveal, Scored, States, follow
from .stopping import Stopping
from .strategies import Static, top_by

if TYPE_CHECKING:
    from ..modeling import MRPForCausalLM

# Positions that a kernel takes at once, so that there is nothing to win by their order.
ONE_TILE = 64
# Prompt tokens per prefill forward, at most, in whole blocks.
PREFILL_CHUNK = 2048


class Decoder(Forwards):
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
        stopping: Asks the stopping criteria; or None.
        on_round: Called after every round (for streamers); or None.
        infill: [rows, n] long, what continues each prompt: given tokens, and masks where one is to be generated; or None.
        past_key_values: A cache of an earlier decode of the same model, with as many rows or a divisor of it; or None. It is
            taken over if it has the room.
        recorder: Makes what records rounds, to be replayed; or None: every round runs as it is.

    Raises:
        ValueError: if kernels are forced and the model has another attention than SDPA.
    """

    def __init__(
        self,
        model: "MRPForCausalLM",
        strategy: Static,
        picker: Sampler,
        prompts: list[Tensor],
        max_new_tokens: int,
        schedule: Tensor,
        eos_token_ids: list[int],
        seeds: Tensor,
        min_new_tokens: int = 0,
        stopping: Stopping | None = None,
        on_round: Callable[[Rows], None] | None = None,
        infill: Tensor | None = None,
        past_key_values: BlockCache | None = None,
        recorder: Callable[[], Recorder] | None = None,
    ) -> None:
        config = model.config
        self.model, self.strategy = model, strategy
        self.with_round_masks = takes_round_masks(model, picker.dispatch)
        self.picker = self.drafter = replace(picker, entropy=strategy.uses_entropy)
        head = model.mrp_head
        if strategy.passes and head is not None and head.draft_token_ids is not None and picker.processors is None:
            self.drafter = self.picker.restricted(head.draft_token_ids)
        self.schedule, self.stopping, self.on_round = schedule, stopping, on_round
        self.block, self.mask_id = config.block_size, config.mask_token_id
        self.one_at_a_time = int(schedule.max()) == 1
        self.device = seeds.device
        self.eos = torch.tensor(eos_token_ids, dtype=torch.long, device=self.device)
        rows = len(prompts)
        self.rows = Rows.laid_out(prompts, infill, max_new_tokens, self.block, self.mask_id, seeds)
        lengths = self.rows.prompt_length
        # Given tokens are kept, so that no text ends before the last of them.
        self.no_eos_before = torch.maximum(lengths + min_new_tokens, self.rows.given_end)
        self.bars_eos = bool((self.no_eos_before > lengths).any())
        self.offsets = torch.arange(self.block, device=self.device)
        self.all_rows = torch.arange(rows, device=self.device)
        self.width = max(2, strategy.width)
        self.counts = Counts.zeros(rows, self.width, strategy.drafts, self.device)
        self.verified = torch.zeros((), dtype=torch.long, device=self.device)  # forwards that scored drafts
        self._start_cache(past_key_values, recorder)
        self.replays = self.recorded is not None and replayable(self)
        head_cost = strategy.passes * model.head_share() if strategy.passes else 0.0
        self.budget = Budget(strategy.width, rows * self.block, strategy.compute_bound_tokens, head_cost)
        self.submitted = 1  # states that a row may submit this round, guesses included
        self._remember_nothing()
        self.taken_back: list[tuple[Tensor, Tensor, Tensor]] = []  # by step of the rows: see `latest`

    def _remember_nothing(self) -> None:
        """No state has been accepted yet, none is remembered, and no reveal was taken back."""
        nothing = replace(self.current(), valid=torch.zeros_like(self.rows.active))
        no_reveal = Reveal(nothing.ids.bool(), nothing.ids, nothing.ids.float(), nothing.ids.float())
        # The last accepted state, from which drafts start; `has_seed` is False right after a clean block whose
        # successor has not been scored.
        self.seed = Scored(nothing, nothing.start, no_reveal, self.pending_hidden)
        self.has_seed = torch.zeros_like(self.rows.active)
        self.memory = Memory.empty(self.seed)
        # What the last step took back: start [rows], which positions [rows, block], tokens [rows, block].
        self.latest = (nothing.start, nothing.ids.bool(), nothing.ids)

    def run(self) -> tuple[Rows, Counts]:
        """Decodes every row to its end."""
        self.prefill()
        replay = Replay(self, self.recorded) if self.recorded is not None and self.replays else None
        while self.outlook.active:
            self._keep_taken_back()
            before: Outlook = self.outlook
            self.submitted = min(self.slots())
            self.outlook = self.look_ahead(self.round()) if replay is None else self.outlook_from(replay.round())
            self.budget.learn(self.outlook.passed, before.active - before.clean)
            if self.on_round is not None:
                self.on_round(self.rows)
        self._keep_taken_back()
        if replay is not None:
            replay.end()
        self._settle()
        return self.rows, self.counts

    def prefill(self) -> None:
        """One pass over the whole blocks before each row's first mask and, in the same forward, the row's first state.

        It starts where the first row's reused keys and values end. So, behind a cache and beyond one chunk, a row's forwards
        here may depend on its neighbours; its text does not. Nothing is compiled: each call would have another length.
        """
        first = self.rows.start
        length = int(first.max()) + self.block
        positions = torch.arange(length, device=self.device).expand(len(first), length)
        valid = torch.ones_like(positions, dtype=torch.bool)
        chunk = max(1, PREFILL_CHUNK // self.block) * self.block
        seed = self.seed.hidden
        for begin in range(int(self.reused.min()), length, chunk):
            end = min(length, begin + chunk)
            here = positions[:, begin:end]
            ids = self.rows.tokens[:, begin:end]
            mask = block_causal_mask(here, positions[:, :end], valid[:, :end], self.block)
            self.cache.target_slots(begin, end - begin)
            hidden = self.model.backbone(ids, here, mask, self.cache, compiled=False).to(self.device)
            takes_part = (first >= begin) & (self.reused < end)
            self.counts.forwards["prefill"] += 1
            self.counts.row_forwards += takes_part
            if self.head_layers:
                self.model.residual(ids, hidden, here, mask, self.cache, compiled=False)
                self._count_head(takes_part)
            inside = (first >= begin) & (first < end)
            at = (first - begin).clamp(0, end - begin - self.block)[:, None] + self.offsets
            seed = torch.where(inside[:, None, None], hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1])), seed)
        states = self.current()
        self.outlook = self.look_ahead()
        self._advance(Scored(states, torch.full_like(states.start, -1), self.reveal_from(states, seed), seed), states.valid)
        self.outlook = self.look_ahead()

    def _settle(self) -> None:
        """Tells the cache what it holds, and completes the counts."""
        verify = int(self.verified)
        head_held = self.head_committed if self.head_layers else self.cache.head_held
        self.cache.hold(self.rows.tokens, self.committed, head_held)
        self.counts.forwards |= {"verify": verify, "denoise": self.counts.forwards["denoise"] - verify}
        if self.taken_back:
            start, where, token = (torch.stack(parts) for parts in zip(*self.taken_back, strict=True))
            step, row, column = where.nonzero(as_tuple=True)
            at = start[step, row] + column - self.rows.prompt_length[row]
            self.counts.revocations = torch.stack([row, at, token[step, row, column]], 1)

    def _keep_taken_back(self) -> None:
        if self.strategy.revokes:
            start, where, token = self.latest
            self.taken_back.append((start.clone(), where.clone(), token.clone()))

    def look_ahead(self, passed: Tensor | None = None) -> Outlook:
        """What the host has to know of the next round, `passed` [n] of this one too: the one time in a round that it waits."""
        return self.outlook_from(self.summary(passed).tolist())

    def summary(self, passed: Tensor | None = None) -> Tensor:
        """[SUMMARY + n] long: the numbers of an `Outlook`, on the device. Settles whose head KV is late."""
        current = self.current()
        active = self.rows.active
        masks = (current.ids == self.mask_id).sum(-1) * active
        self.pending = self.pending & active
        self.blocked = self.pending & (masks == 0)
        numbers = torch.stack(
            [
                active.sum(),
                (self.committed * active).max(),
                (self.head_committed * active).max(),
                (active & (masks == 0)).sum(),
                masks.max(),
                (self.has_seed & (masks > 0)).sum(),
                self.pending.sum(),
                self.blocked.sum(),
            ]
        )
        return numbers if passed is None else torch.cat([numbers, passed])

    def outlook_from(self, numbers: list[int]) -> Outlook:
        """What `summary` stacked; where rounds are recorded, the lengths that are read come in steps."""
        outlook = Outlook.of(numbers, self.submitted)
        if self.recorded is None:
            return outlook
        used, head_used = (bucket(length, self.cache.capacity) for length in (outlook.used, outlook.head_used))
        return replace(outlook, used=used, head_used=head_used)

    def round(self) -> Tensor:
        """A round without the look ahead; returns how many rows came by each of its states, [width] long."""
        proposal = self.propose()
        return self.walk(proposal, self.score(proposal))

    def slots(self) -> Slots:
        """How many states the round has.

        What a row drafts must not depend on its neighbours: room that none of them can fill is left out, no other.
        """
        per_row = self.budget.width() if self.strategy.drafts and self.outlook.drafting else 1
        filled = reachable(self.outlook.masks, self.strategy.branches, per_row)
        return Slots(per_row, max(filled, 2 if self.outlook.clean else 1))

    def propose(self) -> Proposal:
        """The states of the round: each row's next one, the likeliest to follow it, and the next block's behind a clean one."""
        return self.draft().proposal()

    def draft(self) -> Lattice:
        """The lattice of the round, fully grown."""
        slots = self.slots()
        lattice = Lattice(self, slots.room, drafting=slots.per_row > 1)
        sizes = growth(slots.per_row, self.strategy.passes)
        for size in sizes if self.outlook.masks > 1 else sizes[:1]:  # behind a single mask nothing is read twice
            lattice.grow(min(size, lattice.width))
            lattice.re_read()
        if self.outlook.blocked and self.outlook.pending:  # no pass has caught up
            idle = replace(self.current(), valid=torch.zeros_like(self.blocked))
            self.head_pass(idle.map(lambda t: t[:, None]), self.seed.hidden[:, None])
        lattice.grow(lattice.width)
        return lattice

    def score(self, proposal: Proposal) -> Tensor:
        """The backbone's hidden states [rows, width, block, hidden] of all states, in one forward."""
        hidden = self._network(proposal.states, proposal.parent, self.committed, self.outlook.used)
        self.counts.forwards["denoise"] += 1
        self.verified += proposal.drafted.any()
        self.counts.row_forwards += self.rows.active
        self.counts.drafted += proposal.drafted.sum(1)
        return hidden

    def walk(self, proposal: Proposal, hidden: Tensor) -> Tensor:
        """Goes from state to state where the backbone's reveals lead, and takes each row's next state from the last one.

        Returns how many rows came by each of the states, [width] long, of those that had masks left.
        """
        count, width = proposal.parent.shape
        behind = proposal.behind().flatten(0, 1)
        reveals = self.reveal_from(proposal.states.map(lambda t: t.flatten(0, 1)), hidden.flatten(0, 1), behind=behind)
        scored = Scored(proposal.states, proposal.parent, reveals.map(lambda t: t.unflatten(0, (count, width))), hidden)
        known = scored.beside(self.memory.scored)
        clean = self._clean(known.states)
        stepped = self._stepped(known.states, known.reveal)
        onward = known.edges(self._where(clean, self.next_block(known.states), stepped), clean)
        active = proposal.states.valid[:, 0]
        path = follow(onward)
        passed = torch.zeros_like(clean).scatter_(1, path, True) & active[:, None]
        place = path[:, -1]
        self._record_walk(known, passed & ~clean, place, passed)
        self._commit_clean(proposal.states, hidden, (passed & clean)[:, :width])
        depth = (passed[:, :width] & proposal.drafted).sum(-1) + passed[:, width:].sum(-1)
        last = known.at(self.all_rows, place)
        self.counts.accepted += depth
        self.counts.accepted_lengths[self.all_rows, passed.sum(-1)] += active
        if self.strategy.drafts:
            self.counts.add_walk(depth, known.offers_behind(last.states, self.mask_id))
            kept = scored.kept(~clean[:, :width])
            self.memory = Memory(kept, stepped.map(lambda t: t[:, :width]), onward[:, :width])
        self._advance(last, active)
        return (passed & ~clean[:, :1])[:, :width].sum(0)

    def _record_walk(self, known: Scored, revealing: Tensor, last: Tensor, passed: Tensor) -> None:
        """Writes what the states on the way revealed; the last one's reveal is refined first (`_advance`)."""
        before_last = revealing.scatter(1, last[:, None], False)
        self._record(known.states, known.reveal, before_last, self._ticks(known.states, passed))
        self.rows.clock += before_last.sum(-1)

    def _ticks(self, states: States, passed: Tensor) -> Tensor:
        """[rows, n] long: the denoising steps between a row's next state and each state on its way."""
        steps = states.step - self.rows.step[:, None]
        here = states.start == self.rows.start[:, None]
        in_block = (steps * (here & passed)).amax(1, keepdim=True)  # those of a block that became clean
        return torch.where(here, steps, in_block + states.step)

    def _advance(self, last: Scored, moved: Tensor) -> None:
        """From the last accepted states [rows]: reveal, refine, write, and stand at the next state."""
        clean = self._clean(last.states)
        at_mask = moved & ~clean
        self.seed, self.has_seed = last, at_mask
        refined = self.strategy.refine(self, replace(last.states, valid=at_mask), last.hidden, last.reveal)
        states = last.states
        if self.strategy.revokes:
            taken_back = last.reveal.where & ~refined.where & at_mask[:, None]
            self.counts.revoked += taken_back.sum(-1)
            self.latest = (states.start, taken_back, last.reveal.token)
        self._record(
            states.map(lambda t: t[:, None]),
            refined.map(lambda t: t[:, None]),
            at_mask[:, None],
            torch.zeros_like(states.start)[:, None],
        )
        self.rows.clock += at_mask & refined.where.any(-1)
        following = self._where(clean, self.next_block(states), replace(states, step=states.step + 1))
        self.rows.start = torch.where(moved, following.start, self.rows.start)
        self.rows.step = torch.where(moved, following.step, self.rows.step)
        self._stop_finished()

    def reveal_from(
        self,
        states: States,
        hidden: Tensor,
        count: Tensor | None = None,
        behind: Tensor | None = None,
        drafting: bool = False,
    ) -> Reveal:
        """Picks at the masked positions of [n] states from hidden states [n, block, hidden], and what the strategy reveals.

        `count` overrides the strategy and the schedule: so many of the most confident positions. `behind` [n, block] are the
        ids of the state that each may follow in this round: a clean block that is not text yet. For `drafting` all
        candidates are given, from the draft vocabulary.
        """
        masked = states.ids == self.mask_id
        candidates = masked & (self.offsets < self.eos_column(states)[:, None]) & states.valid[:, None]
        at = self._chosen(candidates)
        state = at // self.block
        row, position = states.row[state], states.start[state] + at % self.block
        picker = self.drafter if drafting else self.picker
        picks = picker(
            taken(hidden.flatten(0, 1), at),
            noise_keys(self.rows.seed[row], position, masked.sum(-1)[state]) if picker.sample else position,
            lambda part: self._contexts(states, state[part], behind),
            self._no_eos(row, position),
            taken(candidates.flatten(), at),
        )
        token = self._spread(picks.token, at, candidates, 0)
        logprob, confidence = (self._spread(t, at, candidates, -torch.inf) for t in (picks.logprob, picks.confidence))
        if drafting:
            return Reveal(candidates, token, logprob, confidence)
        if count is not None:
            return Reveal(top_by(confidence, candidates, count), token, logprob, confidence)
        entropy = self._spread(picks.entropy, at, candidates, -torch.inf)
        count = self.schedule[states.step.clamp(max=self.block - 1)]
        return Reveal(self.strategy.reveal(confidence, entropy, candidates, count), token, logprob, confidence)

    def _chosen(self, where: Tensor) -> Tensor:
        """Flat indices of `where`. On a device that the host would have to wait for, of everything, those of `where` first:
        kernels pass over tiles that hold none."""
        if self.picker.processors is not None or (self.device.type == "cpu" and self.recorded is None):
            return where.flatten().nonzero()[:, 0]
        if where.numel() <= ONE_TILE:
            return torch.arange(where.numel(), device=self.device)
        return (~where).flatten().to(torch.int8).sort(stable=True).indices

    @staticmethod
    def _spread(values: Tensor, at: Tensor, where: Tensor, other: float) -> Tensor:
        """Values [n] at flat indices `at`, in the shape of `where`, and `other` where that is False."""
        if not in_order(at, where.numel()):
            values = values.new_full((where.numel(),), other).index_copy_(0, at, values)
        return values.view_as(where).where(where, other)

    def token_confidence(self, states: States, hidden: Tensor, token: Tensor, where: Tensor) -> Tensor:
        """[n, block] log-odds of given tokens under lm_head(hidden), -inf outside `where`."""
        at = self._chosen(where)
        state = at // self.block
        odds = self.picker.token_log_odds(
            taken(hidden.flatten(0, 1), at),
            taken(token.flatten(), at),
            lambda part: self._contexts(states, state[part], None),
            self._no_eos(states.row[state], states.start[state] + at % self.block),
            taken(where.flatten(), at),
        )
        return self._spread(odds, at, where, -torch.inf)

    def _no_eos(self, row: Tensor, position: Tensor) -> Tensor | None:
        """[n] bool: positions before the minimum length, or before the last given token."""
        return position < self.no_eos_before[row] if self.bars_eos else None

    def residual_magnitude(self, hidden: Tensor, token: Tensor, where: Tensor) -> Tensor:
        """[n, block] |C| of given tokens: one dot product each; 0 outside `where`."""
        at = self._chosen(where)
        weight = self.picker.lm_head_weight
        moved = residual_magnitude(weight, taken(hidden.flatten(0, 1), at), taken(token.flatten(), at))
        return self._spread(moved, at, where, 0.0)

    def _contexts(self, states: States, state: Tensor, behind: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """For logits processors: which of the positions belong to which committed ids."""
        contexts = []
        for s in state.unique().tolist():
            row, start = int(states.row[s]), int(states.start[s])
            committed = self.rows.tokens[row : row + 1, :start].clone()
            if behind is not None and start > int(self.rows.start[row]):
                committed[:, start - self.block :] = behind[s]
            contexts.append(((state == s).nonzero()[:, 0], committed))
        return contexts


def in_order(at: Tensor, count: int) -> bool:
    """Whether indices of `Decoder._chosen` are all `count` places as they lie; those of more than a tile are sorted."""
    return len(at) == count <= ONE_TILE


def taken(values: Tensor, at: Tensor) -> Tensor:
    """`values[at]` for indices of `Decoder._chosen`."""
    return values if in_order(at, len(values)) else values[at]


__all__ = ["READ_BUCKET", "Decoder"]
