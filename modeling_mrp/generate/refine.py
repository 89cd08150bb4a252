"""Refinements: how the head changes a step's reveals before they are written, for rows without
drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..networks.runner import Runner
from ..networks.sampler import Hidden
from ..rules.reveal import Columns, most_confident
from ..rules.state import PendingReveal, Row, Scores, State


class Reveal:
    """A row's pending reveal while the head refines it, starting from the backbone's.

    Attributes:
        row, index: The row of text, and its index in the batch.
        pending: The row's pending reveal before the refinement.
        state: Its state, before the reveal.
        columns: Columns to reveal.
        token, log_odds: By column, as in `Scores`; NaN where the head's estimate is NaN.
        hidden: Hidden states h_A of the state, or the head's latest estimate for a state after it.
        drawn: By column that the head revealed, the state and the hidden states from which its
            token was picked.
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
        """Make the state that results from revealing this reveal's tokens at `columns`, for the
        head to read."""
        return self.row.successor(self.state, columns, self.token)

    def keep(self, columns: Sequence[int], estimates: Sequence[float]) -> None:
        """Reduce the reveal to `columns`, after setting log-odds to NaN where the head's
        `estimates` of its columns are NaN."""
        for column in self.columns:
            if estimates[column] != estimates[column]:
                self.log_odds[column] = estimates[column]
        self.columns = tuple(columns)

    def refined_reveal(self) -> PendingReveal:
        """Make the pending reveal of the columns that remain; count the re-masked columns, and list
        them in its `remasked`."""
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
    """Refine the pending reveals of a batch's rows; return them refined, by
    row."""
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
    """Run one head pass at one state per reveal; return h_A + h_C at each, or h_C alone if
    `residual`."""
    inputs: list[list[tuple[State, Hidden]]] = [[] for _ in rows]
    for reveal, state in queries:
        inputs[reveal.index].append((state, reveal.hidden))
    outputs = networks.head(rows, inputs, residual)
    return [outputs[reveal.index][0] for reveal, _ in queries]


def head_log_odds(
    networks: Runner, rows: Sequence[Row], queries: Sequence[tuple[Reveal, Columns]]
) -> list[tuple[Reveal, list[float]]]:
    """Compute with the head the log-odds [block] of each reveal's tokens, given its tokens at the
    query's columns; -inf elsewhere.

    For a token at one of these columns, a trained head estimates the backbone's log-odds with this
    token alone still masked.
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
    """`mrp_direct`: after each backbone step the head reveals more columns, one at a time,
    unverified (MRP, section 5)."""

    head_reveals: int

    def __call__(self, networks: Runner, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """See `Refinement`."""
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
    """The published rule of `mrp_remask`: re-mask tokens whose corrected confidence falls below
    tau.

    The head is conditioned on all the fresh reveals; a token whose corrected confidence is below
    tau becomes a mask again (MRP, arXiv 2605.18817). At least one reveal stays, under every
    remasking rule.
    """

    threshold: float  # tau, in log-odds

    def __call__(self, networks: Runner, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """See `Refinement`."""
        queries = [(reveal, reveal.columns) for reveal in reveals]
        for reveal, log_odds in head_log_odds(networks, rows, queries):
            confident = [column for column in reveal.columns if log_odds[column] >= self.threshold]
            reveal.keep(confident or [most_confident(reveal.columns, log_odds)], log_odds)


@dataclass(frozen=True)
class ResidualRemask:
    """The rule `residual` of the released code: re-mask tokens whose logits the head changes by
    much.

    The head reads the state before the reveal; a token goes back if its logit changes by more than
    `delta`, up or down.
    """

    delta: float  # in logits

    def __call__(self, networks: Runner, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """See `Refinement`."""
        queries = [(reveal, reveal.state) for reveal in reveals]
        residual = run_head(networks, rows, queries, residual=True)
        tokens = [(reveal.columns, reveal.token) for reveal in reveals]
        changes = networks.sampler.magnitudes(tokens, residual)
        for reveal, change in zip(reveals, changes, strict=True):
            stable = [column for column in reveal.columns if change[column] <= self.delta]
            reveal.keep(stable or [most_confident(reveal.columns, reveal.log_odds)], change)


@dataclass(frozen=True)
class RereadRemask:
    """The rule `reread`: keep the tokens in which the head is confident given all other kept ones,
    and given the most confident one alone.

    Under `threshold`, two tokens that contradict each other both go back. Here only the least
    confident token below tau does; then the head reads the remaining tokens again, until every
    token's confidence given the others reaches tau. Tokens that are wrong together still support
    each other, so the head finally reads them given the most confident one alone: a token whose
    confidence is then below `alone_threshold` goes back, too (`benchmarks/NOTES.md`, Remasking). A
    single token needs no head pass.
    """

    threshold: float  # tau, in log-odds
    alone_threshold: float  # the log-odds of half of tau

    def __call__(self, networks: Runner, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """See `Refinement`."""
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
