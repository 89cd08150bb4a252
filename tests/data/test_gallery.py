"""Data files as people publish them: each is read as a chat that is written down here, or refused
with file, record, field and remedy."""

import copy
import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from mrp_trainer.data.chat import RecordEncoder
from mrp_trainer.data.records import Chat, RecordError, Text, parse
from mrp_trainer.data.sources import DataPath, Source, checked, open_source

from tests.support.helpers import word_model
from tests.support.training_runs import trainer_of

MASK = 2  # of the word tokenizer
# Prints all that a record gives to a template.
TEMPLATE = (
    "{% for t in tools or [] %}{{ '(' + (t.function or t).name + ')' }}{% endfor %}"
    "{% for m in messages %}{{ m.role + ' : ' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ ' ' + c.function.name + ' ' }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{{ ' ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


def described(record: Any) -> str:
    """A record in words: roles by their first letter, a star behind those that are learned."""
    if isinstance(record, Text):
        return f"{record.prompt!r} *{record.completion!r}"
    assert isinstance(record, Chat)
    parts = []
    if record.tools:
        names = [tool.get("function", tool)["name"] for tool in record.tools]
        parts.append(f"({', '.join(names)})")
    for index, message in enumerate(record.messages):
        content = message.get("content", "")
        for call in message.get("tool_calls", []):
            arguments = call["function"]["arguments"]
            content += f"{call['function']['name']}{json.dumps(arguments)}"
        parts.append(f"{message['role'][0]}{'*' * (index in record.learned)}:{content}")
    return " ".join(parts)


def lines(*records: Any) -> bytes:
    return "\n".join(map(json.dumps, records)).encode()


USER, REPLY = {"role": "user", "content": "1 + 2"}, {"role": "assistant", "content": "3"}
CHAT = {"messages": [USER, REPLY]}
PLAIN = "u:1 + 2 a*:3"
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
ARGUMENTS = {"x": 1}
CALLED = '(add) u:1 + 2 a*:add{"x": 1} t:3 a*:3'


def called(call: Any, result: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [USER, call, result, REPLY], **fields}


def share(*turns: tuple[str, str], **fields: Any) -> dict[str, Any]:
    return {"conversations": [{"from": name, "value": value} for name, value in turns], **fields}


def parts(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, REPLY]}


CALL_ROLE = json.dumps({"name": "add", "arguments": ARGUMENTS})
OPENAI_CALL = {"name": "add", "arguments": json.dumps(ARGUMENTS)}
# By file, what it holds and how its records are read.
READ: dict[str, tuple[bytes, str]] = {
    "messages.jsonl": (lines(CHAT), PLAIN),
    "array.json": (json.dumps([CHAT, CHAT], indent=1).encode(), f"{PLAIN} | {PLAIN}"),
    "one_line_array.json": (b"\xef\xbb\xbf \n" + json.dumps([CHAT]).encode(), PLAIN),
    "lines.jsonl.gz": (gzip.compress(lines(CHAT, CHAT)), f"{PLAIN} | {PLAIN}"),
    "array.json.gz": (gzip.compress(json.dumps([CHAT]).encode()), PLAIN),
    "prompt_beside_messages.jsonl": (lines({"prompt": "1 + 2", "prompt_id": "a", **CHAT}), PLAIN),
    "system_in_messages.jsonl": (
        lines({"messages": [{"role": "system", "content": "be"}, USER, REPLY]}),
        "s:be u:1 + 2 a*:3",
    ),
    "content_parts.jsonl": (
        lines(parts({"type": "text", "text": "1 +"}, {"type": "text", "text": " 2"})),
        PLAIN,
    ),
    "content_texts.jsonl": (lines(parts("1 +", " 2")), PLAIN),
    "answer_first.jsonl": (lines({"messages": [REPLY, USER, REPLY]}), f"a:3 {PLAIN}"),
    "sharegpt.json": (json.dumps([share(("human", "1 + 2"), ("gpt", "3"))]).encode(), PLAIN),
    "sharegpt_system.jsonl": (
        lines(share(("human", "1 + 2"), ("gpt", "3"), system="be")),
        "s:be u:1 + 2 a*:3",
    ),
    "sharegpt_names.jsonl": (lines(share(("User", "1 + 2"), ("chatgpt", "3"))), PLAIN),
    "sharegpt_answer_first.jsonl": (
        lines(share(("gpt", "3"), ("human", "1 + 2"), ("gpt", "3"))),
        f"a:3 {PLAIN}",
    ),
    "sharegpt_tools.jsonl": (
        lines(
            share(
                ("human", "1 + 2"),
                ("function_call", CALL_ROLE),
                ("observation", "3"),
                ("gpt", "3"),
                tools=json.dumps([FUNCTION]),
            )
        ),
        CALLED,
    ),
    "conversations_of_messages.jsonl": (lines({"conversations": [USER, REPLY]}), PLAIN),
    "alpaca.json": (
        json.dumps([{"instruction": "1 +", "input": "2", "output": "3"}]).encode(),
        "u:1 +\n\n2 a*:3",
    ),
    "alpaca_history.jsonl": (
        lines(
            {
                "instruction": "1 + 2",
                "input": "",
                "output": "3",
                "system": "be",
                "history": [["1 + 2", "3"]],
            }
        ),
        "s:be u:1 + 2 a*:3 u:1 + 2 a*:3",
    ),
    "instruction_response.jsonl": (lines({"instruction": "1 + 2", "response": "3"}), PLAIN),
    "question_answer.jsonl": (lines({"question": "1 + 2", "answer": "3"}), PLAIN),
    "question_response_system.jsonl": (
        lines({"id": 1, "system_prompt": "be", "question": "1 + 2", "response": "3"}),
        "s:be u:1 + 2 a*:3",
    ),
    "query_response.jsonl": (lines({"query": "1 + 2", "response": "3", "type": "a"}), PLAIN),
    "prompt_response.jsonl": (lines({"prompt": "1 + 2", "response": "3"}), PLAIN),
    "input_output.jsonl": (lines({"input": "1 + 2", "output": "3"}), PLAIN),
    "prompt_completion.jsonl": (lines({"prompt": "1 +", "completion": " 2"}), "'1 +' *' 2'"),
    "messages_to_completion.jsonl": (lines({"prompt": [USER], "completion": [REPLY]}), PLAIN),
    "text.txt": (lines({"text": "1 + 2"}, {"text": "3"}), "'' *'1 + 2' | '' *'3'"),
    "openai_tools.jsonl": (
        lines(
            called(
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": OPENAI_CALL}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "3"},
                tools=[TOOL],
            )
        ),
        CALLED,
    ),
    "openai_functions.jsonl": (
        lines(
            called(
                {"role": "assistant", "content": None, "function_call": OPENAI_CALL},
                {"role": "function", "name": "add", "content": "3"},
                functions=[FUNCTION],
            )
        ),
        CALLED,
    ),
    "tools_as_text.jsonl": (lines({**CHAT, "tools": json.dumps([TOOL])}), f"(add) {PLAIN}"),
    "tools_as_texts.jsonl": (lines({**CHAT, "tools": [json.dumps(TOOL)]}), f"(add) {PLAIN}"),
    "weights.jsonl": (
        lines({"messages": [USER, REPLY | {"weight": 0}, USER, REPLY | {"weight": 1}]}),
        f"u:1 + 2 a:3 {PLAIN}",
    ),
}
# By file, what it holds, and what is said of it behind its name.
REFUSED: dict[str, tuple[bytes, str]] = {
    "image.jsonl": (
        lines(parts({"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}})),
        ", line 1, field messages[0].content[1]: found a part of type 'image_url': only texts",
    ),
    "preference.jsonl": (
        lines({"prompt": "1", "chosen": "a", "rejected": "b"}),
        ", line 1, field completion: found nothing: a string is needed",
    ),
    "two_answers.jsonl": (
        lines({"question": "1", "answer": "a", "response": "b"}),
        ", line 1: found the fields response, answer, each an answer: leave one of them",
    ),
    "squad.jsonl": (
        lines({"question": "1", "answer": {"text": ["a"]}}),
        ", line 1, field messages[1].content: found {'text': ['a']}: a string is needed",
    ),
    "half_an_array.json": (b'[{"text": "a"},', ": it cannot be read: not JSON in UTF-8: "),
    "half_a_gzip.jsonl.gz": (gzip.compress(lines(CHAT) * 99)[:-9], ": it cannot be read: "),
    "numbers.json": (b"[1]", ", record 1: found 1: a record is an object; a record has one layout"),
    "call_as_prose.jsonl": (
        lines(share(("human", "1"), ("function_call", "add 1"), ("gpt", "3"))),
        ", line 1, field messages[1].content: found 'add 1': JSON is needed",
    ),
    "tools_as_prose.jsonl": (
        lines({**CHAT, "tools": "a calculator"}),
        ", line 1, field tools: found 'a calculator': JSON is needed",
    ),
    "binary.jsonl": (b"\x00\x01\x02", ", line 1: not JSON in UTF-8"),
    "empty.json": (b"[]", ": found no records: at least one is needed"),
}


def encoder_of(tokenizer: Any, **options: Any) -> RecordEncoder:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TEMPLATE
    return RecordEncoder(tokenizer, 4, 256, MASK, **options)


def written(folder: Path, name: str, content: bytes) -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


@pytest.mark.parametrize("name", READ)
def test_files_that_are_read(name: str, tmp_path: Path, word_tokenizer: Any) -> None:
    content, expected = READ[name]
    path = written(tmp_path, name, content)
    found = [described(record) for _, record in checked(open_source([path]), parse)]
    assert " | ".join(found) == expected
    encode = encoder_of(word_tokenizer).sample
    samples = [sample for _, sample in checked(open_source([path]), encode)]
    assert len(samples) == len(found)
    assert all(sample is not None and sample.response.any() for sample in samples)


def test_files_that_train(tmp_path: Path, word_tokenizer: Any) -> None:
    """A step on each of them has something to learn."""
    tokenizer = copy.deepcopy(word_tokenizer)
    tokenizer.chat_template = TEMPLATE
    model = word_model(tokenizer)
    options = {"objective": "mrp", "max_steps": 1, "per_device_train_batch_size": 1}
    losses = {}
    for name, (content, _) in READ.items():
        path = written(tmp_path, name, content)
        trainer = trainer_of(tmp_path / "run", model, path, None, tokenizer, **options)
        trainer.train()
        losses[name] = trainer.state.log_history[0]["loss"]
    assert [name for name, loss in losses.items() if not loss > 0] == []


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_refused(name: str, tmp_path: Path, word_tokenizer: Any) -> None:
    content, told = REFUSED[name]
    path = written(tmp_path, name, content)
    with pytest.raises(RecordError) as caught:
        list(checked(open_source([path]), encoder_of(word_tokenizer).sample))
    assert str(caught.value).startswith(f"{path}{told}")


def test_the_gallery_is_large() -> None:
    assert len(READ) >= 30
    assert len(REFUSED) >= 10


def test_tables_in_files(tmp_path: Path) -> None:
    """Parquet and CSV, beside lines of JSON."""
    datasets: Any = pytest.importorskip("datasets")
    pair = {"question": "1 + 2", "answer": "three"}
    datasets.Dataset.from_list([CHAT, CHAT]).to_parquet(str(tmp_path / "chats.parquet"))
    datasets.Dataset.from_list([pair]).to_csv(str(tmp_path / "pairs.csv"))
    paths = [str(tmp_path / "chats.parquet"), str(tmp_path / "pairs.csv")]
    paths.append(written(tmp_path, "lines.jsonl", lines(CHAT)))
    found = [described(record) for _, record in checked(open_source(paths), parse)]
    assert found == [PLAIN, PLAIN, "u:1 + 2 a*:three", PLAIN]


def test_several_datasets_with_configurations_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight takes each record so often, a part of it at random, the same in every run."""
    datasets: Any = pytest.importorskip("datasets")
    asked = []

    def load(name: str, *config: str, split: str) -> Any:
        asked.append((name, *config, split))
        return datasets.Dataset.from_list([{"text": f"{name} {number}"} for number in range(200)])

    monkeypatch.setattr(datasets, "load_dataset", load)
    local = written(tmp_path, "a:b*2", lines(CHAT))  # a name as it is
    paths = ["org/chats:math*2", "org/code*0.25", local, f"{local}*3"]
    records = [record for _, record in checked(open_source(paths, "test"), parse)]
    texts = [record.completion for record in records if isinstance(record, Text)]
    assert asked == [("org/chats", "math", "test"), ("org/code", "test")]
    assert texts[:4] == ["org/chats 0", "org/chats 0", "org/chats 1", "org/chats 1"]
    quarter = [text for text in texts if text.startswith("org/code")]
    assert len({*quarter}) == len(quarter)
    assert 30 <= len(quarter) <= 70  # 50 expected: binomial, beyond 3 deviations
    again = [record for _, record in checked(open_source(paths, "test"), parse)]
    assert again == records
    assert len(records) == 400 + len(quarter) + 4
    assert DataPath.of(local) == DataPath(local)


def test_malformed_records_can_be_left_out(tmp_path: Path, caplog: Any) -> None:
    """They are counted, and twenty are named; where all are malformed there is nothing to train."""
    mixed = [CHAT, {"text": ""}, CHAT, *[5] * 30]
    source = open_source([written(tmp_path, "mixed.jsonl", lines(*mixed))])
    with caplog.at_level(logging.WARNING):
        found = [line for line, _ in checked(source, parse, skip=True)]
    assert found == [1, 3]
    told = caplog.text
    assert "31 of 33 records are malformed and left out:\n" in told
    assert "mixed.jsonl, line 2, field text: found ''" in told
    assert "mixed.jsonl, line 22: found 5" in told
    assert "mixed.jsonl, line 23" not in told
    assert told.rstrip().endswith("and 11 more")
    with pytest.raises(RecordError, match=r"^2 malformed records"):
        list(checked(Source({"rows": [5, 6]}), parse, skip=True))


def test_the_last_turn_alone(word_tokenizer: Any) -> None:
    chat = {"messages": [USER, REPLY, USER, REPLY]}
    for last_turn_only, expected in ((False, 2), (True, 1)):
        sample = encoder_of(word_tokenizer, last_turn_only=last_turn_only).sample(chat)
        assert sample is not None
        learned = sample.response[: sample.length].astype(int)
        assert (learned[1:] > learned[:-1]).sum() == expected
