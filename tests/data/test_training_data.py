"""The training data by hand: samples, their order, and the noisy copies that a batch packs."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ALPHA, BLOCK, MASK, PAD, chi_square_p, collate, sample
from mrp_trainer.data.sampler import LengthBucketSampler
from mrp_trainer.data.samples import Sample
from mrp_trainer.train.losses import BLANK


class Lengths:
    """Stands for a dataset: samples of given lengths and response starts."""

    def __init__(self, lengths: Iterable[tuple[int, int]]) -> None:
        self.samples = [Sample(i, np.zeros(length), np.arange(length) >= start) for i, (length, start) in enumerate(lengths)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, visit: int) -> Sample:
        return self.samples[visit % len(self.samples)]


def random_lengths(count: int) -> Lengths:
    rng = np.random.default_rng(0)
    return Lengths((16 * int(rng.integers(2, 9)), int(rng.integers(1, 32))) for _ in range(count))


@pytest.mark.parametrize("size", [1, 3, 47, 48, 49, 200])
def test_the_sampler_visits_each_index_once(size: int) -> None:
    """With batches of 3 a window is 48 samples, and an epoch takes from the next what is missing to whole batches. In a window
    samples of like cost meet in a batch: 3 * length - 2 * prompt, of two noisy copies of the response's blocks and the text."""
    dataset = random_lengths(size)
    sampler = LengthBucketSampler(dataset, 3, lambda: 0)
    whole = -(-size // 3) * 3
    order = list(sampler)
    assert sorted(order) == list(range(whole))
    assert len(sampler) == whole
    assert list(sampler) == order  # a resumed run sees the same batches
    assert sorted(LengthBucketSampler(dataset, 3, lambda: 2)) == list(range(2 * whole, 3 * whole))
    cost = [3 * len(dataset[i].ids) - 2 * int(dataset[i].response.argmax()) for i in range(whole)]
    for begin in range(0, whole, 48):
        window = order[begin : begin + 48]
        assert sorted(window) == list(range(begin, min(begin + 48, whole)))
        batches = sorted(sorted(cost[i] for i in window[at : at + 3]) for at in range(0, len(window), 3))
        assert sum(batches, []) == sorted(cost[i] for i in window)  # noqa: RUF017 - 16 short lists
    if size == 200:
        assert order[:48] != sorted(range(48), key=lambda i: cost[i])  # short batches do not all come first
        assert list(LengthBucketSampler(random_lengths(100), 3, lambda: 0))[:96] == order[:96]


# ------------------------------------------------------------------------------------------------ collator


def random_sample(index: int, draw: np.random.Generator, decoded: bool) -> Sample:
    """One to four blocks with one turn or two, which may end in the last block, and the steps of a decoder, if one wrote it."""
    tokens = BLOCK * int(draw.integers(1, 5))
    length = None if draw.random() < 0.3 else tokens - int(draw.integers(0, BLOCK))
    response = np.zeros(tokens, bool)
    for _ in range(int(draw.integers(1, 3))):
        begin = int(draw.integers(0, tokens))
        response[begin : begin + int(draw.integers(1, 6))] = True
    response[tokens if length is None else length :] = True
    steps = np.where(response, draw.integers(0, 3, tokens) + 3 * (np.arange(tokens) // BLOCK), -1) if decoded else None
    return Sample(index, draw.integers(1, 50, tokens), response, length, steps)


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_batch_is_what_its_definition_says(copies: int, decoded: bool) -> None:
    """Token by token: which blocks are repeated, what is hidden, what is learned, and with which target and weight."""
    draw = np.random.default_rng(copies)
    for _ in range(40):
        rows: Any = [
            [random_sample(int(draw.integers(1 << 20)), draw, decoded) for _ in range(draw.integers(1, 4))] for _ in "ab"
        ]
        inverse = not decoded and bool(draw.integers(2))
        batch = collate(rows, copies=copies, inverse_level=inverse)
        assert batch.response_tokens == sum(int(one.response.sum()) for row in rows for one in row)
        for at, row in enumerate(rows):
            names = ("view", "sample", "position_ids", "input_ids", "target_ids", "weight")
            columns = list(zip(*(getattr(batch, name)[at].tolist() for name in names), strict=True))
            assert {column[3:] for column in columns if column[0] < 0} <= {(PAD, PAD, 0.0)}
            found = {column[:3]: column[3:] for column in columns if column[0] >= 0}
            noisy = [(copy + 1, n, p) for n, one in enumerate(row) for copy in range(copies) for p in repeated(one)]
            clean = {(0, n, p): (one.ids[p], one.ids[p], 0.0) for n, one in enumerate(row) for p in range(len(one.ids))}
            assert list(found) == [*noisy, *clean]
            assert {key: found[key] for key in clean} == clean
            for n, one in enumerate(row):
                check_copies(one, [{p: found[copy + 1, n, p] for p in repeated(one)} for copy in range(copies)], inverse)


def repeated(one: Sample) -> list[int]:
    """The positions of the blocks that hold something to learn."""
    blocks = {position // BLOCK for position in np.flatnonzero(one.response)}
    return [position for position in range(len(one.ids)) if position // BLOCK in blocks]


def check_copies(one: Sample, copies: list[dict[int, tuple[int, int, float]]], inverse: bool) -> None:
    """Check copies, each with input, target and weight by position."""
    end = len(one.ids) if one.length is None else one.length
    for p in repeated(one):
        block = range(p // BLOCK * BLOCK, p // BLOCK * BLOCK + BLOCK)
        # Behind the end, or what decoding a turn would not know of.
        blank = p >= end or (not one.response[p] and any(one.response[q] for q in block if q < p))
        weights = [copy[p][2] for copy in copies]
        for copy in copies:
            assert copy[p][:2] == (MASK if blank or copy[p][2] else one.ids[p], BLANK if blank else one.ids[p])
            if one.reveal_step is not None:  # some step is still to come, and all before it are shown
                learned = [q for q in block if one.response[q] and q < end]
                hidden = [one.reveal_step[q] for q in learned if copy[q][2]]
                shown = [one.reveal_step[q] for q in learned if not copy[q][2]]
                assert not learned or max(shown, default=-1) < min(hidden)
        assert one.response[p] or not any(weights)
        if len(copies) == 2 and one.response[p] and (one.reveal_step is None or p >= end):
            assert sum(weight > 0 for weight in weights) == 1
        levels = [
            {1 / copy[q][2] for q in block if copy[q][2]} for copy in copies
        ]  # 2t in the first copy, 2(1 - t) in the second
        assert inverse or set().union(*levels) <= {1}
        assert all(len(level) <= 1 for level in levels)
        if inverse and len(copies) == 2 and all(levels):
            assert sum(map(min, levels)) == pytest.approx(2, abs=1e-5)


def test_recorded_steps_give_the_states_that_decoding_met() -> None:
    """Every number of revealed tokens of a block is equally likely (chi-square); two copies lie half of it apart."""
    steps = np.array([-1, -1, -1, -1, 2, 0, 3, 1, 6, 4, 5, -1])  # the last is behind the end
    counts = {4: torch.zeros(4), 8: torch.zeros(3)}
    for index in range(600):
        batch = collate([Sample(index, np.arange(20, 32), np.arange(12) >= 4, 11, steps)])
        hidden = [batch.position_ids[0, (batch.view[0] == copy) & (batch.input_ids[0] == MASK)].tolist() for copy in (1, 2)]
        for start, count in counts.items():
            left = [sum(start <= p < min(start + 4, 11) for p in places) for places in hidden]
            count[left[0] - 1] += 1
            assert 1 <= abs(left[0] - left[1]) <= 2
    for count in counts.values():
        assert chi_square_p(count, torch.full((len(count),), 1 / len(count))) > ALPHA


def test_each_block_draws_its_own_level() -> None:
    """With t ~ U(0, 1] a block of 4 has 0 to 4 masks, each with probability 1/5, and two blocks of a sample are
    independent: chi-square of the pairs of counts in 2500 samples over 25 cells."""
    pairs = []
    for begin in range(0, 2500, 500):
        masked = collate([sample(i, 8, 0) for i in range(begin, begin + 500)], copies=1).supervised[:, :8]
        pairs.append(masked.view(500, 2, 4).sum(-1))
    counts = torch.cat(pairs)
    assert chi_square_p((5 * counts[:, 0] + counts[:, 1]).bincount(minlength=25), torch.full((25,), 0.04)) > ALPHA


def test_a_sample_draws_one_level_for_all_its_blocks() -> None:
    """As published, if asked: all masked tokens weigh 1 / t, another t for each of 20 samples; and of 400 tokens a share of t
    is masked, to 4.5 standard deviations (false-alarm rate 7e-6 each)."""
    batch = collate([sample(i, 400, 0) for i in range(20)], copies=1, inverse_level=True, noise_per="sample")
    levels = set()
    for masked, weight in zip(batch.supervised[:, :400], batch.weight[:, :400], strict=True):
        assert len(weight[masked].unique()) == 1
        level = 1 / weight[masked][0].item()
        levels.add(level)
        assert masked.double().mean().item() == pytest.approx(level, abs=4.5 * math.sqrt(level * (1 - level) / 400))
    assert len(levels) == 20


def test_noise_is_a_function_of_seed_and_index() -> None:
    samples = [sample(i, 16, 3) for i in range(6)]
    batch = collate(samples, seed=7)
    again = collate(list(reversed(samples)), seed=7)
    assert torch.equal(again.input_ids.flip(0), batch.input_ids)
    assert torch.equal(collate(samples[2:3], seed=7).input_ids[0], batch.input_ids[2])
    assert torch.equal(collate(samples, seed=7, copies=1).input_ids[:, :16], batch.input_ids[:, :16])
    assert not torch.equal(collate(samples, seed=8).supervised, batch.supervised)
    copies = [replace(samples[0], index=i) for i in range(6)]  # one text under six indices
    assert len(collate(copies, seed=7).supervised.unique(dim=0)) == 6
    with pytest.raises(ValueError, match="inverse_level weighs random masks"):
        collate([replace(samples[0], reveal_step=np.zeros(16))], inverse_level=True)
