"""Drafting from a part of the vocabulary: the buffer that holds it, and its checks; its texts are those of `test_fuzz.py`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import MASK, VOCAB

from modeling_mrp import MRPConfig, MRPForCausalLM


def shape(**changed: Any) -> dict[str, Any]:
    return {"vocab_size": 64, "hidden_size": 16, "mask_token_id": 3, "num_nextn_predict_layers": 1, **changed}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"draft_vocab_size": -1}, "draft_vocab_size is -1"),
        ({"draft_vocab_size": 64}, "draft_vocab_size is 64: it must be an int of at least 0 and at most 63"),
        ({"draft_vocab_size": 1000}, "draft_vocab_size is 1000"),
        ({"draft_vocab_size": 2.5}, "draft_vocab_size is 2.5"),
        ({"draft_vocab_size": "8"}, "draft_vocab_size is '8'"),
        (
            {"draft_vocab_size": 8, "num_nextn_predict_layers": 0},
            "draft_vocab_size is 8: it must be an int of at least 0 and at most 0",
        ),
    ],
    ids=str,
)
def test_a_wrong_size_is_an_error(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:  # huggingface_hub may check the type first, with its own error
        MRPConfig(**shape(**changed))
    assert isinstance(caught.value, ValueError) or "draft_vocab_size" in str(caught.value)


@pytest.mark.parametrize(("size", "mask", "expected"), [(5, 3, [0, 1, 2, 4, 5]), (3, 3, [0, 1, 2]), (3, 0, [1, 2, 3])])
def test_a_new_head_drafts_from_the_first_ids(size: int, mask: int, expected: list[int]) -> None:
    for model in (
        make_model(draft_vocab_size=size, mask_token_id=mask),
        MRPForCausalLM._from_config(make_model(draft_vocab_size=size, mask_token_id=mask).config),
    ):
        assert model.mrp_head.draft_token_ids.tolist() == expected
        assert model.mrp_head.draft_token_ids.dtype == torch.long
    whole = make_model(draft_vocab_size=VOCAB - 1)
    assert whole.mrp_head is not None
    assert whole.mrp_head.draft_token_ids is not None
    assert sorted([*whole.mrp_head.draft_token_ids.tolist(), MASK]) == list(range(VOCAB))


def test_a_head_drafts_from_everything_by_default(random_model: MRPForCausalLM) -> None:
    assert random_model.mrp_head is not None
    assert random_model.mrp_head.draft_token_ids is None
    assert not any("draft_token_ids" in name for name in random_model.state_dict())


def with_vocabulary(ids: list[int], seed: int = 0, **overrides: Any) -> MRPForCausalLM:
    model = make_model(seed, draft_vocab_size=len(ids), **overrides)
    assert model.mrp_head is not None
    assert model.mrp_head.draft_token_ids is not None
    model.mrp_head.draft_token_ids.copy_(torch.tensor(ids))
    return model


def test_it_is_saved_with_the_head(tmp_path: Path) -> None:
    model = with_vocabulary([7, 59, 61, 2])
    model.save_pretrained(tmp_path)
    loaded = MRPForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.draft_vocab_size == 4
    assert loaded.mrp_head.draft_token_ids.tolist() == [7, 59, 61, 2]
    assert loaded.mrp_head.draft_token_ids.dtype == torch.long
    assert torch.equal(loaded.mrp_head.eh_proj.weight, model.mrp_head.eh_proj.weight)  # type: ignore[union-attr]
    half = MRPForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.mrp_head.draft_token_ids.tolist() == [7, 59, 61, 2]
