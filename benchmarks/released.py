"""The released reference: speculative decoding as the published code does it, on the same model, cache and picks as `generate`.

Written from a description of it alone. Beside its rounds, a block costs a seed forward and one that stores its keys and values:

1. **seed**: the first state of the block is scored; its reveal is slot 0 of the first round.
2. **first round**: K states, all drafted by the head: slot 0 is the seed's own pick, each other what the head expects behind
   the one before.
3. **later rounds**: K + 1 states. Slot 0 is what the last accepted state leads to, whose reveal is a *bonus* token; the first
   draft behind it comes from the stale logits of the last accepted state, the others from the head.
4. **store**: the clean block is run once more.

The head sees its own block only; with `head_prefix` the text before it too, as this package's does. A batch moves by what its
slowest unfinished row had right. The text is that of `static`. For a CPU.
"""

from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from modeling_mrp.generate.decode_state import Text, finished, first_state
from modeling_mrp.generate.loop import Task
from modeling_mrp.generate.modes import Drafting, Mode
from modeling_mrp.model.diffusion import block_causal_mask
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.rules.revealing import Static
from modeling_mrp.rules.rules import stepped
from modeling_mrp.rules.states import States
from modeling_mrp.runner.runner import Held, Runner, Scratch

from .common import greedy_decode
from .loops import Made


class Lockstep:
    """One decode of a batch, from the engine's own parts.

    Args:
        task: Which rule and reader are used.
        runner: Runs the model.
        text: The rows' texts, laid out.
        current: [rows] their first states.
        states: K.
        head_prefix: Whether the head sees the text before the block.
    """

    def __init__(self, task: Task, runner: Runner, text: Text, current: States, states: int, head_prefix: bool) -> None:
        self.task, self.runner, self.text, self.current = task, runner, text, current
        self.states, self.head_prefix = states, head_prefix
        self.held = runner.start(current.start)
        self.rows = torch.arange(len(current.start))

    def run(self) -> tuple[Text, Held]:
        """Decode all rows, block after block."""
        self._store_prompt()
        while bool(self.current.valid.any()):
            base = self.current
            hidden = self._score(base.map(lambda t: t[:, None])).hidden[:, 0]
            self._reveal(base, hidden)
            first = True
            while bool(self._unfinished().any()):
                base, hidden = self._round(base, hidden, first)
                self._reveal(base, hidden)
                first = False
            self._store_block()
        return self.text, self.held

    def _reveal(self, base: States, hidden: Tensor) -> None:
        """Commit what the backbone reveals at the last accepted states [rows]: it makes each row's next state."""
        reader, mask_id = self.task.reader, self.task.mask_token_id
        one = base.map(lambda t: t[:, None])
        reveal = reader.reveal(one, hidden[:, None], self.text)
        moving = base.valid & base.masked(mask_id).any(-1)
        self.text.write(one, reveal, moving[:, None], self.text.total_steps[:, None])
        self.text.total_steps += moving
        after = stepped(one, reveal, reader.request.eos).map(lambda t: t[:, 0])
        current = replace(self.current, table=torch.where(moving[:, None], after.table, self.current.table))
        end, done = finished(current, reader.request, mask_id)
        self.text.stop = torch.where(current.valid & done, end, self.text.stop)
        self.current = current.only(~done)

    def _round(self, base: States, hidden: Tensor, first: bool) -> tuple[States, Tensor]:
        """Draft, verify, and accept as many as every unfinished row had right.

        Args:
            base: [rows] the last accepted states,
            hidden: [rows, block, hidden_size] and what was said there.
            first: Whether this is the block's first round.

        Returns:
            The same two behind the round.
        """
        moving, mask_id = self._unfinished(), self.task.mask_token_id
        states = self._drafted(hidden, moving, first)
        count = states.start.shape[1]
        scored = self._score(states).hidden
        reveals = self.task.reader.reveal(states, scored, self.text)
        masked = states.masked(mask_id)
        follows = stepped(states, reveals, self.task.reader.request.eos).ids[:, :-1] == states.ids[:, 1:]
        accepted = (follows.all(-1) & masked[:, :-1].any(-1)).long().cumprod(1).sum(1)
        last = masked[:, 0].sum(-1) - 1  # the state with one mask, whose reveal ends the block
        common = torch.where(moving & (accepted < last), accepted, count).min()
        taken = torch.minimum(common.expand_as(last), torch.minimum(accepted, last)) * moving
        steps = torch.arange(count - 1).expand(len(moving), -1)
        before = states.map(lambda t: t[:, :-1]), reveals.map(lambda t: t[:, :-1])
        self.text.write(*before, steps < taken[:, None], self.text.total_steps[:, None] + steps)
        self.text.total_steps += taken
        table = torch.where(moving[:, None], states.table[self.rows, taken], base.table)
        return States(table, moving), torch.where(moving[:, None, None], scored[self.rows, taken], hidden)

    def _drafted(self, hidden: Tensor, moving: Tensor, first: bool) -> States:
        """[rows, K] the states of a block's first round, or [rows, K + 1] those of a later one."""
        reader, eos = self.task.reader, self.task.reader.request.eos
        chain = [self.current.only(moving).map(lambda t: t[:, None])]
        for slot in range(1, self.states + (not first)):
            if first or slot > 1:
                hidden = hidden + self._head(chain[-1], hidden)
            chain.append(stepped(chain[-1], reader.reveal(chain[-1], hidden[:, None], self.text), eos))
        return reduce(States.cat, chain)

    def _unfinished(self) -> Tensor:
        return self.current.valid & self.current.masked(self.task.mask_token_id).any(-1)

    def _store_prompt(self) -> None:
        """One forward over the prompt's whole blocks."""
        longest = int(self.current.start.max())
        if longest:
            positions = torch.arange(longest).expand(len(self.rows), longest)
            mask = block_causal_mask(positions, positions, torch.ones_like(positions).bool(), self.task.block_size)
            self.runner.cache.target_slots(0, longest)
            model, ids = self.runner.model, self.text.tokens[:, :longest]
            hidden = model.backbone(ids, positions, mask, self.runner.cache)
            self.held.row_forwards += self.current.valid
            if self.head_prefix:
                model.residual(ids, hidden, positions, mask, self.runner.cache)
                self.held.row_head_forwards += self.current.valid
        self.runner.cache.clear(range(len(self.runner.cache.layer_devices)), longest)

    def _score(self, states: States) -> Scratch:
        scratch, self.held = self.runner.score(states, self.held, int(self.held.committed.max()), self.current.valid)
        return scratch

    def _head(self, states: States, hidden: Tensor) -> Tensor:
        """Compute h_C [rows, block, hidden_size] at states [rows, 1]."""
        held, hidden = self.held, hidden[:, None]
        if self.head_prefix:
            used, late = int(held.head_committed.max()), bool(held.late.any())
            residual, self.held = self.runner.head_pass(states, hidden, held, used, late, held.late)
        else:
            blind = replace(held, head_committed=torch.zeros_like(held.head_committed))
            residual, after = self.runner.head_pass(states, hidden, blind, 0, late=False)
            self.held = replace(held, row_head_forwards=after.row_head_forwards)
        return residual[:, 0]

    def _store_block(self) -> None:
        """One more forward over the clean block, for its keys and values."""
        active = self.current.valid
        if not bool(active.any()):
            return
        scratch = self._score(self.current.map(lambda t: t[:, None]))
        self.held = self.runner.commit_clean(scratch, torch.where(active, 0, -1), self.held)
        after = first_state(self.text, self.current.start + self.task.block_size, self.task.block_size)
        self.current = replace(self.current, table=torch.where(active[:, None], after.table, self.current.table))


@dataclass(frozen=True)
class Released:
    """The released reference as a `Loop`.

    Attributes:
        states: K.
        head_prefix: Whether the head sees the text before the block; in the released code it does not.
    """

    states: int
    head_prefix: bool = False

    @torch.inference_mode()
    def __call__(self, model: MRPForCausalLM, prompts: list[list[int]], new_tokens: int, eos: list[int]) -> Made:
        """See `Loop`."""
        mode = Mode(Static(), drafting=Drafting(self.states + 1, 1, self.states))
        decode = greedy_decode(model, mode, prompts, new_tokens, eos, self.states + 1)
        return Made.of(*Lockstep(*decode, self.states, self.head_prefix).run(), prompts)
