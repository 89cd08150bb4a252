"""Automata of tokens, and what they allow in a block: compared to all texts of small languages."""

import random
import re
from collections.abc import Iterator, Sequence
from itertools import product

import pytest

pytest.importorskip("outlines_core")

from modeling_mrp.constraints.automaton import TokenAutomaton, TokenTrie, token_automaton
from modeling_mrp.constraints.block import AutomatonConstraint
from modeling_mrp.constraints.patterns import any_of, byte_automaton

MASK, EOS, VOCAB = 11, (9, 10), 12
PATTERNS = (
    "(ab|ba){1,2}",
    "a?b{0,2}c?",
    "abcab(a|b)?",
    "(a|b|c){2,4}",
    "ab(c|ca)b?|c",
    "(abc){0,1}c",
)
Text = tuple[int, ...]


def tokens_of(rng: random.Random, whole: bool) -> dict[int, bytes]:
    """Make up to nine tokens of one to three letters; the letters themselves are tokens if
    `whole`."""
    texts = {"a", "b", "c"} if whole else set()
    while len(texts) < 9:
        texts.add("".join(rng.choices("abc", k=rng.randint(1, 3))))
    return {index: text.encode() for index, text in enumerate(rng.sample(sorted(texts), 9))}


def strings_of(pattern: str) -> list[str]:
    """List the texts of a language, which have six letters at most."""
    texts = []
    for length in range(7):
        for letters in product("abc", repeat=length):
            if re.fullmatch(pattern, "".join(letters)):
                texts.append("".join(letters))
    return texts


def forced_of(prefix: str, strings: Sequence[str]) -> str:
    """The letters that all texts go on with behind a prefix."""
    forced = ""
    while True:
        behind = {
            text[len(prefix + forced) :][:1] for text in strings if text.startswith(prefix + forced)
        }
        if len(behind) > 1 or behind == {""}:
            return forced
        forced += behind.pop()


def sequences_of(strings: Sequence[str], tokens: dict[int, bytes], whole: bool) -> Iterator[Text]:
    """All token sequences of texts; if `whole`, with the longest token where all texts go on
    alike and no token reaches beyond."""
    pending: list[tuple[str, Text]] = [("", ())]
    while pending:
        prefix, sequence = pending.pop()
        if prefix in strings:
            yield sequence
        forced = forced_of(prefix, strings)
        choices = {}
        for token, text in tokens.items():
            if any(other.startswith(prefix + text.decode()) for other in strings):
                choices[token] = text.decode()
        longest = max(map(len, choices.values()), default=0)
        if whole and forced and longest <= len(forced):
            choices = {token: text for token, text in choices.items() if len(text) == longest}
        for token, text in choices.items():
            pending.append((prefix + text, (*sequence, token)))


def padded(sequence: Text, length: int) -> list[set[int]]:
    """The tokens of each position: those of a text, then any eos."""
    return [{token} for token in sequence] + [{*EOS}] * (length - len(sequence))


def automaton_of(pattern: str, tokens: dict[int, bytes]) -> TokenAutomaton | None:
    return token_automaton(byte_automaton(pattern), TokenTrie(tokens, VOCAB), EOS)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_token_is_allowed_if_and_only_if_a_text_has_it(pattern: str, whole: bool) -> None:
    """At each masked column of blocks with some tokens known, behind some text, with some tokens
    left: compared to all fillings."""
    rng = random.Random(f"{pattern} {whole}")
    compared = impossible = 0
    for _ in range(6):
        tokens = tokens_of(rng, whole)
        strings = strings_of(pattern)
        has_letters = {*"".join(strings)} <= {text.decode() for text in tokens.values()}
        sequences = list(sequences_of(strings, tokens, has_letters))
        automaton = automaton_of(pattern, tokens)
        if not sequences:
            assert automaton is None
            continue
        assert automaton is not None
        assert automaton.shortest == min(map(len, sequences))
        for _ in range(60):
            block, prompt = rng.choice((2, 4)), rng.randint(0, 5)
            limit = prompt + max(1, automaton.shortest + rng.randint(0, 4))
            texts = [padded(text, 20) for text in sequences if len(text) <= limit - prompt]
            # a block of a text, of which some tokens are known, and now and then one is wrong
            text = [rng.choice(sorted(choices)) for choices in rng.choice(texts)]
            starts = [start for start in range(0, 20, block) if prompt - block < start < limit]
            start = rng.choice(starts)
            ids = ([0] * prompt + text)[start : start + block]
            for column in range(block):
                if start + column >= prompt and rng.random() < 0.6:
                    ids[column] = MASK
                elif rng.random() < 0.1:
                    ids[column] = rng.randrange(len(tokens))
            constraint = AutomatonConstraint(automaton, prompt, limit, MASK)
            origin: int | None = constraint.first
            for begin in range(prompt // block * block, start, block):
                assert origin is not None
                known = ([0] * prompt + text)[begin : begin + block]
                origin = constraint.advance(origin, begin, known)
            if origin is None or origin == automaton.end:
                continue
            skipped = max(prompt - start, 0)
            before = text[: max(start - prompt, 0)]
            fitting = []
            for choices in texts:
                part = choices[len(before) :][: block - skipped]
                if all(token in each for token, each in zip(before, choices, strict=False)) and all(
                    token == MASK or token in each
                    for token, each in zip(ids[skipped:], part, strict=True)
                ):
                    fitting.append(part)
            assert constraint.is_possible(origin, start, tuple(ids)) == bool(fitting)
            columns = [column for column in range(skipped, block) if ids[column] == MASK]
            allowed = constraint.allowed(origin, start, tuple(ids), columns)
            for column, token_set in zip(columns, allowed, strict=True):
                expected = set().union(*(part[column - skipped] for part in fitting))
                if not fitting:
                    assert token_set is None
                    impossible += 1
                    continue
                assert token_set is not None
                assert {*token_set.is_member().nonzero()[0].tolist()} == expected
                only = {*EOS} if expected <= {*EOS} else expected
                assert token_set.only == (
                    min(only) if expected <= {*EOS} or len(only) == 1 else None
                )
                compared += 1
    assert compared > 150 or not whole
    assert impossible > 0 or not whole


def test_a_pattern_that_cannot_be_followed_is_refused() -> None:
    for pattern in ("(a", "(?=a)a", r"\ba", "[^\\x00-\\x{10FFFF}]"):
        with pytest.raises(ValueError, match=r"DFA|no transitions|matches no text"):
            byte_automaton(pattern)


def test_choices_may_hold_any_letters() -> None:
    texts = ["a b", "a.b", "(x|y)*", "é\n", "<>&", '"\\', "🙂"]
    automaton = byte_automaton(any_of(texts))
    for text in texts:
        state = 0
        for byte in text.encode():
            state = automaton.next_state[state, byte]
            assert state >= 0
        assert automaton.final[state]


def test_bytes_of_a_text_that_is_forced() -> None:
    automaton = byte_automaton('\\{"name": "[a-z]*"\\}')
    assert automaton.forced(0) == b'{"name": "'
