"""A tokenizer that is another model's is refused before work: by the command and from Python."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from commands import mrp
from conftest import TINY
from mrp_trainer.data.tasks import training_lines
from mrp_trainer.train.inputs import check_tokenizer
from training_runs import CHATS, chat_trainer

from modeling_mrp import MRPForCausalLM


def test_another_models_tokenizer(tiny_tokenizer: Any, tmp_path: Path) -> None:
    model, word = MRPForCausalLM.from_pretrained(TINY), tiny_tokenizer.convert_ids_to_tokens(20)
    for change, said in (
        (lambda tokenizer: tokenizer.add_tokens([f"<new {i}>" for i in range(9)]), "it has 1289 tokens, .* vocabulary 1280"),
        (lambda tokenizer: setattr(tokenizer, "mask_token", "<|im_start|>"), "its mask has the id 1, and the model's 3"),
        (lambda tokenizer: setattr(tokenizer, "eos_token", "<|im_start|>"), "its eos has the id 1, and .* texts 2, 0"),
    ):
        tokenizer = copy.deepcopy(tiny_tokenizer)
        change(tokenizer)
        with pytest.raises(ValueError, match=f"^the tokenizer does not fit the model: {said}. Give the tokenizer"):
            check_tokenizer(tokenizer, model)
    with pytest.raises(ValueError, match="the tokenizer does not fit the model"):
        chat_trainer(tmp_path, tokenizer, CHATS, model=model)
    tokenizer.save_pretrained(tmp_path / "other")
    (tmp_path / "data.jsonl").write_text("\n".join(training_lines("math", "train", 4)))
    flags = ["--model", str(TINY), "--tokenizer", str(tmp_path / "other"), "--data", str(tmp_path / "data.jsonl")]
    for command in (["train", "head", "--set", "use_cpu=true", "--output-dir"], ["decode", "--output"]):
        assert re.search(said, mrp(*command, str(tmp_path / "new.jsonl"), *flags, fails=True))
        assert not (tmp_path / "new.jsonl").exists()
    unmasked = copy.deepcopy(tiny_tokenizer)
    unmasked.mask_token = None
    check_tokenizer(unmasked, model)  # its mask is an added token all the same
    model.config.mask_token_id = 20
    with pytest.raises(ValueError, match=f"the model's mask, id 20, is its token {re.escape(repr(word))}"):
        check_tokenizer(unmasked, model)
