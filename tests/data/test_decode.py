"""Texts that a model decodes itself as training data: `mrp decode`, its file, and what training makes of it."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from commands import mrp
from helpers import word_model
from mrp_trainer.data.chat import RecordEncoder
from mrp_trainer.data.records import RecordError
from mrp_trainer.data.rows import RecordRows
from mrp_trainer.data.sources import JsonLines
from mrp_trainer.data.tasks import training_lines
from mrp_trainer.evaluate.decoded import NEW_TOKENS
from mrp_trainer.heads import with_new_head
from mrp_trainer.train.decode import DecodeOptions, decode
from mrp_trainer.train.runs import open_run
from mrp_trainer.train.settings import read_settings
from mrp_trainer.train.trajectories import digest
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedTokenizerFast

from modeling_mrp import MRPForCausalLM

COUNT = 5
USER, REPLY = {"role": "user", "content": "1 + 2"}, {"role": "assistant", "content": "3"}
GOOD = {"ids": [9, 8, 7, 6, 5, 1], "response_start": 3, "reveal_step": [0, 2, 1]}
QUICK = ["use_cpu=true", "disable_tqdm=true", "dataloader_pin_memory=false", "logging_steps=1", "save_strategy=no"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, word_tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """A model whose greedy texts end now and then, the chats that it is asked, and what it wrote."""
    root = tmp_path_factory.mktemp("decode")
    model = word_model(word_tokenizer, head_layers=0)
    often = 312
    with torch.no_grad():
        model.lm_head.weight[[often, word_tokenizer.eos_token_id]] = model.lm_head.weight[[word_tokenizer.eos_token_id, often]]
    model.generation_config.eos_token_id = word_tokenizer.eos_token_id
    model.save_pretrained(root / "model")
    word_tokenizer.save_pretrained(root / "model")
    (root / "chats.jsonl").write_text("\n".join(training_lines("math", "train", COUNT)))
    found = {path.stem: str(path) for path in root.iterdir()}
    told = mrp(*command(found, root / "wrote.jsonl", "--max-new-tokens", str(NEW_TOKENS["math"])))
    cut = sum(line["ids"][-1] != word_tokenizer.eos_token_id for line in lines_of(root / "wrote.jsonl"))
    assert 0 < cut < COUNT
    also = f", {cut} of them without an end (of these training takes whole blocks)"
    assert told.splitlines()[-1] == f"wrote {COUNT} texts to {root / 'wrote.jsonl'}{also}"
    return {**found, "wrote": str(root / "wrote.jsonl")}


def command(files: dict[str, str], output: Path, *more: str) -> list[str]:
    return ["decode", "--model", files["model"], "--data", files["chats"], "--output", str(output), *more]


def lines_of(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def short(files: dict[str, str], path: Path, **others: Any) -> DecodeOptions:
    options = DecodeOptions(files["model"], [files["chats"]], str(path), max_new_tokens=8, batch_size=2)
    return replace(options, **others)


def encoder(tokenizer: Any, block_size: int = 4, **options: Any) -> RecordEncoder:
    return RecordEncoder(tokenizer, block_size, 64, tokenizer.mask_token_id, **options)


def test_what_is_cut_and_what_is_left_out(word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Of a text without an end whole blocks are kept; of one that is too long, too."""
    records = (
        GOOD,
        {"ids": [9, 8, 7, 6, 5, 4], "response_start": 1, "reveal_step": [2, 0, 1, 3, 4]},
        {"ids": [9, 8, 7, 6, 5], "response_start": 4, "reveal_step": [0]},
        {"ids": [9] * 9 + [1], "response_start": 3, "reveal_step": [0, 1, 2, 3, 4, 5, 6]},
    )
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    rows = RecordRows(JsonLines([path]), replace(encoder(word_tokenizer), max_length=8), packed=False, shuffle=False)
    made = [sample for row in rows for sample in row]
    assert [(sample.ids.tolist(), sample.length) for sample in made] == [
        ([9, 8, 7, 6, 5, 1, 0, 0], 6),
        ([9, 8, 7, 6], 4),
        ([9] * 8, None),
    ]
    assert made[0].response.tolist() == [False] * 3 + [True] * 5
    assert [sample.reveal_step.tolist() for sample in made] == [
        [-1, -1, -1, 0, 2, 1, -1, -1],
        [-1, 2, 0, 1],
        [-1, -1, -1, 0, 1, 2, 3, 4],
    ]


def test_a_head_trains_on_decoded_texts_among_chats(files: dict[str, str], tmp_path: Path) -> None:
    given = {"model": files["model"], "data": [files["wrote"], files["chats"]], "output_dir": str(tmp_path), "max_steps": 2}
    shape = {"head_layers": 1, "max_length": 128, "per_device_train_batch_size": 2, "eval_data": [files["wrote"]]}
    run = open_run(read_settings("mrp", None, {**given, **shape, "packed": False}, QUICK))
    assert sum(sample.reveal_step is not None for (sample,) in run.trainer.train_dataset) == COUNT
    assert len(run.trainer.train_dataset) == 2 * COUNT
    run.train()
    log = run.trainer.state.log_history
    assert [line["kl_head"] > 0 for line in log if "kl_head" in line] == [True, True]
    assert [line["eval_kl_head"] > 0 for line in log if "eval_kl_head" in line] == [True]
    assert MRPForCausalLM.from_pretrained(tmp_path).mrp_head.norm.weight.abs().max() > 0


def test_sampled_texts_are_their_own(files: dict[str, str], tmp_path: Path) -> None:
    """Neither the batch nor what is decoded beside it changes a text; its seed does."""
    found = {}
    for name, options in {"in twos": {"limit": 3}, "at once": {"batch_size": 5}, "seed": {"seed": 1, "limit": 2}}.items():
        path = tmp_path / f"{name}.jsonl"
        decode(short(files, path, dtype="float64", temperature=1.0, **options))
        found[name] = [(line["ids"], line["reveal_step"]) for line in lines_of(path)]
        assert lines_of(path)[0]["decoded_by"]["seed"] == options.get("seed", 0)
    assert found["at once"][:3] == found["in twos"]
    assert found["at once"][:2] != found["seed"]


def test_prompts_are_what_training_puts_before_a_response(word_tokenizer: PreTrainedTokenizerFast) -> None:
    made = encoder(word_tokenizer)
    for record, words in (
        ({"messages": [USER, REPLY]}, "user : 1 + 2 assistant :"),
        ({"prompt": [USER], "completion": [REPLY]}, "user : 1 + 2 assistant :"),
        ({"prompt": "1 + 2", "completion": "3"}, "1 + 2"),
    ):
        sample = made.sample(record)
        assert sample is not None
        assert made.prompt(record) == sample.ids[: sample.response.argmax()].tolist()
        assert made.prompt(record) == word_tokenizer.encode(words, add_special_tokens=False)
    conversation = {"messages": [USER, REPLY, USER]}
    words = "user : 1 + 2 assistant : 3 user : 1 + 2 assistant :"
    for more in ([], [REPLY]):
        asked = {"messages": conversation["messages"] + more}
        assert made.prompt(asked) == word_tokenizer.encode(words, add_special_tokens=False)


def test_another_backbone_is_told_of_once(
    word_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = encoder(word_tokenizer, digest="aa")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    for origin in ({}, {"digest": None}, {"digest": "aa"}):
        made.sample({**GOOD, "decoded_by": origin})
    assert not caplog.records
    for _ in range(2):
        made.sample({**GOOD, "decoded_by": {"model": "org/other", "digest": "bb"}})
    assert [record.getMessage() for record in caplog.records] == [
        "'org/other' wrote texts of the data, and another backbone trains: a head learns most from what its own backbone "
        "wrote, decode the prompts with that one"
    ]


def test_a_digest_is_of_the_backbone(files: dict[str, str]) -> None:
    """Neither the type nor the head nor an adapter changes it; one number of the last layer does."""
    model = MRPForCausalLM.from_pretrained(files["model"])
    known = digest(model)
    assert known == lines_of(files["wrote"])[0]["decoded_by"]["digest"]
    for dtype in (torch.float64, torch.bfloat16):
        assert digest(MRPForCausalLM.from_pretrained(files["model"], dtype=dtype)) == known
    with_head = with_new_head(MRPForCausalLM.from_pretrained(files["model"]), 1)
    get_peft_model(with_head, LoraConfig(r=2, target_modules=r".*layers\.0\.self_attn\.q_proj"))
    assert digest(with_head) == known
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight[0, 0] += 1
    assert digest(model) not in (known, None)
    with torch.device("meta"):
        assert digest(MRPForCausalLM(model.config)) is None


def test_what_is_there_is_kept_and_the_rest_is_made(files: dict[str, str], tmp_path: Path) -> None:
    """Batches of a run that was stopped, whatever the checkpoint is called; a file that is done is refused."""
    whole, part = tmp_path / "whole.jsonl", tmp_path / "whole.part"
    stopped = mock.patch("mrp_trainer.train.trajectories.shutil.copyfileobj", side_effect=KeyboardInterrupt)
    with stopped, pytest.raises(KeyboardInterrupt):
        decode(short(files, whole))
    first, second, _ = sorted(part.glob("*.jsonl"))
    second.unlink()
    (part / "cut.partial").write_text("{")
    first.write_text(first.read_text().replace("}", ', "kept": 1}', 1))
    written = decode(short(files, whole, model=files["model"] + "/"))
    assert written is not None
    assert (written.path, written.texts) == (whole, COUNT)
    assert [line["decoded_by"].get("kept") for line in lines_of(whole)] == [1, *[None] * (COUNT - 1)]
    decode(short(files, tmp_path / "again.jsonl"))
    assert [line["ids"] for line in lines_of(tmp_path / "again.jsonl")] == [line["ids"] for line in lines_of(whole)]
    assert not part.exists()
    with pytest.raises(ValueError, match=r"whole\.jsonl is there already: name another file, or remove it"):
        decode(short(files, whole))


def test_batches_of_other_prompts_or_options_are_not_taken(files: dict[str, str], tmp_path: Path) -> None:
    with mock.patch("mrp_trainer.train.trajectories.shutil.copyfileobj", side_effect=KeyboardInterrupt):
        for change in ({}, {"temperature": 0.5}, {"limit": 2}):
            with pytest.raises(KeyboardInterrupt):
                decode(short(files, tmp_path / "a.jsonl", **change))
    names = {path.name.split("-")[0] for path in (tmp_path / "a.part").glob("*.jsonl")}
    assert len(names) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output": "a.json"}, r"output is 'a\.json': give a name that ends in \.jsonl"),
        ({"temperature": float("nan")}, r"temperature is nan: it must be 0 \(greedy\) or more"),
        ({"max_new_tokens": 7}, "max_new_tokens is 7: training takes whole blocks, give at least 8, one of them"),
        ({"max_new_tokens": 240}, r"line 1: its prompt has 28 tokens, and 16 leave room for the new ones: shorten"),
        ({"data": ["nowhere.jsonl"]}, r"nowhere\.jsonl: there is no such file"),
    ],
)
def test_what_cannot_be_decoded(change: dict[str, Any], message: str, files: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        decode(short(files, tmp_path / "a" / "b.jsonl", **change))
    assert list(tmp_path.rglob("*.*")) == []


def test_random_masks_are_weighed_and_decoded_texts_have_none(files: dict[str, str], tmp_path: Path) -> None:
    given = {"model": files["model"], "data": [files["wrote"]], "output_dir": str(tmp_path), "inverse_level": True}
    with pytest.raises(RecordError, match=r"wrote\.jsonl, line 1, field reveal_step: .* inverse_level to weigh: switch"):
        open_run(read_settings("mrp", None, given, QUICK))
