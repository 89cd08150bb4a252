"""Parallel speculative decoding's rule (PSD, arXiv 2605.15609): the deepest consistent draft is taken. It is not lossless.

Written from the abstract and reviews of the paper: a policy reveals what is confident; from the same predictions drafts of
several depths are made, each with more revealed than the one before; one forward scores them all; and of those the deepest is
kept that the new predictions agree with. Where these say no more, it is assumed that

- the policy is the threshold of `dynamic`, and a deeper draft reveals what the policy would at the stale predictions: once
  all above tau is revealed, that is the surest position left;
- a draft is consistent if every token that it has and the one before has not is what the model now predicts at the one before,
  however sure it is and whether or not the policy would reveal it next, and if all shallower drafts are consistent;
- at the deepest consistent draft the policy goes on with the predictions made there.

So K states a forward are depths 0 to K - 1. Blocks end as in this package: their keys and values cost no forward of their own.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from modeling_mrp.generate.budget import Amount, Fixed
from modeling_mrp.generate.loop import Decoder, Mode
from modeling_mrp.networks.networks import Networks
from modeling_mrp.rules.draft import Node, build_draft
from modeling_mrp.rules.reveal import Columns, Guesses, RevealRule
from modeling_mrp.rules.state import Key, Row, Scores, State

from .measure import Loop, loop_of


class Consistent(RevealRule):
    """A policy that goes on to the draft behind a state where all that this adds is predicted there.

    Args:
        policy: What is revealed elsewhere.

    Attributes:
        behind: By state, the draft behind it: those of the last two rounds.
    """

    def __init__(self, policy: RevealRule) -> None:
        self.policy = policy
        self.behind: dict[Key, State] = {}
        self._last: dict[Key, State] = {}

    def follow(self, chain: Sequence[Node]) -> None:
        """Take a round's chain of drafts up, and forget those before the last one."""
        pairs = itertools.pairwise(chain)
        self._last, before = {one.state.key: two.state for one, two in pairs if one.parent == two.parent}, self._last
        self.behind = before | self._last

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        behind = self.behind.get(state.key)
        if behind is not None and behind.start == state.start:
            added = tuple([column for column, (a, b) in enumerate(zip(state.ids, behind.ids, strict=True)) if a != b])
            if added and all(scores.token[column] == behind.ids[column] for column in added):
                return added, memo
        return self.policy.reveal(state, scores, memo)

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`."""
        return self.policy.likely(state, odds, count)


class PSDecoder(Decoder):
    """Rounds of which a row's drafts are a chain, and the deepest consistent one is taken."""

    rules: dict[int, Consistent]

    def draft(self, rows: Sequence[Row], amount: Amount) -> list[list[Node]]:
        """See `Decoder.draft`."""
        if amount.states == 1:
            return super().draft(rows, amount)
        drafts = []
        for row in rows:
            rule = self.rules.setdefault(row.place, Consistent(self.mode.rule))
            nodes = build_draft(row, rule, amount.states, 1, {}) if row.stop is None else []
            rule.follow(nodes)
            drafts.append(nodes)
        return drafts

    def rule_of(self, row: Row) -> RevealRule:
        """See `Decoder.rule_of`."""
        return self.rules.get(row.place, self.mode.rule)


def parallel_speculative(rule: RevealRule, states: int) -> Loop:
    """Decode by PSD: with a policy, and K states scored a forward."""

    def decoder(mode: Mode, networks: Networks, budget: Fixed) -> PSDecoder:
        made = PSDecoder(mode, networks, budget)
        made.rules = {}
        return made

    return loop_of(rule, states, decoder)
