"""Texts that a model decodes itself as training data: `mrp decode`, its file, and what training makes of it."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from commands import mrp
from helpers import word_model
from mrp_trainer.data.chat import RecordEncoder
from mrp_trainer.data.tasks import training_lines
from mrp_trainer.evaluate.decoded import NEW_TOKENS
from mrp_trainer.heads import with_new_head
from mrp_trainer.train.decode import decode
from mrp_trainer.train.inputs import digest
from mrp_trainer.train.options import DecodeOptions
from mrp_trainer.train.runs import open_run
from mrp_trainer.train.settings import read_settings
from peft import LoraConfig, get_peft_model
from training_runs import saved
from transformers import PreTrainedTokenizerFast

from modeling_mrp import MRPForCausalLM

COUNT = 5
QUICK = ["use_cpu=true", "disable_tqdm=true", "dataloader_pin_memory=false", "logging_steps=1", "save_strategy=no"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, word_tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """A model whose greedy texts end now and then, the chats that it is asked, and what it wrote."""
    root = tmp_path_factory.mktemp("decode")
    model = word_model(word_tokenizer, head_layers=0)
    often = 312
    with torch.no_grad():
        model.lm_head.weight[[often, word_tokenizer.eos_token_id]] = model.lm_head.weight[[word_tokenizer.eos_token_id, often]]
    saved(model, word_tokenizer, root / "model")
    (root / "chats.jsonl").write_text("\n".join(training_lines("math", "train", COUNT)))
    found = {path.stem: str(path) for path in root.iterdir()} | {"wrote": str(root / "wrote.jsonl")}
    flags = ["--model", found["model"], "--data", found["chats"], "--output", found["wrote"]]
    told = mrp("decode", *flags, "--max-new-tokens", str(NEW_TOKENS["math"]))
    cut = sum(line["ids"][-1] != word_tokenizer.eos_token_id for line in lines_of(found["wrote"]))
    assert 0 < cut < COUNT
    also = f", {cut} of them without an end (of these training takes whole blocks)"
    assert told.splitlines()[-1] == f"wrote {COUNT} texts to {found['wrote']}{also}"
    return found


def lines_of(path: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def short(files: dict[str, str], path: Path, **others: Any) -> DecodeOptions:
    given = {"model": files["model"], "data": [files["chats"]], "max_new_tokens": 8, "batch_size": 2, "device": "cpu"}
    return DecodeOptions(output=str(path), **{**given, **others})


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


def test_another_backbone_is_told_of_once(
    word_tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = RecordEncoder(word_tokenizer, 4, 64, word_tokenizer.mask_token_id, digest="aa")
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    wrote = {"ids": [9, 8, 7, 6, 5, 1], "response_start": 3, "reveal_step": [0, 2, 1]}
    for origin in ({}, {"digest": None}, {"digest": "aa"}):
        made.sample({**wrote, "decoded_by": origin})
    assert not caplog.records
    for _ in range(2):
        made.sample({**wrote, "decoded_by": {"model": "org/other", "digest": "bb"}})
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "'org/other' wrote texts of the data, and another backbone trains: a head learns most"
    )


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
    """Of calls that were stopped behind a batch the one with the same prompts and options is taken up, here by two processes,
    the second before the first, and whatever the checkpoint is called; a file that is done is refused."""
    whole, part, generate = tmp_path / "whole.jsonl", tmp_path / "whole.part", MRPForCausalLM.generate
    for change in ({}, {"max_new_tokens": 16}, {"limit": 4}):
        outcomes = mock.Mock(side_effect=[None, KeyboardInterrupt])
        once = mock.patch.object(MRPForCausalLM, "generate", lambda *a, o=outcomes, **k: o() or generate(*a, **k))
        with once, pytest.raises(KeyboardInterrupt):
            decode(short(files, whole, **change))
    first = sorted(part.glob("*-0.jsonl"))
    assert len(first) == len(list(part.iterdir())) == 3
    for path in first:
        path.write_text(path.read_text().replace("}", ', "kept": 1}', 1))
    (part / "cut.partial").write_text("{")
    for rank in (1, 0):
        one = SimpleNamespace(
            process_index=rank, num_processes=2, is_main_process=not rank, wait_for_everyone=int, device="cpu"
        )
        with mock.patch("mrp_trainer.train.decode.PartialState", lambda one=one, **_: one):
            assert (decode(short(files, whole, model=files["model"] + "/")) is None) == (rank == 1)
        assert whole.exists() if rank == 0 else len(list(part.glob("*.jsonl"))) == 3 + 1  # its own alone
    assert [line["decoded_by"].get("kept") for line in lines_of(whole)] == [1, *[None] * (COUNT - 1)]
    decode(short(files, tmp_path / "again.jsonl"))
    assert [line["ids"] for line in lines_of(tmp_path / "again.jsonl")] == [line["ids"] for line in lines_of(whole)]
    assert not part.exists()
    with pytest.raises(ValueError, match=r"whole\.jsonl is there already: name another file, or remove it"):
        decode(short(files, whole))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 7}, "max_new_tokens is 7: training takes whole blocks, give at least 8, one of them"),
        ({"max_new_tokens": 240}, r"line 1: its prompt has 28 tokens, and 16 leave room for the new ones: shorten"),
        ({"data": ["nowhere.jsonl"]}, r"nowhere\.jsonl: there is no such file"),
    ],
)
def test_what_cannot_be_decoded(change: dict[str, Any], message: str, files: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        decode(short(files, tmp_path / "a" / "b.jsonl", **change))
    assert list(tmp_path.rglob("*.*")) == []
