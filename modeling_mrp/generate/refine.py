"""Refinements: what the head changes about a reveal before it counts, for rows that draft nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..networks.networks import Hidden, Networks
from ..rules.reveal import Columns, surest
from ..rules.state import Frontier, Row, Scores, State


@dataclass
class Reveal:
    """The reveal of one row that is refined.

    Attributes:
        row: Whose it is.
        at: Its place in the batch.
        state: The state before the reveal.
        where: Columns that are revealed.
        token, odds: By column, as in `Scores`; NaN where what was asked of the head is no number.
        hidden: h_A at the state, or what the head has made of it.
        drawn: Of columns that the head revealed its state, and what it read there.
    """

    row: Row
    at: int
    state: State
    where: Columns
    token: list[int]
    odds: list[float]
    hidden: Hidden
    drawn: dict[int, tuple[State, Hidden]] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Row, at: int, frontier: Frontier) -> "Reveal":
        """Begin with what the backbone reveals at a row's frontier."""
        scores = frontier.scores
        assert scores.hidden is not None
        return cls(row, at, frontier.state, frontier.where, list(scores.token), list(scores.odds), scores.hidden)

    def frontier(self, before: Frontier) -> Frontier:
        """Make the frontier of what is left."""
        said = Scores(self.token, self.odds, hidden=before.scores.hidden)
        return Frontier(before.state, said, self.where, before.memo, self.shown(self.where), self.drawn)

    def shown(self, where: Sequence[int]) -> State:
        """The state with the reveal at some columns, for the head to read."""
        return self.row.after(self.state, where, self.token)

    def keep(self, where: Columns, odds: Sequence[float], asked: Sequence[int]) -> None:
        """Go on with the reveal at fewer columns; a column whose number was `asked` for and is NaN has no score."""
        self.where = where
        for column in asked:
            if odds[column] != odds[column]:
                self.odds[column] = odds[column]


class Refinement(Protocol):
    """A change of reveals before they count: a frozen dataclass of its numbers."""

    def __call__(self, networks: Networks, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """Change the reveals of some of the batch's rows in place."""
        ...


def ask(networks: Networks, rows: Sequence[Row], asked: list[tuple[Reveal, State]], residual: bool = False) -> list[Hidden]:
    """Run one head pass at a state of each of some rows; h_A + h_C there, or h_C."""
    given: list[list[tuple[State, Hidden]]] = [[] for _ in rows]
    for reveal, state in asked:
        given[reveal.at].append((state, reveal.hidden))
    made = networks.head(rows, given, residual)
    return [made[reveal.at][0] for reveal, _ in asked]


def belief(networks: Networks, rows: Sequence[Row], reveals: list[Reveal], given: list[Sequence[int]]) -> list[list[float]]:
    """Ask the head for the log-odds of revealed tokens under those at the columns `given`: of each [block], -inf elsewhere.

    At a token that is itself given, a trained head says what the backbone would if this one token were still masked.
    """
    hidden = ask(networks, rows, [(reveal, reveal.shown(where)) for reveal, where in zip(reveals, given, strict=True)])
    return networks.token_odds([(reveal.row, reveal.state, reveal.where, reveal.token) for reveal in reveals], hidden)


def kept(reveal: Reveal, passed: Sequence[int], believed: Sequence[float]) -> Columns:
    """The columns that passed, or the most believed one where none did."""
    return tuple(passed) or (surest(reveal.where, believed),)


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
            picked = networks.picked(networks.picker, [(reveal.row, state) for reveal, state in after], hidden)
            for (reveal, state), scores, estimate in zip(after, picked, hidden, strict=True):
                best = surest(state.free, scores.odds)
                reveal.where = tuple(sorted((*reveal.where, best)))
                reveal.token[best], reveal.odds[best], reveal.hidden = scores.token[best], scores.odds[best], estimate
                reveal.drawn[best] = state, estimate


@dataclass(frozen=True)
class ThresholdRemask:
    """The published rule of `mrp_remask`: the head is conditioned on all the fresh reveals, and a token whose corrected
    confidence falls under tau goes back to a mask (MRP, arXiv 2605.18817). At least one reveal stays, under every rule.

    Attributes:
        threshold: tau, in log-odds.
    """

    threshold: float

    def __call__(self, networks: Networks, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """See `Refinement`."""
        asked: list[Sequence[int]] = [reveal.where for reveal in reveals]
        for reveal, odds in zip(reveals, belief(networks, rows, reveals, asked), strict=True):
            passed = [column for column in reveal.where if odds[column] >= self.threshold]
            reveal.keep(kept(reveal, passed, odds), odds, reveal.where)


@dataclass(frozen=True)
class ResidualRemask:
    """The rule `residual` of the released code: the head reads the state before the reveal, and a token whose own logit it
    moves by more than `delta` in magnitude goes back.

    Attributes:
        delta: In logits.
    """

    delta: float

    def __call__(self, networks: Networks, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """See `Refinement`."""
        residual = ask(networks, rows, [(reveal, reveal.state) for reveal in reveals], residual=True)
        for reveal, moved in zip(reveals, networks.magnitudes([(r.where, r.token) for r in reveals], residual), strict=True):
            passed = [column for column in reveal.where if moved[column] <= self.delta]
            reveal.keep(kept(reveal, passed, reveal.odds), moved, reveal.where)


@dataclass(frozen=True)
class RereadRemask:
    """The rule `reread`: what stays is believed under all the rest of it, and is no mere echo of it.

    Under `threshold` two reveals that contradict each other both go back. Here only the least believed one under tau does;
    then the head reads again what is left, until every token is believed under the others. Tokens that are wrong together
    still speak up for each other, so the head at last reads them under the surest alone: one whose confidence there is under
    `alone` goes back as well (`benchmarks/NOTES.md`, Remasking). A row with a single reveal asks the head nothing.

    Attributes:
        threshold: tau, in log-odds.
        alone: What a token needs under the surest one alone, in log-odds: those of half of tau.
    """

    threshold: float
    alone: float

    def __call__(self, networks: Networks, rows: Sequence[Row], reveals: list[Reveal]) -> None:
        """See `Refinement`."""
        unsettled = [reveal for reveal in reveals if len(reveal.where) > 1]
        while unsettled:  # most rows are settled by the first pass
            asked: list[Sequence[int]] = [reveal.where for reveal in unsettled]
            going = []
            for reveal, odds in zip(unsettled, belief(networks, rows, unsettled, asked), strict=True):
                best = surest(reveal.where, odds)
                doubted = [column for column in reveal.where if column != best and odds[column] < self.threshold]
                least = min(doubted, key=lambda column: odds[column], default=None)
                reveal.keep(tuple([one for one in reveal.where if one != least]), odds, reveal.where)
                if doubted and len(reveal.where) > 1:
                    going.append(reveal)
            unsettled = going
        if several := [reveal for reveal in reveals if len(reveal.where) > 1]:
            best_of = [surest(reveal.where, reveal.odds) for reveal in several]
            for reveal, best, odds in zip(
                several, best_of, belief(networks, rows, several, [(b,) for b in best_of]), strict=True
            ):
                reveal.where = tuple([one for one in reveal.where if one == best or odds[one] >= self.alone])


__all__ = ["Direct", "Refinement", "RereadRemask", "ResidualRemask", "Reveal", "ThresholdRemask"]
