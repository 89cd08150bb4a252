"""A tokenizer that is another model's is refused before work: by the command and from Python."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from commands import mrp
from conftest import TINY
from mrp_trainer.data.tasks import training_lines
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.trainer import MRPTrainer

from modeling_mrp import MRPForCausalLM

MISFITS = [
    (lambda tokenizer: tokenizer.add_tokens([f"<new {i}>" for i in range(9)]), "it has 1289 tokens, .* vocabulary 1280"),
    (lambda tokenizer: setattr(tokenizer, "mask_token", "<|im_start|>"), "its mask has the id 1, and the model's 3"),
    (
        lambda tokenizer: setattr(tokenizer, "eos_token", "<|im_start|>"),
        "its eos has the id 1, and .* ends the model's texts 2, 0",
    ),
]


@pytest.mark.parametrize(("change", "said"), MISFITS)
def test_another_models_tokenizer(change: Any, said: str, tiny_tokenizer: Any, tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer)
    change(tokenizer)
    said = f"the tokenizer does not fit the model: {said}. Give the tokenizer that belongs to the model"
    args = MRPTrainingArguments(str(tmp_path / "run"), objective="mrp", use_cpu=True)
    with pytest.raises(ValueError, match=f"^{said}$"):
        MRPTrainer(MRPForCausalLM.from_pretrained(TINY), args, processing_class=tokenizer)
    tokenizer.save_pretrained(tmp_path / "other")
    (tmp_path / "data.jsonl").write_text("\n".join(training_lines("math", "train", 4)))
    flags = ["--model", str(TINY), "--tokenizer", str(tmp_path / "other"), "--data", str(tmp_path / "data.jsonl")]
    for command in (["train", "head", "--set", "use_cpu=true", "--output-dir"], ["decode", "--output"]):
        assert re.search(said, mrp(*command, str(tmp_path / "new.jsonl"), *flags, fails=True))
        assert not (tmp_path / "new.jsonl").exists()


def test_a_word_in_the_masks_place(word_tokenizer: Any, tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(word_tokenizer)
    tokenizer.mask_token = None
    model = MRPForCausalLM.from_pretrained(TINY)
    model.config.mask_token_id, model.generation_config.eos_token_id = 20, tokenizer.eos_token_id
    args = MRPTrainingArguments(str(tmp_path / "run"), objective="mrp", use_cpu=True)
    with pytest.raises(ValueError, match=f"the model's mask, id 20, is its token {tokenizer.convert_ids_to_tokens(20)!r}"):
        MRPTrainer(model, args, processing_class=tokenizer)
