"""Masks on the device of the tokens that constraints allow."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..rules.constraint import TokenSet
from .uploads import upload

# Number of sets on the device; with 150,000 tokens they take 75 MB.
_MASKS_ON_DEVICE = 512


class TokenMasks:
    """Stores boolean masks over the vocabulary on the device, one for each set of tokens. A mask is
    made when its set is first used, and then kept, because a call uses the same sets repeatedly."""

    def __init__(self) -> None:
        self._index: dict[TokenSet, int] = {}
        self._table: Tensor | None = None  # grown by doubling; its first rows are in use

    def bar(self, logits: Tensor, sets: Sequence[TokenSet | None]) -> Tensor:
        """Return logits [n, vocab] that are -inf, in each row, at every token outside the row's set
        in `sets`. None in place of a set allows all tokens."""
        rows = []
        members = []
        for row, token_set in enumerate(sets):
            if token_set is not None:
                rows.append(row)
                members.append(token_set)
        if not rows:
            return logits
        indices = self._indices_of(members, logits)
        assert self._table is not None
        allowed = torch.ones_like(logits, dtype=torch.bool)
        allowed[upload(rows, logits.device)] = self._table[indices]
        return logits.masked_fill(~allowed, -torch.inf)

    def _indices_of(self, sets: Sequence[TokenSet], logits: Tensor) -> Tensor:
        """Return the index of each set in the table of masks, int64 [n]. Sets that are not in the
        table yet are added first. The table is on the device of `logits`, and has a column for each
        token of their vocabulary."""
        new = list(dict.fromkeys(sets).keys() - self._index.keys())
        if len(self._index) + len(new) > _MASKS_ON_DEVICE:
            self._index.clear()
            self._table = None
            new = list(dict.fromkeys(sets))
        if new:
            begin = len(self._index)
            for token_set in new:
                self._index[token_set] = len(self._index)
            end = len(self._index)
            if self._table is None or end > len(self._table):
                rows_of_table = max(end, min(max(16, 2 * end), _MASKS_ON_DEVICE))
                larger = torch.zeros(
                    rows_of_table, logits.shape[1], dtype=torch.bool, device=logits.device
                )
                if self._table is not None:
                    larger[:begin] = self._table[:begin]
                self._table = larger
            added = torch.stack([torch.from_numpy(token_set.is_member()) for token_set in new])
            self._table[begin:end] = added.to(logits.device)
        return upload([self._index[token_set] for token_set in sets], logits.device)
