"""Prompt lookup: a draft source that proposes the tokens that followed the last occurrence of the
same n-gram in the text (Saxena, 2023, prompt-lookup-decoding)."""

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
    """The n-grams of a row's final text, and how often lookups in it have been right so far. A
    lookup proposes, as the next token, the one that followed the last earlier occurrence of the
    text's last tokens; as many of these as possible have to match.

    Attributes:
        length: Number of tokens read so far.
        next_position: Maps each n-gram to the position of the token that followed its last
            occurrence. An n-gram at the very end of the text does not count, as nothing follows it
            yet.
        trials, hits: Counts by the number of tokens that matched. `trials` counts the generated
            tokens for which a lookup with that many matching tokens had a proposal, and `hits`
            those for which the proposal was right. In both, earlier tokens count less and less.
    """

    length: int = 0
    next_position: dict[tuple[int, ...], int] = field(default_factory=dict)
    trials: dict[int, float] = field(default_factory=dict)
    hits: dict[int, float] = field(default_factory=dict)

    def chance(self, size: int) -> float:
        """Estimate the chance that a token is right if it is proposed from a match of `size`
        tokens."""
        return (self.hits.get(size, 0.0) + PRIOR) / (self.trials.get(size, 0.0) + 1.0)

    def read(self, text: Sequence[int], final: int, prompt: int, max_size: int) -> None:
        """Read the first `final` tokens of a text, beginning where the last call ended.

        Args:
            text: The text.
            final: Number of leading tokens that are final.
            prompt: Number of given tokens. They do not count as trials.
            max_size: The largest number of tokens in an n-gram.
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
    """Proposes tokens that followed an earlier occurrence of the tokens before a state's first
    mask.

    The last such occurrence in the prompt and the text is used. Only tokens are proposed, and no
    order of reveals.

    Attributes:
        num_tokens: The largest number of tokens that are proposed at a state.
        max_ngram_size: The largest number of tokens that are compared. The longest match is used.
    """

    num_tokens: int
    max_ngram_size: int = 2
    # by row, so that the rows of another call are read from their beginning
    _indices: WeakKeyDictionary[Row, NgramIndex] = field(
        default_factory=WeakKeyDictionary, repr=False
    )

    def propose(self, row: Row, state: State, parent: State | None) -> Candidates | None:
        """Propose the tokens that followed the last earlier occurrence of the tokens before the
        state's first mask. Return None if there is no such occurrence or nothing to propose.

        Args:
            row: The row that drafts.
            state: A drafted state, with at least one column that may be revealed.
            parent: A drafted block without masks that comes before the state's block, if `row.text`
                does not hold that block yet; else None.
        """
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
        """Return the last tokens before a state's first mask, at most `max_ngram_size` of them."""
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
        """Assign proposed tokens to the columns of a state, from its first mask on.

        Stop where a proposed token differs from the token revealed at its column, or is the mask.
        Return None if no column gets a token.
        """
        proposed = {}
        columns = range(state.free[0], len(state.ids))
        for column, token in zip(columns, tokens, strict=False):
            revealed = state.ids[column]
            if token == mask_id or revealed not in (mask_id, token):
                break
            if column in state.free:
                proposed[column] = ((token, chance),)
        return Candidates(proposed) if proposed else None
