"""Training samples: token ids in whole blocks, and for each token whether it is learned (has a
loss)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Sample:
    """A text as token ids, padded or cut to whole blocks.

    Attributes:
        index: In a dataset of training rows, a number that differs between samples and, for the
            same sample, between epochs. The noise depends on it and on the seed.
        ids: int32 [tokens], a whole number of blocks.
        response: bool [tokens], True at learned tokens (those with a loss). They are the tokens of
            assistant turns, of a completion or of a decoded response, and the padding after the end
            of the text.
        length: Number of tokens before the padding. None if the text was longer than a sample may
            be, and its end was cut off; there is no padding then.
        reveal_step: int32 [tokens], the decoding step that revealed each token; -1 in the prompt
            and in the padding. None for a text without such steps.
    """

    index: int
    ids: np.ndarray
    response: np.ndarray
    length: int | None = None
    reveal_step: np.ndarray | None = None

    def response_blocks(self, block_size: int) -> np.ndarray:
        """Return the indices, [n], of the blocks that have tokens with a loss. Only these blocks
        are repeated in noisy copies."""
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
    """Make the training sample of a text. Its `index` is 0.

    - A text that fits into `capacity` and has ended: its last block is filled up with
      `pad_token_id`. This padding is learned, too.
    - A text that fits, but has not ended: it is cut to whole blocks, since the rest of its last
      block is unknown.
    - A text that does not fit: it is cut after the last block within `capacity` that has learned
      tokens. The `length` of the sample is None.

    Args:
        ids: [n], the ids of the text.
        response: [n], True at learned ids (those with a loss).
        block_size: Number of tokens per block.
        pad_token_id: Id of the pad token.
        ended: Whether the text ends after its last id. False for a text that was cut in decoding.
        capacity: The largest number of tokens in a sample, a multiple of `block_size`.
        reveal_step: [n], the decoding step that revealed each id, -1 in the prompt; None if
            unknown.

    Returns:
        The sample, or None if no learned token is left.
    """
    is_cut = len(ids) > capacity
    length = min(len(ids), capacity)
    if is_cut or not ended:
        length = length // block_size * block_size
    learned = np.asarray(response[:length], dtype=bool)
    if not learned.any():
        return None
    if is_cut:
        length = (int(learned.nonzero()[0][-1]) // block_size + 1) * block_size
    padding = -length % block_size
    steps = None
    if reveal_step is not None:
        steps = np.asarray([*reveal_step[:length], *[-1] * padding], dtype=np.int32)
    return Sample(
        0,
        np.asarray([*ids[:length], *[pad_token_id] * padding], dtype=np.int32),
        np.asarray([*response[:length], *[True] * padding], dtype=bool),
        None if is_cut else length,
        steps,
    )


def samples_of(row: Sample | Sequence[Sample]) -> Sequence[Sample]:
    """Return the samples of a row as a sequence; a row may be a single sample."""
    return [row] if isinstance(row, Sample) else row
