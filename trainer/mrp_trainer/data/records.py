"""Records that users train on: their layouts, and errors that name what is wrong and where.

A record is an object of one of four layouts: `messages`, a chat; `prompt` and `completion`, both
texts or both lists of messages; `text`, which is learned as a whole; and what `mrp decode` writes,
a text that a model wrote itself:

    {"ids": [5, 8, 2, 9, 1], "response_start": 2, "reveal_step": [1, 0, 2], "decoded_by": {"model":
    "org/name", ...}}

ShareGPT's `conversations` (of `from` and `value`) are read as `messages`, and Alpaca's
`instruction`, `input` and `output` as a chat of two turns, even if there is a `text` that repeats
them.

`ids` are the token ids of prompt and response, `response_start` is the length of the prompt, and
`reveal_step` is the decoding step, from 0 on, that revealed each token of the response; later
blocks have later steps. `decoded_by` may be missing. Its `block_size` and `mask_token_id` must be
those of the model that trains. A `digest` of another backbone causes a warning, since a head learns
best from the states of its own backbone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
_LAYOUTS = (
    "a record has one layout: 'messages', or 'prompt' and 'completion', or 'text', or what mrp "
    "decode writes; ShareGPT's 'conversations' and Alpaca's 'instruction' and 'output' are read, "
    "too"
)
_MAX_STEP = 2**31 - 1  # of a step, which samples hold in 32 bits
_FIELDS: tuple[set[str], ...] = ({"messages"}, {"prompt", "completion"}, {"text"}, {"reveal_step"})
# ShareGPT's names of fields and roles, and ours.
_KEYS = {"from": "role", "value": "content"}
_SPEAKERS = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class Chat:
    """A conversation up to its last assistant turn.

    Attributes:
        messages: {role, content, ...}, with any other fields that the chat template reads.
        learned_from: Index of the first message that may be learned; earlier ones belong to the
            prompt.
        tools: Descriptions of tools, for the chat template.
    """

    messages: list[dict[str, Any]]
    learned_from: int = 0
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Text:
    """A plain text: a prompt, which may be empty, and a completion, which is learned."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Trajectory:
    """A text that a model decoded, and the step that revealed each token; the fields are those that
    `mrp decode` writes."""

    ids: list[int]
    response_start: int
    reveal_step: list[int]
    decoded_by: Mapping[str, Any] = field(default_factory=dict)


class FieldError(ValueError):
    """An error in one field of a record, or in the record as a whole (`field_name` is None)."""

    def __init__(self, field_name: str | None, message: str) -> None:
        super().__init__(message)
        self.field_name = field_name


class RecordError(ValueError):
    """An error that lists malformed records, each with its file, line and field."""

    def __init__(self, problems: Sequence[str], incomplete: bool = False) -> None:
        lines = list(problems)
        if len(problems) != 1:
            lines.insert(
                0,
                f"{'the first ' * incomplete}{len(problems)} malformed "
                f"records{' (there may be more)' * incomplete}:",
            )
        super().__init__("\n  ".join(lines))


def parse(row: Any) -> Chat | Text | Trajectory:
    """Parse a row of a dataset, or the JSON object of a line, into a record; `FieldError` if it is
    malformed."""
    fields = _record_fields(row)
    layouts = [names for names in _FIELDS if names & fields.keys()]
    if len(layouts) != 1:
        raise FieldError(None, f"found the fields {sorted(fields)}: {_LAYOUTS}")
    if "text" in fields:
        return Text("", _learned("text", fields["text"]))
    if "reveal_step" in fields:
        return _trajectory(fields)
    if "messages" in fields:
        learned_from = 0
        messages = _messages(fields["messages"])
    else:
        prompt = fields.get("prompt")
        completion = fields.get("completion")
        if not (isinstance(prompt, list) and isinstance(completion, list)):
            return Text(_string("prompt", prompt), _learned("completion", completion))
        learned_from = len(prompt)
        messages = _messages([*prompt, *completion])
    end = 0
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and index >= learned_from:
            end = index + 1
    if not end:
        raise FieldError("messages", "found no assistant turn: there is nothing to learn")
    return Chat(messages[:end], learned_from, fields.get("tools"))


def parse_prompt(row: Any) -> Chat | Text:
    """Parse the prompt of a row: its `messages` without a final assistant turn, or its `prompt`, a
    text or a list of messages. `FieldError` if the row is malformed or has no prompt."""
    fields = _record_fields(row)
    names = [name for name in ("messages", "prompt") if name in fields]
    if len(names) != 1:
        raise FieldError(
            None, f"found the fields {sorted(fields)}: needed is 'messages', or 'prompt'"
        )
    value = fields[names[0]]
    if names == ["prompt"] and not isinstance(value, list):
        return Text(_string("prompt", value), "")
    messages = _messages(value)
    if messages[-1]["role"] == "assistant":
        messages.pop()
    return Chat(messages, 0, fields.get("tools"))


def _record_fields(row: Any) -> dict[str, Any]:
    """Collect a row's fields that are not null; return those of ShareGPT and Alpaca as
    `messages`."""
    if not isinstance(row, Mapping):
        raise FieldError(None, f"found {_format_value(row)}: a record is an object; {_LAYOUTS}")
    fields = {str(name): value for name, value in row.items() if value is not None}
    if fields.keys() & {"messages", "prompt", "completion", "reveal_step"}:
        return fields
    if "instruction" in fields and ("output" in fields or "text" not in fields):
        instructions = [
            _string(name, fields[name]) for name in ("instruction", "input") if name in fields
        ]
        answered = (
            [{"role": "assistant", "content": fields["output"]}] if "output" in fields else []
        )
        fields["messages"] = [
            {"role": "user", "content": "\n\n".join(filter(None, instructions))},
            *answered,
        ]
        fields.pop("text", None)  # it repeats the other fields
    elif isinstance(fields.get("conversations"), list) and "text" not in fields:
        fields["messages"] = [_sharegpt_message(message) for message in fields["conversations"]]
    return fields


def _sharegpt_message(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    renamed = {_KEYS.get(key, key): value for key, value in message.items()}
    return {**renamed, "role": _SPEAKERS.get(str(renamed.get("role")), renamed.get("role"))}


def _trajectory(fields: Mapping[str, Any]) -> Trajectory:
    """Make a trajectory of a row's fields; `FieldError` unless each id of the response has a
    step."""
    ids: Any = fields.get("ids")
    start: Any = fields.get("response_start")
    steps: Any = fields.get("reveal_step")
    well_formed = _is_int_list(ids) and _is_int_list([start]) and _is_int_list(steps)
    if (
        not well_formed
        or not 0 <= start < len(ids)
        or len(steps) != len(ids) - start
        or min(steps) < 0
    ):
        raise FieldError(
            "reveal_step",
            "needed are ids, response_start, the index of the response's first id, and a step from "
            "0 on for each response id: give what mrp decode writes",
        )
    if max(steps) > _MAX_STEP:
        raise FieldError("reveal_step", f"found {max(steps)}: a step is at most {_MAX_STEP}")
    decoder = fields.get("decoded_by", {})
    if not isinstance(decoder, Mapping):
        raise FieldError(
            "decoded_by",
            f"found {_format_value(decoder)}: an object is needed, as mrp decode writes it, or no "
            "such field",
        )
    return Trajectory(ids, start, steps, decoder)


def _is_int_list(value: Any) -> bool:
    """Return whether a value is a list of ints, bools excluded, with at least one."""
    return isinstance(value, list) and {type(number) for number in value} == {int}


def _messages(messages: Any) -> list[dict[str, Any]]:
    """Check the messages of a conversation, prompt and completion joined; return them without
    fields that are null."""
    if not isinstance(messages, list) or not messages:
        raise FieldError(
            "messages", f"found {_format_value(messages)}: a list of messages is needed"
        )
    checked = []
    for number, message in enumerate(messages):
        location = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise FieldError(
                location,
                f"found {_format_value(message)}: an object with 'role' and 'content' is needed",
            )
        # Tables fill missing fields with null, which templates would print.
        message = {key: value for key, value in message.items() if value is not None}
        role = message.get("role")
        calls = message.get("tool_calls")
        if role not in ROLES:
            raise FieldError(
                f"{location}.role",
                f"found {_format_value(role)}: one of {', '.join(ROLES)} is needed",
            )
        if not calls or "content" in message:
            (_learned if role == "assistant" and not calls else _string)(
                f"{location}.content", message.get("content")
            )
        checked.append(message)
    if checked[0]["role"] == "assistant":
        raise FieldError(
            "messages[0].role",
            "found 'assistant' in the first message: a turn that it answers must come before",
        )
    return checked


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise FieldError(name, f"found {_format_value(value)}: a string is needed")
    check_utf8(value, name)
    return value


def _learned(name: str, value: Any) -> str:
    if not _string(name, value).strip():
        raise FieldError(name, f"found {value!r}: there is nothing to learn in it")
    return value


def check_utf8(text: str, name: str | None = None) -> None:
    """Raise `FieldError` for a text that UTF-8 cannot hold, as tokenizers cannot read it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = (
            f"{'found ' * (name is not None)}half a surrogate pair, {text[error.start]!a}, at "
            f"character {error.start}"
        )
        raise FieldError(name, f"{problem}: text that UTF-8 can hold is needed") from error


def parse_line(line: bytes) -> Any:
    """Parse a line of JSON in UTF-8, with or without a byte order mark; `FieldError` if it is
    malformed."""
    try:
        return json.loads(line.decode("utf-8-sig").strip())
    except (ValueError, RecursionError) as error:
        raise FieldError(None, f"not JSON in UTF-8: {error}") from error


def _format_value(value: Any) -> str:
    """Format a value for an error message."""
    if value is None:
        return "nothing"
    text = repr(value)
    if len(text) > 40:
        text = f"{text[:37]}..."
    return text
