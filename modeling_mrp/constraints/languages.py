"""Languages over a tokenizer's tokens, as the options `regex`, `choices`, `json_schema` and
`grammar` describe them."""

import weakref
from collections import OrderedDict
from typing import Any, NamedTuple

from ..rules.constraint import Constraint
from .automaton import TokenAutomaton, TokenTrie, token_automaton
from .block import AutomatonConstraint
from .grammar import GrammarConstraint
from .patterns import INSTALL, any_of, byte_automaton, need_outlines
from .schema import schema_pattern

try:
    from llguidance import LLMatcher, LLTokenizer, grammar_from
except ImportError:
    LLMatcher = None

# Number of automata that are kept for later calls, for each tokenizer.
_KEPT_AUTOMATA = 8


class Vocabulary(NamedTuple):
    """The properties of a model's vocabulary on which a language depends.

    Attributes:
        size: The number of rows of the unembedding.
        mask_id: The mask's id, which occurs in no text.
        eos: Ids that end a text.
    """

    size: int
    mask_id: int
    eos: tuple[int, ...]


class Languages:
    """Makes the languages of one tokenizer and one model, and keeps the automata that were used
    most recently.

    Args:
        tokenizer: A fast tokenizer of transformers.
        vocabulary: The vocabulary of the model.

    Raises:
        ImportError: if llguidance, which finds the bytes of tokens, is not installed.
        ValueError: if the tokenizer is not backed by the library `tokenizers`.
    """

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary) -> None:
        if LLMatcher is None:
            raise ImportError(
                "regex, choices, json_schema and grammar need llguidance, which is not installed: "
                + INSTALL
            )
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"tokenizer is a {type(tokenizer).__name__}: pass the model's own, a fast one "
                "(AutoTokenizer.from_pretrained), whose tokens' bytes can be read"
            )
        self.vocabulary = vocabulary
        self.tokenizer = LLTokenizer(backend.to_str(), eos_token=list(vocabulary.eos))
        special = {*tokenizer.all_special_ids, *vocabulary.eos, vocabulary.mask_id}
        tokens = {}
        for token in range(min(self.tokenizer.vocab_size, vocabulary.size)):
            text = self.tokenizer.decode_bytes([token])
            if text and token not in special and not self.tokenizer.is_special_token(token):
                tokens[token] = text
        self.trie = TokenTrie(tokens, vocabulary.size)
        self._automata: OrderedDict[str, TokenAutomaton] = OrderedDict()

    def automaton(self, pattern: str) -> TokenAutomaton:
        """Return the token automaton of a regex: the one that was kept from an earlier call, or
        else a new one. Raise `ValueError` if the regex is invalid or matches no text, or if the
        tokenizer's tokens form none of its texts."""
        automaton = self._automata.pop(pattern, None)
        if automaton is None:
            made = token_automaton(byte_automaton(pattern), self.trie, self.vocabulary.eos)
            if made is None:
                raise ValueError("the tokenizer's tokens make none of its texts")
            automaton = made
        self._automata[pattern] = automaton
        while len(self._automata) > _KEPT_AUTOMATA:
            self._automata.popitem(last=False)
        return automaton

    def matcher(self, grammar: str) -> Any:
        """Make llguidance's matcher for a grammar that is written in the syntax of Lark or GBNF.
        Raise `ValueError` if the grammar is malformed."""
        compiled = grammar_from("grammar", grammar)
        if error := LLMatcher.validate_grammar(compiled, self.tokenizer):
            raise ValueError(" ".join(error.split()))
        return LLMatcher(self.tokenizer, compiled)


class Language(NamedTuple):
    """The language to which the new text of one row must belong.

    Attributes:
        vocabulary: The vocabulary of the model.
        automaton: The automaton of the language; None if a grammar defines the language.
        matcher: The matcher of the grammar; None if an automaton defines the language.
    """

    vocabulary: Vocabulary
    automaton: TokenAutomaton | None = None
    matcher: Any = None

    @property
    def shortest(self) -> int:
        """The number of tokens of the shortest text, not counting the eos; 0 if it is unknown."""
        return 0 if self.automaton is None else self.automaton.shortest

    def constraint(self, prompt: int, limit: int) -> Constraint:
        """Make the constraint of a row whose new text begins at position `prompt` and ends before
        position `limit`."""
        size, mask_id, eos = self.vocabulary
        if self.automaton is not None:
            return AutomatonConstraint(self.automaton, prompt, limit, mask_id)
        return GrammarConstraint(self.matcher.deep_copy(), prompt, eos, mask_id, size)


def language_of(languages: Languages, name: str, value: Any) -> Language:
    """Make the language that an option describes. Raise `ValueError` if the value of the option is
    invalid.

    Args:
        languages: Makes the languages of the tokenizer and the model, and keeps their automata.
        name: The option: "regex", "choices", "json_schema" or "grammar".
        value: The value of the option for one prompt.
    """
    vocabulary = languages.vocabulary
    try:
        if name == "grammar":
            return Language(vocabulary, matcher=languages.matcher(value))
        need_outlines()
        if name == "choices":
            pattern = any_of(value)
        elif name == "json_schema":
            pattern = schema_pattern(value)
        else:
            pattern = value
        return Language(vocabulary, languages.automaton(pattern))
    except ValueError as error:
        raise ValueError(f"{name} cannot be kept to: {error}") from error


_OF_TOKENIZERS: "weakref.WeakKeyDictionary[Any, dict[Any, Languages]]" = weakref.WeakKeyDictionary()


def languages_of(tokenizer: Any, vocabulary: Vocabulary) -> Languages:
    """Return the object that makes languages, which restrict what texts may be generated, for a
    tokenizer and the `vocabulary` of a model. It is kept as long as the tokenizer lives: a call
    with the same tokenizer and vocabulary returns the same object, and one with another vocabulary
    replaces it."""
    by_vocabulary = _OF_TOKENIZERS.setdefault(tokenizer, {})
    key = (len(tokenizer), vocabulary)
    languages = by_vocabulary.get(key)
    if languages is None:
        languages = Languages(tokenizer, vocabulary)
        by_vocabulary.clear()  # meanwhile another thread may store the languages of another model
        by_vocabulary[key] = languages
    return languages
