"""Banned sequences of tokens: kept in every order of reveals, whichever of their tokens comes last."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bans:
    """What must not appear in a text.

    A ban is a matter of known tokens, on both sides of a position: what would complete a banned sequence is barred there. Where
    a step reveals several columns that would complete one together, the surest are revealed and the others wait.

    Attributes:
        words: Sequences of ids (`bad_words_ids`).
        ngram: No sequence of so many ids appears twice (`no_repeat_ngram_size`); 0: any may.
    """

    words: tuple[tuple[int, ...], ...] = ()
    ngram: int = 0

    def barred(self, ids: Sequence[int], at: int, mask_id: int) -> set[int]:
        """Find the tokens that would complete a banned sequence at one position of a text, whatever stands there now."""
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
        """Find the tokens with which a sequence of `ngram` ids around a position would stand in the text twice."""
        found, size = set(), self.ngram
        begins = [begin for begin in range(max(0, at - size + 1), at + 1) if begin + size <= len(ids)]
        windows = {begin: list(ids[begin : begin + size]) for begin in begins}
        for begin, window in windows.items():
            hole = at - begin
            if any(token == mask_id for place, token in enumerate(window) if place != hole):
                continue
            for other in range(len(ids) - size + 1):
                if not other <= at < other + size and all(
                    place == hole or ids[other + place] == token for place, token in enumerate(window)
                ):
                    found.add(ids[other + hole])
        for token in {one for window in windows.values() for one in window}:  # two of them may be equal
            whole = []
            for begin, window in windows.items():
                window[at - begin] = token
                whole.append(tuple(window))
            whole = [window for window in whole if mask_id not in window]
            if len(set(whole)) < len(whole):
                found.add(token)
        return found - {mask_id}

    def allowed(
        self, ids: list[int], start: int, where: tuple[int, ...], token: Sequence[int], odds: Sequence[float], mask_id: int
    ) -> tuple[int, ...]:
        """Select the columns of a reveal that do not complete a banned sequence together, the surest first.

        Args:
            ids: The text before the reveal.
            start: Where the block starts in it.
            where: Columns that are revealed.
            token, odds: By column, what it would get, and its log-odds.
            mask_id: The mask's id.
        """
        ids, kept = list(ids), list[int]()
        for column in sorted(where, key=lambda column: -odds[column]):
            at = start + column
            if not kept or token[column] not in self.barred(ids, at, mask_id):
                ids[at] = token[column]
                kept.append(column)
        return tuple(sorted(kept))
