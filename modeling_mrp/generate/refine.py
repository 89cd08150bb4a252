"""Refinements: how the head changes the reveals of a step before they are written, for rows without
drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..networks.runner import Runner
from ..networks.sampler import Hidden
from ..rules.reveal import Columns, most_confident
from ..rules.state import PendingReveal, Row, Scores, State


class Reveal:
    """A row's pending reveal while the head refines it. At first it is the backbone's reveal.

    Attributes:
        row: The row of text.
        index: The index of the row in the batch.
        pending: The row's pending reveal before the refinement.
        state: The state at which the columns are revealed. It has masks at all of them.
        columns: The columns that the refined reveal reveals. The refinement adds or removes some.
        token, log_odds: For each column of the block, the picked token and its log-odds, as in
            `Scores`. The log-odds are NaN where the head's estimate is NaN.
        hidden: The hidden states from which the next head pass starts, in the form of
            `Scores.hidden`: at first the backbone's hidden states h_A of `state`. After the head
            has revealed a column, they are its estimate (h_A + h_C) for the state at which it
            revealed that column.
        drawn: Maps each column that the head revealed to the state at which it was revealed and the
            hidden states from which its token was picked.
    """

    def __init__(self, row: Row, index: int, pending: PendingReveal) -> None:
        scores = pending.scores
        assert scores.hidden is not None
        self.row = row
        self.index = index
        self.pending = pending
        self.state = pending.state
        self.columns = pending.columns
        self.token = list(scores.token)
        self.log_odds = list(scores.log_odds)
        self.hidden = scores.hidden
        self.drawn: dict[int, tuple[State, Hidden]] = {}

    def state_after(self, columns: Sequence[int]) -> State:
        """Return the state that results from revealing the tokens of the reveal at `columns`."""
        return self.row.successor(self.state, columns, self.token)

    def keep(self, columns: Sequence[int], estimates: Sequence[float]) -> None:
        """Reduce the reveal to `columns`.

        `estimates` has a number from the head for each column of the block. Where it is NaN, the
        log-odds of the reveal's token become NaN, too; to write that token is then an
        `UnscoredError`.
        """
        for column in self.columns:
            if estimates[column] != estimates[column]:
                self.log_odds[column] = estimates[column]
        self.columns = tuple(columns)

    def refined_reveal(self) -> PendingReveal:
        """Return the pending reveal of the columns that remain. Its `remasked` lists the columns
        that are masked again, and the row's counts include them."""
        pending = self.pending
        remasked = tuple([column for column in pending.columns if column not in self.columns])
        self.row.counts.revoked += len(remasked)
        return PendingReveal(
            pending.state,
            Scores(self.token, self.log_odds, hidden=pending.scores.hidden),
            self.columns,
            pending.memo,
            self.state_after(self.columns),
            self.drawn,
            remasked,
        )


# A frozen dataclass of its parameters; a call changes the reveals of some rows of the batch in
# place, before they are written.
Refinement = Callable[[Runner, Sequence[Row], list[Reveal]], None]


def refined(
    refine: Refinement,
    networks: Runner,
    rows: Sequence[Row],
    pending_reveals: Sequence[PendingReveal | None],
) -> list[PendingReveal | None]:
    """Refine the pending reveals of the batch's rows by `refine`. Return the refined reveals by
    row; None for a row that has no pending reveal."""
    reveals = []
    for index, (row, pending) in enumerate(zip(rows, pending_reveals, strict=True)):
        if pending:
            reveals.append(Reveal(row, index, pending))
    if reveals:
        refine(networks, rows, reveals)
    outputs: list[PendingReveal | None] = [None] * len(rows)
    for reveal in reveals:
        outputs[reveal.index] = reveal.refined_reveal()
    return outputs


def run_head(
    networks: Runner,
    rows: Sequence[Row],
    queries: list[tuple[Reveal, State]],
    residual: bool = False,
) -> list[Hidden]:
    """Run one head pass at some states; return the hidden states h_A + h_C at each of them (h_C
    alone if `residual`), in the form of `Scores.hidden`.

    Each query is a reveal and the state that the head reads. The head starts from the reveal's
    `hidden`. A row has at most one query.
    """
    inputs: list[list[tuple[State, Hidden]]] = [[] for _ in rows]
    for reveal, state in queries:
        inputs[reveal.index].append((state, reveal.hidden))
    outputs = networks.head(rows, inputs, residual)
    return [outputs[reveal.index][0] for reveal, _ in queries]


def head_log_odds(
    networks: Runner, rows: Sequence[Row], queries: Sequence[tuple[Reveal, Columns]]
) -> list[tuple[Reveal, list[float]]]:
    """Compute with the head the log-odds of each reveal's tokens. Return, for each query, its
    reveal and a list [block] of log-odds, which are -inf at columns that the reveal does not have.

    Each query is a reveal and some columns. The head reads the state in which the reveal's tokens
    stand at these columns. For a token at one of these columns, a trained head estimates the
    log-odds that the backbone would give if this token alone were still masked.
    """
    states = []
    tokens = []
    for reveal, columns in queries:
        states.append((reveal, reveal.state_after(columns)))
        tokens.append((reveal.row, reveal.state, reveal.columns, reveal.token))
    outputs = networks.sampler.token_odds(tokens, run_head(networks, rows, states))
    return [(reveal, log_odds) for (reveal, _), log_odds in zip(queries, outputs, strict=True)]


@dataclass(frozen=True)
class Direct:
    """The mode `mrp_direct`: after each backbone step, the head reveals more columns, one at a time
    and unverified (MRP, section 5).

    Attributes:
        head_reveals: The number of columns that the head reveals after each backbone step.
    """

    head_reveals: int

    def __call__(self, networks: Runner, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """Refine `reveals` in place (see `Refinement`)."""
        for _ in range(self.head_reveals):
            queries = []
            for reveal in reveals:
                state = reveal.state_after(reveal.columns)
                if state.free:
                    queries.append((reveal, state))
            if not queries:
                return
            hidden = run_head(networks, rows, queries)
            states = [(reveal.row, state) for reveal, state in queries]
            picks = networks.sampler.pick(states, hidden)
            for (reveal, state), scores, estimate in zip(queries, picks, hidden, strict=True):
                best = most_confident(state.free, scores.log_odds)
                reveal.columns = tuple(sorted((*reveal.columns, best)))
                reveal.token[best] = scores.token[best]
                reveal.log_odds[best] = scores.log_odds[best]
                reveal.hidden = estimate
                reveal.drawn[best] = (state, estimate)


@dataclass(frozen=True)
class ThresholdRemask:
    """The published rule of `mrp_remask`: mask tokens again if the head's confidence in them, given
    the other reveals of the step, is below tau.

    The head reads the state after all reveals of the step (MRP, arXiv 2605.18817). Under every
    remasking rule, at least one reveal stays.

    Attributes:
        threshold: tau, in log-odds.
    """

    threshold: float  # tau, in log-odds

    def __call__(self, networks: Runner, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """Refine `reveals` in place (see `Refinement`)."""
        queries = [(reveal, reveal.columns) for reveal in reveals]
        for reveal, log_odds in head_log_odds(networks, rows, queries):
            confident = [column for column in reveal.columns if log_odds[column] >= self.threshold]
            reveal.keep(confident or [most_confident(reveal.columns, log_odds)], log_odds)


@dataclass(frozen=True)
class ResidualRemask:
    """The rule `residual` of the released code: mask tokens again if the head changes their logits
    by much.

    The head reads the state before the reveal. A token becomes a mask again if its logit changes by
    more than `delta`, up or down. At least one reveal stays.

    Attributes:
        delta: The largest change, in logits.
    """

    delta: float  # in logits

    def __call__(self, networks: Runner, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """Refine `reveals` in place (see `Refinement`)."""
        queries = [(reveal, reveal.state) for reveal in reveals]
        residual = run_head(networks, rows, queries, residual=True)
        tokens = [(reveal.columns, reveal.token) for reveal in reveals]
        changes = networks.sampler.magnitudes(tokens, residual)
        for reveal, change in zip(reveals, changes, strict=True):
            stable = [column for column in reveal.columns if change[column] <= self.delta]
            reveal.keep(stable or [most_confident(reveal.columns, reveal.log_odds)], change)


@dataclass(frozen=True)
class RereadRemask:
    """The rule `reread`: keep the tokens in which the head is confident, both given all other kept
    tokens and given the most confident token alone.

    Under the rule `threshold`, two tokens that contradict each other both become masks again. Under
    this rule, only the least confident token below tau does. Then the head reads the remaining
    tokens again, until the confidence of every token, given the others, reaches tau. Tokens that
    are wrong together still support each other. So the head finally reads them given only the most
    confident token; a token whose confidence is then below `alone_threshold` becomes a mask again,
    too (`benchmarks/NOTES.md`, Remasking). A single token needs no head pass.

    Attributes:
        threshold: tau, in log-odds.
        alone_threshold: The log-odds of half of tau.
    """

    threshold: float  # tau, in log-odds
    alone_threshold: float  # the log-odds of half of tau

    def __call__(self, networks: Runner, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """Refine `reveals` in place (see `Refinement`)."""
        unsettled = [reveal for reveal in reveals if len(reveal.columns) > 1]
        while unsettled:  # most rows are settled by the first pass
            queries = [(reveal, reveal.columns) for reveal in unsettled]
            unsettled = []
            for reveal, log_odds in head_log_odds(networks, rows, queries):
                best = most_confident(reveal.columns, log_odds)
                doubtful = [
                    column
                    for column in reveal.columns
                    if column != best and log_odds[column] < self.threshold
                ]
                worst = min(doubtful, key=log_odds.__getitem__, default=None)
                reveal.keep([column for column in reveal.columns if column != worst], log_odds)
                if doubtful and len(reveal.columns) > 1:
                    unsettled.append(reveal)
        queries = []
        for reveal in reveals:
            if len(reveal.columns) > 1:
                queries.append((reveal, (most_confident(reveal.columns, reveal.log_odds),)))
        if not queries:
            return
        outputs = head_log_odds(networks, rows, queries)
        for (_, (best,)), (reveal, log_odds) in zip(queries, outputs, strict=True):
            reveal.columns = tuple(
                [
                    column
                    for column in reveal.columns
                    if column == best or log_odds[column] >= self.alone_threshold
                ]
            )
