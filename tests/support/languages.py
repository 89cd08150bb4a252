"""A tokenizer of letters for models of 64 tokens, languages of its tokens, and decodes of batches
of them: for tests and `benchmarks.constrained`."""

import json
import random
import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

EOS = 1
# Ids 60 and behind are none, as 60 is the mask of `random_cases.make_model`.
TEXTS = [*'abcdefgn0123456789-+.{}[]:,"_ ', "ab", "abc", "cab", "12", '": ', '", "', "ba", ", "]


@cache
def letters_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of single letters and some longer tokens; its eos has the id 1."""
    as_written = {" ": "Ġ"}  # of a byte-level vocabulary
    vocabulary = {"<pad>": 0, "<eos>": EOS}
    for text in TEXTS:
        vocabulary["".join(as_written.get(letter, letter) for letter in text)] = len(vocabulary)
    backend = Tokenizer(BPE(vocabulary, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


class Case(NamedTuple):
    """A language: an option of `generate`, its value, and a check of a text."""

    option: str
    value: Any
    holds: Callable[[str], bool]


def matches(pattern: str) -> Case:
    return Case("regex", pattern, lambda text: re.fullmatch(pattern, text) is not None)


def is_object(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["a", "b"]
        and isinstance(value["a"], int)
        and (value["b"] is None or set(value["b"]) <= {*"abc"})
    )


OBJECT = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"anyOf": [{"enum": ["", "a"]}, {"type": "string", "pattern": "[abc]{1,4}"}]},
    },
    "required": ["a", "b"],
}
CHOICES = ["abcab", "abba", "a", "cab cab", "12.12"]
CASES = (
    matches("[a-c]{2,9}"),
    matches("(ab|ba)+(c[0-9]{2})?"),
    matches("-?[0-9]+\\.[0-9]{1,3}"),
    matches("(abc, )*ab"),
    matches("a(b|bc|bcabcab)"),
    Case("choices", CHOICES, lambda text: text in CHOICES),
    Case("json_schema", OBJECT, is_object),
)


def by_row(cases: list[Case | None]) -> dict[str, Any]:
    """Make the options of a batch with a language for each row, or None."""
    options: dict[str, Any] = {"tokenizer": letters_tokenizer()}
    for name in ("regex", "choices", "json_schema"):
        values = [case.value if case and case.option == name else None for case in cases]
        if any(value is not None for value in values):
            options[name] = values
    return options


def random_languages(rng: random.Random, rows: int) -> list[Case | None]:
    """Draw a language for each row; now and then none."""
    return [None if rng.random() < 0.1 else rng.choice(CASES) for _ in range(rows)]


def text_of(ids: list[int]) -> str:
    """The text of new tokens, up to the eos."""
    text = ""
    for token in ids:
        if token == EOS:
            break
        text += TEXTS[token - 2]
    return text
