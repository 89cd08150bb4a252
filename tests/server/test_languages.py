"""Texts of a language over HTTP, under the names that OpenAI, vLLM and SGLang have for them."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

openai: Any = pytest.importorskip("openai", reason="the tests' client")
pytest.importorskip("fastapi", reason="the server")
pytest.importorskip("llguidance", reason="constraints")
pytest.importorskip("outlines_core", reason="constraints")

from tests.support.openai_server import Served, served  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["sum", "list"]}, "count": {"enum": [1, 2, 3]}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(tiny_model: Any, tiny_tokenizer: Any) -> Iterator[Served]:
    with served(tiny_model, tiny_tokenizer) as running:
        yield running


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "(sum|list)[0-9]{3}"}, "(sum|list)[0-9]{3}"),
        ({"guided_regex": "[0-9]{2}-[0-9]{2}"}, "[0-9]{2}-[0-9]{2}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"structured_outputs": {"choice": ["value", "list"]}}, "value|list"),
        ({"choices": ["one", "two"]}, "one|two"),
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_texts_are_of_the_language(
    server: Served, fields: dict[str, Any], pattern: str, temperature: int
) -> None:
    reply = server.chat(temperature=temperature, seed=3, max_tokens=24, extra_body=fields)
    assert re.fullmatch(pattern, reply.choices[0].message.content)
    assert reply.choices[0].finish_reason == "stop"


def test_json_of_a_schema_beside_other_texts(server: Served) -> None:
    plain = server.chat(temperature=0, max_tokens=16)
    for fields in (
        {"response_format": FORMAT},
        {"extra_body": {"guided_json": SCHEMA}},
        {"extra_body": {"structured_outputs": {"json": SCHEMA}}},
    ):
        stream = server.chat(max_tokens=64, temperature=0, stream=True, **fields)
        deltas = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        value = json.loads("".join(deltas))
        assert value.keys() == {"name", "count"}
        assert value["name"] in ("sum", "list")
        assert value["count"] in (1, 2, 3)
    again = server.chat(temperature=0, max_tokens=16)
    assert again.choices[0].message.content == plain.choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"response_format": {"type": "xml"}}, "response_format is"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs has xml"),
        ({"regex": "a", "guided_regex": "b"}, "two languages"),
        ({"regex": "a", "choices": ["b"]}, "regex and choices"),
        ({"regex": "("}, "regex cannot be kept to"),
        ({"regex": "[0-9]{50}"}, "max_new_tokens"),
        ({"regex": "a" * 70000}, "more than 65536 characters"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_language_is_refused(server: Served, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.chat(max_tokens=8, extra_body=fields)
    assert told in str(refused.value)
