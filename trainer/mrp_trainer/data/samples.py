"""Training samples: token ids in whole blocks, and for each token whether it is learned (has a
loss)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Sample:
    """A text as token ids, padded or cut to whole blocks.

    Attributes:
        index: Number of the visit, different in every epoch. The noise depends on seed and index.
        ids: int32 [tokens], a whole number of blocks.
        response: bool [tokens], True at learned tokens (those with a loss): those of assistant
            turns or of a completion, and the padding after the end of the text.
        length: Number of tokens before the padding; None for a shortened text, whose end is
            missing.
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
    """Make the training sample of a text; its `index` is 0. The text is given by its ids, [n]; by
    `response`, [n], which is True at learned ids (those with a loss); and by the decoding step that
    revealed each id, [n], -1 in the prompt, if known.

    If the text has `ended`, its last block is filled up with `pad_token_id`, and this padding is
    learned, too. A text without an end is cut to whole blocks, since the rest of its last block is
    unknown. A text longer than `capacity` (a number of tokens, in whole blocks) is cut after the
    last block within the capacity that has learned tokens; its sample has `length` None. Return
    None if no learned token is left.
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
