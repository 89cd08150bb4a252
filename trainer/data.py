"""Samples for block-diffusion training, made on the fly: token ids, noise and their packing are functions of (seed, index)."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase

from modeling_mrp.diffusion_mrp import BLANK, CLEAN_VIEW, NO_VIEW, PackedBatch

from .tasks import Family, Problem, Split, make_problem


@dataclass(frozen=True)
class Sample:
    """A prompt and its response as ids, padded with `pad_token_id` to whole blocks.

    Attributes:
        index: The sample's number; with the seed it decides the noise.
        ids: Token ids, a whole number of blocks.
        response_start: Where the response begins.
        length: Where the text ends and padding begins; None if it fills its blocks.
        reveal_step: When a decoder revealed each token, if one did: higher is later, below 0 in the prompt.
    """

    index: int
    ids: np.ndarray
    response_start: int
    length: int | None = None
    reveal_step: np.ndarray | None = None


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
        max_length: `source` samples are cut to it, or to fewer whole blocks.
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

    def problem(self, index: int) -> Problem:
        """The problem behind an item."""
        draw = np.random.Generator(np.random.Philox(key=[self.seed, index])).random()
        family = self.names[int(np.searchsorted(self.edges, draw, side="right"))]
        return make_problem(family, self.split, index, self.seed)

    def _make(self, index: int) -> Sample:
        problem = self.problem(index)
        prompt, response = encode(problem, self.tokenizer)
        ids = prompt + response
        if problem.family == "source":  # real text goes on behind its cut: there is no end to learn
            ids = ids[: min(len(ids), self.max_length) // self.block_size * self.block_size]
        length = len(ids)
        ids += [self.tokenizer.pad_token_id] * (-length % self.block_size)
        return Sample(index, np.asarray(ids, dtype=np.int64), min(len(prompt), length - 1), length)


class Samples(Protocol):
    """A dataset of samples, counted and by number."""

    def __len__(self) -> int:
        """How many."""
        ...

    def __getitem__(self, index: int) -> Sample:
        """The sample of that number."""
        ...


class LengthBucketSampler(Sampler[int]):
    """Visits the dataset in windows of 16 batches; inside a window samples of like length meet in one batch.

    The order is a function of the window's number alone, so a resumed run sees the same batches.
    """

    def __init__(self, dataset: Samples, batch_size: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        window = 16 * self.batch_size
        for begin in range(0, len(self.dataset), window):
            order = sorted(range(begin, min(begin + window, len(self.dataset))), key=self._cost)
            whole = len(order) // self.batch_size * self.batch_size
            batches = [order[i : i + self.batch_size] for i in range(0, whole, self.batch_size)]
            random.Random(begin).shuffle(batches)
            batches.append(order[whole:])  # the short one comes last, or all behind it would be cut elsewhere
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
    that every response token is learned once a pass. What lies behind the end of the text is always masked and learned as
    blank, as decoding leaves it.

    Of a sample with `reveal_step` each copy shows every block as some step of its decoding left it (without what was
    revealed behind the end): a number of tokens, uniform from 0 to all but one, is revealed, in the decoder's order; two
    copies lie half the range apart.

    Args:
        block_size: Tokens per block.
        mask_token_id: The mask's id.
        pad_token_id: Fills rows up to the longest.
        copies: Noisy copies per sample, 1 or 2.
        inverse_level: Weight each masked token 1 / t as published (halved with two copies), instead of 1.
        seed: With a sample's index, decides its noise.

    A batch is the fields of a `PackedBatch`.
    """

    block_size: int
    mask_token_id: int
    pad_token_id: int
    copies: int = 2
    inverse_level: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.copies not in (1, 2):
            raise ValueError(f"copies is {self.copies}: 1, or 2 that complement each other")

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
            behind = where >= (len(sample.ids) if sample.length is None else sample.length)
            random = np.random.Generator(np.random.Philox(key=[self.seed + (1 << 32), sample.index]))
            level = np.repeat(1 - random.random(count // self.block_size), self.block_size)
            hidden = random.random(count) < level
            for copy in range(self.copies):
                at = slice(copy * max(noisy), copy * max(noisy) + count)
                chosen = (hidden if copy == 0 else ~hidden) & response
                if sample.reveal_step is not None:
                    if self.inverse_level:
                        raise ValueError("inverse_level weighs random masks: samples with reveal_step have none, leave it off")
                    chosen = self._left_by_decoding(sample, first, (level + copy / self.copies) % 1) | (chosen & behind)
                input_ids[row, at] = np.where(chosen | behind, self.mask_token_id, sample.ids[first:])
                target_ids[row, at] = np.where(behind, BLANK, sample.ids[first:])
                positions[row, at] = where
                view[row, at] = copy + 1
                share = level if copy == 0 else 1 - level
                weight[row, at] = np.where(chosen, 1 / (self.copies * share) if self.inverse_level else 1.0, 0.0)
            at = slice(width, width + len(sample.ids))
            input_ids[row, at] = target_ids[row, at] = sample.ids
            positions[row, at] = np.arange(len(sample.ids))
            view[row, at] = CLEAN_VIEW
            response_tokens += int(response.sum())
        ids, targets, where_, views, weights = map(torch.from_numpy, (input_ids, target_ids, positions, view, weight))
        return vars(PackedBatch(ids, targets, where_, views, torch.zeros_like(views), weights, torch.tensor(response_tokens)))

    def _left_by_decoding(self, sample: Sample, first: int, share: np.ndarray) -> np.ndarray:
        """[tokens] bool: response tokens still masked when a `share` of each block's tokens has been revealed."""
        assert sample.reveal_step is not None
        masked = np.zeros(len(share), dtype=bool)
        end = len(sample.ids) if sample.length is None else sample.length
        for begin in range(first, len(sample.ids), self.block_size):
            at = np.arange(max(begin, sample.response_start), min(begin + self.block_size, end))
            order = at[np.argsort(sample.reveal_step[at], kind="stable")]
            masked[order[int(share[begin - first] * len(order)) :] - first] = True
        return masked

    def _first(self, sample: Sample) -> int:
        return sample.response_start // self.block_size * self.block_size
