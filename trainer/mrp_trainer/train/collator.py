"""Noise and packing: samples become the batch of one training pass [x_t | x_0], where x_t are noisy
copies and x_0 is the clean text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from ..data.rows import RecordRows
from ..data.samples import Sample, samples_of
from .losses import BLANK
from .packed import CLEAN_VIEW, NO_VIEW, PackedBatch


@dataclass(frozen=True)
class DiffusionCollator:
    """A collator that adds noise to samples and packs them as [x_t^1 | ... | x_t^copies | x_0]:
    first the noisy copies of each sample, then the clean text. A call takes a list of rows, and
    returns the fields of a `PackedBatch` as a dict by name. A row is a `Sample`, or a list of
    several samples that do not see each other.

    Only blocks with response tokens (those with a loss) are repeated as noisy copies. What a noisy
    copy masks depends on the sample and on `every_state`:

    - By default, each response token is masked with the probability t, the noise level. Each block
      draws its own t ~ U(0, 1], or each sample draws one for all its blocks (as published). With
      two copies, the second one masks exactly the response tokens that the first one shows (its
      level is 1 - t), so that every response token is learned once per pass.
    - A sample with `reveal_step` is masked in the order of its decoding. Let n be the number of
      response tokens in a block before the end of the text, and m = floor(u * n), where u ~ U[0, 1)
      is drawn like t. A noisy copy shows the block as it was after the last decoding step with at
      most m tokens revealed. With two copies, the second one uses u + 1/2 modulo 1.
    - With `every_state`, there is one noisy copy for each state that the target `sequential` passes
      through: copy j, counted from 0, shows the first j tokens of each block. In each of its
      blocks, only the next token has a loss, with weight 1, and only if it is a response token
      before the end of the text. `copies`, `inverse_level` and `reveal_step` then have no effect.

    Positions after the end of the text are always masked, as in decoding, and have the target
    `BLANK`. If a turn ends within a block, the positions after it in that block that are not
    learned are masked, too, but have no loss.

    Args:
        block_size: Number of tokens per block.
        mask_token_id, pad_token_id: Ids of the mask token, and of the token that pads all rows to
            the same length.
        copies: Number of noisy copies per sample, 1 or 2.
        inverse_level: Whether a masked token has the loss weight 1 / t, where t is its noise level,
            as published (halved with two copies). Otherwise its weight is 1.
        noise_per: Whether each `block` or each `sample` draws a noise level.
        seed: Seed of the noise; the noise depends on it and on the index of the sample.
        block_sizes: Divisors of `block_size`; each sample draws its block size from them. If empty,
            all samples have `block_size`.
        every_state: Whether the copies are the states of `sequential`, as many as a block has
            tokens.
        widths: The number of columns of the noisy copies and the number of columns of the clean
            text to which all batches are padded, as attention that is compiled for fixed shapes
            needs it. If None, a batch has the widths of its widest row.

    Raises:
        ValueError: if one of `block_sizes` does not divide `block_size`. A call raises it for a row
            that is wider than `widths`, and, without `every_state`, for samples with `reveal_step`
            if `inverse_level` is set.
    """

    block_size: int
    mask_token_id: int
    pad_token_id: int
    copies: int = 2
    inverse_level: bool = False
    noise_per: Literal["block", "sample"] = "block"
    seed: int = 0
    block_sizes: Sequence[int] = ()
    every_state: bool = False
    widths: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if invalid := [size for size in self.block_sizes if size < 1 or self.block_size % size]:
            raise ValueError(
                f"block_sizes holds {invalid[0]}, which does not divide the model's block_size, "
                f"{self.block_size}"
            )

    def __call__(  # noqa: D102 - the class says it
        self, rows: Sequence[Sample | Sequence[Sample]]
    ) -> dict[str, Any]:
        noisy: list[list[tuple[int, dict[str, Any]]]] = []
        clean: list[list[tuple[int, dict[str, Any]]]] = []
        response_tokens = 0
        for row in rows:
            noisy.append([])
            clean.append([])
            for number, sample in enumerate(samples_of(row)):
                copies, text = self._noisy_and_clean(sample)
                noisy[-1] += [(number, copy) for copy in copies]
                clean[-1].append((number, text))
                response_tokens += int(sample.response.sum())
        # At least one block, of padding if there is nothing to learn: layers cannot take tensors
        # without columns.
        width = max(self.block_size, *map(_column_count, noisy))
        clean_width = max(map(_column_count, clean))
        if self.widths is not None:
            if width > self.widths[0] or clean_width > self.widths[1]:
                raise ValueError(
                    f"a row has {width} noisy and {clean_width} clean columns, and widths are "
                    f"{self.widths}: train and evaluate rows of at most max_length tokens"
                )
            width, clean_width = self.widths
        length = width + clean_width
        shape = (len(rows), length)
        columns = {
            name: np.zeros(shape, np.int64)
            for name in ("position_ids", "block", "sample", "noise_key")
        }
        columns |= {name: np.full(shape, self.pad_token_id) for name in ("input_ids", "target_ids")}
        columns |= {"view": np.full(shape, NO_VIEW), "weight": np.zeros(shape, np.float32)}
        for index in range(len(rows)):
            for begin, segments in ((0, noisy[index]), (width, clean[index])):
                start = begin
                for number, segment in segments:
                    end = start + len(segment["input_ids"])
                    for name, values in segment.items():
                        columns[name][index, start:end] = values
                    columns["sample"][index, start:end] = number
                    start = end
        tensors = {name: torch.from_numpy(values) for name, values in columns.items()}
        return vars(PackedBatch(**tensors, response_tokens=torch.tensor(response_tokens)))

    def _noisy_and_clean(self, sample: Sample) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the columns of each noisy copy of a sample, and the columns of its clean text.
        Columns are arrays or scalars by name of a field of `PackedBatch`."""
        random = np.random.Generator(np.random.Philox(key=[self.seed + (1 << 32), sample.index]))
        size = int(random.choice(self.block_sizes)) if self.block_sizes else self.block_size
        blocks = sample.response_blocks(size)
        positions = (blocks[:, None] * size + np.arange(size)).ravel()
        learned = sample.response[positions].reshape(-1, size)
        answered = (~learned & np.logical_or.accumulate(learned, 1)).ravel()
        past_end = (positions >= _text_length(sample)) | answered
        level = 1 - random.random(len(blocks) if self.noise_per == "block" else 1)
        level = np.broadcast_to(level[:, None], (len(blocks), size)).ravel()
        hidden = random.random(len(positions)) < level
        key = int(random.integers(1 << 32))
        if self.every_state:
            return self._states(sample, positions, size, past_end), self._clean(sample, size, key)
        copies = []
        for copy in range(self.copies):
            share = level if copy == 0 else 1 - level
            chosen = (hidden if copy == 0 else ~hidden) & sample.response[positions]
            if sample.reveal_step is not None:
                if self.inverse_level:
                    raise ValueError(
                        "inverse_level weighs random masks: samples with reveal_step have none, "
                        "leave it off"
                    )
                chosen = self._masked_by_decoding(
                    sample, positions, size, (level + copy / self.copies) % 1
                ) | (chosen & past_end)
            weight = 1 / (self.copies * share) if self.inverse_level else 1.0
            copies.append(
                {
                    "input_ids": np.where(
                        chosen | past_end, self.mask_token_id, sample.ids[positions]
                    ),
                    "target_ids": np.where(past_end, BLANK, sample.ids[positions]),
                    "position_ids": positions,
                    "block": positions // size,
                    "view": copy + 1,
                    "weight": np.where(chosen, weight, 0.0),
                    "noise_key": key,
                }
            )
        return copies, self._clean(sample, size, key)

    def _clean(self, sample: Sample, size: int, key: int) -> dict[str, Any]:
        """Return the columns of a sample's clean text, in blocks of `size`."""
        positions = np.arange(len(sample.ids))
        return {
            "input_ids": sample.ids,
            "target_ids": sample.ids,
            "position_ids": positions,
            "block": positions // size,
            "view": CLEAN_VIEW,
            "noise_key": key,
        }

    def _states(
        self, sample: Sample, positions: np.ndarray, size: int, past_end: np.ndarray
    ) -> list[dict[str, Any]]:
        """Return the columns of each state of `sequential` (`every_state`): copy j shows the first
        j tokens of each block, and has a loss at the token of index j."""
        offset = positions % size
        learned = sample.response[positions] & ~past_end
        states = []
        for shown in range(size):
            masked = past_end | (learned & (offset >= shown))
            states.append(
                {
                    "input_ids": np.where(masked, self.mask_token_id, sample.ids[positions]),
                    "target_ids": np.where(past_end, BLANK, sample.ids[positions]),
                    "position_ids": positions,
                    "block": positions // size,
                    "view": shown + 1,
                    "weight": np.where(learned & (offset == shown), 1.0, 0.0),
                    "noise_key": 0,
                }
            )
        return states

    def _masked_by_decoding(
        self, sample: Sample, positions: np.ndarray, size: int, share: np.ndarray
    ) -> np.ndarray:
        """Mask the tokens of a sample as decoding left them; return bool [tokens], True where a
        token is masked.

        In each block, let m be the number of response tokens before the end of the text, sorted by
        the step that revealed them. The tokens from index floor(share * m) on are masked, and so
        are all others of the same step as the first of these. `share`, [tokens], has the same value
        for all tokens of a block.
        """
        assert sample.reveal_step is not None
        masked = np.zeros(len(positions), dtype=bool)
        end = _text_length(sample)
        for begin in range(0, len(positions), size):
            indices = np.arange(begin, begin + size)
            indices = indices[sample.response[positions[indices]] & (positions[indices] < end)]
            steps = sample.reveal_step[positions[indices]]
            if len(indices):
                masked[indices[steps >= np.sort(steps)[int(share[begin] * len(indices))]]] = True
        return masked


def widths_of(rows: Any, block: int, copies: int) -> tuple[int, int]:
    """Return the number of columns of the noisy copies and the number of columns of the clean text
    that suffice for every row. `rows` is a map-style dataset whose items are a `Sample` or a list
    of several. `block` is the number of tokens per block, `copies` the number of noisy copies."""
    if isinstance(rows, RecordRows):
        blocks, tokens = rows.widest()
        return copies * blocks * block, tokens
    noisy, clean = block, block
    for number in range(len(rows)):  # larger numbers may be later epochs
        samples = samples_of(rows[number])
        blocks = sum(len(sample.response_blocks(block)) for sample in samples)
        noisy = max(noisy, copies * blocks * block)
        clean = max(clean, sum(len(sample.ids) for sample in samples))
    return noisy, clean


def _column_count(segments: Sequence[tuple[int, dict[str, Any]]]) -> int:
    """Return the total number of columns of segments that stand side by side."""
    return sum(len(segment["input_ids"]) for _, segment in segments)


def _text_length(sample: Sample) -> int:
    """Return the number of a sample's tokens before its padding. The sample of a shortened text has
    no padding; return the number of all its tokens."""
    return len(sample.ids) if sample.length is None else sample.length
