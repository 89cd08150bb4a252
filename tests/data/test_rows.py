"""Datasets of users' records: every record once an epoch, in an order that (seed, epoch) decides, in rows that never mix."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mrp_trainer.data.chat import RecordEncoder
from mrp_trainer.data.rows import RecordRows, pack
from mrp_trainer.data.samples import Sample
from mrp_trainer.data.sources import JsonLines, Rows

MASK = 2  # of the word tokenizer
COUNT = 60


def text(number: int) -> str:
    """3 to 14 words, its number first: with the end token 1 to 4 blocks of 4."""
    return " ".join([str(number % 30), *["the sum of two numbers"] * 3][: 1 + number % 4]) + " x" * (2 - number % 3)


@pytest.fixture
def records() -> list[dict[str, str]]:
    return [{"prompt": f"{i // 10} {i % 10}", "completion": text(i)} for i in range(COUNT)]


@pytest.fixture
def path(tmp_path: Path, records: list[dict[str, str]]) -> str:
    file = tmp_path / "records.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    return str(file)


@pytest.fixture
def encoder(word_tokenizer: Any) -> RecordEncoder:
    return RecordEncoder(word_tokenizer, 4, 32, MASK)


def same(left: Sample, right: Sample) -> bool:
    return (
        (left.index, left.length) == (right.index, right.length)
        and left.ids.tolist() == right.ids.tolist()
        and left.response.tolist() == right.response.tolist()
    )


def numbers(samples: Iterable[Sample], encoder: RecordEncoder) -> list[int]:
    """The records' numbers, which their prompts spell."""
    words = (encoder.tokenizer.convert_ids_to_tokens(sample.ids[:2].tolist()) for sample in samples)
    return [10 * int(tens) + int(ones) for tens, ones in words]


def flat(rows: Iterable[Any]) -> Iterator[Sample]:
    return (sample for row in rows for sample in row)


# Packing


def test_rows_are_filled_as_derived_by_hand() -> None:
    """12 opens row 0, the eights row 1, the first four joins the twelve, the second opens row 2."""
    rows = pack(np.asarray([4, 8, 12, 4, 8]), 16)
    assert [row.tolist() for row in rows] == [[0, 2], [1, 4], [3]]
    with pytest.raises(ValueError, match="a sample of 20 tokens does not fit a row of 16"):
        pack(np.asarray([4, 20]), 16)


def test_no_row_overflows_and_no_sample_is_lost_or_split() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        lengths = 4 * random.integers(1, 17, random.integers(1, 60))
        rows = pack(lengths, 64)
        assert sorted(np.concatenate(rows).tolist()) == list(range(len(lengths)))
        assert max(lengths[row].sum() for row in rows) <= 64
        # Two rows of at most half could have been one: the second's samples had room in the first.
        assert sum(lengths[row].sum() <= 32 for row in rows) <= 1


# By number


def test_an_epoch_holds_every_record_once_in_an_order_of_its_own(path: str, records: Any, encoder: RecordEncoder) -> None:
    """Which its seed and number decide; without shuffling it is the file's."""
    orders = []
    for seed in (3, 4):
        dataset = RecordRows(JsonLines([path]), encoder, False, seed=seed)
        for epoch in range(3):
            samples = [dataset[epoch * COUNT + i][0] for i in range(COUNT)]
            orders.append(numbers(samples, encoder))
            assert [sample.index - epoch * COUNT for sample in samples] == orders[-1]
    assert all(sorted(order) == list(range(COUNT)) for order in orders)
    assert len({tuple(order) for order in [*orders, list(range(COUNT))]}) == 7
    assert numbers(flat(RecordRows(JsonLines([path]), encoder, False, seed=3)), encoder) == orders[0]
    dataset = RecordRows(JsonLines([path]), encoder, False, shuffle=False)
    for i, record in enumerate([*records, *records]):
        assert same(dataset[i][0], replace(encoder.sample(record), index=i))


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
    dataset = RecordRows(Rows([LEFT_OUT, FITS, LEFT_OUT, cut], name), encoder, False, shuffle=False)
    assert [sample.length for sample in flat(dataset)] == [5, None]
    assert (len(dataset), dataset.dropped, dataset.cut) == (2, 2, 1)
    assert caplog.messages == [
        f"{name}: 2 of 4 records are left out: nothing that is learned lies within max_length 8; 1 of 4 records are cut to "
        "max_length 8: their ends are not learned. Raise max_length to learn from all of them"
    ]
    for rows, found in (([LEFT_OUT], "1 of 1 records are left out: .*"), ([cut], "1 of 1 records are cut to .*")):
        with pytest.raises(ValueError, match=f"^rows: {found}. None fits: raise max_length, or shorten the records$"):
            RecordRows(Rows(rows, "rows"), encoder, False)


def test_rejected_visits_and_seeds(path: str, encoder: RecordEncoder) -> None:
    with pytest.raises(IndexError, match="visit -1: visits count from 0"):
        RecordRows(JsonLines([path]), encoder)[-1]
    with pytest.raises(ValueError, match="seed is -1: 0 or more is needed"):
        RecordRows(JsonLines([path]), encoder, seed=-1)


# Packed, by number


def test_packed_rows_hold_every_sample_once_and_as_it_is_alone(path: str, records: Any, encoder: RecordEncoder) -> None:
    rows = RecordRows(JsonLines([path]), encoder, seed=1, window=16)
    epochs = [[rows[epoch * len(rows) + i] for i in range(len(rows))] for epoch in range(3)]
    for epoch, packed in enumerate(epochs):
        samples = list(flat(packed))
        assert sorted(sample.index for sample in samples) == list(range(epoch * COUNT, (epoch + 1) * COUNT))
        for sample in samples:
            assert same(sample, replace(encoder.sample(records[sample.index % COUNT]), index=sample.index))
        assert max(sum(len(sample.ids) for sample in row) for row in packed) <= 32
    tokens = sum(len(sample.ids) for sample in flat(epochs[0]))
    assert tokens / (32 * len(rows)) > 0.9
    first, second = ([frozenset(sample.index % COUNT for sample in row) for row in epoch] for epoch in epochs[:2])
    assert sorted(map(sorted, first)) == sorted(map(sorted, second))
    assert first != second
