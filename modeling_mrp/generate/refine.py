"""Refinements: how the head changes a step's reveals before they are written, for rows that draft
nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..networks.networks import Hidden, Networks
from ..rules.reveal import Columns, surest
from ..rules.state import Frontier, Row, Scores, State


class Reveal:
    """A reveal of one row while the head refines it, starting from the backbone's reveal at the
    row's frontier.

    Attributes:
        row, at: The row, and its index in the batch.
        before: The row's frontier.
        state: The frontier's state, before the reveal.
        where: Columns to reveal.
        token, log_odds: By column, as in `Scores`; NaN where the head's number for a column is NaN.
        hidden: Hidden states h_A of the state, or the head's latest estimate for a state after it.
        drawn: By column that the head revealed, the state and the hidden states from which its
            token was picked.
    """

    def __init__(self, row: Row, at: int, frontier: Frontier) -> None:
        scores = frontier.scores
        assert scores.hidden is not None
        self.row, self.at, self.before, self.state, self.where = (
            row,
            at,
            frontier,
            frontier.state,
            frontier.where,
        )
        self.token, self.log_odds, self.hidden = (
            list(scores.token),
            list(scores.odds),
            scores.hidden,
        )
        self.drawn: dict[int, tuple[State, Hidden]] = {}

    def shown(self, where: Sequence[int]) -> State:
        """Make the state that results from revealing this reveal's tokens at the columns `where`,
        for the head to read."""
        return self.row.after(self.state, where, self.token)

    def keep(self, passed: Sequence[int], asked: Sequence[float]) -> None:
        """Set log-odds at `where` to NaN where the head's numbers `asked` are NaN, and then reduce
        `where` to `passed`."""
        for column in self.where:
            if asked[column] != asked[column]:
                self.log_odds[column] = asked[column]
        self.where = tuple(passed)

    def frontier(self) -> Frontier:
        """Make the frontier of the columns that remain; count those put back to masks, and list
        them in its `remasked`."""
        before = self.before
        back = tuple([column for column in before.where if column not in self.where])
        self.row.counts.revoked += len(back)
        said = Scores(self.token, self.log_odds, hidden=before.scores.hidden)
        return Frontier(
            before.state, said, self.where, before.memo, self.shown(self.where), self.drawn, back
        )


# A frozen dataclass of its parameters; a call changes the reveals of some rows of the batch in
# place, before they are written.
Refinement = Callable[[Networks, Sequence[Row], list[Reveal]], None]


def refined(
    refine: Refinement,
    networks: Networks,
    rows: Sequence[Row],
    frontiers: Sequence[Frontier | None],
) -> list[Frontier | None]:
    """Refine the reveals at the frontiers of a batch's rows; return the refined frontiers, by
    row."""
    reveals = [
        Reveal(row, at, one)
        for at, (row, one) in enumerate(zip(rows, frontiers, strict=True))
        if one
    ]
    if reveals:
        refine(networks, rows, reveals)
    made: list[Frontier | None] = [None] * len(rows)
    for reveal in reveals:
        made[reveal.at] = reveal.frontier()
    return made


def ask(
    networks: Networks,
    rows: Sequence[Row],
    asked: list[tuple[Reveal, State]],
    residual: bool = False,
) -> list[Hidden]:
    """Run one head pass at one state per reveal; return h_A + h_C at each, or h_C alone if
    `residual`."""
    given: list[list[tuple[State, Hidden]]] = [[] for _ in rows]
    for reveal, state in asked:
        given[reveal.at].append((state, reveal.hidden))
    made = networks.head(rows, given, residual)
    return [made[reveal.at][0] for reveal, _ in asked]


def belief(
    networks: Networks, rows: Sequence[Row], asked: Sequence[tuple[Reveal, Columns]]
) -> list[tuple[Reveal, list[float]]]:
    """Compute by the head the log-odds [block] of each reveal's tokens given its tokens at some
    columns, -inf elsewhere.

    For a token that is itself given, a trained head estimates what the backbone would say with this
    token alone still masked.
    """
    hidden = ask(networks, rows, [(reveal, reveal.shown(given)) for reveal, given in asked])
    found = networks.token_odds(
        [(one.row, one.state, one.where, one.token) for one, _ in asked], hidden
    )
    return [(reveal, believed) for (reveal, _), believed in zip(asked, found, strict=True)]


@dataclass(frozen=True)
class Direct:
    """`mrp_direct`: after each backbone step the head reveals more columns, one at a time,
    unverified (MRP, section 5)."""

    head_reveals: int

    def __call__(self, networks: Networks, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """See `Refinement`."""
        for _ in range(self.head_reveals):
            after = [
                (reveal, state) for reveal in reveals if (state := reveal.shown(reveal.where)).free
            ]
            if not after:
                return
            hidden = ask(networks, rows, after)
            scored = networks.pick(
                networks.picker, [(reveal.row, state) for reveal, state in after], hidden
            )
            for (reveal, state), scores, estimate in zip(after, scored, hidden, strict=True):
                best = surest(state.free, scores.odds)
                reveal.where = tuple(sorted((*reveal.where, best)))
                reveal.token[best], reveal.log_odds[best], reveal.hidden = (
                    scores.token[best],
                    scores.odds[best],
                    estimate,
                )
                reveal.drawn[best] = state, estimate


@dataclass(frozen=True)
class ThresholdRemask:
    """The published rule of `mrp_remask`: put tokens in which the head has little confidence back
    to masks.

    The head is conditioned on all the fresh reveals; a token whose corrected confidence is below
    tau becomes a mask again (MRP, arXiv 2605.18817). At least one reveal stays, under every
    remasking rule.
    """

    threshold: float  # tau, in log-odds

    def __call__(self, networks: Networks, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """See `Refinement`."""
        for reveal, believed in belief(
            networks, rows, [(reveal, reveal.where) for reveal in reveals]
        ):
            passed = [column for column in reveal.where if believed[column] >= self.threshold]
            reveal.keep(passed or [surest(reveal.where, believed)], believed)


@dataclass(frozen=True)
class ResidualRemask:
    """The rule `residual` of the released code: put tokens back to masks if the head changes their
    logits by much.

    The head reads the state before the reveal; a token goes back if its logit changes by more than
    `delta`, up or down.
    """

    delta: float  # in logits

    def __call__(self, networks: Networks, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """See `Refinement`."""
        residual = ask(
            networks, rows, [(reveal, reveal.state) for reveal in reveals], residual=True
        )
        for reveal, moved in zip(
            reveals,
            networks.magnitudes([(r.where, r.token) for r in reveals], residual),
            strict=True,
        ):
            passed = [column for column in reveal.where if moved[column] <= self.delta]
            reveal.keep(passed or [surest(reveal.where, reveal.log_odds)], moved)


@dataclass(frozen=True)
class RereadRemask:
    """The rule `reread`: keep the tokens that the head believes given all other kept ones and given
    the surest one alone.

    Under `threshold`, two tokens that contradict each other both go back. Here only the least
    believed token below tau does; then the head reads the rest again, until every token's
    confidence given the others reaches tau. Tokens that are wrong together still support each
    other, so the head finally reads them given the most confident one alone: a token whose
    confidence is then below `alone` goes back, too (`benchmarks/NOTES.md`, Remasking). A single
    token needs no head pass.
    """

    threshold: float  # tau, in log-odds
    alone: float  # the log-odds of half of tau

    def __call__(self, networks: Networks, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """See `Refinement`."""
        unsettled = [reveal for reveal in reveals if len(reveal.where) > 1]
        while unsettled:  # most rows are settled by the first pass
            going = []
            for reveal, believed in belief(
                networks, rows, [(reveal, reveal.where) for reveal in unsettled]
            ):
                best = surest(reveal.where, believed)
                doubted = [
                    column
                    for column in reveal.where
                    if column != best and believed[column] < self.threshold
                ]
                least = min(doubted, key=believed.__getitem__, default=None)
                reveal.keep([one for one in reveal.where if one != least], believed)
                if doubted and len(reveal.where) > 1:
                    going.append(reveal)
            unsettled = going
        several = [
            (reveal, (surest(reveal.where, reveal.log_odds),))
            for reveal in reveals
            if len(reveal.where) > 1
        ]
        for (_, (best,)), (reveal, believed) in zip(
            several, belief(networks, rows, several) if several else (), strict=True
        ):
            reveal.where = tuple(
                [one for one in reveal.where if one == best or believed[one] >= self.alone]
            )
