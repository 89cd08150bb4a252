"""Problem sets, each with its judge: problems of a synthetic family, or a file of prompts with
answers.

The file has JSON lines. A record has `prompt` (a text to be continued or, with a chat template, a
user's turn) or `messages` (a chat, whose final assistant turn is left out), and may have `answer`.
Other fields are ignored.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..data.problems import encode
from ..data.records import Chat, FieldError, Text, parse_prompt
from ..data.sources import checked, json_lines
from ..data.tasks import Family, Split, judge, problems
from .decoded import NEW_TOKENS, Judge

FILE_NEW_TOKENS, FAMILY_COUNT = 256, 500
# A minus directly after a word or a digit is not a sign.
_NUMBER = re.compile(r"(?:(?<!\w)-)?\$?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class ProblemSet:
    """Problems of one kind, ready to be decoded and judged.

    Attributes:
        name: The field that identifies the set in a line of results: {"family": ...} or
            {"file": ...}.
        locations: For each problem, its name in error messages.
        prompt_texts: For each problem, the question as text.
        prompts: For each problem, the ids of the whole prompt.
        answers: For each problem, the correct answer; None where there is none.
        judge: A function that takes a list with a text for each problem, and returns for each
            whether it is right; None where that is unknown.
        max_new_tokens: The maximum number of tokens in each decoded text.
    """

    name: dict[str, str]
    locations: list[str]
    prompt_texts: list[str]
    prompts: list[list[int]]
    answers: list[str | None]
    judge: Judge
    max_new_tokens: int

    def check_room(self, max_positions: int) -> None:
        """Raise `ValueError` for the first prompt that leaves no room for `max_new_tokens` among
        the `max_positions` positions of a model."""
        for location, prompt in zip(self.locations, self.prompts, strict=True):
            if len(prompt) + self.max_new_tokens > max_positions:
                raise ValueError(
                    f"{location}: a prompt of {len(prompt)} tokens and {self.max_new_tokens} new "
                    f"ones exceed the model's {max_positions} positions: shorten it, or lower "
                    "--max-new-tokens"
                )

    def digest(self) -> str:
        """Return a hexadecimal digest of the prompts, the answers and `max_new_tokens`."""
        return hashlib.sha256(
            json.dumps([self.prompts, self.answers, self.max_new_tokens]).encode()
        ).hexdigest()[:16]


def family_set(
    family: Family,
    split: Split,
    tokenizer: PreTrainedTokenizerBase,
    count: int | None = None,
    max_new_tokens: int | None = None,
) -> ProblemSet:
    """Make a set of problems of a synthetic family.

    Args:
        family: The family.
        split: The split from which the problems are taken.
        tokenizer: Encodes the prompts.
        count: The number of problems, the first ones of the split; by default 500.
        max_new_tokens: The maximum number of tokens in each decoded text. The default depends on
            the family (`NEW_TOKENS`): 80 for "code", 64 for "math" and "source".
    """
    family_problems = problems(family, split, FAMILY_COUNT if count is None else count)
    return ProblemSet(
        {"family": family},
        [f"problem {number}" for number in range(len(family_problems))],
        [problem.prompt for problem in family_problems],
        [encode(problem, tokenizer)[0] for problem in family_problems],
        [problem.answer for problem in family_problems],
        partial(judge, family_problems),
        max_new_tokens or NEW_TOKENS[family],
    )


def file_set(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    judge: str = "exact",
    chat: bool = False,
    count: int | None = None,
    max_new_tokens: int | None = None,
) -> ProblemSet:
    """Make a set of the first `count` records of a file, by default all records.

    Args:
        path: A file of JSON lines, each with `prompt` (a text) or `messages` (a chat, whose final
            assistant turn is left out), and optionally `answer`.
        tokenizer: Encodes the prompts.
        judge: How a text is compared with the answer: `exact` (equal up to outer white space),
            `last_number` (the last numbers in both are equal), or `contains` (the text contains the
            answer).
        chat: Whether each `prompt` is rendered as a user's turn with the chat template.
        count: The number of records.
        max_new_tokens: The maximum number of tokens in each decoded text, by default 256.

    Raises:
        OSError: if the file does not exist.
        ValueError: for a file without a record; for a malformed record, even beyond the first
            `count`, with the file, line and field; if the tokenizer has no chat template where one
            is needed; if a prompt has no token.
    """

    def read(row: Any) -> tuple[Chat | Text, str | None]:
        return parse_prompt(row), _answer(row.get("answer"), judge)

    answers: list[str | None] = []
    problem_set = ProblemSet(
        name={"file": path},
        locations=[],
        prompt_texts=[],
        prompts=[],
        answers=answers,
        judge=partial(_judge_texts, judge, answers),
        max_new_tokens=max_new_tokens or FILE_NEW_TOKENS,
    )
    for line, (record, answer) in list(checked(json_lines([path]), read))[:count]:
        location = f"{path}, line {line}"
        problem_set.locations.append(location)
        problem_set.prompt_texts.append(_last_text(record))
        problem_set.prompts.append(_prompt_ids(location, record, tokenizer, chat))
        answers.append(answer)
    return problem_set


def _judge_texts(
    judge: str, answers: Sequence[str | None], texts: Sequence[str]
) -> list[bool | None]:
    """Compare each text with the answer to its problem, using the judge with this name in `JUDGES`.
    Return for each text whether it is correct; None where there is no answer."""
    verdicts: list[bool | None] = []
    for answer, text in zip(answers, texts, strict=True):
        verdicts.append(None if answer is None else JUDGES[judge](answer, text))
    return verdicts


def _last_text(record: Chat | Text) -> str:
    """Return the question of a prompt as text: a plain prompt, or the last message of a chat."""
    if isinstance(record, Text):
        return record.prompt
    return str(record.messages[-1].get("content", ""))


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, ignoring thousands separators and dollar signs; None if
    there is no number."""
    matches = _NUMBER.findall(text)
    if not matches:
        return None
    return Decimal(matches[-1].replace(",", "").replace("$", ""))


# By name: (a record's answer, the model's text) -> whether it is right.
JUDGES: Mapping[str, Callable[[str, str], bool]] = {
    "exact": lambda answer, text: text.strip() == answer.strip(),
    # `_answer` makes sure that there is one
    "last_number": lambda answer, text: last_number(text) == last_number(answer),
    "contains": lambda answer, text: answer.strip() in text,
}


def _answer(answer: Any, judge: str) -> str | None:
    if answer is None:
        return None
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        raise FieldError(
            "answer",
            f"found {answer!r}: write a text that is not empty or a number, or leave it out",
        )
    if judge == "last_number" and last_number(answer) is None:
        raise FieldError("answer", f"{answer!r} holds no number, which judge last_number compares")
    return answer


def _prompt_ids(
    location: str, record: Chat | Text, tokenizer: PreTrainedTokenizerBase, chat: bool
) -> list[int]:
    """Encode a prompt, through the chat template if it is a `Chat` or `chat` is set, otherwise as
    plain text."""
    if isinstance(record, Text) and not chat:
        text = record.prompt
    else:
        if not tokenizer.chat_template:
            raise ValueError(
                f"{location}: the tokenizer has no chat template: write `prompt`, without --chat"
            )
        if isinstance(record, Text):
            messages = [{"role": "user", "content": record.prompt}]
        else:
            messages = record.messages
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    if not (ids := tokenizer.encode(text, add_special_tokens=False)):
        raise ValueError(f"{location}: the prompt has no token: write a longer one")
    return list(ids)
