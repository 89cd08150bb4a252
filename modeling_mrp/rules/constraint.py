"""Constraints on a text (`Constraint`): which tokens the masked columns of a state may take so that
the text can still be completed."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol


class TokenSet(Protocol):
    """A set of token ids. Of the objects in use, no two hold the same ids.

    Attributes:
        only: The id in the set if there is exactly one; else None.
    """

    only: int | None

    def is_member(self) -> Any:
        """Return a bool array [vocab] of numpy: whether each token id belongs to the set."""


class Constraint(ABC):
    """Decides which tokens one row may reveal.

    The decision is a function of a state and an *origin*, which is the knowledge at the start of
    the state's block. So it applies to drafted states as to any others, whatever the order of
    reveals.

    An origin is a hashable value. The attribute `first` is the origin of a text without tokens. The
    methods take a block as `start`, its position in the text, and `ids`, its token ids, masks
    included.
    """

    first: Any

    @abstractmethod
    def advance(self, origin: Any, start: int, ids: Sequence[int]) -> Any:
        """Return the origin of the block that follows the given block. Return None if the given
        block has masks, or cannot be part of a text."""

    @abstractmethod
    def allowed(
        self, origin: Any, start: int, ids: tuple[int, ...], columns: Sequence[int]
    ) -> list[TokenSet | None]:
        """Return, for each of the masked `columns` of a state, the set of tokens that it may take.
        Each column is considered alone. None stands for all tokens."""

    @abstractmethod
    def is_possible(self, origin: Any, start: int, ids: tuple[int, ...]) -> bool:
        """Return whether a text that contains the given state can still be completed."""

    def forced(
        self, origin: Any, start: int, ids: tuple[int, ...], columns: Sequence[int]
    ) -> dict[int, int]:
        """Map each of the masked `columns` that can take only one token to that token."""
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
        """Return the columns of a reveal with which the text can still be completed.

        Columns are tried in order of decreasing confidence. A column is kept if the text can still
        be completed with it and with the columns kept before it.

        Args:
            origin: The origin of the state's block.
            key: The key of the state before the reveal.
            columns: Columns that the rule reveals.
            token, log_odds: [block], for each column, the picked token and its log-odds.
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
