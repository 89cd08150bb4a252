"""Records that users train on: their layouts, and errors that state the reason and the place.

A record is an object in one of four layouts:

- `messages`, a chat.
- `prompt` and `completion`, which are both texts or both lists of messages.
- `text`, which is learned as a whole.
- The output of `mrp decode`, a text that a model wrote itself:

    {"ids": [5, 8, 2, 9, 1], "response_start": 2, "reveal_step": [1, 0, 2],
     "decoded_by": {"model": "org/name", ...}}

Records in other layouts are translated to these (`layouts.py`).

An assistant turn with `weight: 0` (OpenAI) or `train: false` (axolotl) is not learned. The field
`chat_template_kwargs` of a record holds variables of the chat template.

In the output of `mrp decode`, `ids` are the token ids of prompt and response, and `response_start`
is the length of the prompt. `reveal_step` holds, for each token of the response, the decoding step
that revealed it, counted from 0; later blocks have later steps. `decoded_by` may be missing. Its
`block_size` and `mask_token_id` must be those of the model in training. If its `digest` is that of
another backbone, there is a warning, since a head learns best from the states of its own backbone.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .fields import FieldError, RecordError, are_mappings, check_utf8, format_value, string
from .layouts import HINT, record_fields

__all__ = [
    "Chat",
    "FieldError",
    "RecordError",
    "Text",
    "Trajectory",
    "check_utf8",
    "parse",
    "parse_line",
    "parse_prompt",
]
ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_STEP = 2**31 - 1  # the largest step, since samples hold steps in 32 bits
_FIELDS: tuple[set[str], ...] = ({"messages"}, {"prompt", "completion"}, {"text"}, {"reveal_step"})


@dataclass(frozen=True)
class Chat:
    """A conversation: one to learn, which ends with its last learned turn, or a prompt.

    Attributes:
        messages: Dicts of `role`, `content` and any other fields that the chat template reads.
        learned: Indices of the messages that are learned (have a loss). The last message is one of
            them. Empty for a prompt.
        tools: Descriptions of tools, for the chat template.
        variables: Further variables of the chat template.
    """

    messages: list[dict[str, Any]]
    learned: tuple[int, ...] = ()
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Text:
    """A plain text: a prompt, which may be empty, and a completion, which is learned."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Trajectory:
    """A text that a model decoded, with the step that revealed each token, as `mrp decode` writes
    it.

    Attributes:
        ids: The token ids of prompt and response.
        response_start: Number of tokens in the prompt.
        reveal_step: For each token of the response, the decoding step that revealed it, counted
            from 0.
        decoded_by: How the text was decoded, by name: `model` (the checkpoint), `digest` (of the
            backbone's weights), `block_size`, `mask_token_id` and others; empty if unknown.
    """

    ids: list[int]
    response_start: int
    reveal_step: list[int]
    decoded_by: Mapping[str, Any] = field(default_factory=dict)


def parse(row: Any) -> Chat | Text | Trajectory:
    """Parse a record to train on.

    Args:
        row: The record: a row of a dataset, or the JSON object of a line.

    Returns:
        A `Chat` if the record has `messages`, or a `prompt` and a `completion` that are lists of
            messages; a `Text` if it has a `prompt` and a `completion` that are texts, or a `text`;
            a `Trajectory` if `mrp decode` wrote it, with reveal steps.

    Raises:
        FieldError: if the record is malformed, has none or several of these layouts, or holds
            nothing to learn.
    """
    fields = record_fields(row)
    layouts = [names for names in _FIELDS if names & fields.keys()]
    if len(layouts) != 1:
        raise FieldError(None, f"found the fields {sorted(fields)}: {HINT}")
    if "text" in fields:
        return Text("", _learned("text", fields["text"]))
    if "reveal_step" in fields:
        return _trajectory(fields)
    prompt_length = 0
    if "messages" in fields:
        messages, trains = _messages(fields["messages"])
    else:
        prompt = fields.get("prompt")
        completion = fields.get("completion")
        if not (isinstance(prompt, list) and isinstance(completion, list)):
            return Text(string("prompt", prompt), _learned("completion", completion))
        prompt_length = len(prompt)
        messages, trains = _messages([*prompt, *completion])
    learned = []
    for index in range(prompt_length, len(messages)):
        if messages[index]["role"] == "assistant" and trains[index]:
            learned.append(index)
    if not learned:
        raise FieldError(
            "messages", "found no assistant turn that is learned: there is nothing to learn"
        )
    return _chat(messages[: learned[-1] + 1], tuple(learned), fields)


def parse_prompt(row: Any) -> Chat | Text:
    """Parse the prompt of a row. The prompt is the field `messages`, or the field `prompt`, which
    is a text or a list of messages. If the last message is an assistant turn, it is left out.
    Return a `Chat` without learned messages, or a `Text` with an empty completion. `FieldError` if
    the row is malformed or has no prompt."""
    fields = record_fields(row, answered=False)
    names = [name for name in ("messages", "prompt") if name in fields]
    if len(names) != 1:
        raise FieldError(
            None, f"found the fields {sorted(fields)}: needed is 'messages', or 'prompt'"
        )
    value = fields[names[0]]
    if names == ["prompt"] and not isinstance(value, list):
        return Text(string("prompt", value), "")
    messages, _ = _messages(value)
    if messages[-1]["role"] == "assistant":
        messages.pop()
    return _chat(messages, (), fields)


def _chat(
    messages: list[dict[str, Any]], learned: tuple[int, ...], fields: Mapping[str, Any]
) -> Chat:
    """Make a chat from messages that are already checked, with the tools and template variables in
    a row's fields; `FieldError` if these are malformed."""
    tools = fields.get("tools")
    if tools is not None and not are_mappings(tools):
        raise FieldError(
            "tools", f"found {format_value(tools)}: a list of objects is needed, a tool each"
        )
    variables = fields.get("chat_template_kwargs", {})
    if not isinstance(variables, Mapping):
        raise FieldError(
            "chat_template_kwargs",
            f"found {format_value(variables)}: an object of variables of the template is needed",
        )
    return Chat(messages, learned, tools or None, variables)


def _trajectory(fields: Mapping[str, Any]) -> Trajectory:
    """Make a trajectory from the fields of a row; `FieldError` if they are malformed, such as a
    response id without a step."""
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
            f"found {format_value(decoder)}: an object is needed, as mrp decode writes it, or no "
            "such field",
        )
    return Trajectory(ids, start, steps, decoder)


def _is_int_list(value: Any) -> bool:
    """Return whether a value is a non-empty list of ints, without bools."""
    return isinstance(value, list) and {type(number) for number in value} == {int}


def _messages(messages: Any) -> tuple[list[dict[str, Any]], list[bool]]:
    """Check the messages of a conversation (a prompt and its completion are joined). Return the
    messages without null fields and without the marks `weight` and `train`, and for each message
    whether it may be learned."""
    if not isinstance(messages, list) or not messages:
        raise FieldError(
            "messages", f"found {format_value(messages)}: a list of messages is needed"
        )
    checked = []
    trains = []
    for number, message in enumerate(messages):
        location = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise FieldError(
                location,
                f"found {format_value(message)}: an object with 'role' and 'content' is needed",
            )
        # Tables fill missing fields with null, which templates would print.
        message = {key: value for key, value in message.items() if value is not None}
        role = message.get("role")
        calls = message.get("tool_calls")
        if role not in ROLES:
            raise FieldError(
                f"{location}.role",
                f"found {format_value(role)}: one of {', '.join(ROLES)} is needed",
            )
        if calls is not None and not are_mappings(calls):
            raise FieldError(
                f"{location}.tool_calls",
                f"found {format_value(calls)}: a list of objects is needed, a call each",
            )
        is_learned = _take_marks(message, location)
        if not calls or "content" in message:
            has_text = role == "assistant" and is_learned and not calls
            (_learned if has_text else string)(f"{location}.content", message.get("content"))
        checked.append(message)
        trains.append(is_learned)
    for number, message in enumerate(checked):
        if message["role"] in ("user", "tool"):
            break
        trains[number] = False  # a turn before the first user or tool message answers nothing
    return checked, trains


def _take_marks(message: dict[str, Any], location: str) -> bool:
    """Remove the marks `weight` and `train` from a message. Return whether they allow the message
    to be learned. `FieldError` for an unsupported mark."""
    is_learned = True
    for name, needed in (("weight", "0 or 1"), ("train", "true or false")):
        if name not in message:
            continue
        mark = message.pop(name)
        if mark not in (0, 1):
            raise FieldError(
                f"{location}.{name}",
                f"found {format_value(mark)}: {needed} is needed, as a turn is learned or not",
            )
        if mark and message["role"] != "assistant":
            raise FieldError(
                f"{location}.{name}",
                f"found {format_value(mark)} in a turn of {message['role']!r}: only assistant "
                "turns are learned, remove it",
            )
        is_learned = is_learned and bool(mark)
    if "train_detail" in message:
        raise FieldError(
            f"{location}.train_detail", "a turn is learned as a whole: mark it by 'train' instead"
        )
    return is_learned


def _learned(name: str, value: Any) -> str:
    if not string(name, value).strip():
        raise FieldError(name, f"found {value!r}: there is nothing to learn in it")
    return value


def parse_line(line: bytes) -> Any:
    """Parse a line of JSON in UTF-8, with or without a byte order mark; `FieldError` if it is
    malformed."""
    try:
        return json.loads(line.decode("utf-8-sig").strip())
    except (ValueError, RecursionError) as error:
        raise FieldError(None, f"not JSON in UTF-8: {error}") from error
