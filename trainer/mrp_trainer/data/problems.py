"""The synthetic problems as samples, made on the fly: item i is a function of (seed, i)."""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from .samples import Sample, make_sample
from .tasks import Family, Problem, Split, make_problem


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
    """Synthetic problems: item i is the i-th of its family. Behind the last they come again, as other visits.

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

    def __getitem__(self, visit: int) -> Sample:
        if visit < 0:
            raise IndexError(f"visit {visit}: they count from 0")
        return replace(self.get(visit % self.size), index=visit)

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(self.size))

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
        start = min(len(prompt), len(ids) - 1)
        learned = [place >= start for place in range(len(ids))]
        return make_sample(index, ids, learned, self.block_size, self.tokenizer.pad_token_id)
