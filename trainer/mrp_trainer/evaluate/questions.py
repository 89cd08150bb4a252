"""A file of prompts with answers: reading it, and judging what a model made of it.

JSON lines. A record has `prompt` (text to be continued, or a user's turn with a chat template) or `messages`, a chat, whose
last turn is left out if it is the assistant's; and it may have `answer`. Other fields are left alone.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..data.records import Chat, FieldError, Text, parse_prompt
from ..data.sources import checked, json_lines

# A minus behind a word or a digit is one between two numbers.
_NUMBER = re.compile(r"(?:(?<!\w)-)?\$?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Question:
    """One record.

    Attributes:
        where: File and line, for errors.
        asked: Text to continue, or a chat.
        answer: What the judge compares with; None where there is none.
    """

    where: str
    asked: Chat | Text
    answer: str | None

    @property
    def shown(self) -> str:
        """What was asked, for people."""
        return self.asked.prompt if isinstance(self.asked, Text) else str(self.asked.messages[-1].get("content", ""))


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
    """The records of a file; at most the first `limit` of them.

    Raises:
        ValueError: for a file without a record, and for malformed records (also behind the limit), naming file, line and field.
        OSError: for one that is not there.
    """
    if judge not in JUDGES:
        raise ValueError(f"judge is {judge!r}: choose one of {', '.join(JUDGES)}")

    def read(row: Any) -> tuple[Chat | Text, str | None]:
        return parse_prompt(row), _answer(row.get("answer"), judge)

    return [Question(f"{path}, line {line}", *made) for line, made in checked(json_lines([path]), read)][:limit]


def _answer(answer: Any, judge: str) -> str | None:
    if answer is None:
        return None
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise FieldError("answer", f"found {answer!r}: write a text that is not empty or a number, or leave it out")
    if judge == "last_number" and last_number(answer) is None:
        raise FieldError("answer", f"{answer!r} holds no number, which judge last_number compares")
    return answer


def prompt_ids(question: Question, tokenizer: PreTrainedTokenizerBase, chat: bool = False) -> list[int]:
    """The ids that the model continues: through the chat template for messages, and for a prompt if `chat`; else plain.

    Raises:
        ValueError: if the tokenizer has no chat template, or the prompt comes to no token; with file and line.
    """
    text = question.asked.prompt if isinstance(question.asked, Text) else ""
    if chat or isinstance(question.asked, Chat):
        if not tokenizer.chat_template:
            raise ValueError(f"{question.where}: the tokenizer has no chat template: write `prompt`, without --chat")
        messages = question.asked.messages if isinstance(question.asked, Chat) else [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise ValueError(f"{question.where}: the prompt has no token: write a longer one")
    return ids


__all__ = ["JUDGES", "Question", "last_number", "prompt_ids", "read_questions"]
