"""Samples that are trained on: token ids of whole blocks, and which of them are learned."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Sample:
    """A text as ids, padded to whole blocks.

    Attributes:
        index: The visit's number (another one in every epoch); with the seed it decides the noise.
        ids: [tokens] int32, a whole number of blocks.
        response: [tokens] bool, what is learned: the assistant's turns, and the padding after the end of the text.
        length: The number of tokens before padding; None if there is none, as in a text that was cut.
        reveal_step: [tokens] int32, the step at which a decoder revealed each token, below 0 in the prompt; None if none did.
    """

    index: int
    ids: np.ndarray
    response: np.ndarray
    length: int | None = None
    reveal_step: np.ndarray | None = None

    def response_blocks(self, block_size: int) -> np.ndarray:
        """Return the numbers [n] of the blocks that hold something to learn, which noisy copies repeat."""
        return np.flatnonzero(self.response.reshape(-1, block_size).any(1))


def make_sample(
    ids: Sequence[int],
    response: Sequence[bool],
    block_size: int,
    pad_token_id: int,
    ended: bool,
    capacity: int,
    reveal_step: Sequence[int] | None = None,
) -> Sample | None:
    """Make the sample, for visit 0, of a text: its ids [n], what is learned [n], and when a decoder revealed each token [n].

    The last block of a text that `ended` is filled with `pad_token_id`, which is learned as padding after the end. Other texts
    are cut to whole blocks, as the rest of the last one is unknown. So are those longer than `capacity`, a number of tokens in
    whole blocks: their sample has no `length`, and no blocks after the last with something to learn. None if nothing is left to
    learn.
    """
    is_cut, length = len(ids) > capacity, min(len(ids), capacity)
    if is_cut or not ended:
        length = length // block_size * block_size
    learned = np.asarray(response[:length], dtype=bool)
    if not learned.any():
        return None
    if is_cut:
        length = (int(learned.nonzero()[0][-1]) // block_size + 1) * block_size
    padding = -length % block_size
    return Sample(
        0,
        np.asarray([*ids[:length], *[pad_token_id] * padding], dtype=np.int32),
        np.asarray([*response[:length], *[True] * padding], dtype=bool),
        None if is_cut else length,
        None if reveal_step is None else np.asarray([*reveal_step[:length], *[-1] * padding], dtype=np.int32),
    )


def samples_of(row: Sample | Sequence[Sample]) -> Sequence[Sample]:
    """Return the samples of a row, which is one sample or several."""
    return [row] if isinstance(row, Sample) else row
