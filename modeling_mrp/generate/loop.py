"""The one decoding loop: rounds that score the states of all rows side by side; rows never wait for
each other.

A row (one sequence of the batch) is a little state machine. Its *next* state is known: it results
from the reveal at the last accepted state. A round (`Decoder.round`) has four steps:

1. **draft** (host): each row submits its next state, the states likely to follow it and, after a
   clean state (no masks left), the all-mask state of the next block, which attends to the clean
   one; head passes (device) estimate which are likely;
2. **score** (device): one backbone forward over all submitted states, and picks at their masked
   positions;
3. **accept** (host): the reveal rule leads from state to state; states on that path that were
   scored in this round or the one before are accepted, and the backbone's KV of accepted clean
   blocks joins the prefix (`Networks.commit`, device);
4. **write** (host): the reveal at the last accepted state, refined by the mode, makes the row's
   next state.

A mode that drafts nothing submits one state a round (two where a block ends) and otherwise runs the
same code.

Between rounds, rows that wait take the places of rows that have ended (`Decoder.join`); once none
waits, the batch shrinks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

from ..networks.networks import Hidden, Networks
from ..networks.picker import LIKELIEST, SHORTLIST
from ..rules.draft import (
    Node,
    accept,
    build_draft,
    draft_sizes,
    first_frontier,
    target_nodes,
    write,
)
from ..rules.lookup import PromptLookup
from ..rules.reveal import RevealRule
from ..rules.sources import DraftSource
from ..rules.state import Frontier, Key, Row, Scores, State
from .budget import Amount, Budget
from .refine import Refinement, refined


@dataclass(frozen=True)
class Drafting:
    """The amount of drafting: how many likely next states one forward scores. Drafts never change
    the text.

    Attributes:
        states: K, the most states a row may submit per round, its own included.
        branches: Followers (states after one reveal) considered per state, at most; 1 drafts a
            chain.
        passes: Head passes per round, fewer than `states`; 0: drafts come from the backbone's own
            stale logits.
        paced: Whether `states` and `passes` are upper bounds, and each round drafts as much as
            measured time says pays (`Budget`).
        shortlist: Tokens that a head pass chooses among at each position; 0: all; None: decided by
            the size of the vocabulary.
        lookup_tokens: Tokens of a `PromptLookup` at a state, at most; 0: none is made.
        lookup_ngram_size: Tokens that have to be the same for it, at most.
    """

    states: int
    branches: int
    passes: int = 0
    paced: bool = False
    shortlist: int | None = None
    lookup_tokens: int = 0
    lookup_ngram_size: int = 2

    def sources(self) -> list[DraftSource]:
        """Make the sources of drafts besides scores and the head, for one call."""
        if not self.lookup_tokens:
            return []
        return [PromptLookup(self.lookup_tokens, self.lookup_ngram_size)]

    def listed(self, vocab_size: int, sample: bool) -> int:
        """Return how many tokens a head pass chooses among at each position; 0: all of them, or
        there is no head pass."""
        if not self.passes or self.shortlist == 0:
            return 0
        usual = LIKELIEST if sample else SHORTLIST
        if self.shortlist is None:
            return usual if vocab_size > 1024 * SHORTLIST else 0
        return min(self.shortlist, vocab_size)


@dataclass(frozen=True)
class Mode:
    """The reveal rule, refinement and drafting behind one value of the option `decoding`.

    Attributes:
        rule: Decides which columns a step of the backbone reveals. Together with `refine` it
            determines the text.
        refine: How the head changes the rule's reveals; None: not at all.
        drafting: How states are drafted; None: not at all.
    """

    rule: RevealRule
    refine: Refinement | None = None
    drafting: Drafting | None = None

    @property
    def uses_head(self) -> bool:
        """Whether the head takes part, in refining or in drafting."""
        return self.refine is not None or (self.drafting is not None and self.drafting.passes > 0)

    @property
    def width(self) -> int:
        """The most states of a row in a round: its own and the next block's first, or K with
        drafts; at least 2."""
        return max(2, 1 if self.drafting is None else self.drafting.states)


class Decoder:
    """Decodes the rows of one call.

    Args:
        mode: What is revealed, refined and drafted.
        networks: Backbone, head and picks on the device.
        budget: Chooses how much each round drafts.
        watches: Callbacks that get the batch's rows after every prefill and every round; they may
            end rows (stopping criteria).
        least_rows: The batch is halved as its rows end, but keeps at least this many rows.
        sources: Sources of drafts that are asked beside scores.

    Attributes:
        verified: Forwards that scored drafts.
    """

    def __init__(
        self,
        mode: Mode,
        networks: Networks,
        budget: Budget,
        watches: Sequence[Callable[[Sequence[Row]], None]] = (),
        least_rows: int = 1,
        sources: Sequence[DraftSource] = (),
    ) -> None:
        self.mode, self.networks, self.budget, self.watches, self.least_rows = (
            mode,
            networks,
            budget,
            watches,
            least_rows,
        )
        self.sources = sources
        self.verified = 0

    def decode(
        self, rows: Sequence[Row], reused: Sequence[int], waiting: Iterable[Row] = ()
    ) -> None:
        """Decode every row to its end.

        Args:
            rows: The batch at first.
            reused: By row, the number of first tokens with keys and values in the cache.
            waiting: Rows that take the places of those that end.

        Raises:
            UnscoredError: for a position at which no token has a finite score.
        """
        batch = list(rows)
        waiting = iter(waiting)
        self.write(batch, self.prefill(batch, reused))
        self.watch(batch)
        while True:
            joined = self.join(batch, waiting)
            if joined:
                self.watch(batch)
            active = sum(row.stop is None for row in batch)
            if not active and not joined:
                break
            if not joined and (size := self.smaller(len(batch), active)) < len(batch):
                batch = self.networks.narrow(batch, size)
            if not active:  # the texts of all that joined were whole with their first token
                continue
            start = perf_counter()
            amount = self.budget.choose(batch)
            steps = self.round(batch, amount)
            self.budget.learn(amount, batch, steps, perf_counter() - start)
            self.watch(batch)
        self.networks.widen(max(row.held for row in batch))

    def prefill(
        self, rows: Sequence[Row], reused: Sequence[int], first: int = 0
    ) -> list[Frontier | None]:
        """Compute the prompts of rows of the batch, from its row `first` on; return the frontiers
        at their first states."""
        scores = self.networks.prefill(rows, reused, first)
        frontiers: list[Frontier | None] = []
        for row, row_scores in zip(rows, scores, strict=True):
            frontiers.append(first_frontier(row, self.rule_of(row), row_scores))
        return frontiers

    def join(self, batch: list[Row], waiting: Iterator[Row]) -> bool:
        """Put waiting rows in the places of rows that have ended, as far as there are any, and
        reveal at their first states; return whether one joined."""
        frontiers: list[Frontier | None] = [None] * len(batch)
        joined = False
        for index, ended in enumerate(batch):
            if ended.stop is None:
                continue
            row = next(waiting, None)
            if row is None:
                break
            ended.forget()
            batch[index] = row
            (frontiers[index],) = self.prefill([row], [0], index)
            joined = True
        if joined:
            self.write(batch, frontiers)
        return joined

    def watch(self, rows: Sequence[Row]) -> None:
        """Call all `watches` with the rows."""
        for watch in self.watches:
            watch(rows)

    def smaller(self, size: int, active: int) -> int:
        """Return the size of the batch, halved as often as its `active` rows still fit."""
        while size > 1 and (half := (size + 1) // 2) >= max(active, self.least_rows):
            size = half
        return size

    def round(self, rows: Sequence[Row], amount: Amount) -> list[int]:
        """Run one round; return the number of denoising steps that each row took in it."""
        steps_before = [row.steps for row in rows]
        drafts = self.draft(rows, amount)
        scores = self.networks.score(rows, drafts)
        self.verified += any(not node.opens for nodes in drafts for node in nodes[1:])
        self.write(rows, self.accept(rows, drafts, scores, amount.states > 1))
        return [row.steps - steps for row, steps in zip(rows, steps_before, strict=True)]

    def draft(self, rows: Sequence[Row], amount: Amount) -> list[list[Node]]:
        """Choose each row's nodes for the round; rows that have ended get none."""
        drafting = self.mode.drafting
        if drafting is None or amount.states == 1:
            return [target_nodes(row, amount.narrow) if row.stop is None else [] for row in rows]
        estimates: list[dict[Key, Scores]] = [{} for _ in rows]

        def grown(size: int) -> list[list[Node]]:
            return [
                build_draft(
                    row, self.rule_of(row), size, drafting.branches, row_estimates, self.sources
                )
                if row.stop is None
                else []
                for row, row_estimates in zip(rows, estimates, strict=True)
            ]

        for pass_index, size in enumerate(
            draft_sizes(amount.states, amount.passes) if amount.passes else []
        ):
            # Only the first pass reads the row's own state: in later ones the head's input there
            # would be the same.
            self.read(rows, [nodes[min(pass_index, 1) :] for nodes in grown(size)], estimates)
        return grown(amount.states)

    def read(
        self,
        rows: Sequence[Row],
        drafts: Sequence[Sequence[Node]],
        estimates: Sequence[dict[Key, Scores]],
    ) -> None:
        """Run the head once over drafted states, and store its estimates of the backbone's scores
        there in `estimates`.

        The head reads a state together with the hidden states of its source, the state before.
        Clean states (where nothing is picked) and first states of blocks (which have no source) are
        left out.
        """
        inputs: list[list[tuple[State, Hidden]]] = [[] for _ in rows]
        states: list[tuple[Row, State]] = []
        parents: list[State | None] = []
        shortlists: list[Hidden | None] = []
        keys: list[tuple[int, Key]] = []
        for row_index, nodes in enumerate(drafts):
            for node in nodes:
                source = node.source
                if source is None or source.hidden is None or not node.state.masks:
                    continue
                inputs[row_index].append((node.state, source.hidden))
                states.append((rows[row_index], node.state))
                parents.append(node.clean)
                shortlists.append(source.shortlist)
                keys.append((row_index, node.state.key))
        if not states:
            return
        outputs = [hidden for row in self.networks.head(rows, inputs) for hidden in row]
        drafter = self.networks.drafter
        scores = self.networks.pick(drafter, states, outputs, parents, shortlists)
        for (row_index, key), estimate in zip(keys, scores, strict=True):
            estimates[row_index][key] = estimate

    def accept(
        self,
        rows: Sequence[Row],
        drafts: Sequence[Sequence[Node]],
        scores: Sequence[Sequence[Scores]],
        drafted: bool,
    ) -> list[Frontier | None]:
        """Accept the longest verified path of each row, and commit its clean blocks; return the
        rows' frontiers."""
        frontiers: list[Frontier | None] = [None] * len(rows)
        clean: list[list[int]] = [[] for _ in rows]
        for row_index, (row, nodes) in enumerate(zip(rows, drafts, strict=True)):
            if nodes:
                frontiers[row_index], clean[row_index] = accept(
                    row, self.rule_of(row), nodes, scores[row_index], drafted
                )
        if any(clean):
            self.networks.commit(rows, clean)
        return frontiers

    def rule_of(self, row: Row) -> RevealRule:
        """Return the reveal rule of a row: the mode's, unless a subclass has one per row."""
        return self.mode.rule

    def write(self, rows: Sequence[Row], frontiers: Sequence[Frontier | None]) -> None:
        """Refine the reveals at the frontiers and write them; set `stop` of rows whose text is
        whole."""
        if self.mode.refine is not None:
            frontiers = refined(self.mode.refine, self.networks, rows, frontiers)
        for row, frontier in zip(rows, frontiers, strict=True):
            if frontier is not None:
                write(row, frontier)
            if row.stop is None:
                row.settle()
