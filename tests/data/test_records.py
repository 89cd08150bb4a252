"""Records of users: every malformed one is named, and of each good one exactly what the assistant
says is learned."""

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from mrp_trainer.data.chat import RecordEncoder
from mrp_trainer.data.problems import encode
from mrp_trainer.data.records import (
    Chat,
    RecordError,
    Text,
    parse,
    parse_line,
    parse_prompt,
)
from mrp_trainer.data.sources import Source, checked, json_lines, open_source, source_of
from mrp_trainer.data.tasks import FAMILIES, make_problem
from tokenizers.processors import TemplateProcessing

USER, REPLY = {"role": "user", "content": "1 + 2"}, {"role": "assistant", "content": "3"}
GOOD = {"messages": [USER, REPLY]}
MASK, END, PAD = 2, 1, 0  # of the word tokenizer
# As Qwen's: a system prompt where none is given, and reasoning shown in the last turn only.
QWEN = (
    "{% if messages[0].role != 'system' %}{{ 'system : be <end> ' }}{% endif %}{% set ns = "
    "namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = "
    "loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{{ m.role + ' : ' }}{% if m.role "
    "== 'assistant' and loop.index0 > ns.last %}{{ '[] ' }}{% endif %}{{ m.content + ' <end> ' "
    "}}{% endfor %}{% if add_generation_prompt %}{{ 'assistant : ' }}{% if enable_thinking is "
    "false %}{{ '[] ' }}{% endif %}{% endif %}"
)


def with_template(tokenizer: Any, template: str | None) -> Any:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def encoder(
    tokenizer: Any, block_size: int = 4, max_length: int = 64, **options: Any
) -> RecordEncoder:
    return RecordEncoder(tokenizer, block_size, max_length, MASK, **options)


def shown(tokenizer: Any, sample: Any) -> str:
    """The sample's words; what is learned in braces."""
    words = [
        f"{{{word}}}" if learned else word
        for word, learned in zip(
            tokenizer.convert_ids_to_tokens(sample.ids.tolist()), sample.response, strict=True
        )
    ]
    return " ".join(words).replace("} {", " ")


def write(path: Path, *lines: Any) -> str:
    path.write_bytes(
        b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines)
    )
    return str(path)


def error_of(source: Any, read: Any = parse) -> str:
    with pytest.raises(RecordError) as caught:
        list(checked(source, read))
    return str(caught.value)


def chat(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


def share(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}


ADD = {"role": "user", "content": "Add.\n\n3 and 4"}
ALPACA = {
    "instruction": "Add.",
    "input": "3 and 4",
    "output": "3",
    "text": "Below is an instruction. Add. 7",
}
CALL, TOOL = {"role": "assistant", "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": ""}
CALLED = [USER, CALL, TOOL, REPLY]
UNLEARNED = REPLY | {"train": False}
BE = {"role": "system", "content": "be"}
LONG = {"prompt": "1 2 3 4", "completion": "5 6 7 8 9 10"}  # 11 tokens with the end
# as `mrp decode` does
WROTE = {"ids": [9, 8, 7, 6, 5, 1], "response_start": 3, "reveal_step": [0, 2, 1]}


@pytest.mark.parametrize(
    ("record", "learned", "asked"),
    [
        ({"prompt": "", "completion": "a<end>"}, Text("", "a<end>"), Text("", "")),
        (
            {"prompt": [USER, REPLY, USER], "completion": [REPLY]},
            Chat([USER, REPLY] * 2, (3,)),
            Chat([USER, REPLY, USER]),
        ),
        (
            {
                "messages": [USER, CALL | {"content": None}, TOOL, REPLY, USER],
                "tools": [{"name": "f"}],
            },
            Chat(CALLED, (1, 3), [{"name": "f"}]),
            Chat([*CALLED, USER], (), [{"name": "f"}]),
        ),
        (
            share(("human", "1 + 2"), ("gpt", "3"), ("human", "1 + 2")),
            Chat([USER, REPLY], (1,)),
            Chat([USER, REPLY, USER]),
        ),
        (ALPACA, Chat([ADD, REPLY], (1,)), Chat([ADD])),
        (
            {**ALPACA, "instruction": ADD["content"], "input": "", "text": None},
            Chat([ADD, REPLY], (1,)),
            Chat([ADD]),
        ),
        (
            {**ALPACA, "system": "be", "history": [["1 + 2", "3"]]},
            Chat([BE, USER, REPLY, ADD, REPLY], (2, 4)),
            Chat([BE, USER, REPLY, ADD]),
        ),
        (
            {**share(("human", "1 + 2"), ("gpt", "3")), "system": "be"},
            Chat([BE, USER, REPLY], (2,)),
            Chat([BE, USER]),
        ),
        # marks of what is not learned: of OpenAI, of axolotl
        (
            chat(USER, REPLY | {"weight": 0}, USER, REPLY | {"weight": 1}, USER, UNLEARNED),
            Chat([USER, REPLY] * 2, (3,)),
            Chat([*[USER, REPLY] * 2, USER]),
        ),
        (
            {
                "prompt": [USER | {"weight": 0}],
                "completion": [UNLEARNED | {"content": ""}, TOOL, REPLY],
                "chat_template_kwargs": {"mood": "calm"},
            },
            Chat([USER, REPLY | {"content": ""}, TOOL, REPLY], (3,), None, {"mood": "calm"}),
            Chat([USER], (), None, {"mood": "calm"}),
        ),
    ],
)
def test_layouts(record: dict[str, Any], learned: Any, asked: Any) -> None:
    """What is learned of a record, and what it asks; also in the fields of ShareGPT and of
    Alpaca."""
    assert (parse(record), parse_prompt(record)) == (learned, asked)
    assert parse({"text": "a", "messages": None, "other": 1}) == Text("", "a")
    assert parse_prompt({"instruction": ADD["content"]}) == Chat([ADD])


MESSAGE = "messages[1]"
MALFORMED = [
    (b'{"messages": [', None, "not JSON in UTF-8: Expecting value: line 1 column 15"),
    (
        {},
        None,
        "found the fields []: a record has one layout: 'messages', or 'prompt' and 'completion', "
        "or 'text'",
    ),
    ({"instruction": 5, "output": "a"}, "instruction", "found 5: a string is needed"),
    ({"prompt": "a"}, "completion", "found nothing: a string is needed"),
    ({"messages": "hi"}, "messages", "found 'hi': a list of messages is needed"),
    (chat(USER, "3"), MESSAGE, "found '3': an object with 'role' and 'content' is needed"),
    (
        share(("human", "a"), ("narrator", "b")),
        f"{MESSAGE}.role",
        "found 'narrator': one of system, developer",
    ),
    (
        chat(USER, {**REPLY, "content": "\n"}),
        f"{MESSAGE}.content",
        r"found '\n': there is nothing to learn",
    ),
    (
        chat(USER, {**REPLY, "content": "3<end>"}),
        f"{MESSAGE}.content",
        "found <end>, which ends a turn: remove",
    ),
    (
        {"prompt": [USER, REPLY], "completion": [USER]},
        "messages",
        "found no assistant turn that is learned: there is nothing to learn",
    ),
    (chat(USER, UNLEARNED), "messages", "found no assistant turn that is learned"),
    (
        chat(USER, REPLY | {"weight": 0.5}),
        f"{MESSAGE}.weight",
        "found 0.5: 0 or 1 is needed, as a turn is learned or not",
    ),
    (
        chat(USER, REPLY | {"train": "no"}),
        f"{MESSAGE}.train",
        "found 'no': true or false is needed",
    ),
    (
        chat(USER | {"train": True}, REPLY),
        "messages[0].train",
        "found True in a turn of 'user': only assistant turns are learned, remove it",
    ),
    (
        chat(USER, REPLY | {"train_detail": []}),
        f"{MESSAGE}.train_detail",
        "a turn is learned as a whole: mark it by 'train' instead",
    ),
    ({**ALPACA, "history": [["a"]]}, "history[0]", "found ['a']: a list of an instruction and its"),
    ({**ALPACA, "history": "a"}, "history[0]", "found 'a': a list of an instruction and its"),
    ({**ALPACA, "history": [["a", 5]]}, "history[0]", "found 5: a string is needed"),
    ({**ALPACA, "system": 5}, "system", "found 5: a string is needed"),
    ({**GOOD, "tools": 5}, "tools", "found 5: a list of objects is needed, a tool each"),
    ({**GOOD, "tools": "f"}, "tools", "found 'f': JSON is needed (Expecting value"),
    ({**GOOD, "tools": [{"name": "f"}]}, "tools", "the chat template leaves out 'f': give a"),
    (chat(USER, CALL), f"{MESSAGE}.tool_calls", "the chat template leaves out 'f': give a tok"),
    (
        chat(USER, CALL | {"content": ""}),
        f"{MESSAGE}.tool_calls",
        "the chat template leaves out 'f': give a tokenizer whose template renders tools",
    ),
    (
        chat(USER, {"role": "assistant", "tool_calls": "f"}),
        f"{MESSAGE}.tool_calls",
        "found 'f': a list of objects is needed, a call each",
    ),
    (
        {**GOOD, "chat_template_kwargs": 5},
        "chat_template_kwargs",
        "found 5: an object of variables",
    ),
    (
        {**GOOD, "chat_template_kwargs": {"tokenize": True}},
        "chat_template_kwargs",
        "found 'tokenize', which is no variable of a template: remove it",
    ),
    (chat(REPLY), "messages", "found no assistant turn that is learned"),
    ({"text": "a <mask>"}, None, f"its text holds the mask token, id {MASK}: remove it"),
    (
        b'{"text": "ab\\ud83d"}',
        "text",
        r"found half a surrogate pair, '\ud83d', at character 2: text that UTF-8",
    ),
    (
        {**WROTE, "ids": [9, True, 7, 6, 5, 1]},
        "reveal_step",
        "needed are ids, response_start, the index of",
    ),
    ({**WROTE, "response_start": -1, "reveal_step": [0] * 7}, "reveal_step", "needed are ids"),
    ({**WROTE, "reveal_step": [-1, 0, 1]}, "reveal_step", "needed are ids"),
    (
        {**WROTE, "reveal_step": [0, 10**20, 1]},
        "reveal_step",
        "found 100000000000000000000: a step is at most 2147483647",
    ),
    (
        {**WROTE, "decoded_by": ["m"]},
        "decoded_by",
        "found ['m']: an object is needed, as mrp decode writes it, or no such field",
    ),
    (
        chat(USER, CALL | {"content": 5}, TOOL, REPLY),
        "messages[1].content",
        "found 5: a string is needed",
    ),
    ({**WROTE, "decoded_by": "m"}, "decoded_by", "found 'm': an object is needed"),
    ({**WROTE, "decoded_by": []}, "decoded_by", "found []: an object is needed"),
    ({**WROTE, "ids": [9, 8, 350, 6, 5, 1]}, "ids", "found 350: needed are ids from 0 to 349"),
    (
        {**WROTE, "decoded_by": {"block_size": 16}},
        "decoded_by.block_size",
        "found 16, and the model that trains has 4",
    ),
]


@pytest.mark.parametrize(("record", "field", "message"), MALFORMED)
def test_a_malformed_record_is_named_with_file_line_and_field(
    tmp_path: Path, record: Any, field: str, message: str, word_tokenizer: Any
) -> None:
    path = write(
        tmp_path / "chats.jsonl",
        GOOD,
        b"",
        record,
        {**WROTE, "decoded_by": {"block_size": 4, "mask_token_id": 2}},
    )
    found = error_of(json_lines([path]), encoder(word_tokenizer, vocab_size=350).sample)
    assert found.startswith(f"{path}, line 3{f', field {field}' if field else ''}: {message}")


def test_problems_are_collected_and_nothing_behind_the_first_is_given(
    tmp_path: Path, word_tokenizer: Any
) -> None:
    """Twenty at most; entries before the first are given. So are those of prompts."""
    first, second = (
        write(tmp_path / "a.jsonl", GOOD, *[{"text": ""}] * 15),
        write(tmp_path / "b.jsonl", GOOD, *[5] * 6),
    )
    given: list[int] = []
    with pytest.raises(RecordError) as caught:
        given.extend(line for line, _ in checked(json_lines([first, second]), parse))
    head, *told = str(caught.value).splitlines()
    assert (given, head) == ([1], "the first 20 malformed records (there may be more):")
    places = [f"{first}, line {i + 2}, field text" for i in range(15)] + [
        f"{second}, line {i + 2}" for i in range(5)
    ]
    assert [line.partition(": ")[0].strip() for line in told] == places
    records = [{"text": "a"}, {"prompt": "a <mask>"}, {"prompt": " "}]
    wrong = (
        "^3 malformed.*record 1: found the fields.*record 2: its text holds.*record 3, field "
        "prompt: it has no token"
    )
    with pytest.raises(RecordError, match=f"(?s){wrong}"):
        list(checked(Source({"rows": records}), encoder(word_tokenizer).prompt))


def test_lines_and_files_as_they_come(tmp_path: Path) -> None:
    """A byte order mark, blank lines, Windows' line ends, letters of several bytes, no newline at
    the end; what is no data."""
    first = tmp_path / "first.jsonl"
    first.write_bytes('\ufeff{"text": "naïve"}\r\n\n{"text": "日本"}\n{"text": "three"}'.encode())
    second = write(tmp_path / "second.txt", {"text": "four"})
    found = [
        (line, record.completion)
        for line, record in checked(open_source([str(first), second]), parse)
    ]
    assert found == [(1, "naïve"), (3, "日本"), (4, "three"), (1, "four")]
    empty = write(tmp_path / "e.jsonl", b"")
    assert (
        error_of(json_lines([second, empty]))
        == f"{empty}: found no records: at least one is needed"
    )
    for paths, message in (
        (["data/chats.jsonl"], r"^data/chats\.jsonl: there is no such file or folder$"),
        (["./org/chats"], r"^\./org/chats: there is no such file or folder$"),
        ([second, str(tmp_path / "none")], r"none: there is no such file or folder$"),
        ([f"{second}*0"], r"second\.txt\*0: a weight is above 0; leave out what is not to be read"),
        ([], "no data: give --data"),
    ):
        with pytest.raises(ValueError, match=message):
            open_source(paths)


def test_what_datasets_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split of a saved folder, and a dataset by its id where no folder has that name."""
    datasets: Any = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{**GOOD, "text": None}, {"messages": None, "text": "plain"}])
    datasets.DatasetDict({"train": rows.select([0]), "held_out": rows}).save_to_disk(
        str(tmp_path / "saved")
    )
    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda name, split: rows if (name, split) == ("org/chats", "test") else 1 / 0,
    )
    for path, split in ((str(tmp_path / "saved"), "held_out"), ("org/chats", "test")):
        found = [record for _, record in checked(open_source([path], split), parse)]
        assert found == [Chat([USER, REPLY], (1,)), Text("", "plain")]
    with pytest.raises(RecordError, match="datasets cannot read split 'test' of it: KeyError"):
        open_source([str(tmp_path / "saved")], "test")


def test_tables_add_no_arguments_to_a_tool_call() -> None:
    """Where rows differ in their arguments, a table gives each those of all, the missing ones null;
    a null in a line of JSON is one that the model wrote."""
    datasets: Any = pytest.importorskip("datasets")

    def call(**arguments: Any) -> dict[str, Any]:
        return {
            **chat(
                USER, CALL | {"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
            ),
            "tools": [{"function": {"name": "f", "parameters": dict.fromkeys(arguments, "int")}}],
        }

    rows = [call(x=1), call(y=2)]
    table = datasets.Dataset.from_list(rows)
    assert None in table[0]["messages"][1]["tool_calls"][0]["function"]["arguments"].values()
    source = source_of(table, "rows")
    assert source is not None
    assert [record for _, record in checked(source, parse)] == [*map(parse, rows)]
    written = call(x=None)
    assert parse(parse_line(json.dumps(written).encode())).messages[1] == written["messages"][1]


# Which tokens are learned


def test_random_chats_are_what_a_template_that_marks_the_assistant_says(
    tiny_tokenizer: Any,
) -> None:
    """Ids of the whole text; what is learned ends with each turn's end token. Prompts are what
    stands before a response."""
    draw = random.Random(0)
    encode = RecordEncoder(tiny_tokenizer, 4, 512, tiny_tokenizer.mask_token_id, (2, 0))
    for _ in range(60):
        roles = ["system"] * draw.randint(0, 1) + ["user", "assistant"] * draw.randint(1, 4)
        texts = [
            " ".join(draw.choices(["Add", "3", "x y", "= 7"], k=draw.randint(1, 5))) for _ in roles
        ]
        said = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        sample = encode.sample(chat(*said))
        marked = tiny_tokenizer.apply_chat_template(
            said, return_dict=True, return_assistant_tokens_mask=True
        )
        # without the line's end behind the last turn
        assert sample.ids[: sample.length].tolist() == marked["input_ids"][:-1]
        assert sample.response[: sample.length].tolist() == [
            bool(mark) for mark in marked["assistant_masks"][:-1]
        ]
        assert sample.response[sample.length :].all()
        assert sample.ids[sample.length :].tolist() == [tiny_tokenizer.pad_token_id] * (
            -sample.length % 4
        )
        of_last = encode.sample({"prompt": said[:-1], "completion": said[-1:]})
        assert encode.prompt(chat(*said)) == of_last.ids[: of_last.response.argmax()].tolist()
    # An answer that begins with a line break does not melt into the prompt's.
    sample = encode.sample(chat(USER, {"role": "assistant", "content": "\n3"}))
    prompt = tiny_tokenizer.apply_chat_template(
        [USER], add_generation_prompt=True, return_dict=False
    )
    assert sample.ids[: len(prompt)].tolist() == prompt
    assert sample.response.tolist() == [False] * len(prompt) + [True] * (
        len(sample.ids) - len(prompt)
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        # Without reasoning the prompt of turn 1 is not how turn 1 is rendered later: told, not
        # guessed.
        (
            QWEN.replace("{% if enable_thinking is false %}{{ '[] ' }}{% endif %}", "{{ '[] ' }}"),
            "cannot be told apart",
        ),
        (QWEN.replace(" <end>", ""), "its turns cannot be told apart"),
        # Only the last turn has an end token, at which turn 1 would seem to end, too.
        (
            "{% for m in messages %}{{ m.role + ' : ' + m.content + ' ' }}{% if loop.last and "
            "m.role == 'assistant' %}{{ '<end> ' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}",
            "its turns cannot be told apart",
        ),
        (
            QWEN
            + "{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}",
            "refuses it: one turn only",
        ),
    ],
    ids=["reasoning", "no end", "a late end", "refuses"],
)
def test_templates_that_cannot_be_used(word_tokenizer: Any, template: str, message: str) -> None:
    """Which a chat of one turn does not show."""
    encode = encoder(with_template(word_tokenizer, template))
    encode.sample(GOOD)
    assert message in error_of(Source({"rows": [chat(USER, REPLY, USER, REPLY)]}), encode.sample)


def test_tokens_that_a_tokenizer_puts_before_a_text(word_tokenizer: Any) -> None:
    """One that does so is asked; and ordinary words as mask and end are told from others by their
    ids alone."""
    begins = copy.deepcopy(word_tokenizer)
    begins.bos_token = "<unk>"
    assert shown(begins, encoder(begins).sample({"text": "the sum of"})) == "{the sum of <end>}"
    begins.backend_tokenizer.post_processor = TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", 3)]
    )
    record = {"prompt": "1", "completion": "2"}
    assert shown(begins, encoder(begins).sample(record)) == "<unk> 1 {2 <end>}"
    assert encoder(begins).prompt(record) == begins.convert_tokens_to_ids(["<unk>", "1"])
    assert (
        shown(begins, encoder(begins).sample(GOOD))
        == "user : 1 + 2 assistant : {3 <end> <pad> <pad> <pad>}"
    )
    three, item = word_tokenizer.convert_tokens_to_ids(["3", "item"])
    masked = RecordEncoder(word_tokenizer, 4, 64, three, [item])
    assert shown(word_tokenizer, masked.sample({"text": "30 items"})) == "{30 <unk> item <pad>}"


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_added_to_a_synthetic_problem(family: Any, word_tokenizer: Any) -> None:
    """Its ids are those of its text, also where the tokenizer puts a token before every text."""
    begins = copy.deepcopy(word_tokenizer)
    begins.bos_token = "<unk>"
    begins.backend_tokenizer.post_processor = TemplateProcessing(
        single="<unk> $A", special_tokens=[("<unk>", 3)]
    )
    assert begins.encode("1") == [3, *word_tokenizer.encode("1")]
    problem = make_problem(family, "train", 0)
    prompt, response = encode(problem, begins)
    assert (prompt, response) == encode(problem, word_tokenizer)
    assert (response[-1] == END) == (family != "source")


TWO_TURNS = chat(
    USER, REPLY, {"role": "user", "content": "sum"}, {"role": "assistant", "content": "4"}
)
OF_TWO = (
    "<unk> : be <end> user : 1 + 2 <end> assistant : {3 <end>} user : sum <end> assistant : {[] 4 "
    "<end> <pad>}"
)
OF_TWO_ENDS = (
    "<unk> : be <end> user : 1 + 2 <end> <pad> assistant : {3 <end>} <pad> "
    "user : sum <end> <pad> assistant : {[] 4 <end> <pad> <pad>}"
)
TOOLS = "{% if tools %}{{ tools[0].name }} {% endif %}"
# Marks what is learned, also in an earlier turn, which is rendered otherwise than as the last one.
MARKED = (
    "{% for m in messages %}{{ m.role + ' : ' }}{% if m.role == 'assistant' %}{% generation %}"
    "{% if loop.last %}{{ '[] ' }}{% endif %}{{ m.content + ' ' }}{% for c in m.tool_calls %}"
    "{{ c.name + ' ' }}{% endfor %}{% endgeneration %}{{ '<end> ' }}{% else %}"
    "{{ m.content + ' ' + (sign or '+') + ' ' }}{% endif %}{% endfor %}{% if add_generation_prompt "
    "%}{{ 'assistant : ' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("given", "record", "words", "length", "steps"),
    [
        ({}, {"prompt": "1 + 2 =", "completion": " 3"}, "1 + 2 = {3 <end> <pad> <pad>}", 6, None),
        ({}, {"text": "the sum of <end>"}, "{the sum of <end>}", 4, None),
        (
            {"before": TOOLS},
            {**GOOD, "tools": [{"name": "count"}]},
            "count user : 1 + 2 assistant : {3 <end> <pad> <pad>}",
            10,
            None,
        ),
        # Turn 1 loses its reasoning once turn 2 follows, and is still told apart by its end token,
        # the first one.
        ({"template": QWEN}, TWO_TURNS, OF_TWO, 23, None),
        (
            {"template": QWEN.replace("<end> ' }}{% endfor", "<end> <pad> ' }}{% endfor")},
            TWO_TURNS,
            OF_TWO_ENDS,
            26,
            None,
        ),
        (
            {"template": MARKED},
            TWO_TURNS,
            "user : 1 + 2 + assistant : {3 <end>} user : sum + assistant : {[] 4 <end> <pad>}",
            19,
            None,
        ),
        (
            {"template": MARKED},
            {
                **chat(USER, REPLY, USER, UNLEARNED, USER, CALL | {"content": "sum"}, TOOL),
                "chat_template_kwargs": {"sign": "="},
            },
            "user : 1 + 2 = assistant : {3 <end>} user : 1 + 2 = assistant : 3 <end> "
            "user : 1 + 2 = assistant : {[] sum <unk> <end>}",
            32,
            None,
        ),
        # the template decides: the last turn alone
        (
            {"template": MARKED.replace("== 'assistant'", "== 'assistant' and loop.last")},
            chat(USER, REPLY, USER, {"role": "assistant", "content": "4"}),
            "user : 1 + 2 + assistant : 3 + user : 1 + 2 + assistant : "
            "{[] 4 <end> <pad> <pad> <pad>}",
            21,
            None,
        ),
        ({"max_length": 12}, LONG, "1 2 3 4 {5 6 7 8 9 10 <end> <pad>}", 11, None),
        ({"max_length": 11}, LONG, "1 2 3 4 {5 6 7 8}", None, None),
        ({"max_length": 7}, LONG, "nothing is learned of it", None, None),
        (
            {"max_length": 16},
            chat(USER, REPLY, ADD, REPLY),
            "user : 1 + 2 assistant : {3}",
            None,
            None,
        ),
        ({}, WROTE, "[9] [8] [7] {[6] [5] <end> <pad> <pad>}", 6, [-1, -1, -1, 0, 2, 1, -1, -1]),
        ({}, {**WROTE, "ids": [9, 8, 7, 6, 5, 4]}, "[9] [8] [7] {[6]}", 4, [-1, -1, -1, 0]),
        ({"max_length": 4}, WROTE, "[9] [8] [7] {[6]}", None, [-1, -1, -1, 0]),
        (
            {},
            {"ids": [9, 8, 7, 6, 5], "response_start": 4, "reveal_step": [0]},
            "nothing is learned of it",
            None,
            None,
        ),
    ],
)
def test_samples(
    given: Any,
    record: Any,
    words: str,
    length: int | None,
    steps: list[int] | None,
    word_tokenizer: Any,
) -> None:
    """A text that is cut has whole blocks and no end; behind its last learned token nothing is
    kept. So has one without an end that a model wrote."""
    template = given.get("template", given.get("before", "") + word_tokenizer.chat_template)
    tokenizer = with_template(word_tokenizer, template)
    sample = encoder(
        tokenizer, max_length=given.get("max_length", 64), end_token_ids=[END, PAD]
    ).sample(record)
    assert (sample is None) == (words == "nothing is learned of it")
    if sample is not None:
        made = re.sub(
            r"\[(\d)\]", lambda found: word_tokenizer.convert_ids_to_tokens(int(found[1])), words
        )
        assert (shown(word_tokenizer, sample), sample.length) == (made, length)
        assert (None if steps is None else sample.reveal_step.tolist()) == steps


def test_rejected_encoders(word_tokenizer: Any) -> None:
    with pytest.raises(
        ValueError, match="max_length is 3: at least one block of 4 tokens must fit"
    ):
        encoder(word_tokenizer, max_length=3)
    with pytest.raises(
        ValueError, match=r"the chat template refuses it: .*chat_template is not set"
    ):
        encoder(with_template(word_tokenizer, None)).sample(GOOD)
    for name in ("pad_token", "eos_token"):
        lacking = copy.deepcopy(word_tokenizer)
        setattr(lacking, name, None)
        with pytest.raises(ValueError, match=f"no {name.replace('_', ' ')}: set"):
            encoder(lacking)
