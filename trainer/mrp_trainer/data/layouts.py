"""Translation of published layouts of records into the few layouts that the parser reads: a chat in
`messages` and `tools`, `prompt` and `completion`, `text`, or the output of `mrp decode`.

- ShareGPT's `conversations` of `from` and `value` become `messages`, and so do Alpaca's
  `instruction`, `input`, `output` and `history`. The same holds for a question and its answer:
  `question` or `query` with `answer`, `response` or `output`; `prompt` with `response` or `output`;
  `input` with `output`. If there is a `system` or `system_prompt` beside them, it becomes the first
  message.
- A `prompt` beside `messages` repeats them, and is left out.
- The content of a message may be a list of parts, which are joined to one text. `function_call`, as
  a field or as a role, becomes `tool_calls`, whose arguments are objects. The roles `function` and
  `observation` become `tool`.
- `tools` may be a JSON text, which is parsed. `functions` become `tools`.
"""

import json
from collections.abc import Mapping
from typing import Any

from .fields import FieldError, format_value, string

HINT = (
    "a record has one layout: 'messages', or 'prompt' and 'completion', or 'text', or what mrp "
    "decode writes; ShareGPT's 'conversations', Alpaca's 'instruction' and 'output', and "
    "'question' and 'answer' are read, too"
)
_OURS = {"messages", "completion", "reveal_step"}
_ANSWERS = ("output", "response", "answer")
# Fields of questions and of their answers. A `prompt` with an `answer` is a problem to be judged,
# and not a chat.
_PAIRS = {
    "question": _ANSWERS,
    "query": _ANSWERS,
    "prompt": ("response", "output"),
    "input": ("output",),
}
_KEYS = {"from": "role", "value": "content"}
# Names of roles, in lower case, with the names used here.
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "model", "ai", "bot", "assistant"), "assistant"),
    **dict.fromkeys(("function", "function_response", "observation", "tool", "ipython"), "tool"),
}
_CALL_ROLE = "function_call"  # an assistant's turn whose content is a call, as text


def record_fields(row: Any, answered: bool = True) -> dict[str, Any]:
    """Return the fields of a record by name, without null fields. Other published layouts are
    translated to those that `parse` reads:

    - `messages` and, optionally, `tools`.
    - `prompt` and `completion`.
    - `text`.
    - The fields that `mrp decode` writes: `ids`, `response_start`, `reveal_step`, `decoded_by`.

    Fields that belong to no layout are kept. A record without any known layout is not refused here.

    Args:
        row: The record, a mapping.
        answered: Concerns only records with a question and its answer, such as Alpaca's
            `instruction` and `output`. The question becomes a user's message; if `answered`, the
            answer becomes the assistant's message after it.

    Raises:
        FieldError: if `row` is not a mapping, if a value cannot be translated, or if a question has
            several answers.
    """
    if not isinstance(row, Mapping):
        raise FieldError(None, f"found {format_value(row)}: a record is an object; {HINT}")
    fields = {str(name): value for name, value in row.items() if value is not None}
    messages: list[Any] | None = None
    if not fields.keys() & _OURS:
        messages = _translated_messages(fields, answered)
    if messages is not None:
        system = string("system", fields.get("system", fields.get("system_prompt", "")))
        if system:
            messages.insert(0, {"role": "system", "content": system})
        fields["messages"] = messages
    elif "messages" in fields and "completion" not in fields:
        fields.pop("prompt", None)
    for name in ("messages", "prompt", "completion"):
        if isinstance(fields.get(name), list):
            fields[name] = [
                _message(message, f"{name}[{number}]")
                for number, message in enumerate(fields[name])
            ]
    if "functions" in fields and "tools" not in fields:
        functions = _parsed("functions", fields["functions"])
        if isinstance(functions, list):
            functions = [{"type": "function", "function": entry} for entry in functions]
        fields["tools"] = functions
    if "tools" in fields:
        fields["tools"] = _tools(fields["tools"])
    return fields


def _translated_messages(fields: dict[str, Any], answered: bool) -> list[Any] | None:
    """Make the messages of a row in one of the other layouts, and remove from `fields` what the
    messages replace. Return None if the row has no such layout."""
    answers = [name for name in _ANSWERS if name in fields]
    if "instruction" in fields and (answers or "text" not in fields):
        fields.pop("text", None)  # it repeats the other fields
        return _pair(fields, "instruction", answers, answered)
    if "text" in fields:
        return None
    if isinstance(fields.get("conversations"), list):
        return list(fields["conversations"])
    for question, its_answers in _PAIRS.items():
        if question in fields:
            answers = [name for name in its_answers if name in fields]
            alone = question in ("prompt", "input")
            return None if alone and not answers else _pair(fields, question, answers, answered)
    return None


def _pair(fields: dict[str, Any], question: str, answers: list[str], answered: bool) -> list[Any]:
    """Make the messages of a question and its answer: first the earlier pairs in `history`; then
    the question, followed by the `input` of an instruction in the same message; then the answer, if
    there is one and `answered` is set. `FieldError` if there are several answers."""
    if len(answers) > 1:
        raise FieldError(
            None, f"found the fields {', '.join(answers)}, each an answer: leave one of them"
        )
    messages: list[Any] = []
    history = fields.get("history", [])
    for number, pair in enumerate(history if isinstance(history, list) else [history]):
        if not isinstance(pair, list) or len(pair) != 2:
            raise FieldError(
                f"history[{number}]",
                f"found {format_value(pair)}: a list of an instruction and its answer is needed",
            )
        for role, text in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": string(f"history[{number}]", text)})
    value = fields.pop(question)
    if question == "prompt" and isinstance(value, list):
        messages += value
    else:
        parts = [string(question, value)]
        if question == "instruction":
            parts.append(string("input", fields.get("input", "")))
        messages.append({"role": "user", "content": "\n\n".join(filter(None, parts))})
    for name in answers if answered else ():
        messages.append({"role": "assistant", "content": fields.pop(name)})
    return messages


def _message(message: Any, location: str) -> Any:
    """Translate the field names, the role, the content and the tool calls of a message. Return a
    value that is not an object unchanged."""
    if not isinstance(message, Mapping):
        return message
    translated = {}
    for key, value in message.items():
        if value is not None:
            translated[_KEYS.get(key, key)] = value
    role = str(translated.get("role")).lower()
    if role == _CALL_ROLE:
        call = _parsed(f"{location}.content", translated.pop("content", None))
        translated |= {
            "role": "assistant",
            "tool_calls": call if isinstance(call, list) else [call],
        }
    elif role in _ROLES:
        translated["role"] = _ROLES[role]
    if "function_call" in translated:
        translated["tool_calls"] = [translated.pop("function_call")]
    if isinstance(translated.get("content"), list):
        translated["content"] = _text_of(translated["content"], f"{location}.content")
    if isinstance(translated.get("tool_calls"), list):
        translated["tool_calls"] = [_call(call) for call in translated["tool_calls"]]
    return translated


def _text_of(parts: list[Any], location: str) -> str:
    """Join the parts of a message's content to one text; `FieldError` for a part that is not a
    text."""
    texts = []
    for number, part in enumerate(parts):
        if isinstance(part, Mapping) and part.get("type", "text") != "text":
            raise FieldError(
                f"{location}[{number}]",
                f"found a part of type {part['type']!r}: only texts are read, remove the record",
            )
        text = part.get("text") if isinstance(part, Mapping) else part
        texts.append(string(f"{location}[{number}]", text))
    return "".join(texts)


def _call(call: Any) -> Any:
    """Convert a tool call to OpenAI's form. Arguments that are a JSON text of an object are parsed,
    since templates would print the text in quotes."""
    if not isinstance(call, Mapping):
        return call
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        return call
    function = dict(function)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    if "function" in call:
        return {**call, "function": function}
    if "arguments" in function and "type" not in function:
        return {"type": "function", "function": function}
    return function


def _tools(tools: Any) -> Any:
    """Parse tools that are given as a JSON text or as a list of JSON texts; put a single tool into
    a list."""
    tools = _parsed("tools", tools)
    if isinstance(tools, list):
        return [_parsed(f"tools[{number}]", tool) for number, tool in enumerate(tools)]
    return [tools] if isinstance(tools, Mapping) else tools


def _parsed(location: str, value: Any) -> Any:
    """Parse a text as JSON; an empty text gives an empty list. Return a value that is not a text
    unchanged. `FieldError` if the text is not JSON."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return []
    try:
        return json.loads(value)
    except ValueError as error:
        raise FieldError(
            location, f"found {format_value(value)}: JSON is needed ({error})"
        ) from error
