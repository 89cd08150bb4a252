"""Languages that cannot be kept to are refused before any forward, by what is wrong and the
remedy."""

from typing import Any

import pytest
import torch

pytest.importorskip("outlines_core")
pytest.importorskip("llguidance")

from modeling_mrp import MRPForCausalLM
from modeling_mrp.constraints import languages, patterns
from modeling_mrp.constraints.schema import schema_pattern
from modeling_mrp.generate.constrain import response_options
from tests.support.languages import EOS, letters_tokenizer
from tests.support.random_cases import make_model

PROMPTS = torch.tensor([[5, 6, 7], [7, 8, 9]])
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"regex": "a+", "tokenizer": None}, "regex needs the tokenizer"),
    ({"regex": "a+", "tokenizer": object()}, "regex needs the tokenizer"),
    ({"regex": "a+", "eos_token_id": []}, "regex needs an eos"),
    ({"regex": "(a"}, "regex cannot be kept to: "),
    ({"regex": "(?=a)b"}, "regex cannot be kept to: "),
    ({"regex": "Z"}, "regex cannot be kept to: the tokenizer's tokens make none of its texts"),
    ({"regex": ["a", "b", "c"]}, "regex has 3 values for 2 prompts: give one for all, or"),
    ({"choices": [["a"]]}, "choices has 1 values for 2 prompts"),
    (
        {"regex": ["a", None], "choices": [["a"], ["b"]]},
        "row 0 has regex and choices: give one of them",
    ),
    (
        {"regex": ["a", "(abc){9}"], "max_new_tokens": 5},
        r"row 1: no text of its language has fewer than \d+ tokens, .* room for 5: raise it to \d+",
    ),
    ({"regex": "a", "min_new_tokens": 2}, "min_new_tokens .* leave out the one or the other"),
    (
        {"regex": "a", "infill_ids": torch.tensor([[60, 5], [60, 5]])},
        "infill_ids .* leave out the one or the other",
    ),
    ({"json_schema": {"type": "integer", "minimum": 1}}, "minimum at # is not supported"),
    ({"json_schema": {"$ref": "#/$defs/a"}}, r"\$ref at # is '#/\$defs/a', which is not there"),
    ({"grammar": "start: nope", "decoding": "sequential"}, "grammar cannot be kept to: .*nope"),
    ({"grammar": 'start: "a"'}, "grammar .* another order: use the target 'sequential'"),
    (
        {"grammar": 'start: "a"', "decoding": "sequential", "denoising_steps": 2},
        "grammar .* one token a step",
    ),
    ({"grammar": 'start: "a"', "decoding": "mrp_direct"}, "grammar .* another order"),
]


@pytest.fixture(scope="module")
def model() -> MRPForCausalLM:
    model = make_model()

    def refuse(*_: Any) -> None:
        raise AssertionError("the backbone ran")

    model.model.register_forward_pre_hook(refuse)
    return model


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_a_language_that_cannot_be_kept_to(
    model: MRPForCausalLM, options: dict[str, Any], message: str
) -> None:
    defaults = {"tokenizer": letters_tokenizer(), "eos_token_id": EOS, "max_new_tokens": 30}
    with pytest.raises(ValueError, match=f"(?s){message}"):
        model.generate(PROMPTS, **(defaults | options))


def test_the_least_number_of_tokens_is_enough() -> None:
    """As the message says; one less is refused. Two of the digits may be one token."""
    model = make_model()
    options = {"tokenizer": letters_tokenizer(), "eos_token_id": EOS, "regex": "(abc){3}[0-9]{5}"}
    with pytest.raises(ValueError, match="raise it to 6 at least"):
        model.generate(PROMPTS[:1], max_new_tokens=5, **options)
    out = model.generate(PROMPTS[:1], max_new_tokens=6, **options)
    assert out.shape[1] == 3 + 6


def test_libraries_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = {"tokenizer": letters_tokenizer(), "eos_token_id": EOS}
    model = make_model()
    monkeypatch.setattr(patterns, "outlines_core", None)
    with pytest.raises(ImportError, match=r"need outlines-core.*modeling-mrp\[constraints\]"):
        model.generate(PROMPTS, regex="a", **options)
    monkeypatch.setattr(languages, "LLMatcher", None)
    languages._OF_TOKENIZERS.clear()
    with pytest.raises(ImportError, match=r"need llguidance.*modeling-mrp\[constraints\]"):
        model.generate(PROMPTS, grammar='start: "a"', decoding="sequential", **options)


REFUSED_SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems at #"),
    ({"type": "object", "properties": {"a": {"not": {}}}}, "not at #/properties/a"),
    ({"oneOf": [{"type": "null"}]}, "oneOf at #"),
    ({"allOf": [{"type": "null"}, {"type": "null"}]}, "allOf at # is of several schemas"),
    ({"type": "string", "pattern": "."}, "pattern at # is of texts with quotes"),
    ({"type": "string", "pattern": "a+", "minLength": 2}, "minLength at #"),
    ({"type": "string", "format": "email"}, "format at # is of texts with quotes"),
    ({"type": "object", "properties": {"a": {}}, "required": ["b"]}, "required at # is of 'b'"),
    ({"type": "object", "properties": {'"': {}}}, "properties at # is of '\"'"),
    ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "refers to itself"),
    ({"$ref": "http://x.y/z"}, r"\$ref at # is 'http"),
    ({"enum": []}, "enum at # is empty"),
    ({"const": 1, "type": "string"}, "const at # is of another type"),
    ({"type": "any"}, "type is 'any' at #"),
    ({"const": "\ue000"}, "private-use"),
    ({"type": "array", "items": 3}, "#/items is 3"),
]


@pytest.mark.parametrize(("schema", "message"), REFUSED_SCHEMAS)
def test_a_schema_of_which_something_would_not_hold(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schema_pattern(schema)


def test_a_value_of_any_kind_within_another() -> None:
    """outlines-core alone takes '{null}' for an object that may have a property of any kind."""
    automaton = patterns.byte_automaton(schema_pattern({"properties": {"a": {}}}))
    for text, held in (('{"a": null}', True), ('{"a": [1, "b"]}', True), ("{null}", False)):
        state = 0
        for byte in text.encode():
            state = automaton.next_state[state, byte] if state >= 0 else -1
        assert bool(state >= 0 and automaton.final[state]) == held


def test_openais_response_format() -> None:
    schema = {"type": "null"}
    assert response_options(None) == response_options({"type": "text"}) == {}
    assert response_options({"type": "json_object"}) == {"json_schema": {"type": "object"}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert response_options(named) == {"json_schema": schema}
    for wrong in ({"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "schema": {}}):
        with pytest.raises(ValueError, match="response_format is"):
            response_options(wrong)
