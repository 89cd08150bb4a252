"""Constraints on a text (`Constraint`): which tokens the masked columns of a state may take so that
the text can still be completed."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol


class TokenSet(Protocol):
    """A set of token ids, hashed and compared as an object, not by its ids.

    Attributes:
        only: The id in the set if there is exactly one, or the first eos if all ids are eos; else
            None.
    """

    only: int | None

    def is_member(self) -> Any:
        """Return a bool array [vocab] of numpy: whether each token id belongs to the set."""


class Constraint(ABC):
    """Decides which tokens one row may reveal, given a state and an *origin*: a hashable value that
    sums up the text before the state's block.

    The decision depends on nothing else. So it applies to drafted states as to any others, whatever
    the order of reveals.

    The attribute `first` is the origin of every block before which there is no new token; for later
    blocks, `advance` makes it. The methods take a block as `start`, its position in the text, and
    `ids`, its token ids, masks included.
    """

    first: Any

    @abstractmethod
    def advance(self, origin: Any, start: int, ids: Sequence[int]) -> Any:
        """Return the origin of the next block, given a block and its origin. Return None if the
        given block has masks, is not allowed or, in a `GrammarConstraint`, ends the text.

        Args:
            origin: The origin of the given block.
            start: The position in the text where the block begins.
            ids: The token ids of the block.
        """

    @abstractmethod
    def allowed(
        self, origin: Any, start: int, ids: tuple[int, ...], columns: Sequence[int]
    ) -> list[TokenSet | None]:
        """Return, for each of the masked `columns` of a state, the set of tokens that it may take.
        Each column is considered alone. None stands for all tokens.

        Args:
            origin: The origin of the state's block (see `Constraint`).
            start: The position in the text where the block begins.
            ids: The token ids of the block, masks included.
            columns: Masked columns of the block.
        """

    @abstractmethod
    def is_possible(self, origin: Any, start: int, ids: tuple[int, ...]) -> bool:
        """Return whether a text can still be completed that contains the given state: the block at
        position `start` with the token ids `ids`, masks included."""

    def forced(
        self, origin: Any, start: int, ids: tuple[int, ...], columns: Sequence[int]
    ) -> dict[int, int]:
        """Map each of the masked `columns` that can take only one token to that token. The
        arguments are those of `allowed`."""
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
            origin: The origin of the state's block (see `Constraint`).
            key: The state before the reveal, as a pair: the position in the text where its block
                begins, and the token ids of the block, masks included.
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
