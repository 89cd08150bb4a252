"""Draft sources: they propose tokens for masked columns, and the order in which columns are likely
to be revealed.

Scores provide both: a token for each column, and log-odds that tell how soon the rule will reveal
the column. These are the backbone's scores of the last accepted state or of a remembered state, or
the head's estimate of such scores. Another source, such as `PromptLookup`, may provide tokens only.
It is used if the rule reveals from left to right, and also where there are no scores, as in a block
that has just been opened. Elsewhere a column is revealed because its scored token is nearly
certain, so other tokens only make drafts worse (`benchmarks/NOTES.md`, Prompt lookup).

A draft never changes the text, so a source may propose anything.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Protocol

from .reveal import sigmoid
from .state import Row, State

# Added to a scored token's log-odds where other tokens compete with it: a draft's path is followed
# only as long as it has come true, and then its next token is right more often than its score says.
TRUST = 2.0
UNKNOWN = -1  # in place of a token


@dataclass(frozen=True)
class Candidates:
    """The proposal of a source at one state.

    Attributes:
        tokens: Maps masked columns (indices in the block) to tokens that may stand there, each with
            its probability from 0 to 1. A column about which the source knows nothing is left out.
        log_odds: For each column of the block, an estimate of the log-odds by which a rule chooses
            columns: columns with higher values are revealed sooner. None if the source has no
            estimate. Used only where there are no scores.
    """

    tokens: Mapping[int, Sequence[tuple[int, float]]]
    log_odds: Sequence[float] | None = None


class DraftSource(Protocol):
    """Proposes tokens for drafts. Any object with a method `propose` can be passed in
    `generate(draft_sources=[...])`."""

    def propose(self, row: Row, state: State, parent: State | None) -> Candidates | None:
        """Propose tokens at the masked columns of a state; return None for no proposal.

        Args:
            row: The row that drafts. Its `text` before `row.state.start` is final.
            state: A drafted state. Its `ids` include masks; its `free` are the columns that may be
                revealed, at least one.
            parent: A drafted block without masks that comes before the state's block, if `row.text`
                does not hold that block yet; else None.
        """


@dataclass(frozen=True)
class CheckedSource:
    """A user's source of drafts. Each of its proposals is checked; a malformed one, or one with a
    token that the model does not have, raises `ValueError`.

    Attributes:
        source: The user's source.
        vocab_size, mask_id: Vocabulary size and mask id of the model; the mask id must not be
            proposed.
    """

    source: DraftSource
    vocab_size: int
    mask_id: int

    def propose(self, row: Row, state: State, parent: State | None) -> Candidates | None:
        """Return the proposal of the user's source (`DraftSource.propose`), which may be None.
        Raise `ValueError` if it is not like `Candidates`, or if one of its columns, token ids,
        probabilities or its number of `log_odds` is out of range."""
        candidates = self.source.propose(row, state, parent)
        if candidates is None:
            return None
        name, size = type(self.source).__name__, len(state.ids)
        if not isinstance(getattr(candidates, "tokens", None), Mapping):
            raise ValueError(
                f"{name}.propose gave a {type(candidates).__name__}: give Candidates(tokens), or "
                "None"
            )
        if candidates.log_odds is not None and len(candidates.log_odds) != size:
            raise ValueError(
                f"{name}.propose gave {len(candidates.log_odds)} log_odds: give one for each of "
                f"the {size} columns of a block, or None"
            )
        for column, tokens in candidates.tokens.items():
            for token, chance in tokens:
                known = isinstance(token, Integral) and 0 <= token < self.vocab_size
                known = known and token != self.mask_id
                if column not in range(size) or not known or not 0 <= chance <= 1:
                    raise ValueError(
                        f"{name}.propose gave token {token} with chance {chance} at column "
                        f"{column}: give ids below {self.vocab_size} other than the mask's "
                        f"({self.mask_id}), chances from 0 to 1, and columns below {size}"
                    )
        return candidates


@dataclass(slots=True)
class Guess:
    """A guess of the reveals at a state, combined from all sources.

    Attributes:
        token: For each column, the likeliest token.
        log_odds: For each column, log-odds that are higher if the column is likely to be revealed
            sooner.
        rivals: Maps each column with several possible tokens to these tokens, each with its chance,
            in order of decreasing chance. The first is the column's `token`. The chances of a
            column add up to 1.
    """

    token: Sequence[int]
    log_odds: Sequence[float]
    rivals: Mapping[int, Sequence[tuple[int, float]]]


def combined(
    state: State,
    scored: tuple[Sequence[int], Sequence[float]] | None,
    candidates: Sequence[Candidates],
    left_to_right: bool,
) -> Guess | None:
    """Combine the proposals of all sources at a state; return None if no source knows the order of
    reveals.

    Args:
        state: The state.
        scored: The tokens and the log-odds of the state's scores, both by column; None if there are
            no scores.
        candidates: The proposals of other sources, at least one.
        left_to_right: Whether the rule reveals from left to right, whatever the log-odds are.
    """
    if scored is not None:
        token, log_odds = scored
    else:
        orders = [proposal.log_odds for proposal in candidates if proposal.log_odds is not None]
        if not (orders or left_to_right):
            return None
        token = [UNKNOWN] * len(state.ids)
        log_odds = orders[0] if orders else [0.0] * len(state.ids)
    token = list(token)
    rivals: dict[int, list[tuple[int, float]]] = {}
    for column in state.free:
        chances = {} if scored is None else {token[column]: sigmoid(log_odds[column] + TRUST)}
        for proposal in candidates:
            for proposed, chance in proposal.tokens.get(column, ()):
                chances[proposed] = max(chance, chances.get(proposed, 0.0))
        total = sum(chances.values())
        if chances and not (len(chances) == 1 and scored is not None):
            ranked = sorted(chances.items(), key=lambda entry: -entry[1])
            token[column] = ranked[0][0]
            if len(ranked) > 1 and total > 0:
                rivals[column] = [(rival, chance / total) for rival, chance in ranked]
    return Guess(token, log_odds, rivals)
