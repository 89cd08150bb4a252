"""From records to batches: rows that never mix, the order in which they are visited, and the noisy
copies in a batch."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from mrp_trainer.data import rows as rows_module
from mrp_trainer.data.chat import RecordEncoder
from mrp_trainer.data.rows import RecordRows, pack
from mrp_trainer.data.sampler import LengthBucketSampler
from mrp_trainer.data.samples import Sample
from mrp_trainer.data.sources import Source
from mrp_trainer.train.losses import BLANK

from tests.support.helpers import ALPHA, BLOCK, MASK, PAD, chi_square_p, collate, sample
from tests.support.training_runs import Rows

COUNT = 60
# 3 to 14 words with the number in the prompt: with the end token 1 to 4 blocks of 4.
TEXTS = [
    " ".join([str(i % 30), *["the sum of two numbers"] * 3][: 1 + i % 4]) + " x" * (2 - i % 3)
    for i in range(COUNT)
]
RECORDS = [{"prompt": f"{i // 10} {i % 10}", "completion": text} for i, text in enumerate(TEXTS)]
SOURCE = Source({"rows": RECORDS})


@pytest.fixture
def encoder(word_tokenizer: Any) -> RecordEncoder:
    return RecordEncoder(word_tokenizer, 4, 32, word_tokenizer.mask_token_id)


def flat(rows: Iterable[Any]) -> list[Sample]:
    return [one for row in rows for one in row]


def test_no_row_overflows_and_no_sample_is_lost_or_split() -> None:
    """As derived by hand: 12 opens row 0, the eights row 1, the first four joins the twelve, the
    second opens row 2."""
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
    """Which its seed and number decide; without shuffling it is the file's. Rows hold the same
    samples in every epoch, each as it is alone."""
    monkeypatch.setattr(rows_module, "_WINDOW", 16)
    orders = []
    for seed in (3, 4):
        rows = RecordRows(SOURCE, encoder, packed, seed=seed)
        contents = set()
        for epoch in range(3):
            made = [rows[epoch * len(rows) + i] for i in range(len(rows))]
            numbers = [[one.index - epoch * COUNT for one in row] for row in made]
            for one in flat(made):
                alone = encoder.sample(RECORDS[one.index - epoch * COUNT])
                assert alone is not None
                assert (one.length, one.ids.tolist()) == (alone.length, alone.ids.tolist())
            orders.append(tuple(sum(numbers, [])))  # noqa: RUF017 - short lists
            contents.add(frozenset(map(frozenset, numbers)))
        assert len(contents) == 1
        lengths = [sum(len(one.ids) for one in row) for row in rows]
        assert (
            len(rows) == COUNT
            if not packed
            else max(lengths) <= 32 and sum(lengths) / (32 * len(rows)) > 0.9
        )
    assert all(sorted(order) == list(range(COUNT)) for order in orders)
    assert len({*orders, tuple(range(COUNT))}) == 7
    assert packed or [
        one.index for one in flat(RecordRows(SOURCE, encoder, packed, shuffle=False))
    ] == list(range(COUNT))


def test_records_longer_than_max_length_are_counted(
    word_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of which nothing is left, and those that lose their end."""
    fits, left_out = (
        {"prompt": "0 1", "completion": "the sum"},
        {"prompt": "0 1 2 3 4 5 6 7", "completion": "8"},
    )
    cut, encoder = (
        {"prompt": "0 2", "completion": "of " * 9},
        RecordEncoder(word_tokenizer, 4, 8, word_tokenizer.mask_token_id),
    )
    dataset = RecordRows(
        Source({"rows": [left_out, fits, left_out, cut]}), encoder, False, shuffle=False
    )
    assert [one.length for one in flat(dataset)] == [5, None]
    found = (
        "rows: of 4 records 1 lose their end to max_length 8, and 2 all that is learned. Raise "
        "max_length to learn from"
    )
    assert caplog.messages == [f"{found} all of them"]
    with pytest.raises(
        ValueError,
        match=r"^rows: of 1 records 1 lose .*, and 0 all that is learned: raise max_length, or "
        r"shorten",
    ):
        RecordRows(Source({"rows": [cut]}), encoder, False)


@pytest.mark.parametrize("size", [1, 47, 48, 49, 200])
def test_the_sampler_visits_each_index_once(size: int) -> None:
    """With batches of 3 a window is 48 samples, and an epoch takes from the next what is missing to
    whole batches. In a window samples of like cost meet in a batch: of two noisy copies of the
    response's blocks and the text."""
    rows, whole = Rows(size, without_response=tuple(range(0, size, 3))), -(-size // 3) * 3
    sampler = LengthBucketSampler(rows, 3, lambda: 0)
    order = list(sampler)
    assert len(sampler) == whole
    assert list(sampler) == order  # a resumed run sees the same batches
    assert sorted(LengthBucketSampler(rows, 3, lambda: 2)) == list(range(2 * whole, 3 * whole))
    cost = [len(rows[i].ids) + 2 * int(rows[i].response.sum()) for i in range(whole)]
    for begin in range(0, whole, 48):
        window = order[begin : begin + 48]
        assert sorted(window) == list(range(begin, min(begin + 48, whole)))
        batches = sorted(
            sorted(cost[i] for i in window[at : at + 3]) for at in range(0, len(window), 3)
        )
        assert sum(batches, []) == sorted(cost[i] for i in window)  # noqa: RUF017 - 16 short lists
    # short batches do not all come first
    assert size < 200 or order[:48] != sorted(range(48), key=lambda i: cost[i])


def random_sample(index: int, draw: np.random.Generator, decoded: bool) -> Sample:
    """One to four blocks with one turn or two, which may end in the last block, and the steps of a
    decoder, if one wrote it."""
    tokens = BLOCK * int(draw.integers(1, 5))
    length = None if draw.random() < 0.3 else tokens - int(draw.integers(0, BLOCK))
    response = np.zeros(tokens, bool)
    for _ in range(int(draw.integers(1, 3))):
        begin = int(draw.integers(0, tokens))
        response[begin : begin + int(draw.integers(1, 6))] = True
    response[tokens if length is None else length :] = True
    steps = (
        np.where(response, draw.integers(0, 3, tokens) + 3 * (np.arange(tokens) // BLOCK), -1)
        if decoded
        else None
    )
    return Sample(index, draw.integers(1, 50, tokens), response, length, steps)


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_batch_is_what_its_definition_says(copies: int, decoded: bool) -> None:
    """Token by token: which blocks are repeated, what is hidden, what is learned, and with which
    target and weight."""
    draw = np.random.default_rng(copies)
    for _ in range(40):
        rows: Any = [
            [
                random_sample(int(draw.integers(1 << 20)), draw, decoded)
                for _ in range(draw.integers(1, 4))
            ]
            for _ in "ab"
        ]
        inverse = not decoded and bool(draw.integers(2))
        batch = collate(rows, copies=copies, inverse_level=inverse)
        assert batch.response_tokens == sum(int(one.response.sum()) for row in rows for one in row)
        for at, row in enumerate(rows):
            names = ("view", "sample", "position_ids", "input_ids", "target_ids", "weight")
            columns = list(zip(*(getattr(batch, name)[at].tolist() for name in names), strict=True))
            assert {column[3:] for column in columns if column[0] < 0} <= {(PAD, PAD, 0.0)}
            found = {column[:3]: column[3:] for column in columns if column[0] >= 0}
            noisy = [
                (copy + 1, n, p)
                for n, one in enumerate(row)
                for copy in range(copies)
                for p in repeated(one)
            ]
            clean = {
                (0, n, p): (one.ids[p], one.ids[p], 0.0)
                for n, one in enumerate(row)
                for p in range(len(one.ids))
            }
            assert list(found) == [*noisy, *clean]
            assert {key: found[key] for key in clean} == clean
            for n, one in enumerate(row):
                check_copies(
                    one,
                    [{p: found[copy + 1, n, p] for p in repeated(one)} for copy in range(copies)],
                    inverse,
                )


def repeated(one: Sample) -> list[int]:
    """The positions of the blocks that hold something to learn."""
    blocks = {position // BLOCK for position in np.flatnonzero(one.response)}
    return [position for position in range(len(one.ids)) if position // BLOCK in blocks]


def check_copies(
    one: Sample, copies: list[dict[int, tuple[int, int, float]]], inverse: bool
) -> None:
    """Check copies, each with input, target and weight by position."""
    end = len(one.ids) if one.length is None else one.length
    for p in repeated(one):
        block = range(p // BLOCK * BLOCK, p // BLOCK * BLOCK + BLOCK)
        # Behind the end, or what decoding a turn would not know of.
        blank = p >= end or (not one.response[p] and any(one.response[q] for q in block if q < p))
        weights = [copy[p][2] for copy in copies]
        for copy in copies:
            assert copy[p][:2] == (
                MASK if blank or copy[p][2] else one.ids[p],
                BLANK if blank else one.ids[p],
            )
            # some step is still to come, and all before it are shown
            if one.reveal_step is not None:
                learned = [q for q in block if one.response[q] and q < end]
                hidden = [one.reveal_step[q] for q in learned if copy[q][2]]
                shown = [one.reveal_step[q] for q in learned if not copy[q][2]]
                assert not learned or max(shown, default=-1) < min(hidden)
        assert one.response[p] or not any(weights)
        if len(copies) == 2 and one.response[p] and (one.reveal_step is None or p >= end):
            assert sum(weight > 0 for weight in weights) == 1
        # 2t in the first copy, 2(1 - t) in the second
        levels = [{1 / copy[q][2] for q in block if copy[q][2]} for copy in copies]
        assert inverse or set().union(*levels) <= {1}
        assert all(len(level) <= 1 for level in levels)
        if inverse and len(copies) == 2 and all(levels):
            assert sum(map(min, levels)) == pytest.approx(2, abs=1e-5)


def test_recorded_steps_give_the_states_that_decoding_met() -> None:
    """Every number of revealed tokens of a block is equally likely (chi-square); two copies lie
    half of it apart."""
    steps = np.array([-1, -1, -1, -1, 2, 0, 3, 1, 6, 4, 5, -1])  # the last is behind the end
    counts = {4: torch.zeros(4), 8: torch.zeros(3)}
    for index in range(600):
        batch = collate([Sample(index, np.arange(20, 32), np.arange(12) >= 4, 11, steps)])
        hidden = [
            batch.position_ids[0, (batch.view[0] == copy) & (batch.input_ids[0] == MASK)].tolist()
            for copy in (1, 2)
        ]
        for start, count in counts.items():
            left = [sum(start <= p < min(start + 4, 11) for p in places) for places in hidden]
            count[left[0] - 1] += 1
            assert 1 <= abs(left[0] - left[1]) <= 2
    for count in counts.values():
        assert chi_square_p(count, torch.full((len(count),), 1 / len(count))) > ALPHA


def test_levels() -> None:
    """Each block draws its own, t ~ U(0, 1]: a block of 4 has 0 to 4 masks, each with probability
    1/5, and two blocks of a sample are independent (chi-square of the pairs of counts in 2500
    samples over 25 cells). As published, if asked: all masked tokens weigh 1 / t, another t for
    each of 20 samples; and of 400 tokens a share of t is masked, to 4.5 standard deviations
    (false-alarm rate 7e-6 each)."""
    masked = collate([sample(i, 8, 0) for i in range(2500)], copies=1).supervised[:, :8]
    counts = masked.view(2500, 2, 4).sum(-1)
    assert (
        chi_square_p(
            (5 * counts[:, 0] + counts[:, 1]).bincount(minlength=25), torch.full((25,), 0.04)
        )
        > ALPHA
    )
    batch = collate(
        [sample(i, 400, 0) for i in range(20)], copies=1, inverse_level=True, noise_per="sample"
    )
    levels = set()
    for masked, weight in zip(batch.supervised[:, :400], batch.weight[:, :400], strict=True):
        assert len(weight[masked].unique()) == 1
        level = 1 / weight[masked][0].item()
        levels.add(level)
        assert masked.double().mean().item() == pytest.approx(
            level, abs=4.5 * math.sqrt(level * (1 - level) / 400)
        )
    assert len(levels) == 20


def test_noise_is_a_function_of_seed_and_index() -> None:
    samples = [sample(i, 16, 3) for i in range(6)]
    batch = collate(samples, seed=7)
    assert torch.equal(collate(samples[2:3], seed=7).input_ids[0], batch.input_ids[2])
    assert torch.equal(
        collate(samples, seed=7, copies=1).input_ids[:, :16], batch.input_ids[:, :16]
    )
    assert not torch.equal(collate(samples, seed=8).supervised, batch.supervised)
    copies = [replace(samples[0], index=i) for i in range(6)]  # one text under six indices
    assert len(collate(copies, seed=7).supervised.unique(dim=0)) == 6
    with pytest.raises(ValueError, match="inverse_level weighs random masks"):
        collate([replace(samples[0], reveal_step=np.zeros(16))], inverse_level=True)
