"""Refinements: what the head changes about a reveal before it counts, for rows that draft nothing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..networks.networks import Hidden, Networks
from ..rules.reveal import Columns, surest
from ..rules.state import Frontier, Row, Scores, State


class Reveal:
    """The reveal of one row that is refined; it begins as what the backbone reveals at the row's frontier.

    Attributes:
        row, at: Whose it is, and the row's place in the batch.
        before: That frontier.
        state: Its state, before the reveal.
        where: Columns that are revealed.
        token, log_odds: By column, as in `Scores`; NaN where what was asked of the head is no number.
        hidden: h_A at the state, or what the head has made of it.
        drawn: Of columns that the head revealed its state, and what it read there.
    """

    def __init__(self, row: Row, at: int, frontier: Frontier) -> None:
        scores = frontier.scores
        assert scores.hidden is not None
        self.row, self.at, self.before, self.state, self.where = row, at, frontier, frontier.state, frontier.where
        self.token, self.log_odds, self.hidden = list(scores.token), list(scores.odds), scores.hidden
        self.drawn: dict[int, tuple[State, Hidden]] = {}

    def shown(self, where: Sequence[int]) -> State:
        """Make the state in which the given columns hold this reveal's tokens, for the head to read."""
        return self.row.after(self.state, where, self.token)

    def keep(self, passed: Sequence[int], asked: Sequence[float]) -> None:
        """Go on with columns that passed; of those before, one where the number that was `asked` for is NaN has no score."""
        for column in self.where:
            if asked[column] != asked[column]:
                self.log_odds[column] = asked[column]
        self.where = tuple(passed)

    def frontier(self) -> Frontier:
        """Make the frontier of what is left; it notes what is not."""
        before = self.before
        back = tuple([column for column in before.where if column not in self.where])
        self.row.counts.revoked += len(back)
        said = Scores(self.token, self.log_odds, hidden=before.scores.hidden)
        return Frontier(before.state, said, self.where, before.memo, self.shown(self.where), self.drawn, back)


# A change of reveals of some of the batch's rows, in place, before they count; a frozen dataclass of its numbers.
Refinement = Callable[[Networks, Sequence[Row], list[Reveal]], None]


def refined(
    refine: Refinement, networks: Networks, rows: Sequence[Row], frontiers: Sequence[Frontier | None]
) -> list[Frontier | None]:
    """Let the head change the reveals at the frontiers of a batch's rows."""
    reveals = [Reveal(row, at, one) for at, (row, one) in enumerate(zip(rows, frontiers, strict=True)) if one]
    if reveals:
        refine(networks, rows, reveals)
    made: list[Frontier | None] = [None] * len(rows)
    for reveal in reveals:
        made[reveal.at] = reveal.frontier()
    return made


def ask(networks: Networks, rows: Sequence[Row], asked: list[tuple[Reveal, State]], residual: bool = False) -> list[Hidden]:
    """Run one head pass at a state of each of some rows; h_A + h_C there, or h_C."""
    given: list[list[tuple[State, Hidden]]] = [[] for _ in rows]
    for reveal, state in asked:
        given[reveal.at].append((state, reveal.hidden))
    made = networks.head(rows, given, residual)
    return [made[reveal.at][0] for reveal, _ in asked]


def belief(
    networks: Networks, rows: Sequence[Row], asked: Sequence[tuple[Reveal, Columns]]
) -> list[tuple[Reveal, list[float]]]:
    """Ask the head for the log-odds of revealed tokens under those at some columns: of each [block], -inf elsewhere.

    At a token that is itself given, a trained head says what the backbone would if this one token were still masked.
    """
    hidden = ask(networks, rows, [(reveal, reveal.shown(given)) for reveal, given in asked])
    found = networks.token_odds([(one.row, one.state, one.where, one.token) for one, _ in asked], hidden)
    return [(reveal, believed) for (reveal, _), believed in zip(asked, found, strict=True)]


@dataclass(frozen=True)
class Direct:
    """`mrp_direct`: after each backbone step the head reveals one more column at a time, unverified (MRP, section 5)."""

    head_reveals: int

    def __call__(self, networks: Networks, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """See `Refinement`."""
        for _ in range(self.head_reveals):
            after = [(reveal, state) for reveal in reveals if (state := reveal.shown(reveal.where)).free]
            if not after:
                return
            hidden = ask(networks, rows, after)
            scored = networks.pick(networks.picker, [(reveal.row, state) for reveal, state in after], hidden)
            for (reveal, state), scores, estimate in zip(after, scored, hidden, strict=True):
                best = surest(state.free, scores.odds)
                reveal.where = tuple(sorted((*reveal.where, best)))
                reveal.token[best], reveal.log_odds[best], reveal.hidden = scores.token[best], scores.odds[best], estimate
                reveal.drawn[best] = state, estimate


@dataclass(frozen=True)
class ThresholdRemask:
    """The published rule of `mrp_remask`: the head is conditioned on all the fresh reveals, and a token whose corrected
    confidence falls under tau goes back to a mask (MRP, arXiv 2605.18817). At least one reveal stays, under every rule.
    """

    threshold: float  # tau, in log-odds

    def __call__(self, networks: Networks, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """See `Refinement`."""
        for reveal, believed in belief(networks, rows, [(reveal, reveal.where) for reveal in reveals]):
            passed = [column for column in reveal.where if believed[column] >= self.threshold]
            reveal.keep(passed or [surest(reveal.where, believed)], believed)


@dataclass(frozen=True)
class ResidualRemask:
    """The rule `residual` of the released code: the head reads the state before the reveal, and a token whose own logit it
    moves by more than `delta` in magnitude goes back.
    """

    delta: float  # in logits

    def __call__(self, networks: Networks, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """See `Refinement`."""
        residual = ask(networks, rows, [(reveal, reveal.state) for reveal in reveals], residual=True)
        for reveal, moved in zip(reveals, networks.magnitudes([(r.where, r.token) for r in reveals], residual), strict=True):
            passed = [column for column in reveal.where if moved[column] <= self.delta]
            reveal.keep(passed or [surest(reveal.where, reveal.log_odds)], moved)


@dataclass(frozen=True)
class RereadRemask:
    """The rule `reread`: what stays is believed under all the rest of it, and is no mere echo of it.

    Under `threshold` two reveals that contradict each other both go back. Here only the least believed one under tau does;
    then the head reads again what is left, until every token is believed under the others. Tokens that are wrong together
    still speak up for each other, so the head at last reads them under the surest alone: one whose confidence there is under
    `alone` goes back as well (`benchmarks/NOTES.md`, Remasking). A row with a single reveal asks the head nothing.
    """

    threshold: float  # tau, in log-odds
    alone: float  # the log-odds of half of tau

    def __call__(self, networks: Networks, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """See `Refinement`."""
        unsettled = [reveal for reveal in reveals if len(reveal.where) > 1]
        while unsettled:  # most rows are settled by the first pass
            going = []
            for reveal, believed in belief(networks, rows, [(reveal, reveal.where) for reveal in unsettled]):
                best = surest(reveal.where, believed)
                doubted = [column for column in reveal.where if column != best and believed[column] < self.threshold]
                least = min(doubted, key=believed.__getitem__, default=None)
                reveal.keep([one for one in reveal.where if one != least], believed)
                if doubted and len(reveal.where) > 1:
                    going.append(reveal)
            unsettled = going
        several = [(reveal, (surest(reveal.where, reveal.log_odds),)) for reveal in reveals if len(reveal.where) > 1]
        for (_, (best,)), (reveal, believed) in zip(several, belief(networks, rows, several) if several else (), strict=True):
            reveal.where = tuple([one for one in reveal.where if one == best or believed[one] >= self.alone])
