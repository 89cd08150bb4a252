"""Bans of token sequences (bad words, repeated n-grams). They hold in whatever order tokens are
revealed."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bans:
    """Token sequences that a text must not contain.

    Tokens are revealed in any order, so a ban considers the known tokens on both sides of a
    position: a token that would complete a banned sequence is barred there. If the tokens of one
    step would together complete a banned sequence, the most confident of them are revealed and the
    others stay masked.

    Attributes:
        words: Banned sequences of token ids (`bad_words_ids`).
        ngram: Length of the n-grams that must not occur twice (`no_repeat_ngram_size`). 0 if
            n-grams may occur twice.
    """

    words: tuple[tuple[int, ...], ...] = ()
    ngram: int = 0

    def barred(self, ids: Sequence[int], position: int, mask_id: int) -> set[int]:
        """Return the token ids that would complete a banned sequence at `position` of the text
        `ids`, where `mask_id` stands at unknown tokens."""
        tokens = set()
        for word in self.words:
            for hole in range(len(word)):
                begin = position - hole
                if 0 <= begin <= len(ids) - len(word) and all(
                    index == hole or ids[begin + index] == token for index, token in enumerate(word)
                ):
                    tokens.add(word[hole])
        if self.ngram:
            tokens |= self._repeated(ids, position, mask_id)
        return tokens

    def _repeated(self, ids: Sequence[int], position: int, mask_id: int) -> set[int]:
        """Return the token ids that would make an n-gram occur twice if they stood at `position` of
        the text `ids`."""
        tokens = set()
        size = self.ngram
        windows = {}
        for begin in range(max(0, position - size + 1), min(position, len(ids) - size) + 1):
            windows[begin] = list(ids[begin : begin + size])
        for begin, window in windows.items():
            hole = position - begin
            if any(token == mask_id for index, token in enumerate(window) if index != hole):
                continue
            for start in range(len(ids) - size + 1):
                if not start <= position < start + size and all(
                    index == hole or ids[start + index] == token
                    for index, token in enumerate(window)
                ):
                    tokens.add(ids[start + hole])
        # two of them may be equal
        for candidate in {token for window in windows.values() for token in window}:
            completed_windows = []
            for begin, window in windows.items():
                window[position - begin] = candidate
                if mask_id not in window:
                    completed_windows.append(tuple(window))
            if len(set(completed_windows)) < len(completed_windows):
                tokens.add(candidate)
        return tokens - {mask_id}

    def allowed(
        self,
        ids: list[int],
        start: int,
        columns: tuple[int, ...],
        token: Sequence[int],
        log_odds: Sequence[float],
        mask_id: int,
    ) -> tuple[int, ...]:
        """Return the columns of a reveal that can be revealed without completing a banned sequence.

        Columns are tried in order of decreasing confidence. The most confident column is always
        kept. Any other column is kept if its token is not barred, given the columns kept before it.

        Args:
            ids: The text before the reveal.
            start: The position in the text where the block begins.
            columns: Columns that the rule reveals.
            token, log_odds: [block], for each column, the picked token and its log-odds.
            mask_id: The id of the mask token.
        """
        ids = list(ids)
        allowed_columns = list[int]()
        for column in sorted(columns, key=lambda column: -log_odds[column]):
            position = start + column
            if not allowed_columns or token[column] not in self.barred(ids, position, mask_id):
                ids[position] = token[column]
                allowed_columns.append(column)
        return tuple(sorted(allowed_columns))
