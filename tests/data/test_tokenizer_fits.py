"""A tokenizer that is another model's is refused before work: by the command and from Python."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY
from mrp_trainer.cli import app
from mrp_trainer.data.tasks import training_lines
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.trainer import MRPTrainer
from typer.testing import CliRunner

from modeling_mrp import MRPForCausalLM

CHAT = [{"messages": [{"role": "user", "content": "2 + 4 ?"}, {"role": "assistant", "content": "6"}]}]


def larger(tokenizer: Any) -> None:
    tokenizer.add_tokens([f"<new {i}>" for i in range(9)])


def another_mask(tokenizer: Any) -> None:
    tokenizer.mask_token = "<|im_start|>"


def another_eos(tokenizer: Any) -> None:
    tokenizer.eos_token = "<|im_start|>"


@pytest.fixture(
    params=[
        (larger, "it has 1289 tokens, and the model's vocabulary 1280"),
        (another_mask, "its mask has the id 1, and the model's 3"),
        (another_eos, "its eos has the id 1, and what ends the model's texts 2, 0"),
    ]
)
def misfit(request: pytest.FixtureRequest, tiny_tokenizer: Any) -> tuple[Any, str]:
    change: Callable[[Any], None]
    change, said = request.param
    tokenizer = copy.deepcopy(tiny_tokenizer)
    change(tokenizer)
    return tokenizer, f"the tokenizer does not fit the model: {said}. Give the tokenizer that belongs to the model"


def test_from_python(misfit: tuple[Any, str], tmp_path: Path) -> None:
    tokenizer, said = misfit
    args = MRPTrainingArguments(str(tmp_path / "run"), objective="mrp", use_cpu=True)
    for data in (CHAT, None):
        with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
            MRPTrainer(MRPForCausalLM.from_pretrained(TINY), args, data, processing_class=tokenizer)


@pytest.mark.parametrize("command", [["train", "head", "--set", "use_cpu=true", "--output-dir"], ["decode", "--output"]])
def test_from_the_command(command: list[str], misfit: tuple[Any, str], tmp_path: Path) -> None:
    tokenizer, said = misfit
    tokenizer.save_pretrained(tmp_path / "other")
    (tmp_path / "data.jsonl").write_text("\n".join(training_lines("math", "train", 4)))
    flags = ["--model", str(TINY), "--tokenizer", str(tmp_path / "other"), "--data", str(tmp_path / "data.jsonl")]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "new.jsonl"), *flags])
    assert done.exit_code == 1
    assert said in done.stderr
    assert not (tmp_path / "new.jsonl").exists()


def test_a_word_in_the_masks_place(word_tokenizer: Any, tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(word_tokenizer)
    tokenizer.mask_token = None
    model = MRPForCausalLM.from_pretrained(TINY)
    model.config.mask_token_id, model.generation_config.eos_token_id = 20, tokenizer.eos_token_id
    args = MRPTrainingArguments(str(tmp_path / "run"), objective="mrp", use_cpu=True)
    word = tokenizer.convert_ids_to_tokens(20)
    with pytest.raises(ValueError, match=f"the model's mask, id 20, is its token {word!r}"):
        MRPTrainer(model, args, CHAT, processing_class=tokenizer)
