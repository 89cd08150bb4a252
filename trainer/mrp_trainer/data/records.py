"""Records that users train on: their layouts, and errors that say what is wrong with them and where.

A record is an object of one of four layouts: `messages`, a chat; `prompt` and `completion`, both texts or both lists of
messages; `text`, all of which is learned; and what `mrp decode` writes, a text that a model wrote itself:

    {"ids": [5, 8, 2, 9, 1], "response_start": 2, "reveal_step": [1, 0, 2], "decoded_by": {"model": "org/name", ...}}

ShareGPT's `conversations` (of `from` and `value`) are read as `messages`, and Alpaca's `instruction`, `input` and `output` as a
chat of two turns, also beside a `text` that repeats them.

`ids` are those of prompt and response, `response_start` is the length of the prompt, and `reveal_step` has for each token of
the response the step of decoding that revealed it, from 0 on; later blocks have later steps. `decoded_by` may be missing. Its
`block_size` and `mask_token_id` must be those of the model that trains; where its `digest` is that of another backbone there
is a warning, since a head learns from the states of the backbone that it is for.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from transformers.utils import logging

logger = logging.get_logger(__name__)

ROLES = ("system", "developer", "user", "assistant", "tool")
_LAYOUTS = (
    "needed is 'messages', or 'prompt' and 'completion', or 'text', or what mrp decode writes; ShareGPT's 'conversations' and "
    "Alpaca's 'instruction' and 'output' are read, too"
)
_LAYOUT_FIELDS = (("messages",), ("prompt", "completion"), ("text",), ("reveal_step",))
# ShareGPT's names.
_KEYS = {"from": "role", "value": "content"}
_SPEAKERS = {"human": "user", "gpt": "assistant"}


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


@dataclass(frozen=True)
class Trajectory:
    """A text that a model wrote, with the order in which its tokens were revealed.

    Attributes:
        ids: Token ids of the prompt and the response.
        response_start: The length of the prompt.
        reveal_step: For each token of the response, the decoding step that revealed it.
    """

    ids: list[int]
    response_start: int
    reveal_step: list[int]


Record = Chat | Text | Trajectory


@dataclass(frozen=True)
class Backbone:
    """What decoded texts must agree with.

    Attributes:
        vocab_size: How many ids there are.
        block_size: Tokens per block.
        mask_token_id: The mask's id, which no text has.
        digest: Of its weights (see `mrp_trainer.train.trajectories.digest`); None if they are not there.
    """

    vocab_size: int
    block_size: int
    mask_token_id: int
    digest: str | None = None

    def check(self, ids: Sequence[int], decoder: Mapping[str, Any]) -> None:
        """Refuse, with a `FieldError`, ids that it does not have, and another block size or mask."""
        for token in ids:
            if not 0 <= token < self.vocab_size or token == self.mask_token_id:
                raise FieldError("ids", f"found {token}: needed are ids from 0 to {self.vocab_size - 1}, and not the mask's")
        for name in ("block_size", "mask_token_id"):
            if decoder.get(name, getattr(self, name)) != getattr(self, name):
                raise FieldError(
                    f"decoded_by.{name}",
                    f"found {decoder[name]}, and the model that trains has {getattr(self, name)}: decode with that one",
                )
        if None not in (self.digest, decoder.get("digest")) and decoder["digest"] != self.digest:
            logger.warning_once(
                f"{decoder.get('model')!r} wrote texts of the data, and another backbone trains: a head learns most from what "
                "its own backbone wrote, decode the prompts with that one"
            )


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
        some = (
            f"the first {len(problems)} malformed records (there may be more)" if more else f"{len(problems)} malformed records"
        )
        head = [] if len(problems) == 1 else [f"{some}:"]
        super().__init__("\n  ".join([*head, *map(str, problems)]))


@dataclass(frozen=True)
class RecordParser:
    """Turns a line or a row into a record.

    Args:
        mask_token: The text of the mask token, which no record may hold: clean text would be read as noise.
        end_tokens: The texts of the tokens that end a turn, which no assistant turn may hold.
        backbone: The one that decoded texts are for.
    """

    mask_token: str | None = None
    end_tokens: Sequence[str] = field(default=())
    backbone: Backbone | None = None

    def parse(self, raw: bytes | Mapping[str, Any]) -> Record:
        """The record of a line of JSON in UTF-8, or of a row.

        Raises:
            FieldError: It is malformed.
        """
        row = read_object(raw)
        given = {name: value for name, value in row.items() if value is not None}
        layouts = [names for names in _LAYOUT_FIELDS if any(name in given for name in names)]
        if {"instruction", "output"} <= given.keys() and layouts in ([], [("text",)]):
            answer = self._learned("output", given["output"], self.end_tokens)
            return Chat([*self._instruction(given), {"role": "assistant", "content": answer}], field_name="output")
        if not layouts and "conversations" in given:
            return self._chat([("conversations", given["conversations"])], given.get("tools"))
        if not layouts:
            found = f"the fields {sorted(map(str, given))}" if given else "no fields"
            raise FieldError(None, f"found {found}: {_LAYOUTS}")
        if len(layouts) > 1:
            found = " and ".join(repr(name) for names in layouts for name in names if name in given)
            raise FieldError(layouts[1][0], f"found {found}: a record has one layout, remove the others; {_LAYOUTS}")
        if layouts[0] == ("messages",):
            return self._chat([("messages", given["messages"])], given.get("tools"))
        if layouts[0] == ("text",):
            return Text("", self._learned("text", given["text"]))
        if layouts[0] == ("reveal_step",):
            return self._trajectory(given)
        return self._pair(given)

    def parse_prompt(self, raw: bytes | Mapping[str, Any]) -> Chat | Text:
        """What a line or a row asks: its `messages` or `conversations` without a last turn of the assistant; or its `prompt`, a
        text or messages; or its `instruction`.

        Raises:
            FieldError: It is malformed, or asks nothing.
        """
        given = {name: value for name, value in read_object(raw).items() if value is not None}
        names: list[str] = [name for name in ("messages", "prompt") if name in given]
        names = names or [name for name in ("conversations", "instruction") if name in given]
        if names == ["instruction"]:
            return Chat(self._instruction(given), field_name="instruction")
        if len(names) != 1:
            found = (
                " and ".join(map(repr, names)) if names else f"the fields {sorted(map(str, given))}" if given else "no fields"
            )
            raise FieldError(names[-1] if names else None, f"found {found}: needed is 'messages', or 'prompt'")
        name, value = names[0], given[names[0]]
        if name == "prompt" and not isinstance(value, list):
            return Text(self._string(name, value), "")
        messages = [message for _, message in self._conversation([(name, value)])]
        asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        return Chat(asked, 0, name, _tools(given.get("tools")))

    def _instruction(self, given: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Make the user's turn of an Alpaca record: its instruction, and its input if it has one."""
        asked = [self._string(name, given[name]) for name in ("instruction", "input") if name in given]
        return [{"role": "user", "content": "\n\n".join(filter(None, asked))}]

    def _trajectory(self, given: Mapping[str, Any]) -> Trajectory:
        """Check that there is a step for each id of the response, and that the model that trains can have written them."""
        ids: Any = given.get("ids")
        start: Any = given.get("response_start")
        steps = given["reveal_step"]
        if not (_are_integers(ids) and _are_integers(steps) and _are_integers([start]) and 0 <= start < len(ids)):
            raise FieldError(
                "reveal_step", "needed beside it are ids and response_start, a place in them: give what mrp decode writes"
            )
        if len(steps) != len(ids) - start or min(steps) < 0:
            raise FieldError("reveal_step", f"found {len(steps)} steps: {len(ids) - start} ids need one each, from 0 on")
        if self.backbone is not None:
            self.backbone.check(ids, given.get("decoded_by") or {})
        return Trajectory(ids, start, steps)

    def _pair(self, given: Mapping[str, Any]) -> Record:
        for name, other in (("prompt", "completion"), ("completion", "prompt")):
            if name not in given:
                raise FieldError(name, f"it is missing beside {other!r}: both are needed")
        prompt, completion = given["prompt"], given["completion"]
        if isinstance(prompt, list) and isinstance(completion, list):
            return self._chat([("prompt", prompt), ("completion", completion)], given.get("tools"))
        return Text(self._string("prompt", prompt), self._learned("completion", completion))

    def _chat(self, parts: Sequence[tuple[str, Any]], tools: Any) -> Chat:
        turns = self._conversation(parts)
        learned_from = len(parts[0][1]) if len(parts) > 1 else 0
        replies = [i for i, (_, message) in enumerate(turns) if message["role"] == "assistant" and i >= learned_from]
        if not replies:
            raise FieldError(parts[-1][0], "found no assistant turn: there is nothing to learn")
        return Chat([message for _, message in turns[: replies[-1] + 1]], learned_from, parts[-1][0], _tools(tools))

    def _conversation(self, parts: Sequence[tuple[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
        """The messages of some fields, each with its place, in an order that a conversation can have."""
        turns = [turn for name, messages in parts for turn in self._turns(name, messages)]
        for (_, before), (name, message) in pairwise(turns):
            if before["role"] == message["role"] == "assistant":
                raise FieldError(
                    f"{name}.role", "found a second assistant turn in a row: join the two, or put what came between"
                )
        name, first = turns[0]
        if first["role"] == "assistant":
            raise FieldError(f"{name}.role", "found 'assistant' in the first message: a turn that answers it must come before")
        return turns

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
            if name == "conversations":
                message = {_KEYS.get(key, key): value for key, value in message.items()}
                message["role"] = _SPEAKERS.get(str(message.get("role")), message.get("role"))
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
            check_utf8(value)
        except ValueError as error:
            raise FieldError(name, f"found {error}") from error
        return value

    def _learned(self, name: str, value: Any, reserved: Sequence[str] = ()) -> str:
        if not self._string(name, value).strip():
            raise FieldError(name, f"found {value!r}: there is nothing to learn in it")
        for token in reserved:
            if token in value:
                raise FieldError(name, f"found {token}, which ends a turn: remove it, the chat template sets it")
        return value


def check_utf8(text: str) -> None:
    """Refuse, with a `ValueError`, a text that tokenizers cannot read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"half a surrogate pair, {text[error.start]!a}, at character {error.start}"
        raise ValueError(f"{found}: text that UTF-8 can hold is needed") from error


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise FieldError("tools", f"found {_found(tools)}: a list of objects is needed")
    return tools or None


def _are_integers(values: Any) -> bool:
    return isinstance(values, list) and bool(values) and all(type(value) is int for value in values)


def read_object(raw: bytes | Mapping[str, Any]) -> Mapping[str, Any]:
    """The object in a line of JSON in UTF-8; `FieldError` if it holds something else."""
    row = _decode(raw) if isinstance(raw, bytes) else raw
    if not isinstance(row, Mapping):
        raise FieldError(None, f"found {_found(row)}: a record is an object; {_LAYOUTS}")
    return row


def _decode(line: bytes) -> Any:
    try:
        return json.loads(line.rstrip(b"\r\n").decode())
    except (ValueError, RecursionError) as error:
        raise FieldError(None, f"not JSON in UTF-8: {error}") from error


def _found(value: Any) -> str:
    """A value as an error names it."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:37] + "...")
    if isinstance(value, bool | int | float):
        return f"{json.dumps(value)}"
    return "an object" if isinstance(value, Mapping) else "a list" if isinstance(value, list) else f"a {type(value).__name__}"
