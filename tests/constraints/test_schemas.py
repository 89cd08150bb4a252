"""JSON schemas: all texts of one are valid, and what is not valid is none. A sample by keyword; for
the whole test suite of JSON Schema: `python -m benchmarks.constrained schemas`."""

import json
import random
from typing import Any, NamedTuple

import pytest

pytest.importorskip("outlines_core")
pytest.importorskip("jsonschema")

from jsonschema import Draft202012Validator

from benchmarks.constrained import accepts, random_text
from modeling_mrp.constraints.patterns import byte_automaton
from modeling_mrp.constraints.schema import schema_pattern


class Sample(NamedTuple):
    """A schema, values that are texts of it, and values that are not valid."""

    schema: dict[str, Any]
    texts: list[Any]
    wrong: list[Any]


AB = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
SAMPLES = {
    "type": Sample({"type": "integer"}, [0, -12], [1.5, "1", None, True]),
    "types": Sample({"type": ["null", "boolean"]}, [None, False], [0, "null"]),
    "number": Sample({"type": "number"}, [0, -0.5, 12.25], ["0", None]),
    "const": Sample({"const": {"a": [1, None]}}, [{"a": [1, None]}], [{"a": [1]}, 1]),
    "enum": Sample({"enum": ["é", 6, [True]]}, ["é", 6, [True]], [[False], 7]),
    "anyOf": Sample({"anyOf": [{"type": "null"}, {"enum": [2]}]}, [None, 2], [3, "2"]),
    "allOf": Sample({"allOf": [{"type": "boolean"}]}, [True], [1]),
    "ref": Sample({"$defs": {"n": {"type": "null"}}, "$ref": "#/$defs/n"}, [None], [0]),
    "lengths": Sample(
        {"type": "string", "minLength": 1, "maxLength": 3}, ["a", "abc"], ["", "abcd"]
    ),
    "pattern": Sample({"type": "string", "pattern": "^[a-c]{2}$"}, ["ab", "cc"], ["a", "abd"]),
    "format": Sample({"type": "string", "format": "date"}, ["2026-11-28"], ["28.11.2026"]),
    "items": Sample({"type": "array", "items": {"type": "null"}}, [[], [None]], [[1], [None, 2]]),
    "prefixItems": Sample(
        {"type": "array", "prefixItems": [{"type": "null"}, {"enum": [1]}]}, [[None, 1]], [[1, 1]]
    ),
    "counts": Sample(
        {"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 3},
        [[1, 1], [1, 1, 1]],
        [[1], [1, 1, 1, 1]],
    ),
    "properties": Sample(AB, [{"a": 1}, {"a": 1, "b": "x"}], [{"b": "x"}, {"a": "1"}]),
    "no others": Sample({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
    "others": Sample(
        {"type": "object", "additionalProperties": {"type": "null"}}, [{}, {"a": None}], [{"a": 1}]
    ),
    "any value": Sample({"properties": {"a": {}}}, [{"a": [1, "b"]}, {"a": {"b": None}}], []),
    "any": Sample({}, [1, "a", None, [True], {"a": 1}], []),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_texts_are_valid_and_invalid_values_are_no_texts(name: str) -> None:
    rng = random.Random(name)
    schema, texts, wrong = SAMPLES[name]
    automaton = byte_automaton(schema_pattern(schema))
    validator = Draft202012Validator(schema)
    for value in texts:
        assert validator.is_valid(value)
        assert accepts(automaton, json.dumps(value, ensure_ascii=False)), value
    for value in wrong:
        assert name == "format" or not validator.is_valid(value)
        assert not accepts(automaton, json.dumps(value, ensure_ascii=False)), value
    drawn = 0
    for _ in range(40):
        text = random_text(automaton, rng)
        if text is not None:
            validator.validate(json.loads(text))
            drawn += 1
    assert drawn > 0
