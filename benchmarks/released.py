"""The released reference: speculative decoding as in the published code, on the same model, cache and picks as `generate`.

Written from a description of it alone. Besides its rounds, a block costs a seed forward and one that stores its keys and
values:

1. **seed**: the first state of the block is scored; its reveal is slot 0 of the first round.
2. **first round**: K states, all drafted by the head: slot 0 is the seed's own pick, each other one what the head expects after
   the slot before.
3. **later rounds**: K + 1 states. Slot 0 is what the last accepted state leads to, whose reveal is a *bonus* token; the first
   draft after it comes from the stale logits of the last accepted state, the others from the head.
4. **store**: one more forward over the clean block.

The head sees only its own block; with `head_prefix` also the text before it, as in this package. A batch advances by the number
of right drafts of its slowest unfinished row. The text is that of `static`. For a CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from modeling_mrp.generate.loop import Drafting, Mode
from modeling_mrp.modeling import MRPForCausalLM
from modeling_mrp.networks.networks import Hidden, Networks
from modeling_mrp.rules.draft import Node, first_frontier, reveal_at, write
from modeling_mrp.rules.reveal import RevealRule, Static
from modeling_mrp.rules.state import Row, Scores, State

from .common import greedy_decode
from .measure import Measured


class Lockstep:
    """One decode of a batch, made of the engine's parts.

    Args:
        networks: Backbone, head and picks on the device.
        rows: All rows of the batch.
        rule: Decides what a step reveals.
        states: K.
        head_prefix: Whether the head sees the text before the block.
    """

    def __init__(self, networks: Networks, rows: list[Row], rule: RevealRule, states: int, head_prefix: bool) -> None:
        self.networks, self.rows, self.rule = networks, rows, rule
        self.states, self.head_prefix = states, head_prefix

    def run(self) -> None:
        """Decode all rows, block after block."""
        self.networks.prefill(self.rows, [0] * len(self.rows))
        for row in self.rows:
            row.counts.forwards = int(any(other.held for other in self.rows))  # prompts shorter than a block take no prefill
            row.settle()
        while any(row.stop is None for row in self.rows):
            self._seed()
            first = True
            while any(map(self._moving, self.rows)):
                self._round(first)
                first = False
            self._store_block()

    def _moving(self, row: Row) -> bool:
        return row.stop is None and row.state.masks > 0

    def _seed(self) -> None:
        """Score each row's first state of a block, and reveal."""
        going = [[Node(row.state, -1, None)] if row.stop is None else [] for row in self.rows]
        for row, scores in zip(self.rows, self.networks.score(self.rows, going), strict=True):
            if scores and (frontier := first_frontier(row, self.rule, scores[0])) is not None:
                write(row, frontier)
                row.settle()

    def _round(self, first: bool) -> None:
        """Draft, verify, and accept as many drafts as are right in every unfinished row."""
        chains = self._drafted(first)
        scores = self.networks.score(self.rows, [[Node(state, -1, None) for state in chain] for chain in chains])
        count = self.states + (not first)
        right = [self._right(row, chain, said) for row, chain, said in zip(self.rows, chains, scores, strict=True)]
        lasts = [row.state.masks - 1 for row in self.rows]  # the state with one mask, whose reveal ends the block
        moving = [self._moving(row) for row in self.rows]
        behind = [n for n, last, moves in zip(right, lasts, moving, strict=True) if moves and n < last]
        common = min(behind, default=count)
        for row, moves in zip(self.rows, moving, strict=True):
            row.counts.forwards += row.stop is None and not moves  # it waits for the others
        for row, chain, said, n, last, moves in zip(self.rows, chains, scores, right, lasts, moving, strict=True):
            if moves:
                for state, one in zip(chain, said[: min(common, n, last) + 1], strict=False):
                    if state.free:
                        write(row, reveal_at(row, self.rule, state, one))
                row.settle()

    def _right(self, row: Row, chain: Sequence[State], said: Sequence[Scores]) -> int:
        """Count the right drafts of a chain, up to the first wrong one."""
        for place, (state, behind) in enumerate(pairwise(chain)):
            if (
                not state.free
                or row.after(state, reveal_at(row, self.rule, state, said[place]).where, said[place].token).key != behind.key
            ):
                return place
        return max(0, len(chain) - 1)

    def _drafted(self, first: bool) -> list[list[State]]:
        """Draft for each row that moves: the K states of a block's first round, or the K + 1 of a later one."""
        chains = [[row.state] if self._moving(row) else [] for row in self.rows]
        hidden = [row.source.hidden if row.source is not None else None for row in self.rows]
        for slot in range(1, self.states + (not first)):
            open_ = [at for at, chain in enumerate(chains) if len(chain) == slot and chain[-1].free]
            if not open_:
                break
            said = [self.rows[at].source for at in open_]
            if first or slot > 1:
                made = self._head({at: (chains[at][-1], hidden[at]) for at in open_})
                for at in open_:
                    hidden[at] = made[at]
                states = [(self.rows[at], chains[at][-1]) for at in open_]
                said = list(self.networks.pick(self.networks.drafter, states, [made[at] for at in open_]))
            for at, scores in zip(open_, said, strict=True):
                assert scores is not None
                where, _ = self.rule.reveal(chains[at][-1], scores, None)
                chains[at].append(self.rows[at].after(chains[at][-1], where, scores.token))
        return chains

    def _head(self, asked: dict[int, tuple[State, Hidden | None]]) -> dict[int, Hidden]:
        """Compute h_A + h_C at one state of each of some rows."""
        held = [row.held for row in self.rows]
        if not self.head_prefix:
            for row in self.rows:
                row.held = row.head_held = 0
        given: list[list[tuple[State, Hidden]]] = [[] for _ in self.rows]
        for at, (state, hidden) in asked.items():
            assert hidden is not None
            given[at].append((state, hidden))
        made = self.networks.head(self.rows, given)
        for row, before in zip(self.rows, held, strict=True):
            row.held = before
        return {at: made[at][0] for at in asked}

    def _store_block(self) -> None:
        """Run one more forward over the clean block, for its keys and values."""
        going = [[Node(row.state, -1, None)] if row.stop is None else [] for row in self.rows]
        if any(going):
            self.networks.score(self.rows, going)
            self.networks.commit(self.rows, [[0] if nodes else [] for nodes in going])
        for row in self.rows:
            if row.stop is None:
                row.state = row.opened(row.state.start + row.block_size)


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
    def __call__(self, model: MRPForCausalLM, prompts: list[list[int]], new_tokens: int, eos: list[int]) -> Measured:
        """See `Loop`."""
        rule = Static((1,) * model.config.block_size)
        mode = Mode(rule, drafting=Drafting(self.states + 1, 1, self.states))
        networks, rows = greedy_decode(model, mode, prompts, new_tokens, eos, self.states + 2)
        Lockstep(networks, rows, rule, self.states, self.head_prefix).run()
        return Measured.of_rows(rows)
