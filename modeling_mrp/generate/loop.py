"""The one decoding loop: rounds of states side by side, over rows that never wait for each other.

A row (one sequence of the batch) is a little state machine. Its *next* state is known: the backbone itself revealed it from the
last state scored. A round (`Decoder.round`) goes

1. **draft** (host): each row submits its next state, the likeliest ones to follow it and, behind a clean state (no masks left),
   the all-mask state of the next block, which looks at the clean one; head passes (device) tell which ones are likely;
2. **score** (device): one backbone forward over all of them, and picks at their masked positions;
3. **accept** (host): the reveal rule leads from state to state; as far as it meets what this round or the one before scored,
   that is accepted, and at its end the backbone's KV of accepted clean blocks becomes prefix (`Networks.commit`, device);
4. **write** (host): the reveal at the last accepted state, refined by the mode, makes the row's next state.

A mode that drafts nothing submits one state a round (two where a block ends) and is otherwise the same code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from ..networks.networks import Hidden, Networks
from ..networks.picker import LIKELIEST, SHORTLIST
from ..rules.draft import Node, accept, build_draft, draft_sizes, first_frontier, target_nodes, write
from ..rules.reveal import RevealRule
from ..rules.state import Frontier, Key, Row, Scores, State
from .budget import Amount, Budget
from .refine import Refinement, refined


@dataclass(frozen=True)
class Drafting:
    """The amount of drafting: states that may follow, scored together in one forward. Drafts never change the text.

    Attributes:
        states: K, the states a row may submit per round.
        branches: Followers of a state that are considered; 1 drafts a chain.
        passes: Head passes per round, below `states`; 0: drafts come from the backbone's own stale logits.
        paced: `states` and `passes` are the most of both: each round has as much as measured time says pays (`Budget`).
        shortlist: Tokens of a position that a head pass chooses among; 0: all; None: as the vocabulary is large or not.
    """

    states: int
    branches: int
    passes: int = 0
    paced: bool = False
    shortlist: int | None = None

    def listed(self, vocab_size: int, sample: bool) -> int:
        """Choose the size of a position's shortlist for a vocabulary; 0: a head pass scores all tokens, or none runs."""
        if not self.passes or self.shortlist == 0:
            return 0
        usual = LIKELIEST if sample else SHORTLIST
        if self.shortlist is None:
            return usual if vocab_size > 1024 * SHORTLIST else 0
        return min(self.shortlist, vocab_size)


@dataclass(frozen=True)
class Mode:
    """The meaning of one value of `decoding`.

    Attributes:
        rule: Which columns a step of the backbone reveals: this alone, with `refine`, says what the text is.
        refine: What the head changes about that; None: nothing.
        drafting: What is drafted ahead; None: nothing.
    """

    rule: RevealRule
    refine: Refinement | None = None
    drafting: Drafting | None = None

    @property
    def uses_head(self) -> bool:
        """True if the head takes part."""
        return self.refine is not None or (self.drafting is not None and self.drafting.passes > 0)

    @property
    def width(self) -> int:
        """States of a row in a round, at most: its own and the next block's, or with drafts more."""
        return max(2, 1 if self.drafting is None else self.drafting.states)


class Decoder:
    """Decodes the rows of one call.

    Args:
        mode, networks, budget: What is revealed, refined and drafted; what the device computes; how much each round drafts.
        watches: Called in turn behind the prefill and every round with the batch's rows; one that asks stopping criteria may
            end rows.
        least_rows: Rows that have ended leave the batch by halves, but not below so many.

    Attributes:
        verified: Forwards that scored drafts.
        slots: Rows of all rounds added up, those included that had ended while the batch went on.
    """

    def __init__(
        self,
        mode: Mode,
        networks: Networks,
        budget: Budget,
        watches: Sequence[Callable[[Sequence[Row]], None]] = (),
        least_rows: int = 1,
    ) -> None:
        self.mode, self.networks, self.budget, self.watches, self.least_rows = mode, networks, budget, watches, least_rows
        self.verified = self.slots = 0

    def decode(self, rows: list[Row], reused: Sequence[int]) -> None:
        """Decode every row to its end; by row, so many first tokens are `reused`: they have their keys and values already.

        Raises:
            UnscoredError: for a position at which no token has a finite score.
        """
        scores = self.networks.prefill(rows, reused)
        self.write(rows, [first_frontier(row, self.mode.rule, said) for row, said in zip(rows, scores, strict=True)])
        self.watch(rows)
        batch = rows
        while active := sum(row.stop is None for row in batch):
            if (size := self.smaller(len(batch), active)) < len(batch):
                batch = self.networks.narrow(batch, size)
            begun = perf_counter()
            amount = self.budget.choose(batch)
            steps = self.round(batch, amount)
            self.budget.learn(amount, batch, steps, perf_counter() - begun)
            self.watch(batch)
        self.networks.widen(max(row.held for row in rows))

    def watch(self, rows: Sequence[Row]) -> None:
        """Show the rows to all who watch."""
        for watch in self.watches:
            watch(rows)

    def smaller(self, size: int, active: int) -> int:
        """Halve the size of the batch as long as `active` rows have room in it."""
        while size > 1 and (half := (size + 1) // 2) >= max(active, self.least_rows):
            size = half
        return size

    def round(self, rows: Sequence[Row], amount: Amount) -> list[int]:
        """Run one round; return by row how many denoising steps it took."""
        before = [row.steps for row in rows]
        drafts = self.draft(rows, amount)
        scores = self.networks.score(rows, drafts)
        self.slots += len(rows)
        # Drafts are the nodes behind the row's own that have no parent; those with one are first states of next blocks.
        self.verified += any(node.parent < 0 for nodes in drafts for node in nodes[1:])
        self.write(rows, self.accept(rows, drafts, scores, amount.states > 1))
        return [row.steps - steps for row, steps in zip(rows, before, strict=True)]

    def draft(self, rows: Sequence[Row], amount: Amount) -> list[list[Node]]:
        """Choose the states of the round: none for rows that have ended."""
        drafting = self.mode.drafting
        if drafting is None or amount.states == 1:
            return [target_nodes(row, amount.narrow) if row.stop is None else [] for row in rows]
        estimates: list[dict[Key, Scores]] = [{} for _ in rows]

        def grown(size: int) -> list[list[Node]]:
            return [
                build_draft(row, self.rule_of(row), size, drafting.branches, known) if row.stop is None else []
                for row, known in zip(rows, estimates, strict=True)
            ]

        for turn, size in enumerate(draft_sizes(amount.states, amount.passes) if amount.passes else []):
            # Later passes leave out the row's own state: what it is read from stays the same.
            self.read(rows, [nodes[min(turn, 1) :] for nodes in grown(size)], estimates)
        return grown(amount.states)

    def read(self, rows: Sequence[Row], drafts: Sequence[Sequence[Node]], estimates: Sequence[dict[Key, Scores]]) -> None:
        """Run the head once over drafted states, and store in `estimates` what it says that the backbone would score at each.

        A state is read from the hidden states of its source, the state before it. Left out are clean states (nothing is
        picked there) and first states of blocks (they have no source).
        """
        asked = [
            (at, node.state, hidden, said.shortlist)
            for at, nodes in enumerate(drafts)
            for node in nodes
            if node.state.masks and (said := node.source) and (hidden := said.hidden)
        ]
        if not asked:
            return
        given: list[list[tuple[State, Hidden]]] = [[] for _ in rows]
        for at, state, hidden, _ in asked:
            given[at].append((state, hidden))
        made = [one for part in self.networks.head(rows, given) for one in part]
        states, few = [(rows[at], state) for at, state, _, _ in asked], [few for _, _, _, few in asked]
        scores = self.networks.pick(self.networks.drafter, states, made, shortlists=few)
        for (at, state, _, _), said in zip(asked, scores, strict=True):
            estimates[at][state.key] = said

    def accept(
        self, rows: Sequence[Row], drafts: Sequence[Sequence[Node]], scores: Sequence[Sequence[Scores]], drafted: bool
    ) -> list[Frontier | None]:
        """Accept what was scored, and commit clean blocks."""
        frontiers: list[Frontier | None] = [None] * len(rows)
        clean: list[list[int]] = [[] for _ in rows]
        for at, (row, nodes) in enumerate(zip(rows, drafts, strict=True)):
            if nodes:
                frontiers[at], clean[at] = accept(row, self.rule_of(row), nodes, scores[at], drafted)
        if any(clean):
            self.networks.commit(rows, clean)
        return frontiers

    def rule_of(self, row: Row) -> RevealRule:
        """Choose the rule of a row's text: the mode's; other decoders may have one for each row."""
        return self.mode.rule

    def write(self, rows: Sequence[Row], frontiers: Sequence[Frontier | None]) -> None:
        """Refine the last reveals and write them; note which texts are whole."""
        if self.mode.refine is not None:
            frontiers = refined(self.mode.refine, self.networks, rows, frontiers)
        for row, frontier in zip(rows, frontiers, strict=True):
            if frontier is not None:
                write(row, frontier)
            if row.stop is None:
                row.settle()
