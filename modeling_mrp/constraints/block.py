"""The tokens that an automaton allows in a partly revealed block, whatever the order of reveals."""

from collections.abc import Sequence

from ..rules.constraint import Constraint, TokenSet
from .automaton import States, TokenAutomaton

# Number of states whose allowed tokens are kept: more than two blocks have.
_KNOWN_STATES = 4096


class AutomatonConstraint(Constraint):
    """Constrains a row so that its new tokens form a text that an automaton accepts.

    A token is allowed at a masked column if the block's other masked columns can be filled so that
    the text can still be completed in the tokens that remain. A forward pass over the block finds
    the states that can be reached from the automaton's state at the block's start (the origin); a
    backward pass keeps those from which the text can be completed in time.

    Args:
        automaton: Accepts the allowed texts.
        prompt: The position of the first new token.
        limit: One past the last position that the text may reach; from there on, only eos follows.
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
        """Return the automaton's state after a block. Return None if the automaton does not accept
        the block, or if the block has masks.

        Args:
            origin: The automaton's state before the block.
            start: The position in the text where the block begins.
            ids: The token ids of the block. Those of the prompt are skipped.
        """
        for token in ids[max(0, self.prompt - start) :]:
            following = self.automaton.step(origin, token)
            if following is None:
                return None
            origin = following
        return origin

    def allowed(
        self, origin: int, start: int, ids: tuple[int, ...], columns: Sequence[int]
    ) -> list[TokenSet | None]:
        """Return, for each of the masked `columns` of a block, the tokens that may stand there.

        Args:
            origin: The automaton's state before the block.
            start: The position in the text where the block begins.
            ids: The token ids of the block, masks included.
            columns: Masked columns of the block.

        Returns:
            For each column, the set of tokens with which the text can still be completed if the
            other masks are filled suitably. If the text cannot be completed in any way, None for
            each column, which stands for all tokens.
        """
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
        """Map each of the masked `columns` that can take only one token to that token. If the text
        cannot be completed in any way, the map is empty. The arguments are those of `allowed`, but
        no sets of tokens are made."""
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
        if tokens:  # paths that include the forced tokens are the same
            self._paths.setdefault((origin, start, tuple(filled)), paths)
        return tokens

    def is_possible(self, origin: int, start: int, ids: tuple[int, ...]) -> bool:
        """Return whether a text can still be completed that has the token ids `ids`, masks
        included, in the block at position `start`. `origin` is the automaton's state before the
        block."""
        return bool(self.paths(origin, start, ids)[0])

    def paths(self, origin: int, start: int, ids: tuple[int, ...]) -> list[States]:
        """Return the automaton's states on all paths through a block on which the text can still be
        completed, as a list of sets: one set before each column after the prompt, and one after the
        last column. All sets are empty if there is no such path. A set is an int with a bit for
        each state.

        Args:
            origin: The automaton's state before the block.
            start: The position in the text where the block begins.
            ids: The token ids of the block, masks included.
        """
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
