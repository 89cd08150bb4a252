"""The only decoding loop: rounds that score the states of all rows side by side; rows never wait
for each other.

A row (one sequence of the batch) is a small state machine. Its *next* state is known: it results
from the reveal at the last accepted state. A round (`Decoder.round`) has four steps:

1. **draft** (host): each row submits its next state and the states that are likely to follow it.
   After a clean state (one without masks), it also submits the all-mask state of the next block,
   which attends to the clean one. Head passes (device) estimate which states are likely.
2. **score** (device): one backbone forward runs over all submitted states, and tokens are picked at
   their masked positions.
3. **accept** (host): the reveal rule leads from state to state. The states on that path that were
   scored in this round or the previous one are accepted. The backbone's keys and values of accepted
   clean blocks join the prefix (`Networks.commit`, device).
4. **write** (host): the reveal at the last accepted state, refined as the mode says, makes the
   row's next state.

A mode that drafts nothing submits one state a round (two where a block ends), and otherwise runs
the same code.

Between rounds, waiting rows take the places of rows that have ended (`Decoder.join`). Once no row
waits, the batch shrinks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..networks.networks import Networks
from ..networks.picker import LIKELIEST, SHORTLIST, Picker
from ..networks.predicted import predicted_costs
from ..networks.runner import Runner
from ..networks.sampler import Hidden
from ..rules.costs import RoundCosts, draft_sizes
from ..rules.draft import (
    Node,
    accept,
    build_draft,
    first_pending_reveal,
    write,
)
from ..rules.gain import Amount, DraftAmount, Drafts, ExpectedGain, Fixed
from ..rules.lookup import PromptLookup
from ..rules.reveal import RevealRule
from ..rules.sources import DraftSource
from ..rules.state import Key, PendingReveal, Row, Scores, State
from .refine import Refinement, refined


@dataclass(frozen=True)
class Drafting:
    """How states are drafted: how many likely next states one forward scores, and where they come
    from. Drafts never change the text.

    Attributes:
        states: K, the largest number of states that a row may submit per round, its own state
            included.
        branches: The largest number of followers (states after one reveal) that are considered per
            state. With 1, a draft is a chain.
        passes: Number of head passes per round, less than `states`. If 0, drafts come from the
            backbone's stale logits (those of states that are scored already).
        by_gain: If True, `states` and `passes` are upper bounds, and each round drafts the amount
            that has the largest expected gain for its cost (`ExpectedGain`).
        shortlist: Number of tokens among which a head pass chooses at each position. 0: all tokens.
            None: the number depends on the size of the vocabulary.
        lookup_tokens: The largest number of tokens that a `PromptLookup` proposes at a state. 0: no
            lookup.
        lookup_ngram_size: Length of the longest n-gram for which a lookup searches.
        next_block: Whether drafts continue into the next block, using previews of it
            (`build_draft`).
    """

    states: int
    branches: int
    passes: int = 0
    by_gain: bool = False
    shortlist: int | None = None
    lookup_tokens: int = 0
    lookup_ngram_size: int = 2
    next_block: bool = False

    def sources(self) -> list[DraftSource]:
        """Make the draft sources that one call uses in addition to scores and the head: a
        `PromptLookup`, or none."""
        if not self.lookup_tokens:
            return []
        return [PromptLookup(self.lookup_tokens, self.lookup_ngram_size)]

    def listed(self, vocab_size: int, sample: bool) -> int:
        """Return the number of tokens among which a head pass chooses at each position. Return 0 if
        it chooses among all tokens, or if there is no head pass.

        Args:
            vocab_size: The number of tokens of the vocabulary.
            sample: Whether tokens are sampled.
        """
        if not self.passes or self.shortlist == 0:
            return 0
        usual = LIKELIEST if sample else SHORTLIST
        if self.shortlist is None:
            return usual if vocab_size > 1024 * SHORTLIST else 0
        return min(self.shortlist, vocab_size)


@dataclass(frozen=True)
class Mode:
    """The reveal rule, the refinement and the drafting that one value of the option `decoding`
    stands for.

    Attributes:
        rule: Decides which columns a step of the backbone reveals. Together with `refine`, it
            determines the text.
        refine: How the head changes the rule's reveals; None for no refinement.
        drafting: How states are drafted; None for no drafts.
    """

    rule: RevealRule
    refine: Refinement | None = None
    drafting: Drafting | None = None

    @property
    def uses_head(self) -> bool:
        """Whether the head takes part, in refinement or in drafting."""
        return self.refine is not None or (self.drafting is not None and self.drafting.passes > 0)

    @property
    def width(self) -> int:
        """The largest number of states that a row submits in a round, at least 2. With drafts, it
        is `Drafting.states`. Without drafts, it is 2: a row submits one state, but if that state
        has no masks, it also submits the first state of the next block."""
        return max(2, 1 if self.drafting is None else self.drafting.states)


def draft_amount(
    mode: Mode, picker: Picker, config: Any, table: Mapping[str, Any] | None
) -> DraftAmount:
    """Make the object that decides how much each round of a call drafts.

    Args:
        mode: The `Mode` of the call.
        picker: The `Picker` of the call. It has the weight of `lm_head` and the size of shortlists.
        config: The model's config.
        table: What forwards cost by their number of states, as `RoundCosts.from_dict` reads it;
            None for predicted costs.
    """
    drafting = mode.drafting
    if drafting is None:
        return Fixed()
    if not drafting.by_gain:
        return Fixed(drafting.states, drafting.passes)
    if table is not None:
        costs = RoundCosts.from_dict(table)
    else:
        costs = predicted_costs(config, picker.lm_head_weight, picker.shortlist)
    return ExpectedGain(drafting.states, drafting.passes, costs, mode.rule.stale_acceptance)


@dataclass(frozen=True)
class RoundPlan:
    """The plan of a round, made before the first forward of the round.

    Attributes:
        amount: How much the round drafts.
        outlines: For each row, a draft that is built without the head.
    """

    amount: Amount
    outlines: Drafts

    def within(self, states: int) -> "RoundPlan":
        """Return a copy of the plan in which each row submits at most `states` states, and the
        number of head passes is less than that."""
        states = min(self.amount.states, states)
        return replace(self, amount=Amount(states, min(self.amount.passes, states - 1)))


class RoundDecoder:
    """Decodes a batch, one round at a time.

    Args:
        mode: The reveal rule, refinement and drafting.
        networks: Runs backbone and head, and picks tokens, on the device.
        amount: Decides how much each round drafts.
        sources: Draft sources that are used in addition to scores.

    Attributes:
        verified: Number of forwards that scored drafts.
    """

    def __init__(
        self,
        mode: Mode,
        networks: Runner,
        amount: DraftAmount,
        sources: Sequence[DraftSource] = (),
    ) -> None:
        self.mode = mode
        self.networks = networks
        self.amount = amount
        self.sources = sources
        self.verified = 0

    def plan(self, rows: Sequence[Row]) -> RoundPlan:
        """Decide, on the host, how much the next round of the batch drafts."""
        outlines = self.grown(rows, self.amount.outline)
        return RoundPlan(self.amount.plan(outlines), outlines)

    def round(self, rows: Sequence[Row], plan: RoundPlan) -> None:
        """Run one round of the batch: draft as `plan` says, score, accept and write. `plan` must
        have been made for the same rows in their present states."""
        drafts = self.draft(rows, plan)
        scores = self.networks.score(rows, drafts)
        for row, nodes in zip(rows, drafts, strict=True):
            row.counts.states += len(nodes)
        self.verified += any(not node.opens for nodes in drafts for node in nodes[1:])
        self.write(rows, self.accept(rows, drafts, scores))
        self.amount.learn(plan.amount, plan.outlines, drafts)

    def draft(self, rows: Sequence[Row], plan: RoundPlan) -> list[list[Node]]:
        """Build the drafts of a round with the number of head passes in its plan. Return the nodes
        that each row submits; an ended row submits none."""
        amount = plan.amount
        drafts = plan.outlines
        estimates: list[dict[Key, Scores]] = [{} for _ in rows]
        sizes = draft_sizes(amount.states, amount.passes) if amount.passes else []
        for index, size in enumerate(sizes):
            # Only the first pass reads the row's own state: in later ones the head's input there
            # would be the same.
            first = min(index, 1)
            self.read(rows, [nodes[first:size] for nodes in drafts], estimates)
            drafts = self.grown(rows, [*sizes, amount.states][index + 1], estimates)
        states = self.amount.cut(amount, drafts)
        return [list(nodes[:states]) for nodes in drafts]

    def grown(
        self,
        rows: Sequence[Row],
        size: int,
        estimates: Sequence[Mapping[Key, Scores]] | None = None,
    ) -> list[list[Node]]:
        """Build a draft of at most `size` states for each row that has not ended; an ended row gets
        no nodes. A row whose own state has no masks gets up to two states even if `size` is 1: that
        state and the first state of the next block.

        `estimates` has, for each row, the head's estimates of scores, by `State.key`. It is None if
        the head has not read any state.
        """
        drafting = self.mode.drafting
        branches = 1 if drafting is None else drafting.branches
        previews = drafting is not None and drafting.next_block
        drafts: list[list[Node]] = []
        for index, row in enumerate(rows):
            nodes: list[Node] = []
            if row.stop is None:
                least = 1 if row.state.masks else 2
                row_estimates = {} if estimates is None else estimates[index]
                nodes = build_draft(
                    row,
                    self.rule_of(row),
                    max(size, least),
                    branches,
                    row_estimates,
                    self.sources,
                    previews,
                )
            drafts.append(nodes)
        return drafts

    def read(
        self,
        rows: Sequence[Row],
        drafts: Sequence[Sequence[Node]],
        estimates: Sequence[dict[Key, Scores]],
    ) -> None:
        """Run the head once over drafted states. Store its estimates of the backbone's scores at
        these states in `estimates`, which has, for each row, a dict from `State.key` to scores.

        The head reads a state together with the hidden states of its source, which is the state
        from which it was made. States without masks (where nothing is picked) and first states of
        blocks (which have no source) are left out.
        """
        inputs: list[list[tuple[State, Hidden]]] = [[] for _ in rows]
        states: list[tuple[Row, State]] = []
        parents: list[State | None] = []
        candidates: list[Hidden | None] = []
        keys: list[tuple[int, Key]] = []
        for row_index, nodes in enumerate(drafts):
            for node in nodes:
                source = node.source
                if source is None or source.hidden is None or not node.state.masks:
                    continue
                inputs[row_index].append((node.state, source.hidden))
                states.append((rows[row_index], node.state))
                parents.append(node.parent_state)
                candidates.append(source.candidates)
                keys.append((row_index, node.state.key))
        if not states:
            return
        outputs = [hidden for row in self.networks.head(rows, inputs) for hidden in row]
        scores = self.networks.sampler.estimate(states, outputs, parents, candidates)
        for (row_index, key), estimate in zip(keys, scores, strict=True):
            estimates[row_index][key] = estimate

    def accept(
        self,
        rows: Sequence[Row],
        drafts: Sequence[Sequence[Node]],
        scores: Sequence[Sequence[Scores]],
    ) -> list[PendingReveal | None]:
        """Accept the longest verified path of each row, and commit the finished blocks on it
        (`Runner.commit`). Return the pending reveal of each row; None for an ended row, and where
        the path ends in a state without masks.

        Args:
            rows: The rows.
            drafts: For each row, the nodes that it submitted.
            scores: For each row, the scores of these nodes.
        """
        drafted = self.mode.drafting is not None
        pending_reveals: list[PendingReveal | None] = [None] * len(rows)
        clean: list[list[int]] = [[] for _ in rows]
        for row_index, (row, nodes) in enumerate(zip(rows, drafts, strict=True)):
            if nodes:
                pending_reveals[row_index], clean[row_index] = accept(
                    row, self.rule_of(row), nodes, scores[row_index], drafted
                )
        if any(clean):
            self.networks.commit(rows, clean)
        return pending_reveals

    def rule_of(self, row: Row) -> RevealRule:
        """Return the reveal rule of a row. It is the mode's rule, unless a subclass has one per
        row."""
        return self.mode.rule

    def write(self, rows: Sequence[Row], pending_reveals: Sequence[PendingReveal | None]) -> None:
        """Refine the pending reveals as the mode says, and write them into the texts of the rows.
        Set `stop` of the rows whose text is complete."""
        if self.mode.refine is not None:
            pending_reveals = refined(self.mode.refine, self.networks, rows, pending_reveals)
        for row, pending in zip(rows, pending_reveals, strict=True):
            if pending is not None:
                write(row, pending)
            if row.stop is None:
                row.update_stop()


class Decoder(RoundDecoder):
    """Decodes the rows of one call, or rows that join and leave a batch.

    Args:
        mode, networks, amount, sources: As for `RoundDecoder`.
        watches: Callbacks such as stopping criteria. They get the batch's rows after every prefill
            and every round, and may end rows.
        least_rows: The number of rows below which a batch is never shrunk. As rows end, the number
            of rows in the batch is halved, if possible repeatedly.
    """

    networks: Networks

    def __init__(
        self,
        mode: Mode,
        networks: Networks,
        amount: DraftAmount,
        watches: Sequence[Callable[[Sequence[Row]], None]] = (),
        least_rows: int = 1,
        sources: Sequence[DraftSource] = (),
    ) -> None:
        super().__init__(mode, networks, amount, sources)
        self.watches = watches
        self.least_rows = least_rows

    def decode(
        self, rows: Sequence[Row], reused: Sequence[int], waiting: Iterable[Row] = ()
    ) -> None:
        """Decode every row to its end.

        Args:
            rows: The rows of the first batch.
            reused: For each row, the number of leading tokens whose keys and values are in the
                cache.
            waiting: Rows that take the places of rows that have ended.

        Raises:
            UnscoredError: if the token picked at a position that is to be revealed has no finite
                logit.
        """
        batch = list(rows)
        self.write(batch, self.prefill(batch, reused))
        self.watch(batch)
        for _ in self.rounds(batch, iter(waiting)):
            pass
        self.networks.restore_batch(max(row.held for row in rows))

    def rounds(self, batch: list[Row], waiting: Iterator[Row]) -> Iterator[None]:
        """Run rounds until every row has ended and no row waits. Yield after each round; until the
        next one, new rows may be added to those that `waiting` yields.

        Args:
            batch: The rows of the batch, after the reveals at their first states.
            waiting: Yields the rows that take the places of rows that have ended.

        Raises:
            UnscoredError: as from `decode`.
        """
        while True:
            joined = self.join(batch, waiting)
            if joined:
                self.watch(batch)
            active = sum(row.stop is None for row in batch)
            if not active and not joined:
                break
            if not joined and (size := self.smaller(len(batch), active)) < len(batch):
                batch = self.networks.shrink_batch(batch, size)
            # otherwise the texts of all rows that joined were complete with their first token
            if active:
                self.round(batch, self.plan(batch))
                self.watch(batch)
            yield

    def prefill(
        self, rows: Sequence[Row], reused: Sequence[int], first: int = 0
    ) -> list[PendingReveal | None]:
        """Compute the keys and values of the prompts of `rows`, and score the first state of each
        row. Return the pending reveal at the first state of each row; None if nothing is left to
        reveal there.

        Args:
            rows: Rows that lie side by side in the batch.
            reused: For each row, the number of leading tokens whose keys and values are in the
                cache.
            first: The index in the batch of the first of these rows.
        """
        scores = self.networks.prefill(rows, reused, first)
        pending_reveals: list[PendingReveal | None] = []
        for row, row_scores in zip(rows, scores, strict=True):
            pending_reveals.append(first_pending_reveal(row, self.rule_of(row), row_scores))
        return pending_reveals

    def join(self, batch: list[Row], waiting: Iterator[Row]) -> bool:
        """Replace ended rows in `batch` by rows from `waiting` until either runs out. For each row
        that joins, compute the keys and values of its prompt, and write the reveal at its first
        state into its text. Return whether a row joined."""
        pending_reveals: list[PendingReveal | None] = [None] * len(batch)
        joined = False
        for index, ended in enumerate(batch):
            if ended.stop is None:
                continue
            row = next(waiting, None)
            if row is None:
                break
            ended.forget()
            batch[index] = row
            (pending_reveals[index],) = self.prefill([row], [0], index)
            joined = True
        if joined:
            self.write(batch, pending_reveals)
        return joined

    def watch(self, rows: Sequence[Row]) -> None:
        """Call all `watches` with the batch's rows."""
        for watch in self.watches:
            watch(rows)

    def smaller(self, size: int, active: int) -> int:
        """Return the size to which a batch can shrink: `size` halved (and rounded up) as often as
        possible.

        Args:
            size: The present number of rows, ended ones included.
            active: The number of rows that have not ended. The result is not less than this number,
                nor less than `least_rows`, unless `size` itself is.
        """
        while size > 1 and (half := (size + 1) // 2) >= max(active, self.least_rows):
            size = half
        return size
