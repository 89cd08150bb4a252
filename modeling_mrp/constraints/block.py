"""What an automaton allows in a partly revealed block, in any order of reveals."""

from collections.abc import Sequence

from ..rules.constraint import Constraint, TokenSet
from .automaton import States, TokenAutomaton

# States of which what they allow is kept: more than those of two blocks.
_KNOWN_STATES = 4096


class AutomatonConstraint(Constraint):
    """The constraint of one row whose new tokens are a text of an automaton.

    A token is allowed at a masked column if some tokens at the other ones lead from the origin, the
    automaton's state at the block's start, through the block to a state from which the text can end
    within the tokens that are left: one pass forward over the sets of states that can be reached,
    and one backward over those that lead to such an end.

    Args:
        automaton: What texts there are.
        prompt: Position of the first token that counts.
        limit: One past the last position to generate; behind it there is eos alone.
        mask_id: The mask's id.
    """

    first = 0

    def __init__(self, automaton: TokenAutomaton, prompt: int, limit: int, mask_id: int) -> None:
        self.automaton = automaton
        self.prompt = prompt
        self.limit = limit
        self.mask_id = mask_id
        self._paths: dict[tuple[int, int, tuple[int, ...]], list[States]] = {}

    def advance(self, origin: int, start: int, ids: Sequence[int]) -> int | None:
        """See `Constraint`."""
        for token in ids[max(0, self.prompt - start) :]:
            following = self.automaton.step(origin, token)
            if following is None:
                return None
            origin = following
        return origin

    def allowed(
        self, origin: int, start: int, ids: tuple[int, ...], columns: Sequence[int]
    ) -> list[TokenSet | None]:
        """See `Constraint`."""
        paths = self.paths(origin, start, ids)
        if not paths[0]:
            return [None] * len(columns)
        skipped = max(0, self.prompt - start)
        sets: list[TokenSet | None] = []
        for column in columns:
            index = column - skipped
            sets.append(self.automaton.tokens(paths[index], paths[index + 1]))
        return sets

    def forced(
        self, origin: int, start: int, ids: tuple[int, ...], columns: Sequence[int]
    ) -> dict[int, int]:
        """See `Constraint`; no set is made."""
        paths = self.paths(origin, start, ids)
        if not paths[0]:
            return {}
        only = self.automaton.only
        skipped = max(0, self.prompt - start)
        tokens = {}
        filled = list(ids)
        for column in columns:
            index = column - skipped
            token = only(paths[index], paths[index + 1])
            if token is not None:
                tokens[column] = filled[column] = token
        if tokens:  # the paths with them are the same
            self._paths.setdefault((origin, start, tuple(filled)), paths)
        return tokens

    def is_possible(self, origin: int, start: int, ids: tuple[int, ...]) -> bool:
        """See `Constraint`."""
        return bool(self.paths(origin, start, ids)[0])

    def paths(self, origin: int, start: int, ids: tuple[int, ...]) -> list[States]:
        """List the automaton's states on paths through a block that can be completed, before each
        column from the prompt's end on, and behind the last; all are empty if there is none."""
        key = (origin, start, ids)
        paths = self._paths.get(key)
        if paths is None:
            if len(self._paths) >= _KNOWN_STATES:
                self._paths.clear()
            paths = self._paths[key] = self._find_paths(origin, start, ids)
        return paths

    def _find_paths(self, origin: int, start: int, ids: tuple[int, ...]) -> list[States]:
        position = max(start, self.prompt)
        mask_id = self.mask_id
        known = [None if token == mask_id else token for token in ids[position - start :]]
        return self.automaton.paths(1 << origin, known, self.limit - position)
