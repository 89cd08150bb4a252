"""Bans of token sequences (bad words, repeated n-grams), enforced in whatever order tokens are
revealed."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bans:
    """Token sequences that a text must not contain.

    Tokens are revealed in any order, so a ban looks at the known tokens on both sides of a
    position: a token that would complete a banned sequence is barred there. If tokens revealed in
    one step would together complete a sequence, the most confident ones are revealed and the others
    stay masked.

    Attributes:
        words: Banned sequences of ids (`bad_words_ids`).
        ngram: Length of the n-grams that may not occur twice (`no_repeat_ngram_size`); 0: no ban of
            n-grams.
    """

    words: tuple[tuple[int, ...], ...] = ()
    ngram: int = 0

    def barred(self, ids: Sequence[int], at: int, mask_id: int) -> set[int]:
        """Return the token ids that would complete a banned sequence if put at position `at` of the
        text `ids`."""
        found = set()
        for word in self.words:
            for hole in range(len(word)):
                begin = at - hole
                if 0 <= begin <= len(ids) - len(word) and all(
                    place == hole or ids[begin + place] == one for place, one in enumerate(word)
                ):
                    found.add(word[hole])
        return found | self._repeated(ids, at, mask_id) if self.ngram else found

    def _repeated(self, ids: Sequence[int], at: int, mask_id: int) -> set[int]:
        """Return the token ids that would make an n-gram occur twice in the text `ids` if put at
        position `at`."""
        found, size = set(), self.ngram
        begins = [
            begin for begin in range(max(0, at - size + 1), at + 1) if begin + size <= len(ids)
        ]
        windows = {begin: list(ids[begin : begin + size]) for begin in begins}
        for begin, window in windows.items():
            hole = at - begin
            if any(token == mask_id for place, token in enumerate(window) if place != hole):
                continue
            for other in range(len(ids) - size + 1):
                if not other <= at < other + size and all(
                    place == hole or ids[other + place] == token
                    for place, token in enumerate(window)
                ):
                    found.add(ids[other + hole])
        # two of them may be equal
        for token in {one for window in windows.values() for one in window}:
            whole = []
            for begin, window in windows.items():
                window[at - begin] = token
                whole.append(tuple(window))
            whole = [window for window in whole if mask_id not in window]
            if len(set(whole)) < len(whole):
                found.add(token)
        return found - {mask_id}

    def allowed(
        self,
        ids: list[int],
        start: int,
        where: tuple[int, ...],
        token: Sequence[int],
        odds: Sequence[float],
        mask_id: int,
    ) -> tuple[int, ...]:
        """Select columns of a reveal by falling confidence, leaving out those that would complete a
        banned sequence.

        Args:
            ids: The text before the reveal.
            start: The block's position in the text.
            where: Columns that the rule reveals.
            token, odds: [block], the token picked at each column, and its log-odds.
            mask_id: The mask's id.
        """
        ids, kept = list(ids), list[int]()
        for column in sorted(where, key=lambda column: -odds[column]):
            at = start + column
            if not kept or token[column] not in self.barred(ids, at, mask_id):
                ids[at] = token[column]
                kept.append(column)
        return tuple(sorted(kept))
