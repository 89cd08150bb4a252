"""The training data by hand: samples, their order, and the noisy copies that a batch packs."""

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import ALPHA, BLOCK, MASK, PAD, chi_square_p, collate, sample
from mrp_trainer.data.problems import encode
from mrp_trainer.data.sampler import LengthBucketSampler
from mrp_trainer.data.samples import Sample
from mrp_trainer.data.tasks import Problem
from mrp_trainer.train.losses import BLANK
from transformers import PreTrainedTokenizerFast

# ------------------------------------------------------------------------------------------------ dataset


def test_encode_is_a_chat_turn_or_plain_text(word_tokenizer: PreTrainedTokenizerFast) -> None:
    chat = Problem("math", "Bo has 3 pens .", "#### 3", number=3)
    words = [word_tokenizer.convert_ids_to_tokens(ids) for ids in encode(chat, word_tokenizer)]
    assert words == [["user", ":", "Bo", "has", "3", "pens", ".", "assistant", ":"], ["####", "3", "<end>"]]
    text = Problem("source", "Bo has", "3 pens .")
    words = [word_tokenizer.convert_ids_to_tokens(ids) for ids in encode(text, word_tokenizer)]
    assert words == [["Bo", "has"], ["3", "pens", "."]]


class Lengths:
    """Stands for a dataset: samples of given lengths and response starts."""

    def __init__(self, lengths: Iterable[tuple[int, int]]) -> None:
        self.samples = [Sample(i, np.zeros(length), np.arange(length) >= start) for i, (length, start) in enumerate(lengths)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, visit: int) -> Sample:
        return self.samples[visit % len(self.samples)]

    def sampler(self, batch_size: int) -> LengthBucketSampler:
        return LengthBucketSampler(self, batch_size)  # type: ignore[arg-type]


def random_lengths(count: int) -> Lengths:
    rng = np.random.default_rng(0)
    return Lengths((16 * int(rng.integers(2, 9)), int(rng.integers(1, 32))) for _ in range(count))


@pytest.mark.parametrize("size", [1, 3, 47, 48, 49, 200])
def test_the_sampler_visits_each_index_once(size: int) -> None:
    """With batches of 3 a window is 48 samples, and an epoch takes from the next what is missing to whole batches."""
    sampler = random_lengths(size).sampler(3)
    whole = -(-size // 3) * 3
    order = list(sampler)
    assert sorted(order) == list(range(whole))
    assert len(sampler) == whole
    assert list(sampler) == order  # a resumed run sees the same batches
    sampler.set_epoch(2)
    assert sorted(sampler) == list(range(2 * whole, 3 * whole))
    if size == 200:
        assert order != sorted(order)
        for begin in range(0, 192, 48):
            assert sorted(order[begin : begin + 48]) == list(range(begin, begin + 48))
        assert list(random_lengths(100).sampler(3))[:96] == order[:96]


def test_samples_of_like_cost_meet_in_a_batch() -> None:
    """A packed row holds two noisy copies of the response's blocks and the whole text: 3 * length - 2 * prompt."""
    dataset = random_lengths(64)
    cost = [3 * len(s.ids) - 2 * int(s.response.argmax()) for s in dataset.samples]
    order = list(dataset.sampler(4))
    batches = sorted(sorted(cost[i] for i in order[begin : begin + 4]) for begin in range(0, 64, 4))
    assert sum(batches, []) == sorted(cost)  # noqa: RUF017 - 16 short lists
    ascending = sorted(range(64), key=lambda i: cost[i])
    assert order != ascending  # short batches do not all come first


# ------------------------------------------------------------------------------------------------ collator


def test_the_layout_of_a_batch() -> None:
    """A: 12 tokens, the response from 6 on, so its noisy blocks begin at 4. B: 8 tokens, the response from 4 on."""
    a, b = sample(0, 12, 6), sample(1, 8, 4)
    batch = collate([a, b])
    a_noisy, b_noisy = list(range(4, 12)), [4, 5, 6, 7]
    assert batch.view.tolist() == [
        [1] * 8 + [2] * 8 + [0] * 12,
        [1] * 4 + [2] * 4 + [-1] * 8 + [0] * 8 + [-1] * 4,
    ]
    assert batch.position_ids.tolist() == [
        a_noisy + a_noisy + list(range(12)),
        b_noisy + b_noisy + [0] * 8 + list(range(8)) + [0] * 4,
    ]
    assert batch.sample.tolist() == [[0] * 28] * 2
    assert batch.response_tokens == 6 + 4
    a_ids, b_ids = a.ids.tolist(), b.ids.tolist()
    assert batch.target_ids.tolist() == [
        a_ids[4:] + a_ids[4:] + a_ids,
        b_ids[4:] + b_ids[4:] + [PAD] * 8 + b_ids + [PAD] * 4,
    ]
    masked = batch.input_ids == MASK
    assert torch.equal(batch.input_ids[~masked], batch.target_ids[~masked])
    assert torch.equal(masked, batch.supervised)
    assert batch.weight.unique().tolist() == [0, 1]
    single = collate([a, b], copies=1)
    assert single.view.tolist() == [[1] * 8 + [0] * 12, [1] * 4 + [-1] * 4 + [0] * 8 + [-1] * 4]
    assert torch.equal(single.input_ids[0, :8], batch.input_ids[0, :8])  # the same noise


def test_behind_the_end_all_is_masked_and_blank() -> None:
    """Response tokens 3 to 8 and the rest of the third block: masked in both copies, learned once, as blank."""
    ids = np.arange(20, 32)
    for index in range(30):
        batch = collate([Sample(index, ids, np.arange(12) >= 3, 9)])
        noisy = batch.view[0] > 0
        behind = noisy & (batch.position_ids[0] >= 9)
        assert (batch.input_ids[0, behind] == MASK).all()
        assert (batch.target_ids[0, behind] == BLANK).all()
        assert (batch.target_ids[0, ~behind] != BLANK).all()
        supervised = batch.position_ids[0, batch.supervised[0]].sort().values
        assert supervised.tolist() == list(range(3, 12))
        assert batch.response_tokens == 9


def test_what_follows_an_answer_in_its_block_is_hidden() -> None:
    """Two turns, positions 2 to 4 and 9: decoding the first would not know of 5, 6 and 7, nor of 10 and 11 in the second. The
    block between is not repeated, and the clean half shows everything."""
    response = np.isin(np.arange(16), [2, 3, 4, 13])
    for index in range(20):
        item = Sample(index, np.arange(20, 36), response)
        batch = collate([item])
        assert batch.position_ids[0, batch.view[0] == 1].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15]
        for copy in (1, 2):
            here = batch.view[0] == copy
            masked = set(batch.position_ids[0, here & (batch.input_ids[0] == MASK)].tolist())
            assert {5, 6, 7, 14, 15} <= masked <= {5, 6, 7, 14, 15, 2, 3, 4, 13}
        assert sorted(batch.position_ids[0, batch.supervised[0]].tolist()) == [2, 3, 4, 13]
        assert (batch.target_ids[0, batch.supervised[0]] != BLANK).all()
        assert batch.input_ids[0, batch.view[0] == 0].tolist() == item.ids.tolist()


def test_recorded_steps_give_the_states_that_decoding_met() -> None:
    """Every number of revealed tokens of a block is equally likely, always the earliest ones; chi-square over 4 and 3."""
    steps = np.array([-1, -1, -1, -1, 2, 0, 3, 1, 6, 4, 5, -1])  # the last is behind the end
    order = {4: [5, 7, 4, 6], 8: [9, 10, 8]}  # positions by block, in the order of their steps
    apart = {4: 2, 8: 2}  # half of 4; half of 3, rounded either way
    counts = {4: torch.zeros(4), 8: torch.zeros(3)}
    for index in range(600):
        batch = collate([Sample(index, np.arange(20, 32), np.arange(12) >= 4, 11, steps)])
        revealed: dict[int, list[int]] = {4: [], 8: []}
        assert batch.position_ids[0, batch.supervised[0]].tolist().count(11) == 1  # behind the end: once over both copies
        for copy in (1, 2):
            masked = set(batch.position_ids[0, (batch.view[0] == copy) & (batch.input_ids[0] == MASK)].tolist()) - {11}
            for start, places in order.items():
                left = len(masked & set(places))
                assert masked & set(places) == set(places[len(places) - left :])
                counts[start][left - 1] += copy == 1
                revealed[start].append(len(places) - left)
            assert batch.supervised[0, batch.view[0] == copy].sum() >= len(masked)
        assert all(1 <= abs(a - b) <= apart[start] for start, (a, b) in revealed.items())
    for start, count in counts.items():
        assert chi_square_p(count, torch.full((len(order[start]),), 1 / len(order[start]))) > ALPHA


def test_what_one_step_revealed_stays_together() -> None:
    """Two steps of two positions: a copy shows all four masked, or the two of the second step."""
    steps = np.array([-1, -1, -1, -1, 7, 3, 3, 7])
    seen = set()
    for index in range(40):
        batch = collate([Sample(index, np.arange(20, 28), np.arange(8) >= 4, 8, steps)])
        for copy in (1, 2):
            seen.add(tuple(batch.position_ids[0, (batch.view[0] == copy) & (batch.input_ids[0] == MASK)].tolist()))
    assert seen == {(4, 5, 6, 7), (4, 7)}  # a false alarm in 2^39


def test_inverse_levels() -> None:
    """A block's masked tokens weigh 1 / 2t in the first copy and 1 / 2(1 - t) in the second, a t for each block."""
    batch = collate([sample(i, 40, 0) for i in range(20)], inverse_level=True)
    assert torch.equal(batch.supervised, batch.input_ids == MASK)
    checked, levels = 0, set()
    for row in range(20):
        for block in range(10):
            here = (batch.position_ids[row] // BLOCK == block) & batch.supervised[row]
            first, second = (batch.weight[row, here & (batch.view[row] == copy)].unique() for copy in (1, 2))
            assert len(first) <= 1
            assert len(second) <= 1
            if len(first) and len(second):
                assert (1 / first + 1 / second).item() == pytest.approx(2, abs=1e-5)
                levels.add(first.item())
                checked += 1
    assert checked == len(levels) > 50


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
    assert not torch.equal(collate(samples, seed=8).supervised, batch.supervised)
    copies = [replace(samples[0], index=i) for i in range(6)]  # one text under six indices
    assert len(collate(copies, seed=7).supervised.unique(dim=0)) == 6
