"""What is trained on: token ids of whole blocks, and which of them are learned."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Sample:
    """A text as ids, padded to whole blocks.

    Attributes:
        index: The visit's number (another one in every epoch); with the seed it decides the noise.
        ids: [tokens] int64, a whole number of blocks.
        response: [tokens] bool, what is learned: the assistant's turns, and what lies behind the end of the text.
        length: Where the text ends and padding begins; None if it fills its blocks or goes on behind them.
        reveal_step: [tokens] when a decoder revealed each token, if one did: higher is later, below 0 in the prompt.
    """

    index: int
    ids: np.ndarray
    response: np.ndarray
    length: int | None = None
    reveal_step: np.ndarray | None = None

    def response_blocks(self, block_size: int) -> np.ndarray:
        """[n] numbers of the blocks that hold something to learn: the ones a noisy copy repeats."""
        return np.flatnonzero(self.response.reshape(-1, block_size).any(1))


def make_sample(
    index: int,
    ids: Sequence[int],
    response: Sequence[bool],
    block_size: int,
    pad_token_id: int,
    reveal_step: Sequence[int] | None = None,
) -> Sample:
    """A sample of a text that ends, [n] ids: `pad_token_id` fills its last block, and is learned as what lies behind the
    end."""
    padding = -len(ids) % block_size
    return Sample(
        index,
        np.asarray([*ids, *[pad_token_id] * padding], dtype=np.int64),
        np.asarray([*response, *[True] * padding], dtype=bool),
        len(ids),
        None if reveal_step is None else np.asarray([*reveal_step, *[-1] * padding]),
    )


def decoded_sample(
    index: int,
    ids: Sequence[int],
    response_start: int,
    reveal_step: Sequence[int],
    block_size: int,
    end_token_ids: Collection[int],
    pad_token_id: int,
    capacity: int | None = None,
) -> Sample | None:
    """A sample of a text that a decoder wrote, with the steps in which it did.

    A text without an end, which ran into its limit, is kept, cut to whole blocks: what would have followed in the last one is
    not known. So is one that is longer than `capacity`.

    Args:
        index: The visit's number.
        ids: [n] of prompt and response.
        response_start: How many of them are the prompt's.
        reveal_step: [n - response_start] the step that revealed each token of the response.
        block_size: Tokens per block.
        end_token_ids: What ends a text.
        pad_token_id: Fills the last block of one that ends.
        capacity: Whole blocks of tokens that a sample may have.

    Returns:
        The sample; None if nothing of the response is left.
    """
    room = len(ids) if capacity is None else min(len(ids), capacity)
    ended = room == len(ids) and ids[-1] in end_token_ids
    length = room if ended else room // block_size * block_size
    if length <= response_start:
        return None
    response = [place >= response_start for place in range(length)]
    steps = [*[-1] * response_start, *reveal_step]
    sample = make_sample(index, ids[:length], response, block_size, pad_token_id, steps[:length])
    return sample if room == len(ids) else replace(sample, length=None)


class Samples(Protocol):
    """A dataset of rows by number: a sample, or several that share a row.

    Numbers go on when all rows have been visited: row i is asked for as i, len + i, 2 * len + i and so on, and carries that
    number as its `Sample.index`.
    """

    def __len__(self) -> int:
        """How many rows an epoch has."""
        ...

    def __getitem__(self, visit: int) -> Sample | Sequence[Sample]:
        """The row of that number."""
        ...


def samples_of(row: Sample | Sequence[Sample]) -> Sequence[Sample]:
    """The samples that share a row."""
    return [row] if isinstance(row, Sample) else row
