"""Samples for block-diffusion training, made on the fly: token ids, noise and their packing are functions of (seed, index)."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from modeling_mrp.diffusion_mrp import CLEAN_VIEW, NO_VIEW, PackedBatch

from .tasks import Family, Problem, Split, make_problem


@dataclass(frozen=True)
class Sample:
    """A prompt and its response as ids, padded with `pad_token_id` to whole blocks.

    Attributes:
        index: The sample's number; with the seed it decides the noise.
        ids: Token ids, a whole number of blocks.
        response_start: Where the response begins.
    """

    index: int
    ids: np.ndarray
    response_start: int


def encode(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Prompt ids and response ids of a problem: a chat turn that ends with the eos token, or plain text for `source`."""
    if problem.family == "source":
        return tokenizer.encode(problem.prompt, add_special_tokens=False), tokenizer.encode(
            problem.answer, add_special_tokens=False
        )
    prompt = tokenizer.apply_chat_template(problem.messages(), add_generation_prompt=True, tokenize=False)
    answer = tokenizer.encode(problem.answer, add_special_tokens=False)
    return tokenizer.encode(prompt, add_special_tokens=False), [*answer, tokenizer.eos_token_id]


class TaskDataset(Dataset[Sample]):
    """An endless-looking dataset of synthetic problems: item i is the i-th problem of its family.

    Args:
        tokenizer: Encodes prompts and answers.
        size: How many samples there are.
        families: The families and their shares of the samples.
        split: Which problems to draw.
        block_size: Samples are padded to whole blocks.
        seed: Chooses the problems.
        max_length: Longer `source` samples are cut.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        size: int,
        families: dict[Family, float],
        split: Split = "train",
        block_size: int = 16,
        seed: int = 0,
        max_length: int = 128,
    ) -> None:
        self.tokenizer = tokenizer
        self.size = size
        self.names = list(families)
        self.edges = np.cumsum([families[name] for name in self.names]) / sum(families.values())
        self.split = split
        self.block_size = block_size
        self.seed = seed
        self.max_length = max_length
        self.get = lru_cache(maxsize=8192)(self._make)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.size:
            raise IndexError(index)
        return self.get(index)

    def _make(self, index: int) -> Sample:
        draw = np.random.Generator(np.random.Philox(key=[self.seed, index])).random()
        family = self.names[int(np.searchsorted(self.edges, draw, side="right"))]
        prompt, response = encode(make_problem(family, self.split, index, self.seed), self.tokenizer)
        ids = (prompt + response)[: self.max_length]
        ids += [self.tokenizer.pad_token_id] * (-len(ids) % self.block_size)
        return Sample(index, np.asarray(ids, dtype=np.int64), min(len(prompt), len(ids) - 1))


class LengthBucketSampler(Sampler[int]):
    """Visits the dataset in windows of 16 batches; inside a window samples of like length meet in one batch.

    The order is a function of the window's number alone, so a resumed run sees the same batches.
    """

    def __init__(self, dataset: TaskDataset, batch_size: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        window = 16 * self.batch_size
        for begin in range(0, len(self.dataset), window):
            order = sorted(range(begin, min(begin + window, len(self.dataset))), key=self._cost)
            batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
            random.Random(begin).shuffle(batches)
            for batch in batches:
                yield from batch

    def _cost(self, index: int) -> int:
        sample = self.dataset[index]
        return 3 * len(sample.ids) - 2 * sample.response_start


@dataclass(frozen=True)
class DiffusionCollator:
    """Noises samples and packs them as [x_t^1 | ... | x_t^n | x_0], one sample a row.

    Only the blocks that hold response tokens are repeated as noisy copies. Each block of each sample draws its own
    level t ~ U(0, 1]; with two copies the second masks exactly what the first reveals (at level 1 - t), so
    that every response token is learned once a pass.

    Args:
        block_size: Tokens per block.
        mask_token_id: The mask's id.
        pad_token_id: Fills rows up to the longest.
        copies: Noisy copies per sample, 1 or 2.
        inverse_level: Weight each masked token 1 / t as published, instead of 1.
        seed: With a sample's index, decides its noise.

    A batch is the fields of a `PackedBatch`.
    """

    block_size: int
    mask_token_id: int
    pad_token_id: int
    copies: int = 2
    inverse_level: bool = False
    seed: int = 0

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:  # noqa: D102 - the class says it
        noisy = [len(s.ids) - self._first(s) for s in samples]
        width = self.copies * max(noisy)
        length = width + max(len(s.ids) for s in samples)
        shape = (len(samples), length)
        input_ids = np.full(shape, self.pad_token_id, np.int64)
        target_ids = input_ids.copy()
        positions = np.zeros(shape, np.int64)
        view = np.full(shape, NO_VIEW, np.int64)
        weight = np.zeros(shape, np.float32)
        response_tokens = 0
        for row, (sample, count) in enumerate(zip(samples, noisy, strict=True)):
            first = self._first(sample)
            where = np.arange(first, len(sample.ids))
            response = where >= sample.response_start
            random = np.random.Generator(np.random.Philox(key=[self.seed + (1 << 32), sample.index]))
            level = np.repeat(1 - random.random(count // self.block_size), self.block_size)
            hidden = random.random(count) < level
            for copy in range(self.copies):
                at = slice(copy * max(noisy), copy * max(noisy) + count)
                chosen = (hidden if copy == 0 else ~hidden) & response
                input_ids[row, at] = np.where(chosen, self.mask_token_id, sample.ids[first:])
                target_ids[row, at] = sample.ids[first:]
                positions[row, at] = where
                view[row, at] = copy + 1
                share = level if copy == 0 else 1 - level
                weight[row, at] = np.where(chosen, 1 / share if self.inverse_level else 1.0, 0.0)
            at = slice(width, width + len(sample.ids))
            input_ids[row, at] = target_ids[row, at] = sample.ids
            positions[row, at] = np.arange(len(sample.ids))
            view[row, at] = CLEAN_VIEW
            response_tokens += int(response.sum())
        ids, targets, where_, views, weights = map(torch.from_numpy, (input_ids, target_ids, positions, view, weight))
        return vars(PackedBatch(ids, targets, where_, views, torch.zeros_like(views), weights, torch.tensor(response_tokens)))

    def _first(self, sample: Sample) -> int:
        return sample.response_start // self.block_size * self.block_size
