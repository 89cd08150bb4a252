"""The tokens that a grammar allows at a position after the text to its left, computed by
llguidance."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..rules.constraint import Constraint, TokenSet
from .automaton import PackedSet

# Number of token sets that are kept, each for the text on its left.
_KNOWN_TEXTS = 256


class GrammarConstraint(Constraint):
    """Constrains a row so that its new tokens form a text of a grammar, or the beginning of such a
    text if there is no room for all of it. The tokens are revealed from left to right, and only the
    leftmost masked column is constrained.

    The matcher holds the text that it has read. To read another text, it takes back its tokens from
    the first difference on, and reads on from there.

    Args:
        matcher: A matcher of llguidance at the beginning of a text; no other row may use it.
        prompt: The position of the first new token.
        eos: Ids that end a text. The first is used where only the end can follow.
        mask_id: The mask's id.
        vocab_size: The number of rows of the model's unembedding.

    Attributes:
        first: The empty tuple, the origin of a block without new tokens before it. The origin of a
            block is the tuple of all new tokens before the block.
    """

    first: tuple[int, ...] = ()

    def __init__(
        self, matcher: Any, prompt: int, eos: Sequence[int], mask_id: int, vocab_size: int
    ) -> None:
        self.matcher = matcher
        self.prompt = prompt
        self.eos = tuple(eos)
        self.mask_id = mask_id
        self.vocab_size = vocab_size
        self._consumed: tuple[int, ...] = ()
        self._sets: dict[tuple[int, ...], PackedSet | None] = {}

    def advance(
        self, origin: tuple[int, ...], start: int, ids: Sequence[int]
    ) -> tuple[int, ...] | None:
        """Return the origin of the next block: `origin` followed by the new tokens of the given
        block. Return None if the given block has a mask or an eos after the prompt.

        Args:
            origin: All new tokens before the given block.
            start: The position in the text where the given block begins.
            ids: The token ids of the given block.
        """
        prefix = self.prefix_of(origin, start, ids)
        return (
            prefix if len(ids) - max(0, self.prompt - start) + len(origin) == len(prefix) else None
        )

    def prefix_of(self, origin: tuple[int, ...], start: int, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the new tokens before the first mask or eos of a block: first those before the
        block, which are `origin`, then those of the block itself."""
        tokens = []
        for token in ids[max(0, self.prompt - start) :]:
            if token == self.mask_id or token in self.eos:
                break
            tokens.append(token)
        return (*origin, *tokens)

    def allowed(
        self, origin: tuple[int, ...], start: int, ids: tuple[int, ...], columns: Sequence[int]
    ) -> list[TokenSet | None]:
        """Return, for each of the masked `columns` of a block, the tokens that may stand there.

        Args:
            origin: All new tokens before the block.
            start: The position in the text where the block begins.
            ids: The token ids of the block, masks included.
            columns: Masked columns of the block, in increasing order.

        Returns:
            For the leftmost masked column of the block, the set of tokens that the grammar allows
            after the text on its left. None, which stands for all tokens, for any other column, and
            also if the grammar does not allow that text.
        """
        sets: list[TokenSet | None] = [None] * len(columns)
        if columns and ids.index(self.mask_id, max(0, self.prompt - start)) == columns[0]:
            sets[0] = self.tokens(self.prefix_of(origin, start, ids))
        return sets

    def is_possible(self, origin: tuple[int, ...], start: int, ids: tuple[int, ...]) -> bool:
        """Return whether the grammar allows the new tokens before the first mask or eos of a block
        and, if an eos follows them, whether the text may end there.

        Args:
            origin: All new tokens before the block.
            start: The position in the text where the block begins.
            ids: The token ids of the block, masks included.
        """
        prefix = self.prefix_of(origin, start, ids)
        if not self.follow(prefix):
            return False
        column = len(prefix) - len(origin) + max(0, self.prompt - start)
        ended = column < len(ids) and ids[column] in self.eos
        return not ended or bool(self.matcher.is_accepting())

    def tokens(self, prefix: tuple[int, ...]) -> PackedSet | None:
        """Return the set of tokens that may follow the new tokens `prefix`; None if no text of the
        grammar begins with `prefix`."""
        if prefix not in self._sets:
            if len(self._sets) >= _KNOWN_TEXTS:
                self._sets.clear()
            self._sets[prefix] = self._tokens() if self.follow(prefix) else None
        return self._sets[prefix]

    def follow(self, prefix: tuple[int, ...]) -> bool:
        """Move the matcher to the end of the new tokens `prefix`. Return whether a text of the
        grammar begins with `prefix`; if not, the matcher stops at the first token that the grammar
        does not allow."""
        shared = 0
        for token, consumed in zip(prefix, self._consumed, strict=False):
            if token != consumed:
                break
            shared += 1
        if len(self._consumed) > shared:
            self.matcher.rollback(len(self._consumed) - shared)
        unread = list(prefix[shared:])
        count = self.matcher.validate_tokens(unread)
        self.matcher.consume_tokens(unread[:count])
        self._consumed = prefix[: shared + count]
        return bool(count == len(unread))

    def _tokens(self) -> PackedSet:
        bits = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        is_member = np.zeros(self.vocab_size, bool)
        unpacked = np.unpackbits(bits, bitorder="little")[: self.vocab_size].astype(bool)
        is_member[: len(unpacked)] = unpacked
        is_member[list(self.eos)] = self.matcher.is_accepting()
        ids = np.flatnonzero(is_member).tolist()
        single = ids[0] if len(ids) == 1 else None
        if ids and set(ids) <= {*self.eos}:
            single = self.eos[0]
        return PackedSet.of(is_member, single)
