"""Choosing a draft vocabulary from text, and the checkpoint that comes of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, make_model
from mrp_trainer import draft_vocabulary
from mrp_trainer.data.problems import encode
from mrp_trainer.data.tasks import make_problem
from mrp_trainer.draft_vocabulary import most_frequent, set_draft_vocabulary
from mrp_trainer.evaluate.decoded import pad_left

from modeling_mrp import MRPForCausalLM


def test_most_frequent_by_hand() -> None:
    """Fixed ids first, then by count, of equals the lowest."""
    counts = torch.tensor([5, 0, 7, 7, 1, 7])
    assert most_frequent(counts, 3, [], []).tolist() == [2, 3, 5]
    assert most_frequent(counts, 3, [1], [2]).tolist() == [1, 3, 5]
    assert most_frequent(counts, 4, [4, 4], [2]).tolist() == [0, 3, 4, 5]
    assert most_frequent(counts, 5, [], [2]).tolist() == [0, 1, 3, 4, 5]


@pytest.mark.parametrize(("size", "always", "never"), [(1, [0, 1], []), (6, [], [2]), (0, [1], [])])
def test_sizes_that_do_not_fit(size: int, always: list[int], never: list[int]) -> None:
    with pytest.raises(ValueError, match=f"a draft vocabulary of {size} tokens"):
        most_frequent(torch.ones(6, dtype=torch.long), size, always, never)


@pytest.mark.parametrize("ids", [[], [3, 3], [-1], [64], [60]])
def test_ids_that_are_no_draft_vocabulary(ids: list[int]) -> None:
    model = make_model()  # 64 tokens, of which 60 is the mask
    with pytest.raises(ValueError, match=f"^{len(ids)} draft tokens"):
        set_draft_vocabulary(model, torch.tensor(ids, dtype=torch.long))
    assert model.mrp_head.draft_token_ids is None


def test_a_model_without_a_head_has_none() -> None:
    with pytest.raises(ValueError, match="no MRP head"):
        set_draft_vocabulary(make_model(num_nextn_predict_layers=0), torch.tensor([1]))


@pytest.mark.skipif(not TINY.exists(), reason="the embedded checkpoint is not here")
def test_the_command_saves_a_checkpoint_that_drafts_from_it(
    tmp_path: Path, tiny_tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quarter of the tokens, counted on solutions, and the text is the same."""
    text = tmp_path / "solutions.txt"
    text.write_text("\n".join(make_problem("math", "train", i).answer for i in range(200)))
    folder = tmp_path / "with-vocabulary"
    draft_vocabulary.main(str(TINY), [text], 320, folder)
    assert "320 of 1280 tokens cover" in capsys.readouterr().out
    model = MRPForCausalLM.from_pretrained(folder).double().eval()
    assert model.config.draft_vocab_size == 320
    ids = model.mrp_head.draft_token_ids
    assert (len(ids.unique()), int(model.config.mask_token_id) in ids.tolist()) == (320, False)
    assert tiny_tokenizer.eos_token_id in ids.tolist()
    prompts: dict[str, Any] = pad_left([encode(make_problem("math", "tune", i), tiny_tokenizer)[0] for i in range(3)], 0)
    static = model.generate(**prompts, max_new_tokens=40)
    drafting = {"decoding": "mrp_spec", "num_draft_states": 4}
    drafted = model.generate(**prompts, max_new_tokens=40, return_dict_in_generate=True, **drafting)
    assert torch.equal(drafted.sequences, static)
    assert float(drafted.tokens_per_forward.mean()) > 1.8
