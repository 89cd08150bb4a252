"""Prompt lookup: a draft of the tokens that followed the last occurrence of the same n-gram in the
text (Saxena, 2023, prompt-lookup-decoding)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from .sources import Candidates
from .state import Row, State

# The chance of a proposal before any was tried, and the factor by which a trial counts less with
# each one after it.
PRIOR, FADE = 0.25, 0.95


@dataclass
class NgramIndex:
    """The n-grams of a row's final text, and the accuracy of lookups in it so far.

    Attributes:
        length: Number of tokens that were read.
        next_position: By n-gram, the position after its last occurrence that is followed by a
            token.
        trials, hits: By the length of the longest match, the number of generated tokens for which a
            lookup would have proposed a token, and the number of these proposals that would have
            been right. Both decay over time.
    """

    length: int = 0
    next_position: dict[tuple[int, ...], int] = field(default_factory=dict)
    trials: dict[int, float] = field(default_factory=dict)
    hits: dict[int, float] = field(default_factory=dict)

    def chance(self, size: int) -> float:
        """Estimate the chance that a proposal from a match of `size` tokens is right."""
        return (self.hits.get(size, 0.0) + PRIOR) / (self.trials.get(size, 0.0) + 1.0)

    def read(self, text: Sequence[int], final: int, prompt: int, max_size: int) -> None:
        """Read the first `final` tokens of a text, continuing where the last call ended.

        Args:
            text: The text.
            final: Number of leading tokens that are final.
            prompt: Number of given tokens, which do not count as trials.
            max_size: The most tokens of an n-gram.
        """
        for position in range(max(1, self.length), final):
            ngrams = []
            for size in range(min(max_size, position), 0, -1):
                ngrams.append(tuple(text[position - size : position]))
            if position >= prompt:
                match = next((ngram for ngram in ngrams if ngram in self.next_position), None)
                if match is not None:
                    self._count(len(match), text[self.next_position[match]] == text[position])
            for ngram in ngrams:
                self.next_position[ngram] = position
        self.length = max(self.length, final)

    def _count(self, size: int, hit: bool) -> None:
        self.trials[size] = FADE * self.trials.get(size, 0.0) + 1.0
        self.hits[size] = FADE * self.hits.get(size, 0.0) + hit


@dataclass(eq=False)
class PromptLookup:
    """Proposes the tokens that followed the last earlier occurrence, in prompt and text, of the
    tokens before a state's first mask. It proposes tokens only, and no order of reveals.

    Attributes:
        num_tokens: The most tokens proposed at a state.
        max_ngram_size: The most tokens that are compared; the longest match counts.
    """

    num_tokens: int
    max_ngram_size: int = 2
    # by row, so that the rows of another call are read from their beginning
    _indices: WeakKeyDictionary[Row, NgramIndex] = field(
        default_factory=WeakKeyDictionary, repr=False
    )

    def propose(self, row: Row, state: State, parent: State | None) -> Candidates | None:
        """See `DraftSource`."""
        index = self._indices.setdefault(row, NgramIndex())
        final = row.state.start
        index.read(row.text, final, row.prompt, self.max_ngram_size)
        context = self._context(row, state, parent)
        for size in range(len(context), 0, -1):
            position = index.next_position.get(context[-size:])
            if position is not None:
                tokens = row.text[position : min(position + self.num_tokens, final)]
                return self._aligned(tokens, state, index.chance(size), row.mask_id)
        return None

    def _context(self, row: Row, state: State, parent: State | None) -> tuple[int, ...]:
        """Return the tokens before a state's first mask, at most `max_ngram_size`."""
        context = state.ids[: state.free[0]]
        begin = state.start
        if parent is not None:
            context = parent.ids + context
            begin = parent.start
        missing = max(0, self.max_ngram_size - len(context))
        context = (*row.text[max(0, begin - missing) : begin], *context)
        return context[-self.max_ngram_size :]

    @staticmethod
    def _aligned(
        tokens: Sequence[int], state: State, chance: float, mask_id: int
    ) -> Candidates | None:
        """Assign tokens to a state's columns from its first mask on, as long as they agree with the
        tokens revealed there."""
        proposed = {}
        columns = range(state.free[0], len(state.ids))
        for column, token in zip(columns, tokens, strict=False):
            revealed = state.ids[column]
            if token == mask_id or revealed not in (mask_id, token):
                break
            if column in state.free:
                proposed[column] = ((token, chance),)
        return Candidates(proposed) if proposed else None
