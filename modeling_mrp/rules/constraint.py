"""Constraints on a text (`Constraint`): the tokens that a state's masked columns may take, so that
the text can still be completed."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol


class TokenSet(Protocol):
    """A set of token ids; two objects in use never hold the same ids.

    Attributes:
        only: The id of a set with a single id; else None.
    """

    only: int | None

    def is_member(self) -> Any:
        """Return the membership by id, a numpy array [vocab] bool."""


class Constraint(ABC):
    """Decides which tokens one row may reveal. It is a function of a state and an *origin*: the
    knowledge at the start of the state's block. So it applies to drafted states as to others, in
    any order of reveals.

    An origin is a hashable value; `first` is the origin of a text without tokens. Blocks are given
    by their position `start` and their ids, masks included.
    """

    first: Any

    @abstractmethod
    def advance(self, origin: Any, start: int, ids: Sequence[int]) -> Any:
        """Return the origin of the next block; None if this block has masks, or cannot be part of a
        text."""

    @abstractmethod
    def allowed(
        self, origin: Any, start: int, ids: tuple[int, ...], columns: Sequence[int]
    ) -> list[TokenSet | None]:
        """List the tokens that each masked column of a state may take, considered alone; None: all
        of them."""

    @abstractmethod
    def is_possible(self, origin: Any, start: int, ids: tuple[int, ...]) -> bool:
        """Return whether a text with this state can still be completed."""

    def forced(
        self, origin: Any, start: int, ids: tuple[int, ...], columns: Sequence[int]
    ) -> dict[int, int]:
        """Find the masked columns that can take only one token, and return these tokens."""
        tokens = {}
        allowed = self.allowed(origin, start, ids, columns)
        for column, token_set in zip(columns, allowed, strict=True):
            if token_set is not None and token_set.only is not None:
                tokens[column] = token_set.only
        return tokens

    def possible_part(
        self,
        origin: Any,
        key: tuple[int, tuple[int, ...]],
        columns: Sequence[int],
        token: Sequence[int],
        log_odds: Sequence[float],
    ) -> tuple[int, ...]:
        """Select columns of a reveal by falling confidence, keeping a column if the text can still
        be completed.

        Args:
            origin, key: The state before the reveal.
            columns: Columns that the rule reveals.
            token, log_odds: [block], the token picked at each column, and its log-odds.
        """
        start, ids = key
        revealed = list(ids)
        for column in columns:
            revealed[column] = token[column]
        if self.is_possible(origin, start, tuple(revealed)):
            return tuple(columns)
        revealed = list(ids)
        selected = []
        for column in sorted(columns, key=lambda column: -log_odds[column]):
            revealed[column] = token[column]
            if self.is_possible(origin, start, tuple(revealed)):
                selected.append(column)
            else:
                revealed[column] = ids[column]
        return tuple(sorted(selected))
