"""Calls of tools over HTTP, with OpenAI's client: required ones by constraint, others as the text
has them."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

openai: Any = pytest.importorskip("openai", reason="the tests' client")
pytest.importorskip("fastapi", reason="the server")
pytest.importorskip("llguidance", reason="constraints")
pytest.importorskip("outlines_core", reason="constraints")

from mrp_trainer.serve.requests import ChatRequest  # noqa: E402
from mrp_trainer.serve.tools import BEGIN, END, Tools  # noqa: E402

from tests.support.openai_server import CHAT, Served, served  # noqa: E402

TEMPLATE = """{% if tools %}tools {% for tool in tools %}{{ tool | tojson }}
{% endfor %}calls stand in <tool_call></tool_call>
{% endif %}{% for message in messages %}{{ message.role }}: {{ message.content }}
{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{% endfor %}{% endfor %}"""
COLOURS = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "paint", "parameters": COLOURS}},
    {"type": "function", "function": {"name": "list_all", "description": "All of them."}},
]


@pytest.fixture(scope="module")
def server(tiny_model: Any, tiny_tokenizer: Any) -> Iterator[Served]:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = TEMPLATE
    with served(tiny_model, tokenizer) as running:
        yield running


PAINT = {"type": "function", "function": {"name": "paint"}}


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_required_call_is_one(server: Served, temperature: int) -> None:
    options = {"temperature": temperature, "seed": 5, "max_tokens": 120, "tools": TOOLS[:1]}
    reply = server.chat(tool_choice="required", **options)
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "paint"
    assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
    named = server.chat(tool_choice=PAINT, **options)
    (other,) = named.choices[0].message.tool_calls
    assert other.function == call.function
    assert other.id != call.id


def test_a_streamed_call_comes_in_whole_deltas(server: Served) -> None:
    stream = server.chat(temperature=0, max_tokens=120, tools=TOOLS, tool_choice=PAINT, stream=True)
    chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
    assert not "".join(chunk.delta.content or "" for chunk in chunks)
    (call,) = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert call.index == 0
    assert call.id.startswith("call_")
    assert call.function.name == "paint"
    assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


@pytest.mark.parametrize("several", [True, False])
def test_calls_that_a_model_chooses_are_read_from_its_text(server: Served, several: bool) -> None:
    """The text is bound by a regex here, as the embedded checkpoint calls nothing by itself; whole
    and streamed, of content and two calls, of which the second is left out unless several may be.
    """
    calls = [call_of("paint", {"colour": "red"}), call_of("list_all", {})]
    options = {
        "temperature": 0,
        "max_tokens": 200,
        "tools": TOOLS,
        "parallel_tool_calls": several,
        "extra_body": {"choices": ["I paint. " + "\n".join(calls)]},
    }
    message = server.chat(**options).choices[0].message
    names = ["paint", "list_all"] if several else ["paint"]
    assert message.content == "I paint."
    assert [call.function.name for call in message.tool_calls] == names
    assert json.loads(message.tool_calls[0].function.arguments) == {"colour": "red"}
    stream = server.chat(stream=True, **options)
    chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
    assert "".join(chunk.delta.content or "" for chunk in chunks).strip() == "I paint."
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [call.index for call in deltas] == list(range(len(names)))
    assert [call.function.name for call in deltas] == names
    assert len({call.id for call in deltas}) == len(names)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


def test_a_model_that_calls_none_answers_in_text(server: Served) -> None:
    chosen, never = (
        server.chat(temperature=0, max_tokens=16, tools=TOOLS, tool_choice=choice)
        for choice in ("auto", "none")
    )
    for reply in (chosen, never):
        assert reply.choices[0].message.content
        assert not reply.choices[0].message.tool_calls
        assert reply.choices[0].finish_reason in ("stop", "length")
    assert never.usage.prompt_tokens < chosen.usage.prompt_tokens, "none: they are not shown"


def test_a_history_of_calls_is_shown(server: Served) -> None:
    first = (
        server.chat(temperature=0, max_tokens=120, tools=TOOLS, tool_choice=PAINT)
        .choices[0]
        .message
    )
    answered = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "it is done"}
    history = [*CHAT, first.model_dump(), answered]
    reply = server.chat(messages=history, temperature=0, max_tokens=8, tools=TOOLS)
    assert reply.usage.prompt_tokens > 0
    assert reply.choices[0].message.content


def tools_of(**fields: Any) -> Tools:
    request = ChatRequest.model_validate({"messages": CHAT, "tools": TOOLS, **fields})
    tools = Tools.of(request)
    assert tools is not None
    return tools


def call_of(name: str, arguments: Any) -> str:
    return f"{BEGIN}{json.dumps({'name': name, 'arguments': arguments})}{END}"


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("no call", "no call", []),
        ("I paint. " + call_of("paint", {"colour": "red"}), "I paint.", ["paint"]),
        (call_of("paint", {}) + "\n" + call_of("list_all", {}), "", ["paint", "list_all"]),
        (call_of("other", {}), call_of("other", {}), []),
        (call_of("paint", [1]), call_of("paint", [1]), []),
        (BEGIN + "{not JSON" + END, BEGIN + "{not JSON" + END, []),
        (BEGIN + '{"name": "paint"', BEGIN + '{"name": "paint"', []),
    ],
)
def test_what_is_a_call(text: str, content: str, names: list[str]) -> None:
    shown, calls = tools_of().split(text)
    assert shown == content
    assert [call["function"]["name"] for call in calls] == names
    single, first = tools_of(parallel_tool_calls=False).split(text)
    assert [call["function"]["name"] for call in first] == names[:1]
    assert single == content


def test_what_may_become_a_call_is_held_back() -> None:
    assert Tools.certain("I paint. ") == 9
    assert Tools.certain("I paint. <tool") == 9
    assert Tools.certain("a < b") == 5
    assert Tools.certain("I " + BEGIN + "x") == 2


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "none of",
        ),
        ({"tool_choice": "required"}, "declare its tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "pattern"),
        ({"tools": TOOLS, "tool_choice": "required", "extra_body": {"regex": "a"}}, "language too"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "tool_call_id"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "1",
                                "type": "function",
                                "function": {"name": "a", "arguments": "["},
                            }
                        ],
                    }
                ]
            },
            "no JSON",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_no_call_is_refused(server: Served, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        server.chat(max_tokens=8, **fields)
    assert told in str(refused.value)


def test_templates_without_tools_are_refused(tiny_model: Any, tiny_tokenizer: Any) -> None:
    with served(tiny_model, tiny_tokenizer) as running:
        for messages in (CHAT, [*CHAT, {"role": "tool", "tool_call_id": "1", "content": "42 x"}]):
            with pytest.raises(openai.BadRequestError, match="template"):
                running.chat(messages=messages, tools=TOOLS, max_tokens=8)
