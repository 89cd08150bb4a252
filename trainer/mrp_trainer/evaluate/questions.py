"""A file of prompts with answers: reading it, and judging what a model made of it.

JSON lines. A record has `prompt` (text to be continued, or a user's turn with a chat template) or `messages` (a chat that ends
before the assistant's turn), and may have `answer`. Other fields are left alone.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

ROLES = ("system", "user", "assistant", "tool")
# A minus behind a word or a digit is one between two numbers.
_NUMBER = re.compile(r"(?:(?<!\w)-)?\$?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Question:
    """One record.

    Attributes:
        where: File and line, for errors.
        prompt: Text; None where there are messages.
        messages: A chat; None where there is a prompt.
        answer: What the judge compares with; None where there is none.
    """

    where: str
    prompt: str | None
    messages: list[dict[str, str]] | None
    answer: str | None

    @property
    def shown(self) -> str:
        """What was asked, for people."""
        return self.prompt if self.prompt is not None else self.messages[-1]["content"] if self.messages else ""


def last_number(text: str) -> Decimal | None:
    """The last number in a text, without thousands separators and currency; None if there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("$", "")) if found else None


def _same_number(answer: str, text: str) -> bool:
    said = last_number(text)
    return said is not None and said == last_number(answer)


# By name: (a record's answer, the model's text) -> whether it is right.
JUDGES: Mapping[str, Callable[[str, str], bool]] = {
    "exact": lambda answer, text: text.strip() == answer.strip(),
    "last_number": _same_number,
    "contains": lambda answer, text: answer.strip() in text,
}


def read_questions(path: str | Path, judge: str = "exact", limit: int | None = None) -> list[Question]:
    """The records of a file, blank lines left out; at most the first `limit` of them.

    Raises:
        ValueError: for a file that cannot be read or has no record, and for the first malformed record (also behind the limit),
            naming file, line and field.
    """
    if judge not in JUDGES:
        raise ValueError(f"judge is {judge!r}: choose one of {', '.join(JUDGES)}")
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}): pass a file of JSON lines") from error
    found = [_question(line, f"{path}, line {number}", judge) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"{path}: no record: write one JSON object a line, with `prompt` or `messages`")
    return found[:limit]


def _question(line: bytes, where: str, judge: str) -> Question:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 (byte {error.start}): save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg}, column {error.colno}): write one JSON object a line") from error
    except (ValueError, RecursionError) as error:  # Python's limits of digits and depth
        raise ValueError(
            f"{where}: JSON that is not read here ({error}): write less deep, and long numbers as texts"
        ) from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a {type(record).__name__}: write a JSON object with `prompt` or `messages`")
    prompt, messages = record.get("prompt"), record.get("messages")
    if (prompt is None) == (messages is None):
        both = "both `prompt` and `messages`" if prompt is not None else "neither `prompt` nor `messages`"
        raise ValueError(f"{where}: {both}: write one of them")
    if prompt is not None and (not isinstance(prompt, str) or not prompt.strip()):
        raise ValueError(f"{where}, field prompt: {prompt!r}: write a text that is not empty")
    if messages is not None:
        _check_messages(messages, where)
    return Question(where, prompt, messages, _answer(record.get("answer"), where, judge))


def _check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{where}, field messages: {messages!r}: write a list of at least one message")
    for number, message in enumerate(messages):
        at = f"{where}, field messages[{number}]"
        if not isinstance(message, dict):
            raise ValueError(f"{at}: {message!r}: write an object with `role` and `content`")
        if message.get("role") not in ROLES:
            raise ValueError(f"{at}.role: {message.get('role')!r}: use one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"{at}.content: {message.get('content')!r}: write a text")
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"{where}, field messages: the last one is the assistant's: leave it out, and write it as `answer`")


def _answer(answer: Any, where: str, judge: str) -> str | None:
    if answer is None:
        return None
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise ValueError(f"{where}, field answer: {answer!r}: write a text that is not empty or a number, or leave it out")
    if judge == "last_number" and last_number(answer) is None:
        raise ValueError(f"{where}, field answer: {answer!r} holds no number, which judge last_number compares")
    return answer


def prompt_ids(question: Question, tokenizer: PreTrainedTokenizerBase, chat: bool = False) -> list[int]:
    """The ids that the model continues: through the chat template for messages, and for a prompt if `chat`; else plain.

    Raises:
        ValueError: if the tokenizer has no chat template, or the prompt comes to no token; with file and line.
    """
    messages = question.messages
    if messages is None and chat:
        messages = [{"role": "user", "content": question.prompt or ""}]
    text = question.prompt
    if messages is not None:
        if not tokenizer.chat_template:
            raise ValueError(f"{question.where}: the tokenizer has no chat template: write `prompt`, without --chat")
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise ValueError(f"{question.where}: the prompt has no token: write a longer one")
    return ids


__all__ = ["JUDGES", "Question", "last_number", "prompt_ids", "read_questions"]
