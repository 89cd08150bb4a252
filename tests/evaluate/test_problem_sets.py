"""Files of prompts with answers: what is read, what is refused, and what counts as right."""

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from mrp_trainer.evaluate.problem_sets import JUDGES, file_set, last_number
from transformers import PreTrainedTokenizerFast

GOOD = {"prompt": "Ana has", "answer": "5"}
USER = {"role": "user", "content": "Ana has"}


def written(folder: Path, *lines: Any) -> str:
    path = folder / "asked.jsonl"
    path.write_bytes(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines))
    return str(path)


def test_what_is_read(tmp_path: Path, word_tokenizer: PreTrainedTokenizerFast) -> None:
    """The chat template is for chats; for prompts, if that is asked for."""
    chat = [{"role": "system", "content": "pens"}, USER]
    more = [{"prompt": "Ana"}, {"prompt": "has", "answer": None}]
    path = written(tmp_path, GOOD, b"", {"messages": chat, "answer": 5, "id": 7}, *more)
    found = file_set(path, word_tokenizer, "last_number", max_new_tokens=3)
    assert found.where == [f"{path}, line {line}" for line in (1, 3, 4, 5)]
    assert found.shown == ["Ana has", "Ana has", "Ana", "has"]
    assert found.answers == ["5", "5", None, None]
    assert found.judge(["5", "4", "5", ""]) == [True, False, None, None]

    def words(ids: list[int]) -> str:
        return " ".join(word_tokenizer.convert_ids_to_tokens(ids))

    assert list(map(words, found.prompts[:2])) == ["Ana has", "? : pens user : Ana has assistant :".replace("?", "<unk>")]
    chats = file_set(path, word_tokenizer, chat=True, max_new_tokens=3)
    assert words(chats.prompts[0]) == "user : Ana has assistant :"
    assert chats.digest() != found.digest() == file_set(path, word_tokenizer, max_new_tokens=3).digest()
    assert file_set(path, word_tokenizer, count=1).where == found.where[:1]
    found.check_room(12)
    with pytest.raises(ValueError, match=r"line 3: a prompt of 9 tokens and 3 new ones exceed the model's 11 positions"):
        found.check_room(11)


@pytest.mark.parametrize(
    ("lines", "judge", "told"),
    [
        ([GOOD, {"messages": [{**USER, "role": "robot"}]}], "exact", ", line 2, field messages[0].role: found 'rob"),
        ([GOOD, {**GOOD, "answer": ["5"]}], "exact", ", line 2, field answer: found ['5']"),
        ([GOOD, {**GOOD, "answer": ""}], "exact", ", line 2, field answer: found ''"),
        ([{**GOOD, "answer": "five"}], "last_number", ", line 1, field answer: 'five' holds no number"),
        ([{"messages": [USER]}], "exact", ", line 1: the tokenizer has no chat template"),
        ([{"prompt": " "}], "exact", ", line 1: the prompt has no token"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, lines: list[Any], judge: str, told: str, id_tokenizer: PreTrainedTokenizerFast
) -> None:
    """With file, line and field; also behind the limit."""
    path = written(tmp_path, *lines)
    with pytest.raises(ValueError, match=re.escape(path + told)):
        file_set(path, id_tokenizer, judge, count=1)


def test_last_numbers() -> None:
    found = {
        "It costs $1,234.50.": "1234.5",
        "10-5": "5",
        "x = -7": "-7",
        "-$3": "-3",
        "2 of 3, then": "3",
        "1,000, or": "1000",
    }
    assert {text: last_number(text) for text in found} == {text: Decimal(number) for text, number in found.items()}
    assert last_number("none") is None


@pytest.mark.parametrize(
    ("judge", "answer", "right", "wrong"),
    [
        ("exact", "yes", " yes\n", "yes."),
        ("contains", "yes ", "oh yes.", "ye s"),
        ("last_number", "3 + 4 = 7\n#### 7", "It is 7.0", "7 or 8"),
        ("last_number", "7", "7", "seven"),
    ],
)
def test_judges(judge: str, answer: str, right: str, wrong: str) -> None:
    assert JUDGES[judge](answer, right)
    assert not JUDGES[judge](answer, wrong)
