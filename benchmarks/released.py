"""The released reference: speculative decoding as in the published code, with `generate`'s model,
cache and choice of tokens.

Written from a description of it alone. Besides its rounds, a block costs a seed forward and one
that stores its keys and values:

1. **seed**: the first state of the block is scored; its reveal is slot 0 of the first round.
2. **first round**: K states, all drafted by the head: slot 0 is the seed's own reveal, each other
   slot the state that the head expects after the slot before.
3. **later rounds**: K + 1 states. Slot 0 is the state after the last accepted one, and its reveal
   is a *bonus* token; the first draft after it comes from the stale logits of the last accepted
   state, the others from the head.
4. **store**: one more forward over the clean block.

The head sees only its own block; with `head_prefix` also the text before it, as in this package.
The text is that of `static`. Rows are decoded one by one, since a batch of the released code waits
for its slowest row. For a CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from modeling_mrp.generate.loop import Drafting, Mode
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.networks import Hidden, Networks
from modeling_mrp.rules.draft import Node, first_pending_reveal, reveal_at, write
from modeling_mrp.rules.reveal import RevealRule, Static
from modeling_mrp.rules.state import Row, Scores, State

from .common import greedy_decode
from .measure import Measured


@dataclass(frozen=True)
class Decode:
    """The decode of one row, by this package's networks and reveal rules.

    Attributes:
        networks: Runs backbone and head, and picks tokens.
        row: The row, alone in its batch.
        rule: The reveal rule.
        states: K, the states of a block's first round.
        head_prefix: Whether the head sees the text before the block.
    """

    networks: Networks
    row: Row
    rule: RevealRule
    states: int
    head_prefix: bool

    def run(self) -> None:
        """Decode the row, block after block."""
        row = self.row
        self.networks.prefill([row], [0])
        row.counts.forwards = int(row.held > 0)  # a prompt shorter than a block takes no prefill
        row.update_stop()
        while row.stop is None:
            scores = self._score([row.state])
            if (pending := first_pending_reveal(row, self.rule, scores[0])) is not None:
                write(row, pending)
                row.update_stop()
            first = True
            while row.stop is None and row.state.masks > 0:
                self._round(first)
                first = False
            if row.stop is None:  # one more forward over the clean block, for its keys and values
                self._score([row.state])
                self.networks.commit([row], [[0]])
                row.state = row.first_state(row.state.start + row.block_size)

    def _score(self, states: Sequence[State]) -> Sequence[Scores]:
        self.row.counts.states += len(states)
        return self.networks.score([self.row], [[Node(state, -1, None) for state in states]])[0]

    def _round(self, first: bool) -> None:
        """Draft, verify, and accept the drafts up to the first wrong one."""
        chain = self._drafted(first)
        scores = self._score(chain)
        last = self.row.state.masks - 1  # the state with one mask, whose reveal ends the block
        count = min(self._right(chain, scores), last) + 1
        for state, state_scores in zip(chain[:count], scores[:count], strict=True):
            if state.free:
                write(self.row, reveal_at(self.row, self.rule, state, state_scores))
        self.row.update_stop()

    def _right(self, chain: Sequence[State], scores: Sequence[Scores]) -> int:
        """Count the drafts of a chain before the first wrong one."""
        for index, ((state, successor), state_scores) in enumerate(
            zip(pairwise(chain), scores, strict=False)
        ):
            if not state.free:
                return index
            columns = reveal_at(self.row, self.rule, state, state_scores).columns
            if self.row.successor(state, columns, state_scores.token).key != successor.key:
                return index
        return len(chain) - 1

    def _drafted(self, first: bool) -> list[State]:
        """Return the row's state and its drafts: at most K states in a block's first round, K + 1
        in a later one."""
        chain = [self.row.state]
        estimate = self.row.source
        hidden = None if estimate is None else estimate.hidden
        for slot in range(1, self.states + (not first)):
            if not chain[-1].free:
                break
            if first or slot > 1:
                assert hidden is not None
                hidden = self._head(chain[-1], hidden)
                (estimate,) = self.networks.sampler.estimate([(self.row, chain[-1])], [hidden])
            assert estimate is not None
            columns, _ = self.rule.reveal(chain[-1], estimate, None)
            chain.append(self.row.successor(chain[-1], columns, estimate.token))
        return chain

    def _head(self, state: State, hidden: Hidden) -> Hidden:
        """Compute the head's estimate h_A + h_C at a state from `hidden`, which belong to the state
        before it."""
        cached_length = self.row.held
        if not self.head_prefix:
            self.row.held = self.row.head_held = 0
        ((estimate,),) = self.networks.head([self.row], [[(state, hidden)]])
        self.row.held = cached_length
        return estimate


@dataclass(frozen=True)
class Released:
    """The released reference as a `Loop`.

    Attributes:
        states: K.
        head_prefix: Whether the head sees the text before the block; in the released code it does
            not.
    """

    states: int
    head_prefix: bool = False

    @torch.inference_mode()
    def __call__(
        self, model: MRPForCausalLM, prompts: list[list[int]], new_tokens: int, eos: list[int]
    ) -> Measured:
        """See `Loop`."""
        rule = Static((1,) * model.config.block_size)
        mode = Mode(rule, drafting=Drafting(self.states + 1, 1, self.states))
        rows = []
        for prompt in prompts:
            networks, (row,) = greedy_decode(
                model, mode, [prompt], new_tokens, eos, self.states + 2
            )
            Decode(networks, row, rule, self.states, self.head_prefix).run()
            rows.append(row)
        return Measured.of_rows(rows)
