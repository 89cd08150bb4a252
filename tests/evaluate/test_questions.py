"""Files of prompts with answers: what is read, what is refused, and what counts as right."""

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from mrp_trainer.data.records import Chat, Text
from mrp_trainer.evaluate.questions import JUDGES, last_number, prompt_ids, read_questions
from transformers import PreTrainedTokenizerFast

GOOD = {"prompt": "2 + 3 =", "answer": "5"}
USER = {"role": "user", "content": "2 + 3?"}


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "asked.jsonl"
    path.write_bytes(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines))
    return path


def test_what_is_read(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, USER]
    path = written(
        tmp_path, GOOD, b"", {"messages": chat, "answer": 5, "id": 7}, {"prompt": "Go on"}, {"prompt": "x", "answer": None}
    )
    first, second, third, fourth = read_questions(path)
    assert (first.asked, first.answer, first.where) == (Text("2 + 3 =", ""), "5", f"{path}, line 1")
    assert (second.asked, second.answer, second.where) == (Chat(chat), "5", f"{path}, line 3")
    assert (third.answer, fourth.answer) == (None, None)
    assert [question.shown for question in (first, second)] == ["2 + 3 =", "2 + 3?"]
    assert read_questions(path, limit=2) == [first, second]


@pytest.mark.parametrize(
    ("lines", "judge", "told"),
    [
        ([GOOD, b'{"prompt": "x"'], None, ", line 2: not JSON in UTF-8: Expecting"),
        ([GOOD, {"messages": [USER, {"role": "robot", "content": "x"}]}], None, ", line 2, field messages[1].role: found 'rob"),
        ([GOOD, {"prompt": "x", "answer": ["5"]}], None, ", line 2, field answer: found ['5']"),
        ([GOOD, {"prompt": "x", "answer": ""}], None, ", line 2, field answer: found ''"),
        ([b"", b"  "], None, ": found no records"),
        ([{"prompt": "x", "answer": "five"}], "last_number", ", line 1, field answer: 'five' holds no number"),
        ([GOOD], "kind", "judge is 'kind': choose one of exact, last_number, contains"),
    ],
)
def test_what_is_refused(tmp_path: Path, lines: list[Any], judge: str | None, told: str) -> None:
    """With file, line and field; also behind the limit."""
    path = written(tmp_path, *lines)
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        read_questions(path, limit=1, **({} if judge is None else {"judge": judge}))
    assert judge == "kind" or str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 42", "42"),
        ("It costs $1,234.50.", "1234.5"),
        ("so 10-5 is 5", "5"),
        ("10-5", "5"),
        ("x = -7", "-7"),
        ("-$3", "-3"),
        ("2 of 3, then", "3"),
        ("1,000, or so", "1000"),
        ("none", None),
    ],
)
def test_last_numbers(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("judge", "answer", "text", "right"),
    [
        ("exact", "yes", " yes\n", True),
        ("exact", "yes", "yes.", False),
        ("contains", "yes ", "oh yes.", True),
        ("contains", "yes", "ye s", False),
        ("last_number", "3 + 4 = 7\n#### 7", "It is 7.0", True),
        ("last_number", "7", "7 or 8", False),
        ("last_number", "7", "seven", False),
    ],
)
def test_judges(judge: str, answer: str, text: str, right: bool) -> None:
    assert JUDGES[judge](answer, text) is right


def test_prompts(tmp_path: Path, word_tokenizer: PreTrainedTokenizerFast, id_tokenizer: PreTrainedTokenizerFast) -> None:
    """The chat template is for chats; a tokenizer may lack it, or make no token of a text."""
    asked = written(tmp_path, {"prompt": "Ana has"}, {"messages": [{**USER, "content": "Ana has"}]}, {"prompt": " "})
    plain, chat, empty = read_questions(asked)

    def words(question: Any, **options: bool) -> list[str]:
        return word_tokenizer.convert_ids_to_tokens(prompt_ids(question, word_tokenizer, **options))

    assert words(plain) == ["Ana", "has"]
    assert words(plain, chat=True) == words(chat) == ["user", ":", "Ana", "has", "assistant", ":"]
    with pytest.raises(ValueError, match=r"line 2: the tokenizer has no chat template"):
        prompt_ids(chat, id_tokenizer)
    with pytest.raises(ValueError, match=r"line 3: the prompt has no token"):
        prompt_ids(empty, word_tokenizer)
