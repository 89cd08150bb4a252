"""Parallel speculative decoding (PSD, arXiv 2605.15609): the deepest consistent draft is taken. It is not lossless.

Written from the abstract and from third parties' summaries of v1, without the full text. They say: a policy (any target)
reveals what is confident; from the same predictions, drafts of depths 1, 3, 5 or 7 fill further masks in order of confidence,
without another forward; one forward scores them all; from the deepest to the shallowest, the first draft is kept whose
speculative tokens all agree with the updated predictions. Where they say no more, it is assumed that

- K states a forward are the policy's own next state (depth 0) and drafts of depths 1 to K - 1;
- at the kept draft the policy goes on with the predictions made there;
- agreement is of tokens, whether or not the policy would reveal them next.

`Reading` holds what is still open. For each policy it is the reading with the most tokens a forward among those that solve as
many tuning problems as the policy alone, but for one in a hundred, as the paper reports (`python -m benchmarks.tuned psd`).
Blocks end as in this package: their keys and values cost no forward of their own.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from modeling_mrp.generate.budget import Amount, Fixed
from modeling_mrp.generate.loop import Decoder, Mode
from modeling_mrp.networks.networks import Networks
from modeling_mrp.rules.draft import Node, build_draft
from modeling_mrp.rules.reveal import Columns, Guesses, RevealRule, by_odds, logit
from modeling_mrp.rules.state import Key, Row, Scores, State

from .measure import Loop, loop_of


class Reading(NamedTuple):
    """An interpretation of what the descriptions leave open.

    Attributes:
        adds: Positions that each depth adds, the most confident ones; 0: those that the policy would reveal.
        first: Whether drafts must agree with the predictions at depth 0; else each depth's tokens with those at the depth
            before.
        least: Probability below which a prediction agrees with nothing.
    """

    adds: int = 0
    first: bool = False
    least: float = 0.0


# The best readings by policy (`python -m benchmarks.tuned psd`), where these are not the default.
CHOSEN = {"entropy_bound": Reading(least=0.5)}


class Consistent(RevealRule):
    """A policy that continues at the deepest draft after a state whose added tokens all agree with the predictions.

    Args:
        policy: Decides what is revealed elsewhere.
        reading: What agreement means.

    Attributes:
        behind: By state, the drafts after it that its predictions are compared with, by depth; of the last two rounds.
    """

    def __init__(self, policy: RevealRule, reading: Reading) -> None:
        self.policy, self.reading, self.least = policy, reading, logit(reading.least)
        self.behind: dict[Key, Sequence[State]] = {}
        self._last: dict[Key, Sequence[State]] = {}

    def follow(self, chain: Sequence[Node]) -> None:
        """Take up a round's chain of drafts, and forget all but it and the one before."""
        states = [node.state for node in chain if node.parent < 0]
        new: dict[Key, Sequence[State]] = {one.key: [two] for one, two in pairwise(states)}
        if self.reading.first:
            new = {one.key: states[1:] for one in states[:1]}
        self.behind, self._last = self._last | new, new

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        deepest: Columns = ()
        for draft in self.behind.get(state.key, ()):
            if draft.start != state.start:
                break
            added = tuple([column for column, (a, b) in enumerate(zip(state.ids, draft.ids, strict=True)) if a != b])
            if not all(scores.token[one] == draft.ids[one] and scores.odds[one] >= self.least for one in added):
                break
            deepest = added
        return (deepest, memo) if deepest else self.policy.reveal(state, scores, memo)

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`."""
        if not self.reading.adds:
            return self.policy.likely(state, odds, count)
        return [(tuple(sorted(by_odds(state.free, odds)[: self.reading.adds])), 1.0)]


class PSDecoder(Decoder):
    """Rounds in which a row's drafts are a chain, and the deepest consistent one is taken."""

    reading: Reading
    rules: dict[int, Consistent]

    def draft(self, rows: Sequence[Row], amount: Amount) -> list[list[Node]]:
        """See `Decoder.draft`."""
        if amount.states == 1:
            return super().draft(rows, amount)
        drafts = []
        for row in rows:
            rule = self.rules.setdefault(row.place, Consistent(self.mode.rule, self.reading))
            nodes = build_draft(row, rule, amount.states, 1, {}) if row.stop is None else []
            rule.follow(nodes)
            drafts.append(nodes)
        return drafts

    def rule_of(self, row: Row) -> RevealRule:
        """See `Decoder.rule_of`."""
        return self.rules.get(row.place, self.mode.rule)


def parallel_speculative(rule: RevealRule, states: int, reading: Reading) -> Loop:
    """Make a loop of PSD with a policy and K states scored per forward."""

    def decoder(mode: Mode, networks: Networks, budget: Fixed) -> PSDecoder:
        made = PSDecoder(mode, networks, budget)
        made.reading, made.rules = reading, {}
        return made

    return loop_of(rule, states, decoder)
