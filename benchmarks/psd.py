"""Parallel speculative decoding (PSD, arXiv 2605.15609): the deepest consistent draft is taken. It
is not lossless.

Written from the abstract and from third parties' summaries of v1, without the full text. They say:
a policy (any target) reveals what is confident; from the same predictions, drafts of depths 1, 3, 5
or 7 fill further masks in order of confidence, without another forward; one forward scores them
all; from the deepest to the shallowest, the first draft is kept whose speculative tokens all agree
with the updated predictions. Where they say no more, it is assumed that

- K states a forward are the policy's own next state (depth 0) and drafts of depths 1 to K - 1;
- at the kept draft the policy goes on with the predictions made there;
- agreement is of tokens, whether or not the policy would reveal them next;
- a depth adds what the policy would reveal, and its tokens must agree with the predictions at the
  depth before.

Where the descriptions leave a choice, each policy has the reading with the most tokens a forward
among those that solve at most one tuning problem in a hundred fewer than the policy alone, as the
paper reports (`NOTES.md`, Rivals, tuned). Blocks end as in this package: their keys and values cost
no forward of their own.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from modeling_mrp.generate.loop import Decoder, RoundPlan
from modeling_mrp.rules.draft import Node, build_draft
from modeling_mrp.rules.reveal import Columns, Guesses, RevealRule, logit
from modeling_mrp.rules.state import Key, Row, Scores, State

from .measure import Loop, loop_of

# By policy, the probability below which no prediction counts as agreeing with a draft; 0 for other
# policies.
MIN_CHANCE = {"entropy_bound": 0.5}


class Consistent(RevealRule):
    """A reveal rule that reveals the new tokens of a state's draft if all agree with the
    predictions, else follows a policy.

    Args:
        policy: The reveal rule for all other states.
        min_chance: Probability below which no prediction counts as agreeing.

    Attributes:
        next_drafts: The draft that follows each state, by the state's key, from the last two
            rounds.
    """

    def __init__(self, policy: RevealRule, min_chance: float) -> None:
        self.policy = policy
        self.min_odds = logit(min_chance)
        self.next_drafts: dict[Key, State] = {}
        self._last: dict[Key, State] = {}

    def follow(self, chain: Sequence[Node]) -> None:
        """Record a round's chain of drafts in `next_drafts`, which then has this chain and the one
        of the round before."""
        states = [node.state for node in chain if node.parent < 0]
        new = {state.key: successor for state, successor in pairwise(states)}
        self.next_drafts = self._last | new
        self._last = new

    def reveal(self, state: State, scores: Scores, memo: Any) -> tuple[Columns, Any]:
        """See `RevealRule`."""
        draft = self.next_drafts.get(state.key)
        if draft is not None and draft.start == state.start:
            added = []
            agrees = True
            for column, (token, drafted) in enumerate(zip(state.ids, draft.ids, strict=True)):
                if token != drafted:
                    added.append(column)
                    agrees &= scores.token[column] == drafted
                    agrees &= scores.log_odds[column] >= self.min_odds
            if added and agrees:
                return tuple(added), memo
        return self.policy.reveal(state, scores, memo)

    def likely(self, state: State, odds: Sequence[float], count: int) -> Guesses:
        """See `RevealRule`."""
        return self.policy.likely(state, odds, count)


class PSDecoder(Decoder):
    """A `Decoder` that takes the deepest consistent draft of a chain per row; further arguments are
    those of `Decoder`."""

    def __init__(self, min_chance: float, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.min_chance = min_chance
        self.rules: dict[int, Consistent] = {}

    def draft(self, rows: Sequence[Row], plan: RoundPlan) -> list[list[Node]]:
        """See `Decoder.draft`."""
        states = plan.amount.states
        drafts = []
        for row in rows:
            rule = self.rules.setdefault(row.place, Consistent(self.mode.rule, self.min_chance))
            nodes = build_draft(row, rule, states, 1, {}) if row.stop is None else []
            rule.follow(nodes)
            drafts.append(nodes)
        return drafts

    def rule_of(self, row: Row) -> RevealRule:
        """See `Decoder.rule_of`."""
        return self.rules.get(row.place, self.mode.rule)


def parallel_speculative(rule: RevealRule, states: int, min_chance: float = 0.0) -> Loop:
    """Make the loop of parallel speculative decoding with policy `rule` and K = `states`; for
    `min_chance`, see `Consistent`."""
    return loop_of(rule, states, partial(PSDecoder, min_chance))
