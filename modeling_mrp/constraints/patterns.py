"""Automata over bytes, made from regexes by outlines-core."""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from .automaton import ByteAutomaton, alive_states

try:
    import outlines_core
    from outlines_core.json_schema import build_regex_from_schema
except ImportError:
    outlines_core = None

# This character ends the texts whose automaton outlines-core makes. Without it (0.2.14) `ab(ab)?`
# cannot continue after `ab`, and `a|ab` cannot continue after `a`. It is a noncharacter, which
# occurs in no text.
_END = "\U0010ffff"

INSTALL = "pip install 'modeling-mrp[constraints]'"


def need_outlines() -> None:
    """Raise `ImportError` if outlines-core is not installed."""
    if outlines_core is None:
        raise ImportError(
            f"regex, choices and json_schema need outlines-core, which is not installed: {INSTALL}"
        )


def byte_automaton(pattern: str) -> ByteAutomaton:
    """Make the automaton of the texts, as UTF-8 bytes, that a regex matches from beginning to end.
    The regex has the syntax of Rust's `regex`.

    Raises:
        ImportError: if outlines-core is not installed.
        ValueError: if the pattern is invalid, such as one with a look-around, or matches no text.
    """
    need_outlines()
    eos = 256
    letters = {bytes([byte]): [byte] for byte in range(eos)}
    # an index over single-byte tokens, whose states are states over bytes
    index = outlines_core.Index(f"(?:{pattern}){_END}", outlines_core.Vocabulary(eos, letters))
    transitions = index.get_transitions()
    number = {index.get_initial_state(): 0}
    for state in (*sorted(transitions), *sorted(index.get_final_states())):
        number.setdefault(state, len(number))
    next_state = np.full((len(number), eos), -1, np.int32)
    for state, targets in transitions.items():
        for byte, target in targets.items():
            if byte < eos:
                next_state[number[state], byte] = number.get(target, -1)
    behind = np.arange(len(number))
    for byte in _END.encode():
        behind = np.where(behind < 0, -1, next_state[behind, byte])
    ends = [number[state] for state in index.get_final_states()]
    final = np.isin(behind, ends)
    source, byte = np.nonzero(next_state >= 0)
    target = next_state[source, byte]
    alive = alive_states(source, target, final)
    if not alive[0]:
        raise ValueError("it matches no text")
    is_dead = ~alive[target]
    next_state[source[is_dead], byte[is_dead]] = -1
    return ByteAutomaton(next_state, final)


def escaped(text: str) -> str:
    """Return a regex that matches the given text and no other text."""
    return "".join([f"\\x{{{ord(letter):X}}}" for letter in text])


def any_of(texts: Iterable[str]) -> str:
    """Return a regex that matches the given texts and no other texts."""
    return "|".join([escaped(text) for text in texts])


def pattern_of(schema: dict[str, Any], space: str) -> str:
    """Return a regex that matches the values of a JSON schema, written as JSON. The pattern `space`
    stands in it wherever JSON allows white space."""
    need_outlines()
    pattern: str = build_regex_from_schema(json.dumps(schema), space)
    return pattern
