"""Records that users train on: their layouts, and errors that say what is wrong with them and where.

A record is an object of one of three layouts: `messages`, a chat; `prompt` and `completion`, both texts or both lists of
messages; `text`, all of which is learned.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
_LAYOUTS = "needed is 'messages', or 'prompt' and 'completion', or 'text'"


@dataclass(frozen=True)
class Chat:
    """A conversation up to its last assistant turn.

    Attributes:
        messages: {role, content, ...} with whatever else the chat template reads.
        learned_from: Assistant turns from this message on are learned.
        field_name: The record's field that holds them, for errors.
        tools: Descriptions of tools, for the chat template.
    """

    messages: list[dict[str, Any]]
    learned_from: int = 0
    field_name: str = "messages"
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Text:
    """A plain text: what is given (perhaps nothing) and what is learned."""

    prompt: str
    completion: str


Record = Chat | Text


class FieldError(ValueError):
    """What is wrong with one field of a record; None stands for the record as a whole."""

    def __init__(self, field_name: str | None, message: str) -> None:
        super().__init__(message)
        self.field_name = field_name


@dataclass(frozen=True)
class Problem:
    """A malformed record: the file, its line from 1 on (None for the file as a whole), the field and what is wrong with it."""

    path: str
    line: int | None
    field_name: str | None
    message: str

    def __str__(self) -> str:
        line = "" if self.line is None else f", line {self.line}"
        return f"{self.path}{line}{f', field {self.field_name}' if self.field_name else ''}: {self.message}"


class RecordError(ValueError):
    """Malformed records.

    Attributes:
        problems: What is wrong, in the order of the file.
    """

    def __init__(self, problems: Sequence[Problem], more: bool = False) -> None:
        self.problems = tuple(problems)
        if len(problems) == 1 and not more:
            super().__init__(str(problems[0]))
            return
        head = (
            f"the first {len(problems)} malformed records (there may be more)" if more else f"{len(problems)} malformed records"
        )
        super().__init__("\n  ".join([f"{head}:", *map(str, problems)]))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.problems, str(self))


def _restored(problems: Sequence[Problem], message: str) -> RecordError:
    error = RecordError(problems)
    error.args = (message,)
    return error


@dataclass(frozen=True)
class RecordParser:
    """Turns a line or a row into a record.

    Args:
        mask_token: The text of the mask token, which no record may hold: clean text would be read as noise.
        end_tokens: The texts of the tokens that end a turn, which no assistant turn may hold.
    """

    mask_token: str | None = None
    end_tokens: Sequence[str] = field(default=())

    def parse(self, raw: bytes | Mapping[str, Any]) -> Record:
        """The record of a line of JSON in UTF-8, or of a row.

        Raises:
            FieldError: It is malformed.
        """
        row = _decode(raw) if isinstance(raw, bytes) else raw
        if not isinstance(row, Mapping):
            raise FieldError(None, f"found {_found(row)}: a record is an object; {_LAYOUTS}")
        given = {name: value for name, value in row.items() if value is not None}
        layouts = [
            names for names in (("messages",), ("prompt", "completion"), ("text",)) if any(name in given for name in names)
        ]
        if not layouts:
            nulls = [name for name in ("messages", "prompt", "completion", "text") if name in row]
            found = f"null in {nulls[0]!r}" if nulls else f"the fields {sorted(map(str, row))}" if row else "no fields"
            raise FieldError(nulls[0] if nulls else None, f"found {found}: {_LAYOUTS}")
        if len(layouts) > 1:
            found = " and ".join(repr(name) for names in layouts for name in names if name in given)
            raise FieldError(layouts[1][0], f"found {found}: a record has one layout, remove the others; {_LAYOUTS}")
        if layouts[0] == ("messages",):
            return self._chat([("messages", given["messages"])], given.get("tools"))
        if layouts[0] == ("text",):
            return Text("", self._learned("text", given["text"]))
        return self._pair(given)

    def _pair(self, given: Mapping[str, Any]) -> Record:
        for name, other in (("prompt", "completion"), ("completion", "prompt")):
            if name not in given:
                raise FieldError(name, f"it is missing beside {other!r}: both are needed")
        prompt, completion = given["prompt"], given["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            return self._chat([("prompt", prompt), ("completion", completion)], given.get("tools"))
        for name, value in (("prompt", prompt), ("completion", completion)):
            if not isinstance(value, str | list):
                raise FieldError(name, f"found {_found(value)}: a string or a list of messages is needed")
        if isinstance(prompt, list) or isinstance(completion, list):
            found = f"{_found(completion)} beside a 'prompt' that is {_found(prompt)}"
            raise FieldError("completion", f"found {found}: both must be strings or both lists of messages")
        return Text(self._string("prompt", prompt), self._learned("completion", completion))

    def _chat(self, parts: Sequence[tuple[str, Any]], tools: Any) -> Chat:
        turns = [turn for name, messages in parts for turn in self._turns(name, messages)]
        learned_from = len(parts[0][1]) if len(parts) > 1 else 0
        for (_, before), (name, message) in pairwise(turns):
            if before["role"] == message["role"] == "assistant":
                raise FieldError(
                    f"{name}.role", "found a second assistant turn in a row: join the two, or put what came between"
                )
        name, first = turns[0]
        if first["role"] == "assistant":
            raise FieldError(f"{name}.role", "found 'assistant' in the first message: a turn that answers it must come before")
        replies = [i for i, (_, message) in enumerate(turns) if message["role"] == "assistant" and i >= learned_from]
        if not replies:
            raise FieldError(parts[-1][0], "found no assistant turn: there is nothing to learn")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
            raise FieldError("tools", f"found {_found(tools)}: a list of objects is needed")
        return Chat([message for _, message in turns[: replies[-1] + 1]], learned_from, parts[-1][0], tools or None)

    def _turns(self, name: str, messages: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        if not isinstance(messages, list):
            raise FieldError(name, f"found {_found(messages)}: a list of messages is needed")
        if not messages:
            raise FieldError(name, "found an empty list: at least one message is needed")
        for number, message in enumerate(messages):
            at = f"{name}[{number}]"
            if not isinstance(message, Mapping):
                raise FieldError(at, f"found {_found(message)}: an object with 'role' and 'content' is needed")
            # Tables fill what a message lacks with null, which templates would print.
            message = {key: value for key, value in message.items() if value is not None}
            role = message.get("role")
            if role not in ROLES:
                raise FieldError(f"{at}.role", f"found {_found(role)}: one of {', '.join(ROLES)} is needed")
            if role == "assistant" and not message.get("tool_calls"):
                self._learned(f"{at}.content", message.get("content"), self.end_tokens)
            elif "content" in message or not message.get("tool_calls"):
                self._string(f"{at}.content", message.get("content"))
            yield at, message

    def _string(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise FieldError(name, f"found {_found(value)}: a string is needed")
        if self.mask_token and self.mask_token in value:
            raise FieldError(name, f"found the mask token {self.mask_token}: clean text must not hold it, write it otherwise")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            found = f"half a surrogate pair, {value[error.start]!a}, at character {error.start}"
            raise FieldError(name, f"found {found}: text that UTF-8 can hold is needed") from error
        return value

    def _learned(self, name: str, value: Any, reserved: Sequence[str] = ()) -> str:
        if not self._string(name, value).strip():
            raise FieldError(name, f"found {value!r}: there is nothing to learn in it")
        for token in reserved:
            if token in value:
                raise FieldError(name, f"found {token}, which ends a turn: remove it, the chat template sets it")
        return value


def _decode(line: bytes) -> Any:
    try:
        return json.loads(line.rstrip(b"\r\n").decode())
    except UnicodeDecodeError as error:
        found = f"byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
        raise FieldError(None, f"found {found}: UTF-8 is needed") from error
    except json.JSONDecodeError as error:
        raise FieldError(None, f"not JSON, at character {error.pos + 1}: {error.msg}") from error
    except RecursionError as error:
        raise FieldError(None, "not a record: its JSON is nested too deeply") from error


def _found(value: Any) -> str:
    """A value as an error names it."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:37] + "...")
    if isinstance(value, bool | int | float):
        return f"{json.dumps(value)}"
    return "an object" if isinstance(value, Mapping) else "a list" if isinstance(value, list) else f"a {type(value).__name__}"
