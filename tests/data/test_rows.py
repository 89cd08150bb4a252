"""Datasets of users' records: every record once an epoch, in an order that (seed, epoch) decides, in rows that never mix."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from mrp_trainer.data import rows as rows_module
from mrp_trainer.data.chat import RecordEncoder
from mrp_trainer.data.rows import RecordRows, pack
from mrp_trainer.data.samples import Sample
from mrp_trainer.data.sources import Source

MASK = 2  # of the word tokenizer
COUNT = 60
# 3 to 14 words with the number in the prompt: with the end token 1 to 4 blocks of 4.
TEXTS = [" ".join([str(i % 30), *["the sum of two numbers"] * 3][: 1 + i % 4]) + " x" * (2 - i % 3) for i in range(COUNT)]
RECORDS = [{"prompt": f"{i // 10} {i % 10}", "completion": text} for i, text in enumerate(TEXTS)]
SOURCE = Source({"rows": RECORDS})


@pytest.fixture
def encoder(word_tokenizer: Any) -> RecordEncoder:
    return RecordEncoder(word_tokenizer, 4, 32, MASK)


def content(sample: Sample | None) -> Any:
    return sample and (sample.length, sample.ids.tolist(), sample.response.tolist())


def flat(rows: Iterable[Any]) -> list[Sample]:
    return [sample for row in rows for sample in row]


def test_no_row_overflows_and_no_sample_is_lost_or_split() -> None:
    """As derived by hand: 12 opens row 0, the eights row 1, the first four joins the twelve, the second opens row 2."""
    assert [row.tolist() for row in pack(np.asarray([4, 8, 12, 4, 8]), 16)] == [[0, 2], [1, 4], [3]]
    random = np.random.default_rng(0)
    for _ in range(200):
        lengths = 4 * random.integers(1, 17, random.integers(1, 60))
        rows = pack(lengths, 64)
        assert sorted(np.concatenate(rows).tolist()) == list(range(len(lengths)))
        assert max(lengths[row].sum() for row in rows) <= 64
        # Two rows of at most half could have been one: the second's samples had room in the first.
        assert sum(lengths[row].sum() <= 32 for row in rows) <= 1


@pytest.mark.parametrize("packed", [False, True])
def test_an_epoch_holds_every_record_once_in_an_order_of_its_own(
    packed: bool, encoder: RecordEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which its seed and number decide; without shuffling it is the file's. Rows hold the same samples in every epoch, each as
    it is alone."""
    monkeypatch.setattr(rows_module, "_WINDOW", 16)
    orders = []
    for seed in (3, 4):
        rows = RecordRows(SOURCE, encoder, packed, seed=seed)
        assert [len(row) for row in rows] == [len(rows[i]) for i in range(len(rows))]
        contents = set()
        for epoch in range(3):
            made = [rows[epoch * len(rows) + i] for i in range(len(rows))]
            for sample in flat(made):
                number = sample.index - epoch * COUNT
                assert content(sample) == content(encoder.sample(RECORDS[number]))
            orders.append(tuple(sample.index - epoch * COUNT for sample in flat(made)))
            assert max(sum(len(sample.ids) for sample in row) for row in made) <= 32
            contents.add(frozenset(frozenset(sample.index % COUNT for sample in row) for row in made))
        assert len(contents) == 1
        assert packed or len(rows) == COUNT
        assert not packed or sum(len(sample.ids) for sample in flat(rows)) / (32 * len(rows)) > 0.9
    assert all(sorted(order) == list(range(COUNT)) for order in orders)
    assert len({*orders, tuple(range(COUNT))}) == 7
    assert packed or [one.index for one in flat(RecordRows(SOURCE, encoder, packed, shuffle=False))] == list(range(COUNT))


LEFT_OUT = {"prompt": "0 1 2 3 4 5 6 7", "completion": "8"}
CUT = {"prompt": "0 2", "completion": "of " * 9}
FITS = {"prompt": "0 1", "completion": "the sum"}


@pytest.mark.parametrize("cut", [CUT, {"ids": [5] * 12, "response_start": 2, "reveal_step": [0, 0, *[1] * 4, *[2] * 4]}])
def test_records_longer_than_max_length_are_counted(
    cut: dict[str, Any], word_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of which nothing is left, and those that lose their end."""
    encoder = RecordEncoder(word_tokenizer, 4, 8, MASK)
    name = f"rows {len(cut)}"
    dataset = RecordRows(Source({name: [LEFT_OUT, FITS, LEFT_OUT, cut]}), encoder, False, shuffle=False)
    assert [sample.length for sample in flat(dataset)] == [5, None]
    found = f"{name}: of 4 records 1 lose their end to max_length 8, and 2 all that is learned. Raise max_length to learn from"
    assert caplog.messages == [f"{found} all of them"]
    for rows, said in (([LEFT_OUT], "0 lose .*, and 1 all"), ([cut], "1 lose .*, and 0 all")):
        with pytest.raises(ValueError, match=f"^rows: of 1 records {said} that is learned: raise max_length, or shorten"):
            RecordRows(Source({"rows": rows}), encoder, False)
