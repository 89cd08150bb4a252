"""What of the backbone's work can be stored, by hand, and noise that repeats."""

from typing import Any

import numpy as np
import pytest
import torch
from mrp_trainer.data.chat import RecordEncoder
from mrp_trainer.data.rows import RecordRows
from mrp_trainer.data.sources import Source
from mrp_trainer.train.collator import DiffusionCollator

from benchmarks.stored_states import RECIPES, FirstEpoch, columns_of, predicted


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("published", (3, 3)),  # the clean text, A and B
        # behind them the second B and its clean text follow the head; stored are twice A, B, reread
        ("ours", (9, 6)),
    ],
)
def test_columns_by_hand(name: str, columns: tuple[int, int]) -> None:
    assert columns_of(RECIPES[name]) == columns


def test_bytes_at_4b_by_hand() -> None:
    """Hidden states of 2,560 numbers of two bytes; ours stores those of the clean text, too, which
    the head reads."""
    assert predicted("published")["bytes_per_token"] == 3 * 2560 * 2
    assert predicted("ours")["bytes_per_token"] == 7 * 2560 * 2


def test_noise_of_the_first_epoch(word_tokenizer: Any) -> None:
    encoder = RecordEncoder(word_tokenizer, 4, 16, word_tokenizer.mask_token_id)
    texts = [{"prompt": "1 2", "completion": "3 4 5 6 7 8 9"}] * 4
    rows = RecordRows(Source({"rows": texts}), encoder, packed=False, shuffle=False)
    fixed = FirstEpoch(rows)
    collate = DiffusionCollator(4, word_tokenizer.mask_token_id, 0)
    batches = [collate([fixed[visit]])["input_ids"] for visit in (1, 5)]
    assert torch.equal(*batches)
    fresh = [collate([rows[visit]])["input_ids"] for visit in (1, 5)]
    assert not torch.equal(*fresh)
    assert np.array_equal(fixed[5][0].ids, rows[5][0].ids)
