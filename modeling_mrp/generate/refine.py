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

        `estimates` has what the head computed for each column of the block: log-odds, or the size
        of a change of a logit. Where this is NaN at a column of the reveal, the log-odds of the
        token there become NaN, too. An attempt to write such a token raises `UnscoredError`.
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
    """Run one head pass at some states of the batch.

    Args:
        networks: Runs the head.
        rows: The rows of the batch.
        queries: Pairs of a row's reveal and the state that the head reads, at most one per row. The
            head starts from the hidden states `Reveal.hidden`.
        residual: Whether to return the head's output h_C alone.

    Returns:
        For each query, the estimated hidden states h_A + h_C of its state (h_C if `residual`), in
        the form of `Scores.hidden`: a tensor, and the index of the state in it.
    """
    inputs: list[list[tuple[State, Hidden]]] = [[] for _ in rows]
    for reveal, state in queries:
        inputs[reveal.index].append((state, reveal.hidden))
    outputs = networks.head(rows, inputs, residual)
    return [outputs[reveal.index][0] for reveal, _ in queries]


def head_log_odds(
    networks: Runner, rows: Sequence[Row], queries: Sequence[tuple[Reveal, Columns]]
) -> list[tuple[Reveal, list[float]]]:
    """Compute with the head the log-odds of the tokens of reveals.

    For a token at one of the columns that the head sees, a trained head estimates the log-odds that
    the backbone would give if this token alone were still masked.

    Args:
        networks: Runs the head.
        rows: The rows of the batch.
        queries: Pairs of a row's reveal and some of its columns. The head reads the state in which
            the reveal's tokens stand at just these columns.

    Returns:
        For each query, its reveal and a list [block] of log-odds: those of the reveal's token at
        each of its columns, also those that the head does not see; -inf at all other columns.
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

    The object is called with the reveals of a batch (`Reveal`), and adds columns to them in place.

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
    the other reveals of the step, is below the probability tau.

    The head reads the state after all reveals of the step (MRP, arXiv 2605.18817). If all tokens
    are below tau, the most confident one stays. The object is called with the reveals of a batch
    (`Reveal`), and removes columns from them in place.

    Attributes:
        threshold: The log-odds of tau.
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
    more than `delta`, up or down. If all do, the token in which the backbone is most confident
    stays. The object is called with the reveals of a batch (`Reveal`), and removes columns from
    them in place.

    Attributes:
        delta: The largest change, in logits, with which a token stays.
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
    tokens and given the most confident token alone. Confidence is a probability here.

    1. The head reads all tokens of the step. If its confidence in any but the most confident one is
       below tau, the least confident token becomes a mask again, and the head reads the rest. This
       is repeated until no such token is left. So of two tokens that contradict each other, one
       stays, while the rule `threshold` masks both.
    2. Tokens that are wrong together still support each other. So the head reads the state with
       only the token in which the backbone is most confident. Each other token whose confidence is
       then below tau / 2 becomes a mask again, too (`benchmarks/NOTES.md`, Remasking).

    A single token stays without a head pass. The object is called with the reveals of a batch
    (`Reveal`), and removes columns from them in place.

    Attributes:
        threshold: The log-odds of tau.
        alone_threshold: The log-odds of tau / 2.
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
