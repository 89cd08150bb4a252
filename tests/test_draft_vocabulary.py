"""Drafting from a part of the vocabulary: the buffer that holds it, its checks, and that the text stays."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from helpers import MASK, VOCAB, texts
from test_decoding import SAMPLINGS, dampened, random_prompts
from torch import Tensor
from transformers.generation import LogitsProcessor

from modeling_mrp import MRPConfig, MRPForCausalLM

# ------------------------------------------------------------------------------------------------ the buffer and its config


def shape(**changed: Any) -> dict[str, Any]:
    return {"vocab_size": 64, "hidden_size": 16, "mask_token_id": 3, "num_nextn_predict_layers": 1, **changed}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"draft_vocab_size": -1}, "draft_vocab_size is -1"),
        ({"draft_vocab_size": 64}, "draft_vocab_size is 64.*below its size, 64"),
        ({"draft_vocab_size": 1000}, "draft_vocab_size is 1000"),
        ({"draft_vocab_size": 2.5}, "draft_vocab_size is 2.5"),
        ({"draft_vocab_size": "8"}, "draft_vocab_size is '8'"),
        ({"draft_vocab_size": 8, "num_nextn_predict_layers": 0}, "draft_vocab_size is 8, but there is no head"),
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


# ------------------------------------------------------------------------------------------------ whole decodes


@pytest.mark.parametrize(
    ("holds", "sampling"),
    [
        *(("few", sampling) for sampling in SAMPLINGS),
        *((holds, SAMPLINGS[i]) for holds in ("none", "one eos", "all") for i in (0, 1)),
    ],
    ids=str,
)
def test_the_text_stays(holds: str, sampling: dict[str, Any]) -> None:
    """Whether the vocabulary has all of the tokens that come, a few or none."""
    prompts = random_prompts(random.Random(holds), 3)
    model = dampened(make_model(1, block_size=8), 0.3)
    options: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": [5], "min_new_tokens": 9, "seed": 2, **sampling}
    static = texts(model, prompts, decoding="static", **options)
    used = sorted({token for row in static for token in row})
    others = [i for i in range(VOCAB) if i not in used and i != MASK]
    ids = {"none": others[:6], "few": others[:3] + used[:2], "one eos": [5], "all": used + others[:1]}[holds]
    small = dampened(with_vocabulary(ids, 1, block_size=8), 0.3)
    assert texts(small, prompts, decoding="static", **options) == static
    assert texts(small, prompts, decoding="mrp_spec", num_draft_states=6, **options) == static


class Pass(LogitsProcessor):
    """Leaves the scores as they are, and notes how wide they are."""

    def __init__(self) -> None:
        self.widths: set[int] = set()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.widths.add(scores.shape[1])
        return scores


def test_processors_take_the_whole_vocabulary() -> None:
    """They know ids by their place, so that drafting is as without a draft vocabulary."""
    prompts, costs, seen = random_prompts(random.Random(3), 2), [], Pass()
    for model in (make_model(2), with_vocabulary([1, 2, 3], 2)):
        inputs = {"input_ids": torch.tensor([prompt[:1] for prompt in prompts]), "decoding": "mrp_spec", "max_new_tokens": 15}
        out = model.generate(**inputs, logits_processor=[seen], return_dict_in_generate=True)
        costs.append((out.sequences.tolist(), out.stats.drafted.tolist(), out.stats.accepted.tolist()))
    assert costs[0] == costs[1]
    assert seen.widths == {VOCAB}
