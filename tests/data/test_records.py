"""Records of users: every malformed one is named, and of each good one exactly what the assistant says is learned."""

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from mrp_trainer.data.chat import RecordEncoder
from mrp_trainer.data.records import Chat, RecordError, RecordParser, Text
from mrp_trainer.data.sources import JsonLines, Rows, checked, open_source
from tokenizers.processors import TemplateProcessing

USER, REPLY = {"role": "user", "content": "1 + 2"}, {"role": "assistant", "content": "3"}
GOOD = {"messages": [USER, REPLY]}
MASK, END, PAD = 2, 1, 0  # of the word tokenizer
# As Qwen's: a system prompt where none is given, and reasoning shown in the last turn only.
QWEN = (
    "{% if messages[0].role != 'system' %}{{ 'system : be <end> ' }}{% endif %}"
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ m.role + ' : ' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '[] ' }}{% endif %}"
    "{{ m.content + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% if enable_thinking is false %}{{ '[] ' }}{% endif %}{% endif %}"
)


def with_template(tokenizer: Any, template: str | None) -> Any:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def encoder(tokenizer: Any, block_size: int = 4, max_length: int = 64, **options: Any) -> RecordEncoder:
    return RecordEncoder(tokenizer, block_size, max_length, MASK, **options)


def shown(tokenizer: Any, sample: Any) -> str:
    """The sample's words; what is learned in braces."""
    words = [
        f"{{{word}}}" if learned else word
        for word, learned in zip(tokenizer.convert_ids_to_tokens(sample.ids.tolist()), sample.response, strict=True)
    ]
    return " ".join(words).replace("} {", " ")


def write(path: Path, *lines: Any) -> str:
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return str(path)


def problems_of(source: Any, check: Any = None) -> RecordError:
    with pytest.raises(RecordError) as caught:
        list(checked(source, check or RecordParser("<mask>", ["<end>"]).parse))
    return caught.value


def chat(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


def share(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}


ALPACA = {"instruction": "Add.", "input": "3 and 4", "output": "7"}

SHARED = share(("system", "Be brief."), ("human", "3 + 4 ?"), ("gpt", "7"), ("human", "Thanks."))


@pytest.mark.parametrize(
    ("record", "asked", "learned"),
    [
        (SHARED, ["Be brief.", "3 + 4 ?", "7", "Thanks."], ["system", "user", "assistant"]),
        (ALPACA, ["Add.\n\n3 and 4"], ["user", "assistant"]),
        ({**ALPACA, "input": ""}, ["Add."], ["user", "assistant"]),
        ({**ALPACA, "text": "Below is an instruction. Add. 7"}, ["Add.\n\n3 and 4"], ["user", "assistant"]),
    ],
)
def test_other_peoples_fields(record: dict[str, Any], asked: list[str], learned: list[str]) -> None:
    """Of ShareGPT and of Alpaca, whose tables also hold the whole as one text."""
    parser = RecordParser("<mask>", ["<end>"])
    found = parser.parse(record)
    assert isinstance(found, Chat)
    assert [message["role"] for message in found.messages] == learned
    assert found.messages[-1]["content"] == "7"
    prompt = parser.parse_prompt(record) if "text" not in record else parser.parse_prompt(ALPACA)
    assert isinstance(prompt, Chat)
    assert [message["content"] for message in prompt.messages] == asked


MESSAGE = "messages[1]"
MALFORMED = [
    (b'{"messages": [', None, "not JSON in UTF-8: Expecting value: line 1 column 15"),
    (b"[" * 100_000, None, "not JSON in UTF-8: maximum recursion depth"),
    ([GOOD], None, "found a list: a record is an object"),
    ({}, None, "found no fields: needed is 'messages', or 'prompt' and 'completion', or 'text'"),
    ({"question": "a", "answer": "b"}, None, "found the fields ['answer', 'question']: needed is"),
    ({**GOOD, "text": "a"}, "text", "found 'messages' and 'text': a record has one layout"),
    ({"instruction": 5, "output": "a"}, "instruction", "found 5: a string is needed"),
    ({"prompt": "a"}, "completion", "it is missing beside 'prompt': both are needed"),
    ({"prompt": [USER], "completion": "3"}, "prompt", "found a list: a string is needed"),
    ({"messages": "hi"}, "messages", "found 'hi': a list of messages is needed"),
    (chat(USER, "3"), MESSAGE, "found '3': an object with 'role' and 'content' is needed"),
    (share(("human", "a"), ("bot", "b")), "conversations[1].role", "found 'bot': one of system, developer"),
    (chat(USER, {**REPLY, "content": None}), f"{MESSAGE}.content", "found nothing: a string is needed"),
    (chat(USER, {**REPLY, "content": "\n"}), f"{MESSAGE}.content", r"found '\n': there is nothing to learn"),
    (chat(USER, {**REPLY, "content": "3<end>"}), f"{MESSAGE}.content", "found <end>, which ends a turn: remove"),
    (chat(USER), "messages", "found no assistant turn: there is nothing to learn"),
    ({"prompt": [USER, REPLY], "completion": [USER]}, "completion", "found no assistant turn: there is nothing to learn"),
    ({"prompt": [USER, REPLY], "completion": [REPLY]}, "completion[0].role", "found a second assistant turn in a row: join"),
    (chat(REPLY), "messages[0].role", "found 'assistant' in the first message: a turn that answers it must come"),
    ({"text": "a<mask>b"}, "text", "found the mask token <mask>: clean text must not hold it"),
    (b'{"text": "ab\\ud83d"}', "text", r"found half a surrogate pair, '\ud83d', at character 2: text that UTF-8"),
    ({**GOOD, "tools": "[]"}, "tools", "found '[]': a list of objects is needed"),
]


@pytest.mark.parametrize(("record", "field", "message"), MALFORMED)
def test_a_malformed_record_is_named_with_file_line_and_field(tmp_path: Path, record: Any, field: str, message: str) -> None:
    path = write(tmp_path / "chats.jsonl", GOOD, b"", record, GOOD)
    error = problems_of(JsonLines([path]))
    (problem,) = error.problems
    assert (problem.path, problem.line, problem.field_name) == (path, 3, field)
    assert message in problem.message
    assert str(error) == f"{path}, line 3{f', field {field}' if field else ''}: {problem.message}"


# What `mrp decode` writes: the word tokenizer's ids, block size 4; 2 is the mask and 1 the end.
WROTE = {"ids": [9, 8, 7, 6, 5, 1], "response_start": 3, "reveal_step": [0, 2, 1]}
BY = {"model": "org/other", "block_size": 4, "mask_token_id": 2}


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"ids": [9, True, 7, 6, 5, 1]}, "reveal_step", "needed beside it are ids and response_start, a place in them"),
        ({"response_start": 6}, "reveal_step", "needed beside it are ids and response_start, a place in them"),
        ({"ids": [9, 8, 50, 6, 5, 1]}, "ids", "found 50: needed are ids from 0 to 49"),
        ({"ids": [9, 8, 7, 2, 5, 1]}, "ids", "found 2: needed are ids"),
        ({"reveal_step": [0, 1]}, "reveal_step", "found 2 steps: 3 ids need one each"),
        ({"reveal_step": [-1, 0, 1]}, "reveal_step", "found 3 steps: 3 ids need one each, from 0 on"),
        ({"decoded_by": {**BY, "block_size": 16}}, "decoded_by.block_size", "found 16, and the model that trains has 4"),
    ],
)
def test_a_malformed_decode_is_named(change: Any, field: str, message: str, word_tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {**WROTE, "decoded_by": BY}, {"text": "Ana"}, {**WROTE, **change})
    error = problems_of(JsonLines([path]), encoder(word_tokenizer, vocab_size=50).sample)
    assert str(error).startswith(f"{path}, line 3, field {field}: {message}")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a"}, "line 1: found the fields ['text']: needed is 'messages', or 'prompt'"),
        ({"messages": [USER], "prompt": "a"}, "line 1, field prompt: found 'messages' and 'prompt': needed is"),
        ({"prompt": "a <mask>"}, "line 1, field prompt: found the mask token <mask>"),
        ({"prompt": " "}, "line 1, field prompt: it has no token: write a longer one"),
    ],
)
def test_a_malformed_prompt_is_named(record: Any, message: str, word_tokenizer: Any) -> None:
    assert str(problems_of(Rows([record], "rows"), encoder(word_tokenizer).prompt)).startswith(f"rows, {message}")


def test_problems_are_collected_and_nothing_behind_the_first_is_given(tmp_path: Path) -> None:
    """Twenty at most; entries before the first are given."""
    first = write(tmp_path / "a.jsonl", GOOD, *[{"text": ""}] * 15)
    for count, head in ((2, "17 malformed records:"), (6, "the first 20 malformed records (there")):
        second = write(tmp_path / "b.jsonl", GOOD, *[5] * count)
        given: list[int] = []
        with pytest.raises(RecordError) as caught:
            given.extend(line for line, _ in checked(JsonLines([first, second]), RecordParser().parse))
        assert given == [1]
        assert str(caught.value).startswith(head)
        places = [(problem.path, problem.line) for problem in caught.value.problems]
        assert places == [*[(first, i + 2) for i in range(15)], *[(second, i + 2) for i in range(min(count, 5))]]


def test_files_that_are_no_data(tmp_path: Path) -> None:
    lines, other, empty = (write(tmp_path / name, *more) for name, *more in (("a.jsonl", GOOD), ("a.txt",), ("e.jsonl", b"")))
    assert str(problems_of(JsonLines([lines, empty]))) == f"{empty}: found no records: at least one is needed"
    for paths, message in (
        ([str(tmp_path / "no.jsonl")], r"no\.jsonl: there is no such file or folder$"),
        ([lines, str(tmp_path)], r"several paths must all be \.jsonl or \.ndjson files"),
        ([other], r"found the ending '\.txt': one of \.jsonl, \.ndjson, \.json, \.parquet"),
        ([], "no data: give at least one"),
    ):
        with pytest.raises(ValueError, match=message):
            open_source(paths)


def test_lines_as_files_have_them(tmp_path: Path) -> None:
    """A byte order mark, blank lines, Windows' line ends, letters of several bytes, no newline at the end."""
    first = tmp_path / "first.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in ("naïve", "日本", "three")]
    first.write_bytes(("\ufeff" + lines[0] + "\r\n\n" + lines[1] + "\n" + lines[2]).encode())
    source = open_source([str(first), write(tmp_path / "second.ndjson", {"text": "four"})])
    found = [(line, record.completion) for line, record in checked(source, RecordParser().parse)]
    assert found == [(1, "naïve"), (3, "日本"), (4, "three"), (1, "four")]


def test_what_is_allowed() -> None:
    parse = RecordParser("<mask>", ["<end>"]).parse
    call = {"role": "assistant", "tool_calls": [{"name": "f"}], "content": None}
    tool = {"role": "tool", "content": ""}
    assert parse({"text": "a", "messages": None, "other": 1}) == Text("", "a")
    assert parse({"prompt": "", "completion": "a<end>"}) == Text("", "a<end>")  # a text may end itself
    assert parse({"prompt": [USER, REPLY, USER], "completion": [REPLY]}) == Chat([USER, REPLY, USER, REPLY], 3, "completion")
    told = parse({"messages": [USER, call, tool, REPLY, USER], "tools": [{"name": "f"}]})  # nothing is learned of the last
    assert told == Chat(
        [USER, {"role": "assistant", "tool_calls": [{"name": "f"}]}, tool, REPLY], 0, "messages", [{"name": "f"}]
    )


# Folders and datasets on the Hub


def test_what_datasets_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved folder, a split of it, and a dataset by its id where no folder has that name; what cannot be one is not asked."""
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = datasets.Dataset.from_list([{**GOOD, "text": None}, {"messages": None, "text": "plain"}])
    datasets.DatasetDict({"train": rows, "held_out": rows.select([1])}).save_to_disk(str(tmp_path / "saved"))

    def read(path: str, **options: Any) -> list[Any]:
        return [record for _, record in checked(open_source([path], **options), RecordParser().parse)]

    expected = [Chat([USER, REPLY]), Text("", "plain")]
    assert read(str(tmp_path / "saved")) == expected
    assert read(str(tmp_path / "saved"), split="held_out") == expected[1:]
    with pytest.raises(RecordError, match="datasets cannot read split 'test' of it: KeyError"):
        read(str(tmp_path / "saved"), split="test")
    with monkeypatch.context() as patched:
        patched.setattr(datasets, "load_dataset", lambda name, split: rows if (name, split) == ("org/chats", "test") else 1 / 0)
        assert read("org/chats", split="test") == expected
        for path in ("data/chats.jsonl", "./org/chats", "chats"):
            with pytest.raises(RecordError, match=f"^{re.escape(path)}: there is no such file or folder$"):
                open_source([path])
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(RecordError, match="org/none: there is no such file or folder here, and on the Hub"):
        open_source(["org/none"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install modeling-mrp\[train\], or give \.jsonl files"):
        open_source([str(tmp_path)])


# Which tokens are learned


def test_every_assistant_turn_of_a_chat_is_learned(word_tokenizer: Any) -> None:
    """The template writes no end token: only the last turn has one."""
    sample = encoder(word_tokenizer).sample(
        chat(USER, REPLY, {"role": "user", "content": "the sum"}, {"role": "assistant", "content": "of two"})
    )
    assert shown(word_tokenizer, sample) == (
        "user : 1 + 2 assistant : {3} user : the sum assistant : {of two <end> <pad> <pad> <pad>}"
    )
    assert (sample.length, len(sample.ids)) == (17, 20)


def test_a_template_with_end_tokens_and_a_system_prompt(word_tokenizer: Any) -> None:
    """As Qwen's: turn 1 loses its reasoning once turn 2 follows, and is still told apart by its end token."""
    tokenizer = with_template(word_tokenizer, QWEN)
    more = [{"role": "user", "content": "sum"}, {"role": "assistant", "content": "4"}]
    sample = encoder(tokenizer).sample(chat(USER, REPLY, *more))
    assert shown(tokenizer, sample) == (
        "<unk> : be <end> user : 1 + 2 <end> assistant : {3 <end>} user : sum <end> assistant : {[] 4 <end> <pad>}"
    )
    # Completions alone; a system prompt of one's own.
    system = {"role": "system", "content": "add"}
    sample = encoder(tokenizer).sample({"prompt": [system, USER, REPLY, more[0]], "completion": [more[1]]})
    assert shown(tokenizer, sample) == (
        "<unk> : add <end> user : 1 + 2 <end> assistant : 3 <end> user : sum <end> assistant : {[] 4 <end> <pad>}"
    )
    # Without reasoning the prompt of turn 1 is not how turn 1 is rendered later: told, not guessed.
    tokenizer = with_template(
        word_tokenizer, QWEN.replace("{% if enable_thinking is false %}{{ '[] ' }}{% endif %}", "{{ '[] ' }}")
    )
    plain = encoder(tokenizer)
    assert shown(tokenizer, plain.sample(GOOD)).endswith("assistant : [] {3 <end> <pad>}")
    path = [chat(USER, REPLY), chat(USER, REPLY, *more)]
    (problem,) = problems_of(Rows(path, "rows"), plain.sample).problems
    assert (problem.line, problem.field_name) == (2, "messages")
    assert "the chat template renders what precedes message 2 otherwise once later messages follow" in problem.message


def test_the_first_end_token_ends_a_turn(word_tokenizer: Any) -> None:
    """This template puts another one behind the chat, as some do."""
    tokenizer = with_template(word_tokenizer, QWEN.replace("{{ m.content + ' <end> ' }}", "{{ m.content + ' <end> <pad> ' }}"))
    sample = encoder(tokenizer, end_token_ids=[END, PAD]).sample(chat(USER, REPLY, USER, REPLY))
    assert shown(tokenizer, sample) == (
        "<unk> : be <end> user : 1 + 2 <end> <pad> assistant : {3 <end>} <pad>"
        " user : 1 + 2 <end> <pad> assistant : {[] 3 <end>}"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages[-2:] %}{{ m.role + ' : ' + m.content + ' ' }}{% endfor %}", "its turns cannot be told apart"),
        (QWEN.replace(" <end>", ""), "its turns cannot be told apart"),
        ("{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}", "refuses it: one turn only"),
        ("{{ '<mask> ' * (messages | length > 2) }}", "the chat template renders it with the mask"),
    ],
    ids=["the last exchange", "no end", "refuses", "mask"],
)
def test_templates_that_cannot_be_used(word_tokenizer: Any, template: str, message: str) -> None:
    """Which a chat of one turn does not show."""
    if "role" not in template:
        template += word_tokenizer.chat_template
    encode = encoder(with_template(word_tokenizer, template))
    encode.sample(GOOD)
    (problem,) = problems_of(Rows([chat(USER, REPLY, USER, REPLY)], "rows"), encode.sample).problems
    assert message in problem.message


def test_plain_texts(word_tokenizer: Any) -> None:
    encode = encoder(word_tokenizer)
    sample = encode.sample({"prompt": "1 + 2 =", "completion": " 3"})
    assert shown(word_tokenizer, sample) == "1 + 2 = {3 <end> <pad> <pad>}"
    assert shown(word_tokenizer, encode.sample({"text": "the sum of two"})) == "{the sum of two <end> <pad> <pad> <pad>}"
    assert shown(word_tokenizer, encode.sample({"text": "the sum of <end>"})) == "{the sum of <end>}"
    begins = copy.deepcopy(word_tokenizer)
    begins.bos_token = "<unk>"  # a tokenizer that puts it before every text is asked for it; this one does not
    assert shown(begins, encoder(begins).sample({"text": "the sum of"})) == "{the sum of <end>}"
    begins.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 3)])
    assert shown(begins, encoder(begins).sample({"prompt": "1", "completion": "2"})) == "<unk> 1 {2 <end>}"
    tools = with_template(word_tokenizer, "{% if tools %}{{ tools[0].name }} {% endif %}" + word_tokenizer.chat_template)
    sample = encoder(tools).sample({**GOOD, "tools": [{"name": "count"}]})
    assert shown(tools, sample) == "count user : 1 + 2 assistant : {3 <end> <pad> <pad>}"


def test_a_text_is_cut_to_whole_blocks_and_has_no_end(word_tokenizer: Any) -> None:
    record = {"prompt": "1 2 3 4", "completion": "5 6 7 8 9 10"}  # 11 tokens with the end
    whole = encoder(word_tokenizer, max_length=12).sample(record)
    assert (shown(word_tokenizer, whole), whole.length) == ("1 2 3 4 {5 6 7 8 9 10 <end> <pad>}", 11)
    exact = encoder(word_tokenizer, max_length=8).sample({"prompt": "1 2 3 4", "completion": "5 6 7"})
    assert (shown(word_tokenizer, exact), exact.length) == ("1 2 3 4 {5 6 7 <end>}", 8)
    cut = encoder(word_tokenizer, max_length=11).sample(record)
    assert (shown(word_tokenizer, cut), cut.length) == ("1 2 3 4 {5 6 7 8}", None)
    assert encoder(word_tokenizer, max_length=7).sample(record) is None
    # Behind the last learned token nothing is kept: the next turn's prompt alone teaches nothing.
    long = chat(USER, REPLY, {"role": "user", "content": "the sum of two numbers"}, REPLY)
    cut = encoder(word_tokenizer, max_length=16).sample(long)
    assert (shown(word_tokenizer, cut), cut.length) == ("user : 1 + 2 assistant : {3}", None)


def test_chats_of_the_embedded_tokenizer(tiny_tokenizer: Any) -> None:
    """Its ids are those of the whole text, and of a prompt alone what a decoder is given."""
    messages = [{"role": "system", "content": "Add."}, USER, REPLY, {"role": "user", "content": "4?"}, REPLY]
    sample = RecordEncoder(tiny_tokenizer, 4, 128, tiny_tokenizer.mask_token_id, (2, 0)).sample({"messages": messages})
    whole = tiny_tokenizer.apply_chat_template(messages, tokenize=False)
    assert tiny_tokenizer.decode(sample.ids[: sample.length]) == whole.removesuffix("\n")
    assert sample.ids[: sample.length].tolist() == tiny_tokenizer.encode(whole.removesuffix("\n"), add_special_tokens=False)
    learned = sample.response[: sample.length]
    assert tiny_tokenizer.decode(sample.ids[: sample.length][learned]) == "3<|im_end|>3<|im_end|>"
    assert sample.response[sample.length :].all()
    # An answer that begins with a line break does not melt into the prompt's.
    sample = RecordEncoder(tiny_tokenizer, 4, 64, 3).sample(chat(USER, {"role": "assistant", "content": "\n3"}))
    prompt = tiny_tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert sample.ids[: len(prompt)].tolist() == prompt
    assert sample.response.tolist() == [False] * len(prompt) + [True] * (len(sample.ids) - len(prompt))


def test_ordinary_words_as_mask_and_end(word_tokenizer: Any) -> None:
    """They are told from other words by their ids alone: "3" is the mask, "30" is none; nothing in the text ends a turn."""
    three, item = word_tokenizer.convert_tokens_to_ids(["3", "item"])
    encode = RecordEncoder(word_tokenizer, 4, 64, three, [item])
    assert shown(word_tokenizer, encode.sample({"text": "30 of item"})) == "{30 of item <pad>}"
    assert shown(word_tokenizer, encode.sample({"text": "30 items"})) == "{30 <unk> item <pad>}"
    with pytest.raises(ValueError, match=f"its text holds the mask token, id {three}: remove it"):
        encode.sample({"text": "of 3"})


def test_rejected_encoders(word_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="max_length is 3: at least one block of 4 tokens must fit"):
        encoder(word_tokenizer, max_length=3)
    with pytest.raises(ValueError, match=r"the tokenizer has no chat template: set tokenizer\.chat_template, or give 'prompt'"):
        encoder(with_template(word_tokenizer, None)).sample(GOOD)
    for name, message in (
        ("pad_token", "no pad token: set"),
        ("eos_token", "no eos token: set tokenizer.eos_token or give end"),
    ):
        lacking = copy.deepcopy(word_tokenizer)
        setattr(lacking, name, None)
        with pytest.raises(ValueError, match=message):
            encoder(lacking)
